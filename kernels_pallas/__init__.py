"""Attention and sparse kernels: the ground floor, which imports jax only."""

from kernels_pallas.graph import diffuse, ell_sddmm, ell_spmm, segment_pool
from kernels_pallas.grouped_matmul import gmm
from kernels_pallas.rectangle_attention import hstu_attention, xor_attention
from kernels_pallas.softmax_attention import attention

__all__ = [
  'attention',
  'diffuse',
  'ell_sddmm',
  'ell_spmm',
  'gmm',
  'hstu_attention',
  'segment_pool',
  'xor_attention',
]

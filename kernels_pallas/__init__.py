"""Attention and sparse kernels: the ground floor, which imports jax only."""

from kernels_pallas.graph import segment_pool
from kernels_pallas.rectangle_attention import hstu_attention, xor_attention
from kernels_pallas.softmax_attention import attention

__all__ = ['attention', 'hstu_attention', 'segment_pool', 'xor_attention']

"""Message passing on patch graphs stored as tables of neighbours (ELL)."""

from kernels_pallas.graph.api import (
  ell_diffuse,
  ell_diffuse2,
  ell_sddmm,
  ell_spmm,
  ell_transpose,
)
from kernels_pallas.graph.halo import halo_exchange, shard_graph
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.pooling import Gate, segment_pool

__all__ = [
  'Gate',
  'PatchGraph',
  'ell_diffuse',
  'ell_diffuse2',
  'ell_sddmm',
  'ell_spmm',
  'ell_transpose',
  'halo_exchange',
  'segment_pool',
  'shard_graph',
]

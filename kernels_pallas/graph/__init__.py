"""Message passing on patch graphs stored as tables of neighbours (ELL)."""

from kernels_pallas.graph.api import (
  check_edges,
  diffuse,
  ell_diffuse,
  ell_diffuse2,
  ell_sddmm,
  ell_spmm,
  ell_transpose,
)
from kernels_pallas.graph.block_sparse import (
  TiledGraph,
  TiledLayout,
  tiled_layout,
)
from kernels_pallas.graph.halo import halo_exchange, shard_graph
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.pooling import Gate, segment_pool
from kernels_pallas.graph.raster import (
  RasterGraph,
  RasterLayout,
  from_raster,
  raster_layout,
  to_raster,
)

__all__ = [
  'Gate',
  'PatchGraph',
  'RasterGraph',
  'RasterLayout',
  'TiledGraph',
  'TiledLayout',
  'check_edges',
  'diffuse',
  'ell_diffuse',
  'ell_diffuse2',
  'ell_sddmm',
  'ell_spmm',
  'ell_transpose',
  'from_raster',
  'halo_exchange',
  'raster_layout',
  'segment_pool',
  'shard_graph',
  'tiled_layout',
  'to_raster',
]

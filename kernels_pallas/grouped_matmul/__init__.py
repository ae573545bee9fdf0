"""Matrix products in which each row meets the matrix of its own group."""

from kernels_pallas.grouped_matmul.api import (
  block_gmm,
  block_tgmm,
  check_group_sizes,
  gmm,
  tgmm,
)
from kernels_pallas.grouped_matmul.layout import (
  BlockLayout,
  block_layout,
  gather_rows,
  scatter_rows,
)

__all__ = [
  'BlockLayout',
  'block_gmm',
  'block_layout',
  'block_tgmm',
  'check_group_sizes',
  'gather_rows',
  'gmm',
  'scatter_rows',
  'tgmm',
]

"""A patch graph on its whole grid, empty cells included.

On a grid each neighbour is a shift, which needs no gather: the layout for TPUs,
at the price of the empty cells.

Axes: N patches, R rows and C columns of the grid (C in whole eights), K = 8
directions, D features.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = [
  'DIRECTIONS',
  'RasterGraph',
  'RasterLayout',
  'from_raster',
  'raster_layout',
  'shift',
  'to_raster',
]

# Row and column step of slot k; slot 7 - k is the way back.
DIRECTIONS = tuple(
  (i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if (i, j) != (0, 0)
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RasterGraph(PatchGraph):
  """A patch graph whose nodes are the cells of a grid, row by row.

  Slot k leads to the cell in direction k of `DIRECTIONS`, if there is an edge.

  Attributes:
    grid: R and C, where R C is the number of nodes.
  """

  grid: tuple[int, int] = dataclasses.field(
    default=(0, 0), metadata={'static': True}
  )


class RasterLayout(NamedTuple):
  """Where the patches of one graph lie on its grid.

  Attributes:
    graph: over the R C cells.
    cell: [N] int32, the cell of each patch.
    patch: [R C] int32, the patch in each cell, N in an empty one.
    fill: N / (R C), in (0, 1].
    waste: cells that are computed for nothing, R C / N - 1 per patch.
    edges: share of the R C K slots that hold an edge.
  """

  graph: RasterGraph
  cell: np.ndarray
  patch: np.ndarray
  fill: float
  waste: float
  edges: float


def raster_layout(ij: np.ndarray, connectivity: int = 8) -> RasterLayout:
  """Joins patches that touch on a grid, and lays them out on all of it.

  Args:
    ij: [N, 2] integer, row and column of each patch; any order.
    connectivity: 8 (edges and corners) or 4 (edges).

  Returns:
    The layout, NumPy.

  Raises:
    ValueError: on a wrong shape, no patch, positions that repeat or an unknown
      connectivity.
    TypeError: if the positions are not integers.
  """
  ij = np.asarray(ij)
  if ij.ndim != 2 or ij.shape[1] != 2 or not len(ij):
    raise ValueError(
      f'ij has shape {ij.shape}, expected [N, 2] with N >= 1: row and column '
      'per patch'
    )
  if not np.issubdtype(ij.dtype, np.integer):
    raise TypeError(
      f'ij has dtype {ij.dtype}, expected integers; divide positions by the '
      'distance of two neighbours and round'
    )
  if connectivity not in (4, 8):
    raise ValueError(f'connectivity={connectivity!r} must be 4 or 8')
  count = len(ij)
  ij = ij.astype(np.int64) - ij.min(0)
  rows, columns = (int(x) + 1 for x in ij.max(0))
  columns = -(-columns // 8) * 8
  cell = (ij[:, 0] * columns + ij[:, 1]).astype(np.int32)
  patch = np.full(rows * columns, count, np.int32)
  patch[cell] = np.arange(count)
  again = np.flatnonzero(patch[cell] != np.arange(count))
  if len(again):
    raise ValueError(
      f'{len(again)} patches repeat a position, for example patch {again[0]} '
      f'at {ij[again[0]].tolist()}; drop the repeats, or lay out each slide on '
      'its own'
    )
  full = np.pad((patch < count).reshape(rows, columns), 1)
  emask = np.zeros((rows, columns, 8), bool)
  for k, (i, j) in enumerate(DIRECTIONS):
    if connectivity == 8 or i * j == 0:
      near = full[1 + i : 1 + i + rows, 1 + j : 1 + j + columns]
      emask[..., k] = full[1:-1, 1:-1] & near
  emask = emask.reshape(-1, 8)
  own = np.arange(rows * columns)[:, None]
  step = np.array([i * columns + j for i, j in DIRECTIONS])
  nbr = np.where(emask, own + step, own).astype(np.int32)
  rev = np.where(emask, 7 - np.arange(8), 0).astype(np.int32)
  # NumPy leaves: a builder runs on the host and touches no device.
  leaves: Any = {'nbr': nbr, 'emask': emask, 'rev': rev}
  return RasterLayout(
    RasterGraph(**leaves, grid=(rows, columns)),
    cell,
    patch,
    count / patch.size,
    patch.size / count - 1,
    float(emask.mean()),
  )


@jax.custom_vjp
def to_raster(x: jax.Array, layout: RasterLayout) -> jax.Array:
  """Features into their cells, zeros into the empty ones.

  Each direction is the gradient of the other, and a gather.

  Args:
    x: [N, D].
    layout: of the N patches.

  Returns:
    [R C, D].
  """
  return jnp.take(x, layout.patch, axis=0, mode='fill', fill_value=0)


@jax.custom_vjp
def from_raster(x: jax.Array, layout: RasterLayout) -> jax.Array:
  """Features of the patches out of their cells; [R C, D] -> [N, D]."""
  return jnp.take(x, layout.cell, axis=0, mode='clip')


to_raster.defvjp(
  lambda x, layout: (to_raster(x, layout), layout),
  lambda layout, g: (from_raster(g, layout), None),
)
from_raster.defvjp(
  lambda x, layout: (from_raster(x, layout), layout),
  lambda layout, g: (to_raster(g, layout), None),
)


def shift(x: jax.Array, k: int) -> jax.Array:
  """What lies in direction k of each cell, zeros outside the grid.

  Args:
    x: [..., R, C, D].
    k: of `DIRECTIONS`.
  """
  i, j = DIRECTIONS[k]
  lead = [(0, 0)] * (x.ndim - 3)
  padded = jnp.pad(x, [*lead, (1, 1), (1, 1), (0, 0)])
  rows, columns = x.shape[-3:-1]
  return padded[..., 1 + i : 1 + i + rows, 1 + j : 1 + j + columns, :]

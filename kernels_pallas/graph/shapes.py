"""Realistic shapes of patch graphs, shared by tests and benchmarks.

Axes: N patches, K = 8 slots, D features per patch, on a grid of rows x columns.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph.block_sparse import TiledGraph, tiled_layout
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.raster import RasterGraph, raster_layout
from kernels_pallas.tuning.cases import Case

__all__ = ['SHAPES', 'GraphShape', 'cases', 'tissue_graph', 'tissue_mask']


class GraphShape(NamedTuple):
  """A grid, the patches on it that hold tissue, and features per patch."""

  rows: int
  columns: int
  patches: int
  features: int


SHAPES = {
  # A kidney resection cut into patches of 256 pixels: 40 % of its grid.
  'resection': GraphShape(188, 178, 13_472, 128),
  # Four of them as one bag.
  'four_resections': GraphShape(376, 356, 53_888, 128),
  # The largest bag that a single device should train on.
  'giant': GraphShape(512, 490, 100_000, 128),
  # A biopsy core.
  'biopsy': GraphShape(96, 24, 1_200, 128),
  # Soft regions instead of features.
  'regions': GraphShape(188, 178, 13_472, 8),
  # For tests.
  'tiny': GraphShape(12, 10, 70, 5),
}


def tissue_mask(
  rows: int, columns: int, patches: int, seed: int = 0
) -> np.ndarray:
  """A tissue-like set of grid cells: a few blobs with ragged borders.

  Args:
    rows: height of the grid.
    columns: width of the grid.
    patches: number of cells to choose.
    seed: of the random field.

  Returns:
    [patches, 2] int32, row and column, in row-major order.

  Raises:
    ValueError: if the grid has fewer cells than patches.
  """
  if not 0 <= patches <= rows * columns:
    raise ValueError(
      f'patches={patches} must lie in [0, {rows * columns}], the cells of a '
      f'grid of {rows} x {columns}'
    )
  rng = np.random.default_rng(seed)
  # Low frequencies make the blobs, a little white noise the ragged borders.
  frequency = np.hypot(
    np.fft.fftfreq(rows)[:, None] * rows, np.fft.rfftfreq(columns) * columns
  )
  noise = np.fft.rfft2(rng.normal(size=(rows, columns)))
  field = np.fft.irfft2(noise / (1 + frequency) ** 2, (rows, columns))
  field = field / field.std() + rng.normal(size=field.shape) * 0.08
  chosen = np.sort(np.argsort(field.ravel(), kind='stable')[::-1][:patches])
  return np.stack(np.divmod(chosen, columns), 1).astype(np.int32)


def tissue_graph(shape: GraphShape) -> PatchGraph:
  """Joins the patches of `tissue_mask`, slot k in direction k; NumPy leaves."""
  layout = raster_layout(tissue_mask(shape.rows, shape.columns, shape.patches))
  graph, cell = layout.graph, layout.cell
  leaves: Any = {
    'nbr': layout.patch[graph.nbr[cell]],
    'emask': graph.emask[cell],
    'rev': graph.rev[cell],
  }
  return PatchGraph(**leaves)


def _table(graph: PatchGraph) -> tuple[np.ndarray, ...]:
  leaves: Any = graph.nbr, graph.emask, graph.rev
  return leaves


def _call(name, count, make_graph, blocks, implementation):
  """A function of `count` floats and the arrays of the graph."""
  from kernels_pallas.graph import api

  del blocks
  how = {'implementation': implementation}

  def function(*operands):
    floats, graph = operands[:count], make_graph(*operands[count:])
    if name == 'diffuse':
      wa, wb, x = floats
      return api.diffuse(graph, wa, wb, 0.3, 0.2, x, **how)
    return getattr(api, name)(graph, *floats, **how)

  return function


def _spmm(w, x, nbr, emask, rev, *_):
  del rev
  return jnp.einsum('nk,nkd->nd', jnp.where(emask, w, 0), x[nbr])


def _sddmm(a, b, nbr, emask, rev):
  del rev
  return jnp.where(emask, jnp.einsum('nd,nkd->nk', a, b[nbr]), 0)


def _diffuse(wa, wb, x, nbr, emask, rev, *_):
  del rev
  w = jnp.where(emask, 0.3 * wa + 0.2 * wb, 0).astype(x.dtype)
  return jnp.einsum('nk,nkd->nd', w, x[nbr] - x[:, None])


def _case(
  op: str,
  name: str,
  shape: GraphShape,
  floats: tuple[tuple[int, ...], ...],
  graph: tuple[np.ndarray, ...],
  make_graph: Callable[..., Any],
  dtype: str = 'bfloat16',
) -> Case:
  """Flops and bytes are those of the patches, whatever the layout adds."""
  n, k, d = shape.patches, 8, shape.features
  weights, rows = (1, 2) if op != 'diffuse' else (2, 2)
  size = jnp.dtype(dtype).itemsize
  plain = {'ell_spmm': _spmm, 'ell_sddmm': _sddmm, 'diffuse': _diffuse}
  return Case(
    op=op,
    shape=name,
    options={},
    make=functools.partial(_call, op, len(floats), make_graph),
    reference=plain[op],
    operands=(*(jax.ShapeDtypeStruct(x, dtype) for x in floats), *graph),
    flops=2.0 * weights * n * k * d,
    bytes_moved=size * (rows * n * d + weights * n * k) + 9.0 * n * k,
    blocks={},
  )


def cases() -> list[Case]:
  """Tissue; messages in bfloat16, a step of diffusion in float32.

  The layouts for TPUs run the same step: on all cells of the grid, and on tiles
  of 128 patches.
  """
  found = []
  for name in ('tiny', 'biopsy', 'resection'):
    shape = SHAPES[name]
    n, d = shape.patches, shape.features
    table = _table(tissue_graph(shape))
    more = name, shape
    edges, rows = (n, 8), (n, d)
    step = functools.partial(_case, 'diffuse', dtype='float32')
    found += [
      _case('ell_spmm', *more, (edges, rows), table, PatchGraph),
      _case('ell_sddmm', *more, (rows, rows), table, PatchGraph),
      step(*more, (edges, edges, rows), table, PatchGraph),
    ]
    on_grid = raster_layout(
      tissue_mask(shape.rows, shape.columns, shape.patches)
    ).graph
    cells = on_grid.num_nodes
    found.append(
      step(
        f'{name}, raster',
        shape,
        ((cells, 8), (cells, 8), (cells, d)),
        _table(on_grid),
        functools.partial(RasterGraph, grid=on_grid.grid),
      )
    )
    tiled = tiled_layout(tissue_graph(shape)).graph
    places = tiled.num_nodes
    lists: Any = tiled.row, tiled.column
    found.append(
      step(
        f'{name}, tiles',
        shape,
        ((places, 8), (places, 8), (places, d)),
        (*_table(tiled), *lists),
        lambda nbr, emask, rev, row, column: TiledGraph(
          nbr, emask, rev, row=row, column=column
        ),
      )
    )
  return found

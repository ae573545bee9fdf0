"""Operations on rasterised patch graphs for TPUs (Mosaic).

Axes: B graphs, n blocks of r rows of a grid of R x C cells, K = 8 directions, D
features, M weights; T rows of the table of weights.

Blocks of rows pass through a window in VMEM that holds one block and a row on
either side, so that each feature comes from memory once. A neighbour is a shift
of the window. The weights of a row of cells lie in HBM as a table [T, C], whose
transpose puts a cell's weights into the sublane of its features.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import in_32_bits
from kernels_pallas.common.padding import pad_axis, round_up
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.raster import DIRECTIONS, RasterGraph, shift

__all__ = [
  'gated_adjoint',
  'gated_coefficients',
  'gated_deltas',
  'spmm',
  'takes',
]

LANES = 128
# Empty columns on either side of the window.
_EDGE = 8
# Numbers of a block, and columns that are summed in registers.
_BLOCK, _COLUMNS = 2**18, 64

Arrays = Sequence[jax.Array]


class _Plan(NamedTuple):
  """Sizes of a call: C, r, n, M of the module docstring."""

  columns: int
  r: int
  n: int
  weights: int


def takes(graph: PatchGraph) -> bool:
  """Whether the neighbours are shifts."""
  return isinstance(graph, RasterGraph) and graph.axis_name is None


def _grid(graph: Any, x: jax.Array) -> jax.Array:
  """[..., R C, D] -> [B, R, C, D]."""
  return x.reshape(-1, *graph.grid, x.shape[-1])


def _body(x, mask, table, gates, out, window, *, plan, kind):
  i = pl.program_id(1)
  inner = pl.ds(_EDGE, plan.columns)

  def clean(row):
    """Features of a row that somebody may need: 0 * NaN is NaN."""
    column = jnp.broadcast_to(mask[row], (LANES, mask.shape[2])).T
    column = column[: plan.columns]
    wide = x[row].astype(jnp.float32)
    column = jnp.tile(column, (1, wide.shape[1] // LANES))
    return jnp.where(column > 0, wide, 0.0)

  @pl.when(i == 0)
  def _():
    window[...] = jnp.zeros_like(window)

  @pl.when(i < plan.n)
  def _():
    window[plan.r + 1, inner, :] = clean(0)

  @pl.when(i == plan.n)
  def _():
    window[plan.r + 1] = jnp.zeros(window.shape[1:], jnp.float32)

  def row(r, carry):
    weights = table[r].T
    for start in range(0, plan.columns, _COLUMNS):
      size = min(_COLUMNS, plan.columns - start)
      part = weights[start : start + size]
      y = _cells(plan, kind, part, gates, window, r + 1, start + _EDGE, size)
      out[r, pl.ds(start, size), :] = y.astype(out.dtype)
    return carry

  @pl.when(i > 0)
  def _():
    jax.lax.fori_loop(0, plan.r, row, 0)
    window[0] = window[plan.r]

  @pl.when(i < plan.n)
  def _():
    def copy(r, carry):
      window[r + 1, inner, :] = clean(r)
      return carry

    jax.lax.fori_loop(0, plan.r, copy, 0)


def _cells(plan, kind, weights, gates, window, row, start, size):
  """[size, D], of some cells of one row."""
  column = lambda at: weights[:, at : at + 1]
  x = window[row, pl.ds(start, size), :]
  sums = [jnp.zeros_like(x) for _ in range(plan.weights)]
  for k, (i, j) in enumerate(DIRECTIONS):
    near = window[row + i, pl.ds(start + j, size), :]
    # The difference first: a constant field gives zero without rounding.
    step = near - x if kind == 'delta' else near
    sums = [y + column(8 * m + k) * step for m, y in enumerate(sums)]
  if kind == 'adjoint':
    own = 8 * plan.weights
    sums = [y - column(own + m) * x for m, y in enumerate(sums)]
  if gates is None:
    return sums[0]
  gated = [gates[m : m + 1] * y for m, y in enumerate(sums)]
  return functools.reduce(jnp.add, gated)


def _sum(
  graph: Any,
  kind: str,
  far: Arrays,
  own: Arrays | None,
  gates: Arrays | None,
  x: jax.Array,
  interpret: Any,
) -> jax.Array:
  """[..., N, D], dtype of x; kind is 'sum', 'delta' or 'adjoint'."""
  (rows, columns), shape = graph.grid, x.shape
  x = _grid(graph, x)
  wide = round_up(x.shape[3], LANES)
  r = max(1, min(_BLOCK // (columns * wide), rows))
  plan = _Plan(columns, r, -(-rows // r), len(far))
  lanes = lambda t: pad_axis(
    pad_axis(t, 3, round_up(columns, LANES)), 1, plan.n * plan.r
  )
  cells = lambda w: jnp.swapaxes(_grid(graph, w).astype(jnp.float32), 2, 3)
  parts = [cells(jnp.where(graph.emask, w, 0)) for w in far]
  parts += [cells(w[..., None]) for w in own or ()]
  table = jnp.concatenate(parts, 2)
  table = lanes(pad_axis(table, 2, round_up(table.shape[2], 8)))
  mask = lanes(cells(jnp.any(graph.emask, -1, keepdims=True)))
  x = pad_axis(x, 3, wide)
  batch, last = x.shape[0], plan.n - 1
  ahead = lambda b, i: (b, jnp.minimum(i, last), 0, 0)
  behind = lambda b, i: (b, jnp.maximum(i - 1, 0), 0, 0)
  block = lambda t, at: pl.BlockSpec((None, r, *t.shape[2:]), at)
  operands = [x, mask, table]
  specs = [block(x, ahead), block(mask, ahead), block(table, behind)]
  body = functools.partial(_body, plan=plan, kind=kind)
  if gates is not None:
    rates = jnp.stack([g.reshape(-1, g.shape[-1]) for g in gates], 1)
    rates = pad_axis(pad_axis(rates.astype(jnp.float32), 2, wide), 1, 8)
    operands.append(rates)
    specs.append(pl.BlockSpec((None, 8, wide), lambda b, i: (b, 0, 0)))
    kernel = body
  else:
    kernel = lambda x, mask, table, *rest: body(x, mask, table, None, *rest)
  call = pl.pallas_call(
    kernel,
    out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
    grid=(batch, plan.n + 1),
    in_specs=specs,
    out_specs=block(x, behind),
    scratch_shapes=[
      pltpu.VMEM((r + 2, columns + 2 * _EDGE, wide), jnp.float32)
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=4 * 8 * len(far) * x.size,
      bytes_accessed=2 * x.nbytes + table.nbytes,
      transcendentals=0,
    ),
    interpret=interpret,
    name=f'stencil_{kind}',
  )
  y = in_32_bits(call)(*operands)
  return y[..., : shape[-1]].reshape(shape)


def spmm(
  graph: PatchGraph, w: jax.Array, x: jax.Array, interpret: Any = False
) -> jax.Array:
  """The function of `reference.spmm`."""
  return _sum(graph, 'sum', (w,), None, None, x, interpret)


def gated_deltas(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  interpret: Any = False,
) -> jax.Array:
  """The function of `reference.gated_deltas`."""
  return _sum(graph, 'delta', weights, None, gates, x, interpret)


def _turn(graph: Any, w: jax.Array) -> jax.Array:
  """`reference.transpose` by shifts."""
  planes = jnp.where(graph.emask, w, 0).reshape(
    *w.shape[:-2], *graph.grid, w.shape[-1]
  )
  back = range(len(DIRECTIONS))
  parts = [shift(planes[..., 7 - k : 8 - k], k) for k in back]
  turned = jnp.concatenate(parts, -1).reshape(w.shape)
  return jnp.where(graph.emask, turned, 0)


def gated_adjoint(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  g: jax.Array,
  interpret: Any = False,
) -> jax.Array:
  """The function of `reference.gated_adjoint`."""
  turned = [_turn(graph, w) for w in weights]
  clean = lambda w: jnp.where(graph.emask, w, 0).astype(jnp.float32)
  left = [jnp.sum(clean(w), -1) for w in weights]
  return _sum(graph, 'adjoint', turned, left, gates, g, interpret)


def gated_coefficients(
  graph: Any,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  g: jax.Array,
  interpret: Any = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """The function of `reference.gated_coefficients`, by shifts in XLA."""
  del interpret
  grid = lambda a: a.reshape(*a.shape[:-2], *graph.grid, a.shape[-1])
  valid, wide = grid(graph.emask), jnp.float32
  some = jnp.any(valid, -1, keepdims=True)
  x, g = (jnp.where(some, grid(a), 0).astype(wide) for a in (x, g))
  planes = [grid(jnp.where(graph.emask, w, 0).astype(wide)) for w in weights]
  rates = [c.astype(wide)[..., None, :] for c in gates]
  dw: Any = [[] for _ in weights]
  dc: Any = [0.0 for _ in weights]
  for k in range(len(DIRECTIONS)):
    p = jnp.where(valid[..., k, None], g * (shift(x, k) - x), 0)
    for m, (plane, rate) in enumerate(zip(planes, rates, strict=True)):
      dw[m].append(jnp.sum(p * rate, -1))
      dc[m] += jnp.sum(p * plane[..., k, None], (-3, -2))
  edges = lambda parts, w: jnp.stack(parts, -1).reshape(w.shape).astype(w.dtype)
  return (
    tuple(edges(d, w) for d, w in zip(dw, weights, strict=True)),
    tuple(
      d[..., None, :].astype(c.dtype) for d, c in zip(dc, gates, strict=True)
    ),
  )

"""Message passing as products of tiles for TPUs (Mosaic): any graph.

Axes: N nodes in n tiles of 128, K slots, P pairs of tiles that share an edge, M
weights, D features.

Where neighbours are near in the order of the nodes, few pairs of tiles share an
edge. Each pair is one product with a dense 128 x 128 matrix, which the body
makes from the table of neighbours: what lies in memory is the table, never the
matrices. The pairs are prefetched as scalars, those of one tile of results in
turn. A constant field is still up to rounding only, since differences are taken
of sums.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import in_32_bits
from kernels_pallas.common.padding import pad_axis
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.reference import transpose

__all__ = [
  'TiledGraph',
  'TiledLayout',
  'gated_adjoint',
  'gated_deltas',
  'spmm',
  'takes',
  'tiled_layout',
]

TILE = 128

Arrays = Sequence[jax.Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TiledGraph(PatchGraph):
  """A patch graph of whole tiles of nodes, and the pairs that share an edge.

  Attributes:
    row: [P] int32, the tile of the results of each pair, ascending.
    column: [P] int32, the tile of its neighbours.
  """

  row: Any = None
  column: Any = None


class TiledLayout(NamedTuple):
  """One graph in another order of its nodes.

  Attributes:
    graph: over 128 n nodes.
    place: [N] int32, the new place of each node.
    node: [128 n] int32, the node at each place, N at an empty one.
    fill: share of the entries of all pairs that hold an edge.
    waste: entries that are multiplied for nothing, per edge.
    padding: share of the places that are empty.
  """

  graph: TiledGraph
  place: np.ndarray
  node: np.ndarray
  fill: float
  waste: float
  padding: float


def tiled_layout(
  graph: PatchGraph, order: np.ndarray | None = None
) -> TiledLayout:
  """Puts nodes into an order, fills up to whole tiles, and lists the pairs.

  Args:
    graph: one concrete graph, leaves [N, K], N >= 1.
    order: [N], a permutation; None for the order that is there. On a grid less
      than 128 patches wide, rows one by one share fewer pairs than a curve.

  Returns:
    The layout, NumPy.

  Raises:
    ValueError: on a batch of graphs, a graph that is split over devices, a
      neighbour out of range, or an order that is no permutation.
  """
  nbr, emask, rev = (np.asarray(getattr(graph, n)) for n in _LEAVES)
  if nbr.ndim != 2 or not nbr.size or graph.axis_name is not None:
    raise ValueError(
      f'graph.nbr has shape {nbr.shape} and axis_name={graph.axis_name!r}, '
      'expected one whole graph [N, K]; join several by offsets first'
    )
  count = len(nbr)
  if nbr.min() < 0 or nbr.max() >= count:
    raise ValueError(f'graph.nbr must lie in [0, {count}), the nodes')
  order = np.arange(count) if order is None else np.asarray(order)
  if not np.array_equal(np.sort(order), np.arange(count)):
    raise ValueError(f'order must be a permutation of the {count} nodes')
  size = -(-count // TILE) * TILE
  node = np.full(size, count, np.int32)
  node[:count] = order
  place = np.empty(count, np.int32)
  place[order] = np.arange(count)
  own = np.arange(size, dtype=np.int32)[:, None]
  fresh = np.repeat(own, nbr.shape[1], 1)
  fresh[:count] = place[nbr[order]]
  pad = ((0, size - count), (0, 0))
  emask, rev = np.pad(emask[order], pad), np.pad(rev[order], pad)
  tiles = size // TILE
  tail, slot = np.nonzero(emask)
  pairs = tail // TILE * tiles + fresh[tail, slot] // TILE
  # Each tile of results must be written, also one without an edge.
  pairs = np.union1d(pairs, np.arange(tiles) * (tiles + 1))
  leaves: Any = {'nbr': fresh, 'emask': emask, 'rev': rev}
  leaves['row'] = (pairs // tiles).astype(np.int32)
  leaves['column'] = (pairs % tiles).astype(np.int32)
  entries, edges = len(pairs) * TILE * TILE, int(emask.sum())
  return TiledLayout(
    TiledGraph(**leaves),
    place,
    node,
    edges / entries,
    (entries - edges) / max(edges, 1),
    1 - count / size,
  )


_LEAVES = ('nbr', 'emask', 'rev')


def takes(graph: PatchGraph) -> bool:
  """Whether the pairs of tiles are known; one graph, never a batch."""
  return isinstance(graph, TiledGraph) and graph.nbr.ndim == 2


def _body(row, column, nbr, far, own, gates, x, here, out, acc, *, slots):
  p, last = pl.program_id(0), pl.num_programs(0) - 1
  count = acc.shape[0]

  @pl.when((p == 0) | (row[p] != row[jnp.maximum(p - 1, 0)]))
  def _():
    acc[...] = jnp.zeros_like(acc)

  at = jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), 0) + column[p] * TILE
  hits = [nbr[k : k + 1] == at for k in range(slots)]
  for m in range(count):
    # Neighbours in rows, nodes in lanes: the matrix of the pair, transposed.
    matrix = jnp.zeros((TILE, TILE), jnp.float32)
    for k, hit in enumerate(hits):
      w = far[m * slots + k : m * slots + k + 1]
      matrix = jnp.where(hit, w, matrix)
    acc[m] += jax.lax.dot_general(
      matrix,
      x[...].astype(jnp.float32),
      (((0,), (0,)), ((), ())),
      precision=jax.lax.Precision.HIGHEST,
      preferred_element_type=jnp.float32,
    )

  @pl.when((p == last) | (row[p] != row[jnp.minimum(p + 1, last)]))
  def _():
    total = jnp.zeros(out.shape, jnp.float32)
    for m in range(count):
      wide = jnp.broadcast_to(own[m : m + 1], (TILE, TILE)).T
      wide = jnp.tile(wide, (1, out.shape[1] // TILE))
      step = acc[m] - wide * here[...].astype(jnp.float32)
      total += gates[m : m + 1] * step
    out[...] = total.astype(out.dtype)


def _sum(
  graph: Any,
  far: Arrays,
  own: Arrays,
  gates: Arrays,
  x: jax.Array,
  interpret: Any,
) -> jax.Array:
  """y_i = sum_m gates_m (sum_k far_m,ik x[nbr_ik] - own_m,i x_i)."""
  nodes, slots = graph.nbr.shape
  features, f32 = x.shape[1], jnp.float32
  some = jnp.any(graph.emask, -1, keepdims=True)
  # where, not multiply: 0 * NaN in a padded row is NaN.
  wide = -(-features // TILE) * TILE
  x = pad_axis(jnp.where(some, x, 0), 1, wide)
  eight = lambda t: pad_axis(t, 0, -(-t.shape[0] // 8) * 8)
  nbr = eight(jnp.where(graph.emask, graph.nbr, -1).T)
  table = eight(jnp.concatenate([w.astype(f32).T for w in far]))
  left = eight(jnp.stack(own).astype(f32))
  rates = eight(pad_axis(jnp.concatenate(gates).astype(f32), 1, wide))
  at_row = lambda t: pl.BlockSpec((t.shape[0], TILE), lambda p, r, c: (0, r[p]))
  rows = pl.BlockSpec((TILE, wide), lambda p, r, c: (r[p], 0))
  call = pl.pallas_call(
    functools.partial(_body, slots=slots),
    out_shape=jax.ShapeDtypeStruct((nodes, wide), x.dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(graph.row.shape[0],),
      in_specs=[
        at_row(nbr),
        at_row(table),
        at_row(left),
        pl.BlockSpec(rates.shape, lambda p, r, c: (0, 0)),
        pl.BlockSpec((TILE, wide), lambda p, r, c: (c[p], 0)),
        rows,
      ],
      out_specs=rows,
      scratch_shapes=[pltpu.VMEM((len(far), TILE, wide), f32)],
    ),
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',)),
    cost_estimate=pl.CostEstimate(
      flops=2 * len(far) * graph.row.shape[0] * TILE * TILE * wide,
      bytes_accessed=2 * x.nbytes + table.nbytes + nbr.nbytes,
      transcendentals=0,
    ),
    interpret=interpret,
    name='block_sparse_sum',
  )
  y = in_32_bits(call)(graph.row, graph.column, nbr, table, left, rates, x, x)
  return y[:, :features]


def _clean(graph: PatchGraph, weights: Arrays) -> list[jax.Array]:
  return [jnp.where(graph.emask, w, 0).astype(jnp.float32) for w in weights]


def spmm(
  graph: PatchGraph, w: jax.Array, x: jax.Array, interpret: Any = False
) -> jax.Array:
  """The function of `reference.spmm`."""
  nothing = jnp.zeros(graph.num_nodes)
  rate = jnp.ones((1, x.shape[1]))
  return _sum(graph, _clean(graph, [w]), [nothing], [rate], x, interpret)


def gated_deltas(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  interpret: Any = False,
) -> jax.Array:
  """The function of `reference.gated_deltas`."""
  clean = _clean(graph, weights)
  return _sum(graph, clean, [w.sum(-1) for w in clean], gates, x, interpret)


def gated_adjoint(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  g: jax.Array,
  interpret: Any = False,
) -> jax.Array:
  """The function of `reference.gated_adjoint`."""
  clean = _clean(graph, weights)
  turned = [transpose(graph, w) for w in clean]
  return _sum(graph, turned, [w.sum(-1) for w in clean], gates, g, interpret)

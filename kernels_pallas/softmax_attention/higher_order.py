"""The backward pass as a function with derivatives of any order.

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features.

Gradients of attention are sums over tiles, A_i = sum_j a_ij of the queries and
B_j = sum_i b_ij of the keys, of a function of the blocks i and j. The vjp of
such sums is of the same kind: its tile is the vjp of the tile, and A and B have
their cotangents among its blocks. One rule thus serves all orders in reverse
mode, in the memory of a tile, and no order visits a tile that nobody sees.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.common.padding import pad_axis
from kernels_pallas.softmax_attention import paging, tiles, xla
from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['Sides', 'backward', 'sum_tiles']


class Sides(NamedTuple):
  """What belongs to queries, to keys and to pairs of them: trees of floats.

  Whole, their leaves are [n, ...], [m, ...] and [..., n t, m s]; those of a
  tile have neither n nor m.
  """

  queries: Any
  keys: Any
  pairs: Any


_Tile = Callable[[Any, Any, Any, Sides], Sides]


def _pick(blocks: Any, index: Any) -> Any:
  take = lambda x: jax.lax.dynamic_index_in_dim(x, index, 0, keepdims=False)
  return jax.tree.map(take, blocks)


def _take(sides: Sides, i: Any, j: Any) -> Sides:
  n = jax.tree.leaves(sides.queries)[0].shape[0]
  m = jax.tree.leaves(sides.keys)[0].shape[0]

  def cut(x):
    size = *x.shape[:-2], x.shape[-2] // n, x.shape[-1] // m
    return jax.lax.dynamic_slice(x, xla.corner(size, i, j), size)

  return Sides(
    _pick(sides.queries, i),
    _pick(sides.keys, j),
    jax.tree.map(cut, sides.pairs),
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sum_tiles(
  tile: _Tile, fixed: Any, bounds: tuple[jax.Array, jax.Array], sides: Sides
) -> Sides:
  """Sums of a tile's function: over keys, over queries, and over nothing.

  Args:
    tile: of `fixed`, i, j and a tile of `sides`; closes over no array.
    fixed: arrays without a gradient.
    bounds: [m] each, the first and one past the last block of queries that
      meets a block of keys. All that a tile outside gives is zero.
    sides: what there is a gradient of.
  """
  n = jax.tree.leaves(sides.queries)[0].shape[0]
  m = jax.tree.leaves(sides.keys)[0].shape[0]
  shapes = jax.eval_shape(lambda x: tile(fixed, 0, 0, _take(x, 0, 0)), sides)
  zeros = lambda tree, count=(): jax.tree.map(
    lambda x: jnp.zeros((*count, *x.shape), x.dtype), tree
  )
  pairs = jax.tree.map(
    lambda x: jnp.zeros(
      (*x.shape[:-2], n * x.shape[-2], m * x.shape[-1]), x.dtype
    ),
    shapes.pairs,
  )

  def column(carry, j):
    def add(i, carry):
      queries, keys, pairs = carry
      found = tile(fixed, i, j, _take(sides, i, j))
      put = lambda whole, x: jax.lax.dynamic_update_slice(
        whole, x, xla.corner(x.shape, i, j)
      )
      queries = jax.tree.map(
        lambda a, x: a.at[i].add(x), queries, found.queries
      )
      keys = jax.tree.map(jnp.add, keys, found.keys)
      return queries, keys, jax.tree.map(put, pairs, found.pairs)

    queries, pairs = carry
    start = queries, zeros(shapes.keys), pairs
    low, high = bounds
    queries, keys, pairs = jax.lax.fori_loop(low[j], high[j], add, start)
    return (queries, pairs), keys

  start = zeros(shapes.queries, (n,)), pairs
  (queries, pairs), keys = jax.lax.scan(column, start, jnp.arange(m))
  return Sides(queries, keys, pairs)


def _turn(tile: _Tile, fixed: Any, i: Any, j: Any, both: Sides) -> Sides:
  """The vjp of a tile; `both` holds its inputs and the cotangents."""
  inputs, cotangents = (Sides(*x) for x in zip(*both, strict=True))
  _, vjp = jax.vjp(lambda x: tile(fixed, i, j, x), inputs)
  return vjp(cotangents)[0]


def _sum_forward(tile, fixed, bounds, sides):
  return sum_tiles(tile, fixed, bounds, sides), (fixed, bounds, sides)


def _sum_backward(tile, residual, cotangents):
  fixed, bounds, sides = residual
  both = Sides(*zip(sides, cotangents, strict=True))
  turned = functools.partial(_turn, tile)
  return None, None, sum_tiles(turned, fixed, bounds, both)


sum_tiles.defvjp(_sum_forward, _sum_backward)


class _Fixed(NamedTuple):
  """Integers of all tiles: of `xla.Plan`, and those of `Rows` in blocks."""

  offset: Any
  limit: Any
  of_queries: Any
  of_keys: Any


def _slopes(
  plan: xla.Plan, dtype: Any, fixed: _Fixed, i: Any, j: Any, sides: Sides
) -> Sides:
  """A tile of `xla.backward`; products in `dtype`, all else wider."""
  plan = plan._replace(offset=fixed.offset, limit=fixed.limit)
  *products, lse, delta = sides.queries
  q, g = (x.astype(dtype) for x in products)
  k, v = (x.astype(dtype) for x in sides.keys[:2])
  bias, pairs = sides.keys[2], sides.pairs
  mine = xla.Queries(q, *_pick(fixed.of_queries, i))
  turned = lambda x: jnp.swapaxes(x, -1, -2)
  its = xla.Keys(turned(k), v, k, bias, *_pick(fixed.of_keys, j))
  x, seen = xla.logits(plan, mine, its, pairs, i, j)
  inner = xla.dot('bgrtv,bgvs->bgrts', g, turned(v))
  weights, slope = tiles.slopes(
    plan.config.weights, x, seen, lse, delta, inner, jnp.exp
  )
  db = None if bias is None else slope.sum((2, 3))
  dp = None
  if pairs is not None:
    shared = [a for a in range(3) if pairs.shape[a] == 1]
    dp = slope.sum(shared, keepdims=True)
  slope = slope * plan.config.scale
  dv = xla.dot('bgrts,bgrtv->bgsv', weights, g)
  dk = xla.dot('bgrts,bgrtd->bgsd', slope, q)
  dq = xla.dot('bgrts,bgsd->bgrtd', slope, k)
  return Sides(dq, (dk, dv, db), dp)


def _bounds(
  config: Config, rows: Rows, plan: xla.Plan
) -> tuple[jax.Array, jax.Array]:
  meeting = xla.segment_blocks(rows, plan, False)

  def of(j):
    keys = j * plan.s, (j + 1) * plan.s - 1
    found = tiles.query_blocks(config, keys, plan.offsets, plan.t, plan.n)
    return xla.within(found, meeting, j)

  return jax.vmap(of)(jnp.arange(plan.m))


def _cut(x: jax.Array, count: int, block: int, fill: float = 0) -> jax.Array:
  """[B, N, ...] -> [count, B, block, ...]."""
  x = pad_axis(x, 1, count * block, fill)
  x = x.reshape(x.shape[0], count, block, *x.shape[2:])
  return jnp.moveaxis(x, 1, 0)


def backward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  lse: jax.Array | None,
  delta: jax.Array | None,
  g: jax.Array,
  pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """The function of `xla.backward`, differentiable in all of its floats.

  Rounded to the dtype of q for products alone: sums over tiles, also those of
  higher order, are float32 or wider.
  """
  groups, wide = k.shape[2], jnp.promote_types(q.dtype, jnp.float32)
  plan = xla.make_plan(config, rows, q.shape[1], k.shape[1])
  k, v = paging.existing(k, v, rows)
  if table is not None:
    k = tiles.rotate(k, table[:, :, None])

  def of_queries(x, fill=0.0):  # [B, T, H, ...] -> [n, B, G, R, t, ...]
    x = _cut(x.astype(wide), plan.n, plan.t, fill)
    return jax.vmap(lambda x: xla.split_groups(x, groups))(x)

  def of_keys(x):  # [B, S, G, ...] -> [m, B, G, s, ...]
    return jnp.moveaxis(_cut(x.astype(wide), plan.m, plan.s), 2, 3)

  # Queries of padding weigh nothing: their lse is infinite.
  column = lambda x, fill: (
    None if x is None else of_queries(jnp.swapaxes(x, 1, 2)[..., None], fill)
  )
  row = lambda x: _cut(x, plan.m, plan.s)[:, :, None, None, None]
  padded = xla.pad_pairs(pairs, plan, groups)
  sides = Sides(
    (of_queries(q), of_queries(g), column(lse, jnp.inf), column(delta, 0.0)),
    (of_keys(k), of_keys(v), None if bias is None else row(bias.astype(wide))),
    None if padded is None else padded.astype(wide),
  )
  fixed = _Fixed(
    plan.offset,
    plan.limit,
    jax.tree.map(
      lambda x: _cut(x, plan.n, plan.t)[:, :, None, None, :, None],
      (rows.query_segment, rows.query_span),
    ),
    jax.tree.map(row, (rows.key_segment, rows.key_span)),
  )
  bounds = _bounds(config, rows, plan)
  bare = plan._replace(offset=None, offsets=None, limit=None, furthest=None)
  tile = functools.partial(_slopes, bare, q.dtype)
  # Annotations do not see through custom_vjp.
  found: Any = sum_tiles(tile, fixed, bounds, sides)
  dq, (dk, dv, db), dp = found

  def join(x, size):  # [m, B, G, s, ...] -> [B, S, G, ...]
    return xla.join_blocks(jnp.moveaxis(x, 3, 2), size)

  dq = jnp.moveaxis(dq, 4, 2).reshape(plan.n, q.shape[0], plan.t, *q.shape[2:])
  dk, dv = join(dk, plan.keys), join(dv, plan.keys)
  if table is not None:
    dk = tiles.rotate(dk, table[:, :, None], back=True)
  if db is not None:
    db = jnp.swapaxes(join(db, plan.keys), 1, 2)
  if pairs is not None:
    dp = dp.reshape(*pairs.shape[:2], *dp.shape[3:])
    dp = dp[:, :, : plan.queries, : plan.keys]
  dq = xla.join_blocks(dq, plan.queries).astype(q.dtype)
  return dq, dk.astype(k.dtype), dv.astype(v.dtype), db, dp

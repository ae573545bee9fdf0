"""Softmax attention as loops over tiles in plain jnp, in bounded memory.

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features.

No tile outside the causal triangle, the window or the range of tiles that may
share a segment is visited. The backward pass computes each tile once more from
the logarithm of its sums.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.common.numerics import precision, silu, softmax_step
from kernels_pallas.common.padding import pad_axis, split_evenly
from kernels_pallas.softmax_attention import paging, tiles
from kernels_pallas.softmax_attention.options import Blocks, Config, Rows
from kernels_pallas.softmax_attention.reference import key_limit, split_heads

__all__ = [
  'Keys',
  'Plan',
  'Queries',
  'backward',
  'corner',
  'dot',
  'forward',
  'join_blocks',
  'logits',
  'make_plan',
  'pad_pairs',
  'segment_blocks',
  'split_groups',
  'within',
]

# A tile of logits of one head then stays in the second-level cache.
_BLOCKS = Blocks(query=256, key=512)


# A product runs at its full rate where the axis it sums is the last one of its
# left side and the last but one of its right side; otherwise a tile of logits
# is transposed in memory first. Hence operands turned, [D, s] for [s, D], and
# gradients of keys and values that are summed turned.


class Queries(NamedTuple):
  """A block of queries: [B, G, R, t, ...] and their integers.

  Attributes:
    values: [B, G, R, t, D].
    segment: [B, 1, 1, t, 1] or None.
    span: [B, 1, 1, t, 1] or None.
    back: for a backward pass (q turned, [B, G, D, R, t]; g, [B, G, R, t, V]; g
      turned; lse and delta, [B, G, R, t, 1] or None).
  """

  values: jax.Array
  segment: jax.Array | None
  span: jax.Array | None
  back: Any = None


class Keys(NamedTuple):
  """A block of keys and what belongs to each key.

  Attributes:
    turned: k, [B, G, D, s].
    values: v, [B, G, s, V]; turned, [B, G, V, s], for a backward pass.
    plain: k, [B, G, s, D], for a backward pass.
    bias: [B, 1, 1, 1, s] or None.
    segment: [B, 1, 1, 1, s] or None.
    span: [B, 1, 1, 1, s] or None.
  """

  turned: jax.Array
  values: jax.Array
  plain: Any
  bias: jax.Array | None
  segment: jax.Array | None
  span: jax.Array | None


class Plan(NamedTuple):
  """Sizes of the loops, and where things lie."""

  config: Config
  queries: int
  keys: int
  t: int
  n: int
  s: int
  m: int
  # First query among the keys: [B, 1, 1, 1, 1] or an int; smallest, largest.
  offset: Any
  offsets: tuple[Any, Any]
  # Number of keys: [B, 1, 1, 1, 1], an int or None; the largest.
  limit: Any
  furthest: Any


def make_plan(
  config: Config, rows: Rows, queries: int, keys: int, page: int = 1
) -> Plan:
  """For keys in pages of that many, if in pages."""
  blocks = config.blocks or _BLOCKS
  s, m = split_evenly(keys, max(blocks.key, page), page)
  if config.blocks is None and m == 1:
    # Few keys: the same tile is filled by more queries.
    blocks = Blocks(_BLOCKS.query * max(1, _BLOCKS.key // s), s)
  t, n = split_evenly(queries, blocks.query, 1)
  offset, offsets = config.offset, (config.offset, config.offset)
  if rows.offset is not None:
    offset = rows.offset[:, None, None, None, None]
    offsets = rows.offset.min(), rows.offset.max()
  limit = furthest = key_limit(rows, config, keys, queries, m * s - keys)
  if rows.lengths is not None:
    limit, furthest = limit[:, None, None, None, None], limit.max()
  return Plan(
    config, queries, keys, t, n, s, m, offset, offsets, limit, furthest
  )


def segment_blocks(rows: Rows, plan: Plan, of_keys: bool) -> Any:
  """Blocks of keys per block of queries, or the reverse: [n] or [m] each.

  They are those that any sequence needs. None without segments.
  """
  if rows.query_segment is None or rows.key_segment is None:
    return None
  sides = [
    tiles.segment_ranges(rows.query_segment, plan.t, plan.n),
    tiles.segment_ranges(rows.key_segment, plan.s, plan.m),
  ]
  found = tiles.segment_blocks(*(sides if of_keys else sides[::-1]))
  return found[:, 0].min(0), found[:, 1].max(0)


def within(bounds: tuple[Any, Any], blocks: Any, index: Any) -> Any:
  """First and one past the last block that both allow."""
  if blocks is None:
    return bounds
  return (
    jnp.maximum(bounds[0], blocks[0][index]),
    jnp.minimum(bounds[1], blocks[1][index]),
  )


def _slice(x: jax.Array, index: Any, block: int, axis: int = 1) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x, index * block, block, axis)


def split_groups(x: jax.Array, groups: int) -> jax.Array:
  """[B, t, H, ...] -> [B, G, R, t, ...]."""
  x = x.reshape(*x.shape[:2], groups, -1, *x.shape[3:])
  return jnp.moveaxis(x, 1, 3)


def _each(
  function: Callable[[Any], Any], count: int, again: bool
) -> Callable[[Any], Any]:
  """`function` of an index below `count`; made ready if it is asked `again`."""
  if not again:
    return function
  blocks = jax.lax.map(function, jnp.arange(count))
  take = lambda x, i: jax.lax.dynamic_index_in_dim(x, i, 0, keepdims=False)
  return lambda i: jax.tree.map(lambda x: take(x, i), blocks)


def _queries(
  q: jax.Array, rows: Rows, plan: Plan, groups: int, back: Any = None
) -> Callable[[Any], Queries]:
  """The i-th block; `back` holds g, lse and delta."""
  size = plan.n * plan.t
  # Queries of padding are cut off, or weigh nothing: their lse is infinite.
  pad = lambda tree, axis=1, fill=0.0: jax.tree.map(
    lambda x: pad_axis(x, axis, size, fill), tree
  )
  wide = pad((q, rows.query_segment, rows.query_span))
  if back is not None:
    back = pad(back[0]), pad(back[1], 2, jnp.inf), pad(back[2], 2)

  def block(i):
    cut = lambda tree, axis=1: jax.tree.map(
      lambda x: _slice(x, i, plan.t, axis), tree
    )
    mine, *integers = cut(wide)
    mine = split_groups(mine, groups)
    frames = jax.tree.map(lambda x: x[:, None, None, :, None], integers)
    if back is None:
      return Queries(mine, *frames)
    g = split_groups(cut(back[0]), groups)
    columns = jax.tree.map(
      lambda x: split_heads(x, groups)[..., None], cut(back[1:], 2)
    )
    turned = lambda x: jnp.moveaxis(x, 4, 2)
    return Queries(mine, *frames, back=(turned(mine), g, turned(g), *columns))

  return block


def _both(
  k: jax.Array, v: jax.Array, rows: Rows, plan: Plan
) -> Callable[[Any], tuple[jax.Array, jax.Array]]:
  """The j-th block of keys and values, [B, s, G, D]."""
  if rows.pages is None:
    k, v = (pad_axis(x, 1, plan.m * plan.s) for x in (k, v))
  else:
    count = plan.s // k.shape[1]
    pages = paging.fill_pages(rows.pages, plan.m * count)

  def block(j):
    left = None if rows.lengths is None else rows.lengths - j * plan.s
    if rows.pages is not None:
      mine = Rows(lengths=left, pages=_slice(pages, j, count))
      return paging.side_by_side(k, v, mine)[:2]
    both = _slice(k, j, plan.s), _slice(v, j, plan.s)
    return paging.existing(*both, Rows(lengths=left))

  return block


def _keys(
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  plan: Plan,
  back: bool,
) -> Callable[[Any], Keys]:
  """The j-th block."""
  fill = lambda x: pad_axis(x, 1, plan.m * plan.s)
  of_keys = table, bias, rows.key_segment, rows.key_span
  whole = jax.tree.map(fill, of_keys)
  both = _both(k, v, rows, plan)

  def block(j):
    turn, *others = jax.tree.map(lambda x: _slice(x, j, plan.s), whole)
    mine, its = both(j)
    if turn is not None:
      mine = tiles.rotate(mine, turn[:, :, None])
    plain = lambda x: jnp.moveaxis(x, 1, 2)
    turned = lambda x: jnp.moveaxis(x, 1, 3)
    return Keys(
      turned(mine),
      turned(its) if back else plain(its),
      plain(mine) if back else None,
      *jax.tree.map(lambda x: x[:, None, None, None], others),
    )

  return block


def join_blocks(x: jax.Array, size: int) -> jax.Array:
  """[count, B, block, ...] -> [B, size, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :size]


def dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Sums in float32 or wider, operands in the dtype of b."""
  return jnp.einsum(
    subscripts,
    a.astype(b.dtype),
    b,
    preferred_element_type=jnp.promote_types(b.dtype, jnp.float32),
    precision=precision(b.dtype),
  )


def logits(
  plan: Plan,
  q: Queries,
  k: Keys,
  pairs: jax.Array | None,
  i: jax.Array,
  j: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
  """[B, G, R, t, s], and which of them are seen; `pairs` are of the tile."""
  x = dot('bgrtd,bgds->bgrts', q.values, k.turned) * plan.config.scale
  if k.bias is not None:
    x += k.bias.astype(x.dtype)
  column = jnp.arange(plan.t)[None, None, None, :, None] + i * plan.t
  row = jnp.arange(plan.s)[None, None, None, None] + j * plan.s
  mask = tiles.visible(
    plan.config,
    tiles.Side(column + plan.offset, q.segment, q.span),
    tiles.Side(row, k.segment, k.span),
    plan.limit,
  )
  if pairs is None:
    return x, mask
  x += pairs.astype(x.dtype)
  shown = x > -jnp.inf
  return x, shown if mask is None else mask & shown


def pad_pairs(
  pairs: jax.Array | None, plan: Plan, groups: int
) -> jax.Array | None:
  """[1 or B, 1 or G, 1 or R, n t, m s]."""
  if pairs is None:
    return None
  pairs = pad_axis(pad_axis(pairs, 2, plan.n * plan.t), 3, plan.m * plan.s)
  return split_heads(pairs, groups)


def corner(size: tuple[int, ...], i: Any, j: Any) -> tuple[jax.Array, ...]:
  """Where the tile i, j of that size begins."""
  # Counters of loops differ in type if integers have 64 bits.
  at = *[0] * (len(size) - 2), i * size[-2], j * size[-1]
  return tuple(jnp.asarray(x, jnp.int32) for x in at)


def _cut_pairs(
  pairs: jax.Array | None, plan: Plan, i: jax.Array, j: jax.Array
) -> jax.Array | None:
  if pairs is None:
    return None
  size = (*pairs.shape[:-2], plan.t, plan.s)
  return jax.lax.dynamic_slice(pairs, corner(size, i, j), size)


def _add_tile(
  total: jax.Array, tile: jax.Array, i: jax.Array, j: jax.Array
) -> jax.Array:
  """Adds [B, G, R, t, s], summed where `total` has size 1."""
  axes = [a for a in range(3) if total.shape[a] == 1]
  tile = jnp.sum(tile, axes, keepdims=True)
  at = corner(tile.shape, i, j)
  old = jax.lax.dynamic_slice(total, at, tile.shape)
  return jax.lax.dynamic_update_slice(total, old + tile, at)


def forward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """The function of `reference.forward`; out in `tiles.out_dtype`."""
  groups = k.shape[2]
  count = paging.count_keys(k, rows)
  page = 1 if rows.pages is None else k.shape[1]
  plan = make_plan(config, rows, q.shape[1], count, page)
  key_block = _each(
    _keys(k, v, bias, table, rows, plan, back=False), plan.m, again=plan.n > 1
  )
  query_block = _queries(q, rows, plan, groups)
  pairs = pad_pairs(pairs, plan, groups)
  wide = jnp.promote_types(q.dtype, jnp.float32)
  silu_weights = config.weights == 'silu'
  meeting = segment_blocks(rows, plan, True)

  def block(i):
    queries = query_block(i)
    first = i * plan.t
    bounds = tiles.key_blocks(
      config,
      (first + plan.offsets[0], first + plan.t - 1 + plan.offsets[1]),
      plan.furthest,
      plan.s,
      plan.m,
    )
    low, high = within(bounds, meeting, i)

    def add(j, carry):
      peak, total, out = carry
      tile = key_block(j)
      x, seen = logits(plan, queries, tile, _cut_pairs(pairs, plan, i, j), i, j)
      if silu_weights:
        weights, decay = silu(tiles.hide(x, seen, 0.0))[0], 1.0
      else:
        x = tiles.hide(x, seen, -jnp.inf)
        weights, decay, peak, total = softmax_step(x, peak, total, -1, jnp.exp)
      out = out * decay + dot('bgrts,bgsv->bgrtv', weights, tile.values)
      return peak, total, out

    shape = queries.values.shape[:-1]
    start = (
      jnp.full((*shape, 1), -jnp.inf, wide),
      jnp.zeros((*shape, 1), wide),
      jnp.zeros((*shape, v.shape[-1]), wide),
    )
    # [B, G, R, t, ...] -> [B, t, H, ...] while it is in the cache.
    join = lambda x: jnp.moveaxis(x, 3, 1).reshape(
      x.shape[0], plan.t, -1, *x.shape[4:]
    )
    peak, total, out = jax.lax.fori_loop(low, high, add, start)
    if silu_weights:
      return join(out.astype(tiles.out_dtype(v, bias))), None
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    lse = jnp.where(seen, peak + jnp.log(total), -jnp.inf)
    out = (out / total).astype(tiles.out_dtype(v, bias))
    return join(out), join(lse[..., 0])

  if plan.n == 1:  # a loop of one step would copy what it reads
    found = jax.tree.map(lambda x: x[None], block(0))
  else:
    found = jax.lax.map(block, jnp.arange(plan.n))
  out, lse = jax.tree.map(lambda x: join_blocks(x, plan.queries), found)
  return out, None if lse is None else jnp.swapaxes(lse, 1, 2)


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
  """Gradients of q, k, v, of the bias per key head, and of the pairs.

  Args:
    config: as in `forward`, like the next six.
    q: [B, T, H, D].
    k: [B, S, G, D].
    v: [B, S, G, V].
    bias: [B, S] or None.
    table: [B, S, D] or None.
    rows: integers of the mask.
    lse: [B, H, T], of `forward`, but +inf where no key is visible; None for
      silu.
    delta: [B, H, T], <g, out> less the cotangent of lse; None for silu.
    g: [B, T, H, V], cotangent of out.
    pairs: [1 or B, 1 or H, T, S] or None.

  Returns:
    dq, dk, dv like q, k, v; the gradients of the bias [B, G, S] and of the
    pairs, in their shape, float32 or wider, or None.
  """
  groups = k.shape[2]
  plan = make_plan(config, rows, q.shape[1], k.shape[1])
  key_block = _keys(k, v, bias, table, rows, plan, back=True)
  query_block = _each(
    _queries(q, rows, plan, groups, (g, lse, delta)), plan.n, again=plan.m > 1
  )
  wide = jnp.promote_types(q.dtype, jnp.float32)
  padded = pad_pairs(pairs, plan, groups)
  meeting = segment_blocks(rows, plan, False)

  def block(carry, j):
    dq, dp = carry
    tile = key_block(j)
    bounds = tiles.query_blocks(
      config,
      (j * plan.s, (j + 1) * plan.s - 1),
      plan.offsets,
      plan.t,
      plan.n,
    )
    low, high = within(bounds, meeting, j)

    def add(i, carry):
      dq, dp, dk, dv, db = carry
      mine = query_block(i)
      q_turned, g, g_turned, lse, delta = mine.back
      x, seen = logits(plan, mine, tile, _cut_pairs(padded, plan, i, j), i, j)
      inner = dot('bgrtv,bgvs->bgrts', g, tile.values)
      weights, slope = tiles.slopes(
        config.weights, x, seen, lse, delta, inner, jnp.exp
      )
      dv += dot('bgvrt,bgrts->bgvs', g_turned, weights.astype(g.dtype))
      if dp is not None:
        dp = _add_tile(dp, slope, i, j)
      if bias is not None:
        db += slope.sum((2, 3))
      slope = slope * config.scale
      dk += dot('bgdrt,bgrts->bgds', q_turned, slope.astype(q.dtype))
      old = jax.lax.dynamic_index_in_dim(dq, i, 0, keepdims=False)
      new = old + dot('bgrts,bgsd->bgrtd', slope, tile.plain)
      dq = jax.lax.dynamic_update_index_in_dim(dq, new, i, 0)
      return dq, dp, dk, dv, db

    start = (
      dq,
      dp,
      jnp.zeros(tile.turned.shape, wide),
      jnp.zeros(tile.values.shape, wide),
      None if bias is None else jnp.zeros(tile.plain.shape[:-1], wide),
    )
    dq, dp, dk, dv, db = jax.lax.fori_loop(low, high, add, start)
    # [B, G, D, s] -> [B, s, G, D]
    join = lambda x, dtype: jnp.moveaxis(x.astype(dtype), 3, 1)
    db = None if db is None else jnp.moveaxis(db, 2, 1)
    return (dq, dp), (join(dk, k.dtype), join(dv, v.dtype), db)

  heads = q.shape[0], groups, q.shape[2] // groups
  dq = jnp.zeros((plan.n, *heads, plan.t, q.shape[3]), wide)
  dp = None if padded is None else jnp.zeros(padded.shape, wide)
  if plan.m == 1:
    (dq, dp), found = block((dq, dp), 0)
    found = jax.tree.map(lambda x: x[None], found)
  else:
    (dq, dp), found = jax.lax.scan(block, (dq, dp), jnp.arange(plan.m))
  dk, dv, db = jax.tree.map(lambda x: join_blocks(x, plan.keys), found)
  if pairs is not None and dp is not None:
    dp = dp.reshape(*pairs.shape[:2], *dp.shape[3:])
    dp = dp[:, :, : plan.queries, : plan.keys]
  if table is not None:
    dk = tiles.rotate(dk, table[:, :, None], back=True)
  db = None if db is None else jnp.swapaxes(db, 1, 2)
  # [n, B, G, R, t, D] -> [B, T, H, D]
  dq = jnp.moveaxis(dq, 4, 2).reshape(plan.n, q.shape[0], plan.t, *q.shape[2:])
  return join_blocks(dq, plan.queries).astype(q.dtype), dk, dv, db, dp

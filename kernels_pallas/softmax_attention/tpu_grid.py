"""How the TPU's bodies cut attention into tiles, and which tile comes when.

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features, padded to whole lanes.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.padding import (
  pad_axis,
  round_up,
  split_evenly,
)
from kernels_pallas.softmax_attention import paging, tiles
from kernels_pallas.softmax_attention.operands import (
  Operands,
  pad_features,
)
from kernels_pallas.softmax_attention.options import Blocks, Config, Rows
from kernels_pallas.softmax_attention.reference import key_limit
from kernels_pallas.tuning.table import find_blocks

__all__ = [
  'LANES',
  'LARGEST_TABLE',
  'Plan',
  'at_pairs',
  'by_key',
  'by_pairs',
  'by_query',
  'has_diagonal',
  'head_major',
  'make_specs',
  'pad_row',
  'pages_of_tile',
  'prefetched',
  'prepare',
]

LANES = 128
# Keys of one head that are kept once rotated, in bytes of VMEM.
_KEPT = 2**22
# The most pages that a tile of keys is put together from, and the most keys.
_PAGES = 16
_LARGEST_TILE = 1024
# Integers of a table of pages that the memory of scalars takes.
LARGEST_TABLE = 2**16


class Plan(NamedTuple):
  """Sizes of a call: t, n, s, m of the module docstring, R, G."""

  config: Config
  t: int
  n: int
  s: int
  m: int
  share: int
  # Whole lanes of V.
  values: int
  # Number of keys if it is known and matters.
  limit: int | None
  # Whether a key is rotated once and not for every tile of queries.
  kept: bool
  # Pages of a tile of keys, or 0 if keys lie in no pages.
  pages: int = 0


def _blocks(dim: int, single: bool, backward: bool) -> Blocks:
  """Tiles that fit into the 16 MB of VMEM that a kernel gets everywhere."""
  if dim > LANES or single:
    return Blocks(256, 512) if not backward else Blocks(256, 256)
  return Blocks(512, 512)


def pages_of_tile(k: jax.Array, v: jax.Array, largest: int) -> int | None:
  """Pages of a tile of keys, or None where pools have to be copied.

  A block of a pool holds whole lanes of one head and whole tiles of rows, and
  a tile of logits whole lanes of keys.
  """
  page = k.shape[1]
  whole = k.shape[3] % LANES == v.shape[3] % LANES == 0
  if not whole or page % (32 // k.dtype.itemsize):
    return None
  count = LANES // math.gcd(page, LANES)
  if count > _PAGES or count * page > max(largest, _LARGEST_TILE):
    return None
  return count * max(1, min(_PAGES // count, largest // (count * page)))


def _from_table(
  dim: int, dtype: Any, backward: bool, kind: str
) -> Blocks | None:
  """What was chosen for this chip; `kind` says what tiles hold but logits."""
  op = f'attention_{"backward" if backward else "forward"}'
  found = find_blocks(op, f'{dtype} {-(-dim // LANES) * LANES}{kind}')
  return Blocks(*found) if found else None


def pad_row(x: jax.Array, size: int, fill: float = 0) -> jax.Array:
  """[..., N] -> [..., 1, size]."""
  return jnp.expand_dims(pad_axis(x, x.ndim - 1, size, fill), -2)


def head_major(x: jax.Array, size: int, halves: bool) -> jax.Array:
  """[B, N, H, D] -> [B, H, size, whole lanes]."""
  lanes = -(-x.shape[-1] // LANES) * LANES
  return pad_axis(jnp.swapaxes(pad_features(x, lanes, halves), 1, 2), 2, size)


def expand_table(table: jax.Array, size: int) -> jax.Array:
  """Table of `rope_table` for halves padded to `size` features in all.

  Returns:
    [..., 2 size]: cos, cos, -sin, sin, so that nothing of it has to be moved to
    other lanes.
  """
  cos, sin = jnp.split(pad_features(table, size, True), 2, -1)
  return jnp.concatenate([cos, cos, -sin, sin], -1)


def prepare(
  config: Config,
  backward: bool,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None,
) -> tuple[Plan, Operands]:
  """Head before rows, whole tiles."""
  dim = max(q.shape[-1], v.shape[-1])
  extra = bias, pairs, rows.query_span
  blocks = config.blocks
  if config.weights == 'softmax' and all(x is None for x in extra):
    kind = '' if table is None else ' rope'
    kind += '' if rows.query_segment is None else ' segments'
    blocks = blocks or _from_table(dim, q.dtype, backward, kind)
  blocks = blocks or _blocks(dim, q.dtype.itemsize > 2, backward)
  t, n = split_evenly(q.shape[1], blocks.query, LANES)
  count, pages = paging.count_keys(k, rows), 0
  s, m = split_evenly(count, blocks.key, LANES)
  if rows.pages is not None:
    pages = pages_of_tile(k, v, blocks.key) or 0
    s = pages * k.shape[1]
    m = -(-count // s)
  limit = key_limit(rows, config, count, q.shape[1], m * s - count)
  known = limit if isinstance(limit, int) else None
  halves = table is not None
  queries, keys = t * n, s * m
  kept = halves and keys * -(-q.shape[-1] // LANES) * LANES * k.dtype.itemsize
  plan = Plan(
    config,
    t,
    n,
    s,
    m,
    q.shape[2] // k.shape[2],
    round_up(v.shape[-1], LANES),
    known,
    0 < kept <= _KEPT,
    pages,
  )
  row = lambda x, size: None if x is None else pad_row(x, size)
  ranges = lambda ids, block, count: (
    None if ids is None else tiles.segment_ranges(ids, block, count)
  )
  wide = head_major(q, queries, halves)
  if pairs is not None:
    pairs = jnp.maximum(pairs, tiles.HIDDEN)
    pairs = pad_axis(pad_axis(pairs, 2, queries), 3, keys)
  if halves:
    # Rotated keys hold the scale: products of them are logits.
    table = table * (config.scale * tiles.unit(config.weights))
    table = expand_table(table, wide.shape[-1]).astype(k.dtype)
    table = pad_axis(table, 1, keys)
  if pages:
    # Heads side by side: a block of lanes is a head.
    flat = lambda x: (x.reshape(*x.shape[:2], -1),) * pages
    both = flat(k), flat(v)
  else:
    k, v = paging.existing(k, v, rows)
    both = head_major(k, keys, halves), head_major(v, keys, False)
  return plan, Operands(
    wide,
    *both,
    rows.offset,
    None if known is not None or limit is None else limit,
    row(rows.query_segment, queries),
    row(rows.key_segment, keys),
    row(rows.query_span, queries),
    row(rows.key_span, keys),
    ranges(rows.query_segment, t, n),
    ranges(rows.key_segment, s, m),
    None
    if bias is None
    else row(bias.astype(jnp.float32) * tiles.unit(config.weights), keys),
    pairs,
    table,
  )


def prefetched(plan: Plan, k: jax.Array, rows: Rows) -> tuple[jax.Array, ...]:
  """Pages of each tile [B, pages m] and the last that is needed [B]."""
  if not plan.pages or rows.pages is None:
    return ()
  page, count = k.shape[1], plan.pages * plan.m
  pages = paging.fill_pages(rows.pages, count)
  if rows.lengths is None:
    return pages, jnp.full(pages.shape[0], count - 1, jnp.int32)
  needed = (jnp.clip(rows.lengths, 1, count * page) - 1) // page
  return pages, needed.astype(jnp.int32)


def make_specs(
  operands: Operands,
  plan: Plan,
  locate: Callable[..., tuple[Any, ...]],
) -> Operands:
  """`locate` maps a point of the grid to (b, h, g, i, j)."""

  def spec(block, index):
    return pl.BlockSpec(block, lambda *ids: index(*locate(*ids)))

  def of_page(r, size):
    def at(*ids):
      *point, pages, last = ids
      b, _, g, _, j = locate(*point, pages, last)
      # A page that is not needed is not fetched: it is the one before.
      column = jnp.minimum(j * plan.pages + r, last[b])
      return pages[b, column], 0, g

    return pl.BlockSpec((None, plan.s // plan.pages, size), at)

  def of_keys(size):
    if plan.pages:
      return tuple(of_page(r, size) for r in range(plan.pages))
    return spec((None, None, plan.s, size), lambda b, h, g, i, j: (b, g, j, 0))

  dim, values = operands.q.shape[-1], plan.values
  of_query = spec((None, 1, plan.t), lambda b, h, g, i, j: (b, 0, i))
  of_key = spec((None, 1, plan.s), lambda b, h, g, i, j: (b, 0, j))
  of_head = spec((None, None, 1, plan.t), lambda b, h, g, i, j: (b, h, 0, i))
  scalars = pl.BlockSpec(memory_space=pltpu.SMEM)
  of_blocks = lambda count: pl.BlockSpec(
    (None, 2, count),
    lambda *ids: (locate(*ids)[0], 0, 0),
    memory_space=pltpu.SMEM,
  )
  at_query = lambda b, h, g, i, j: (b, h, i, 0)
  return Operands(
    spec((None, None, plan.t, dim), at_query),
    of_keys(dim),
    of_keys(values),
    scalars,
    scalars,
    of_query,
    of_key,
    of_query,
    of_key,
    of_blocks(plan.n),
    of_blocks(plan.m),
    of_key,
    None
    if operands.pairs is None
    else spec((None, None, plan.t, plan.s), at_pairs(operands.pairs.shape)),
    spec((None, plan.s, 2 * dim), lambda b, h, g, i, j: (b, j, 0)),
    of_head,
    of_head,
    spec((None, None, plan.t, values), at_query),
  )


def at_pairs(shape: tuple[int, ...]) -> Callable[..., Any]:
  """Block of `pairs`, of which sequences or heads may share one."""
  own_b, own_h = (np.int32(size > 1) for size in shape[:2])
  return lambda b, h, g, i, j: (b * own_b, h * own_h, i, j)


def has_diagonal(plan: Plan) -> bool:
  """Whether tiles meet the diagonal only where they begin on it."""
  config = plan.config
  return (
    config.causal
    and config.window is None
    and plan.t == plan.s
    and config.offset is not None
    and config.offset % plan.t == 0
  )


def _next_tiles(plan: Plan) -> Callable[..., Any]:
  """Tiles of queries and of keys to fetch at (i, j).

  For a tile that is skipped, those of the next that is not: nothing else hides
  the time that it takes.
  """
  config = plan.config
  if config.offset is None or not (config.causal or config.window):
    return lambda i, j: (i, j)

  def seen(i):
    first = i * plan.t + config.offset
    q = first, first + plan.t - 1
    return tiles.key_blocks(config, q, None, plan.s, plan.m)

  def find(i, j):
    low, high = seen(i)
    after = jnp.minimum(i + 1, plan.n - 1)
    start = 0 if config.window is None else seen(after)[0]
    key = jnp.where(j < high, jnp.maximum(j, low), start)
    return jnp.where(j < high, i, after), jnp.minimum(key, plan.m - 1)

  return find


def _near_query(plan: Plan) -> Callable[..., Any]:
  """The same for the tile of queries."""
  config = plan.config
  if config.offset is None or not (config.causal or config.window):
    return lambda i, j: i

  def clamp(i, j):
    k = j * plan.s, j * plan.s + plan.s - 1
    offset = config.offset, config.offset
    low, high = tiles.query_blocks(config, k, offset, plan.t, plan.n)
    return jnp.clip(i, jnp.minimum(low, plan.n - 1), jnp.maximum(high - 1, 0))

  return clamp


def by_query(plan: Plan) -> Callable[..., tuple[Any, ...]]:
  """Grid (b, h, i, j)."""
  find, share = _next_tiles(plan), np.int32(plan.share)
  return lambda b, h, i, j, *_: (b, h, jax.lax.div(h, share), *find(i, j))


def by_pairs(
  plan: Plan, batch: int, heads: int, shape: tuple[int, ...]
) -> Callable[..., tuple[Any, ...]]:
  """Grid (b, h, i, j, all that share a tile of `pairs`)."""
  # Sequences and heads that share; a size of its own on the grid is 1 here.
  share_h = np.int32(heads // shape[1])
  group = np.int32(plan.share)

  def locate(b, h, i, j, step):
    b = b + jax.lax.div(step, share_h) if shape[0] < batch else b
    h = h + jax.lax.rem(step, share_h)
    return b, h, jax.lax.div(h, group), i, j

  return locate


def by_key(plan: Plan) -> Callable[..., tuple[Any, ...]]:
  """Grid (b, g, j, r n + i)."""
  near, size = _near_query(plan), np.int32(plan.n)

  def locate(b, g, j, step):
    h = g * plan.share + jax.lax.div(step, size)
    return b, h, g, near(jax.lax.rem(step, size), j), j

  return locate

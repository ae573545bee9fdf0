"""A tile of logits on a TPU: which there are, their masks, keys and columns.

Axes: those of `tpu_grid`, tiles of t queries and s keys.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.softmax_attention import tiles
from kernels_pallas.softmax_attention.operands import Operands
from kernels_pallas.softmax_attention.options import Config
from kernels_pallas.softmax_attention.tpu_grid import LANES, Plan, keeps_keys

__all__ = [
  'add_pairs',
  'column_of',
  'column_scratch',
  'fill_columns',
  'first_queries',
  'in_parts',
  'key_scratch',
  'over_tiles',
  'query_logits',
  'rotate',
  'seen_keys',
  'sides',
  'to_row',
  'turned',
  'turned_once',
  'wide',
]

# Queries whose logits are worked on at a time: few enough that little is
# stored in between, enough to fill the matrix units.
_ROWS = 256


def column(row: jax.Array) -> jax.Array:
  """[1, N] -> [N, 128], the same number in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def to_row(column: jax.Array) -> jax.Array:
  """[N, 128] -> [1, N]."""
  return column.T[:1]


def wide(column: jax.Array, size: int) -> jax.Array:
  """[N, 128] -> [N, size]."""
  return column if size == LANES else jnp.tile(column, (1, size // LANES))


def rotate(x: jax.Array, table: jax.Array, back: bool = False) -> jax.Array:
  """`tiles.rotate` by rolls, which keep all lanes busy."""
  half = table.shape[1] // 2
  turned = pltpu.roll(table, half, 1)
  first = jax.lax.broadcasted_iota(jnp.int32, table.shape, 1) < half
  cos = jnp.where(first, table, turned)
  sin = jnp.where(first, -turned, table)
  sin = -sin if back else sin
  wide = x.astype(jnp.float32)
  return (wide * cos + pltpu.roll(wide, half, 1) * sin).astype(x.dtype)


def key_scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
  """VMEM for the keys of a head that are rotated once, if they are."""
  if not keeps_keys(plan, operands):
    return {}
  shape = plan.s * plan.m, operands.k.shape[-1]
  return {'rotated': pltpu.VMEM(shape, operands.k.dtype)}


def turned(refs: Operands) -> jax.Array:
  """The keys of a tile, rotated if they are to be."""
  k = refs.k[...]
  return k if refs.table is None else rotate(k, refs.table[...])


def turned_once(
  plan: Plan, refs: Operands, space: dict[str, Any], i: Any, j: Any, first: Any
) -> jax.Array:
  """The keys of a tile, rotated by the first queries that see them."""
  if 'rotated' not in space:
    return turned(refs)
  rotated = space['rotated']
  rows = pl.ds(pl.multiple_of(j * plan.s, plan.s), plan.s)

  @pl.when(i == first)
  def _():
    rotated[rows, :] = turned(refs)

  return rotated[rows, :]


def _offset(config: Config, refs: Operands, b: Any) -> Any:
  return config.offset if refs.offset is None else refs.offset[b]


def first_queries(plan: Plan, refs: Operands, j: Any) -> Any:
  """The first tile of queries that sees the keys of tile j."""
  offset = _offset(plan.config, refs, pl.program_id(0))
  k = j * plan.s, j * plan.s + plan.s - 1
  span = offset, offset
  return tiles.query_blocks(plan.config, k, span, plan.t, plan.n)[0]


def _has_diagonal(plan: Plan) -> bool:
  """Whether tiles meet the diagonal only where they begin on it."""
  config = plan.config
  return (
    config.causal
    and config.window is None
    and plan.t == plan.s
    and config.offset is not None
    and config.offset % plan.t == 0
  )


def over_tiles(
  plan: Plan,
  refs: Operands,
  b: jax.Array,
  i: jax.Array,
  j: jax.Array,
  step: Callable[[Any, bool], None],
) -> None:
  """Calls step(mask, diagonal) where tile (i, j) of sequence b shows something.

  `mask` makes the mask of a part of a tile from its shape, the axis of its
  queries, the segments and spans of queries and keys, and the first query and
  key of the part; it is None where all is visible. If `diagonal`, query n of a
  tile sees none but its first n + 1 keys.
  """
  config = plan.config
  offset = _offset(config, refs, b)
  limit = plan.limit if refs.limit is None else refs.limit[b]
  q = i * plan.t + offset, i * plan.t + offset + plan.t - 1
  k = j * plan.s, j * plan.s + plan.s - 1
  some, every = tiles.overlap(config, q, k, limit)
  if refs.query_segment is not None or refs.query_span is not None:
    every = False

  def mask(shape, axis, of_query, of_key, query=0, key=0):
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    return tiles.visible(
      config,
      tiles.Side(iota(axis) + (q[0] + query), *of_query),
      tiles.Side(iota(1 - axis) + (k[0] + key), *of_key),
      limit,
    )

  run = lambda when, *what: (
    step(*what) if when is True else pl.when(when)(lambda: step(*what))
  )
  if every is True:
    run(some, None, False)
    return
  if every is not False:
    run(every, None, False)
    some &= jnp.logical_not(every)
  if _has_diagonal(plan):
    run(some & (q[0] == k[0]), mask, True)
    some &= q[0] != k[0]
    if every is not False and limit is None:
      # No other tile is seen in part.
      return
  run(some, mask, False)


def column_scratch(refs: Operands, names: list[str], size: int) -> dict:
  """VMEM for columns of those operands that are there."""
  return {
    name: pltpu.VMEM((size, LANES), getattr(refs, name).dtype)
    for name in names
    if getattr(refs, name) is not None
  }


def fill_columns(refs: Operands, space: dict[str, Any]) -> None:
  """Makes columns of the rows of a tile, where there is VMEM for them."""
  for name, ref in space.items():
    if name in Operands._fields:
      ref[...] = column(getattr(refs, name)[...])


def column_of(space: dict[str, Any], name: str, rows: Any, width: int) -> Any:
  """Some rows of a column, repeated; None if there is no such column."""
  return wide(space[name][rows, :], width) if name in space else None


def sides(
  refs: Operands, space: dict[str, Any], side: str, rows: Any, lanes: Any
) -> tuple[Any, Any]:
  """Segment and span of `side` in a part of a tile.

  Of `rows`, repeated, if there are columns of that side; else of `lanes`.
  """

  def take(what):
    name = f'{side}_{what}'
    if name in space:
      return wide(space[name][rows, :], lanes.size)
    ref = getattr(refs, name)
    return None if ref is None else ref[:, lanes]

  return take('segment'), take('span')


def add_pairs(
  x: jax.Array, seen: jax.Array | None, pairs: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Logits with the pairs of their tile, and which of them are seen."""
  pairs = pairs.astype(jnp.float32)
  return x + pairs, tiles.shown(pairs, seen)


def in_parts(
  size: int, product: Callable[[Any], Any]
) -> Iterator[tuple[Any, Any]]:
  """Some of `size` rows at a time, and the product of these.

  The next product is written down before the one that is given out is used:
  the compiler then lets the matrix units run ahead of the others.
  """
  parts = [pl.ds(row, min(_ROWS, size - row)) for row in range(0, size, _ROWS)]
  ready = product(parts[0])
  for part, after in zip(parts, [*parts[1:], None], strict=True):
    found = ready
    if after is not None:
      ready = product(after)
    yield part, found


def seen_keys(plan: Plan, diagonal: bool, rows: Any) -> Any:
  """The keys of a tile that some of its queries `rows` see."""
  return pl.ds(0, rows.start + rows.size if diagonal else plan.s)


def query_logits(
  config: Config,
  refs: Operands,
  space: dict[str, Any],
  rows: Any,
  x: jax.Array,
  mask: Any,
) -> tuple[jax.Array, jax.Array | None]:
  """Logits of some queries of a tile, and which of them are seen.

  x: products of the queries `rows` and the first keys of the tile.
  """
  x *= config.scale * tiles.unit(config.weights)
  keys = pl.ds(0, x.shape[1])
  if refs.bias is not None:
    x += refs.bias[:, keys]
  seen = None
  if mask is not None:
    both = (sides(refs, space, y, rows, keys) for y in ('query', 'key'))
    seen = mask(x.shape, 0, *both, rows.start)
  if refs.pairs is None:
    return x, seen
  return add_pairs(x, seen, refs.pairs[rows, keys])

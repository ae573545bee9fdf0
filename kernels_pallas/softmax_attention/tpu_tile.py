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
from kernels_pallas.softmax_attention.tpu_grid import LANES, Plan, has_diagonal

__all__ = [
  'add_pairs',
  'column_of',
  'column_scratch',
  'fill_columns',
  'in_parts',
  'key_gain',
  'join_pages',
  'key_scratch',
  'over_tiles',
  'page_scratch',
  'query_logits',
  'rotate',
  'seen_keys',
  'sides',
  'to_logits',
  'to_row',
  'turn_once',
  'turned',
  'turned_keys',
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
  """`tiles.rotate` by the table of `tpu_grid.prepare`; [N, D] in float32."""
  cos, sin = jnp.split(table, 2, 1)
  x = x.astype(jnp.float32)
  a, b = x * cos, pltpu.roll(x, x.shape[1] // 2, 1) * sin
  return a - b if back else a + b


def to_logits(config: Config, refs: Operands, x: jax.Array) -> jax.Array:
  """Of products of queries and turned keys; the table holds the scale."""
  if refs.table is not None:
    return x
  return x * (config.scale * tiles.unit(config.weights))


def key_gain(config: Config, refs: Operands) -> float:
  """What a sum of slopes and turned keys, or the like, lacks as a gradient."""
  if refs.table is None:
    return config.scale
  return 1 / tiles.unit(config.weights)


def key_scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
  """VMEM for the keys of a head that are rotated once, if they are."""
  if not plan.kept:
    return {}
  shape = plan.s * plan.m, operands.q.shape[-1]
  return {'rotated': pltpu.VMEM(shape, operands.q.dtype)}


def page_scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
  """VMEM for the pages of a tile, if keys lie in pages."""
  if not plan.pages:
    return {}
  dim, dtype = operands.q.shape[-1], operands.q.dtype
  return {
    'own_k': pltpu.VMEM((plan.s, dim), dtype),
    'own_v': pltpu.VMEM((plan.s, plan.values), dtype),
  }


def join_pages(
  plan: Plan, refs: Operands, space: dict[str, Any], b: Any, j: Any
) -> Operands:
  """`refs` with the pages of tile j of sequence b in one piece."""
  if not plan.pages:
    return refs
  limit = plan.limit if refs.limit is None else refs.limit[b]
  first = j * plan.s

  def join():
    for name in ('k', 'v'):
      place = 0
      for page in getattr(refs, name):
        space[f'own_{name}'][pl.ds(place, page.shape[0]), :] = page[...]
        place += page.shape[0]

  if limit is None:
    join()
  else:
    pl.when(first < limit)(join)

    # Behind the end there may be anything, and 0 * NaN is NaN.
    @pl.when((first < limit) & (first + plan.s > limit))
    def _():
      v = space['own_v']
      index = jax.lax.broadcasted_iota(jnp.int32, v.shape, 0) + first
      kept = jnp.where(index < limit, v[...].astype(jnp.float32), 0.0)
      v[...] = kept.astype(v.dtype)

  return refs._replace(k=space['own_k'], v=space['own_v'])


def turned(refs: Operands) -> jax.Array:
  """The keys of a tile, rotated if they are to be."""
  k = refs.k[...]
  return k if refs.table is None else rotate(k, refs.table[...]).astype(k.dtype)


def _on_diagonal(plan: Plan, refs: Operands) -> bool:
  """Whether tiles on the diagonal rotate their keys and are never skipped.

  The rotation is then written down between products, where it costs less.
  """
  return has_diagonal(plan) and refs.query_range is None


def turn_once(
  plan: Plan, refs: Operands, space: dict[str, Any], i: Any, j: Any
) -> None:
  """Keeps the keys of tile j, rotated by the first queries that see them.

  These need not see a key of it in the end, for reasons that are not known
  when the program is traced.
  """
  if 'rotated' not in space:
    return
  offset = _offset(plan.config, refs, pl.program_id(0))
  k = j * plan.s, j * plan.s + plan.s - 1
  seen = tiles.query_blocks(plan.config, k, (offset, offset), plan.t, plan.n)
  now = i == seen[0]
  start = plan.config.offset
  if start is not None and _on_diagonal(plan, refs):
    if start <= 0:
      return
    now &= i * plan.t + offset != k[0]

  @pl.when(now)
  def _():
    space['rotated'][_rows_of(plan, j), :] = turned(refs)


def turned_keys(
  plan: Plan, refs: Operands, space: dict[str, Any], j: Any, diagonal: bool
) -> Callable[[int], jax.Array]:
  """The first keys of tile j, as many as asked for, after `turn_once`."""
  if 'rotated' not in space or not diagonal:
    if 'rotated' in space:
      k = space['rotated'][_rows_of(plan, j), :]
    else:
      k = turned(refs)
    return lambda count: k[:count]
  kept = space['rotated']
  first = pl.multiple_of(j * plan.s, plan.s)
  if _on_diagonal(plan, refs):
    for rows in _parts(plan.s):
      place = pl.ds(pl.multiple_of(first + rows.start, LANES), rows.size)
      k = rotate(refs.k[rows, :], refs.table[rows, :])
      kept[place, :] = k.astype(kept.dtype)
  return lambda count: kept[pl.ds(first, count), :]


def _rows_of(plan: Plan, j: Any) -> Any:
  return pl.ds(pl.multiple_of(j * plan.s, plan.s), plan.s)


def _offset(config: Config, refs: Operands, b: Any) -> Any:
  return config.offset if refs.offset is None else refs.offset[b]


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
  segments = None
  if refs.query_range is not None:
    mine, its = refs.query_range, refs.key_range
    segments = (mine[0, i], mine[1, i]), (its[0, j], its[1, j])
  some, every = tiles.overlap(config, q, k, limit, segments)
  if refs.query_span is not None:
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
  if has_diagonal(plan):
    run(some & (q[0] == k[0]), mask, True)
    some &= q[0] != k[0]
    if every is not False and limit is None and segments is None:
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


def _parts(size: int) -> list[Any]:
  return [pl.ds(row, min(_ROWS, size - row)) for row in range(0, size, _ROWS)]


def in_parts(
  size: int, product: Callable[[Any], Any], down: bool = False
) -> Iterator[tuple[Any, Any]]:
  """Some of `size` rows at a time, and the product of these.

  The last of them come first if `down`.

  The next product is written down before the one that is given out is used:
  the compiler then lets the matrix units run ahead of the others.
  """
  parts = _parts(size)[:: -1 if down else 1]
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
  x = to_logits(config, refs, x)
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

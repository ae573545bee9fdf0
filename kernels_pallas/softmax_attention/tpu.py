"""Softmax attention for TPUs (Mosaic).

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features, padded to whole lanes.

The last axis of the grid adds tiles to sums that stay in VMEM. The forward
pass and the gradient of q hold queries in rows and keys in lanes; the gradients
of k and v hold them the other way round, so that no tile is transposed. What
belongs to a query or key lies in HBM as a row, and becomes a column once for
all tiles that need it. Tiles that the mask leaves whole skip the mask, those
that it empties are skipped, and their operands not fetched.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import LOG2E, dot, silu, softmax_step
from kernels_pallas.softmax_attention import tiles
from kernels_pallas.softmax_attention.operands import (
  Operands,
  cut_features,
)
from kernels_pallas.softmax_attention.options import Config, Rows
from kernels_pallas.softmax_attention.tpu_grid import (
  LANES,
  Plan,
  by_key,
  by_pairs,
  by_query,
  head_major,
  keeps_keys,
  make_specs,
  pad_row,
  prepare,
)

__all__ = ['backward', 'forward']


def _launch(
  body: Callable[..., None],
  plan: Plan,
  operands: Operands,
  locate: Callable[..., tuple[Any, ...]],
  grid: tuple[int, ...],
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  name: str,
  interpret: Any,
) -> list[jax.Array]:
  """`launch` for the grid (batch, heads, rows, sum)."""
  batch, heads, rows, dim = operands.q.shape
  logits = batch * heads * rows * plan.s * plan.m
  semantics: list[Any] = ['parallel'] * (len(grid) - 1) + ['arbitrary']
  if 'rotated' in scratch:
    # Rotated keys pass from one tile of queries to the next.
    semantics[2] = 'arbitrary'
  return launch(
    functools.partial(body, plan=plan),
    operands,
    make_specs(operands, plan, locate),
    outputs,
    scratch,
    grid=grid,
    compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
    cost_estimate=pl.CostEstimate(
      flops=2 * logits * (dim + operands.v.shape[3]),
      bytes_accessed=sum(x.nbytes for x in operands if x is not None),
      transcendentals=logits,
    ),
    interpret=interpret,
    name=name,
  )


def _column(row: jax.Array) -> jax.Array:
  """[1, N] -> [N, 128], the same number in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _row(column: jax.Array) -> jax.Array:
  """[N, 128] -> [1, N]."""
  return column.T[:1]


def _wide(column: jax.Array, size: int) -> jax.Array:
  """[N, 128] -> [N, size]."""
  return column if size == LANES else jnp.tile(column, (1, size // LANES))


def _rotate(x: jax.Array, table: jax.Array, back: bool = False) -> jax.Array:
  """`tiles.rotate` by rolls, which keep all lanes busy."""
  half = table.shape[1] // 2
  turned = pltpu.roll(table, half, 1)
  first = jax.lax.broadcasted_iota(jnp.int32, table.shape, 1) < half
  cos = jnp.where(first, table, turned)
  sin = jnp.where(first, -turned, table)
  sin = -sin if back else sin
  wide = x.astype(jnp.float32)
  return (wide * cos + pltpu.roll(wide, half, 1) * sin).astype(x.dtype)


def _key_scratch(plan: Plan, operands: Operands) -> dict[str, Any]:
  if not keeps_keys(plan, operands):
    return {}
  shape = plan.s * plan.m, operands.k.shape[-1]
  return {'rotated': pltpu.VMEM(shape, operands.k.dtype)}


def _turned(refs: Operands) -> jax.Array:
  k = refs.k[...]
  return k if refs.table is None else _rotate(k, refs.table[...])


def _keys(
  plan: Plan, refs: Operands, space: dict[str, Any], i: Any, j: Any, first: Any
) -> jax.Array:
  """The keys of a tile, rotated by the first queries that see them."""
  if 'rotated' not in space:
    return _turned(refs)
  rotated = space['rotated']
  rows = pl.ds(pl.multiple_of(j * plan.s, plan.s), plan.s)

  @pl.when(i == first)
  def _():
    rotated[rows, :] = _turned(refs)

  return rotated[rows, :]


def _offset(config: Config, refs: Operands, b: Any) -> Any:
  return config.offset if refs.offset is None else refs.offset[b]


def _first(plan: Plan, refs: Operands, j: Any) -> Any:
  """The first tile of queries that sees the keys of tile j."""
  offset = _offset(plan.config, refs, pl.program_id(0))
  k = j * plan.s, j * plan.s + plan.s - 1
  span = offset, offset
  return tiles.query_blocks(plan.config, k, span, plan.t, plan.n)[0]


def _over_tiles(
  config: Config,
  plan: Plan,
  refs: Operands,
  b: jax.Array,
  i: jax.Array,
  j: jax.Array,
  step: Callable[[Any], None],
) -> None:
  """Calls step(mask) where tile (i, j) of sequence b holds visible pairs.

  `mask` makes the mask from the shape of a tile, the axis of its queries, and
  the segments and spans of queries and keys; it is None where all is visible.
  """
  offset = _offset(config, refs, b)
  limit = plan.limit if refs.limit is None else refs.limit[b]
  q = i * plan.t + offset, i * plan.t + offset + plan.t - 1
  k = j * plan.s, j * plan.s + plan.s - 1
  some, every = tiles.overlap(config, q, k, limit)
  if refs.query_segment is not None or refs.query_span is not None:
    every = False

  def mask(shape, axis, of_query, of_key):
    iota = functools.partial(jax.lax.broadcasted_iota, jnp.int32, shape)
    return tiles.visible(
      config,
      tiles.Side(iota(axis) + q[0], *of_query),
      tiles.Side(iota(1 - axis) + k[0], *of_key),
      limit,
    )

  run = lambda when, what: (
    step(what) if when is True else pl.when(when)(lambda: step(what))
  )
  if every is True:
    run(some, None)
  elif every is False:
    run(some, mask)
  else:
    run(every, None)
    run(some & jnp.logical_not(every), mask)


def _column_scratch(refs: Operands, names: list[str], size: int) -> dict:
  """VMEM for columns of those operands that are there."""
  return {
    name: pltpu.VMEM((size, LANES), getattr(refs, name).dtype)
    for name in names
    if getattr(refs, name) is not None
  }


def _fill_columns(refs: Operands, space: dict[str, Any]) -> None:
  for name, ref in space.items():
    if name in Operands._fields:
      ref[...] = _column(getattr(refs, name)[...])


def _column_of(space: dict[str, Any], name: str, size: int) -> Any:
  return _wide(space[name][...], size) if name in space else None


def _sides(refs: Operands, space: dict[str, Any], side: str, size: int):
  """Segment and span of `side`: from columns if they are there, or rows."""

  def take(what):
    name = f'{side}_{what}'
    if name in space:
      return _column_of(space, name, size)
    ref = getattr(refs, name)
    return None if ref is None else ref[...]

  return take('segment'), take('span')


def _add_pairs(
  x: jax.Array,
  seen: jax.Array | None,
  refs: Operands,
  transpose: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  if refs.pairs is None:
    return x, seen
  pairs = refs.pairs[...].astype(jnp.float32)
  pairs = pairs.T if transpose else pairs
  return x + pairs, tiles.shown(pairs, seen)


def _query_logits(
  config: Config,
  plan: Plan,
  refs: Operands,
  space: dict[str, Any],
  k: jax.Array,
  mask: Any,
) -> tuple[jax.Array, jax.Array | None]:
  """[t, s], and which of them are seen."""
  unit = config.scale * tiles.unit(config.weights)
  x = dot(refs.q[...], k, transpose=True) * unit
  if refs.bias is not None:
    x += refs.bias[...]
  seen = None
  if mask is not None:
    seen = mask(
      x.shape,
      0,
      _sides(refs, space, 'query', plan.s),
      _sides(refs, space, 'key', plan.s),
    )
  return _add_pairs(x, seen, refs)


def _forward_body(refs, outputs, space, *, plan):
  config, (out, lse) = plan.config, outputs
  i, j = pl.program_id(2), pl.program_id(3)
  first = _first(plan, refs, j) if 'rotated' in space else None
  peak, total, acc = space['peak'], space['total'], space['acc']

  @pl.when(j == 0)
  def _():
    peak[...] = jnp.full_like(peak, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)
    _fill_columns(refs, space)

  def step(mask):
    k = _keys(plan, refs, space, i, j, first)
    x, seen = _query_logits(config, plan, refs, space, k, mask)
    x = tiles.hide(x, seen, -jnp.inf)
    weights, decay, peak[...], total[...] = softmax_step(
      x,
      peak[...],
      total[...],
      1,
      jnp.exp2,
      lambda shift: _wide(shift, plan.s),
    )
    decayed = acc[...] * _wide(decay, acc.shape[1])
    acc[...] = decayed + dot(weights, refs.v[...])

  _over_tiles(config, plan, refs, pl.program_id(0), i, j, step)

  @pl.when(j == plan.m - 1)
  def _():
    seen = total[...] > 0
    safe = jnp.where(seen, total[...], 1.0)
    out[...] = (acc[...] / _wide(safe, acc.shape[1])).astype(out.dtype)
    natural = peak[...] / LOG2E + jnp.log(safe)
    lse[...] = _row(jnp.where(seen, natural, -jnp.inf))


def _silu_body(refs, outputs, space, *, plan):
  config, acc = plan.config, space['acc']
  i, j = pl.program_id(2), pl.program_id(3)
  first = _first(plan, refs, j) if 'rotated' in space else None

  @pl.when(j == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)
    _fill_columns(refs, space)

  def step(mask):
    k = _keys(plan, refs, space, i, j, first)
    x, seen = _query_logits(config, plan, refs, space, k, mask)
    weights, _ = silu(tiles.hide(x, seen, 0.0))
    acc[...] += dot(weights, refs.v[...])

  _over_tiles(config, plan, refs, pl.program_id(0), i, j, step)

  @pl.when(j == plan.m - 1)
  def _():
    outputs[0][...] = acc[...].astype(outputs[0].dtype)


def forward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None = None,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None]:
  """The function of `reference.forward`; out in `tiles.out_dtype`."""
  plan, operands = prepare(config, False, q, k, v, bias, table, rows, pairs)
  batch, heads, queries = q.shape[0], q.shape[2], plan.t * plan.n
  values, dtype = operands.v.shape[-1], tiles.out_dtype(v, bias)
  outputs = [
    (
      jax.ShapeDtypeStruct((batch, heads, queries, values), dtype),
      pl.BlockSpec(
        (None, None, plan.t, values), lambda b, h, i, j: (b, h, i, 0)
      ),
    ),
  ]
  scratch = {
    'acc': pltpu.VMEM((plan.t, values), jnp.float32),
    **_key_scratch(plan, operands),
    **_column_scratch(operands, ['query_segment', 'query_span'], plan.t),
  }
  if config.weights == 'softmax':
    lse = jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32)
    row = (None, None, 1, plan.t)
    outputs.append((lse, pl.BlockSpec(row, lambda b, h, i, j: (b, h, 0, i))))
    for name in ('peak', 'total'):
      scratch[name] = pltpu.VMEM((plan.t, LANES), jnp.float32)
  out, *lse = _launch(
    _forward_body if config.weights == 'softmax' else _silu_body,
    plan,
    operands,
    by_query(plan),
    (batch, heads, plan.n, plan.m),
    outputs,
    scratch,
    'attention_forward',
    interpret,
  )
  out = jnp.swapaxes(out[:, :, : q.shape[1], : v.shape[-1]], 1, 2)
  return out, lse[0][:, :, 0, : q.shape[1]] if lse else None


def _query_slopes(
  plan: Plan, refs: Operands, space: dict[str, Any], k: jax.Array, mask: Any
) -> jax.Array:
  """[t, s], the gradient of the logits."""
  x, seen = _query_logits(plan.config, plan, refs, space, k, mask)
  lse, delta = (_column_of(space, name, plan.s) for name in ('lse', 'delta'))
  inner = dot(refs.g[...], refs.v[...], transpose=True)
  return tiles.slopes(
    plan.config.weights, x, seen, lse, delta, inner, jnp.exp2
  )[1]


def _dq_body(refs, outputs, space, *, plan):
  config, acc = plan.config, space['acc']
  i, j = pl.program_id(2), pl.program_id(3)
  first = _first(plan, refs, j) if 'rotated' in space else None

  @pl.when(j == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)
    _fill_columns(refs, space)

  def step(mask):
    k = _keys(plan, refs, space, i, j, first)
    acc[...] += dot(_query_slopes(plan, refs, space, k, mask), k)

  _over_tiles(config, plan, refs, pl.program_id(0), i, j, step)

  @pl.when(j == plan.m - 1)
  def _():
    outputs[0][...] = (acc[...] * config.scale).astype(outputs[0].dtype)


def _dkv_body(refs, outputs, space, *, plan):
  config = plan.config
  j, count = pl.program_id(2), pl.program_id(3)
  i = jax.lax.rem(count, np.int32(plan.n))
  keys, dk, dv = space['keys'], space['dk'], space['dv']

  @pl.when(count == 0)
  def _():
    for name in ('dk', 'dv', 'db'):
      if name in space:
        space[name][...] = jnp.zeros_like(space[name])
    keys[...] = _turned(refs)
    _fill_columns(refs, space)

  def step(mask):
    q, g = refs.q[...], refs.g[...]
    x = dot(keys[...], q, transpose=True)
    x *= config.scale * tiles.unit(config.weights)
    if refs.bias is not None:
      x += _column_of(space, 'bias', plan.t)
    seen = None
    if mask is not None:
      sides = [_sides(refs, space, side, plan.t) for side in ('query', 'key')]
      seen = mask(x.shape, 1, *sides)
    x, seen = _add_pairs(x, seen, refs, transpose=True)
    lse, delta = (
      None if row is None else row[...] for row in (refs.lse, refs.delta)
    )
    inner = dot(refs.v[...], g, transpose=True)
    weights, slope = tiles.slopes(
      config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    dv[...] += dot(weights, g)
    if 'db' in space:
      parts = jnp.split(slope, plan.t // LANES, 1)
      space['db'][...] += functools.reduce(jnp.add, parts)
    dk[...] += dot(slope, q)

  _over_tiles(config, plan, refs, pl.program_id(0), i, j, step)

  @pl.when(count == plan.n * plan.share - 1)
  def _():
    total = dk[...] * config.scale
    if refs.table is not None:
      total = _rotate(total, refs.table[...], back=True)
    outputs[0][...] = total.astype(outputs[0].dtype)
    outputs[1][...] = dv[...].astype(outputs[1].dtype)
    if 'db' in space:
      column = jnp.sum(space['db'][...], 1, keepdims=True)
      outputs[2][...] = _row(jnp.broadcast_to(column, (plan.s, LANES)))


def _dq(
  plan: Plan, operands: Operands, dtype: Any, interpret: Any
) -> jax.Array:
  """[B, H, n t, D]."""
  batch, heads, queries, dim = operands.q.shape
  columns = ['query_segment', 'query_span', 'lse', 'delta']
  (dq,) = _launch(
    _dq_body,
    plan,
    operands,
    by_query(plan),
    (batch, heads, plan.n, plan.m),
    [
      (
        jax.ShapeDtypeStruct((batch, heads, queries, dim), dtype),
        pl.BlockSpec(
          (None, None, plan.t, dim), lambda b, h, i, j: (b, h, i, 0)
        ),
      )
    ],
    {
      'acc': pltpu.VMEM((plan.t, dim), jnp.float32),
      **_key_scratch(plan, operands),
      **_column_scratch(operands, columns, plan.t),
    },
    'attention_dq',
    interpret,
  )
  return dq


def _dkv(
  plan: Plan, operands: Operands, dtype: Any, interpret: Any
) -> list[jax.Array]:
  """[B, G, m s, D], [B, G, m s, V] and, with a bias, [B, G, 1, m s]."""
  batch, groups, keys, dim = operands.k.shape
  values = operands.v.shape[-1]
  columns = ['key_segment', 'key_span', 'bias']
  scratch = {
    'keys': pltpu.VMEM((plan.s, dim), dtype),
    'dk': pltpu.VMEM((plan.s, dim), jnp.float32),
    'dv': pltpu.VMEM((plan.s, values), jnp.float32),
    **_column_scratch(operands, columns, plan.s),
  }
  outputs = [
    (
      jax.ShapeDtypeStruct((batch, groups, keys, width), dtype),
      pl.BlockSpec(
        (None, None, plan.s, width), lambda b, g, j, n: (b, g, j, 0)
      ),
    )
    for width in (dim, values)
  ]
  if operands.bias is not None:
    scratch['db'] = pltpu.VMEM((plan.s, LANES), jnp.float32)
    outputs.append(
      (
        jax.ShapeDtypeStruct((batch, groups, 1, keys), jnp.float32),
        pl.BlockSpec((None, None, 1, plan.s), lambda b, g, j, n: (b, g, 0, j)),
      )
    )
  return _launch(
    _dkv_body,
    plan,
    operands,
    by_key(plan),
    (batch, groups, plan.m, plan.n * plan.share),
    outputs,
    scratch,
    'attention_dkv',
    interpret,
  )


def _dpairs_body(refs, outputs, space, *, plan, locate):
  step_id = pl.program_id(4)
  b, _, _, i, j = locate(*(pl.program_id(axis) for axis in range(5)))
  acc = space['acc']

  @pl.when(step_id == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)

  def step(mask):
    _fill_columns(refs, space)
    k = _turned(refs)
    acc[...] += _query_slopes(plan, refs, space, k, mask)

  _over_tiles(plan.config, plan, refs, b, i, j, step)

  @pl.when(step_id == pl.num_programs(4) - 1)
  def _():
    outputs[0][...] = acc[...]


def _dpairs(plan: Plan, operands: Operands, interpret: Any) -> jax.Array:
  """[1 or B, 1 or H, n t, m s], summed over those that share it."""
  batch, heads = operands.q.shape[:2]
  shape = operands.pairs.shape
  locate = by_pairs(plan, batch, heads, shape)
  steps = batch // shape[0] * (heads // shape[1])
  (dp,) = _launch(
    functools.partial(_dpairs_body, locate=locate),
    plan,
    operands,
    locate,
    (*shape[:2], plan.n, plan.m, steps),
    [
      (
        jax.ShapeDtypeStruct(shape, jnp.float32),
        pl.BlockSpec(
          (None, None, plan.t, plan.s), lambda b, h, i, j, n: (b, h, i, j)
        ),
      )
    ],
    {
      'acc': pltpu.VMEM((plan.t, plan.s), jnp.float32),
      **_column_scratch(operands, ['query_segment', 'query_span'], plan.t),
    },
    'attention_dpairs',
    interpret,
  )
  return dp


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
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """The function of `xla.backward`."""
  plan, operands = prepare(config, True, q, k, v, bias, table, rows, pairs)
  queries, keys, dim = q.shape[1], k.shape[1], q.shape[3]
  tall = plan.t * plan.n
  operands = operands._replace(g=head_major(g, tall, False))
  if lse is not None and delta is not None:
    operands = operands._replace(
      lse=pad_row(lse * LOG2E, tall, jnp.inf), delta=pad_row(delta, tall)
    )
  dq = _dq(plan, operands, q.dtype, interpret)
  dk, dv, *db = _dkv(plan, operands, k.dtype, interpret)
  dp = None
  if pairs is not None:
    dp = _dpairs(plan, operands, interpret)[:, :, :queries, :keys]
  halves = table is not None
  cut = lambda x, rows, size, halves: jnp.swapaxes(
    cut_features(x[:, :, :rows], size, halves), 1, 2
  )
  return (
    cut(dq, queries, dim, halves),
    cut(dk, keys, dim, halves),
    cut(dv, keys, v.shape[-1], False),
    db[0][:, :, 0, :keys] if db else None,
    dp,
  )

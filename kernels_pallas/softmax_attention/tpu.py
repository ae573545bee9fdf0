"""Softmax attention for TPUs (Mosaic).

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features, padded to whole lanes.

The last axis of the grid adds tiles to sums that stay in VMEM. The forward
pass and the gradient of q hold queries in rows and keys in lanes; the gradients
of k and v hold them the other way round, so that no tile is transposed. What
belongs to a query or key lies in HBM as a row, and becomes a column once for
all tiles that need it. Tiles that the mask leaves whole skip the mask, and
those that it empties are skipped; their operands are not fetched if causality
or the window says so. A tile is worked on in parts, so that fewer of its logits
have to be stored. Keys are rotated in single precision, by cosines and sines
that hold the scale and are rounded like the keys.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import LOG2E, dot, silu, softmax_step
from kernels_pallas.softmax_attention import paging, tiles
from kernels_pallas.softmax_attention.operands import (
  Operands,
  cut_features,
)
from kernels_pallas.softmax_attention.options import Config, Rows
from kernels_pallas.softmax_attention.tpu_grid import (
  LANES,
  LARGEST_TABLE,
  Plan,
  by_key,
  by_pairs,
  by_query,
  head_major,
  make_specs,
  pad_row,
  pages_of_tile,
  prefetched,
  prepare,
)
from kernels_pallas.softmax_attention.tpu_tile import (
  add_pairs,
  column_of,
  column_scratch,
  fill_columns,
  in_parts,
  join_pages,
  key_gain,
  key_scratch,
  over_tiles,
  page_scratch,
  query_logits,
  rotate,
  seen_keys,
  sides,
  to_logits,
  to_row,
  turn_once,
  turned,
  turned_keys,
  wide,
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
  prefetched: tuple[jax.Array, ...] = (),
) -> list[jax.Array]:
  """`launch` for the grid (batch, heads, rows, sum)."""
  batch, heads, rows, dim = operands.q.shape
  keys = plan.s * plan.m
  logits = batch * heads * rows * keys
  read = operands
  if plan.pages:
    # Not the pools, but the pages of each sequence.
    heads //= plan.share
    flat = jax.ShapeDtypeStruct(
      (batch, heads, keys, dim + plan.values), read.q.dtype
    )
    read = read._replace(k=flat, v=None)
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
      flops=2 * logits * (dim + plan.values),
      bytes_accessed=sum(
        x.size * x.dtype.itemsize for x in jax.tree.leaves(read)
      ),
      transcendentals=logits,
    ),
    interpret=interpret,
    name=name,
    prefetched=prefetched,
  )


def _logits_in_parts(
  plan: Plan,
  refs: Operands,
  space: dict[str, Any],
  j: Any,
  mask: Any,
  diagonal: Any,
) -> Iterator[tuple[Any, jax.Array, jax.Array | None]]:
  """Rows of queries, their logits of a tile, and which of them are seen."""
  k = turned_keys(plan, refs, space, j, diagonal)

  def product(rows):
    keys = seen_keys(plan, diagonal, rows).size
    return dot(refs.q[rows, :], k(keys), transpose=True)

  # The longest first: fewer estimated cycles, and on 7x an estimate at all.
  for rows, x in in_parts(plan.t, product, down=diagonal):
    yield rows, *query_logits(plan.config, refs, space, rows, x, mask)


def _forward_body(refs, outputs, space, *, plan):
  out, lse = outputs
  i, j = pl.program_id(2), pl.program_id(3)
  refs = join_pages(plan, refs, space, pl.program_id(0), j)
  peak, total, acc = space['peak'], space['total'], space['acc']

  @pl.when(j == 0)
  def _():
    peak[...] = jnp.full_like(peak, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)
    fill_columns(refs, space)

  turn_once(plan, refs, space, i, j)

  def step(mask, diagonal):
    v = refs.v[...]
    for rows, x, seen in _logits_in_parts(plan, refs, space, j, mask, diagonal):
      weights, decay, peak[rows, :], total[rows, :] = softmax_step(
        tiles.hide(x, seen, -jnp.inf),
        peak[rows, :],
        total[rows, :],
        1,
        jnp.exp2,
        functools.partial(wide, size=x.shape[1]),
      )
      decayed = acc[rows, :] * wide(decay, acc.shape[1])
      acc[rows, :] = decayed + dot(weights, v[: x.shape[1]])

  over_tiles(plan, refs, pl.program_id(0), i, j, step)

  @pl.when(j == plan.m - 1)
  def _():
    seen = total[...] > 0
    safe = jnp.where(seen, total[...], 1.0)
    out[...] = (acc[...] / wide(safe, acc.shape[1])).astype(out.dtype)
    natural = peak[...] / LOG2E + jnp.log(safe)
    lse[...] = to_row(jnp.where(seen, natural, -jnp.inf))


def _silu_body(refs, outputs, space, *, plan):
  acc = space['acc']
  i, j = pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)
    fill_columns(refs, space)

  turn_once(plan, refs, space, i, j)

  def step(mask, diagonal):
    v = refs.v[...]
    for rows, x, seen in _logits_in_parts(plan, refs, space, j, mask, diagonal):
      weights, _ = silu(tiles.hide(x, seen, 0.0))
      acc[rows, :] += dot(weights, v[: x.shape[1]])

  over_tiles(plan, refs, pl.program_id(0), i, j, step)

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
  if rows.pages is not None and (
    pages_of_tile(k, v, LANES) is None or rows.pages.size > LARGEST_TABLE
  ):
    k, v, rows = paging.side_by_side(k, v, rows)
  plan, operands = prepare(config, False, q, k, v, bias, table, rows, pairs)
  batch, heads, queries = q.shape[0], q.shape[2], plan.t * plan.n
  values, dtype = plan.values, tiles.out_dtype(v, bias)
  outputs = [
    (
      jax.ShapeDtypeStruct((batch, heads, queries, values), dtype),
      pl.BlockSpec(
        (None, None, plan.t, values), lambda b, h, i, j, *_: (b, h, i, 0)
      ),
    ),
  ]
  scratch = {
    'acc': pltpu.VMEM((plan.t, values), jnp.float32),
    **key_scratch(plan, operands),
    **page_scratch(plan, operands),
    **column_scratch(operands, ['query_segment', 'query_span'], plan.t),
  }
  if config.weights == 'softmax':
    lse = jax.ShapeDtypeStruct((batch, heads, 1, queries), jnp.float32)
    at_row = lambda b, h, i, j, *_: (b, h, 0, i)
    outputs.append((lse, pl.BlockSpec((None, None, 1, plan.t), at_row)))
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
    prefetched(plan, k, rows),
  )
  out = jnp.swapaxes(out[:, :, : q.shape[1], : v.shape[-1]], 1, 2)
  return out, lse[0][:, :, 0, : q.shape[1]] if lse else None


def _query_slopes(
  plan: Plan,
  refs: Operands,
  space: dict[str, Any],
  k: Callable[[int], jax.Array],
  mask: Any,
  diagonal: bool,
) -> Iterator[tuple[Any, jax.Array]]:
  """Some queries of a tile at a time, and the gradient of their logits."""
  v = refs.v[...]

  def product(rows):
    keys = seen_keys(plan, diagonal, rows).size
    return (
      dot(refs.q[rows, :], k(keys), transpose=True),
      dot(refs.g[rows, :], v[:keys], transpose=True),
    )

  kind = plan.config.weights
  for rows, (x, inner) in in_parts(plan.t, product):
    x, seen = query_logits(plan.config, refs, space, rows, x, mask)
    lse, delta = (
      column_of(space, name, rows, x.shape[1]) for name in ('lse', 'delta')
    )
    yield rows, tiles.slopes(kind, x, seen, lse, delta, inner, jnp.exp2)[1]


def _dq_body(refs, outputs, space, *, plan):
  acc = space['acc']
  i, j = pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)
    fill_columns(refs, space)

  turn_once(plan, refs, space, i, j)

  def step(mask, diagonal):
    k = turned_keys(plan, refs, space, j, diagonal)
    for rows, slope in _query_slopes(plan, refs, space, k, mask, diagonal):
      acc[rows, :] += dot(slope, k(slope.shape[1]))

  over_tiles(plan, refs, pl.program_id(0), i, j, step)

  @pl.when(j == plan.m - 1)
  def _():
    dq = acc[...] * key_gain(plan.config, refs)
    outputs[0][...] = dq.astype(outputs[0].dtype)


def _key_logits(config, refs, space, rows, queries, x, mask):
  """`query_logits` with the keys `rows` in rows and `queries` in lanes."""
  x = to_logits(config, refs, x)
  if refs.bias is not None:
    x += column_of(space, 'bias', rows, x.shape[1])
  seen = None
  if mask is not None:
    both = (sides(refs, space, y, rows, queries) for y in ('query', 'key'))
    seen = mask(x.shape, 1, *both, queries.start, rows.start)
  if refs.pairs is None:
    return x, seen
  return add_pairs(x, seen, refs.pairs[queries, rows].T)


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
    keys[...] = turned(refs)
    fill_columns(refs, space)

  def step(mask, diagonal):
    q, g = refs.q[...], refs.g[...]
    # Of the queries those that see some of the keys.
    start = lambda rows: rows.start if diagonal else 0

    def product(rows):
      return (
        dot(keys[rows, :], q[start(rows) :], transpose=True),
        dot(refs.v[rows, :], g[start(rows) :], transpose=True),
      )

    for rows, (x, inner) in in_parts(plan.s, product):
      queries = pl.ds(start(rows), x.shape[1])
      x, seen = _key_logits(config, refs, space, rows, queries, x, mask)
      lse, delta = (
        None if row is None else row[:, queries]
        for row in (refs.lse, refs.delta)
      )
      weights, slope = tiles.slopes(
        config.weights, x, seen, lse, delta, inner, jnp.exp2
      )
      dv[rows, :] += dot(weights, g[queries.start :])
      if 'db' in space:
        parts = jnp.split(slope, slope.shape[1] // LANES, 1)
        space['db'][rows, :] += functools.reduce(jnp.add, parts)
      dk[rows, :] += dot(slope, q[queries.start :])

  over_tiles(plan, refs, pl.program_id(0), i, j, step)

  @pl.when(count == plan.n * plan.share - 1)
  def _():
    total = dk[...] * key_gain(config, refs)
    if refs.table is not None:
      total = rotate(total, refs.table[...], back=True)
    outputs[0][...] = total.astype(outputs[0].dtype)
    outputs[1][...] = dv[...].astype(outputs[1].dtype)
    if 'db' in space:
      column = jnp.sum(space['db'][...], 1, keepdims=True)
      outputs[2][...] = to_row(jnp.broadcast_to(column, (plan.s, LANES)))


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
      **key_scratch(plan, operands),
      **column_scratch(operands, columns, plan.t),
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
    **column_scratch(operands, columns, plan.s),
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

  def step(mask, diagonal):
    fill_columns(refs, space)
    k = turned_keys(plan, refs, space, j, diagonal)
    for rows, slope in _query_slopes(plan, refs, space, k, mask, diagonal):
      acc[rows, pl.ds(0, slope.shape[1])] += slope

  over_tiles(plan, refs, b, i, j, step)

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
      **column_scratch(operands, ['query_segment', 'query_span'], plan.t),
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

"""Softmax attention for GPUs (Triton).

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features, padded to powers of two.

A program holds one tile of queries and walks the keys that it sees, or one tile
of keys and walks the queries of all heads that it serves: no atomics, the same
result every time. The grid has one axis, which leaves two of Triton's three to
`jax.vmap`. Keys to be rotated are loaded as two halves. Pallas on Triton is
deprecated since jax 0.11; this file alone depends on it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import LOG2E, dot, silu, softmax_step
from kernels_pallas.common.padding import pad_axis
from kernels_pallas.softmax_attention import paging, tiles
from kernels_pallas.softmax_attention.gpu_grid import (
  Plan,
  divide,
  locate_by,
  make_specs,
  prepare,
  takes_pages,
  within,
)
from kernels_pallas.softmax_attention.operands import (
  Operands,
  cut_features,
  pad_features,
)
from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['backward', 'forward']


def _params(plan: Plan) -> plt.CompilerParams:
  return plt.CompilerParams(num_warps=plan.warps, num_stages=plan.stages)


def _halves(refs: Operands) -> list[Any]:
  """Slices of the features of queries and keys that are used apart."""
  dim = refs.q.shape[-1]
  if refs.table is None:
    return [pl.ds(0, dim)]
  return [pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)]


def _table(refs: Operands, rows: Any) -> list[jax.Array]:
  """Cosines and sines of some keys."""
  return [refs.table[rows, part] for part in _halves(refs)]


def _places(plan: Plan, refs: Operands, rows: Any, j: Any) -> Any:
  """Where the keys `rows`, those of tile j, lie in `refs.k` and `refs.v`."""
  if not plan.page:
    return rows
  index = j * plan.s + jnp.arange(plan.s, dtype=jnp.int32)
  page, place = divide(index, plan.page)
  return refs.pages[page] * plan.page + place


def _keys(refs: Operands, rows: Any, places: Any = None) -> list[jax.Array]:
  """Parts of some keys, rotated."""
  places = rows if places is None else places
  parts = [refs.k[places, part] for part in _halves(refs)]
  if refs.table is None:
    return parts
  wide = [x.astype(jnp.float32) for x in parts]
  turned = tiles.rotate_halves(*wide, *_table(refs, rows))
  return [x.astype(refs.k.dtype) for x in turned]


def _logits(config: Config, a: list[jax.Array], b: list[jax.Array]):
  """Products of rows of a and b, scaled."""
  parts = [dot(x, y, transpose=True) for x, y in zip(a, b, strict=True)]
  return functools.reduce(jnp.add, parts) * (
    config.scale * tiles.unit(config.weights)
  )


def _side(refs: Operands, side: str, index: Any, rows: Any, axis: int):
  """Integers of some queries or keys along one axis of a tile."""

  def along(x):
    return jnp.expand_dims(x, 1 - axis)

  def take(what):
    ref = getattr(refs, f'{side}_{what}')
    return None if ref is None else along(ref[rows])

  return tiles.Side(along(index), take('segment'), take('span'))


def _limits(config: Config, plan: Plan, refs: Operands) -> tuple[Any, Any]:
  offset = config.offset if refs.offset is None else refs.offset[0]
  return offset, plan.limit if refs.limit is None else refs.limit[0]


def _add_pairs(x, seen, tile):
  """Logits with a tile of pairs, and which of them are seen."""
  if tile is None:
    return x, seen
  tile = tile.astype(jnp.float32)
  return x + tile, tiles.shown(tile, seen)


def _existing(refs: Operands, x: jax.Array, index: jax.Array) -> jax.Array:
  """Zeros for rows beyond the end, which may hold anything: 0 * NaN is NaN."""
  if refs.limit is None:
    return x
  return jnp.where((index < refs.limit[0])[:, None], x, jnp.zeros_like(x))


def _walk_keys(plan: Plan, refs: Operands, add, start, clean: bool = False):
  """Folds add(carry, keys, values, logits, seen) over the tiles of keys.

  `values` loads the values of the tile. Logits of keys that do not exist are
  never seen, the keys themselves only if `clean` asks for zeros.
  """
  config = plan.config
  offset, limit = _limits(config, plan, refs)
  i = jax.lax.rem(pl.program_id(0), np.int32(plan.n))
  first = i * plan.t + offset
  whole = pl.ds(0, plan.t)
  q = [refs.q[whole, part] for part in _halves(refs)]
  side = _side(refs, 'query', first + jnp.arange(plan.t), whole, 0)
  span = first, first + plan.t - 1
  bounds = tiles.key_blocks(config, span, limit, plan.s, plan.m)
  low, high = within(bounds, refs.query_range, i)

  def step(j, carry):
    rows = pl.ds(j * plan.s, plan.s)
    places = _places(plan, refs, rows, j)
    keys = _keys(refs, rows, places)
    x = _logits(config, q, keys)
    if refs.bias is not None:
      x += refs.bias[rows][None]
    index = j * plan.s + jnp.arange(plan.s)
    mine = _side(refs, 'key', index, rows, 1)
    seen = tiles.visible(config, side, mine, limit)
    tile = None if refs.pairs is None else refs.pairs[:, rows]

    values = lambda: _existing(refs, refs.v[places, :], index)
    if clean:
      keys = [_existing(refs, x, index) for x in keys]
    return add(carry, keys, values, *_add_pairs(x, seen, tile))

  return jax.lax.fori_loop(low, high, step, start)


def _forward_body(refs, outputs, space, *, plan):
  del space
  out, lse = outputs

  def add(carry, keys, values, x, seen):
    del keys
    x = tiles.hide(x, seen, -jnp.inf)
    peak, total, acc = carry
    weights, decay, peak, total = softmax_step(x, peak, total, 1, jnp.exp2)
    return peak, total, acc * decay + dot(weights, values())

  start = (
    jnp.full((plan.t, 1), -jnp.inf, jnp.float32),
    jnp.zeros((plan.t, 1), jnp.float32),
    jnp.zeros((plan.t, refs.v.shape[-1]), jnp.float32),
  )
  peak, total, acc = _walk_keys(plan, refs, add, start)
  safe = jnp.where(total > 0, total, 1.0)
  out[...] = (acc / safe).astype(out.dtype)
  natural = peak / LOG2E + jnp.log(safe)
  lse[...] = jnp.where(total > 0, natural, -jnp.inf).reshape(plan.t)


def _silu_body(refs, outputs, space, *, plan):
  del space

  def add(acc, keys, values, x, seen):
    del keys
    weights, _ = silu(tiles.hide(x, seen, 0.0))
    return acc + dot(weights, values())

  start = jnp.zeros((plan.t, refs.v.shape[-1]), jnp.float32)
  acc = _walk_keys(plan, refs, add, start)
  outputs[0][...] = acc.astype(outputs[0].dtype)


def _at(locate: Callable[..., Any]) -> Callable[..., Any]:
  """Block of an array [B, T, H, D] of the program's head and rows."""

  def at(p):
    b, h, i = locate(p)
    return b, i, h, 0

  return at


def forward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None = None,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
  """The function of `reference.forward`; out in `tiles.out_dtype`."""
  if rows.pages is not None and not takes_pages(k, v, table is not None):
    k, v, rows = paging.side_by_side(k, v, rows)
  plan, operands = prepare(config, False, q, k, v, bias, table, rows, pairs)
  batch, heads, queries = q.shape[0], q.shape[2], plan.t * plan.n
  values, locate = operands.v.shape[-1], locate_by(heads, plan.n)
  softmax = config.weights == 'softmax'
  shape = batch, queries, heads, values
  outputs = [
    (
      jax.ShapeDtypeStruct(shape, tiles.out_dtype(v, bias)),
      pl.BlockSpec((None, plan.t, None, values), _at(locate)),
    ),
  ]
  if softmax:
    lse = jax.ShapeDtypeStruct((batch, heads, queries), jnp.float32)
    outputs.append((lse, pl.BlockSpec((None, None, plan.t), locate)))
  body = _forward_body if softmax else _silu_body
  out, *lse = launch(
    functools.partial(body, plan=plan),
    operands,
    make_specs(operands, plan, locate, 'keys'),
    outputs,
    {},
    grid=(batch * heads * plan.n,),
    compiler_params=_params(plan),
    interpret=interpret,
    name='attention_forward',
  )
  out = out[:, : q.shape[1], :, : v.shape[-1]]
  return out, lse[0][:, :, : q.shape[1]] if lse else None


def _dq_body(refs, outputs, space, *, plan):
  del space
  whole = pl.ds(0, plan.t)
  g = refs.g[...]
  lse, delta = (
    None if ref is None else ref[whole][:, None]
    for ref in (refs.lse, refs.delta)
  )

  def add(dq, keys, values, x, seen):
    inner = dot(g, values(), transpose=True)
    _, slope = tiles.slopes(
      plan.config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    return [a + dot(slope, b) for a, b in zip(dq, keys, strict=True)]

  halves = _halves(refs)
  start = [jnp.zeros((plan.t, part.size), jnp.float32) for part in halves]
  dq = _walk_keys(plan, refs, add, start, clean=True)
  for part, total in zip(halves, dq, strict=True):
    scaled = total * plan.config.scale
    outputs[0][:, part] = scaled.astype(outputs[0].dtype)


def _dkv_body(refs, outputs, space, *, plan):
  del space
  config, halves = plan.config, _halves(refs)
  offset, limit = _limits(config, plan, refs)
  j = jax.lax.rem(pl.program_id(0), np.int32(plan.m))
  first = j * plan.s
  whole = pl.ds(0, plan.s)
  index = first + jnp.arange(plan.s)
  keys, v = _keys(refs, whole), _existing(refs, refs.v[...], index)
  side = _side(refs, 'key', index, whole, 0)
  span = first, first + plan.s - 1
  bounds = tiles.query_blocks(config, span, (offset, offset), plan.t, plan.n)
  low, high = within(bounds, refs.key_range, j)

  def step(r, i, carry):
    dk, dv, db = carry
    rows = pl.ds(i * plan.t, plan.t)
    q = [refs.q[rows, r, part] for part in halves]
    g = refs.g[rows, r, :]
    x = _logits(config, keys, q)
    if refs.bias is not None:
      x += refs.bias[whole][:, None]
    index = i * plan.t + offset + jnp.arange(plan.t)
    mine = _side(refs, 'query', index, rows, 1)
    seen = tiles.visible(config, mine, side, limit)
    tile = None
    if refs.pairs is not None:
      tile = refs.pairs[r if refs.pairs.shape[0] > 1 else 0, rows, :].T
    x, seen = _add_pairs(x, seen, tile)
    lse, delta = (
      None if ref is None else ref[r, rows][None]
      for ref in (refs.lse, refs.delta)
    )
    inner = dot(v, g, transpose=True)
    weights, slope = tiles.slopes(
      config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    dv = dv + dot(weights, g)
    if db is not None:
      db = db + jnp.sum(slope, 1)
    dk = [a + dot(slope, b) for a, b in zip(dk, q, strict=True)]
    return dk, dv, db

  carry = (
    [jnp.zeros((plan.s, part.size), jnp.float32) for part in halves],
    jnp.zeros((plan.s, refs.v.shape[-1]), jnp.float32),
    None if refs.bias is None else jnp.zeros(plan.s, jnp.float32),
  )
  head = lambda r, carry: jax.lax.fori_loop(
    low, high, functools.partial(step, r), carry
  )
  carry = jax.lax.fori_loop(0, plan.share, head, carry)
  dk, dv, db = carry
  dk = [x * config.scale for x in dk]
  if refs.table is not None:
    cos, sin = _table(refs, whole)
    dk = tiles.rotate_halves(dk[0], dk[1], cos, -sin)
  for part, total in zip(halves, dk, strict=True):
    outputs[0][:, part] = total.astype(outputs[0].dtype)
  outputs[1][...] = dv.astype(outputs[1].dtype)
  if db is not None:
    outputs[2][...] = db


def _dq(
  plan: Plan, operands: Operands, dtype: Any, interpret: bool
) -> jax.Array:
  """[B, n t, H, D]."""
  batch, _, heads, dim = operands.q.shape
  locate = locate_by(heads, plan.n)
  spec = pl.BlockSpec((None, plan.t, None, dim), _at(locate))
  (dq,) = launch(
    functools.partial(_dq_body, plan=plan),
    operands,
    make_specs(operands, plan, locate, 'keys'),
    [(jax.ShapeDtypeStruct(operands.q.shape, dtype), spec)],
    {},
    grid=(batch * heads * plan.n,),
    compiler_params=_params(plan),
    interpret=interpret,
    name='attention_dq',
  )
  return dq


def _dkv(
  plan: Plan, operands: Operands, dtype: Any, interpret: bool
) -> list[jax.Array]:
  """[B, m s, G, D], [B, m s, G, V] and, with a bias, [B, G, m s]."""
  batch, keys, groups, _ = operands.k.shape
  locate = locate_by(groups, plan.m)
  outputs = [
    (
      jax.ShapeDtypeStruct(x.shape, dtype),
      pl.BlockSpec((None, plan.s, None, x.shape[-1]), _at(locate)),
    )
    for x in (operands.k, operands.v)
  ]
  if operands.bias is not None:
    shape = jax.ShapeDtypeStruct((batch, groups, keys), jnp.float32)
    outputs.append((shape, pl.BlockSpec((None, None, plan.s), locate)))
  return launch(
    functools.partial(_dkv_body, plan=plan),
    operands,
    make_specs(operands, plan, locate, 'queries'),
    outputs,
    {},
    grid=(batch * groups * plan.m,),
    compiler_params=_params(plan),
    interpret=interpret,
    name='attention_dkv',
  )


def _dpairs_body(refs, outputs, space, *, plan):
  """One tile of the pairs, and all sequences and heads that share it."""
  del space
  config = plan.config
  row, j = divide(pl.program_id(0), plan.m)
  _, i = divide(row, plan.n)
  count, width = refs.q.shape[0], refs.q.shape[2]
  tile = refs.pairs[...]

  def step(u, total):
    b, h = divide(u, width)
    g, _ = divide(h, plan.share)
    offset = config.offset if refs.offset is None else refs.offset[b]
    limit = plan.limit if refs.limit is None else refs.limit[b]
    side = lambda name, index, axis: tiles.Side(
      jnp.expand_dims(index, 1 - axis),
      None
      if getattr(refs, f'{name}_segment') is None
      else jnp.expand_dims(getattr(refs, f'{name}_segment')[b, :], 1 - axis),
    )
    q = side('query', i * plan.t + offset + jnp.arange(plan.t), 0)
    k = side('key', j * plan.s + jnp.arange(plan.s), 1)
    x = _logits(config, [refs.q[b, :, h, :]], [refs.k[b, :, g, :]])
    x, seen = _add_pairs(x, tiles.visible(config, q, k, limit), tile)
    inner = dot(refs.g[b, :, h, :], refs.v[b, :, g, :], transpose=True)
    slope = tiles.slopes(config.weights, x, seen, None, None, inner, jnp.exp2)[
      1
    ]
    return total + slope

  start = jnp.zeros((plan.t, plan.s), jnp.float32)
  outputs[0][...] = jax.lax.fori_loop(0, count * width, step, start)


def _dpairs(plan: Plan, operands: Operands, interpret: bool) -> jax.Array:
  """[1 or B, 1 or H, n t, m s], summed over those that share it."""
  # A tile of the pairs serves many sequences.
  operands = operands._replace(query_range=None, key_range=None)
  batch, _, heads, dim = operands.q.shape
  shape, values = operands.pairs.shape, operands.v.shape[-1]
  # What a program sees of sequences and heads: its own, or all of them.
  count = 1 if shape[0] == batch else batch
  width = 1 if shape[1] == heads else heads
  groups = 1 if width == 1 else operands.k.shape[2]
  share = np.int32(plan.share)

  def spec(block, index):
    def at(p):
      row, j = divide(p, plan.m)
      row, i = divide(row, plan.n)
      return index(*divide(row, shape[1]), i, j)

    return pl.BlockSpec(block, at)

  at_query = lambda size: spec(
    (count, plan.t, width, size), lambda b, h, i, j: (b, i, h, 0)
  )
  at_key = lambda size: spec(
    (count, plan.s, groups, size),
    lambda b, h, i, j: (b, j, jax.lax.div(h, share), 0),
  )
  scalar = spec((count,), lambda b, h, i, j: (b,))
  tile = spec((None, None, plan.t, plan.s), lambda b, h, i, j: (b, h, i, j))
  specs = Operands(
    at_query(dim),
    at_key(dim),
    at_key(values),
    offset=scalar,
    limit=scalar,
    query_segment=spec((count, plan.t), lambda b, h, i, j: (b, i)),
    key_segment=spec((count, plan.s), lambda b, h, i, j: (b, j)),
    pairs=tile,
    g=at_query(values),
  )
  (dp,) = launch(
    functools.partial(_dpairs_body, plan=plan),
    operands,
    specs,
    [(jax.ShapeDtypeStruct(shape, jnp.float32), tile)],
    {},
    grid=(shape[0] * shape[1] * plan.n * plan.m,),
    compiler_params=_params(plan),
    interpret=interpret,
    name='attention_dpairs',
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
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None, jax.Array | None]:
  """The function of `xla.backward`."""
  plan, operands = prepare(config, True, q, k, v, bias, table, rows, pairs)
  tall, values = plan.t * plan.n, operands.v.shape[-1]
  operands = operands._replace(
    g=pad_axis(pad_features(g, values, False), 1, tall)
  )
  if lse is not None and delta is not None:
    operands = operands._replace(
      lse=pad_axis(lse * LOG2E, 2, tall, jnp.inf),
      delta=pad_axis(delta, 2, tall),
    )
  dq = _dq(plan, operands, q.dtype, interpret)
  dk, dv, *db = _dkv(plan, operands, k.dtype, interpret)
  dim, halves, keys = q.shape[3], table is not None, k.shape[1]
  dp = None
  if pairs is not None:
    dp = _dpairs(plan, operands, interpret)[:, :, : q.shape[1], :keys]
  return (
    cut_features(dq[:, : q.shape[1]], dim, halves),
    cut_features(dk[:, :keys], dim, halves),
    dv[:, :keys, :, : v.shape[-1]],
    db[0][:, :, :keys] if db else None,
    dp,
  )

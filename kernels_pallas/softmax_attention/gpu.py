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
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import LOG2E, dot, silu, softmax_step
from kernels_pallas.common.padding import pad_axis
from kernels_pallas.softmax_attention import tiles
from kernels_pallas.softmax_attention.operands import (
  Operands,
  cut_features,
  pad_features,
)
from kernels_pallas.softmax_attention.options import Blocks, Config, Rows
from kernels_pallas.softmax_attention.reference import key_limit

__all__ = ['backward', 'forward']


class _Plan(NamedTuple):
  """Sizes of a call: t, n, s, m of the module docstring, R."""

  config: Config
  t: int
  n: int
  s: int
  m: int
  share: int
  # Number of keys if it is known and matters.
  limit: int | None
  params: plt.CompilerParams


def _blocks(
  config: Config, dim: int, single: bool, backward: bool
) -> tuple[Blocks, int]:
  """Tiles and warps that keep the sums of a tile in registers."""
  if dim > 128:
    return (Blocks(32, 32) if single or backward else Blocks(64, 32)), 8
  if dim > 64 or single:
    return (Blocks(32, 32) if backward else Blocks(64, 32)), 4
  return Blocks(64, 64 if config.weights == 'softmax' else 32), 4


def _tile(size: int, largest: int) -> tuple[int, int]:
  """A power of two of at least 16, and how many of them cover `size`."""
  largest = 1 << (largest.bit_length() - 1)
  block = min(largest, max(16, pl.next_power_of_2(size)))
  return block, -(-size // block)


def _width(dim: int, halves: bool) -> int:
  parts = 2 if halves else 1
  return parts * max(16, pl.next_power_of_2(-(-dim // parts)))


def _prepare(
  config: Config,
  backward: bool,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None,
) -> tuple[_Plan, Operands]:
  """Whole tiles."""
  dim = max(q.shape[-1], v.shape[-1])
  blocks, warps = _blocks(config, dim, q.dtype.itemsize > 2, backward)
  if table is not None and dim > 64 and not backward:
    # Halves of keys and queries, turned in single precision.
    warps = 8
  blocks = config.blocks or blocks
  t, n = _tile(q.shape[1], blocks.query)
  s, m = _tile(k.shape[1], blocks.key)
  limit = key_limit(rows, config, k.shape[1], q.shape[1], m * s - k.shape[1])
  known = limit if isinstance(limit, int) else None
  share = q.shape[2] // k.shape[2]
  # Two stages of the widest heads do not fit into the A100's shared memory.
  stages = 1 if dim > 128 and q.dtype.itemsize > 2 else 2
  params = plt.CompilerParams(num_warps=warps, num_stages=stages)
  plan = _Plan(config, t, n, s, m, share, known, params)
  halves = table is not None
  width = _width(q.shape[-1], halves)
  if pairs is not None:
    pairs = jnp.maximum(pairs, tiles.HIDDEN)
    pairs = pad_axis(pad_axis(pairs, 2, t * n), 3, s * m)
  if bias is not None:
    bias = pad_axis(
      bias.astype(jnp.float32) * tiles.unit(config.weights), 1, s * m
    )
  key_blocks, query_blocks = _segment_blocks(rows, t, n, s, m)
  queries = lambda x: None if x is None else pad_axis(x, 1, t * n)
  keys = lambda x: None if x is None else pad_axis(x, 1, s * m)
  return plan, Operands(
    queries(pad_features(q, width, halves)),
    keys(pad_features(k, width, halves)),
    keys(pad_features(v, _width(v.shape[-1], False), False)),
    rows.offset,
    None if known is not None else limit,
    queries(rows.query_segment),
    keys(rows.key_segment),
    queries(rows.query_span),
    keys(rows.key_span),
    key_blocks,
    query_blocks,
    bias,
    pairs,
    None if table is None else keys(pad_features(table, width, True)),
  )


def _segment_blocks(
  rows: Rows, t: int, n: int, s: int, m: int
) -> tuple[Any, Any]:
  """Blocks of keys per block of queries, and the reverse."""
  if rows.query_segment is None or rows.key_segment is None:
    return None, None
  of_query = tiles.segment_ranges(rows.query_segment, t, n)
  of_key = tiles.segment_ranges(rows.key_segment, s, m)
  return (
    tiles.segment_blocks(of_query, of_key),
    tiles.segment_blocks(of_key, of_query),
  )


def _within(bounds: tuple[Any, Any], blocks: Any, index: Any) -> Any:
  """First and one past the last block that both allow."""
  if blocks is None:
    return bounds
  return (
    jnp.maximum(bounds[0], blocks[0, index]),
    jnp.minimum(bounds[1], blocks[1, index]),
  )


def _specs(
  operands: Operands, plan: _Plan, locate: Callable[..., Any], walk: str
) -> Operands:
  """What a program sees: one tile of one side, all of the side it walks.

  `locate` maps the program to (b, h or g, i or j).
  """

  def spec(block, index):
    return pl.BlockSpec(block, lambda p: index(*locate(p)))

  queries, keys = plan.t * plan.n, plan.s * plan.m
  dim, values = operands.q.shape[-1], operands.v.shape[-1]
  share = np.int32(plan.share)
  group = lambda h: jax.lax.div(h, share)
  shared = (1, 1) if operands.pairs is None else operands.pairs.shape
  own_b, own_h = (np.int32(size > 1) for size in shared[:2])
  scalar = spec((1,), lambda b, h, i: (b,))
  of_blocks = lambda count: spec((None, 2, count), lambda b, h, i: (b, 0, 0))
  if walk == 'keys':
    of_query = spec((None, plan.t), lambda b, h, i: (b, i))
    of_key = spec((None, keys), lambda b, h, i: (b, 0))
    stats = spec((None, None, plan.t), lambda b, h, i: (b, h, i))
    table = spec((None, keys, dim), lambda b, h, i: (b, 0, 0))
    pairs = spec(
      (None, None, plan.t, keys), lambda b, h, i: (b * own_b, h * own_h, i, 0)
    )
    at_query = lambda size: spec(
      (None, plan.t, None, size), lambda b, h, i: (b, i, h, 0)
    )
    at_key = lambda size: spec(
      (None, keys, None, size), lambda b, h, i: (b, 0, group(h), 0)
    )
  else:
    of_query = spec((None, queries), lambda b, g, j: (b, 0))
    of_key = spec((None, plan.s), lambda b, g, j: (b, j))
    stats = spec((None, plan.share, queries), lambda b, g, j: (b, g, 0))
    table = spec((None, plan.s, dim), lambda b, g, j: (b, j, 0))
    pairs = spec(
      (None, plan.share if shared[1] > 1 else 1, queries, plan.s),
      lambda b, g, j: (b * own_b, g * own_h, 0, j),
    )
    at_query = lambda size: spec(
      (None, queries, plan.share, size), lambda b, g, j: (b, 0, g, 0)
    )
    at_key = lambda size: spec(
      (None, plan.s, None, size), lambda b, g, j: (b, j, g, 0)
    )
  return Operands(
    at_query(dim),
    at_key(dim),
    at_key(values),
    scalar,
    scalar,
    of_query,
    of_key,
    of_query,
    of_key,
    of_blocks(plan.n),
    of_blocks(plan.m),
    of_key,
    pairs,
    table,
    stats,
    stats,
    at_query(values),
  )


def _divide(x: Any, size: int) -> tuple[Any, Any]:
  """Quotient and remainder of what is not negative."""
  by = np.int32(size)
  return jax.lax.div(x, by), jax.lax.rem(x, by)


def _locate(heads: int, count: int) -> Callable[..., tuple[Any, ...]]:
  """Program (b heads + h) count + i."""

  def locate(p):
    row, i = _divide(p, count)
    return *_divide(row, heads), i

  return locate


def _halves(refs: Operands) -> list[Any]:
  """Slices of the features of queries and keys that are used apart."""
  dim = refs.q.shape[-1]
  if refs.table is None:
    return [pl.ds(0, dim)]
  return [pl.ds(0, dim // 2), pl.ds(dim // 2, dim // 2)]


def _table(refs: Operands, rows: Any) -> list[jax.Array]:
  """Cosines and sines of some keys."""
  return [refs.table[rows, part] for part in _halves(refs)]


def _keys(refs: Operands, rows: Any) -> list[jax.Array]:
  """Parts of some keys, rotated."""
  parts = [refs.k[rows, part] for part in _halves(refs)]
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


def _limits(config: Config, plan: _Plan, refs: Operands) -> tuple[Any, Any]:
  offset = config.offset if refs.offset is None else refs.offset[0]
  return offset, plan.limit if refs.limit is None else refs.limit[0]


def _add_pairs(x, seen, tile):
  """Logits with a tile of pairs, and which of them are seen."""
  if tile is None:
    return x, seen
  tile = tile.astype(jnp.float32)
  return x + tile, tiles.shown(tile, seen)


def _walk_keys(plan: _Plan, refs: Operands, add, start):
  """Folds add(carry, keys, rows, logits, seen) over the tiles of keys."""
  config = plan.config
  offset, limit = _limits(config, plan, refs)
  i = jax.lax.rem(pl.program_id(0), np.int32(plan.n))
  first = i * plan.t + offset
  whole = pl.ds(0, plan.t)
  q = [refs.q[whole, part] for part in _halves(refs)]
  side = _side(refs, 'query', first + jnp.arange(plan.t), whole, 0)
  span = first, first + plan.t - 1
  bounds = tiles.key_blocks(config, span, limit, plan.s, plan.m)
  low, high = _within(bounds, refs.query_range, i)

  def step(j, carry):
    rows = pl.ds(j * plan.s, plan.s)
    keys = _keys(refs, rows)
    x = _logits(config, q, keys)
    if refs.bias is not None:
      x += refs.bias[rows][None]
    mine = _side(refs, 'key', j * plan.s + jnp.arange(plan.s), rows, 1)
    seen = tiles.visible(config, side, mine, limit)
    tile = None if refs.pairs is None else refs.pairs[:, rows]
    return add(carry, keys, rows, *_add_pairs(x, seen, tile))

  return jax.lax.fori_loop(low, high, step, start)


def _forward_body(refs, outputs, space, *, plan):
  del space
  out, lse = outputs

  def add(carry, keys, rows, x, seen):
    del keys
    x = tiles.hide(x, seen, -jnp.inf)
    peak, total, acc = carry
    weights, decay, peak, total = softmax_step(x, peak, total, 1, jnp.exp2)
    return peak, total, acc * decay + dot(weights, refs.v[rows, :])

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

  def add(acc, keys, rows, x, seen):
    del keys
    weights, _ = silu(tiles.hide(x, seen, 0.0))
    return acc + dot(weights, refs.v[rows, :])

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
  plan, operands = _prepare(config, False, q, k, v, bias, table, rows, pairs)
  batch, heads, queries = q.shape[0], q.shape[2], plan.t * plan.n
  values, locate = operands.v.shape[-1], _locate(heads, plan.n)
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
    _specs(operands, plan, locate, 'keys'),
    outputs,
    {},
    grid=(batch * heads * plan.n,),
    compiler_params=plan.params,
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

  def add(dq, keys, rows, x, seen):
    inner = dot(g, refs.v[rows, :], transpose=True)
    _, slope = tiles.slopes(
      plan.config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    return [a + dot(slope, b) for a, b in zip(dq, keys, strict=True)]

  halves = _halves(refs)
  start = [jnp.zeros((plan.t, part.size), jnp.float32) for part in halves]
  dq = _walk_keys(plan, refs, add, start)
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
  keys, v = _keys(refs, whole), refs.v[...]
  side = _side(refs, 'key', first + jnp.arange(plan.s), whole, 0)
  span = first, first + plan.s - 1
  bounds = tiles.query_blocks(config, span, (offset, offset), plan.t, plan.n)
  low, high = _within(bounds, refs.key_range, j)

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
  plan: _Plan, operands: Operands, dtype: Any, interpret: bool
) -> jax.Array:
  """[B, n t, H, D]."""
  batch, _, heads, dim = operands.q.shape
  locate = _locate(heads, plan.n)
  spec = pl.BlockSpec((None, plan.t, None, dim), _at(locate))
  (dq,) = launch(
    functools.partial(_dq_body, plan=plan),
    operands,
    _specs(operands, plan, locate, 'keys'),
    [(jax.ShapeDtypeStruct(operands.q.shape, dtype), spec)],
    {},
    grid=(batch * heads * plan.n,),
    compiler_params=plan.params,
    interpret=interpret,
    name='attention_dq',
  )
  return dq


def _dkv(
  plan: _Plan, operands: Operands, dtype: Any, interpret: bool
) -> list[jax.Array]:
  """[B, m s, G, D], [B, m s, G, V] and, with a bias, [B, G, m s]."""
  batch, keys, groups, _ = operands.k.shape
  locate = _locate(groups, plan.m)
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
    _specs(operands, plan, locate, 'queries'),
    outputs,
    {},
    grid=(batch * groups * plan.m,),
    compiler_params=plan.params,
    interpret=interpret,
    name='attention_dkv',
  )


def _dpairs_body(refs, outputs, space, *, plan):
  """One tile of the pairs, and all sequences and heads that share it."""
  del space
  config = plan.config
  row, j = _divide(pl.program_id(0), plan.m)
  _, i = _divide(row, plan.n)
  count, width = refs.q.shape[0], refs.q.shape[2]
  tile = refs.pairs[...]

  def step(u, total):
    b, h = _divide(u, width)
    g, _ = _divide(h, plan.share)
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


def _dpairs(plan: _Plan, operands: Operands, interpret: bool) -> jax.Array:
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
      row, j = _divide(p, plan.m)
      row, i = _divide(row, plan.n)
      return index(*_divide(row, shape[1]), i, j)

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
    compiler_params=plan.params,
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
  plan, operands = _prepare(config, True, q, k, v, bias, table, rows, pairs)
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

"""XOR attention for GPUs (Triton): the history is read once.

Axes: B sequences, L links, n parts of m tiles of s items, H heads, D and V
features, padded to powers of two.

A program holds all links of one head and walks one part of the history. What
the links sum over the parts is added up outside: no atomics, the same result
every time. Pallas on Triton is deprecated since jax 0.11; in this folder only
this file depends on it.
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
from kernels_pallas.rectangle_attention.options import (
  Config,
  Operands,
  Rows,
  Tokens,
)
from kernels_pallas.rectangle_attention.tiles import (
  item_limit,
  link_slopes,
  link_weights,
  visible,
)
from kernels_pallas.softmax_attention.tiles import hide, slopes, unit

__all__ = ['backward', 'forward']

# Enough programs for all processors of a GPU.
_PROGRAMS = 512


class _Plan(NamedTuple):
  """Sizes of a call: L, s, m, n, H of the module docstring."""

  config: Config
  links: int
  padded: int
  s: int
  m: int
  n: int
  heads: int
  # Number of items if it is known and matters.
  limit: int | None
  params: plt.CompilerParams


def _power(size: int) -> int:
  return max(16, pl.next_power_of_2(size))


def _plan(
  config: Config, links: Tokens, history: Tokens, rows: Rows, backward: bool
) -> _Plan:
  batch, count, heads, dim = links.q.shape
  items, dim = history.q.shape[1], max(dim, links.v.shape[3])
  padded = _power(count)
  single = history.q.dtype.itemsize > 2
  wide = single or padded * _power(dim) > 2048
  # Sums and tiles stay in registers.
  largest = config.block or (16 if single else 64 // 2 ** (wide + backward))
  s = min(_power(largest), _power(items))
  tiles = -(-items // s)
  n = min(tiles, max(1, _PROGRAMS // (batch * heads)))
  m = -(-tiles // n)
  n = -(-tiles // m)
  limit = item_limit(config, rows, items, s * m * n - items)
  known = limit if isinstance(limit, int) else None
  params = plt.CompilerParams(num_warps=8 if wide else 4, num_stages=2)
  return _Plan(config, count, padded, s, m, n, heads, known, params)


def _prepare(
  plan: _Plan, links: Tokens, history: Tokens, rows: Rows
) -> Operands:
  items = history.q.shape[1]
  pad_link = lambda x: None if x is None else pad_axis(x, 1, plan.padded)
  pad_item = lambda x: (
    None if x is None else pad_axis(x, 1, plan.s * plan.m * plan.n)
  )
  q, k, v = (pad_item(_fill(x)) for x in history)
  return Operands(
    *(pad_link(_fill(x)) for x in links),
    q=q,
    k=k,
    v=v,
    limit=item_limit(plan.config, rows, items, 0),
    link_segment=pad_link(rows.links),
    item_segment=pad_item(rows.items),
  )


def _fill(x: jax.Array) -> jax.Array:
  return pad_axis(x, 3, _power(x.shape[3]))


def _locate(plan: _Plan, p: Any) -> tuple[Any, Any, Any]:
  """(b, h, i) of program (b H + h) n + i."""
  parts, heads = np.int32(plan.n), np.int32(plan.heads)
  row = jax.lax.div(p, parts)
  b, h = jax.lax.div(row, heads), jax.lax.rem(row, heads)
  return b, h, jax.lax.rem(p, parts)


def _spec(plan: _Plan, block: tuple, index: Callable) -> pl.BlockSpec:
  return pl.BlockSpec(block, lambda p: index(*_locate(plan, p)))


def _of_item(plan: _Plan, width: int) -> pl.BlockSpec:
  """The items of a part."""
  block = None, plan.s * plan.m, None, width
  return _spec(plan, block, lambda b, h, i: (b, i, h, 0))


def _of_part(plan: _Plan, *shape: int) -> pl.BlockSpec:
  """What a part adds to the links, in [B, H, n, L, ...]."""
  block = None, None, None, *shape
  rest = (0,) * len(shape)
  return _spec(plan, block, lambda b, h, i: (b, h, i, *rest))


def _specs(plan: _Plan, operands: Operands) -> Operands:
  dim, values = operands.q.shape[3], operands.v.shape[3]
  of_link = lambda width: _spec(
    plan, (None, plan.padded, None, width), lambda b, h, i: (b, 0, h, 0)
  )
  column = _spec(plan, (None, None, plan.padded), lambda b, h, i: (b, h, 0))
  return Operands(
    of_link(dim),
    of_link(dim),
    of_link(values),
    _of_item(plan, dim),
    _of_item(plan, dim),
    _of_item(plan, values),
    _spec(plan, (1,), lambda b, h, i: (b,)),
    _spec(plan, (None, plan.padded), lambda b, h, i: (b, 0)),
    _spec(plan, (None, plan.s * plan.m), lambda b, h, i: (b, i)),
    column,
    column,
    of_link(values),
    _of_item(plan, values),
  )


def _launch(
  body: Callable[..., None],
  plan: _Plan,
  operands: Operands,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  name: str,
  interpret: bool,
) -> list[jax.Array]:
  return launch(
    functools.partial(body, plan=plan),
    operands,
    _specs(plan, operands),
    outputs,
    {},
    grid=(operands.q.shape[0] * plan.heads * plan.n,),
    compiler_params=plan.params,
    interpret=interpret,
    name=name,
  )


def _walk(
  plan: _Plan,
  refs: Operands,
  step: Callable[..., Any],
  zeros: Callable[[Any], None],
  start: Any,
) -> Any:
  """Folds step(carry, rows, seen, read) over the tiles that hold items.

  `read` takes the rows of an array of items, zeros beyond the end of the
  history; `zeros` gets the rows of each tile beyond it.
  """
  i = jax.lax.rem(pl.program_id(0), np.int32(plan.n))
  first = i * (plan.s * plan.m)
  limit: Any = plan.limit if refs.limit is None else refs.limit[0]
  end: Any = plan.m
  if refs.limit is not None:
    left = jnp.clip(limit - first, 0, plan.s * plan.m) + (plan.s - 1)
    end = jax.lax.div(left, np.int32(plan.s))

  def visit(j, carry):
    rows = pl.ds(j * plan.s, plan.s)
    exists = same = None
    if limit is not None:
      index = first + j * plan.s + jnp.arange(plan.s)
      exists = (index < limit)[None, :]

    def read(ref):
      x = ref[rows, :]
      if refs.limit is None:
        return x
      # where, not multiply: 0 * NaN is NaN.
      index = first + j * plan.s + jnp.arange(plan.s)
      return jnp.where((index < limit)[:, None], x, 0)

    if refs.link_segment is not None:
      same = refs.link_segment[...][:, None] == refs.item_segment[rows][None, :]
    return step(carry, rows, visible(exists, same), read)

  carry = jax.lax.fori_loop(0, end, visit, start)
  if refs.limit is not None:

    def clear(j, carry):
      zeros(pl.ds(j * plan.s, plan.s))
      return carry

    jax.lax.fori_loop(end, plan.m, clear, 0)
  return carry


def _real(plan: _Plan, seen: jax.Array | None) -> jax.Array | None:
  """Seen, and no link of padding, which a softmax would count."""
  if plan.config.weights == 'silu' or plan.links == plan.padded:
    return seen
  return visible((jnp.arange(plan.padded) < plan.links)[:, None], seen)


def _forward_body(refs, outputs, space, *, plan):
  del space
  config = plan.config
  of_links, of_items, *stats = outputs
  factor = config.scale * unit(config.weights)
  link_q, link_k, link_v = (
    ref[...] for ref in (refs.link_q, refs.link_k, refs.link_v)
  )

  def step(carry, rows, seen, read):
    peak, total, acc = carry
    x = dot(link_q, read(refs.k), transpose=True) * factor
    if stats:
      x = hide(x, seen, -jnp.inf)
      weights, decay, peak, total = softmax_step(x, peak, total, 1, jnp.exp2)
      acc = acc * decay
    else:
      weights, _ = silu(hide(x, seen, 0.0))
    acc = acc + dot(weights, read(refs.v))
    y = dot(link_k, read(refs.q), transpose=True) * factor
    weights = link_weights(config, y, _real(plan, seen), jnp.exp2)
    of_items[rows, :] = dot(weights.T, link_v).astype(of_items.dtype)
    return peak, total, acc

  def zeros(rows):
    shape = plan.s, of_items.shape[1]
    of_items[rows, :] = jnp.zeros(shape, of_items.dtype)

  column = jnp.zeros((plan.padded, 1), jnp.float32)
  start = column - jnp.inf, column, jnp.zeros(of_links.shape, jnp.float32)
  peak, total, acc = _walk(plan, refs, step, zeros, start)
  of_links[...] = acc
  for ref, x in zip(stats, (peak, total), strict=False):
    ref[...] = x.reshape(plan.padded)


def _merge(
  acc: jax.Array, peak: jax.Array, total: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Parts [B, H, n, L, V], [B, H, n, L] of a softmax, and its lse [B, H, L]."""
  highest = jnp.max(peak, 2, keepdims=True)
  decay = jnp.exp2(peak - jnp.where(highest == -jnp.inf, 0.0, highest))
  total = jnp.sum(total * decay, 2)
  seen = total > 0
  safe = jnp.where(seen, total, 1.0)
  out = jnp.sum(acc * decay[..., None], 2) / safe[..., None]
  lse = jnp.where(seen, highest[:, :, 0] / LOG2E + jnp.log(safe), -jnp.inf)
  return out, lse


def forward(
  config: Config,
  links: Tokens,
  history: Tokens,
  rows: Rows,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The function of `xla.forward`."""
  plan = _plan(config, links, history, rows, False)
  operands = _prepare(plan, links, history, rows)
  (batch, count, heads, values), dtype = links.v.shape, history.v.dtype
  wide, items = operands.v.shape[3], history.q.shape[1]
  softmax = config.weights == 'softmax'
  parts = batch, heads, plan.n, plan.padded
  struct = jax.ShapeDtypeStruct
  outputs = [
    (struct((*parts, wide), jnp.float32), _of_part(plan, plan.padded, wide)),
    (struct(operands.v.shape, dtype), _of_item(plan, wide)),
  ]
  if softmax:
    stat = struct(parts, jnp.float32), _of_part(plan, plan.padded)
    outputs += [stat, stat]
  acc, of_items, *stats = _launch(
    _forward_body, plan, operands, outputs, 'xor_forward', interpret
  )
  lse = None
  if softmax:
    out, lse = _merge(acc, *stats)
    lse = lse[:, :, :count]
  else:
    out = jnp.sum(acc, 2)
  out = jnp.swapaxes(out[:, :, :count, :values], 1, 2)
  return out.astype(dtype), of_items[:, :items, :, :values], lse


def _backward_body(refs, outputs, space, *, plan):
  del space
  config = plan.config
  factor = config.scale * unit(config.weights)
  dq, dk, dv, *of_links = outputs
  link_q, link_k, link_v, link_g = (
    ref[...] for ref in (refs.link_q, refs.link_k, refs.link_v, refs.link_g)
  )
  lse, delta = (
    None if ref is None else ref[...][:, None] for ref in (refs.lse, refs.delta)
  )

  def step(carry, rows, seen, read):
    of_q, of_k, of_v = carry
    k, v = read(refs.k), read(refs.v)
    x = dot(link_q, k, transpose=True) * factor
    inner = dot(link_g, v, transpose=True)
    weights, slope = slopes(
      config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    dv[rows, :] = dot(weights.T, link_g).astype(dv.dtype)
    slope = slope * config.scale
    dk[rows, :] = dot(slope.T, link_q).astype(dk.dtype)
    of_q = of_q + dot(slope, k)
    q, g = read(refs.q), read(refs.g)
    y = dot(link_k, q, transpose=True) * factor
    inner = dot(link_v, g, transpose=True)
    weights, slope = link_slopes(config, y, _real(plan, seen), inner, jnp.exp2)
    of_v = of_v + dot(weights, g)
    slope = slope * config.scale
    dq[rows, :] = dot(slope.T, link_k).astype(dq.dtype)
    of_k = of_k + dot(slope, q)
    return of_q, of_k, of_v

  def zeros(rows):
    for ref in (dq, dk, dv):
      ref[rows, :] = jnp.zeros((plan.s, ref.shape[1]), ref.dtype)

  start = tuple(jnp.zeros(ref.shape, jnp.float32) for ref in of_links)
  for ref, total in zip(
    of_links, _walk(plan, refs, step, zeros, start), strict=True
  ):
    ref[...] = total


def backward(
  config: Config,
  links: Tokens,
  history: Tokens,
  rows: Rows,
  lse: jax.Array | None,
  delta: jax.Array | None,
  g_links: jax.Array,
  g_items: jax.Array,
  interpret: bool = False,
) -> tuple[Tokens, Tokens]:
  """The function of `xla.backward`."""
  plan = _plan(config, links, history, rows, True)
  operands = _prepare(plan, links, history, rows)
  tall = plan.s * plan.m * plan.n
  operands = operands._replace(
    link_g=pad_axis(_fill(g_links), 1, plan.padded),
    g=pad_axis(_fill(g_items), 1, tall),
  )
  if lse is not None and delta is not None:
    operands = operands._replace(
      lse=pad_axis(lse * LOG2E, 2, plan.padded, np.inf),
      delta=pad_axis(delta, 2, plan.padded),
    )
  batch, _, heads, _ = links.q.shape
  items = operands.q, operands.k, operands.v
  struct = jax.ShapeDtypeStruct
  outputs = [
    (struct(x.shape, x.dtype), _of_item(plan, x.shape[3])) for x in items
  ]
  for x in items:
    width = x.shape[3]
    shape = batch, heads, plan.n, plan.padded, width
    spec = _of_part(plan, plan.padded, width)
    outputs.append((struct(shape, jnp.float32), spec))
  found = _launch(
    _backward_body, plan, operands, outputs, 'xor_backward', interpret
  )

  def take(x, like):
    x = jnp.swapaxes(jnp.sum(x, 2), 1, 2).astype(like.dtype)
    return x[:, : like.shape[1], :, : like.shape[3]]

  cut = lambda x, like: x[:, : like.shape[1], :, : like.shape[3]]
  return (
    Tokens(*(take(x, y) for x, y in zip(found[3:], links, strict=True))),
    Tokens(*(cut(x, y) for x, y in zip(found[:3], history, strict=True))),
  )

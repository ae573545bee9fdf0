"""XOR attention as one loop over tiles of the history, in bounded memory.

Axes: B sequences, L links, m blocks of s items, H heads, D and V features.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.common.numerics import precision, silu, softmax_step
from kernels_pallas.common.padding import pad_axis, split_evenly
from kernels_pallas.rectangle_attention.options import Config, Rows, Tokens
from kernels_pallas.rectangle_attention.tiles import (
  item_limit,
  link_slopes,
  link_weights,
  visible,
)
from kernels_pallas.softmax_attention.tiles import hide, slopes

__all__ = ['backward', 'forward']

_BLOCK = 1024


class _Plan(NamedTuple):
  """Sizes of the loop, and the integers of the mask, padded."""

  config: Config
  s: int
  m: int
  # Number of items: [B, 1, 1, 1], an int, or None.
  limit: Any
  rows: Rows


def _plan(config: Config, rows: Rows, items: int) -> _Plan:
  s, m = split_evenly(items, config.block or _BLOCK, 1)
  limit = item_limit(config, rows, items, s * m - items)
  if isinstance(limit, jax.Array):
    limit = limit[:, None, None, None]
  if rows.items is not None:
    rows = rows._replace(items=pad_axis(rows.items, 1, s * m))
  return _Plan(config, s, m, limit, rows)


def _dot(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """Sums in float32 or wider, operands in the dtype of b."""
  return jnp.einsum(
    subscripts,
    a.astype(b.dtype),
    b,
    preferred_element_type=jnp.promote_types(b.dtype, jnp.float32),
    precision=precision(b.dtype),
  )


def _heads(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, 1, 2)


def _take(plan: _Plan, blocks: Any, j: jax.Array) -> Any:
  """Block j of the items of each array."""
  cut = lambda x: jax.lax.dynamic_slice_in_dim(x, j * plan.s, plan.s, 1)
  return jax.tree.map(cut, blocks)


def _read(plan: _Plan, blocks: Any, j: jax.Array) -> Any:
  """The same, zeros beyond the end of a history: 0 * NaN is NaN."""
  tiles = _take(plan, blocks, j)
  if not isinstance(plan.limit, jax.Array):
    return tiles
  index = jnp.arange(plan.s)[None, :, None, None] + j * plan.s
  return jax.tree.map(lambda x: jnp.where(index < plan.limit, x, 0), tiles)


def _seen(plan: _Plan, j: jax.Array) -> jax.Array | None:
  """[B or 1, 1, L or 1, s]."""
  exists = same = None
  if plan.limit is not None:
    index = jnp.arange(plan.s)[None, None, None] + j * plan.s
    exists = index < plan.limit
  if plan.rows.links is not None:
    items = _take(plan, plan.rows.items, j)
    same = (plan.rows.links[:, :, None] == items[:, None])[:, None]
  return visible(exists, same)


def _join(x: jax.Array, items: int) -> jax.Array:
  """[m, B, s, ...] -> [B, N, ...]."""
  x = jnp.moveaxis(x, 0, 1)
  return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :items]


def _start(links: Tokens) -> jax.Array:
  """[B, H, L, 1] of zeros, float32 or wider."""
  batch, size, heads, _ = links.q.shape
  wide = jnp.promote_types(links.q.dtype, jnp.float32)
  return jnp.zeros((batch, heads, size, 1), wide)


def forward(
  config: Config, links: Tokens, history: Tokens, rows: Rows
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The function of `reference.forward`, and lse [B, H, L] of a softmax."""
  items, dtype = history.q.shape[1], history.v.dtype
  plan = _plan(config, rows, items)
  mine = Tokens(*(_heads(x) for x in links))
  blocks = Tokens(*(pad_axis(x, 1, plan.s * plan.m) for x in history))
  zeros = _start(links)

  def step(carry, j):
    peak, total, out = carry
    tile, seen = _read(plan, blocks, j), _seen(plan, j)
    x = _dot('bhld,bshd->bhls', mine.q, tile.k) * config.scale
    if config.weights == 'silu':
      weights = silu(hide(x, seen, 0.0))[0]
    else:
      x = hide(x, seen, -jnp.inf)
      weights, decay, peak, total = softmax_step(x, peak, total, -1, jnp.exp)
      out = out * decay
    out = out + _dot('bhls,bshv->bhlv', weights, tile.v)
    x = _dot('bhld,bshd->bhls', mine.k, tile.q) * config.scale
    weights = link_weights(config, x, seen, jnp.exp)
    of_items = _dot('bhls,bhlv->bshv', weights, mine.v)
    return (peak, total, out), of_items.astype(dtype)

  out = jnp.zeros((*zeros.shape[:3], history.v.shape[3]), zeros.dtype)
  start = zeros - jnp.inf, zeros, out
  carry, of_items = jax.lax.scan(step, start, jnp.arange(plan.m))
  peak, total, out = carry
  lse = None
  if config.weights == 'softmax':
    seen = total > 0
    total = jnp.where(seen, total, 1.0)
    out = out / total
    lse = jnp.where(seen, peak + jnp.log(total), -jnp.inf)[..., 0]
  return _heads(out).astype(dtype), _join(of_items, items), lse


def backward(
  config: Config,
  links: Tokens,
  history: Tokens,
  rows: Rows,
  lse: jax.Array | None,
  delta: jax.Array | None,
  g_links: jax.Array,
  g_items: jax.Array,
) -> tuple[Tokens, Tokens]:
  """Gradients of links and history.

  Args:
    config: as in `forward`, like the next three.
    links: queries, keys and values.
    history: queries, keys and values.
    rows: integers of the mask.
    lse: [B, H, L], of `forward`, but +inf where no item is visible; None for
      silu.
    delta: [B, H, L], <g, out> of the links; None for silu.
    g_links: [B, L, H, V], cotangent of the links' values.
    g_items: [B, N, H, V], cotangent of the items' values.
  """
  items = history.q.shape[1]
  plan = _plan(config, rows, items)
  mine, g_mine = Tokens(*(_heads(x) for x in links)), _heads(g_links)
  blocks = [pad_axis(x, 1, plan.s * plan.m) for x in (*history, g_items)]
  if lse is not None and delta is not None:
    lse, delta = lse[..., None], delta[..., None]

  def step(total, j):
    (*tile, g), seen = _read(plan, blocks, j), _seen(plan, j)
    q, k, v = tile
    # From items to links.
    x = _dot('bhld,bshd->bhls', mine.q, k) * config.scale
    inner = _dot('bhlv,bshv->bhls', g_mine, v)
    weights, slope = slopes(config.weights, x, seen, lse, delta, inner, jnp.exp)
    slope = slope * config.scale
    dv = _dot('bhls,bhlv->bshv', weights, g_mine)
    dk = _dot('bhls,bhld->bshd', slope, mine.q)
    of_q = total.q + _dot('bhls,bshd->bhld', slope, k)
    # From links to items.
    x = _dot('bhld,bshd->bhls', mine.k, q) * config.scale
    inner = _dot('bhlv,bshv->bhls', mine.v, g)
    weights, slope = link_slopes(config, x, seen, inner, jnp.exp)
    slope = slope * config.scale
    dq = _dot('bhls,bhld->bshd', slope, mine.k)
    of_k = total.k + _dot('bhls,bshd->bhld', slope, q)
    of_v = total.v + _dot('bhls,bshv->bhlv', weights, g)
    found = Tokens(dq, dk, dv)
    found = jax.tree.map(lambda a, b: a.astype(b.dtype), found, history)
    return Tokens(of_q, of_k, of_v), found

  start = jax.tree.map(lambda x: jnp.zeros(x.shape, _start(links).dtype), mine)
  total, found = jax.lax.scan(step, start, jnp.arange(plan.m))
  of_links = jax.tree.map(
    lambda x, like: _heads(x).astype(like.dtype), total, links
  )
  return of_links, jax.tree.map(lambda x: _join(x, items), found)

"""Mathematics of a tile of logits, written once for all bodies.

Nothing here knows which axis of a tile holds queries and which keys: whatever
belongs to a row or a column comes in a shape that broadcasts.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.common.numerics import LOG2E, silu
from kernels_pallas.softmax_attention.options import Config

__all__ = [
  'HIDDEN',
  'Side',
  'hide',
  'key_blocks',
  'out_dtype',
  'overlap',
  'query_blocks',
  'rotate',
  'rotate_halves',
  'segment_blocks',
  'segment_ranges',
  'shown',
  'slopes',
  'unit',
  'visible',
]

# Stands for -inf where infinities may not be multiplied.
HIDDEN = -1e30


class Side(NamedTuple):
  """Integers of the queries or of the keys of a tile.

  index: place in the sequence of keys. segment, span: see `Rows`.
  """

  index: Any
  segment: Any = None
  span: Any = None


def visible(
  config: Config, q: Side, k: Side, limit: jax.Array | int | None
) -> jax.Array | None:
  """Which keys each query attends to; None for all.

  Args:
    config: causality and window.
    q: of the queries.
    k: of the keys, in shapes that broadcast against those of q.
    limit: number of keys that exist, or None where no tile holds more.
  """
  parts = []
  if config.causal:
    parts.append(k.index <= q.index)
  if config.window is not None:
    parts.append(q.index - k.index < config.window)
    if not config.causal:
      parts.append(k.index - q.index < config.window)
  if limit is not None:
    parts.append(k.index < limit)
  if q.segment is not None:
    parts.append(q.segment == k.segment)
  if q.span is not None:
    parts.append((q.span < 0) | (q.span == k.span))
  return functools.reduce(jnp.logical_and, parts) if parts else None


def segment_ranges(ids: jax.Array, block: int, count: int) -> jax.Array:
  """[B, 2, count], the smallest and the largest of the ids [B, N] of a block.

  The last block is filled up with the last id.
  """
  pad = block * count - ids.shape[1]
  ids = jnp.pad(ids, ((0, 0), (0, pad)), mode='edge')
  ids = ids.reshape(-1, count, block)
  return jnp.stack([ids.min(2), ids.max(2)], 1)


def segment_blocks(mine: jax.Array, others: jax.Array) -> jax.Array:
  """Blocks of the other side that a block may see, by `segment_ranges`.

  Args:
    mine: [B, 2, n].
    others: [B, 2, m].

  Returns:
    [B, 2, n], the first of them and one past the last; m and 0 if there are
    none. Where ids are not sorted, there may be others in between.
  """
  count = others.shape[2]
  meet = (mine[:, 0, :, None] <= others[:, 1, None]) & (
    others[:, 0, None] <= mine[:, 1, :, None]
  )
  index = jnp.arange(count, dtype=jnp.int32)
  first = jnp.where(meet, index, count).min(2)
  end = jnp.where(meet, index + 1, 0).max(2)
  return jnp.stack([first, end], 1)


def overlap(
  config: Config,
  q: tuple[Any, Any],
  k: tuple[Any, Any],
  limit: Any,
  segments: tuple[tuple[Any, Any], tuple[Any, Any]] | None = None,
) -> tuple[Any, Any]:
  """Whether a tile may hold a visible pair, and holds only visible pairs.

  Spans are left out: where there are any, the second answer is of no use.

  Args:
    config: causality and window.
    q: first and last index of the queries.
    k: first and last index of the keys.
    limit: number of keys that exist, or None.
    segments: smallest and largest segment of the queries, and of the keys.
  """
  some = every = True
  if config.causal:
    some, every = some & (k[0] <= q[1]), every & (k[1] <= q[0])
  if config.window is not None:
    some &= q[0] - k[1] < config.window
    every &= q[1] - k[0] < config.window
    if not config.causal:
      some &= k[0] - q[1] < config.window
      every &= k[1] - q[0] < config.window
  if limit is not None:
    some, every = some & (k[0] < limit), every & (k[1] < limit)
  if segments is not None:
    (low, high), (first, last) = segments
    some &= (low <= last) & (first <= high)
    every &= (low == last) & (first == high)
  return some, every


def _blocks(first: Any, end: Any, block: int, count: int) -> tuple[Any, Any]:
  """Blocks that hold places first..end-1, within 0..count-1."""
  # Truncating division of what is not negative: Triton has no other.
  size = np.int32(block)
  at = lambda x: jax.lax.div(jnp.asarray(x, jnp.int32), size)
  low = at(jnp.clip(first, 0, count * block))
  high = at(jnp.clip(end, 0, count * block) + (block - 1))
  return low, jnp.maximum(high, low)


def key_blocks(
  config: Config, q: tuple[Any, Any], limit: Any, block: int, count: int
) -> tuple[Any, Any]:
  """First and one past the last block of keys that queries q[0]..q[1] see."""
  first, end = 0, count * block
  if config.window is not None:
    first = q[0] - config.window + 1
    end = jnp.minimum(end, q[1] + config.window)
  if config.causal:
    end = jnp.minimum(end, q[1] + 1)
  if limit is not None:
    end = jnp.minimum(end, limit)
  return _blocks(first, end, block, count)


def query_blocks(
  config: Config,
  k: tuple[Any, Any],
  offset: tuple[Any, Any],
  block: int,
  count: int,
) -> tuple[Any, Any]:
  """First and one past the last block of queries that see keys k[0]..k[1].

  `offset` holds the smallest and the largest index of a first query.
  """
  first, end = 0, count * block
  if config.causal:
    first = k[0] - offset[1]
  elif config.window is not None:
    first = k[0] - config.window + 1 - offset[1]
  if config.window is not None:
    end = jnp.minimum(end, k[1] + config.window - offset[0])
  return _blocks(first, end, block, count)


def unit(kind: str) -> float:
  """Softmax counts logits to the base of two, silu to that of e."""
  return LOG2E if kind == 'softmax' else 1.0


def shown(pairs: jax.Array, seen: jax.Array | None) -> jax.Array:
  """Where a tile of `pairs` does not hide, either."""
  # Half of it, since -1e30 has no exact bfloat16.
  here = pairs > HIDDEN / 2
  return here if seen is None else seen & here


def hide(x: jax.Array, seen: jax.Array | None, fill: float) -> jax.Array:
  """`fill` where a key is not seen."""
  return x if seen is None else jnp.where(seen, x, fill)


def slopes(
  kind: str,
  x: jax.Array,
  seen: jax.Array | None,
  lse: Any,
  delta: Any,
  inner: jax.Array,
  exp: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """Weights of a tile, and the gradient of its logits.

  Args:
    kind: of weights, see `Config`.
    x: logits of a tile, not masked.
    seen: of `visible`.
    lse: logarithm of the sums, or None for silu.
    delta: <g, out> less the cotangent of lse, or None for silu.
    inner: <g_t, v_s>.
    exp: exponential in the base of the logits.
  """
  if kind == 'silu':
    weights, slope = silu(hide(x, seen, 0.0))
    return weights, hide(slope * inner, seen, 0.0)
  weights = exp(hide(x, seen, -jnp.inf) - lse)
  return weights, weights * (inner - delta)


def out_dtype(v: jax.Array, bias: jax.Array | None) -> Any:
  """Of the sums of values: not rounded where a bias has a gradient.

  The gradient of a bias adds differences between values and their sum over all
  queries. A key that outweighs all others leaves little but rounding in them.
  """
  return v.dtype if bias is None else jnp.promote_types(v.dtype, jnp.float32)


def rotate_halves(
  a: jax.Array, b: jax.Array, cos: jax.Array, sin: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Turns the pairs (a, b); turns back with -sin."""
  return a * cos - b * sin, b * cos + a * sin


def rotate(x: jax.Array, table: jax.Array, back: bool = False) -> jax.Array:
  """Turns the halves of the last axis by a table of `rope_table`."""
  a, b = jnp.split(x.astype(table.dtype), 2, -1)
  cos, sin = jnp.split(table, 2, -1)
  halves = rotate_halves(a, b, cos, -sin if back else sin)
  return jnp.concatenate(halves, -1).astype(x.dtype)

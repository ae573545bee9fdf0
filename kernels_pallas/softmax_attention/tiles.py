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

from kernels_pallas.softmax_attention.options import Config

__all__ = [
  'LOG2E',
  'Side',
  'key_blocks',
  'out_dtype',
  'overlap',
  'precision',
  'query_blocks',
  'rotate',
  'rotate_halves',
  'softmax_step',
  'split_evenly',
  'visible',
]

LOG2E = 1.4426950408889634


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


def overlap(
  config: Config, q: tuple[Any, Any], k: tuple[Any, Any], limit: Any
) -> tuple[Any, Any]:
  """Whether a tile holds some visible pair, and only visible pairs.

  Segments and spans are left out: where there are any, the second answer is
  of no use.

  Args:
    config: causality and window.
    q: first and last index of the queries.
    k: first and last index of the keys.
    limit: number of keys that exist, or None.
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


def softmax_step(
  logits: jax.Array,
  peak: jax.Array,
  total: jax.Array,
  axis: int,
  exp: Callable[[jax.Array], jax.Array],
  wide: Callable[[jax.Array], jax.Array] = lambda x: x,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
  """Adds a tile to a softmax: weights, decay of earlier sums, peak, total.

  A row without any visible key keeps peak -inf, total 0 and weights 0.

  Args:
    logits: a tile, -inf where masked.
    peak: largest logit so far, size 1 in `axis` (or repeated there).
    total: sum of exp(logit - peak) so far, in the shape of peak.
    axis: of the keys.
    exp: exponential in the base of the logits.
    wide: repeats the shape of peak until it broadcasts against the tile.
  """
  highest = jnp.maximum(peak, jnp.max(logits, axis, keepdims=True))
  shift = jnp.where(highest == -jnp.inf, 0.0, highest)
  weights = exp(logits - wide(shift))
  decay = exp(peak - shift)
  total = total * decay + jnp.sum(weights, axis, keepdims=True)
  return weights, decay, highest, total


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


def split_evenly(size: int, largest: int, multiple: int) -> tuple[int, int]:
  """Length and number of equal blocks, with as little padding as may be."""
  count = -(-size // largest)
  block = -(-size // count)
  block = -(-block // multiple) * multiple
  return block, -(-size // block)


def precision(dtype: Any) -> jax.lax.Precision:
  """Single precision shall mean single precision on every chip."""
  single = jnp.dtype(dtype).itemsize > 2
  return jax.lax.Precision.HIGHEST if single else jax.lax.Precision.DEFAULT

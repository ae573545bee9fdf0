"""Mathematics of a tile that several kernels need."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

__all__ = [
  'LOG2E',
  'dot',
  'dot_rows',
  'precision',
  'promote_dtypes',
  'silu',
  'softmax_step',
]

LOG2E = 1.4426950408889634


def precision(dtype: Any) -> jax.lax.Precision:
  """Single precision shall mean single precision on every chip."""
  single = jnp.dtype(dtype).itemsize > 2
  return jax.lax.Precision.HIGHEST if single else jax.lax.Precision.DEFAULT


def promote_dtypes(*arrays: jax.Array) -> tuple[jax.Array, ...]:
  """All in the dtype that holds every one of them."""
  dtype = jnp.result_type(*arrays)
  return tuple(x.astype(dtype) for x in arrays)


def dot(a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
  """Product a b or a b^T, in the dtype of b, summed in float32."""
  return jax.lax.dot_general(
    a.astype(b.dtype),
    b,
    (((1,), (1 if transpose else 0,)), ((), ())),
    precision=precision(b.dtype),
    preferred_element_type=jnp.float32,
  )


def dot_rows(a: jax.Array, b: jax.Array) -> jax.Array:
  """Product a^T b, in the dtype of b, summed in float32."""
  return jax.lax.dot_general(
    a.astype(b.dtype),
    b,
    (((0,), (0,)), ((), ())),
    precision=precision(b.dtype),
    preferred_element_type=jnp.float32,
  )


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


def silu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
  """X sigmoid(x) and its derivative."""
  sigmoid = jax.nn.sigmoid(x)
  value = x * sigmoid
  return value, sigmoid + value * (1.0 - sigmoid)

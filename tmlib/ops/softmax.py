r"""Softmax over what is really there: masked slices and packed rows.

Axes: ... leading axes, N entries of a row, S segments packed into one row.

Neither function needs a scatter: a packed row is reduced through a one-hot
matrix [..., N, S], because S is small and a float32 scatter-add into few
segments is slow on accelerators and unordered on some of them.
"""

import chex
import jax
import jax.numpy as jnp

__all__ = ['masked_softmax', 'one_hot_segments', 'segment_softmax']


def masked_softmax(
  logits: jax.Array, mask: jax.Array, axis: int = -1
) -> jax.Array:
  r"""Softmax over the entries where `mask` holds; zero elsewhere.

  a_n = m_n exp(x_n) / sum_k m_k exp(x_k), and a = 0 where no m_k holds: an
  empty slice gives zeros, not NaN, and a zero gradient, so that an empty bag
  cannot poison its batch.

  Args:
    logits: [...], float. Entries outside the mask may be NaN or infinite.
    mask: [...], bool; broadcasts to `logits`, same rank.
    axis: the axis that sums to one.

  Returns:
    [...], weights in [0, 1], in the dtype of `logits`.
  """
  logits, mask = jnp.asarray(logits), jnp.asarray(mask)
  lowest = jnp.finfo(logits.dtype).min
  # The lowest finite number, not -inf: -inf - (-inf) is NaN in the gradient.
  logits = jnp.where(mask, logits, lowest)
  peak = jnp.maximum(jnp.max(logits, axis, keepdims=True), lowest)
  weights = jnp.where(mask, jnp.exp(logits - jax.lax.stop_gradient(peak)), 0)
  total = jnp.sum(weights, axis, keepdims=True)
  return weights / jnp.where(total > 0, total, 1)


def one_hot_segments(
  segment_ids: jax.Array, mask: jax.Array, num_segments: int
) -> jax.Array:
  """Membership matrix of a packed row: m_ns = [segment of n is s and n valid].

  Args:
    segment_ids: [..., N], int; ids outside [0, S) belong to no segment.
    mask: [..., N], bool.
    num_segments: S.

  Returns:
    [..., N, S], bool.
  """
  chex.assert_equal_shape([segment_ids, mask])
  segments = jnp.arange(num_segments, dtype=segment_ids.dtype)
  segments = segments.reshape((1,) * segment_ids.ndim + (-1,))
  return (segment_ids[..., None] == segments) & mask[..., None]


def segment_softmax(
  logits: jax.Array, mask: jax.Array, segment_ids: jax.Array, num_segments: int
) -> jax.Array:
  r"""Softmax within each segment of a packed row.

  a_n = m_n exp(x_n) / sum_{k: seg k = seg n} m_k exp(x_k).

  Args:
    logits: [..., N], float. Entries outside the mask may be NaN or infinite.
    mask: [..., N], bool.
    segment_ids: [..., N], int in [0, S); any order, segments may be empty.
    num_segments: S, a small Python int: memory is N * S.

  Returns:
    [..., N]; sums to one over each segment that has a valid entry, zero
    outside the mask.
  """
  logits, mask = jnp.asarray(logits), jnp.asarray(mask)
  chex.assert_equal_shape([logits, mask, segment_ids])
  member = one_hot_segments(segment_ids, mask, num_segments)
  lowest = jnp.finfo(logits.dtype).min
  # An entry whose id is out of range belongs to nobody; its exponential must
  # not overflow, for 0 * inf would be its gradient.
  logits = jnp.where(jnp.any(member, -1), logits, lowest)
  peak = jnp.max(jnp.where(member, logits[..., None], lowest), axis=-2)
  peak = jax.lax.stop_gradient(jnp.maximum(peak, lowest))
  # One segment per entry, so a sum over where() is a lookup without a gather.
  own_peak = jnp.sum(jnp.where(member, peak[..., None, :], 0), axis=-1)
  weights = jnp.where(mask, jnp.exp(logits - own_peak), 0)
  weights = jnp.where(jnp.any(member, -1), weights, 0)
  total = jnp.sum(jnp.where(member, weights[..., None], 0), axis=-2)
  own_total = jnp.sum(jnp.where(member, total[..., None, :], 0), axis=-1)
  return weights / jnp.where(own_total > 0, own_total, 1)

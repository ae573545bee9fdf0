r"""Pooling of bags, one by one or packed.

Axes: B rows, N instances (padded), D features, S bags packed into a row.

Every function takes `segment_ids` [B, N]: None means that a row is one bag and
results are [B, D]; otherwise rows pack S bags and results are [B, S, D].
Padded instances may hold anything, NaN included.
"""

import chex
import jax
import jax.numpy as jnp

from tmlib.ops.softmax import (
  masked_softmax,
  one_hot_segments,
  segment_softmax,
)

__all__ = ['attention_pool', 'max_pool', 'mean_pool', 'weighted_pool']


def weighted_pool(
  features: jax.Array,
  weights: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
) -> jax.Array:
  r"""Weighted sum over each bag: z_b = sum_{n in b} w_n h_n.

  Args:
    features: [B, N, D], instance features h.
    weights: [B, N], w; ignored outside the mask.
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.

  Returns:
    [B, D], or [B, S, D] for packed rows; zeros for an empty bag.
  """
  chex.assert_rank([features, weights, mask], [3, 2, 2])
  chex.assert_equal_shape_prefix([features, weights, mask], 2)
  # where, not multiply: 0 * NaN in a padded row is NaN.
  features = jnp.where(mask[..., None], features, 0)
  weights = jnp.where(mask, weights, 0)
  if segment_ids is None:
    return jnp.einsum('bn,bnd->bd', weights, features)
  member = one_hot_segments(segment_ids, mask, num_segments)
  table = jnp.where(member, weights[..., None], 0)
  return jnp.einsum('bns,bnd->bsd', table, features)


def attention_pool(
  features: jax.Array,
  scores: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
  r"""Attention-weighted mean of each bag: z_b = sum_n softmax_b(e)_n h_n.

  Args:
    features: [B, N, D], instance features h.
    scores: [B, N], unnormalised attention e.
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.

  Returns:
    pooled: [B, (S,) D]; zeros for an empty bag.
    attention: [B, N]; sums to one over each bag that is not empty.

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018. The value for an empty bag is our choice.
  """
  if segment_ids is None:
    attention = masked_softmax(scores, mask)
  else:
    attention = segment_softmax(scores, mask, segment_ids, num_segments)
  pooled = weighted_pool(features, attention, mask, segment_ids, num_segments)
  return pooled, attention


def mean_pool(
  features: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Mean of each bag, and the weight 1/N_b of its instances.

  Args:
    features: [B, N, D].
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.

  Returns:
    pooled: [B, (S,) D]; zeros for an empty bag.
    weights: [B, N]; sum to one over each bag that is not empty.
  """
  zeros = jnp.zeros(mask.shape, features.dtype)
  return attention_pool(features, zeros, mask, segment_ids, num_segments)


def max_pool(
  features: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
  """Maximum of each bag and feature, and the share of each instance in it.

  The share of instance n is the fraction of the D features whose maximum it
  holds (ties are split). A maximum hides NaN on some backends: check features
  with `validate_bag` before.

  Args:
    features: [B, N, D].
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.

  Returns:
    pooled: [B, (S,) D]; zeros for an empty bag.
    share: [B, N]; sums to one over each bag that is not empty. No gradient.
  """
  chex.assert_rank([features, mask], [3, 2])
  packed = segment_ids is not None
  if segment_ids is None:
    segment_ids, num_segments = jnp.zeros(mask.shape, jnp.int32), 1
  member = one_hot_segments(segment_ids, mask, num_segments)
  lowest = jnp.finfo(features.dtype).min
  pooled, share = [], jnp.zeros(mask.shape, features.dtype)
  # One segment at a time: [B, N, S, D] would not fit for large bags.
  for segment in range(num_segments):
    valid = member[..., segment]
    inside = jnp.where(valid[..., None], features, lowest)
    peak = jnp.max(inside, axis=1)
    held = (inside == peak[:, None]) & valid[..., None]
    count = jnp.maximum(jnp.sum(held, 1, keepdims=True), 1)
    share += jnp.mean(held / count, -1)
    pooled.append(jnp.where(jnp.any(valid, 1)[:, None], peak, 0))
  share = jax.lax.stop_gradient(share)
  return (jnp.stack(pooled, 1) if packed else pooled[0]), share

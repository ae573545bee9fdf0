r"""Poolings between mean and maximum, one bag or several in a row.

Axes: B rows, N instances (padded), D features (or classes), S bags packed into
a row. Arguments and shapes as in `tmlib.mil.pooling`: padded instances may hold
anything, packed rows give [B, S, D], an empty bag gives zeros. Each function
also returns the share [B, N] of every instance, averaged over features; it
sums to one over a bag and has no gradient.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from tmlib.ops.softmax import masked_softmax, one_hot_segments

__all__ = ['log_sum_exp_pool', 'noisy_or_pool', 'top_k_pool']

# (features [B, N, D], valid [B, N, 1]) -> pooled [B, D], share [B, N].
_Pool = Callable[[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def log_sum_exp_pool(
  features: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
  *,
  sharpness: float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  r"""z_d = (1/r) log( (1/N_b) sum_n exp(r h_nd) ): mean (r -> 0) to max.

  Args:
    features: [B, N, D].
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.
    sharpness: r > 0.

  Returns:
    pooled: [B, (S,) D].
    share: [B, N], softmax of r h, averaged over D.

  Raises:
    ValueError: r <= 0.
  """
  if not sharpness > 0:
    raise ValueError(f'sharpness must be > 0, got {sharpness}')

  def pool(x, valid):
    scaled = jnp.where(valid, sharpness * x, jnp.finfo(x.dtype).min)
    # An empty bag is pooled over zeros, so that its gradient is finite.
    scaled = jnp.where(jnp.any(valid, 1, keepdims=True), scaled, 0)
    count = jnp.maximum(jnp.sum(valid, 1), 1)
    total = jax.nn.logsumexp(scaled, 1) - jnp.log(count.astype(x.dtype))
    total = jnp.where(jnp.any(valid, 1), total / sharpness, 0)
    return total, jnp.mean(masked_softmax(scaled, valid, 1), -1)

  return _each_bag(pool, features, mask, segment_ids, num_segments)


def noisy_or_pool(
  logits: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
) -> tuple[jax.Array, jax.Array]:
  r"""t_d = -log prod_n (1 - sigmoid(x_nd)) = sum_n softplus(x_nd).

  The probability that some instance is positive is 1 - exp(-t); t itself does
  not saturate.

  Args:
    logits: [B, N, D].
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.

  Returns:
    pooled: [B, (S,) D], t >= 0.
    share: [B, N], share of an instance in t, averaged over D.

  References:
    Maron, Lozano-Perez. A framework for multiple-instance learning, 1998.
  """

  def pool(x, valid):
    each = jnp.where(valid, jax.nn.softplus(jnp.where(valid, x, 0)), 0)
    total = jnp.sum(each, 1)
    tiny = jnp.finfo(x.dtype).tiny
    return total, jnp.mean(each / jnp.maximum(total, tiny)[:, None], -1)

  return _each_bag(pool, logits, mask, segment_ids, num_segments)


def top_k_pool(
  features: jax.Array,
  mask: jax.Array,
  segment_ids: jax.Array | None = None,
  num_segments: int = 1,
  *,
  k: int = 8,
) -> tuple[jax.Array, jax.Array]:
  """Mean of the k largest values of each bag and feature (all of a small bag).

  Args:
    features: [B, N, D].
    mask: [B, N], bool.
    segment_ids: [B, N], int in [0, S), or None.
    num_segments: S.
    k: >= 1.

  Returns:
    pooled: [B, (S,) D].
    share: [B, N], 1/k where chosen (ties divide it), averaged over D.

  Raises:
    ValueError: k < 1.
  """
  if k < 1:
    raise ValueError(f'k must be >= 1, got {k}')

  def pool(x, valid):
    low = jnp.where(valid, x, jnp.finfo(x.dtype).min)
    size = min(k, x.shape[1])
    best = jax.lax.top_k(jnp.swapaxes(low, 1, 2), size)[0]  # [B, D, K]
    count = jnp.minimum(jnp.sum(valid, 1), size)[..., None]  # [B, 1, 1]
    chosen = jnp.arange(size)[None, None] < count
    share = 1 / jnp.maximum(count, 1).astype(x.dtype)
    pooled = jnp.sum(jnp.where(chosen, best * share, 0), -1)
    # Values equal to the last one chosen divide what is left among them.
    last = jnp.min(jnp.where(chosen, best, jnp.inf), -1)[:, None]
    above, tied = valid & (x > last), valid & (x == last)
    left = count - jnp.sum(above, 1, keepdims=True)
    part = left / jnp.maximum(jnp.sum(tied, 1, keepdims=True), 1)
    return pooled, jnp.mean((above + jnp.where(tied, part, 0)) * share, -1)

  return _each_bag(pool, features, mask, segment_ids, num_segments)


def _each_bag(pool: _Pool, features, mask, segment_ids, num_segments):
  """Pools one segment at a time: [B, N, S, D] would not fit."""
  if segment_ids is None:
    pooled, share = pool(features, mask[..., None])
    return pooled, jax.lax.stop_gradient(share)
  member = one_hot_segments(segment_ids, mask, num_segments)
  found = [pool(features, member[..., s, None]) for s in range(num_segments)]
  share = jnp.sum(jnp.stack([share for _, share in found]), 0)
  pooled = jnp.stack([pooled for pooled, _ in found], 1)
  return pooled, jax.lax.stop_gradient(share)

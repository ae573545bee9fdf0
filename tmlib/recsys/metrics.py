r"""Full-ranking metrics of one held-out item per user.

Axes: B users, I items.

All are functions of the rank of the target among all items that the user has
not seen, itself included. Ties count against the model: a constant score ranks
the target last, so no metric can be won by giving equal scores.
"""

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['hit_rate', 'mrr', 'ndcg', 'recall', 'target_rank']

# Both kinds go in, JAX's comes out.
Array = jax.Array | np.ndarray


def target_rank(
  scores: Array, target: Array, seen: Array | None = None
) -> jax.Array:
  r"""Pessimistic rank: 1 + #{j != target, j unseen : s_j >= s_target}.

  Args:
    scores: [B, I], float. NaN of another item counts as above the target; a
      target whose own score is NaN is last.
    target: [B] int in [0, I); under jit an index outside is clamped, so check
      it on the host.
    seen: [B, I] bool, items that are no candidates; the target always is one.

  Returns:
    [B] int32, in [1, I].
  """
  scores = jnp.asarray(scores)
  own = jnp.take_along_axis(scores, target[:, None], 1)
  above = ~(scores < own)
  other = jnp.arange(scores.shape[1])[None] != target[:, None]
  if seen is not None:
    other = other & ~seen
  return 1 + jnp.sum(above & other, 1, dtype=jnp.int32)


def hit_rate(rank: Array, k: int = 10) -> jax.Array:
  """[B] float32: one where the target is among the first k, else zero."""
  return (jnp.asarray(rank) <= k).astype(jnp.float32)


def recall(rank: Array, k: int = 10) -> jax.Array:
  """[B] float32: share of the relevant items among the first k.

  With one target per user, as here, it equals `hit_rate`.
  """
  return hit_rate(rank, k)


def ndcg(rank: Array, k: int = 10) -> jax.Array:
  """[B] float32: 1 / log2(1 + rank) within the first k, else zero.

  References:
    Jarvelin, Kekalainen. Cumulated gain-based evaluation of IR techniques,
    2002; the ideal gain of one target is one.
  """
  rank = jnp.asarray(rank)
  gain = 1 / jnp.log2(1 + rank.astype(jnp.float32))
  return jnp.where(rank <= k, gain, 0)


def mrr(rank: Array, k: int | None = None) -> jax.Array:
  """[B] float32: 1 / rank, zero beyond k where k is given."""
  rank = jnp.asarray(rank)
  value = 1 / rank.astype(jnp.float32)
  return value if k is None else jnp.where(rank <= k, value, 0)

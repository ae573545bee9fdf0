r"""Attention and pooling models of bags.

h_i = dropout(relu(W x_i + b)),  z = pool(h),  logits = W_c z + b_c.

Axes: B rows, S bags packed into a row, N instances, P input features, D hidden
features, C classes.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil import pooling, soft_pooling
from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import embed, row_keys
from tmlib.mil.layers import wide
from tmlib.mil.output import MILOutput

__all__ = ['ABMIL', 'PoolMIL']

_POOLS = ('mean', 'max', 'log_sum_exp', 'noisy_or', 'top_k')


class ABMIL(nn.Module):
  r"""Attention-based multiple-instance learning.

  a = softmax_i(e_i), z = sum_i a_i h_i, with plain or gated scores e. An empty
  bag has z = 0, so its logits are the bias of the last layer. With `slide`
  units there is a layer z <- dropout(relu(W_s z + b_s)) before it.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    attention: units of the attention scorer.
    gated: gated scores.
    slide: units of a layer after pooling, or 0, as the public survival models
      have it (AMIL).
    dropout: rate after the embedding and that layer, in [0, 1).
    dtype: computation dtype; parameters stay float32. Attention and logits
      are computed in float32.

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 128
  attention: int = 64
  gated: bool = True
  slide: int = 0
  dropout: float = 0.25
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput.

    Args:
      bag: leaves [B, N, ...].
      train: apply dropout.
      dropout_keys: [B] keys of the rows; None splits the 'dropout' stream,
        which then depends on the layout of the batch.

    Returns:
      MILOutput.
    """
    keys = row_keys(self, bag, train, dropout_keys)
    hidden = embed(self, bag, keys)
    scores = AttentionScores(
      self.attention, self.gated, self.dtype, name='attention'
    )(hidden)
    pooled, attention = pooling.attention_pool(
      hidden.astype(scores.dtype),
      scores,
      bag.mask,
      bag.segment_ids,
      bag.num_segments,
    )
    if self.slide:
      pooled = nn.relu(nn.Dense(self.slide, name='slide')(pooled))
      pooled = bag_dropout(pooled, self.dropout, keys, 101)
    logits = nn.Dense(self.num_classes, name='head')(pooled)
    return MILOutput(logits, attention, pooled)


class PoolMIL(nn.Module):
  r"""Pooled instances, the baselines without attention.

  Embedding space: logits = W_c pool(h) + b_c. Instance space: each instance is
  scored first, logits = pool(W_c h + b_c). With noisy-or the embedding is
  z = 1 - prod_i (1 - sigmoid(h_i)), and an instance-space logit the log-odds of
  the same in class c, zero for an empty bag.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    pool: 'mean', 'max', 'log_sum_exp', 'noisy_or' or 'top_k'.
    space: 'embedding' or 'instance'.
    sharpness: r of 'log_sum_exp', > 0.
    k: instances of 'top_k', >= 1.
    dropout: rate after the embedding, in [0, 1).
    dtype: computation dtype of the embedding.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 128
  pool: str = 'mean'
  space: str = 'embedding'
  sharpness: float = 1.0
  k: int = 8
  dropout: float = 0.25
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    pool = self._pool()
    if self.space not in ('embedding', 'instance'):
      raise ValueError(
        f"space must be 'embedding' or 'instance', got {self.space!r}"
      )
    keys = row_keys(self, bag, train, dropout_keys)
    hidden = wide(embed(self, bag, keys))
    packing = (bag.mask, bag.segment_ids, bag.num_segments)
    head = nn.Dense(self.num_classes, name='head')
    if self.space == 'embedding':
      pooled, share = pool(hidden, *packing)
      if self.pool == 'noisy_or':
        pooled = -jnp.expm1(-pooled)
      return MILOutput(head(pooled), share, pooled)
    logits, share = pool(head(hidden), *packing)
    if self.pool == 'noisy_or':
      some = logits > 0
      odds = logits + jnp.log(-jnp.expm1(-jnp.where(some, logits, 1)))
      logits = jnp.where(some, odds, 0)
    return MILOutput(
      logits, share, pooling.weighted_pool(hidden, share, *packing)
    )

  def _pool(self):
    """The pooling function, its options bound."""
    if self.pool not in _POOLS:
      raise ValueError(
        f'pool must be one of {", ".join(_POOLS)}, got {self.pool!r}'
      )
    return {
      'mean': pooling.mean_pool,
      'max': pooling.max_pool,
      'log_sum_exp': partial(
        soft_pooling.log_sum_exp_pool, sharpness=self.sharpness
      ),
      'noisy_or': soft_pooling.noisy_or_pool,
      'top_k': partial(soft_pooling.top_k_pool, k=self.k),
    }[self.pool]

r"""Attention and pooling models of bags.

h_i = dropout(relu(W x_i + b)),  z = pool(h),  logits = W_c z + b_c.

Axes: B rows, S bags packed into a row, N instances, P input features, D hidden
features, C classes.
"""

import difflib

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.data.bag import check_bag
from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.output import MILOutput
from tmlib.mil.pooling import attention_pool, max_pool, mean_pool

__all__ = ['ABMIL', 'MODELS', 'PoolMIL', 'create_model']


class ABMIL(nn.Module):
  r"""Attention-based multiple-instance learning.

  a = softmax_i(e_i), z = sum_i a_i h_i, with plain or gated scores e. An empty
  bag has z = 0, so its logits are the bias of the last layer.

  Attributes:
    num_classes: C.
    hidden: D.
    attention: units of the attention scorer.
    gated: gated scores.
    dropout: rate after the embedding, in [0, 1).
    dtype: computation dtype; parameters stay float32. Attention and logits
      are computed in float32.

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018.
  """

  num_classes: int
  hidden: int = 128
  attention: int = 64
  gated: bool = True
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
    hidden = _embed(self, bag, train, dropout_keys)
    scores = AttentionScores(
      self.attention, self.gated, self.dtype, name='attention'
    )(hidden)
    pooled, attention = attention_pool(
      hidden.astype(scores.dtype),
      scores,
      bag.mask,
      bag.segment_ids,
      bag.num_segments,
    )
    logits = nn.Dense(self.num_classes, name='head')(pooled)
    return MILOutput(logits, attention, pooled)


class PoolMIL(nn.Module):
  """Mean or maximum of embedded instances: the baseline without attention.

  Attributes:
    num_classes: C.
    hidden: D.
    pool: 'mean' or 'max'.
    dropout: rate after the embedding, in [0, 1).
    dtype: computation dtype of the embedding.
  """

  num_classes: int
  hidden: int = 128
  pool: str = 'mean'
  dropout: float = 0.25
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    if self.pool not in ('mean', 'max'):
      raise ValueError(f"pool must be 'mean' or 'max', got {self.pool!r}")
    hidden = _embed(self, bag, train, dropout_keys)
    hidden = hidden.astype(jnp.promote_types(hidden.dtype, jnp.float32))
    pool = mean_pool if self.pool == 'mean' else max_pool
    pooled, share = pool(hidden, bag.mask, bag.segment_ids, bag.num_segments)
    logits = nn.Dense(self.num_classes, name='head')(pooled)
    return MILOutput(logits, share, pooled)


# Name -> constructor taking num_classes, for configs that hold only names.
MODELS = {
  'abmil': lambda num_classes, **kw: ABMIL(num_classes, gated=False, **kw),
  'gated_abmil': lambda num_classes, **kw: ABMIL(num_classes, **kw),
  'mean_pool': lambda num_classes, **kw: PoolMIL(num_classes, **kw),
  'max_pool': lambda num_classes, **kw: PoolMIL(num_classes, pool='max', **kw),
}


def create_model(name: str, num_classes: int, **options) -> nn.Module:
  """Builds a bag model by name.

  Args:
    name: a key of `MODELS`.
    num_classes: C, >= 2.
    **options: attributes of the model, for example hidden=64.

  Returns:
    A Linen module: apply({'params': p}, bag, train=..., dropout_keys=...).

  Raises:
    ValueError: an unknown name, or fewer than two classes.
  """
  if name not in MODELS:
    close = difflib.get_close_matches(name, MODELS, 1)
    guess = f'; did you mean {close[0]!r}?' if close else ''
    raise ValueError(
      f'unknown model {name!r}{guess} Known: {", ".join(sorted(MODELS))}'
    )
  if num_classes < 2:
    raise ValueError(f'num_classes must be >= 2, got {num_classes}')
  return MODELS[name](num_classes, **options)


def _embed(module, bag, train, dropout_keys):
  """H = dropout(relu(W x + b)), [B, N, D]; called inside a compact module."""
  check_bag(bag, ndims=(3,))
  keys = _dropout_keys(module, bag, train, dropout_keys)
  # Padding may hold NaN, which would reach the kernel's gradient as 0 * NaN.
  features = jnp.where(bag.mask[..., None], bag.features, 0)
  dense = nn.Dense(module.hidden, dtype=module.dtype, name='embed')
  return bag_dropout(nn.relu(dense(features)), module.dropout, keys)


def _dropout_keys(module, bag, train, dropout_keys):
  """Keys of the rows [B], or None where nothing is dropped."""
  if not train or module.dropout == 0:
    return None
  if dropout_keys is not None:
    return dropout_keys
  return jax.random.split(module.make_rng('dropout'), bag.mask.shape[0])

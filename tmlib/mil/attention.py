r"""Attention scorers: e_i = w^T tanh(V h_i), plain or gated.

Axes: ... leading axes (bags and instances), D features, A attention units,
C branches.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil.dropout import bag_dropout
from tmlib.mil.layers import Dense

__all__ = ['AttentionScores']


class AttentionScores(nn.Module):
  r"""Unnormalised attention of each instance.

  plain: e = w^T tanh(V h + v); gated: e = w^T (tanh(V h + v) sigmoid(U h + u)).

  The output layer has no bias: softmax ignores it, its gradient is rounding
  noise, and Adam would turn that noise into a drift.

  Attributes:
    hidden: A.
    gated: multiply by the sigmoid gate.
    dtype: computation dtype of the layers.
    branches: C scores of each instance; 0 for one, without an axis.
    dropout: rate on the units of either factor, in [0, 1).

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018.
  """

  hidden: int = 128
  gated: bool = True
  dtype: jnp.dtype | None = None
  branches: int = 0
  dropout: float = 0.0

  @nn.compact
  def __call__(
    self, features: jax.Array, keys: jax.Array | None = None
  ) -> jax.Array:
    """Maps features [..., D] to scores [...] or [..., C], float32 or wider.

    Args:
      features: [..., D]; [B, ..., D] with `keys`.
      keys: [B], of the rows, or None for no dropout.
    """
    drop = lambda x, layer: bag_dropout(x, self.dropout, keys, layer)
    units = jnp.tanh(Dense(self.hidden, dtype=self.dtype, name='v')(features))
    units = drop(units, 1)
    if self.gated:
      gate = Dense(self.hidden, dtype=self.dtype, name='u')(features)
      units *= drop(nn.sigmoid(gate), 2)
    scores = Dense(
      self.branches or 1, use_bias=False, dtype=self.dtype, name='w'
    )(units)
    scores = scores.astype(jnp.promote_types(scores.dtype, jnp.float32))
    return scores if self.branches else scores[..., 0]

r"""Attention scorers: e_i = w^T tanh(V h_i), plain or gated.

Axes: ... leading axes (bags and instances), D features, A attention units.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

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

  References:
    Ilse, Tomczak, Welling. Attention-based deep multiple instance learning,
    2018.
  """

  hidden: int = 128
  gated: bool = True
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, features: jax.Array) -> jax.Array:
    """Maps features [..., D] to scores [...], float32 or wider."""
    units = jnp.tanh(
      nn.Dense(self.hidden, dtype=self.dtype, name='v')(features)
    )
    if self.gated:
      gate = nn.Dense(self.hidden, dtype=self.dtype, name='u')(features)
      units *= nn.sigmoid(gate)
    scores = nn.Dense(1, use_bias=False, dtype=self.dtype, name='w')(units)
    return scores[..., 0].astype(jnp.promote_types(scores.dtype, jnp.float32))

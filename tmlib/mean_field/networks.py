"""Small learned networks of the mean-field family.

Axes: ... leading axes, F features, A actions.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp

__all__ = ['MLP', 'TableNet']


class MLP(nn.Module):
  """Dense layers with GELU between them, [..., F] -> [..., A].

  Attributes:
    outputs: A.
    hidden: widths of the hidden layers; () for a linear map.
  """

  outputs: int
  hidden: Sequence[int] = (32, 32)

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """Applies the layers."""
    for width in self.hidden:
      x = nn.gelu(nn.Dense(width)(x))
    return nn.Dense(self.outputs)(x)


class TableNet(nn.Module):
  """Action values of (state, time) from learned embeddings.

  Attributes:
    states: S.
    horizon: H.
    outputs: A.
    hidden: widths of the hidden layers; () makes the values a free table.
  """

  states: int
  horizon: int
  outputs: int
  hidden: Sequence[int] = (64, 64)

  @nn.compact
  def __call__(self, state: jax.Array, time: jax.Array) -> jax.Array:
    """Maps state [...] int and time [...] int to [..., A]."""
    if not self.hidden:
      table = nn.Embed(self.states * self.horizon, self.outputs,
                       embedding_init=nn.initializers.zeros)  # fmt: skip
      return table(time * self.states + state)
    width = self.hidden[0]
    x = nn.Embed(self.states, width)(state) + nn.Embed(self.horizon, width)(
      time
    )
    return MLP(self.outputs, self.hidden)(jnp.sqrt(1.0 * width) * x)

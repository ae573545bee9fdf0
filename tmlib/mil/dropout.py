"""Dropout whose noise belongs to a bag, not to its place in a batch.

Axes: B rows, N instances, D features.
"""

import chex
import jax
import jax.numpy as jnp

__all__ = ['bag_dropout']


def bag_dropout(
  features: jax.Array, rate: float, keys: jax.Array | None, layer: int = 0
) -> jax.Array:
  r"""Inverted dropout: x r / (1 - rate), r ~ Bernoulli(1 - rate) per entry.

  Each row draws from its own key, so batch mates, micro-batches and the
  number of devices never change a row's noise; nor does padding, since entry
  (n, d) takes its bits from its own position.

  Args:
    features: [B, ..., D].
    rate: in [0, 1).
    keys: [B] PRNG keys, or None for no dropout (evaluation).
    layer: number of the layer, so that layers draw different noise.

  Returns:
    [B, ..., D].

  Raises:
    ValueError: rate outside [0, 1).
  """
  if not 0 <= rate < 1:
    raise ValueError(f'dropout rate must be in [0, 1), got {rate}')
  if keys is None or rate == 0:
    return features
  chex.assert_axis_dimension(keys, 0, features.shape[0])

  def keep(key):
    key = jax.random.fold_in(key, layer)
    return jax.random.bernoulli(key, 1 - rate, features.shape[1:])

  kept = jax.vmap(keep)(keys)
  return jnp.where(kept, features / (1 - rate), 0)

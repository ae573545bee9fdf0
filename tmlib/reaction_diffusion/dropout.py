"""Dropout whose mask is a function of the bag's key and the patch's position.

Axes: ... leading axes, N patches, D channels.
"""

import jax
import jax.numpy as jnp

__all__ = ['patch_dropout']


def patch_dropout(
  x: jax.Array, rate: float, keys: jax.Array, axis_name: str | None = None
) -> jax.Array:
  """Zeroes units with probability `rate` and rescales the others.

  Each patch folds its position into its row's key, so padding, batch mates and
  the way that rows or patches are split over devices leave the mask alone.

  Args:
    x: [..., N, D].
    rate: in [0, 1).
    keys: [...], one typed PRNG key per row.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., N, D].
  """
  rows, dim = x.shape[-2:]
  first = 0 if axis_name is None else rows * jax.lax.axis_index(axis_name)
  position = first + jnp.arange(rows)

  def keep(key):
    patch = lambda i: jax.random.bernoulli(
      jax.random.fold_in(key, i), 1 - rate, (dim,)
    )
    return jax.vmap(patch)(position)

  for _ in range(keys.ndim):
    keep = jax.vmap(keep)
  return jnp.where(keep(keys), x / (1 - rate), 0)

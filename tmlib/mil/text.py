"""Embeddings of a text encoder as attributes of a model, and unit vectors.

Axes: C classes, M concepts of a class, Q dimensions of the text space, B rows,
N instances.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tmlib.mil.bag import Bag
from tmlib.mil.embedding import clean_features
from tmlib.mil.layers import wide

__all__ = ['check_text', 'in_text_space', 'unit']


def check_text(text: Any, shape: tuple[int | None, ...]) -> Any:
  """Text embeddings as nested tuples, so that a module stays hashable.

  Args:
    text: array like, [..., Q].
    shape: wanted, None for any size.

  Returns:
    The same numbers as nested tuples of float.

  Raises:
    ValueError: another shape, or a row that is zero or not finite.
  """
  table = np.asarray(text, np.float64)
  fits = table.ndim == len(shape) and all(
    want in (None, got) for want, got in zip(shape, table.shape, strict=True)
  )
  if not fits:
    wanted = ', '.join('any' if n is None else str(n) for n in shape)
    raise ValueError(f'text has shape {table.shape}, expected ({wanted})')
  broken = ~np.isfinite(table).all(-1) | ~table.any(-1)
  if broken.any():
    row = tuple(int(i) for i in np.argwhere(broken)[0])
    raise ValueError(
      f'text[{row}] is zero or not finite; embed that text again'
    )

  def nested(x):
    return tuple(map(nested, x)) if isinstance(x, list) else float(x)

  return nested(table.tolist())


def unit(x: jax.Array) -> jax.Array:
  """Unit vectors x / |x| along the last axis; zero where x is."""
  square = jnp.sum(x * x, -1, keepdims=True)
  some = square > 0
  norm = jnp.sqrt(jnp.where(some, square, 1))
  return jnp.where(some, x / norm, 0)


def in_text_space(
  module: Any, bag: Bag, size: int, name: str = 'to_text'
) -> jax.Array:
  """Instances in the space of the text encoder; called in a compact module.

  `bag.concepts` where the bag has them, else the features where they have its
  size, else a learned linear map of the features.

  Args:
    module: a model with attributes in_dim and dtype.
    bag: leaves [B, N, ...].
    size: Q.
    name: of the map.

  Returns:
    [B, N, Q], float32 or wider, zero in padding.

  Raises:
    ValueError: concepts of another size.
  """
  features = clean_features(module, bag)
  if bag.concepts is not None:
    if bag.concepts.shape[-1] != size:
      raise ValueError(
        f'bag.concepts have dim {bag.concepts.shape[-1]} but text has {size}; '
        'both must come from one pair of encoders'
      )
    return wide(jnp.where(bag.mask[..., None], bag.concepts, 0))
  if features.shape[-1] == size:
    return wide(features)
  dense = nn.Dense(size, use_bias=False, dtype=module.dtype, name=name)
  return wide(dense(features))

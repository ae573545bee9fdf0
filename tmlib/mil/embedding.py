"""The first layer that bag models share, and whose noise is whose.

Axes: B rows, N instances, P input features, D hidden features.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.data.bag import check_bag
from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.layers import Dense

__all__ = ['clean_features', 'embed', 'row_keys']


def clean_features(module: Any, bag: Bag) -> jax.Array:
  """Features of a batch of bags, checked, zero in padding.

  Padding may hold NaN, which would reach the gradient of a kernel as 0 * NaN.

  Args:
    module: a model with attribute `in_dim` (None: any size).
    bag: leaves [B, N, ...].

  Returns:
    [B, N, P].

  Raises:
    TypeError: no Bag.
    ValueError: another number of axes, or features of another size.
  """
  check_bag(bag, ndims=(3,))
  size = bag.features.shape[-1]
  if module.in_dim is not None and size != module.in_dim:
    raise ValueError(
      f'features have dim {size} but the model was built for in_dim='
      f'{module.in_dim}; use the encoder that it was built for'
    )
  return jnp.where(bag.mask[..., None], bag.features, 0)


def embed(
  module: Any,
  bag: Bag,
  keys: jax.Array | None,
  width: int | None = None,
  name: str = 'embed',
) -> jax.Array:
  """H = dropout(relu(W x + b)); called inside a compact module.

  Args:
    module: a model with attributes in_dim, hidden, dropout and dtype.
    bag: leaves [B, N, ...].
    keys: [B], from `row_keys`.
    width: D; None takes `module.hidden`.
    name: of the layer.

  Returns:
    [B, N, D].
  """
  features = clean_features(module, bag)
  dense = Dense(width or module.hidden, dtype=module.dtype, name=name)
  return bag_dropout(nn.relu(dense(features)), module.dropout, keys)


def row_keys(
  module: Any, bag: Bag, train: bool, dropout_keys: jax.Array | None
) -> jax.Array | None:
  """Keys of the rows [B], or None where nothing is dropped.

  Args:
    module: a bound Linen module with attribute `dropout`.
    bag: leaves [B, N, ...].
    train: whether anything is dropped.
    dropout_keys: [B], or None for keys from the 'dropout' stream, which then
      depend on the layout of the batch.

  Returns:
    [B] keys, or None.
  """
  if not train or module.dropout == 0:
    return None
  if dropout_keys is not None:
    return dropout_keys
  check_bag(bag, ndims=(3,))
  return jax.random.split(module.make_rng('dropout'), bag.mask.shape[0])

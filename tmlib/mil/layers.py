r"""Flax's Dense and LayerNorm for bags: the same numbers, faster gradients.

A bag has many rows and few features. XLA's CPU compiler sums over rows (the
gradients of bias and scale) in a loop that takes longer than the layer itself,
and transposes whole bags for the gradient of a kernel with leading axes; here
both are matrix products of flat rows. Reverse mode only.

Axes: ... leading axes, R their product, K features in, M features out.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

__all__ = ['Dense', 'LayerNorm', 'layer_norm', 'linear', 'wide']


def wide(x: jax.Array) -> jax.Array:
  """`x` in float32, or in its own dtype where that is wider."""
  return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _flat(x):
  return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _sum_rows(x: jax.Array) -> jax.Array:
  """[..., M] -> [M]."""
  x = _flat(x)
  ones = jnp.ones((1, x.shape[0]), x.dtype)
  return jnp.matmul(ones, x, precision=jax.lax.Precision.HIGHEST)[0]


@jax.custom_vjp
def linear(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
  """Rows times a kernel: x W + b.

  Args:
    x: [..., K].
    kernel: [K, M], W.
    bias: [M], b.

  Returns:
    [..., M].
  """
  y = _flat(x) @ kernel + bias[None]
  return y.reshape(*x.shape[:-1], kernel.shape[1])


def _linear_backward(saved, g):
  x, kernel = saved
  rows = _flat(g)
  dx = (rows @ kernel.T).reshape(x.shape)
  # Not x.T @ rows, for which XLA transposes x in memory.
  over_rows = (((0,), (0,)), ((), ()))
  return dx, jax.lax.dot_general(_flat(x), rows, over_rows), _sum_rows(rows)


linear.defvjp(
  lambda x, kernel, bias: (linear(x, kernel, bias), (x, kernel)),
  _linear_backward,
)


@jax.custom_vjp
def layer_norm(
  x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float
) -> jax.Array:
  """(x - mean) / sqrt(variance + epsilon) * scale + bias, over the last axis.

  Args:
    x: [..., M].
    scale: [M].
    bias: [M].
    epsilon: > 0.

  Returns:
    [..., M].
  """
  unit, _ = _standardise(_flat(x), epsilon)
  y = unit * scale[None] + bias[None]
  return y.reshape(x.shape).astype(x.dtype)


def _weigh(x: jax.Array, weights: jax.Array) -> jax.Array:
  """Means over features, weighted: [R, M], [M] -> [R, 1]."""
  weights = weights[:, None] / x.shape[1]
  return jnp.matmul(x, weights, precision=jax.lax.Precision.HIGHEST)


def _standardise(x, epsilon):
  x = wide(x)
  ones = jnp.ones(x.shape[1], x.dtype)
  centred = x - _weigh(x, ones)
  inverse = jax.lax.rsqrt(_weigh(centred**2, ones) + epsilon)
  return centred * inverse, inverse


def _layer_norm_backward(saved, g):
  x, scale, epsilon = saved
  unit, inverse = _standardise(_flat(x), epsilon)
  g = wide(_flat(g))
  product = g * unit
  along = unit * _weigh(product, scale)
  dx = inverse * (g * scale[None] - _weigh(g, scale) - along)
  dx = dx.reshape(x.shape).astype(x.dtype)
  sums = (_sum_rows(rows).astype(scale.dtype) for rows in (product, g))
  return dx, *sums, None


layer_norm.defvjp(
  lambda x, scale, bias, epsilon: (
    layer_norm(x, scale, bias, epsilon),
    (x, scale, epsilon),
  ),
  _layer_norm_backward,
)


class Dense(nn.Module):
  """`flax.linen.Dense`: its parameters, its initial values.

  Attributes:
    features: M.
    use_bias: add b.
    dtype: computation dtype; None is that of operands and parameters.
  """

  features: int
  use_bias: bool = True
  dtype: Any = None

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., K] -> [..., M]."""
    shape = (x.shape[-1], self.features)
    init = nn.initializers.lecun_normal()
    kernel = self.param('kernel', init, shape, jnp.float32)
    if self.use_bias:
      zeros = nn.initializers.zeros
      bias = self.param('bias', zeros, shape[1:], jnp.float32)
    else:
      bias = jnp.zeros(shape[1], kernel.dtype)
    return linear(*promote_dtype(x, kernel, bias, dtype=self.dtype))


class LayerNorm(nn.Module):
  """`flax.linen.LayerNorm` over the last axis, its parameters.

  Attributes:
    epsilon: added to the variance.
  """

  epsilon: float = 1e-5

  @nn.compact
  def __call__(self, x: jax.Array) -> jax.Array:
    """[..., M] -> [..., M]."""
    size = (x.shape[-1],)
    scale = self.param('scale', nn.initializers.ones, size, jnp.float32)
    bias = self.param('bias', nn.initializers.zeros, size, jnp.float32)
    return layer_norm(x, scale, bias, self.epsilon)

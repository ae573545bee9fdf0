"""Accuracy that training compute buys: increasing, concave, elementwise.

Each is a NamedTuple of numbers that can be called, so its parameters are leaves
of a game: they can be mapped over, differentiated, and differ by provider.

Axes: M providers.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = [
  'ACCURACIES',
  'Log1p',
  'Michaelis',
  'PowerLaw',
  'is_concave',
  'slope',
]


class PowerLaw(NamedTuple):
  """A(c) = a_max - (a_max - a_0) (1 + c / c0)^-beta, a scaling law.

  Attributes:
    a_max: accuracy with unlimited compute; [] or [M].
    a_0: accuracy without training; [] or [M].
    c0: compute unit, > 0; [] or [M].
    beta: exponent, > 0; [] or [M].
  """

  a_max: Any = 1.0
  a_0: Any = 0.0
  c0: Any = 1.0
  beta: Any = 0.3

  def __call__(self, compute: jax.Array) -> jax.Array:
    """Accuracy of `compute` [..., M]."""
    gap = self.a_max - self.a_0
    return self.a_max - gap * (1 + compute / self.c0) ** -self.beta


class Log1p(NamedTuple):
  """A(c) = a_0 + scale log(1 + c / c0): unbounded, ever slower.

  Attributes:
    scale: accuracy per e-fold of compute; [] or [M].
    a_0: accuracy without training; [] or [M].
    c0: compute unit, > 0; [] or [M].
  """

  scale: Any = 1.0
  a_0: Any = 0.0
  c0: Any = 1.0

  def __call__(self, compute: jax.Array) -> jax.Array:
    """Accuracy of `compute` [..., M]."""
    return self.a_0 + self.scale * jnp.log1p(compute / self.c0)


class Michaelis(NamedTuple):
  """A(c) = a_0 + (a_max - a_0) c / (c0 + c): saturating.

  Attributes:
    a_max: accuracy with unlimited compute; [] or [M].
    a_0: accuracy without training; [] or [M].
    c0: compute at which half of the way is made, > 0; [] or [M].
  """

  a_max: Any = 1.0
  a_0: Any = 0.0
  c0: Any = 1.0

  def __call__(self, compute: jax.Array) -> jax.Array:
    """Accuracy of `compute` [..., M]."""
    return self.a_0 + (self.a_max - self.a_0) * compute / (self.c0 + compute)


ACCURACIES = {'power_law': PowerLaw, 'log1p': Log1p, 'michaelis': Michaelis}


def slope(accuracy: Any, compute: jax.Array) -> jax.Array:
  """A'(c), elementwise; `compute` is [M]."""
  return jax.jvp(accuracy, (compute,), (jnp.ones_like(compute),))[1]


def is_concave(accuracy: Any, budgets: Any, points: int = 129) -> bool:
  """Whether A looks increasing and concave on [0, B_i], on a grid.

  Args:
    accuracy: callable on [M].
    budgets: [M].
    points: of the grid.

  Returns:
    False where a difference on the grid contradicts it by more than rounding.

  Raises:
    ValueError: A is not elementwise.
  """
  share = np.linspace(0, 1, points)
  with jax.enable_x64(True):
    grid = jnp.asarray(share[:, None] * np.asarray(budgets, np.float64))
    value = np.asarray(jax.vmap(accuracy)(grid))
  if value.shape != grid.shape:
    raise ValueError(
      f'accuracy maps compute of shape {grid.shape[1:]} to {value.shape[1:]}; '
      'it must be elementwise'
    )
  first, second = np.diff(value, axis=0), np.diff(value, 2, axis=0)
  scale = 1e-12 + 1e-9 * np.abs(value).max()
  return bool((first >= -scale).all() and (second <= scale).all())

r"""Reactions as relaxation towards a target that stays in its box.

Each reaction is written r(u) = k (v(u) - u) with a stiffness k >= 0 and a
target v that maps the box [low, high] into itself. Outside the box v is
evaluated at the nearest point of the box, so the reaction pulls back to it
instead of diverging like the polynomial: this is the safe form. Inside the box
nothing is changed:

  relax        k = 1, v = tanh(u W + b)      box [-1, 1]
  fisher       k = 1, v = 2 u - u^2          box [0, 1]    k (v - u) = u - u^2
  zeldovich    k = 1, v = u + u^2 - u^3      box [0, 1]    = u^2 - u^3
  allen_cahn   k = 2, v = (3 u - u^3) / 2    box [-1, 1]   = u - u^3

Each v is monotone on its box with the ends as fixed points (derivatives
2 - 2u, 1 + 2u - 3u^2, (3 - 3u^2) / 2 are >= 0 there), hence v(box) = box. An
explicit step u + tau k (v - u) is then a convex combination of points of the
box for every tau <= 1 / k, and so is the implicit one for every tau > 0.

References:
  Choi, Hong, Park, Cho. GREAD: graph neural reaction-diffusion networks, 2023,
  for the set of polynomials. The safe form is our choice.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ['REACTIONS', 'Reaction', 'stiffness', 'to_box']


class Reaction(NamedTuple):
  """A polynomial reaction k (v(u) - u).

  Attributes:
    stiffness: k.
    low: lower end of the box.
    high: upper end of the box.
    target: v, elementwise, for arguments in the box.
  """

  stiffness: float
  low: float
  high: float
  target: Callable[[jax.Array], jax.Array]


REACTIONS = {
  'fisher': Reaction(1.0, 0.0, 1.0, lambda u: u * (2 - u)),
  'zeldovich': Reaction(1.0, 0.0, 1.0, lambda u: u + u * u * (1 - u)),
  'allen_cahn': Reaction(2.0, -1.0, 1.0, lambda u: u * (3 - u * u) / 2),
}


def stiffness(reaction: str) -> float:
  """Stiffness k of a reaction by name; 0 for 'none'.

  Args:
    reaction: 'none', 'relax', 'fisher', 'zeldovich' or 'allen_cahn'.

  Returns:
    k, so that an explicit step needs tau (sum_j c_ij + k lam) <= 1.
  """
  if reaction == 'none':
    return 0.0
  return 1.0 if reaction == 'relax' else REACTIONS[reaction].stiffness


def to_box(values: jax.Array, reaction: str) -> jax.Array:
  """Maps any values into the box where a polynomial reaction acts.

  Args:
    values: [...], any range.
    reaction: name; 'none' and 'relax' leave the values alone.

  Returns:
    [...]: tanh for a box [-1, 1], the logistic function for [0, 1].
  """
  if reaction not in REACTIONS:
    return values
  return (
    jnp.tanh(values)
    if REACTIONS[reaction].low < 0
    else (jax.nn.sigmoid(values))
  )

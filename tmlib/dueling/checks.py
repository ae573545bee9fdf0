"""Boundary checks of the dueling family: typed errors that name the fix.

Values are looked at only when they are concrete; under a trace the shapes are
still checked. Axes: N users, K arms.
"""

from typing import Any

import jax
import jax.core
import numpy as np

__all__ = [
  'check_choice',
  'check_positive',
  'check_preference',
  'check_probability',
  'check_rounds',
  'concrete',
]

# Rounds are counted in int32.
MOST_ROUNDS = 2**31 - 1


def concrete(*arrays: Any) -> bool:
  """True where every argument holds values, not tracers."""
  return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
  """Raises ValueError unless `value` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(f'{name}={value!r} is unknown; choose one of {allowed}')


def check_positive(name: str, value: Any) -> None:
  """Raises ValueError unless the number `value` is finite and positive."""
  if concrete(value) and not (np.isfinite(value) and value > 0):
    raise ValueError(f'{name}={value} must be finite and positive')


def check_probability(name: str, value: Any) -> None:
  """Raises ValueError unless the number `value` lies strictly in (0, 1)."""
  if concrete(value) and not 0 < value < 1:
    raise ValueError(f'{name}={value} must lie strictly between 0 and 1')


def check_rounds(name: str, value: Any) -> None:
  """Raises ValueError unless `value` is a whole number in [1, 2^31)."""
  if not concrete(value):
    return
  if np.ndim(value) or not 1 <= value <= MOST_ROUNDS or value != int(value):
    raise ValueError(
      f'{name}={value} must be a whole number in [1, 2^31 - 1] (rounds are '
      'counted in int32)'
    )


def check_preference(preference: Any, tol: float = 1e-5) -> None:
  """Checks a stack of preference matrices.

  Args:
    preference: [N, K, K], P[u, i, j] = Pr(user u prefers i to j).
    tol: largest accepted error of P + P^T = 1 and of the diagonal.

  Raises:
    ValueError: wrong rank, no user, fewer than two arms, NaN, an entry outside
      [0, 1], P + P^T != 1, or a diagonal that is not 1/2.
  """
  shape = np.shape(preference)
  if len(shape) != 3 or shape[1] != shape[2]:
    raise ValueError(
      f'preference has shape {shape}; expected [N, K, K] (one user: P[None])'
    )
  if shape[0] == 0:
    raise ValueError('preference has no user (N = 0); give at least one')
  if shape[1] < 2:
    raise ValueError(
      f'preference has K = {shape[1]} arm; Borda scores need at least two'
    )
  if not concrete(preference):
    return
  p = np.asarray(preference, np.float64)
  if not np.isfinite(p).all():
    user, i, j = np.argwhere(~np.isfinite(p))[0]
    raise ValueError(
      f'preference[{user}, {i}, {j}] = {p[user, i, j]}; every pair needs a '
      'probability: pool users or drop the arm (see tmlib.dueling.from_votes)'
    )
  if p.min() < -tol or p.max() > 1 + tol:
    raise ValueError(
      f'preference has entries in [{p.min():.6g}, {p.max():.6g}]; allowed '
      'range is [0, 1] (win rates, not counts or percentages)'
    )
  error = np.abs(p + p.transpose(0, 2, 1) - 1)
  off = error * (1 - np.eye(shape[1]))
  if off.max() > tol:
    user, i, j = np.unravel_index(off.argmax(), off.shape)
    raise ValueError(
      f'preference[{user}, {i}, {j}] + preference[{user}, {j}, {i}] = '
      f'{p[user, i, j] + p[user, j, i]:.6g} must be 1; pass symmetrize=True '
      'to use (P + 1 - P^T) / 2'
    )
  if error.max() > tol:
    user, i, _ = np.unravel_index(error.argmax(), error.shape)
    raise ValueError(
      f'preference[{user}, {i}, {i}] = {p[user, i, i]:.6g}; the diagonal must '
      'be 1/2 (an arm against itself is a coin); pass symmetrize=True to set it'
    )

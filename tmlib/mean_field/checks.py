"""Boundary checks of the mean-field family: typed errors that name the fix.

Values are looked at only when they are concrete; under a trace the shapes are
still checked. Axes: S states, A actions, E noise outcomes, H time steps.
"""

from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

__all__ = [
  'check_between',
  'check_count',
  'check_distribution',
  'check_policy',
  'check_transitions',
  'concrete',
  'float_type',
]


def concrete(*arrays: Any) -> bool:
  """True where every argument holds values, not tracers."""
  return not any(isinstance(x, jax.core.Tracer) for x in arrays)


def float_type(dtype: Any = None) -> np.dtype:
  """The float type to compute in.

  Args:
    dtype: None for float64 inside `jax.enable_x64(True)`, float32 elsewhere.

  Returns:
    The type.

  Raises:
    ValueError: float64 is asked for where jax would compute in float32.
  """
  have = jnp.result_type(float)
  wanted = np.dtype(have if dtype is None else dtype)
  if wanted not in (np.float32, np.float64):
    raise ValueError(f'dtype={wanted} is not supported; float32 or float64')
  if wanted == np.float64 and have != np.float64:
    raise ValueError(
      'dtype=float64 would be computed in float32; call it inside '
      '`with jax.enable_x64(True):`'
    )
  return wanted


def check_count(name: str, value: Any, least: int = 1) -> None:
  """Raises unless `value` is an integer of at least `least`."""
  if isinstance(value, bool) or not isinstance(value, int | np.integer):
    raise TypeError(f'{name}={value!r} must be an integer')
  if value < least:
    raise ValueError(f'{name}={value} must be at least {least}')


def check_between(
  name: str, value: Any, low: float, high: float, *, closed: str = ']'
) -> None:
  """Raises ValueError unless low < value <= high.

  Args:
    name: of the argument.
    value: [], a number.
    low: excluded bound; -inf for none.
    high: included bound.
    closed: ']' as above, '[' for low <= value < high, '[]' for both, '' for
      neither.
  """
  if not concrete(value):
    return
  above = value >= low if '[' in closed else value > low
  below = value <= high if ']' in closed else value < high
  if not (np.isfinite(value) and above and below):
    left, right = '[' if '[' in closed else '(', ']' if ']' in closed else ')'
    raise ValueError(
      f'{name}={value} must be finite and in {left}{low}, {high}{right}'
    )


def check_distribution(name: str, p: Any, tol: float = 1e-5) -> None:
  """Raises ValueError unless `p` [..., n] sums to one and is not negative."""
  if not concrete(p):
    return
  x = np.asarray(p, np.float64)
  if not np.isfinite(x).all():
    raise ValueError(f'{name} holds NaN or infinity; give probabilities')
  if x.min() < -tol:
    at = tuple(int(i) for i in np.argwhere(x < -tol)[0])
    raise ValueError(f'{name}{list(at)} = {x[at]:.6g} is negative')
  total = x.sum(-1)
  wrong = np.argwhere(np.abs(total - 1) > tol)
  if len(wrong):
    at = tuple(int(i) for i in wrong[0])
    place = f'{name}{list(at)}' if at else name
    raise ValueError(
      f'{place} sums to {total[at]:.6g}; a distribution sums to 1 (divide by '
      'the sum, or pass renormalize=True to make_game)'
    )


def check_transitions(
  idx: Any, prob: Any, mask: Any, tol: float = 1e-5
) -> None:
  """Checks padded sparse successors.

  Args:
    idx: [S, A, E] int, successor of outcome e.
    prob: [S, A, E], its probability; padding has probability zero.
    mask: [S, A] bool or None; rows of illegal actions may hold anything.
    tol: largest accepted error of a sum.

  Raises:
    ValueError: shapes differ, a successor outside [0, S), a negative
      probability or a row that does not sum to one.
  """
  if np.shape(prob) != np.shape(idx):
    raise ValueError(
      f'prob has shape {np.shape(prob)} but idx has {np.shape(idx)}; both are '
      '[S, A, E]'
    )
  if not concrete(idx, prob, mask):
    return
  i, p = np.asarray(idx), np.asarray(prob, np.float64)
  legal = np.ones(i.shape[:2], bool) if mask is None else np.asarray(mask, bool)
  if i.size and (i.min() < 0 or i.max() >= i.shape[0]):
    s, a, e = np.argwhere((i < 0) | (i >= i.shape[0]))[0]
    raise ValueError(
      f'idx[{s}, {a}, {e}] = {i[s, a, e]} is no state; states are 0..'
      f'{i.shape[0] - 1} (pad with any state and probability 0)'
    )
  bad = ~np.isfinite(p).all(-1) | (p.min(-1) < -tol)
  if (bad & legal).any():
    s, a = np.argwhere(bad & legal)[0]
    raise ValueError(
      f'prob[{s}, {a}] = {p[s, a]} must be finite and not negative'
    )
  total = p.sum(-1)
  off = (np.abs(total - 1) > tol) & legal
  if off.any():
    s, a = np.argwhere(off)[0]
    raise ValueError(
      f'prob[{s}, {a}] sums to {total[s, a]:.6g}; a row sums to 1 (pass '
      'renormalize=True to make_game to divide by the sum, or mask the action)'
    )


def check_policy(
  pi: Any, shape: tuple[int, ...], mask: Any = None, tol: float = 1e-4
) -> None:
  """Checks a policy.

  Args:
    pi: [..., S, A], probability of each action.
    shape: what it must have, [H, S, A] or [S, A].
    mask: [S, A] bool or None, legal actions.
    tol: largest accepted error of a sum.

  Raises:
    ValueError: wrong shape, a row that is no distribution, or probability on
      an illegal action.
  """
  if np.shape(pi) != tuple(shape):
    raise ValueError(
      f'policy has shape {np.shape(pi)}; this game needs {tuple(shape)} '
      '([H, S, A], or [S, A] for a stationary game)'
    )
  check_distribution('policy', pi, tol)
  if mask is not None and concrete(pi, mask):
    on = np.where(np.asarray(mask), 0, np.asarray(pi))
    if on.max() > tol:
      *_, s, a = np.unravel_index(on.argmax(), on.shape)
      raise ValueError(
        f'policy gives probability {on.max():.6g} to action {a} in state {s}, '
        'which is illegal (mask); set it to 0'
      )

"""Boundary checks of the market: typed errors that name the fix.

Values are looked at only when they are concrete; under a trace the shapes are
still checked.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

__all__ = ['check_alpha', 'check_choice', 'concrete', 'precise', 'traced']


def traced(*trees: Any) -> bool:
  """True where some leaf is a tracer."""
  leaves = jax.tree.leaves(trees)
  return any(isinstance(x, jax.core.Tracer) for x in leaves)


def concrete(*arrays: Any) -> bool:
  """True where every argument is a number or an array with values."""
  numbers = (int, float, np.ndarray, np.generic, jax.Array, list, tuple)
  return all(isinstance(x, numbers) for x in arrays) and not traced(arrays)


def check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
  """Raises ValueError unless `value` is one of `allowed`."""
  if value not in allowed:
    raise ValueError(f'{name}={value!r} is unknown; choose one of {allowed}')


def check_alpha(alpha: Any, providers: int) -> Any:
  """Checks the shares of compute that go into training.

  Args:
    alpha: [M].
    providers: M.

  Returns:
    alpha as an array.

  Raises:
    ValueError: another shape, NaN, or an entry outside [0, 1].
  """
  if isinstance(alpha, list | tuple):
    held = any(isinstance(x, jax.Array) for x in alpha)
    alpha = jnp.stack(alpha) if held else np.asarray(alpha, np.float64)
  if np.shape(alpha) != (providers,):
    raise ValueError(
      f'alpha has shape {np.shape(alpha)}; expected ({providers},), one share '
      'of compute per provider'
    )
  if not concrete(alpha):
    return alpha
  values = np.asarray(alpha, np.float64)
  bad = ~((values >= 0) & (values <= 1))
  if bad.any():
    i = int(bad.argmax())
    raise ValueError(
      f'alpha[{i}] = {values[i]} must lie in [0, 1]: it is the share of the '
      'budget that is spent on training; the rest serves'
    )
  return alpha


def precise(call: Callable[..., Any], *trees: Any) -> Any:
  """Runs `call` in float64 unless its arguments already are jax arrays.

  Args:
    call: function of pytrees of arrays.
    *trees: its arguments. Without a jax array among their leaves, they become
      float64 whatever the caller's precision, and NumPy comes back.

  Returns:
    What `call` returns.
  """
  if any(isinstance(x, jax.Array) for x in jax.tree.leaves(trees)):
    return call(*trees)
  with jax.enable_x64(True):
    found = call(
      *jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), trees)
    )
    # Back to NumPy: float64 jax arrays lose their precision in the next
    # operation outside the context.
    return jax.tree.map(np.asarray, found)

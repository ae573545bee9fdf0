r"""Crowds that avoid each other: lines, grids, bars and rooms.

Everybody pays for company, r = ... - c log(mu(s) + 1e-25): the logarithm of an
empty cell is that of 1e-25, as in OpenSpiel's crowd modelling games. These
rewards are monotone, so the equilibrium flow is unique.

Axes: S cells, A actions, E noise outcomes, H time steps.

References:
  Perrin et al. Fictitious play for mean field games: continuous time analysis
  and applications, 2020 (beach bar). Geist et al. Concave utility reinforcement
  learning: the mean-field game viewpoint, 2022 (four rooms). Lanctot et al.
  OpenSpiel, 2019 (the games of the same names; noise and epsilon as there).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.envs.grid import LINE_MOVES, PLANE_MOVES, noisy_moves
from tmlib.mean_field.game import MFGame

__all__ = [
  'EPSILON',
  'beach_bar',
  'beach_bar_2d',
  'crowd_1d',
  'crowd_2d',
  'crowd_reward',
  'four_rooms',
]

# Added to a mass before its logarithm.
EPSILON = 1e-25


def crowd_reward(
  base: jax.Array, aversion: jax.Array, mu: jax.Array, t: jax.Array
) -> jax.Array:
  """base(s, a) - aversion log(mu(s) + 1e-25), [S, A]."""
  del t
  company = aversion * jnp.log(mu + EPSILON)
  return jnp.asarray(base) - company[:, None]


def _initial(initial: Any, cells: int, blocked: np.ndarray) -> np.ndarray:
  """Mass per cell, flat; None for uniform over the free cells."""
  if initial is None:
    return ~blocked / (~blocked).sum()
  mass = np.asarray(initial, np.float64)
  if mass.size != cells:
    raise ValueError(
      f'initial has shape {mass.shape}; expected one mass for each of the '
      f'{cells} cells'
    )
  mass = mass.ravel()
  if mass[blocked].any():
    cell = int(np.flatnonzero(mass * blocked)[0])
    raise ValueError(
      f'initial puts mass on blocked cell {cell}; start on free cells'
    )
  return mass


def _crowd(
  shape, steps, horizon, initial, *, position, move_cost, aversion, noise,
  torus, obstacles, discount,
):  # fmt: skip
  checks.check_between('noise', noise, 0, 1, closed='[]')
  checks.check_between('aversion', aversion, 0, np.inf, closed='[')
  cells = int(np.prod(shape))
  blocked = np.zeros(cells, bool)
  if obstacles is not None:
    blocked = np.asarray(obstacles, bool).ravel()
    if blocked.size != cells:
      raise ValueError(
        f'obstacles has shape {np.shape(obstacles)}; the grid is {shape}'
      )
    if blocked.all():
      raise ValueError('obstacles cover the grid; leave a free cell')
  idx, prob, mask = noisy_moves(
    shape, steps, noise, torus=torus, blocked=blocked
  )
  length = np.abs(np.asarray(steps)).sum(-1).astype(float)
  base = np.asarray(position, float).reshape(cells, 1) - move_cost * length
  reward = Partial(crowd_reward, base, np.float64(aversion))
  return MFGame(
    idx, prob, reward, _initial(initial, cells, blocked), horizon, discount,
    None if mask.all() else mask,
  )  # fmt: skip


def crowd_1d(
  size: int = 10,
  horizon: int | None = 10,
  initial: Any = None,
  *,
  position: Any = 0.0,
  move_cost: float = 0.0,
  aversion: float = 1.0,
  noise: float = 1.0,
  torus: bool = True,
  discount: float = 1.0,
) -> MFGame:
  """A crowd on a line or ring; actions stay, right, left.

  Args:
    size: S.
    horizon: H; None for a stationary game, which needs discount < 1.
    initial: [S], mass of each cell; None for uniform.
    position: [S] or [], reward of being in a cell.
    move_cost: cost of a step.
    aversion: weight of -log(mu + 1e-25).
    noise: probability of a random step after the chosen one.
    torus: a ring; else the ends are walls and steps into them are illegal.
    discount: gamma.

  Returns:
    The game; with the defaults reward is -log mu only, and the flow that is
    uniform at once stays so in equilibrium.

  Raises:
    ValueError: a size, horizon, noise or initial out of range.
  """
  checks.check_count('size', size, 2)
  return _crowd(
    (size,), LINE_MOVES, horizon, initial,
    position=np.broadcast_to(position, size), move_cost=move_cost,
    aversion=aversion, noise=noise, torus=torus, obstacles=None,
    discount=discount,
  )  # fmt: skip


def crowd_2d(
  size: int = 10,
  horizon: int | None = 10,
  initial: Any = None,
  *,
  position: Any = 0.0,
  move_cost: float = 0.0,
  aversion: float = 1.0,
  noise: float = 1.0,
  torus: bool = True,
  obstacles: Any = None,
  discount: float = 1.0,
) -> MFGame:
  """A crowd on a square grid; actions stay, down, right, left, up.

  With the defaults, OpenSpiel's mfg_crowd_modelling_2d with
  only_distribution_reward (its default initial law is uniform, too).

  Args:
    size: cells per side, S = size^2; state = row * size + column.
    horizon: H; None for a stationary game, which needs discount < 1.
    initial: [size, size], mass of each cell; None for uniform over free cells.
    position: [size, size] or [], reward of being in a cell.
    move_cost: cost of a step.
    aversion: weight of -log(mu + 1e-25).
    noise: probability of a random step after the chosen one.
    torus: edges are joined; else they are walls.
    obstacles: [size, size] bool, cells that nobody may enter; steps into them
      are illegal.
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: a size, horizon, noise, initial or obstacle out of range.
  """
  checks.check_count('size', size, 2)
  return _crowd(
    (size, size), PLANE_MOVES, horizon, initial,
    position=np.broadcast_to(position, (size, size)), move_cost=move_cost,
    aversion=aversion, noise=noise, torus=torus, obstacles=obstacles,
    discount=discount,
  )  # fmt: skip


def beach_bar(
  size: int = 20,
  horizon: int | None = 15,
  bar: int | None = None,
  *,
  initial: Any = None,
  noise: float = 0.5,
  discount: float = 1.0,
) -> MFGame:
  """Towels on a beach: near the bar, but not near each other.

  r = -|s - bar| / S - |a| / S - log(mu(s) + 1e-25) on a line with walls.

  Args:
    size: S.
    horizon: H, or None.
    bar: its cell; None for the middle.
    initial: [S]; None for uniform.
    noise: probability of a random step after the chosen one.
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: the bar is not on the beach; see `crowd_1d`.
  """
  checks.check_count('size', size, 2)
  bar = size // 2 if bar is None else bar
  checks.check_between('bar', bar, 0, size - 1, closed='[]')
  return crowd_1d(
    size, horizon, initial, position=-np.abs(np.arange(size) - bar) / size,
    move_cost=1 / size, noise=noise, torus=False, discount=discount,
  )  # fmt: skip


def beach_bar_2d(
  size: int = 10,
  horizon: int | None = 10,
  bar: tuple[int, int] | None = None,
  *,
  initial: Any = None,
  noise: float = 0.5,
  torus: bool = True,
  obstacles: Any = None,
  discount: float = 1.0,
) -> MFGame:
  """The beach bar on a grid: -distance / size - |a| / size - log mu.

  Args:
    size: cells per side.
    horizon: H, or None.
    bar: its row and column; None for the middle.
    initial: [size, size]; None for uniform.
    noise: probability of a random step after the chosen one.
    torus: edges are joined, and distance goes the short way round.
    obstacles: [size, size] bool.
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: see `crowd_2d`.
  """
  checks.check_count('size', size, 2)
  bar = (size // 2, size // 2) if bar is None else bar
  offset = np.abs(np.indices((size, size)) - np.reshape(bar, (2, 1, 1)))
  if torus:
    offset = np.minimum(offset, size - offset)
  return crowd_2d(
    size, horizon, initial, position=-offset.sum(0) / size, move_cost=1 / size,
    noise=noise, torus=torus, obstacles=obstacles, discount=discount,
  )  # fmt: skip


def four_rooms(
  size: int = 11,
  horizon: int | None = 30,
  *,
  initial: Any = None,
  noise: float = 0.1,
  aversion: float = 1.0,
  discount: float = 1.0,
) -> MFGame:
  """Four rooms joined by doors; the crowd starts in one corner and spreads.

  Walls run through the middle row and column, with a door in the middle of
  each of the four wall pieces; the border is wall-less but not joined.

  Args:
    size: cells per side, odd and at least 5.
    horizon: H, or None.
    initial: [size, size]; None for all mass in the corner (0, 0).
    noise: probability of a random step after the chosen one.
    aversion: weight of -log(mu + 1e-25).
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: an even or small size; see `crowd_2d`.
  """
  checks.check_count('size', size, 5)
  if size % 2 == 0:
    raise ValueError(f'size={size} must be odd: a wall is the middle line')
  middle, quarter = size // 2, size // 4
  wall = np.zeros((size, size), bool)
  wall[middle] = wall[:, middle] = True
  for door in (quarter, size - 1 - quarter):
    wall[middle, door] = wall[door, middle] = False
  if initial is None:
    initial = np.zeros((size, size))
    initial[0, 0] = 1
  return crowd_2d(
    size, horizon, initial, noise=noise, aversion=aversion, torus=False,
    obstacles=wall, discount=discount,
  )  # fmt: skip

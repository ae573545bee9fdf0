r"""Chains and grids with more than company to mind.

Lasry-Lions chain, kinetic congestion (others block the way) and predators and
prey (several populations).

Axes: S cells, A actions, E noise outcomes, H time steps, P populations.

References:
  Lasry, Lions. Mean field games, 2007 (monotonicity). Perolat et al. Scaling up
  mean field games with online mirror descent, 2021 (predators and prey). The
  chain and the congestion game follow the public bench-mfg-suite 0.1.3 in
  their formulas; where it rolls a uniform number of 100 values against a
  probability, the probability itself is used here.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.envs.crowd import EPSILON
from tmlib.mean_field.envs.grid import PLANE_MOVES, moves, noisy_moves
from tmlib.mean_field.game import MFGame, union

__all__ = ['kinetic_congestion', 'lasry_lions_chain', 'predator_prey']


def _linear_reward(base, aversion, mu, t):
  del t
  return jnp.asarray(base) - (aversion * mu)[:, None]


def _uniform(size: int, initial: Any) -> np.ndarray:
  return np.full(size, 1 / size) if initial is None else np.ravel(initial)


def lasry_lions_chain(
  size: int = 11,
  horizon: int | None = None,
  *,
  aversion: float = 1.0,
  move_cost: float = 0.1,
  attraction: float = 0.5,
  noise: tuple[float, float, float] = (0.1, 0.8, 0.1),
  initial: Any = None,
  discount: float = 0.9,
) -> MFGame:
  """A chain that pulls to its centre while company pushes away.

  r = -move_cost |a| - attraction (s - centre)^2 - aversion mu(s): the plainest
  monotone reward. s' = s + a + noise, clipped to the chain.

  Args:
    size: S.
    horizon: H; None for the stationary game.
    aversion: at least zero.
    move_cost: cost of a step.
    attraction: weight of the squared distance to the centre.
    noise: probabilities of -1, 0, 1.
    initial: [S]; None for uniform.
    discount: gamma.

  Returns:
    The game; actions left, stay, right.

  Raises:
    ValueError: size below 2, a negative aversion, noise that does not sum to
      one.
  """
  checks.check_count('size', size, 2)
  checks.check_between('aversion', aversion, 0, np.inf, closed='[')
  checks.check_distribution('noise', noise)
  cells, step = np.arange(size), np.array([-1, 0, 1])
  moved = cells[:, None, None] + step[:, None] + step
  prob = np.broadcast_to(np.asarray(noise, float), moved.shape)
  away = (cells - (size - 1) / 2) ** 2
  base = -attraction * away[:, None] - move_cost * np.abs(step)
  reward = Partial(_linear_reward, base, np.float64(aversion))
  return MFGame(
    np.clip(moved, 0, size - 1), prob, reward, _uniform(size, initial),
    horizon, discount,
  )  # fmt: skip


def _blocked(target, capacity, mu, t):
  del t
  full = jnp.clip(mu[jnp.asarray(target)] / capacity, 0, 1)
  stays = jnp.asarray(target) == jnp.arange(target.shape[0])[:, None]
  passes = jnp.where(stays, 1, 1 - full)
  return jnp.stack([passes, 1 - passes], -1)


def _fixed_reward(base, mu, t):
  del t
  return jnp.asarray(base) + 0 * mu[:, None]


def kinetic_congestion(
  size: int = 5,
  horizon: int | None = 20,
  *,
  capacity: float = 0.4,
  move_cost: float = 0.1,
  target: tuple[int, int] | None = None,
  initial: Any = None,
  discount: float = 1.0,
) -> MFGame:
  """A full cell lets nobody in: the population changes where one can go.

  A step to another cell succeeds with probability 1 - min(1, mu(cell) /
  capacity), else one stays. r = -[not at the target] - move_cost [a step].

  Args:
    size: cells per side.
    horizon: H, or None.
    capacity: mass at which a cell is full, positive.
    move_cost: cost of trying to step.
    target: row and column; None for the far corner.
    initial: [size, size]; None for uniform.
    discount: gamma.

  Returns:
    The game; actions stay, down, right, left, up; walls all round.

  Raises:
    ValueError: size below 2, capacity that is not positive.
  """
  checks.check_count('size', size, 2)
  checks.check_between('capacity', capacity, 0, np.inf, closed='')
  cells = size * size
  goal = cells - 1 if target is None else target[0] * size + target[1]
  reach, _ = moves((size, size), PLANE_MOVES, torus=False)
  here = np.broadcast_to(np.arange(cells)[:, None], reach.shape)
  base = -(np.arange(cells) != goal).astype(float)[:, None]
  base = base - move_cost * (np.arange(5) > 0)
  return MFGame(
    np.stack([reach, here], -1), Partial(_blocked, reach, np.float64(capacity)),
    Partial(_fixed_reward, base), _uniform(cells, initial), horizon, discount,
  )  # fmt: skip


def _predator_reward(matrix, aversion, mu, t):
  del t
  matrix = jnp.asarray(matrix)
  each = mu.reshape(matrix.shape[0], -1)
  reward = matrix @ each - aversion * jnp.log(each + EPSILON)
  return jnp.tile(reward.reshape(-1, 1), (1, len(PLANE_MOVES)))


def predator_prey(
  size: int = 5,
  horizon: int = 10,
  *,
  matrix: Any = ((0.0, -1.0, 1.0), (1.0, 0.0, -1.0), (-1.0, 1.0, 0.0)),
  aversion: float = 1.0,
  noise: float = 1.0,
  torus: bool = True,
  initial: Any = None,
) -> MFGame:
  """Populations that hunt and flee each other on a grid.

  r_p(s) = sum_q matrix[p, q] mu_q(s) - aversion log(mu_p(s) + 1e-25). With an
  antisymmetric matrix the game is monotone.

  Args:
    size: cells per side; S = P size^2.
    horizon: H.
    matrix: [P, P], what one of population p gets from meeting one of q.
    aversion: of one's own kind.
    noise: probability of a random step after the chosen one.
    torus: edges are joined.
    initial: [P, size, size]; None spreads population p over row p size // P.

  Returns:
    The game, with `populations`.

  Raises:
    ValueError: a matrix that is not square; an initial law that does not fit.
  """
  checks.check_count('size', size, 2)
  matrix = np.asarray(matrix, float)
  if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
    raise ValueError(f'matrix has shape {matrix.shape}; expected [P, P]')
  kinds, cells = len(matrix), size * size
  if initial is None:
    initial = np.zeros((kinds, size, size))
    rows = np.arange(kinds) * size // kinds
    initial[np.arange(kinds), rows] = 1 / size
  initial = np.asarray(initial, float)
  if initial.shape != (kinds, size, size):
    raise ValueError(
      f'initial has shape {initial.shape}; expected {(kinds, size, size)} '
      '([P, size, size])'
    )
  idx, prob, mask = noisy_moves((size, size), PLANE_MOVES, noise, torus=torus)
  idx, prob, mask, sizes = union([idx] * kinds, [prob] * kinds, [mask] * kinds)
  reward = Partial(_predator_reward, matrix, np.float64(aversion))
  return MFGame(
    idx, prob, reward, initial.reshape(kinds * cells), horizon,
    mask=None if mask.all() else mask, populations=sizes,
  )  # fmt: skip

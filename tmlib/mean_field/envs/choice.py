r"""Small games of choice whose equilibria are known in closed form.

A first state, then a choice among places; the reward of a place depends on how
many chose it. Also the users of competing providers, who may choose again at
every step.

Axes: S states, A actions, H time steps, M providers.

References:
  Cui, Koeppl. Approximately solving mean field games via entropy-regularized
  deep reinforcement learning, 2021 (left-right, rock-paper-scissors).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.game import MFGame

__all__ = [
  'LEFT_RIGHT',
  'ROCK_PAPER_SCISSORS',
  'left_right',
  'provider_users',
  'rock_paper_scissors',
  'two_wells',
  'wardrop_shares',
]

# Equilibrium shares: mu_L = 2 mu_R; and the rewards of all three are equal.
LEFT_RIGHT = (2 / 3, 1 / 3)
ROCK_PAPER_SCISSORS = (26 / 77, 20 / 77, 31 / 77)

# Reward of rock, paper, scissors against a population: rows meet columns.
_PAYOFF = ((0.0, -1.0, 2.0), (4.0, 0.0, -2.0), (-3.0, 6.0, 0.0))


def _choose(places: int, first: int = 1) -> np.ndarray:
  """[S, A, 1]: action a leads to place a, from anywhere."""
  target = np.arange(places) + first
  return np.tile(target[None, :, None], (places + first, 1, 1))


def _left_right_reward(weights, mu, t):
  del t
  reward = -jnp.asarray(weights) * mu[1:]
  return jnp.tile(jnp.append(0 * reward[0], reward)[:, None], (1, 2))


def _kinked_reward(weights, mu, t):
  del t
  left = -weights[0] * jnp.maximum(mu[1] - 0.5, 0)
  right = weights[1] * (0.5 - mu[2])
  return jnp.tile(jnp.stack([0 * mu[0], left, right])[:, None], (1, 2))


def left_right(
  weights: tuple[float, float] = (1.0, 2.0), *, kink: bool = False
) -> MFGame:
  """Everybody goes left or right once, and dislikes company there.

  Rewards -w_L mu_L and -w_R mu_R, in equilibrium mu_L = w_R / (w_L + w_R), by
  default 2/3 (`LEFT_RIGHT`); monotone. With a kink -w_L max(mu_L - 1/2, 0) and
  w_R (1/2 - mu_R), in equilibrium mu_L = 1/2: finitely many players then gain
  at the rate n^(-1/2) and not n^(-1), for the mean of a maximum is not the
  maximum of the mean.

  Args:
    weights: w_L and w_R, positive.
    kink: see above.

  Returns:
    The game; states centre, left, right; H = 2, the choice counts at t = 0 and
    the reward at t = 1.

  Raises:
    ValueError: a weight that is not positive.
  """
  for name, weight in zip(('left', 'right'), weights, strict=True):
    checks.check_between(f'{name} weight', weight, 0, np.inf, closed='')
  idx = _choose(2)
  reward = Partial(
    _kinked_reward if kink else _left_right_reward, np.asarray(weights, float)
  )
  return MFGame(idx, np.ones(idx.shape), reward, [1.0, 0.0, 0.0], 2)


def _rps_reward(mu, t):
  del t
  reward = jnp.asarray(_PAYOFF, mu.dtype) @ mu[1:]
  return jnp.tile(jnp.append(0 * reward[0], reward)[:, None], (1, 3))


def rock_paper_scissors(
  horizon: int | None = 2, discount: float = 1.0
) -> MFGame:
  """Generalised rock-paper-scissors against the population.

  In equilibrium the shares after the first choice are
  `ROCK_PAPER_SCISSORS` = (26, 20, 31) / 77. Not monotone: best-response
  iteration goes round for ever.

  Args:
    horizon: H at least 2, players choose again at every step; None for a
      stationary game.
    discount: gamma.

  Returns:
    The game; states start, rock, paper, scissors.

  Raises:
    ValueError: horizon below 2.
  """
  if horizon is not None:
    checks.check_count('horizon', horizon, 2)
  idx = _choose(3)
  start = [1.0, 0.0, 0.0, 0.0]
  return MFGame(idx, np.ones(idx.shape), _rps_reward, start, horizon, discount)


def _wells_reward(attraction, mu, t):
  del t
  reward = attraction * jnp.append(0 * mu[0], mu[1:])
  return jnp.tile(reward[:, None], (1, 2))


def two_wells(attraction: float = 1.0) -> MFGame:
  """Left or right where company is liked: two pure equilibria, one mixed.

  Args:
    attraction: reward per share of the crowd at one's place, positive.

  Returns:
    The game; states centre, left, right, H = 2. Equilibria: all left, all
    right, and the unstable (1/2, 1/2).

  Raises:
    ValueError: attraction that is not positive.
  """
  checks.check_between('attraction', attraction, 0, np.inf, closed='')
  idx = _choose(2)
  reward = Partial(_wells_reward, np.float64(attraction))
  return MFGame(idx, np.ones(idx.shape), reward, [1.0, 0.0, 0.0], 2)


def _provider_reward(accuracy, service, gamma, switch_cost, mu, t):
  del t
  utility = jnp.asarray(accuracy) - gamma * mu / jnp.asarray(service)
  moves = 1 - jnp.eye(len(utility), dtype=mu.dtype)
  return utility[:, None] - switch_cost * moves


def provider_users(
  accuracy: Any = (0.8, 0.7),
  service: Any = (1.0, 0.5),
  *,
  gamma: float = 0.5,
  switch_cost: float = 0.0,
  horizon: int = 10,
  initial: Any = None,
  discount: float = 1.0,
) -> MFGame:
  """Users of M providers: accurate is good, slow is bad.

  State: the current provider; action: the next one. Utility of provider i is
  accuracy_i - gamma x_i / service_i, with x_i its share of the users, less the
  cost of a switch: monotone. Without that cost the shares from t = 1 on are
  those of Wardrop, where all providers in use are equally good.

  Args:
    accuracy: [M].
    service: [M], serving capacity per unit of users, positive.
    gamma: dislike of latency, at least zero.
    switch_cost: at least zero.
    horizon: H.
    initial: [M], first shares; None for equal ones.
    discount: per step.

  Returns:
    The game, S = A = M.

  Raises:
    ValueError: lengths differ, a service or weight out of range.
  """
  accuracy, service = (np.asarray(x, float) for x in (accuracy, service))
  if accuracy.ndim != 1 or accuracy.shape != service.shape:
    raise ValueError(
      f'accuracy has shape {accuracy.shape}, service {service.shape}; both '
      'are [M]'
    )
  if not (np.isfinite(service).all() and (service > 0).all()):
    raise ValueError(f'service={service} must be positive')
  checks.check_between('gamma', gamma, 0, np.inf, closed='[')
  checks.check_between('switch_cost', switch_cost, 0, np.inf, closed='[')
  providers = len(accuracy)
  idx = _choose(providers, 0)
  if initial is None:
    initial = np.full(providers, 1 / providers)
  reward = Partial(
    _provider_reward, accuracy, service, np.float64(gamma),
    np.float64(switch_cost),
  )  # fmt: skip
  return MFGame(idx, np.ones(idx.shape), reward, initial, horizon, discount)


def wardrop_shares(game: MFGame) -> jax.Array:
  """Shares at which all providers in use are equally good, [M].

  x_i = s_i max(a_i - u, 0) / gamma, with u such that they add up to one: found
  by trying each set of the best providers.

  Args:
    game: from `provider_users`, with gamma > 0.

  Returns:
    [M].
  """
  accuracy, service, gamma, _ = (np.asarray(x) for x in game.reward_fn.args)
  order = np.argsort(-accuracy, kind='stable')
  shares = np.zeros(len(accuracy))
  for used in range(1, len(order) + 1):
    best = order[:used]
    level = (accuracy[best] @ service[best] - gamma) / service[best].sum()
    if (accuracy[best] >= level).all():
      shares = np.zeros(len(accuracy))
      shares[best] = service[best] * (accuracy[best] - level) / gamma
  return jnp.asarray(shares)

r"""SIS epidemic: the more are ill, the sooner the healthy become so.

Axes: S = 2 states (susceptible, infected), A = 2 actions (go out, keep
distance), E = 2 outcomes, H time steps.

References:
  Cui, Koeppl. Approximately solving mean field games via entropy-regularized
  deep reinforcement learning, 2021.
"""

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.game import MFGame

__all__ = ['sis_epidemic', 'sis_prevalence']


def _probabilities(infection, recovery, mu, t):
  del t
  caught = jnp.clip(infection * mu[1], 0, 1)
  # [A]: only those who go out catch it.
  caught = jnp.stack([caught, jnp.zeros_like(caught)])
  healed = jnp.full(2, recovery, caught.dtype)
  infected = jnp.stack([caught, 1 - healed])
  return jnp.stack([1 - infected, infected], -1)


def _reward(illness, distance, mu, t):
  del t
  reward = jnp.array([[0.0, 1.0], [0.0, 1.0]], mu.dtype) * -distance
  return reward - illness * jnp.array([[0.0], [1.0]], mu.dtype)


def sis_epidemic(
  horizon: int | None = 50,
  *,
  infection: float = 0.81,
  recovery: float = 0.3,
  illness: float = 1.0,
  distance: float = 0.5,
  infected: float = 0.6,
  discount: float = 1.0,
) -> MFGame:
  """Susceptible, infected, susceptible; going out or keeping distance.

  Pr(infected next | susceptible, out) = infection mu(infected), none at a
  distance; an infected player recovers with probability `recovery`. Reward
  -illness while infected, -distance while keeping it. Transitions depend on
  the population.

  Args:
    horizon: H, or None.
    infection: probability of infection where everybody is ill, in [0, 1].
    recovery: in [0, 1].
    illness: cost per step.
    distance: cost per step.
    infected: share infected at first, in [0, 1].
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: a probability out of range.
  """
  rates = {'infection': infection, 'recovery': recovery, 'infected': infected}
  for name, value in rates.items():
    checks.check_between(name, value, 0, 1, closed='[]')
  idx = np.tile(np.arange(2), (2, 2, 1))
  prob = Partial(_probabilities, np.float64(infection), np.float64(recovery))
  reward = Partial(_reward, np.float64(illness), np.float64(distance))
  return MFGame(idx, prob, reward, [1 - infected, infected], horizon, discount)


def sis_prevalence(
  out: np.ndarray,
  infection: float = 0.81,
  recovery: float = 0.3,
  infected: float = 0.6,
) -> np.ndarray:
  """Share infected over time by the scalar recursion.

  i_{t+1} = i_t (1 - recovery) + (1 - i_t) out_t infection i_t.

  Args:
    out: [H], probability that a susceptible player goes out.
    infection: see `sis_epidemic`.
    recovery: see `sis_epidemic`.
    infected: first share.

  Returns:
    [H].
  """
  share, shares = infected, []
  for going in np.asarray(out, np.float64):
    shares.append(share)
    share = share * (1 - recovery) + (1 - share) * going * infection * share
  return np.array(shares)

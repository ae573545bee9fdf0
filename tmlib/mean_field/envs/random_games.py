r"""Random games: garnets and linear rewards, for tests and batches.

Axes: S states, A actions, E successors of a pair, H time steps.

References:
  Archibald et al. On the generation of Markov decision processes, 1995
  (garnet: each pair leads to a few random states).
"""

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.envs.crowd import crowd_reward
from tmlib.mean_field.game import MFGame

__all__ = ['garnet', 'random_linear']


def _tables(seed, states, actions, branching):
  checks.check_count('states', states)
  checks.check_count('actions', actions)
  checks.check_count('branching', branching)
  if branching > states:
    raise ValueError(
      f'branching={branching} exceeds states={states}; successors of a pair '
      'are distinct'
    )
  rng = np.random.default_rng(seed)
  order = rng.permuted(
    np.tile(np.arange(states), (states, actions, 1)), axis=-1
  )
  prob = rng.dirichlet(np.ones(branching), (states, actions))
  base = rng.uniform(-1, 1, (states, actions))
  mu0 = rng.dirichlet(np.ones(states))
  return rng, order[..., :branching], prob, base, mu0


def garnet(
  seed: int = 0,
  states: int = 20,
  actions: int = 3,
  branching: int = 2,
  horizon: int | None = 10,
  *,
  aversion: float = 1.0,
  discount: float = 1.0,
) -> MFGame:
  """Random successors and rewards, and dislike of company: monotone.

  r = base(s, a) - aversion log(mu(s) + 1e-25), base uniform in [-1, 1].

  Args:
    seed: of NumPy's generator.
    states: S.
    actions: A.
    branching: E, distinct successors of a pair.
    horizon: H, or None.
    aversion: at least zero.
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: a count below one, branching above states.
  """
  checks.check_between('aversion', aversion, 0, np.inf, closed='[')
  _, idx, prob, base, mu0 = _tables(seed, states, actions, branching)
  reward = Partial(crowd_reward, base, np.float64(aversion))
  return MFGame(idx, prob, reward, mu0, horizon, discount)


def _coupled(base, coupling, mu, t):
  del t
  return jnp.asarray(base) + (jnp.asarray(coupling) @ mu)[:, None]


def random_linear(
  seed: int = 0,
  states: int = 10,
  actions: int = 3,
  branching: int = 2,
  horizon: int | None = 10,
  *,
  strength: float = 1.0,
  monotone: bool = False,
  discount: float = 1.0,
) -> MFGame:
  """Random successors, and rewards linear in the population.

  r = base(s, a) + sum_s' coupling(s, s') mu(s').

  Args:
    seed: of NumPy's generator.
    states: S.
    actions: A.
    branching: E.
    horizon: H, or None.
    strength: scale of the coupling.
    monotone: the coupling is negative semidefinite; else it is arbitrary.
    discount: gamma.

  Returns:
    The game.

  Raises:
    ValueError: a count below one, branching above states.
  """
  rng, idx, prob, base, mu0 = _tables(seed, states, actions, branching)
  coupling = rng.normal(size=(states, states)) * strength
  if monotone:
    coupling = -coupling @ coupling.T / states
  return MFGame(
    idx, prob, Partial(_coupled, base, coupling), mu0, horizon, discount
  )

"""Users who may switch provider at every step, as a mean-field game.

State: the provider that a user is with; action: the one it goes to next.
Reward: u_i(mu_i) of the current provider at the current shares mu, less a cost
for each switch. u_i falls with its own share, so the game is monotone (Lasry
and Lions) and its equilibrium unique. Without switching costs every step but
the first is a Wardrop equilibrium: providers lead, the population follows.

Axes: M providers (states and actions), H steps.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.market import checks
from tmlib.market.game import ProviderGame
from tmlib.market.users import utilities

# The users' game is one of the games that mean_field solves.
from tmlib.mean_field import MFGame

__all__ = ['user_mfg']

# Stands for the utility of a provider that cannot serve its load.
_WORST = -1e3


def _reward(game, alpha, switch_cost, mu, t):
  del t
  u = jnp.maximum(utilities(game, alpha, mu)[0][0], _WORST).astype(mu.dtype)
  moves = 1 - jnp.eye(len(u), dtype=mu.dtype)
  return u[:, None] - switch_cost * moves


def user_mfg(
  game: ProviderGame,
  alpha: Any,
  switch_cost: float = 0.0,
  horizon: int = 10,
  initial: Any = None,
) -> MFGame:
  """The users' dynamic game at given splits of the budgets.

  Args:
    game: one type of users, no outside option; tau is not used: users of a
      mean-field game are as rational as its solver makes them.
    alpha: [M] in [0, 1].
    switch_cost: utility lost by a switch, >= 0.
    horizon: H, steps.
    initial: [M], first shares; None: equal ones.

  Returns:
    A `tmlib.mean_field.MFGame` with S = A = M.

  Raises:
    ValueError: several types, an outside option, a negative cost, no step.
  """
  alpha = checks.check_alpha(alpha, game.num_providers)
  if game.weights is not None or game.outside is not None:
    raise ValueError(
      'user_mfg takes one type of users and no outside option; drop weights '
      'and outside'
    )
  if not (np.isfinite(switch_cost) and switch_cost >= 0):
    raise ValueError(f'switch_cost={switch_cost} must be finite and >= 0')
  providers = game.num_providers
  idx = np.broadcast_to(np.arange(providers), (providers, providers))[..., None]
  if initial is None:
    initial = np.full(providers, 1 / providers)
  reward = Partial(_reward, game, alpha, np.float64(switch_cost))
  return MFGame(idx, np.ones(idx.shape), reward, initial, horizon)

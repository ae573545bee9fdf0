r"""What selfish users and providers lose against a planner.

By `envelope`, the providers' equilibrium is the split of budgets that users
would choose for themselves: competition for shares is efficient. What remains
is the congestion that users impose on one another. The planner picks alpha and
the shares to maximise

  S(alpha, x) = sum_i x_i (v_i - gamma L(x_i, s_i)) - tau sum_i x_i log x_i

(x_0 u_0 and its entropy included). For fixed x the best alpha is a concave
problem per provider; for fixed alpha the best x is the users' equilibrium under
the marginal latency L + x L_x. Taking turns climbs; many starts guard against
local maxima, which scale in training can make.

Axes: M providers, N starts.

References:
  Pigou. The economics of welfare, 1920. Roughgarden, Tardos. How bad is selfish
  routing?, 2002.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market import checks
from tmlib.market.envelope import envelope_alpha
from tmlib.market.game import ProviderGame
from tmlib.market.latency import marginal
from tmlib.market.nash import NashResult, solve_nash
from tmlib.market.users import split_users, utilities

__all__ = ['PriceOfAnarchy', 'price_of_anarchy', 'total_welfare']


class PriceOfAnarchy(NamedTuple):
  """Equilibrium and planner.

  Attributes:
    nash: the providers' equilibrium.
    welfare: [], S there.
    first_best: [], S of the planner, the best of all starts.
    loss: [], first_best - welfare >= 0.
    ratio: [], first_best / welfare; NaN unless both are positive (utilities
      have no natural zero, so the loss says more).
    alpha: [M], the planner's.
    x: [M], the planner's.
  """

  nash: NashResult
  welfare: Any
  first_best: Any
  loss: Any
  ratio: Any
  alpha: Any
  x: Any


def total_welfare(
  game: ProviderGame, alpha: jax.Array, x: jax.Array
) -> jax.Array:
  """S(alpha, x), see the module; the rest 1 - sum x takes the outside option.

  Args:
    game: one type of users.
    alpha: [M].
    x: [M], summing to at most one.

  Returns:
    [].
  """
  u = utilities(game, alpha, x)[0][0]
  value = jnp.where(x > 0, x * jnp.where(x > 0, u, 0), 0).sum()
  entropy = jax.scipy.special.entr(x).sum()
  if game.outside is not None:
    away = jnp.maximum(1 - x.sum(), 0)
    value = value + away * game.outside
    entropy = entropy + jax.scipy.special.entr(away)
  return value if game.wardrop else value + game.tau * entropy


@functools.partial(jax.jit, static_argnums=2)
def _plan(game: ProviderGame, starts: jax.Array, turns: int):
  social = dataclasses.replace(game, latency=marginal(game.latency))

  def turn(_, alpha):
    x = split_users(social, alpha).x
    best = envelope_alpha(game, jnp.maximum(x, jnp.finfo(x.dtype).tiny))
    return jnp.where(x > 0, best, alpha)

  def one(alpha):
    alpha = jax.lax.fori_loop(0, turns, turn, alpha)
    x = split_users(social, alpha).x
    return total_welfare(game, alpha, x), alpha, x

  welfare, alpha, x = jax.lax.map(one, starts)
  best = jnp.nanargmax(welfare)
  return welfare[best], alpha[best], x[best]


def price_of_anarchy(
  game: ProviderGame, starts: int = 12, turns: int = 60, seed: int = 0
) -> PriceOfAnarchy:
  """Welfare of the equilibrium against that of a planner.

  Args:
    game: one type of users, concave accuracy.
    starts: of the planner's search: the equilibrium, then random ones.
    turns: of the planner's search.
    seed: of the starts.

  Returns:
    The comparison; the first best is a lower bound of the true one.

  Raises:
    ValueError: several types of users, or no start.
  """
  if game.weights is not None:
    raise ValueError('price_of_anarchy takes one type of users; drop weights')
  if starts < 1 or turns < 1:
    raise ValueError(f'starts={starts} and turns={turns} must be at least 1')
  nash = solve_nash(game)
  rng = np.random.default_rng(seed)
  random = rng.uniform(0, 0.95, (starts - 1, game.num_providers))
  alphas = np.concatenate([np.asarray(nash.alpha)[None], random])
  best, alpha, x = checks.precise(lambda g, a: _plan(g, a, turns), game, alphas)
  now = checks.precise(total_welfare, game, nash.alpha, nash.x)
  positive = (best > 0) & (now > 0)
  ratio = float(best / now) if positive else float('nan')
  return PriceOfAnarchy(nash, now, best, best - now, ratio, alpha, x)

r"""Providers who choose prices as well, for profit (p_i - cost_i) x_i.

With everybody else's (alpha, p) fixed, let V(m) be the level at which they hold
a mass m. A provider that wants the load x splits its budget by its envelope and
asks the highest price at which x comes:

  p_i(x) = G_i(x) - tau log x - V(1 - x),   profit x (p_i(x) - cost_i)

so its best response is a search over one number. At an interior equilibrium

  p_i - cost_i = x_i (h_i + 1 / sum_{j != i} 1 / h_j),  h = tau / x + gamma L_x

(the outside option among the j, with h_0 = tau / x_0): for two providers with
linear latency and Wardrop users x_i gamma (1 / s_1 + 1 / s_2), the congestion
price. Users' welfare is no potential any more, and play may cycle.

Axes: M providers, P points of the search, R rounds.

References:
  Acemoglu, Ozdaglar. Competition and efficiency in congested markets, 2007.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market import checks
from tmlib.market.envelope import envelope_alpha, envelope_value
from tmlib.market.game import ProviderGame
from tmlib.market.users import rival_level, split_users

__all__ = ['PriceResult', 'solve_prices']

_POINTS, _LEVELS = 33, 8


class PriceResult(NamedTuple):
  """An equilibrium in splits and prices, or how far play came.

  Attributes:
    alpha: [M].
    prices: [M].
    x: [M], shares.
    U: [], welfare of the users, prices paid.
    profit: [M].
    eps_nash: [], largest profit that a provider could gain alone.
    status: 'converged' or 'max_iters'.
    rounds: rounds of best responses.
  """

  alpha: Any
  prices: Any
  x: Any
  U: Any
  profit: Any
  eps_nash: Any
  status: Any
  rounds: Any


def _reply(game: ProviderGame, i, alpha, prices, costs):
  """Best (alpha_i, p_i) and its profit."""
  priced = dataclasses.replace(game, prices=prices)
  free = dataclasses.replace(game, prices=jnp.zeros_like(prices))
  here = jnp.arange(game.num_providers) == i
  tiny = 1e-9 if alpha.dtype == jnp.float64 else 1e-5

  def ask(x):
    loads = jnp.full_like(alpha, x)
    best = jnp.where(here, envelope_value(free, loads)[0], 0).sum()
    entropy = 0.0 if game.wardrop else game.tau * jnp.log(x)
    return best - entropy - rival_level(priced, alpha, i, 1 - x)

  profit = jax.vmap(lambda x: x * (ask(x) - jnp.where(here, costs, 0).sum()))

  def zoom(_, bracket):
    low, high = bracket
    grid = jnp.linspace(low, high, _POINTS, dtype=alpha.dtype)
    best = grid[jnp.nanargmax(profit(grid))]
    space = (high - low) / (_POINTS - 1)
    return jnp.maximum(best - space, tiny), jnp.minimum(best + space, 1 - tiny)

  start = (jnp.asarray(tiny, alpha.dtype), jnp.asarray(1 - tiny, alpha.dtype))
  low, high = jax.lax.fori_loop(0, _LEVELS, zoom, start)
  x = (low + high) / 2
  split = jnp.where(here, envelope_alpha(free, jnp.full_like(alpha, x)), 0)
  return split.sum(), ask(x), profit(x[None])[0]


@functools.partial(jax.jit, static_argnums=(3, 4))
def _play(game, alpha, costs, max_iters: int, damping: float):
  dtype = alpha.dtype
  tol = 1e-9 if dtype == jnp.float64 else 1e-4

  def profits(alpha, prices):
    priced = dataclasses.replace(game, prices=prices)
    return (prices - costs) * split_users(priced, alpha).x

  def turn(i, carry):
    alpha, prices, gain = carry
    split, price, best = _reply(game, i, alpha, prices, costs)
    gain = jnp.maximum(gain, best - profits(alpha, prices)[i])
    keep = damping
    alpha = alpha.at[i].set(keep * alpha[i] + (1 - keep) * split)
    return alpha, prices.at[i].set(keep * prices[i] + (1 - keep) * price), gain

  def unfinished(carry):
    *_, gain, step = carry
    return (gain > tol) & (step < max_iters)

  def body(carry):
    alpha, prices, _, step = carry
    none = jnp.zeros((), dtype)
    alpha, prices, gain = jax.lax.fori_loop(
      0, len(alpha), turn, (alpha, prices, none)
    )
    return alpha, prices, gain, step + 1

  carry = (alpha, costs, jnp.asarray(jnp.inf, dtype), jnp.int32(0))
  alpha, prices, _, rounds = jax.lax.while_loop(unfinished, body, carry)
  now = profits(alpha, prices)

  def gain(i):
    return _reply(game, i, alpha, prices, costs)[2] - now[i]

  eps = jnp.maximum(jax.lax.map(gain, jnp.arange(len(alpha))).max(), 0)
  users = split_users(dataclasses.replace(game, prices=prices), alpha)
  status = jnp.where(eps <= 100 * tol, 0, 1)
  return PriceResult(alpha, prices, users.x, users.U, now, eps, status, rounds)


def solve_prices(
  game: ProviderGame,
  costs: Any = 0.0,
  alpha0: Any = None,
  max_iters: int = 200,
  damping: float = 0.2,
) -> PriceResult:
  """Equilibrium where providers choose their split and their price.

  Args:
    game: one type of users; its prices are ignored.
    costs: [] or [M], cost of serving a user.
    alpha0: [M], first splits; None: one half. First prices are the costs.
    max_iters: most rounds of alternating best responses.
    damping: part of the old choice that a round keeps, in [0, 1).

  Returns:
    The result with its epsilon-Nash certificate; NumPy in float64.

  Raises:
    ValueError: several types; queues without an outside option, where rivals
      that cannot hold all users leave the price without bound.
  """
  if game.weights is not None:
    raise ValueError('solve_prices takes one type of users; drop weights')
  if game.latency.capacitated and game.outside is None:
    raise ValueError(
      f'{game.latency.name} queues of rivals may be too short for all users,'
      ' who would then pay any price; set outside, the utility of staying away'
    )
  if not 0 <= damping < 1 or max_iters < 1:
    raise ValueError(
      f'damping={damping} must lie in [0, 1) and max_iters={max_iters} be at '
      'least 1'
    )
  providers = game.num_providers
  costs = np.broadcast_to(np.asarray(costs, float), (providers,))
  if alpha0 is None:
    alpha0 = np.full(providers, 0.5)
  alpha0 = checks.check_alpha(alpha0, providers)
  found = checks.precise(
    lambda g, a, c: _play(g, a, c, max_iters, damping), game, alpha0, costs
  )
  return found._replace(status=('converged', 'max_iters')[int(found.status)])

r"""A market that nobody solves, as a Method: one update is one day.

N users, each with a provider. A day: every user reconsiders with a small
probability and then picks a provider by exp(u_i / tau) at the loads it sees;
every provider moves its split uphill on what its present users get,

  alpha_i += step B_i (A'(c_i) + gamma L_s(x_i, s_i)),

cut to [0, 1). Nobody knows the game or anticipates anybody. A point where
providers rest and users are at their logit shares is the equilibrium of
`envelope`, which is unique; users fluctuate around it like 1 / sqrt(N).

The state holds S independent markets; simulation m draws from
fold_in(fold_in(key, step), m), so neither the layout nor S changes it.

Axes: S simulations, N users, M providers.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tmlib.market import accuracy as accuracies
from tmlib.market.game import ProviderGame
from tmlib.market.users import utilities
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics

__all__ = ['MarketState', 'market_method']

# Providers keep this part of the budget for serving.
_FLOOR = 1e-3


class MarketState(NamedTuple):
  """State of S markets.

  Attributes:
    key: PRNG key; a step's key is fold_in(key, step).
    step: [] int32, days.
    alpha: [S, M].
    choice: [S, N] int32, the provider of each user.
  """

  key: jax.Array
  step: jax.Array
  alpha: jax.Array
  choice: jax.Array


def _loads(choice: jax.Array, providers: int) -> jax.Array:
  """[M], shares of the users."""
  mine = choice[:, None] == jnp.arange(providers)[None]
  return mine.mean(0)


def _day(key, alpha, choice, game: ProviderGame, revise, step):
  """One market, one day; alpha [M], choice [N]."""
  x = _loads(choice, game.num_providers)
  u = jnp.maximum(utilities(game, alpha, x)[0][0], -1e6)
  who_key, what_key = jax.random.split(key)
  who = jax.random.uniform(who_key, choice.shape) < revise
  picked = jax.random.categorical(what_key, u / game.tau, shape=choice.shape)
  choice = jnp.where(who, picked.astype(jnp.int32), choice)
  s = (1 - alpha) * game.budgets
  wait = lambda s: game.latency.value(x, s)
  slope = jax.jvp(wait, (s,), (jnp.ones_like(s),))[1]
  gain = accuracies.slope(game.accuracy, alpha * game.budgets)
  uphill = game.budgets * (gain + game.gamma * slope)
  # An overloaded queue pushes with any force: a bounded step.
  move = jnp.clip(jnp.nan_to_num(step * uphill, nan=-1.0), -0.05, 0.05)
  return jnp.clip(alpha + move, 0, 1 - _FLOOR), choice, x


def market_method(
  game: ProviderGame,
  simulations: int,
  users: int = 1000,
  revise: float = 0.1,
  step: float = 0.02,
) -> Build:
  """The adaptive market for the loop; steps = days.

  `evaluate` returns per simulation, by `batch['id']`: alpha and x, [M] each.

  Args:
    game: logit users of one type, no outside option.
    simulations: S.
    users: N.
    revise: probability that a user reconsiders on a day, in (0, 1].
    step: of the providers, > 0.

  Returns:
    Build; the axis name is ignored, as there is no batch to reduce over.

  Raises:
    ValueError: Wardrop users, several types, an outside option, or a number out
      of range.
  """
  if game.wardrop or game.weights is not None or game.outside is not None:
    raise ValueError(
      'market_method takes logit users (tau > 0) of one type and no outside '
      'option'
    )
  if simulations < 1 or users < 1:
    raise ValueError(
      f'simulations={simulations} and users={users} must be at least 1'
    )
  if not 0 < revise <= 1 or not step > 0:
    raise ValueError(
      f'revise={revise} must lie in (0, 1] and step={step} be positive'
    )
  return lambda axis_name: _method(game, simulations, users, revise, step)


def _method(game, simulations, users, revise, step) -> Method:
  providers = game.num_providers
  game = jax.tree.map(jnp.asarray, game)
  sims = jnp.arange(simulations)

  def init(key: jax.Array, batch: Batch | None = None) -> MarketState:
    del batch
    dtype = jnp.result_type(float)
    alpha = jnp.full((simulations, providers), 0.5, dtype)
    # Everybody starts in turn: equal shares.
    choice = jnp.tile(jnp.arange(users, dtype=jnp.int32) % providers,
                      (simulations, 1))  # fmt: skip
    return MarketState(key, jnp.int32(0), alpha, choice)

  def update(
    state: MarketState, batch: Batch | None = None
  ) -> tuple[MarketState, Metrics]:
    del batch
    key = jax.random.fold_in(state.key, state.step)
    keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(sims)
    day = lambda k, a, c: _day(k, a, c, game, revise, step)
    alpha, choice, x = jax.vmap(day)(keys, state.alpha, state.choice)
    metrics = {f'x_{i}': x[:, i].mean() for i in range(providers)}
    metrics |= {f'alpha_{i}': alpha[:, i].mean() for i in range(providers)}
    return MarketState(state.key, state.step + 1, alpha, choice), metrics

  def evaluate(state: MarketState, batch: Batch | None) -> Evaluation:
    if batch is None:
      raise ValueError('evaluate needs a batch with the ids of simulations')
    chosen, weight = batch['id'], batch['weight']
    x = jax.vmap(lambda c: _loads(c, providers))(state.choice[chosen])
    outputs = {'id': chosen, 'alpha': state.alpha[chosen], 'x': x}
    return {'sums': {'markets': (weight.sum(), weight.sum())},
            'outputs': outputs}  # fmt: skip

  return Method(init, update, evaluate)

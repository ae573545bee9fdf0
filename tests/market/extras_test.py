"""Planner, prices, calibration and the users' population game."""

import numpy as np
import pytest
from scipy import optimize

from tmlib import market, mean_field

PAIR = (10.0, 6.0)


def test_competition_is_what_users_would_choose():
  # No split of the budgets gives users more than the equilibrium does.
  game = market.ProviderGame(budgets=PAIR, tau=0)
  nash = market.solve_nash(game)

  def welfare(alpha):
    c, s = alpha * np.array(PAIR), (1 - alpha) * np.array(PAIR)
    a = 1 - (1 + c) ** -0.3
    both = (s @ a - 1) / s.sum()
    return max(both, *(a - 1 / np.maximum(s, 1e-9)))

  grid = np.linspace(0, 0.99, 100)
  best = max(welfare(np.array([p, q])) for p in grid for q in grid)
  assert best <= nash.U + 1e-12
  assert best >= nash.U - 1e-4


def test_the_planner_beats_selfish_users():
  game = market.ProviderGame(budgets=PAIR, tau=0)
  found = market.price_of_anarchy(game, starts=4)
  a_of = lambda c: 1 - (1 + c) ** -0.3

  def total(z):
    alpha, x = z[:2], np.array([z[2], 1 - z[2]])
    c, s = alpha * np.array(PAIR), (1 - alpha) * np.array(PAIR)
    return -(x @ (a_of(c) - x / s))

  best = min(
    optimize.minimize(total, z, bounds=[(0, 0.99)] * 2 + [(0, 1)]).fun
    for z in ([0.5, 0.5, 0.6], [0.3, 0.8, 0.9], [0.7, 0.2, 0.2])
  )
  np.testing.assert_allclose(found.first_best, -best, atol=1e-7)
  np.testing.assert_allclose(found.welfare, found.nash.U, atol=1e-12)
  assert found.loss > 0
  assert found.ratio > 1


def test_prices_of_two_wardrop_providers():
  game = market.ProviderGame(budgets=PAIR, tau=0)
  found = market.solve_prices(game, costs=0.05)
  assert found.status == 'converged'
  s = (1 - found.alpha) * np.array(PAIR)
  wanted = 0.05 + found.x * (1 / s).sum()
  np.testing.assert_allclose(found.prices, wanted, rtol=1e-4)
  # Each split is best for its own load: s A'(c) = gamma L.
  slope = 0.3 * (1 + found.alpha * np.array(PAIR)) ** -1.3
  np.testing.assert_allclose(s * slope, found.x / s, rtol=1e-4)
  np.testing.assert_allclose(found.x.sum(), 1)


@pytest.mark.slow
def test_prices_of_logit_providers():
  game = market.ProviderGame(budgets=PAIR, tau=0.2, outside=0.0)
  found = market.solve_prices(game)
  assert found.status == 'converged'
  s = (1 - found.alpha) * np.array(PAIR)
  own = 0.2 / found.x + 1 / s
  rest = 1 / own[::-1] + (1 - found.x.sum()) / 0.2
  np.testing.assert_allclose(
    found.prices, found.x * (own + 1 / rest), rtol=1e-4
  )


def markets(noise, users, seed=0):
  rng = np.random.default_rng(seed)
  game = market.ProviderGame(budgets=PAIR, gamma=0.7, tau=0.12)
  alpha = rng.uniform(0.1, 0.9, (24, 2))
  x = np.stack([market.user_equilibrium(game, a).x for a in alpha])
  if noise:
    x = np.stack([rng.multinomial(users, p) for p in x]) / users
  return alpha, x


def test_calibration_finds_the_truth():
  alpha, x = markets(False, 0)
  game = market.ProviderGame(budgets=PAIR)
  found = market.calibrate(game, alpha, x)
  assert found.converged
  np.testing.assert_allclose([found.gamma, found.tau], [0.7, 0.12], rtol=1e-7)
  np.testing.assert_allclose(found.inversion, [0.7, 0.12], rtol=1e-7)
  assert found.deviance < 1e-12


def test_calibration_knows_its_error():
  alpha, x = markets(True, 5000)
  found = market.calibrate(
    market.ProviderGame(budgets=PAIR), alpha, x, users=5000
  )
  assert found.converged
  error = np.array([found.gamma - 0.7, found.tau - 0.12])
  assert (np.abs(error) < 4 * found.errors).all()
  assert (found.errors < [0.2, 0.02]).all()


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'shares': [[0.5, 0.6]]}, 'shares sum to 1.1'),
    ({'shares': [[1.0, 0.0]]}, 'positive'),
    ({'shares': [[0.2, 0.3, 0.5]]}, 'shape'),
    ({'alpha': [[0.5, 1.0]]}, 'alpha = 1'),
    ({}, 'gamma from tau'),
  ],
)
def test_bad_observations_are_named(change, match):
  game = market.ProviderGame(budgets=PAIR)
  data = {'alpha': [[0.5, 0.5]], 'shares': [[0.5, 0.5]]} | change
  with pytest.raises(ValueError, match=match):
    market.calibrate(game, **data)


def test_the_population_settles_where_users_do():
  game = market.ProviderGame(budgets=PAIR, tau=0)
  alpha = np.array([0.5, 0.6])
  env = market.user_mfg(game, alpha, horizon=4)
  users = market.user_equilibrium(game, alpha)
  found = mean_field.online_mirror_descent(env, 4000, 0.5)
  # The first shares are given; the users choose the later ones.
  flow = np.asarray(found.mu)[1:]
  np.testing.assert_allclose(flow, np.tile(users.x, (len(flow), 1)), atol=2e-3)


def test_bad_extras_are_named():
  game = market.ProviderGame(budgets=PAIR)
  types = game.replace(gamma=np.ones(2), weights=np.full(2, 0.5))
  with pytest.raises(ValueError, match='one type'):
    market.price_of_anarchy(types)
  with pytest.raises(ValueError, match='one type'):
    market.solve_prices(types)
  with pytest.raises(ValueError, match='outside'):
    market.solve_prices(market.ProviderGame(budgets=PAIR, latency='mm1'))
  with pytest.raises(ValueError, match='switch_cost=-1'):
    market.user_mfg(game, [0.5, 0.5], -1)


def test_a_market_that_nobody_solves_finds_the_equilibrium():
  import jax

  game = market.ProviderGame(budgets=PAIR, tau=0.2)
  nash = market.solve_nash(game)
  method = market.market_method(game, simulations=4, users=4000)(None)
  state = jax.jit(method.init)(jax.random.key(0))
  run = jax.jit(
    lambda s: jax.lax.scan(lambda s, _: method.update(s), s, length=600)
  )
  state, metrics = run(state)
  tail = {name: np.asarray(v)[300:].mean() for name, v in metrics.items()}
  for i in range(2):
    assert abs(tail[f'alpha_{i}'] - nash.alpha[i]) < 5e-3
    assert abs(tail[f'x_{i}'] - nash.x[i]) < 5e-3


@pytest.mark.parametrize(
  ('change', 'options', 'match'),
  [
    ({'tau': 0}, {}, 'logit'),
    ({}, {'users': 0}, 'users=0'),
    ({}, {'revise': 0.0}, 'revise=0'),
  ],
)
def test_bad_simulations_are_named(change, options, match):
  game = market.ProviderGame(**({'budgets': PAIR} | change))
  with pytest.raises(ValueError, match=match):
    market.market_method(game, 2, **options)

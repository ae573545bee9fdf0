"""Equilibria of the providers: published rows, brute force, theorems."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.market.users_test import linear_wardrop
from tmlib import market

# wardrop, linear, a_max = 1, a_0 = 0, c0 = 1, beta = .3, gamma = 1, B1 = 10:
# B2/B1, serving fraction of the big one, share of the small one, U.
ROWS = np.array(
  [
    (1.0, 0.440, 0.5, 0.3186),
    (0.8, 0.474, 0.379, 0.2922),
    (0.6, 0.505, 0.246, 0.2650),
    (0.4, 0.532, 0.112, 0.2392),
    (0.2, 0.550, 0.0115, 0.2206),
  ]
)


@pytest.fixture(name='rows', scope='module')
def rows_fixture():
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0)
  return market.asymmetry_sweep(game, ROWS[:, 0])


def test_example_rows(rows):
  np.testing.assert_allclose(rows['serving'], ROWS[:, 1], atol=5e-4)
  np.testing.assert_allclose(rows['x'][:, 1], ROWS[:, 2], atol=5e-4)
  np.testing.assert_allclose(rows['U'], ROWS[:, 3], atol=5e-5)
  assert (rows['status'] == 'converged').all()
  assert rows['eps_nash'].max() < 1e-12
  assert rows['claim_i'].all()
  assert rows['claim_ii'][1:].all()
  assert rows['claim_iii'][1:].all()
  assert (rows['kind'] == 'interior').all()


def test_decomposition_of_the_loss(rows):
  # U(10, 6) = .2650 > U(8, 8) = .2586, U(10, 2) = .2206 > U(6, 6) = .1739.
  mean = rows['base_U'] - rows['lost_compute']
  np.testing.assert_allclose(mean[[2, 4]], [0.2586, 0.1739], atol=5e-5)
  assert (rows['pure_asymmetry'][1:] < 0).all()
  total = rows['lost_compute'] + rows['pure_asymmetry']
  np.testing.assert_allclose(total, rows['base_U'] - rows['U'])


def test_first_order_condition(rows):
  # s A'(c) = gamma L, by hand for the power law.
  c, s = rows['alpha'] * rows['budgets'], (1 - rows['alpha']) * rows['budgets']
  slope = 0.3 * (1 + c) ** -1.3
  np.testing.assert_allclose(s * slope, rows['x'] / s, rtol=1e-9)


def share(alpha, budgets, gamma=1.0):
  c, s = alpha * budgets, (1 - alpha) * budgets
  return linear_wardrop(1 - (1 + c) ** -0.3, np.maximum(s, 1e-12), gamma)


def test_no_better_reply_on_a_dense_grid(rows):
  table = zip(rows['alpha'], rows['x'], rows['budgets'], strict=True)
  for alpha, x, budgets in table:
    for i in range(2):
      for a in np.linspace(0, 0.999, 400):
        other = np.where(np.arange(2) == i, a, alpha)
        assert share(other, budgets)[0][i] <= x[i] + 1e-10


def test_best_response_is_the_best_of_a_dense_grid():
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0)
  alpha = np.array([0.3, 0.8])
  for i in range(2):
    reply = market.best_response(game, i, alpha)
    move = lambda a, i=i: np.where(np.arange(2) == i, a, alpha)
    every = [
      share(move(a), game.budgets)[0][i] for a in np.linspace(0, 0.999, 4000)
    ]
    best = max(every)
    assert best - 1e-12 <= reply.share <= best + 1e-6
    now = share(alpha, game.budgets)[0][i]
    np.testing.assert_allclose(reply.gain, reply.share - now, atol=1e-12)


def test_play_ends_where_the_envelope_says(rows):
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0)
  for start in ((0.5, 0.5), (0.02, 0.98)):
    found = market.solve_nash(game, start, method='best_response')
    assert found.status == 'converged'
    assert found.rounds > 0
    np.testing.assert_allclose(found.alpha, rows['alpha'][2], atol=1e-6)
    np.testing.assert_allclose(found.U, rows['U'][2], atol=1e-12)


def test_all_starts_find_one_equilibrium():
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0)
  found = market.equilibria(game, starts=6)
  assert len(found) == 1
  assert found[0].status == 'converged'


def test_a_monopoly_has_a_set_of_equilibria_and_users_the_best_of_it():
  game = market.ProviderGame(budgets=(10.0, 0.5), gamma=0.1, tau=0)
  best = market.solve_nash(game)
  assert best.status == 'converged'
  np.testing.assert_array_equal(best.x, [1, 0])
  found = market.equilibria(game, starts=8)
  assert len(found) > 1
  assert all(abs(one.x[0] - 1) < 1e-12 for one in found)
  assert all(one.U <= best.U + 1e-12 for one in found)
  row = market.asymmetry_sweep(game, [0.05])
  assert row['kind'][0] == 'monopoly'
  assert not row['claim_i'][0]


def test_where_capacity_is_short_everybody_serves():
  game = market.ProviderGame(budgets=(2.0, 1.0), gamma=3, tau=0)
  found = market.solve_nash(game)
  assert found.status == 'converged'
  np.testing.assert_allclose(found.alpha, 0, atol=1e-12)
  row = market.asymmetry_sweep(game, [0.5])
  assert row['kind'][0] == 'all serve'
  assert not row['claim_ii'][0]


def test_fixed_total_reverses_the_claim():
  # power .3, gamma 1, total 4: U -0.2165 -> -0.1581.
  game = market.ProviderGame(budgets=(2.0, 2.0), tau=0)
  even = market.solve_nash(game)
  np.testing.assert_allclose(even.U, -0.2165, atol=5e-5)
  uneven = [
    market.solve_nash(game.replace(budgets=np.array([2 + d, 2 - d]))).U
    for d in (0.5, 1.0, 1.5)
  ]
  assert (np.diff([even.U, *uneven]) > 0).all()


def many(seed, count, latency='linear', tau=0.0):
  rng = np.random.default_rng(seed)
  games = []
  for _ in range(count):
    big = np.exp(rng.uniform(np.log(2), np.log(30)))
    games.append(
      market.ProviderGame(
        budgets=np.array([big, big * rng.uniform(0.1, 1)]),
        accuracy=market.PowerLaw(beta=rng.uniform(0.1, 1.5)),
        gamma=np.exp(rng.uniform(np.log(0.1), np.log(3))),
        tau=tau,
        latency=latency,
      )
    )
  return games


@pytest.mark.parametrize(
  ('latency', 'tau'),
  [
    ('linear', 0.0),
    pytest.param('linear', 0.05, marks=pytest.mark.slow),
    pytest.param('mm1', 0.0, marks=pytest.mark.slow),
    pytest.param('mm1', 0.3, marks=pytest.mark.slow),
    pytest.param('processor_sharing', 0.05, marks=pytest.mark.slow),
    pytest.param('bpr', 0.0, marks=pytest.mark.slow),
  ],
)
def test_random_games_are_certified_and_users_lose(latency, tau):
  rows = market.compare_budgets(many(1, 24, latency, tau))
  assert (rows['status'] == 'converged').all()
  assert rows['eps_nash'].max() < 1e-9
  # A theorem: less compute never makes users better off.
  assert (rows['base_U'] - rows['U'] > -1e-12).all()


def test_batch_equals_one_by_one():
  games = many(2, 4)
  batch = market.solve_games(market.stack_games(games))
  for i in (0, 3):
    one = market.solve_nash(games[i])
    np.testing.assert_allclose(batch.alpha[i], one.alpha, atol=1e-10)
    np.testing.assert_allclose(batch.U[i], one.U, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.0, 0.05]))
def test_who_gains_users_makes_users_better_off(seed, tau):
  rng = np.random.default_rng(seed)
  game = market.ProviderGame(budgets=(10.0, 6.0, 3.0), tau=tau)
  alpha = rng.uniform(0, 1, 3)
  moved = np.where(np.arange(3) == rng.integers(3), rng.uniform(0, 1), alpha)
  i = int(np.abs(moved - alpha).argmax())
  a, b = (market.user_equilibrium(game, z) for z in (alpha, moved))
  if 0 < min(a.x[i], b.x[i]) and max(a.x[i], b.x[i]) < 1 - 1e-9:
    assert (b.x[i] - a.x[i]) * (b.U - a.U) >= -1e-14


def test_derivatives_of_the_equilibrium_equal_differences():
  def welfare(theta, tau):
    game = market.ProviderGame(
      budgets=theta[:2],
      gamma=theta[2],
      tau=tau,
      accuracy=market.PowerLaw(beta=theta[3]),
    )
    alpha, x, level = market.envelope_equilibrium(game)
    return level + alpha @ jnp.array([1.0, 2.0]) + x[0]

  with jax.enable_x64(True):
    theta = jnp.array([10.0, 6.0, 1.0, 0.3])
    for tau in (0.0, 0.05):
      call = jax.jit(lambda t, tau=tau: welfare(t, tau))
      step = 1e-5 * np.eye(4)
      wanted = [(call(theta + d) - call(theta - d)) / 2e-5 for d in step]
      np.testing.assert_allclose(jax.grad(call)(theta), wanted, rtol=1e-6)


def test_an_outside_option_at_the_level_takes_the_rest():
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0, outside=0.35)
  found = market.solve_nash(game)
  assert found.status == 'converged'
  np.testing.assert_allclose(found.U, 0.35)
  assert 0 < found.x.sum() < 1


@pytest.mark.parametrize(
  ('options', 'match'),
  [
    ({'method': 'newton'}, 'newton'),
    ({'order': 'random'}, 'random'),
    ({'ties': 'first'}, 'first'),
    ({'damping': 1.0}, 'damping=1'),
    ({'max_iters': 0}, 'max_iters=0'),
    ({'alpha0': [0.5, 2.0]}, r'alpha\[1\] = 2'),
  ],
)
def test_bad_options_are_named(options, match):
  game = market.ProviderGame(budgets=(10.0, 6.0))
  with pytest.raises(ValueError, match=match):
    market.solve_nash(game, **options)


def test_bad_calls_are_named():
  game = market.ProviderGame(budgets=(10.0, 6.0))
  with pytest.raises(ValueError, match='i=2'):
    market.best_response(game, 2, [0.5, 0.5])
  with pytest.raises(ValueError, match='ratios'):
    market.asymmetry_sweep(game, [0.5, 1.2])
  with pytest.raises(ValueError, match='B1 >= B2'):
    market.compare_budgets([market.ProviderGame(budgets=(1.0, 2.0))])
  with pytest.raises(ValueError, match='kind'):
    market.stack_games([game, game.replace(tau=0)])
  with pytest.raises(ValueError, match='one type'):
    market.solve_nash(
      game.replace(gamma=np.ones(2), weights=np.full(2, 0.5)),
      method='envelope',
    )

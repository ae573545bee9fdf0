"""Closed forms against brute force, bounds, and the claims behind them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib.dueling import (
  borda,
  elimination,
  etc,
  greedy,
  instances,
  nsw,
  regret,
  sampling,
  theory,
)


def random_scores(seed, users, arms):
  rng = np.random.default_rng(seed)
  upper = np.triu(rng.beta(0.5, 0.5, (users, arms, arms)), 1)
  lower = np.tril(1 - upper.swapaxes(1, 2), -1)
  return rng, (upper + lower).sum(-1) / (arms - 1)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([(2, 4), (4, 6)]))
def test_commit_loss_is_at_most_eight_errors(seed, shape):
  users, arms = shape
  rng, b = random_scores(seed, users, arms)
  eps = 1 / (4 * users)
  noise = rng.uniform(-1, 1, b.shape)
  noise -= noise.mean(1, keepdims=True)
  noise *= eps / np.abs(noise).max()
  best = nsw.solve_nsw(b)
  found = np.asarray(nsw.solve_nsw(b + noise).pi)
  reached = np.log(b @ found).mean()
  assert np.log(best.value) - reached <= 8 * eps + 1e-8
  # The product: at most 8 N F* eps.
  product = np.exp(users * np.log(best.value))
  assert product - np.prod(b @ found) <= 8 * users * product * eps + 1e-8


def numpy_etc(rng, p, tau, horizon):
  """One user, round by round: pair regret and committed arm."""
  arms = len(p)
  b = (p.sum(1) - 0.5) / (arms - 1)
  wins, met, lost = np.zeros_like(p), np.zeros_like(p), 0.0
  i, j = map(np.asarray, regret.pair_order(arms))
  for t in range(tau):
    x, y = i[t % len(i)], j[t % len(i)]
    won = rng.random() < p[x, y]
    wins[x, y] += won
    wins[y, x] += 1 - won
    met[x, y] += 1
    met[y, x] += 1
    lost += b.max() - (b[x] + b[y]) / 2
  rate = wins / np.where(met > 0, met, 1)
  arm = rate.sum(1).argmax()
  return lost + (horizon - tau) * (b.max() - b[arm])


def test_closed_form_has_the_law_of_the_loop():
  env = instances.hard_instance(jax.random.key(0), 4, 1, 0.2)
  p = np.asarray(env.preference[0], np.float64)
  tau, horizon, runs = 40, 400, 1500
  rng = np.random.default_rng(0)
  slow = np.array([numpy_etc(rng, p, tau, horizon) for _ in range(400)])
  keys = jax.random.split(jax.random.key(1), runs)
  found = jax.vmap(lambda k: etc.fair_etc(k, env, horizon, tau))(keys)
  fast = np.asarray(found.total.pair)
  error = np.sqrt(slow.var() / len(slow) + fast.var() / runs)
  assert abs(slow.mean() - fast.mean()) < 4 * error
  # The exploration is deterministic: equal to the loop's to rounding.
  np.testing.assert_allclose(fast.min(), slow.min(), rtol=1e-4)
  assert (found.total.weak <= found.total.pair).all()
  assert (found.total.pair <= found.total.strong).all()
  assert (found.tau == tau).all()


def test_shared_answers_of_equal_users_are_equal():
  p = jnp.full((3, 6), 0.3).at[2].set(0.8)
  n = jnp.full((3, 6), 50)
  wins = sampling.sample_wins(jax.random.key(0), p, n, 'shared')
  np.testing.assert_array_equal(wins[0], wins[1])
  assert (wins[2] >= wins[0]).all()
  # Marginals stay binomial.
  keys = jax.random.split(jax.random.key(1), 3000)
  many = jax.vmap(lambda k: sampling.sample_wins(k, p, n, 'shared'))(keys)
  np.testing.assert_allclose(many.mean((0, 2)), [15, 15, 40], rtol=0.01)
  np.testing.assert_allclose(many.var(0).mean(1), [10.5, 10.5, 8], rtol=0.05)


@pytest.mark.parametrize('feedback', ['all', 'one'])
@pytest.mark.parametrize('design', borda.DESIGNS)
def test_explored_counts_add_up(feedback, design):
  env = instances.hard_instance(jax.random.key(0), 4, 3, 0.1, feedback=feedback)
  start = jnp.zeros(3, jnp.int32)
  after, wins, counts = sampling.explore(
    jax.random.key(1), env, start, 100, design
  )
  np.testing.assert_array_equal(counts.sum(1), after)
  assert int(after.sum()) == (100 if feedback == 'one' else 300)
  assert (wins <= counts).all()
  if design == 'balanced':
    assert int((counts.max(1) - counts.min(1)).max()) <= 1


def test_baselines_lose_where_users_disagree():
  # Two camps hate each other's favourite; the third arm suits both.
  lead = np.array([[0.9, 0.1, 0.5], [0.1, 0.9, 0.5]])
  p = 0.5 + (lead[:, :, None] - lead[:, None, :]) / 2
  env = etc.envs.make_env(p.astype(np.float32))
  run = lambda rule, kind: etc.fair_etc(
    jax.random.key(0), env, 20_000, 6000, kind, rule=rule
  )
  fair = run('welfare', 'geometric')
  assert float(fair.commit) < 1e-3
  assert float(run('vote', 'geometric').gap) == np.inf
  assert float(run('welfare', 'utilitarian').gap) < 1e-6


def test_inputs_are_clamped_aloud_or_refused():
  env = instances.hard_instance(jax.random.key(0), 4, 2, 0.1)
  key = jax.random.key(1)
  with pytest.warns(UserWarning, match='clamped to 50'):
    assert int(etc.fair_etc(key, env, 50, tau=90).tau) == 50
  with pytest.warns(UserWarning, match='clamped to 4'):
    assert int(etc.fair_etc(key, env, 50, tau=2).tau) == 4
  with pytest.raises(ValueError, match='raise the horizon'):
    etc.fair_etc(key, env, 3)
  with pytest.raises(ValueError, match='kind'):
    etc.fair_etc(key, env, 100, kind='rawls')
  with pytest.raises(ValueError, match='delta'):
    etc.fair_etc(key, env, 100, tau=50, delta=2.0)
  with pytest.raises(ValueError, match='rule'):
    etc.fair_etc(key, env, 100, tau=50, rule='coin')
  lonely = env.replace(feedback='one')
  with pytest.raises(ValueError, match='too few duels'):
    etc.fair_etc(key, lonely, 100, tau=6, design='balanced')


@pytest.mark.parametrize('horizon', [2**31, 2**40, 1000.5, np.nan, 0, -5])
def test_rounds_are_counted_in_int32(horizon):
  env = instances.hard_instance(jax.random.key(0), 4, 2, 0.1)
  for run in (
    etc.fair_etc,
    elimination.fair_elimination,
    greedy.fair_eps_greedy,
  ):
    with pytest.raises(ValueError, match='horizon='):
      run(jax.random.key(1), env, horizon)
    with pytest.raises(ValueError, match='horizon=|tau='):
      etc.fair_etc(jax.random.key(1), env, 2**20, tau=np.nan)


def test_the_longest_horizon_agrees_with_its_arithmetic():
  env = instances.hard_instance(jax.random.key(0), 4, 1, 0.3)
  horizon, tau = 2**31 - 1, 2**30
  found = etc.fair_etc(jax.random.key(1), env, horizon, tau)
  b = np.asarray(borda.borda_scores(env.preference), np.float64)[0]
  assert float(found.commit) == 0
  np.testing.assert_allclose(found.total.pair, tau * (b.max() - 0.5), rtol=1e-5)
  np.testing.assert_allclose(found.b_hat[0], b, atol=1e-3)


@pytest.mark.parametrize(('arms', 'users'), [(2, 40), (4, 5), (8, 2)])
def test_meeting_rounds_suffice_for_every_user(arms, users):
  rounds = sampling.meeting_rounds(arms, users, 'one')
  pairs = arms * (arms - 1) // 2
  assert sampling.meeting_rounds(arms, users, 'all') == pairs
  answers = np.random.default_rng(0).multinomial(
    rounds, np.full(users, 1 / users), 5000
  )
  assert (answers.min(1) < pairs).mean() <= 2e-3


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([1, 2, 4]), st.floats(0.001, 0.1))
def test_elimination_never_drops_an_arm_of_the_best_lottery(seed, users, size):
  rng, b = random_scores(seed, users, 5)
  radius = np.full(b.shape, size)
  b_hat = b + rng.uniform(-size, size, b.shape)
  support = np.asarray(nsw.solve_nsw(b).pi) > 1e-6
  with jax.enable_x64(True):
    stay, _ = elimination.eliminate(
      jnp.asarray(b_hat), jnp.asarray(radius), jnp.ones(5, bool)
    )
  assert (np.asarray(stay) | ~support).all()


def test_elimination_is_the_classic_rule_for_one_user():
  b_hat = jnp.array([[0.7, 0.5, 0.59, 0.61]])
  radius = jnp.full((1, 4), 0.05)
  stay, pi = elimination.eliminate(b_hat, radius, jnp.ones(4, bool))
  np.testing.assert_array_equal(stay, [True, False, False, True])
  np.testing.assert_array_equal(pi, [1, 0, 0, 0])
  stay, _ = elimination.eliminate(
    b_hat, radius, jnp.array([False, True, True, True]), 'utilitarian'
  )
  np.testing.assert_array_equal(stay, [False, False, True, True])


@pytest.mark.parametrize(('s', 'h', 'users'), [(0.1, 0.2, 3), (0.01, 0.0, 8)])
def test_survivor_ratio_solves_its_equation(s, h, users):
  ratio = float(
    elimination.survivor_ratio(jnp.float32(s), jnp.float32(h), users)
  )
  others = (users * (1 + h) - ratio) / (users - 1)
  value = (np.log(ratio) + (users - 1) * np.log(others)) / users
  np.testing.assert_allclose(value, -s, atol=1e-4)
  assert 0 < ratio < 1


def test_elimination_stops_early_where_it_is_easy():
  env = instances.easy_instance(5, 1, 0.4)
  keys = jax.random.split(jax.random.key(0), 20)
  found = jax.vmap(lambda k: elimination.fair_elimination(k, env, 20_000))(keys)
  assert (found.active.sum(1) == 1).all()
  assert (found.pi[:, 0] == 1).all()
  assert int(found.tau.max()) < theory.etc_tau(5, 1, 20_000) / 2
  with pytest.raises(ValueError, match='use fair_etc'):
    elimination.fair_elimination(keys[0], env.replace(feedback='one'), 20_000)
  with pytest.raises(ValueError, match='choose one of'):
    elimination.fair_elimination(keys[0], env, 20_000, kind='egalitarian')


def test_greedy_epochs_cover_the_horizon():
  for horizon in (28, 29, 1000, 12_345):
    epochs = greedy.greedy_epochs(8, 2, horizon)
    assert epochs.length.sum() == horizon
    assert epochs.start[0] == 0
    assert (np.diff(epochs.start) == epochs.length[:-1]).all()
    assert ((epochs.epsilon > 0) & (epochs.epsilon <= 1)).all()
  with pytest.raises(ValueError, match='raise the horizon'):
    greedy.greedy_epochs(8, 2, 27)
  with pytest.raises(ValueError, match='scale'):
    greedy.greedy_epochs(8, 2, 1000, scale=0.0)


@pytest.mark.slow
@pytest.mark.parametrize('feedback', ['all', 'one'])
def test_greedy_learns(feedback):
  env = instances.hard_instance(jax.random.key(0), 4, 2, 0.3, feedback=feedback)
  found = greedy.fair_eps_greedy(jax.random.key(1), env, 20_000)
  assert float(found.total.pair) == float(found.curve.pair[-1])
  assert (np.diff(np.asarray(found.curve.pair)) >= 0).all()
  b = np.asarray(borda.borda_scores(env.preference))
  assert int(found.pi.argmax()) == b[0].argmax()
  assert 0 < int(found.explored) < 20_000

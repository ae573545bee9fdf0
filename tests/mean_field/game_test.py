"""Push, Bellman and exploitability against loops, enumeration and OpenSpiel."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import Partial

from tmlib import mean_field as mf
from tmlib.mean_field import operators

# OpenSpiel 2.0.2, mfg_crowd_modelling_2d, only_distribution_reward, size 5,
# horizon 6, initial_distribution [0|0;1|2] with values [0.75;0.25].
UNIFORM = 1.106408048291534


def small_crowd():
  initial = np.zeros((5, 5))
  initial[0, 0], initial[1, 2] = 0.75, 0.25
  return mf.envs.crowd_2d(5, 6, initial)


def random_policy(game, seed=0):
  rng = np.random.default_rng(seed)
  pi = rng.dirichlet(np.ones(game.num_actions), game.policy_shape[:-1])
  if game.mask is not None:
    pi = pi * game.mask
    pi = pi / pi.sum(-1, keepdims=True)
  return pi


def tables(game, mu, t):
  prob = game.prob(mu, t) if callable(game.prob) else game.prob
  return np.asarray(game.reward_fn(mu, t)), np.asarray(prob)


def slow_push(game, pi):
  flow = [np.asarray(game.mu0)]
  for t in range(game.horizon - 1):
    _, prob = tables(game, jnp.asarray(flow[-1]), t)
    new = np.zeros(game.num_states)
    for s, a, e in np.ndindex(*game.idx.shape):
      new[game.idx[s, a, e]] += flow[-1][s] * pi[t, s, a] * prob[s, a, e]
    flow.append(new)
  return np.stack(flow)


def slow_q(game, mu, pi):
  q = np.zeros(game.policy_shape)
  for t in reversed(range(game.horizon)):
    reward, prob = tables(game, jnp.asarray(mu[t]), t)
    for s, a in np.ndindex(*game.idx.shape[:2]):
      q[t, s, a] = reward[s, a]
      if t + 1 < game.horizon:
        v = (pi[t + 1] * q[t + 1]).sum(-1)
        q[t, s, a] += game.discount * (prob[s, a] @ v[game.idx[s, a]])
  return q


def returns(game, pi, mu):
  return (game.mu0[:, None] * pi[0] * slow_q(game, mu, pi)[0]).sum()


def brute_force(game, pi):
  """Best of all deterministic policies less the policy's own return."""
  mu = slow_push(game, pi)
  legal = np.ones(game.idx.shape[:2], bool) if game.mask is None else game.mask
  rows = [np.flatnonzero(row) for row in legal] * game.horizon
  best = -np.inf
  for choice in itertools.product(*rows):
    one = np.eye(game.num_actions)[np.reshape(choice, game.policy_shape[:-1])]
    best = max(best, returns(game, one, mu))
  return best - returns(game, pi, mu)


def tiny_games():
  rng = np.random.default_rng(3)
  mask = np.array([[True, True], [True, False], [True, True]])
  yield mf.envs.random_linear(0, 3, 2, 2, 3)
  yield mf.envs.random_linear(1, 3, 2, 3, 3, discount=0.7).replace(mask=mask)
  yield mf.envs.garnet(2, 3, 2, 2, 3)
  yield mf.envs.sis_epidemic(4)
  yield mf.envs.left_right()
  idx, prob, legal, sizes = mf.union(
    [rng.integers(0, 2, (2, 2, 2)), rng.integers(0, 2, (2, 1, 1))],
    [rng.dirichlet(np.ones(2), (2, 2)), np.ones((2, 1, 1))],
  )
  coupling = rng.normal(size=(4, 4))
  reward = Partial(lambda c, mu, t: jnp.tile((c @ mu)[:, None], (1, 2)),
                   coupling)  # fmt: skip
  mu0 = [0.3, 0.7, 0.5, 0.5]
  yield mf.MFGame(idx, prob, reward, mu0, 3, mask=legal, populations=sizes)


GAMES = list(tiny_games())


@pytest.mark.parametrize('game', GAMES)
def test_push_values_and_exploitability_are_those_of_loops(game):
  pi = random_policy(game)
  mu = slow_push(game, pi)
  with jax.enable_x64(True):
    np.testing.assert_allclose(mf.push(game, pi), mu, atol=1e-13)
    q = np.asarray(mf.q_values(game, mu, pi))
    np.testing.assert_allclose(q, slow_q(game, mu, pi), atol=1e-12)
    np.testing.assert_allclose(
      mf.expected_return(game, pi), returns(game, pi, mu), atol=1e-12
    )
    found = float(mf.exploitability(game, pi, dtype=jnp.float64))
    assert abs(found - brute_force(game, pi)) < 1e-12
    split = mf.population_exploitability(game, pi)
    assert split.shape == (len(game.populations),)
    assert (np.asarray(split) >= 0).all()


@pytest.mark.parametrize('game', GAMES[:4])
def test_a_best_response_is_one(game):
  pi = random_policy(game)
  with jax.enable_x64(True):
    mu = mf.push(game, pi)
    br = mf.best_response(game, mu)
    gain = mf.expected_return(game, br, mu) - mf.expected_return(game, pi, mu)
    np.testing.assert_allclose(gain, mf.exploitability(game, pi), atol=1e-12)
  if game.mask is not None:
    assert not np.asarray(br)[:, ~game.mask].any()


def test_golden_value_of_the_uniform_policy():
  game = small_crowd()
  with jax.enable_x64(True):
    pi = mf.uniform_policy(game)
    found = float(mf.exploitability(game, pi, dtype=jnp.float64))
  assert abs(found - UNIFORM) < 1e-10
  rough = mf.exploitability(game, mf.uniform_policy(game))
  assert rough.dtype == jnp.float32
  assert abs(float(rough) - UNIFORM) < 1e-5


def test_gather_and_scatter_agree():
  game = mf.envs.crowd_2d(4, 5, noise=0.3, obstacles=np.eye(4, k=1) > 0)
  pi = random_policy(game)
  assert game.inflow is not None
  # All ways lead to one state: a padded list would be long, so there is none.
  table, nothing = np.zeros((9, 2, 2), int), lambda mu, t: jnp.zeros((9, 2))
  star = mf.MFGame(table, table + 0.5, nothing, np.full(9, 1 / 9), 3)
  assert star.inflow is None
  there = mf.push(star, mf.uniform_policy(star))[1:, 0]
  np.testing.assert_allclose(there, 1, rtol=1e-6)
  leaves, static = game.tree_flatten()
  scatter = mf.MFGame.tree_unflatten(static, (*leaves[:-1], None))
  with jax.enable_x64(True):
    a = operators.flow(game, pi)
    b = operators.flow(scatter, pi)
    np.testing.assert_allclose(a, b, atol=1e-14)
    np.testing.assert_allclose(a.sum(-1), 1, atol=1e-13)


def test_populations_without_a_coupling_are_separate_games():
  size, horizon = 3, 4
  game = mf.envs.predator_prey(size, horizon, matrix=np.zeros((2, 2)))
  alone = [
    mf.envs.crowd_2d(size, horizon, block.reshape(size, size))
    for block in np.split(game.mu0, 2)
  ]
  with jax.enable_x64(True):
    pi = [mf.uniform_policy(one) for one in alone]
    split = mf.population_exploitability(game, jnp.concatenate(pi, 1))
    want = [mf.exploitability(g, p) for g, p in zip(alone, pi, strict=True)]
  np.testing.assert_allclose(split, want, atol=1e-12)


def test_exploitability_is_never_negative_in_float32():
  game = mf.envs.crowd_1d(6, 8)
  pi = mf.uniform_policy(game)
  # Uniform is the equilibrium: a difference of returns would round below zero.
  for seed in range(5):
    noisy = np.asarray(pi) + 1e-4 * random_policy(game, seed)
    noisy = noisy / noisy.sum(-1, keepdims=True)
    assert 0 <= float(mf.exploitability(game, noisy)) < 1e-4
  assert float(mf.exploitability(game, pi)) < 1e-6


def test_stationary_values_by_linear_algebra():
  game = mf.envs.garnet(0, 6, 3, 2, None, discount=0.9)
  pi = random_policy(game)
  p = np.zeros((6, 3, 6))
  for s, a, e in np.ndindex(*game.idx.shape):
    p[s, a, game.idx[s, a, e]] += game.prob[s, a, e]
  chain = np.einsum('sa,sat->st', pi, p)
  values, vectors = np.linalg.eig(chain.T)
  mu = np.real(vectors[:, np.argmax(np.real(values))])
  mu = mu / mu.sum()
  with jax.enable_x64(True):
    flow = mf.stationary_flow(game, pi)
    assert bool(flow.converged)
    np.testing.assert_allclose(flow.mu, mu, atol=1e-12)
    reward = np.asarray(game.reward_fn(jnp.asarray(mu), 0))
    v = np.linalg.solve(np.eye(6) - 0.9 * chain, (pi * reward).sum(1))
    q = reward + 0.9 * p @ v
    np.testing.assert_allclose(mf.q_values(game, mu, pi), q, atol=1e-10)
    best = max(
      mu @ np.linalg.solve(
        np.eye(6) - 0.9 * p[np.arange(6), c], reward[np.arange(6), c]
      )
      for c in itertools.product(range(3), repeat=6)
    )  # fmt: skip
    gap = float(mf.exploitability(game, pi))
  assert abs(gap - (best - mu @ v)) < 1e-9


def test_a_periodic_chain_has_a_stationary_population():
  idx = np.array([1, 0]).reshape(2, 1, 1)
  game = mf.MFGame(idx, np.ones((2, 1, 1)), lambda mu, t: mu[:, None],
                   [1.0, 0.0], discount=0.5)  # fmt: skip
  np.testing.assert_allclose(mf.push(game, np.ones((2, 1))), 0.5, atol=1e-6)


@pytest.mark.parametrize('horizon', [1, 3])
def test_one_action_and_one_step(horizon):
  game = mf.MFGame(np.array([[[1]], [[0]]]), np.ones((2, 1, 1)),
                   lambda mu, t: -mu[:, None], [0.9, 0.1], horizon)  # fmt: skip
  pi = mf.uniform_policy(game)
  assert float(mf.exploitability(game, pi)) == 0
  np.testing.assert_allclose(mf.push(game, pi)[0], [0.9, 0.1], rtol=1e-6)


def test_a_batch_of_games_is_vmapped():
  games = [mf.envs.garnet(seed, 5, 2, 2, 4) for seed in range(6)]
  batch = mf.stack_games(games)
  solve = lambda game: mf.fictitious_play(game, 8, log_every=8).gap
  gaps = jax.jit(jax.vmap(solve))(batch)
  for game, gap in zip(games, gaps, strict=True):
    np.testing.assert_allclose(solve(game), gap, rtol=2e-4, atol=1e-6)
  with pytest.raises(ValueError, match='only numbers may differ'):
    mf.stack_games([games[0], mf.envs.garnet(0, 6, 2, 2, 4)])
  with pytest.raises(ValueError, match='empty'):
    mf.stack_games([])


IDX = np.zeros((2, 2, 1), int)
ONE = np.ones((2, 2, 1))
ZERO = lambda mu, t: jnp.zeros((2, 2))


@pytest.mark.parametrize(
  ('arguments', 'error', 'match'),
  [
    ((IDX, ONE, ZERO, [0.5, 0.4], 3), ValueError, 'mu0 sums to 0.9'),
    ((IDX, ONE, ZERO, [1.5, -0.5], 3), ValueError, 'mu0.*negative'),
    ((IDX, ONE, ZERO, [np.nan, 1.0], 3), ValueError, 'mu0 holds NaN'),
    ((IDX, ONE, ZERO, [1.0], 3), ValueError, 'mu0 has shape'),
    ((IDX, 0.9 * ONE, ZERO, [0.5, 0.5], 3), ValueError, 'renormalize=True'),
    ((IDX, ONE[:1], ZERO, [0.5, 0.5], 3), ValueError, 'prob has shape'),
    ((IDX + 2, ONE, ZERO, [0.5, 0.5], 3), ValueError, 'no state'),
    ((ONE, ONE, ZERO, [0.5, 0.5], 3), TypeError, 'integers'),
    ((IDX[0], ONE, ZERO, [0.5, 0.5], 3), ValueError, r'\[S, A, E\]'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 0), ValueError, 'horizon=0'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 2.5), TypeError, 'horizon=2.5'),
    ((IDX, ONE, ZERO, [0.5, 0.5]), ValueError, 'discount=1.0'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 3, 1.5), ValueError, 'discount=1.5'),
    ((IDX, ONE, 3.0, [0.5, 0.5], 3), TypeError, 'not callable'),
    ((IDX, ONE, lambda mu, t: mu, [0.5, 0.5], 3), ValueError, 'reward_fn'),
    ((IDX, lambda mu, t: ONE / 2, ZERO, [0.5, 0.5], 3), ValueError, 'sums to'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 3, 1.0, np.ones(2)), ValueError, 'mask has'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 3, 1.0, [[1, 1], [0, 0]]), ValueError,
     'no legal action in state 1'),
    ((IDX, ONE, ZERO, [1.0, 1.0], 3, 1.0, None, (1, 2)), ValueError, 'add up'),
    ((IDX, ONE, ZERO, [1.0, 1.0], 3, 1.0, None, (1, 1)), ValueError,
     'outside states 1..1 of population 1'),
    ((IDX, ONE, ZERO, [0.5, 0.5], 3, 1.0, None, (1, 1)), ValueError,
     'mu0 of population 0'),
  ],
)  # fmt: skip
def test_bad_games(arguments, error, match):
  with pytest.raises(error, match=match):
    mf.MFGame(*arguments)


def test_renormalizing_is_asked_for():
  game = mf.make_game(IDX, 0.9 * ONE, ZERO, [1.0, 3.0], 3, renormalize=True)
  np.testing.assert_allclose(game.prob, 1)
  np.testing.assert_allclose(game.mu0, [0.25, 0.75])
  with pytest.raises(ValueError, match='no mass'):
    mf.make_game(IDX, ONE, ZERO, [0.0, 0.0], 3, renormalize=True)
  with pytest.raises(ValueError, match='population 1'):
    mf.union([IDX, IDX], [ONE, ONE[:1]])
  with pytest.raises(ValueError, match='one table each'):
    mf.union([IDX], [ONE, ONE])


def test_bad_policies_and_precision():
  game = small_crowd()
  pi = mf.uniform_policy(game)
  with pytest.raises(ValueError, match='policy has shape'):
    mf.push(game, pi[0])
  with pytest.raises(ValueError, match='policy.*sums to'):
    mf.exploitability(game, 0.5 * pi)
  with pytest.raises(ValueError, match='mu has shape'):
    mf.best_response(game, game.mu0)
  with pytest.raises(ValueError, match='enable_x64'):
    mf.exploitability(game, pi, dtype=jnp.float64)
  with pytest.raises(ValueError, match='float32 or float64'):
    mf.exploitability(game, pi, dtype=jnp.float16)
  with pytest.raises(ValueError, match='horizon=6'):
    mf.stationary_flow(game, pi)
  masked = mf.envs.crowd_1d(4, 3, torus=False)
  with pytest.raises(ValueError, match='illegal'):
    mf.push(masked, np.full(masked.policy_shape, 1 / 3))


def test_random_games_of_one_size_share_a_program():
  widths = {mf.envs.garnet(s, 20, 3, 2, 10).inflow.shape for s in range(50)}
  assert len(widths) <= 3
  torus = mf.envs.crowd_2d(5, 6, np.full((5, 5), 1 / 25))
  assert torus.inflow.shape == (25, 25)  # no padding where none is needed

"""Finitely many players against enumeration, simulation and the rates."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mean_field.game_test import random_policy
from tmlib import mean_field as mf


def exact_returns(game, n, pi, policy):
  """Return of player 0 on `policy` among n - 1 on `pi`, by enumeration."""
  states = list(np.ndindex(*(game.num_states,) * n))
  law = {x: np.prod([game.mu0[s] for s in x]) for x in states}
  total = 0.0
  for t in range(game.horizon):
    new = dict.fromkeys(states, 0.0)
    for x, p in law.items():
      if p == 0:
        continue
      mu = np.bincount(x, minlength=game.num_states) / n
      reward = np.asarray(game.reward_fn(jnp.asarray(mu), t))
      prob = game.prob(jnp.asarray(mu), t) if callable(game.prob) else game.prob
      laws = []
      for j, s in enumerate(x):
        row = (policy if j == 0 else pi)[t, s]
        if j == 0:
          total += p * row @ reward[s]
        to = np.zeros(game.num_states)
        for a, e in np.ndindex(*game.idx.shape[1:]):
          to[game.idx[s, a, e]] += row[a] * prob[s, a, e]
        laws.append(to)
      for y in states:
        new[y] += p * np.prod([laws[j][s] for j, s in enumerate(y)])
    law = new
  return total


def exact_gap(game, n, pi):
  best = -np.inf
  pairs = game.horizon * game.num_states
  for choice in itertools.product(range(game.num_actions), repeat=pairs):
    policy = np.eye(game.num_actions)[
      np.reshape(choice, (game.horizon, game.num_states))
    ]
    best = max(best, exact_returns(game, n, pi, policy))
  return best - exact_returns(game, n, pi, pi)


def small():
  return mf.envs.crowd_1d(2, 2, [0.8, 0.2], position=[0.3, 0.0], noise=0.4)


@pytest.mark.parametrize('n', [1, 3])
def test_exploitability_of_few_players_is_that_of_enumeration(n):
  game = small()
  pi = random_policy(game)
  with jax.enable_x64(True):
    found = float(mf.n_player_exploitability(mf.to_n_player(game, n), pi))
    want = exact_gap(game, n, pi)
  assert abs(found - want) < 1e-10


def test_sampled_rewards_of_a_reward_that_is_not_local():
  game = mf.envs.random_linear(0, 2, 2, 2, 2)
  pi = random_policy(game)
  players = mf.to_n_player(game, 3)
  with pytest.raises(ValueError, match='depends on the mass of others'):
    mf.n_player_exploitability(players, pi)
  with jax.enable_x64(True):
    want = exact_gap(game, 3, pi)
  found = mf.n_player_exploitability(
    players, pi, key=jax.random.key(0), samples=4000
  )
  assert abs(float(found) - want) < 0.05
  with pytest.raises(ValueError, match='needs a key'):
    mf.n_player_exploitability(players, pi, samples=5)


def test_simulated_players_have_the_exact_return():
  game = mf.envs.sis_epidemic(3)
  pi = random_policy(game)
  deviation = random_policy(game, 1)
  with jax.enable_x64(True):
    want = exact_returns(game, 2, pi, pi)
    gain = exact_returns(game, 2, pi, deviation) - want
  players = mf.to_n_player(game, 2)
  play = mf.simulate(jax.random.key(1), players, pi, 4000)
  assert play.flow.shape == (4000, 3, 2)
  error = float(play.returns.std()) / np.sqrt(4000)
  assert abs(float(play.returns.mean()) - want) < 5 * error
  found = mf.deviation_gain(jax.random.key(2), players, pi, deviation, 4000)
  assert abs(float(found.gain) - gain) < 5 * float(found.error)
  with pytest.raises(ValueError, match='use deviation_gain'):
    mf.n_player_exploitability(players, pi)


def test_populations_are_simulated_side_by_side():
  game = mf.envs.predator_prey(2, 2)
  pi = mf.uniform_policy(game)
  play = mf.simulate(jax.random.key(0), mf.to_n_player(game, 50), pi, 40)
  assert play.returns.shape == (40, 150)
  for block in np.split(np.asarray(play.flow), 3, -1):
    np.testing.assert_allclose(block.sum(-1), 1, rtol=1e-5)
  flow = np.asarray(play.flow).mean(0)
  np.testing.assert_allclose(flow, mf.push(game, pi), atol=0.05)


def slope(game, pi, sizes):
  gaps = [
    float(mf.n_player_exploitability(mf.to_n_player(game, n), pi))
    for n in sizes
  ]
  return np.polyfit(np.log(sizes), np.log(gaps), 1)[0]


def test_rates_in_the_number_of_players():
  sizes = [256, 4096]
  # With weights 1 and 1/2 the terms in 1/n of the kinked game cancel.
  for kink, weights, shares, power in (
    (False, (1.0, 2.0), mf.envs.LEFT_RIGHT, -1.0),
    (True, (1.0, 0.5), (0.5, 0.5), -0.5),
  ):
    game = mf.envs.left_right(weights, kink=kink)
    with jax.enable_x64(True):
      pi = np.array(mf.uniform_policy(game))
      pi[0, 0] = shares
      assert float(mf.exploitability(game, pi)) < 1e-14
      assert abs(slope(game, pi, sizes) - power) < 0.01


def test_bad_calls():
  game = small()
  with pytest.raises(ValueError, match='n=0'):
    mf.to_n_player(game, 0)
  with pytest.raises(ValueError, match='no episodes'):
    mf.to_n_player(mf.envs.lasry_lions_chain(4), 3)
  players = mf.to_n_player(game, 2)
  pi = mf.uniform_policy(game)
  with pytest.raises(ValueError, match='episodes=0'):
    mf.simulate(jax.random.key(0), players, pi, 0)
  with pytest.raises(ValueError, match='episodes=1'):
    mf.deviation_gain(jax.random.key(0), players, pi, pi, 1)

"""Environments against what is known of their equilibria in closed form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib import mean_field as mf
from tmlib.mean_field.envs import grid

E = mf.envs


def every():
  return {
    'beach_bar': E.beach_bar(6, 4),
    'beach_bar_2d': E.beach_bar_2d(4, 3),
    'crowd_1d': E.crowd_1d(5, 3),
    'crowd_2d': E.crowd_2d(4, 3),
    'four_rooms': E.four_rooms(7, 4),
    'garnet': E.garnet(0, 6, 2, 2, 3),
    'kinetic_congestion': E.kinetic_congestion(3, 4),
    'lasry_lions_chain': E.lasry_lions_chain(5, 4, discount=1.0),
    'left_right': E.left_right(),
    'linear_quadratic': E.linear_quadratic(3, variance=1 / 6),
    'predator_prey': E.predator_prey(3, 3),
    'provider_users': E.provider_users(horizon=3),
    'random_linear': E.random_linear(0, 5, 2, 2, 3),
    'rock_paper_scissors': E.rock_paper_scissors(),
    'sis_epidemic': E.sis_epidemic(4),
    'two_wells': E.two_wells(),
  }


GAMES = every()


@pytest.mark.parametrize('name', GAMES)
def test_mass_is_kept_and_a_solver_lowers_the_gap(name):
  game = GAMES[name]
  pi = mf.uniform_policy(game)
  mu = mf.push(game, pi)
  np.testing.assert_allclose(mu.sum(-1), len(game.populations), rtol=1e-5)
  assert float(mu.min()) >= 0
  before = float(mf.exploitability(game, pi))
  after = float(mf.online_mirror_descent(game, 10, 0.1, log_every=10).gap)
  assert np.isfinite(after)
  assert after <= before + 1e-6


def test_every_constructor_is_tested():
  made = [n for n in E.__all__ if n[0].islower()]
  helpers = {'riccati', 'sis_prevalence', 'wardrop_shares'}
  assert set(made) - helpers == set(GAMES)


def test_moves_by_hand():
  target, inside = grid.moves((3,), grid.LINE_MOVES, torus=False)
  np.testing.assert_array_equal(target, [[0, 1, 0], [1, 2, 0], [2, 2, 1]])
  np.testing.assert_array_equal(inside[[0, 2]], [[1, 1, 0], [1, 0, 1]])
  ring, _ = grid.moves((3,), grid.LINE_MOVES)
  np.testing.assert_array_equal(ring, [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
  idx, prob, mask = grid.noisy_moves((3,), grid.LINE_MOVES, 0.6, torus=False)
  # From cell 0 go right to cell 1, then noise: stay .4 + .2, right .2, left .2.
  np.testing.assert_array_equal(idx[0, 1], [1, 2, 0])
  np.testing.assert_allclose(prob[0, 1], [0.6, 0.2, 0.2])
  # In cell 0 the noise can stay or go right only.
  np.testing.assert_allclose(prob[0, 0], [0.7, 0.3, 0.0])
  assert not mask[0, 2]
  blocked = np.array([False, True, False])
  stuck, free = grid.moves((3,), grid.LINE_MOVES, blocked=blocked)
  np.testing.assert_array_equal(stuck[0], [0, 0, 2])
  np.testing.assert_array_equal(free[0], [1, 0, 1])


def test_a_uniform_crowd_stays_uniform():
  for game in (E.crowd_1d(7, 5, noise=0.3), E.crowd_2d(3, 4)):
    with jax.enable_x64(True):
      pi = mf.uniform_policy(game)
      assert float(mf.exploitability(game, pi)) < 1e-12
      value = float(mf.expected_return(game, pi))
    # Every cell holds 1 / S at every time.
    assert abs(value - game.horizon * np.log(game.num_states)) < 1e-10


def test_walls_keep_the_crowd_out():
  game = E.four_rooms(7, 12)
  flow = np.asarray(mf.push(game, mf.uniform_policy(game)))
  wall = np.zeros((7, 7), bool)
  wall[3] = wall[:, 3] = True
  for door in (1, 5):
    wall[3, door] = wall[door, 3] = False
  assert flow[:, wall.ravel()].max() == 0
  assert flow[-1].reshape(7, 7)[4:, 4:].sum() >= 0
  assert (flow[-1] > 0).sum() > 9  # through a door


def test_the_linear_quadratic_game_is_its_riccati_recursion():
  errors, gains = [], []
  for spacing in (0.5, 0.25, 0.125):
    # An end cost whose gain meets no tie between two actions of the lattice.
    options = dict(variance=1 / 6, time_step=0.5, end_cost=1.3)
    game = E.linear_quadratic(6, spacing=spacing, mean=0.5, **options)
    solution = E.riccati(6, **options)
    # From standing still, so that the first flow keeps its mean.
    still = np.zeros(game.policy_shape)
    still[..., game.num_actions // 2] = 1
    with jax.enable_x64(True):
      result = mf.fixed_point(game, 4, initial=still, log_every=4)
      value = float(mf.expected_return(game, result.pi))
    mu, pi = np.asarray(result.mu), np.asarray(result.pi)
    x = -6 + spacing * np.arange(game.num_states)
    speed = (
      (np.arange(game.num_actions) - game.num_actions // 2) * spacing / 0.5
    )
    mean = mu @ x
    spread = mu[0] @ (x - mean[0]) ** 2
    errors.append(abs(value + solution.eta[0] * spread / 2 + solution.chi[0]))
    near = np.abs(x - mean[0]) < 2
    slope = np.polyfit(x[near], (pi[0] @ speed)[near], 1)[0]
    gains.append(abs(-slope - solution.gain[0]))
    assert float(result.gap) < 2e-2
  # Halving the lattice quarters the error of the value; the mean stays.
  assert errors[2] < 0.02
  assert errors[0] > 3 * errors[1] > 9 * errors[2]
  assert gains[2] < 0.02
  np.testing.assert_allclose(mean, 0.5, atol=0.01)


def test_riccati_by_one_step():
  # T = 1, c = k = D = 1, q = 0: a = -x / 2, eta = (1/4 + 1) + 1/4 = 3/2.
  one = E.riccati(1, time_step=1.0, coupling=0.0, variance=0.4)
  np.testing.assert_allclose(one.gain, [0.5])
  np.testing.assert_allclose(one.eta, [1.5, 1.0])
  np.testing.assert_allclose(one.chi, [0.2, 0.0])


def test_the_epidemic_follows_its_recursion():
  game = E.sis_epidemic(30)
  for out in (0.0, 0.4, 1.0):
    pi = np.zeros(game.policy_shape)
    pi[..., 0], pi[..., 1] = out, 1 - out
    with jax.enable_x64(True):
      flow = np.asarray(mf.push(game, pi))
    np.testing.assert_allclose(
      flow[:, 1], E.sis_prevalence(np.full(30, out)), atol=1e-13
    )
  # Endemic level of those who all go out: 1 - recovery / infection.
  np.testing.assert_allclose(flow[-1, 1], 1 - 0.3 / 0.81, atol=1e-3)


def test_users_of_providers_are_at_wardrop():
  game = E.provider_users((0.9, 0.8, 0.2), (1.0, 0.5, 1.0), gamma=0.4)
  shares = np.asarray(E.wardrop_shares(game))
  # By hand: two are used, u = (.9 + .4 - .4) / 1.5 = .6, x = (.75, .25).
  np.testing.assert_allclose(shares, [0.75, 0.25, 0], atol=1e-6)
  result = mf.online_mirror_descent(game, 400, 1.0, log_every=400)
  np.testing.assert_allclose(result.mu[1:], np.tile(shares, (9, 1)), atol=5e-3)
  assert float(result.gap) < 1e-2
  # A switch that costs more than it can bring is not made.
  stuck = E.provider_users(switch_cost=100.0, initial=[0.2, 0.8])
  kept = mf.online_mirror_descent(stuck, 50, 1.0, log_every=50).mu
  np.testing.assert_allclose(kept, np.tile([0.2, 0.8], (10, 1)), atol=1e-5)


def test_a_full_cell_lets_nobody_in():
  game = E.kinetic_congestion(2, 3, capacity=0.5, initial=[0.25] * 4)
  prob = np.asarray(game.prob(jnp.array([0.5, 0.25, 0.0, 0.25]), 0))
  # Row 1 column 0 (state 2) goes up (action 4) to the full cell 0: it stays.
  np.testing.assert_allclose(prob[2, 4], [0, 1])
  np.testing.assert_allclose(prob[0, 1], [1, 0])  # down to an empty cell
  np.testing.assert_allclose(prob[0, 2], [0.5, 0.5])  # right, half full
  np.testing.assert_allclose(prob[0, 0], [1, 0])  # staying always works


def test_the_stationary_chain_is_solved():
  game = E.lasry_lions_chain(5, aversion=4.0, discount=0.8)
  result = mf.online_mirror_descent(game, 300, 0.2, log_every=300)
  assert float(result.gap) < 0.05
  mu = np.asarray(result.mu)
  np.testing.assert_allclose(mu, mu[::-1], atol=1e-3)  # symmetric
  np.testing.assert_allclose(mu.sum(), 1, rtol=1e-5)


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: E.crowd_2d(1), 'size=1'),
    (lambda: E.crowd_2d(3, 0), 'horizon=0'),
    (lambda: E.crowd_2d(3, 4, np.ones(4)), 'initial has shape'),
    (lambda: E.crowd_2d(3, 4, np.ones((3, 3))), 'mu0 sums to 9'),
    (lambda: E.crowd_2d(3, 4, noise=1.5), 'noise=1.5'),
    (lambda: E.crowd_2d(3, 4, aversion=-1.0), 'aversion=-1.0'),
    (lambda: E.crowd_2d(3, 4, obstacles=np.ones((3, 3))), 'cover the grid'),
    (lambda: E.crowd_2d(3, 4, obstacles=np.ones(2)), 'obstacles has shape'),
    (lambda: E.crowd_2d(2, 4, np.full((2, 2), 0.25), obstacles=np.eye(2)),
     'blocked cell 0'),
    (lambda: E.beach_bar(5, 4, bar=7), 'bar=7'),
    (lambda: E.four_rooms(8), 'must be odd'),
    (lambda: E.sis_epidemic(infection=1.2), 'infection=1.2'),
    (lambda: E.linear_quadratic(coupling=2.0), 'not concave'),
    (lambda: E.linear_quadratic(variance=0.3), 'no multiple of spacing'),
    (lambda: E.garnet(branching=30), 'exceeds states'),
    (lambda: E.predator_prey(matrix=np.ones((2, 3))), 'matrix has shape'),
    (lambda: E.predator_prey(initial=np.ones((3, 2, 2))), 'initial has shape'),
    (lambda: E.provider_users((1.0,), (1.0, 2.0)), 'both are'),
    (lambda: E.provider_users(service=(1.0, 0.0)), 'must be positive'),
    (lambda: E.rock_paper_scissors(1), 'horizon=1'),
    (lambda: E.two_wells(0.0), 'attraction=0.0'),
    (lambda: E.lasry_lions_chain(noise=(0.1, 0.1, 0.1)), 'noise sums to'),
    (lambda: E.kinetic_congestion(capacity=0.0), 'capacity=0.0'),
  ],
)  # fmt: skip
def test_bad_environments(call, match):
  with pytest.raises(ValueError, match=match):
    call()

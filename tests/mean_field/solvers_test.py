"""Solvers against OpenSpiel's values, closed forms and what theory says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mean_field.game_test import random_policy, small_crowd
from tmlib import mean_field as mf
from tmlib.mean_field import occupation, rules, solvers

# OpenSpiel 2.0.2 on the game of game_test; mirror descent with a copied table
# (the stock policy reads the table while it is rewritten).
FICTITIOUS_5 = 0.76188160547727
MIRROR = (1.0028914832444, 0.9088042866135, 0.8233380432182, 0.7457427754072,
          0.6753240305218)  # fmt: skip


def test_golden_values():
  game = small_crowd()
  with jax.enable_x64(True):
    played = mf.fictitious_play(game, 5)
    mirror = mf.online_mirror_descent(game, 5, lr=0.1)
    assert played.exploitability.dtype == jnp.float64
    assert abs(float(played.exploitability[-1]) - FICTITIOUS_5) < 1e-10
    np.testing.assert_allclose(mirror.exploitability, MIRROR, atol=1e-10)
    for result in (played, mirror):
      assert float(result.gap) == float(result.exploitability[-1])
      assert not bool(result.converged)
      found = float(mf.exploitability(game, result.pi))
      assert abs(found - float(result.gap)) < 1e-12
      np.testing.assert_allclose(mf.push(game, result.pi), result.mu)


def test_the_averaged_policy_has_the_averaged_flow():
  game = mf.envs.garnet(1, 6, 3, 2, 4)
  a, b = random_policy(game, 1), random_policy(game, 2)
  with jax.enable_x64(True):
    flow_a, flow_b = mf.push(game, a), mf.push(game, b)
    pi = rules.average_policy(game, a, flow_a, b, flow_b, 0.3)
    want = 0.7 * flow_a + 0.3 * flow_b
    np.testing.assert_allclose(mf.push(game, pi), want, atol=1e-13)


def test_states_that_nobody_reaches_get_a_policy():
  game = mf.envs.crowd_1d(7, 4, [1.0, 0, 0, 0, 0, 0, 0], noise=0.0)
  pi = mf.fictitious_play(game, 3).pi
  assert np.isfinite(pi).all()
  # At t = 0 all are in cell 0: nobody is in cell 3.
  np.testing.assert_allclose(pi[0, 3], 1 / 3, rtol=1e-6)


CALLS = {
  'fixed_point': dict(damping=0.5),
  'fictitious_play': {},
  'online_mirror_descent': dict(lr=0.5),
  'prior_descent': dict(temperature=2.0, inner=2),
  'mf_omo': dict(lr=0.05),
}


@pytest.mark.parametrize('name', CALLS)
def test_left_right_has_its_equilibrium(name):
  game = mf.envs.left_right()
  result = getattr(mf, name)(game, 400, log_every=100, tol=2e-3, **CALLS[name])
  if name == 'fixed_point':
    # Half of the crowd turns at every step: a cycle round the equilibrium.
    assert not bool(result.converged)
    assert float(result.exploitability.min()) > 0.05
    return
  assert bool(result.converged), result.exploitability
  np.testing.assert_allclose(result.mu[1, 1:], mf.envs.LEFT_RIGHT, atol=2e-2)
  if name != 'mf_omo':
    assert result.exploitability.shape == (4,)


def test_rock_paper_scissors_goes_round_unless_averaged():
  game = mf.envs.rock_paper_scissors()
  shares = np.array(mf.envs.ROCK_PAPER_SCISSORS)
  payoff = np.array([[0, -1, 2], [4, 0, -2], [-3, 6, 0]])
  np.testing.assert_allclose(np.ptp(payoff @ shares), 0, atol=1e-12)
  best = mf.fixed_point(game, 9)
  # Pure strategies in turn, so the gap has period three and never falls.
  np.testing.assert_allclose(best.exploitability[:6], best.exploitability[3:])
  assert float(best.exploitability.min()) >= 2
  average = mf.fictitious_play(game, 600, log_every=600)
  assert float(average.gap) < 0.05
  np.testing.assert_allclose(average.mu[1, 1:], shares, atol=0.01)
  mirror = mf.online_mirror_descent(game, 500, lr=0.1, log_every=500)
  np.testing.assert_allclose(mirror.mu[1, 1:], shares, atol=2e-3)


@pytest.mark.slow
def test_mirror_descent_solves_the_monotone_crowd():
  initial = np.zeros(10)
  initial[0] = 1
  game = mf.envs.crowd_1d(10, 10, initial)
  with jax.enable_x64(True):
    result = mf.online_mirror_descent(game, 10_000, lr=0.1, log_every=1000)
    played = mf.fictitious_play(game, 10_000, log_every=1000)
  assert float(result.gap) < 1e-4, result.exploitability
  assert (np.diff(result.exploitability) < 0).all()
  assert float(result.gap) < float(played.gap) < 1e-2


def test_prior_descent_without_a_new_prior_is_the_boltzmann_equilibrium():
  game, heat = mf.envs.left_right(), 1.5
  result = mf.prior_descent(game, 200, heat, inner=1000, log_every=200)
  left = float(result.mu[1, 1])
  # Share of a logit choice between -mu_L and -2 mu_R, uniform prior.
  want = 1 / (1 + np.exp((left - 2 * (1 - left)) / heat))
  assert abs(left - want) < 1e-5


def test_it_stops_at_the_tolerance_and_holds_the_gap():
  game = mf.envs.left_right()
  result = mf.online_mirror_descent(game, 100, 1.0, log_every=2, tol=0.05)
  steps = int(result.steps)
  assert bool(result.converged)
  assert steps < 100
  trace = np.asarray(result.exploitability)
  assert (trace[: steps // 2 - 1] > 0.05).all()
  np.testing.assert_array_equal(trace[steps // 2 - 1 :], result.gap)


def test_the_objective_of_mf_omo_vanishes_at_equilibria_only():
  game = mf.envs.left_right()
  with jax.enable_x64(True):
    pi = np.array(mf.uniform_policy(game))
    pi[0, 0] = mf.envs.LEFT_RIGHT
    at = occupation.variables_of(game, pi)
    assert float(occupation.objective(game, at)) < 1e-25
    for seed in range(3):
      other = random_policy(game, seed)
      at = occupation.variables_of(game, other)
      value = float(occupation.objective(game, at))
      # Consistent variables: what is left is the exploitability.
      assert abs(value - float(mf.exploitability(game, other))) < 1e-12
      worse = at._replace(value=at.value + 0.1)
      assert float(occupation.objective(game, worse)) > value
  stationary = mf.envs.lasry_lions_chain(4)
  with pytest.raises(ValueError, match='finite horizons'):
    mf.mf_omo(stationary, 5)


def test_a_list_of_equilibria_holds_the_unstable_one_too():
  game = mf.envs.two_wells()
  found = mf.find_equilibria(game, jax.random.key(0), 12, n=200)
  lefts = sorted(round(float(e.mu[1, 1]), 2) for e in found)
  assert lefts == [0.0, 0.5, 1.0]
  mixed = next(e for e in found if 0.4 < e.mu[1, 1] < 0.6)
  assert set(mixed.hits) == {'mf_omo'}
  assert sum(sum(e.hits.values()) for e in found) <= 24
  with pytest.raises(ValueError, match='no solver'):
    mf.find_equilibria(game, jax.random.key(0), 2, solvers=('newton',))


def test_step_sizes_are_vmapped():
  game = mf.envs.left_right()
  rates = jnp.array([0.1, 0.5, 1.0])
  solve = lambda lr: mf.online_mirror_descent(game, 20, lr, log_every=20).gap
  together = jax.jit(jax.vmap(solve))(rates)
  np.testing.assert_allclose(together[1], solve(0.5), rtol=1e-4, atol=1e-7)
  assert float(together[2]) < float(together[0])


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda g: mf.online_mirror_descent(g, 5, lr=0.0), 'lr=0.0'),
    (lambda g: mf.online_mirror_descent(g, 5, lr=-1.0), 'lr=-1.0'),
    (lambda g: mf.online_mirror_descent(g, 0), 'n=0'),
    (lambda g: mf.fictitious_play(g, 5, lr=1.5), 'lr=1.5'),
    (
      lambda g: mf.fictitious_play(g, 5, log_every=2),
      'must divide n=5',
    ),
    (lambda g: mf.fictitious_play(g, 5, tol=-1.0), 'tol=-1.0'),
    (lambda g: mf.fixed_point(g, 5, damping=1.0), 'damping=1.0'),
    (lambda g: mf.prior_descent(g, 5, temperature=0.0), 'temperature=0.0'),
    (lambda g: mf.prior_descent(g, 5, inner=0), 'inner=0'),
    (lambda g: mf.mf_omo(g, 5, lr=np.nan), 'lr=nan'),
    (lambda g: mf.fictitious_play(g, 5, initial=np.ones((1, 2))), 'shape'),
    (lambda g: solvers.run_rule(g, 'newton', 5, {}), 'no solver'),
  ],
)
def test_bad_calls(call, match):
  with pytest.raises(ValueError, match=match):
    call(mf.envs.left_right())

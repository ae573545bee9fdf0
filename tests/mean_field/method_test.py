"""Solvers and learners in the shared loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib import mean_field as mf
from tmlib import train


def run(build, steps, count, **options):
  ids = {'id': np.arange(count, dtype=np.int32)}
  chosen = {'log_every': steps, 'steps_per_call': steps} | options
  return train.fit(
    build,
    steps=steps,
    evaluations={'all': train.pass_data(ids, 4)},
    options=train.Options(**chosen),
    writers=[],
  )


def test_the_loop_folds_the_same_solver():
  game = mf.envs.beach_bar(6, 4)
  result = run(mf.solver_method(game, 'fictitious_play', lr=None), 20, 4)
  want = mf.fictitious_play(game, 20, log_every=20)
  np.testing.assert_allclose(
    result.metrics['exploitability'], want.gap, rtol=1e-4
  )
  found = result.evaluations['all'][0]
  np.testing.assert_allclose(found.outputs['flow'], want.mu, atol=1e-5)
  assert found.outputs['policy'].shape == (4, 6, 3)
  with pytest.raises(ValueError, match='no solver'):
    mf.solver_method(game, 'newton')


def test_a_solver_stops_at_its_gap():
  game = mf.envs.left_right()
  result = train.fit(
    mf.solver_method(game, 'online_mirror_descent', lr=1.0),
    steps=200,
    stop=lambda metrics: metrics['exploitability'] < 1e-2,
    options=train.Options(log_every=10, steps_per_call=10),
    writers=[],
  )
  assert result.status == 'stopped'
  assert result.step < 200


@pytest.mark.slow
def test_munchausen_with_a_free_table_is_mirror_descent():
  game = mf.envs.crowd_1d(4, 3, [0.7, 0.1, 0.1, 0.1], noise=0.2)
  build = mf.munchausen_method(
    game, temperature=4.0, fits=400, batch_size=256, hidden=(),
    learning_rate=2e-2, target_rate=0.2, explore=0.5,
  )  # fmt: skip
  result = run(build, 4, 3)
  want = mf.online_mirror_descent(game, 4, lr=1 / 4)
  pi = result.evaluations['all'][0].outputs['policy']
  np.testing.assert_allclose(pi, want.pi, atol=0.05)
  assert abs(result.metrics['exploitability'] - float(want.gap)) < 0.05


@pytest.mark.slow
def test_munchausen_with_a_network_follows_mirror_descent():
  game = mf.envs.beach_bar(6, 4)
  before = float(mf.exploitability(game, mf.uniform_policy(game)))
  build = mf.munchausen_method(
    game, temperature=3.0, fits=100, batch_size=128, hidden=(32,),
    learning_rate=3e-3,
  )  # fmt: skip
  result = run(build, 40, 4)
  want = float(mf.online_mirror_descent(game, 40, lr=1 / 3).gap)
  assert abs(result.metrics['exploitability'] - want) < 0.05 * before


@pytest.mark.parametrize(
  'method',
  [mf.mf_q_method, pytest.param(mf.mf_ac_method, marks=pytest.mark.slow)],
)
def test_spins_agree_in_the_cold_only(method):
  heat = np.array([0.6, 3.0])
  build = method(mf.ising_env(8, 150), heat, learning_rate=1e-2)
  result = run(build, 450, 2)
  found = result.evaluations['all'][0].outputs
  np.testing.assert_allclose(found['temperature'], heat)
  # Onsager: .999 at .6, zero at 3, where 64 spins leave about 1 / 8.
  assert found['measure'][0] > 0.97
  assert found['measure'][1] < 0.3


def test_mf_q_learns_the_reward_table():
  env = mf.ising_env(8, 100)
  build = mf.mf_q_method(env, np.full(4, 1.5), learning_rate=1e-2)
  result = run(build, 400, 4)
  x = jnp.array([[1, k / 4, 1 - k / 4] for k in range(5)], jnp.float32)
  params = result.state.learner.params
  from tmlib.mean_field.networks import MLP

  q = MLP(2, (32,)).apply(params, x)
  np.testing.assert_allclose(q[:, 0], np.arange(-2, 3), atol=0.15)
  np.testing.assert_allclose(q[:, 1], -np.arange(-2, 3), atol=0.15)


def test_order_parameter_by_hand():
  # Yang: at T_c it vanishes, far below it is one.
  m = mf.magnetisation([0.5, mf.CRITICAL_TEMPERATURE, 2.0])
  np.testing.assert_allclose(m[0], (1 - np.sinh(2.0) ** -4) ** 0.125)
  np.testing.assert_allclose(m[1:], 0, atol=1e-3)
  np.testing.assert_allclose(mf.CRITICAL_TEMPERATURE, 2.26918531421 / 2)


@pytest.mark.slow
@pytest.mark.parametrize('method', [mf.mf_q_method, mf.mf_ac_method])
def test_players_of_left_right_reach_the_logit_equilibrium(method):
  from tmlib.mean_field.networks import MLP

  heat = 0.5
  env = mf.player_env(mf.to_n_player(mf.envs.left_right(), 100))
  build = method(env, np.full(4, heat), learning_rate=1e-2, target_rate=0.05)
  result = run(build, 600, 4)
  outputs = 2 if method is mf.mf_q_method else 4
  # In the centre, at time 0, not yet having seen anybody act.
  x = jnp.array([1.0, 0, 0, 0, 0.5, 0.5])
  params = result.state.learner.params
  out = np.asarray(MLP(outputs, (32,)).apply(params, x))[-2:] / heat
  left = 1 / (1 + np.exp(out[1] - out[0]))
  # left = 1 / (1 + exp((left - 2 (1 - left)) / T)) at T = 1/2: .5997.
  want = 0.5
  for _ in range(200):
    want = (want + 1 / (1 + np.exp((3 * want - 2) / heat))) / 2
  assert abs(left - want) < 0.05


def test_environments_are_split_over_devices_without_a_change():
  build = mf.mf_q_method(mf.ising_env(4, 20), np.full(4, 1.0))
  rules = (('world', 'shard_dim:data:0'),)
  a, b = run(build, 30, 4), run(build, 30, 4, rules=rules)
  assert len(jax.tree.leaves(b.state.world)[0].sharding.device_set) == 4
  np.testing.assert_array_equal(a.state.world.state.up, b.state.world.state.up)


def test_bad_calls():
  env = mf.ising_env(4, 20)
  game = mf.envs.crowd_1d(4, 3)
  with pytest.raises(ValueError, match='temperature'):
    mf.mf_q_method(env, [1.0, 0.0])
  with pytest.raises(ValueError, match='learning_rate=0'):
    mf.mf_ac_method(env, 1.0, learning_rate=0.0)
  with pytest.raises(ValueError, match='side=5'):
    mf.ising_env(5)
  with pytest.raises(ValueError, match='one population'):
    mf.player_env(mf.to_n_player(mf.envs.predator_prey(2, 2), 2))
  with pytest.raises(ValueError, match='temperature=0'):
    mf.munchausen_method(game, temperature=0.0)
  with pytest.raises(ValueError, match='finite horizon'):
    mf.munchausen_method(mf.envs.lasry_lions_chain(4))
  made = mf.mf_q_method(env, 1.0)(None)
  with pytest.raises(ValueError, match='ids of environments'):
    made.evaluate(made.init(jax.random.key(0), None), None)

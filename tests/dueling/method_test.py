"""The sequential algorithms as Methods: contract and closed forms."""

import jax
import numpy as np
import pytest

from tmlib import train
from tmlib.dueling import (
  elimination,
  etc,
  glm_etc,
  greedy,
  instances,
  method,
  policies,
)

HORIZON = 240


def tabular(**options):
  return instances.hard_instance(
    jax.random.key(0), 4, 2, 0.25, groups=2, **options
  )


def cyclic():
  return instances.glm_cyclic_instance(jax.random.key(0), 5, 3, 2)


def build(policy, simulations=8, **options):
  env = cyclic() if policy == 'glm_etc' else tabular()
  return method.bandit_method(
    env, policy, HORIZON, simulations, tau=60, **options
  )


def agree(slow, fast):
  """Equal means by a z-test at four standard errors."""
  slow, fast = np.asarray(slow), np.asarray(fast)
  error = np.sqrt(slow.var() / len(slow) + fast.var() / len(fast))
  assert abs(slow.mean() - fast.mean()) < 4 * error + 1e-3 * fast.mean()


def closed_form(policy):
  """The same algorithm by counts alone, one run; None where there is none."""
  env = tabular()
  return {
    'etc': lambda k: etc.fair_etc(k, env, HORIZON, 60),
    'vote': lambda k: etc.fair_etc(k, env, HORIZON, 60, rule='vote'),
    'eps_greedy': lambda k: greedy.fair_eps_greedy(k, env, HORIZON),
    'elimination': lambda k: elimination.fair_elimination(
      k, env, HORIZON, 60, delta=0.5
    ),
    'glm_etc': lambda k: glm_etc.fair_glm_etc(k, cyclic(), HORIZON, 60),
  }.get(policy)


@pytest.mark.parametrize('policy', policies.POLICIES)
def test_contract_and_closed_form(policy):
  sims = 400
  built = build(policy, sims, delta=0.5)
  made = built(None)
  state = made.init(jax.random.key(1), None)
  shapes = jax.eval_shape(made.update, state, None)[0]
  assert jax.tree.structure(shapes) == jax.tree.structure(state)
  for old, new in zip(
    jax.tree.leaves(state)[1:], jax.tree.leaves(shapes)[1:], strict=True
  ):
    assert (old.shape, old.dtype, old.weak_type) == (
      new.shape,
      new.dtype,
      new.weak_type,
    )
  final, metrics = method.play(jax.random.key(1), built, HORIZON)
  assert int(final.step) == HORIZON
  for leaf in jax.tree.leaves(final)[1:]:
    assert np.isfinite(np.asarray(leaf, float)).all()
  np.testing.assert_allclose(final.view.lottery.sum(1), 1, rtol=1e-5)
  assert (final.regret.weak <= final.regret.pair + 1e-3).all()
  assert (final.regret.pair <= final.regret.strong + 1e-3).all()
  curve = np.asarray(metrics['pair_regret'])
  assert (np.diff(curve) >= -1e-4).all()
  run = closed_form(policy)
  if run is not None:
    keys = jax.random.split(jax.random.key(2), sims)
    total = jax.vmap(run)(keys).total
    agree(final.regret.pair, total.pair)
    agree(final.regret.weak, total.weak)


def test_a_simulation_does_not_depend_on_its_mates():
  few, _ = method.play(jax.random.key(1), build('vote', 3), HORIZON)
  many, _ = method.play(jax.random.key(1), build('vote', 8), HORIZON)
  np.testing.assert_array_equal(few.view.wins, many.view.wins[:3])
  np.testing.assert_allclose(few.regret.pair, many.regret.pair[:3], rtol=1e-6)


def test_the_loop_folds_shards_and_evaluates_it():
  want, _ = method.play(jax.random.key(7), build('vote', 8), HORIZON)
  ids = {'id': np.arange(8, dtype=np.int32), 'weight': np.ones(8, np.float32)}
  result = train.fit(
    build('vote', 8),
    steps=HORIZON,
    seed=7,
    evaluations={'simulations': train.pass_data(ids, batch_size=8)},
    options=train.Options(
      steps_per_call=60,
      log_every=120,
      rules=(('view|commitment|regret|carry', 'shard_dim:data:0'),),
    ),
    writers=[],
  )
  np.testing.assert_array_equal(result.state.view.wins, want.view.wins)
  found = result.evaluations['simulations'][0].outputs
  np.testing.assert_allclose(found['pair_regret'], want.regret.pair, rtol=1e-6)
  assert found['lottery'].shape == (8, 4)


def test_runs_are_vmapped_over_it():
  result = train.fit(
    build('vote', 2),
    steps=HORIZON,
    seed=7,
    runs=4,
    options=train.Options(steps_per_call=120, log_every=120, parallel='pmap'),
    writers=[],
  )
  for run in range(4):
    key = jax.random.fold_in(jax.random.key(7), run)
    alone, _ = method.play(key, build('vote', 2), HORIZON)
    np.testing.assert_array_equal(result.state.view.wins[run], alone.view.wins)


@pytest.mark.parametrize(
  'options', [{'outcomes': 'shared'}, {'feedback': 'one'}]
)
def test_other_ways_to_answer(options):
  env = tabular(**options)
  built = method.bandit_method(env, 'etc', 2000, 50, tau=600)
  final, _ = method.play(jax.random.key(0), built, 600)
  answers = final.view.counts.sum(1)
  expected = 1 if 'feedback' in options else 0
  assert final.view.counts.shape[-1] == 1 + expected
  np.testing.assert_allclose(answers.sum(-1), 600)
  p = np.asarray(env.preference)[
    :, *map(np.asarray, policies.regret.pair_order(4))
  ]
  rate = (final.view.wins.sum(0) / final.view.counts.sum(0)).T
  np.testing.assert_allclose(rate, p, atol=0.05)


def test_counts_do_not_stop_at_two_to_the_24():
  # In float32 2^24 + 1 is 2^24.
  built = build('etc', 2)
  made = built(None)
  state = made.init(jax.random.key(0), None)
  full = jax.tree.map(lambda x: x + 2**24, state.view.counts)
  state = state._replace(view=state.view._replace(counts=full))
  state = made.update(state, None)[0]
  assert (state.view.counts.sum(1) == 6 * 2**24 + 1).all()


def test_two_arms_and_one_user():
  env = instances.easy_instance(2, 1, 0.4)
  for policy in policies.POLICIES:
    if policy != 'glm_etc':
      built = method.bandit_method(env, policy, 2000, 4, delta=0.1)
      final, _ = method.play(jax.random.key(0), built, 200)
      assert np.isfinite(np.asarray(final.regret.pair)).all()


def test_borda_ucb_is_weakly_good_and_strongly_bad():
  env = instances.easy_instance(4, 1, 0.4)
  built = method.bandit_method(env, 'borda_ucb', 2000, 20, delta=0.1)
  final, metrics = method.play(jax.random.key(0), built, 2000)
  half = np.asarray(metrics['pair_regret'])[999]
  assert float(final.regret.pair.mean()) > 1.7 * half
  assert float(final.regret.weak.mean()) < 0.35 * float(
    final.regret.pair.mean()
  )


def test_bad_input():
  env = tabular()
  with pytest.raises(ValueError, match='policy'):
    method.bandit_method(env, 'thompson', 100, 1)
  with pytest.raises(ValueError, match='simulations'):
    method.bandit_method(env, 'etc', 100, 0)
  with pytest.raises(ValueError, match='GlmEnv'):
    method.bandit_method(env, 'glm_etc', 100, 1)
  with pytest.raises(ValueError, match='use fair_etc'):
    method.bandit_method(env.replace(feedback='one'), 'elimination', 100, 1)
  with pytest.warns(UserWarning, match='clamped'):
    method.bandit_method(env, 'etc', 100, 1, tau=1000)
  made = build('etc')(None)
  with pytest.raises(ValueError, match='ids'):
    made.evaluate(made.init(jax.random.key(0), None), None)

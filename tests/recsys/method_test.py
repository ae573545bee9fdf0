"""Training in stages: what learns, what stays, resume, the rule of the bias."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.recsys import support
from tmlib import train
from tmlib.moe import update_bias
from tmlib.recsys import adapter, dumoe, method

# Networks are compiled in nearly every test.
pytestmark = pytest.mark.slow


def optimizer(steps):
  del steps
  return optax.adam(1e-2), optax.constant_schedule(1e-2)


def tags():
  return support.world()[0].tags


def stages(scheme='three', steps=20, config=None, **options):
  return method.dumoe_stages(
    config or support.config(), steps, optimizer, scheme=scheme, tags=tags(),
    kmeans_batches=2, **options,
  )  # fmt: skip


def fit(scheme='three', steps=20, **options):
  windows, queries = support.arrays()
  return train.fit(
    data=train.array_data(windows, 8),
    stages=stages(scheme, steps, options.pop('config', None)),
    evaluations={'test': train.pass_data(queries, 12)},
    options=train.Options(log_every=1, save_every=3), writers=(), **options,
  )  # fmt: skip


def test_loss_against_a_loop_in_float64():
  config = support.config(
    experts=0, interest=0.3, short_path=False, ahead=3, ahead_decay=0.5
  )
  batch = support.take(support.arrays()[0], slice(0, 3))
  batch['weight'] = np.array([1, 0, 2], np.float32)
  build = method.build_stage('backbone', config, optax.sgd(0.0), tags=tags())
  made = build(None)
  state = made.init(jax.random.key(0), batch)
  _, metrics = jax.jit(made.update)(state, batch)
  z = np.asarray(dumoe.encode(state.params, config, batch).z, np.float64)
  f = lambda x: np.asarray(x, np.float64)
  items = f(state.params['encoder']['items'])
  heads = {k: f(v) for k, v in state.params['heads'].items()}
  total = weight = 0.0
  for b in range(3):
    for t in range(6):
      target = batch['target'][b, t]
      if not target:
        continue
      logits = (items @ z[b, t] + heads['item_bias'])[1:]
      later = batch['target'][b, t : t + 3]
      share = 0.5 ** np.arange(len(later))
      cross = np.log(np.exp(logits).sum())
      cross -= share @ logits[later - 1] / share.sum()
      p = 1 / (1 + np.exp(-(z[b, t] @ heads['tags'] + heads['tag_bias'])))
      y = tags()[target - 1]
      binary = -np.mean(y * np.log(p) + (1 - y) * np.log(1 - p))
      total += batch['weight'][b] * (cross + 0.3 * binary)
      weight += batch['weight'][b]
  np.testing.assert_allclose(metrics['loss'], total / weight, rtol=1e-5)


def start(stage, config):
  batch = support.take(support.arrays()[0], slice(0, 8))
  made = method.build_stage(stage, config, optax.adam(1e-2), tags=tags())(None)
  return made, made.init(jax.random.key(0), batch), batch


@pytest.mark.parametrize('stage', sorted(dumoe.STAGES))
def test_a_stage_moves_its_groups_and_no_other(stage):
  config = support.config(balance='bias')
  made, state, batch = start(stage, config)
  params = state.params | {
    'centres': jax.random.normal(jax.random.key(1), (4, 8))
  }
  state = state.replace(params=params)
  new, metrics = jax.jit(made.update)(state, batch)
  learn, source = dumoe.STAGES[stage]
  for group in dumoe.GROUPS:
    before, after = state.params[group], new.params[group]
    same = [
      bool((a == b).all())
      for a, b in zip(
        jax.tree.leaves(before), jax.tree.leaves(after), strict=True
      )
    ]
    if group not in learn:
      assert all(same), group
    elif group != 'gate' or stage in ('distil', 'joint'):
      # Without output of the experts yet, the task says nothing to the gate.
      assert not all(same), group
  assert np.isfinite(metrics['loss'])


@pytest.mark.parametrize('stage', ['experts', 'joint'])
def test_diversity_pulls_on_experts_that_learn(stage):
  moved = []
  for weight in (0.0, 1.0):
    made, state, batch = start(stage, support.config(diversity=weight))
    experts = state.params['experts']
    w_out = jax.random.normal(jax.random.key(3), experts['w_out'].shape)
    centres = jax.random.normal(jax.random.key(1), (4, 8))
    params = state.params | {
      'experts': experts | {'w_out': w_out}, 'centres': centres,
    }  # fmt: skip
    new, _ = jax.jit(made.update)(state.replace(params=params), batch)
    moved.append(new.params['experts']['w_out'])
  assert float(jnp.abs(moved[0] - moved[1]).max()) > 1e-4


def test_the_bias_follows_the_rule_of_the_load():
  config = support.config(balance='bias')
  made, state, batch = start('gate', config)
  new, _ = jax.jit(made.update)(state, batch)
  z = dumoe.encode(state.params, config, batch).z
  valid = jnp.asarray((batch['item'] > 0) & (batch['target'] > 0))
  x = adapter.routing_input(config, z, valid)
  routing, _ = adapter.route(state.params, config, x, 'gate', valid)
  load = jax.nn.one_hot(routing.experts, 4).sum((0, 1))
  want = update_bias(state.params['bias'], load, 1e-3)
  np.testing.assert_allclose(new.params['bias'], want, atol=1e-9)


def test_noise_of_the_gate_belongs_to_the_example():
  config = support.config(noise_std=2.0, load=0.1, importance=0.1)
  made, state, batch = start('joint', config)
  rolled = jax.tree.map(lambda x: np.roll(x, 3, 0), batch)
  update = jax.jit(made.update)
  _, one = update(state, batch)
  _, two = update(state, rolled)
  np.testing.assert_allclose(one['loss'], two['loss'], rtol=1e-5)
  _, other = update(state.replace(step=state.step + 1), batch)
  assert abs(float(other['loss'] - one['loss'])) > 1e-7


@pytest.fixture(scope='module')
def whole():
  return fit()


def test_three_stages_of_one_run(whole):
  assert whole.status == 'finished'
  assert whole.step == 20
  assert [c['stage'] for c in whole.costs] == [
    'backbone', 'experts', 'distil', 'gate',
  ]  # fmt: skip
  centres = np.asarray(whole.state.params['centres'])
  assert np.ptp(centres, axis=0).max() > 0.1
  assert float(jnp.abs(whole.state.params['experts']['w_out']).max()) > 0
  assert 0 <= whole.evaluations['test'][0].metrics['hit_rate_10'] <= 1


# In the backbone, in the experts, at a boundary.
@pytest.mark.parametrize('until', [3, 16, 17])
def test_resume_in_the_middle_is_bitwise(whole, until, tmp_path):
  read = []

  def stop(metrics):
    read.append(metrics)
    return len(read) == until

  first = fit(workdir=tmp_path, stop=stop)
  assert first.status == 'stopped'
  second = fit(workdir=tmp_path)
  assert second.step == 20
  for a, b in zip(
    jax.tree.leaves(whole.state.params),
    jax.tree.leaves(second.state.params),
    strict=True,
  ):
    np.testing.assert_array_equal(a, b)


def test_per_device_mode_equals_jit():
  config = support.config(
    dropout=0.2, noise_std=1.0, load=0.1, importance=0.1, gshard=0.1,
    diversity=0.1,
  )  # fmt: skip
  build = method.build_stage('joint', config, optax.sgd(0.1), tags=tags())
  windows, _ = support.arrays()
  runs = [
    train.fit(
      build, train.array_data(windows, 8), steps=4,
      options=train.Options(log_every=2, parallel=mode), writers=(),
    )
    for mode in ('jit', 'pmap')
  ]  # fmt: skip
  for a, b in zip(
    jax.tree.leaves(runs[0].state.params),
    jax.tree.leaves(runs[1].state.params),
    strict=True,
  ):
    np.testing.assert_allclose(a, b, atol=2e-6)
  for name, value in runs[0].metrics.items():
    np.testing.assert_allclose(value, runs[1].metrics[name], atol=2e-5)
  with pytest.raises(ValueError, match='microbatches=2'):
    method.build_stage(
      'joint', config, optax.sgd(0.1), tags=tags(), microbatches=2
    )(None)


def test_runs_have_centres_of_their_own():
  windows, queries = support.arrays()
  result = train.fit(
    data=train.run_data(windows, np.ones((2, len(windows['user']))), 8),
    stages=stages(), runs=2,
    evaluations={'test': train.pass_data(queries, 12)},
    options=train.Options(log_every=5), writers=(),
  )  # fmt: skip
  # The mesh may pad the runs; those asked for come first.
  centres = np.asarray(result.state.params['centres'])[:2]
  assert centres.shape == (2, 4, 8)
  assert abs(centres[0] - centres[1]).max() > 1e-3
  ranks = [one.outputs['rank'] for one in result.evaluations['test']]
  assert len(ranks) == 2


def test_outputs_of_an_evaluation():
  config = support.config()
  outputs = method.Outputs(top=3, details=True, drop=True)
  build = method.build_stage(
    'joint', config, optax.sgd(0.1), tags=tags(), outputs=outputs
  )
  made = build(None)
  windows = support.take(support.arrays()[0], slice(0, 8))
  queries = support.take(support.arrays()[1], slice(0, 8))
  queries['seen'][0, 1:29] = True
  state = made.init(jax.random.key(0), windows)
  out = jax.jit(made.evaluate)(state, queries)['outputs']
  assert out['dropped'].shape == (8, 4)
  # The experts add nothing yet.
  np.testing.assert_array_equal(out['dropped'], np.tile(out['rank'], (4, 1)).T)
  assert out['tags'].shape == (8, 6)
  # Without a target: recommendations, and nothing that looks like a figure.
  del queries['target']
  found = jax.jit(made.evaluate)(state, queries)
  assert not found['sums']
  assert set(found['outputs']) == {'id', 'top'}
  top = np.asarray(found['outputs']['top'])
  assert top.shape == (8, 3)
  # Two candidates are left to the first: the third place is blank.
  assert sorted(top[0]) == [0, 29, 30]
  assert top[1:].min() > 0


def test_sasrec_learns_a_cycle():
  from tmlib import recsys
  from tmlib.recsys import windows

  n = 240
  user = np.repeat(np.arange(12), 20)
  item = (np.tile(np.arange(20), 12) + user) % 7
  table = recsys.make_events(user, item, np.arange(n))
  split = recsys.leave_last_out(recsys.order_events(table, 'file'))
  made = method.sasrec_method(
    7, optax.adam(1e-2), dim=16, hidden=16, blocks=1, dropout=0.0
  )
  result = train.fit(
    made, train.array_data(windows.training_windows(split, 8), 12), steps=60,
    evaluations={'test': train.pass_data(
      windows.query_windows(split, 8, mask_seen=False), 12)},
    writers=(),
  )  # fmt: skip
  np.testing.assert_array_equal(
    result.evaluations['test'][0].outputs['rank'], 1
  )


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: stages('four '), 'scheme'),
    (lambda: stages(steps=3), 'without a step'),
    (lambda: stages(config=support.config(experts=0)), 'experts=0'),
    (lambda: dumoe.stage_optimizer('gates', optax.sgd(1.0)), 'gates'),
    (
      lambda: method.build_stage('joint', support.config(), optax.sgd(1.0)),
      'tags have shape None',
    ),
  ],
)
def test_bad_stages(call, match):
  with pytest.raises(ValueError, match=match):
    call()

"""No layout changes the numbers, and every resume is exact."""

import functools

import jax
import numpy as np
import pytest

from tests.train import toy
from tmlib import train
from tmlib.train import loop

STEPS = 50


def slow(*cases):
  return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


def fit(monkeypatch=None, devices=4, parallel='jit', microbatches=1, **options):
  if monkeypatch:
    mesh = functools.partial(train.make_mesh, devices=jax.devices()[:devices])
    monkeypatch.setattr(loop, 'make_mesh', mesh)
  workdir = options.pop('workdir', None)
  steps = options.pop('steps', STEPS)
  rows = toy.Rows()
  result = train.fit(
    toy.build(microbatches=microbatches, ema_decay=0.9),
    toy.data(),
    steps=steps,
    seed=3,
    evaluations={'held_out': toy.held_out()},
    options=train.Options(parallel=parallel, log_every=1, **options),
    workdir=workdir,
    writers=[rows],
  )
  return result, rows


def numbers(result, rows):
  found = result.evaluations['held_out'][0]
  return {
    'state': result.state,
    'loss': rows.column('loss'),
    'abs': rows.column('abs'),
    'prediction': found.outputs['prediction'],
    'mse': np.array(found.sums['mse']),
  }


@pytest.fixture(scope='module')
def one_device():
  with pytest.MonkeyPatch.context() as patch:
    return numbers(*fit(patch, 1))


def test_the_task_is_one_that_moves(one_device):
  assert one_device['loss'][-10:].mean() < 0.8 * one_device['loss'][:10].mean()
  assert len(one_device['loss']) == STEPS
  assert one_device['prediction'].shape == (21,)


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
@pytest.mark.parametrize(
  ('devices', 'microbatches'),
  # Four micro-batches of eight examples do not fit four devices.
  [(1, 2), (2, 4), (4, 1), *slow((1, 4), (2, 1), (2, 2), (4, 2))],
)
def test_layouts_agree(
  monkeypatch, one_device, parallel, devices, microbatches
):
  got = numbers(*fit(monkeypatch, devices, parallel, microbatches))
  toy.assert_close(got, one_device)


@pytest.mark.parametrize(
  'rules',
  [
    (('params|mu|nu', 'fsdp:data'),),
    (('hidden/w', 'shard_dim:data:1'), ('.', 'replicate')),
  ],
)
def test_sharded_states_agree(one_device, rules):
  result, rows = fit(rules=rules)
  specs = [x.sharding.spec for x in jax.tree.leaves(result.state)]
  assert any('data' in spec for spec in specs)
  toy.assert_close(numbers(result, rows), one_device)


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_the_model_axis_agrees(one_device, parallel):
  rules = (('hidden/w', 'shard_dim:model:1'), ('out/w', 'shard_dim:model:0'))
  result, rows = fit(parallel=parallel, mesh=(1, 2, 2), rules=rules)
  spec = result.state.params['hidden']['w'].sharding.spec
  assert 'model' in spec
  toy.assert_close(numbers(result, rows), one_device)


def test_a_state_split_over_data_is_refused_per_device():
  with pytest.raises(ValueError, match="params/hidden/w over 'data'"):
    fit(parallel='pmap', rules=(('hidden/w', 'fsdp:data'),))


@pytest.mark.parametrize(
  ('parallel', 'microbatches', 'folds'),
  [
    ('jit', 1, 1),
    ('pmap', 2, 1),
    ('jit', 1, 5),
    *slow(('pmap', 1, 1), ('jit', 2, 1)),
  ],
)
def test_resume_is_bitwise(tmp_path, parallel, microbatches, folds):
  run = functools.partial(fit, parallel=parallel, microbatches=microbatches)
  if folds > 1:
    run = functools.partial(folded, folds=folds)
  whole, _ = run()
  run(workdir=tmp_path, steps=20)
  resumed, rows = run(workdir=tmp_path)
  assert min(rows.rows) > 20
  toy.assert_same(resumed.state, whole.state)
  toy.assert_same(
    resumed.evaluations['held_out'][0].outputs,
    whole.evaluations['held_out'][0].outputs,
  )


def folded(folds, workdir=None, steps=STEPS):
  rows = toy.Rows()
  options = train.Options(steps_per_call=folds, log_every=folds)
  result = train.fit(
    toy.build(ema_decay=0.9), toy.data(), steps=steps, seed=3, options=options,
    workdir=workdir, writers=[rows],
    evaluations={'held_out': toy.held_out()},
  )  # fmt: skip
  return result, rows


def test_folded_steps_are_the_same_steps(one_device):
  result, rows = folded(5)
  toy.assert_close(result.state, one_device['state'])
  # Of several steps, the last one's scalars are reported.
  np.testing.assert_allclose(
    rows.column('loss'), one_device['loss'][4::5], atol=1e-6
  )


def test_a_checkpoint_of_one_layout_resumes_in_another(
  monkeypatch, tmp_path, one_device
):
  layouts = [(4, 'pmap', 1), (1, 'jit', 2), (2, 'jit', 1), (4, 'pmap', 2)]
  for i, layout in enumerate(layouts):
    last = 50 if i == 3 else 12 * (i + 1)
    result, rows = fit(monkeypatch, *layout, workdir=tmp_path, steps=last)
  got = numbers(result, rows)
  for name in ('state', 'prediction', 'mse'):
    toy.assert_close({0: got[name]}, {0: one_device[name]})
  np.testing.assert_allclose(got['loss'], one_device['loss'][36:], atol=1e-6)


def test_restored_arrays_are_donated_like_fresh_ones(tmp_path):
  result, _ = fit(workdir=tmp_path, steps=3)
  layout = train.Layout(train.make_mesh())
  method = toy.build(ema_decay=0.9)(None)
  batch = layout.place(toy.data(), [0], stacked=False)
  shapes, init = layout.init(method, 3, None, batch, toy.data())
  store = train.Checkpoints(tmp_path / 'checkpoints')
  restored = store.restore(3, shapes)
  toy.assert_same(restored, result.state)
  step = layout.step(method, toy.data(), shapes, 1)
  for state in (init(None, batch), restored):
    step(state, None, batch)
    assert all(x.is_deleted() for x in jax.tree.leaves(state))
  store.close()

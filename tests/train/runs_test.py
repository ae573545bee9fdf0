"""Many runs in one program are the runs that one would do one by one.

Axes: R runs, n examples.
"""

import functools

import jax
import numpy as np
import pytest

from tests.train import toy
from tmlib import train

STEPS = 12


def folds(runs, n=toy.N, seed=0):
  """[R, n]: run r leaves about a fifth out."""
  fold = np.random.default_rng(seed).permutation(n) % 5
  return (fold[None] != np.arange(runs)[:, None] % 5).astype(np.float32)


def run_stream(weights, batch_size=8, arrays=None):
  return train.run_data(arrays or toy.arrays(), weights, batch_size, seed=2)


def fit(data, runs, evaluations=None, build=None, rows=None, **options):
  options = {'log_every': 4} | options
  return train.fit(
    build or toy.build(), data, steps=STEPS, seed=7, runs=runs,
    evaluations=evaluations, options=train.Options(**options),
    writers=[rows or toy.Rows()],
  )  # fmt: skip


def alone(run, data, evaluations=None):
  """The same run by itself: its key, its part of the data."""

  def build(axis_name):
    method = toy.build()(axis_name)
    return method._replace(
      init=lambda key, batch: method.init(jax.random.fold_in(key, run), batch)
    )

  def own(data):
    load = lambda step, rows: jax.tree.map(
      lambda x: x[run], data.load(step, rows)
    )
    return data._replace(load=load, per_run=False) if data.per_run else data

  evaluations = {k: own(v) for k, v in (evaluations or {}).items()}
  return fit(own(data), 0, evaluations, build)


@pytest.mark.parametrize(
  ('runs', 'shared', 'options'),
  [
    (5, False, dict()),  # five runs on four devices
    (3, False, dict(parallel='pmap', mesh=(2, 2, 1))),
    (3, True, dict(mesh=(2, 2, 1), steps_per_call=4)),
    (3, True, dict(parallel='pmap', mesh=(2, 2, 1))),
  ],
)
def test_runs_equal_separate_fits(runs, shared, options):
  weights = folds(runs)
  data = toy.data() if shared else run_stream(weights)
  held = train.pass_data(toy.arrays(), 8, run_weights=1 - weights)
  rows = toy.Rows()
  result = fit(data, runs, {'test': held}, rows=rows, **options)
  assert np.shape(result.metrics['loss']) == (runs,)
  assert np.shape(rows.rows[8]['loss']) == (runs,)
  assert result.diverged == []
  found = result.evaluations['test']
  assert len(found) == runs
  for run in (0, runs - 1):
    one = alone(run, data, {'test': held})
    toy.assert_close(toy.pick(result.state, run), one.state)
    np.testing.assert_allclose(
      result.metrics['loss'][run], one.metrics['loss'], atol=1e-6
    )
    toy.assert_close(
      found[run].outputs, one.evaluations['test'][0].outputs, 2e-6
    )
    # Each run is tested on its own fold, every example once.
    left_out = np.flatnonzero(weights[run] == 0)
    np.testing.assert_array_equal(found[run].outputs['id'], left_out)


def test_runs_of_a_method_without_data():
  together = fit(None, 5, build=toy.bandit)
  assert together.state['wins'].shape[1:] == (3, 3)
  for run in range(5):

    def build(axis_name, run=run):
      method = toy.bandit(axis_name)
      return method._replace(
        init=lambda key, batch: method.init(jax.random.fold_in(key, run), batch)
      )

    one = fit(None, 0, build=build)
    np.testing.assert_array_equal(
      together.state['wins'][run], one.state['wins']
    )


def test_a_fold_never_draws_what_it_holds_out():
  weights = folds(5)
  data = run_stream(weights)
  size = weights[0].sum().astype(int)
  drawn = np.zeros((5, toy.N), int)
  steps = 4 * size // 8
  for step in range(steps):
    batch = data.load(step, slice(0, 8))
    assert batch['index'].shape == batch['weight'].shape == (5, 8)
    for run in range(5):
      np.add.at(drawn[run], batch['index'][run], 1)
      np.testing.assert_array_equal(batch['weight'][run], 1)
  assert drawn[weights == 0].sum() == 0
  # Epochs are whole: after e of them each example was drawn e times.
  for run in range(5):
    counts = drawn[run][weights[run] > 0]
    epochs = steps * 8 / len(counts)
    assert counts.min() >= np.floor(epochs)
    assert counts.max() <= np.ceil(epochs)


def test_epochs_and_runs_differ_in_order_and_batches_are_pure():
  data = run_stream(np.ones((2, toy.N)))
  epoch = lambda e: np.concatenate(
    [data.load(6 * e + s, slice(0, 8))['index'] for s in range(6)], 1
  )
  first, second = epoch(0), epoch(1)
  for order in (*first, *second):
    np.testing.assert_array_equal(np.sort(order), np.arange(toy.N))
  assert (first[0] != first[1]).any()
  assert (first[0] != second[0]).any()
  np.testing.assert_array_equal(epoch(0), first)  # whatever was read before
  part = data.load(3, slice(2, 6))['index']
  np.testing.assert_array_equal(
    part, data.load(3, slice(0, 8))['index'][:, 2:6]
  )


def test_whole_folds_as_one_batch():
  weights = folds(3)
  data = run_stream(weights, batch_size=100)
  batch = data.load(5, slice(0, data.batch_size))
  for run in range(3):
    real = batch['index'][run][batch['weight'][run] > 0]
    np.testing.assert_array_equal(np.sort(real), np.flatnonzero(weights[run]))


def poisoned(runs_that_see_it, runs=5):
  """Example 0 is NaN; it is in every batch of the runs that see it."""
  arrays = toy.arrays(16)
  arrays['y'][0] = np.nan
  weights = np.ones((runs, 16), np.float32)
  weights[[r for r in range(runs) if r not in runs_that_see_it], 0] = 0
  return train.run_data(arrays, weights, 16)


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_one_diverged_run_is_reported_and_stops_nobody(parallel):
  mesh = (2, 2, 1)
  build = toy.build(max_skips=3)
  run = functools.partial(
    fit, runs=5, build=build, parallel=parallel, mesh=mesh
  )
  rows = toy.Rows()
  result = run(poisoned([2]), rows=rows)
  assert result.diverged == [2]
  assert rows.rows[12]['skipped'] == [0, 0, 12, 0, 0]
  healthy = run(poisoned([]))
  for r in (0, 1, 3, 4):
    toy.assert_close(
      toy.pick(result.state.params, r), toy.pick(healthy.state.params, r)
    )


def test_all_diverged_raises():
  build = toy.build(max_skips=3)
  with pytest.raises(FloatingPointError, match='loss not finite between'):
    fit(poisoned(range(5)), 5, build=build)


def test_a_diverged_run_without_guard_is_reported():
  def build(axis_name):
    method = toy.bandit(axis_name)

    def update(state, batch):
      state, metrics = method.update(state, batch)
      words = jax.random.key_data(state['key'])
      odd = (words[..., -1] % 2).astype(np.float32)
      return state, metrics | {'gap': odd / odd}  # 0 / 0 where even

    return method._replace(update=update)

  result = fit(None, 6, build=build)
  keys = [jax.random.fold_in(jax.random.key(7), r) for r in range(6)]
  even = [r for r, k in enumerate(keys) if jax.random.key_data(k)[-1] % 2 == 0]
  assert 0 < len(even) < 6
  assert result.diverged == even


def test_runs_resume_exactly(tmp_path):
  run = lambda steps, workdir: train.fit(
    toy.build(), run_stream(folds(5)), steps=steps, runs=5, workdir=workdir,
    writers=[],
  )  # fmt: skip
  whole = run(10, None)
  run(4, tmp_path)
  resumed = run(10, tmp_path)
  toy.assert_same(resumed.state, whole.state)
  again = run(10, tmp_path)
  assert again.metrics == whole.metrics
  params = train.load_params(tmp_path)
  assert params['hidden']['w'].shape == (8, toy.D, toy.H)


def test_other_folds_are_another_experiment(tmp_path):
  run = lambda seed: train.fit(
    toy.build(), run_stream(folds(2, seed=seed)), steps=2, runs=2,
    workdir=tmp_path, writers=[],
  )  # fmt: skip
  run(0)
  with pytest.raises(ValueError, match=r'data\.weights: \d+ -> \d+'):
    run(1)


@pytest.mark.parametrize(
  ('weights', 'message'),
  [
    (np.ones((2, 9)), r'weights have shape \(2, 9\), expected \[runs, 48\]'),
    (np.zeros((2, 48)), r'runs \[0, 1\] have no example'),
  ],
)
def test_weights_that_do_not_fit(weights, message):
  with pytest.raises(ValueError, match=message):
    run_stream(weights)

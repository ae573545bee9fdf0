"""Evaluation is what NumPy would compute over the examples that count."""

import csv

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import toy
from tmlib import train
from tmlib.train.experiment import write_predictions


def host_prediction(params, x):
  p = {k: {n: np.asarray(v, np.float64) for n, v in q.items()}
       for k, q in params.items()}  # fmt: skip
  h = np.tanh(x @ p['hidden']['w'] + p['hidden']['b'])
  return h @ p['out']['w'] + p['out']['b']


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
@pytest.mark.parametrize('n', [8, 21])
def test_sums_and_outputs_equal_numpy(parallel, n):
  arrays = toy.arrays(n, seed=1)
  arrays['weight'] = np.linspace(0, 2, n, dtype=np.float32)  # the first is out
  arrays['y'][0] = np.nan
  calls = []

  def summarize(outputs, sums):
    calls.append(outputs)
    return {'largest': outputs['prediction'].max(), 'twice': 2 * sums['mse']}

  result = train.fit(
    toy.build(ema_decay=0.5), toy.data(), steps=3, summarize=summarize,
    evaluations={'held_out': train.pass_data(arrays, 8)},
    options=train.Options(parallel=parallel),
  )  # fmt: skip
  (found,) = result.evaluations['held_out']
  # The averaged parameters, not the last ones.
  want = host_prediction(result.state.ema_params, arrays['x'].astype(float))
  last = host_prediction(result.state.params, arrays['x'].astype(float))
  assert np.abs(want - last).max() > 1e-4
  np.testing.assert_array_equal(found.outputs['id'], np.arange(1, n))
  np.testing.assert_array_equal(found.outputs['weight'], arrays['weight'][1:])
  np.testing.assert_allclose(found.outputs['prediction'], want[1:], atol=1e-6)
  error = (want - arrays['y'])[1:] ** 2
  mse = np.average(error, weights=arrays['weight'][1:])
  np.testing.assert_allclose(found.sums['mse'], mse, rtol=1e-5)
  assert found.metrics['twice'] == 2 * found.sums['mse']
  np.testing.assert_allclose(
    found.metrics['largest'], want[1:].max(), atol=1e-6
  )
  assert len(calls) == 1


def test_nothing_to_sum_is_missing():
  def build(axis_name):
    method = toy.build()(axis_name)
    nothing = lambda state, batch: {
      'sums': {'rare': (jnp.zeros(()), jnp.zeros(()))},
      'outputs': {},
    }
    return method._replace(evaluate=nothing)

  result = train.fit(
    build, toy.data(), steps=1, evaluations={'held_out': toy.held_out()}
  )
  assert np.isnan(result.evaluations['held_out'][0].sums['rare'])


def test_rows_of_runs_are_lists():
  rows = toy.Rows()
  train.fit(
    toy.build(), toy.data(), steps=2, runs=3, writers=[rows],
    evaluations={'held_out': toy.held_out()},
    options=train.Options(log_every=2),
  )  # fmt: skip
  assert np.shape(rows.rows[2]['held_out/mse']) == (3,)
  assert len(set(rows.rows[2]['held_out/mse'])) == 3


@pytest.mark.parametrize('runs', [0, 2])
def test_passes_of_one_shape_share_a_trace(runs):
  """Validation and test differ in length, and are compiled once for both."""
  counts = {}
  result = train.fit(
    toy.counting(toy.build(), counts), toy.data(), steps=1, runs=runs,
    evaluations={
      'validation': toy.held_out(n=11), 'test': toy.held_out(n=21),
      'wider': toy.held_out(batch_size=16, n=21),
    },
  )  # fmt: skip
  assert counts['evaluate'] == 2
  found = result.evaluations
  assert len(found['validation'][0].outputs['id']) == 11
  assert len(found['test'][0].outputs['id']) == 21
  for name in ('prediction', 'id'):
    np.testing.assert_allclose(
      found['test'][0].outputs[name], found['wider'][0].outputs[name],
      rtol=1e-6,
    )  # fmt: skip


def test_integers_are_written_as_what_they_mean(tmp_path):
  one = train.Evaluated(
    {'top': np.array([[2, 0], [1, 2]]), 'weight': np.ones(2)}, {}, {}
  )
  labels = {'top': ('', '007', '7, a song'), 'absent': ()}
  write_predictions(tmp_path / 'p', {'predict': [one]}, None, 0, labels)
  with (tmp_path / 'p.csv').open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert [(r['top_0'], r['top_1']) for r in rows] == [
    ('7, a song', ''), ('007', '7, a song'),
  ]  # fmt: skip

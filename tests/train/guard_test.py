"""What is not finite is skipped, counted, named, and never saved."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.train import toy
from tmlib import train


def poisoned(ids):
  """Unshuffled batches of eight; the targets of `ids` are NaN."""
  arrays = toy.arrays()
  arrays['y'][list(ids)] = np.nan
  return train.array_data(arrays, 8, shuffle=False)


def fit(data, steps, rows=None, workdir=None, **options):
  return train.fit(
    toy.build(max_skips=3, ema_decay=0.5), data, steps=steps, workdir=workdir,
    options=train.Options(log_every=1, **options), writers=[rows or toy.Rows()],
  )  # fmt: skip


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_a_bad_batch_is_skipped_and_counted(parallel):
  rows = toy.Rows()
  # Six batches an epoch: the second is bad, so steps 2 and 8 of 9.
  result = fit(poisoned([13]), 9, rows, parallel=parallel)
  np.testing.assert_array_equal(rows.column('skipped'), [0] + [1] * 6 + [2] * 2)
  assert rows.rows[9]['nonfinite/loss'] == 2
  assert rows.rows[9]['nonfinite/abs'] == 2
  assert np.isnan(rows.rows[2]['loss'])
  assert np.isfinite(rows.rows[3]['loss'])
  assert rows.rows[9]['diverged'] == 0
  assert int(result.state.step) == 9
  assert int(result.state.skips.longest) == 1

  before, after = fit(poisoned([13]), 1), fit(poisoned([13]), 2)
  for name in ('params', 'opt_state', 'ema_params'):
    toy.assert_same(getattr(before.state, name), getattr(after.state, name))


def test_too_many_in_a_row_stop_the_run_and_are_named(tmp_path):
  data = poisoned(range(24, 48))  # three bad batches after three good ones
  message = (
    'abs, grad_norm, loss not finite between steps 5 and 6; 3 steps were'
    ' skipped'
  )
  with pytest.raises(FloatingPointError, match=message):
    fit(data, 30, workdir=tmp_path, save_every=1)
  # The step that gave up is not among the checkpoints.
  found = train.Checkpoints(tmp_path / 'checkpoints')
  assert found.latest == 5
  found.close()


def test_the_name_is_the_one_that_failed():
  def loss(params, batch, key, step):
    total, weight, aux = toy.loss_fn(params, batch, key, step)
    bad = {'ratio': (jnp.where(step > 2, jnp.nan, 1.0), jnp.ones(()))}
    return jnp.where(step > 2, jnp.inf, total), weight, aux | bad

  with pytest.raises(FloatingPointError) as error:
    train.fit(
      toy.build(loss=loss, max_skips=2), toy.data(), steps=9,
      options=train.Options(log_every=1),
    )  # fmt: skip
  assert str(error.value).startswith('loss, ratio not finite between')


def sometimes(metric):
  def update(state, batch):
    del batch
    step = state['step'] + 1
    return state | {'step': step}, metric(step)

  return toy.scalar_method(update)


def test_a_method_without_guard_is_stopped_at_the_next_read(tmp_path):
  build = sometimes(
    lambda step: {'gap': jnp.where(step > 7, jnp.nan, 1.0), 'fine': step * 1.0}
  )
  with pytest.raises(
    FloatingPointError, match='^gap not finite between steps 6 and 9; the meth'
  ):
    train.fit(
      build, steps=20, workdir=tmp_path, writers=[],
      options=train.Options(log_every=5, save_every=3),
    )  # fmt: skip
  found = train.Checkpoints(tmp_path / 'checkpoints')
  assert found.latest == 6
  found.close()


def test_a_pair_without_weight_is_missing_not_wrong(tmp_path):
  rows = toy.Rows()
  build = sometimes(lambda step: {'seen': (0.0 * step, 0.0 * step)})
  train.fit(build, steps=2, options=train.Options(log_every=1), writers=[rows])
  assert np.isnan(rows.column('seen')).all()
  bad = sometimes(lambda step: {'seen': (jnp.nan * step, 1.0 * step)})
  with pytest.raises(FloatingPointError, match='seen not finite'):
    train.fit(bad, steps=2)


def test_padding_alone_takes_no_step():
  arrays = toy.arrays() | {'weight': np.zeros(toy.N, np.float32)}
  result = fit(train.array_data(arrays, 8), 3)
  fresh = fit(train.array_data(arrays, 8), 0)
  toy.assert_same(result.state.params, fresh.state.params)
  assert int(result.state.skips.total) == 0
  assert int(result.state.step) == 3

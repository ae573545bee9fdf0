"""One update is the equation in its docstring; coupled losses included.

Axes: B examples, D features.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tmlib import train


def linear_loss(params, batch, key, step):
  del key, step
  error = (batch['x'] @ params['w'] - batch['y']) ** 2
  weight = batch['weight']
  return jnp.sum(error * weight), weight.sum(), {}


def linear(loss=linear_loss, **options):
  return train.gradient_method(
    lambda key, batch: {'w': jnp.full(batch['x'].shape[-1], 0.5)},
    loss,
    lambda params, batch: {'sums': {}, 'outputs': {}},
    options.pop('optimizer', optax.sgd(0.1)),
    **options,
  )


def batch_of(weight, seed=0):
  arrays = toy.arrays(8, seed)
  return {
    'x': arrays['x'], 'y': arrays['y'], 'id': np.arange(8),
    'weight': np.asarray(weight, np.float32),
  }  # fmt: skip


@pytest.mark.parametrize('microbatches', [1, 2, 4])
def test_one_step_by_hand(microbatches):
  batch = batch_of([1, 2, 0, 0.5, 1, 1, 3, 0])
  method = linear(microbatches=microbatches, ema_decay=0.75)(None)
  state = method.init(jax.random.key(0), batch)
  new, metrics = jax.jit(method.update)(state, batch)
  x, y, w = (batch[k].astype(np.float64) for k in ('x', 'y', 'weight'))
  residual = x @ np.full(toy.D, 0.5) - y
  gradient = 2 * (w * residual) @ x / w.sum()
  want = 0.5 - 0.1 * gradient
  np.testing.assert_allclose(new.params['w'], want, rtol=1e-5)
  np.testing.assert_allclose(
    new.ema_params['w'], 0.75 * 0.5 + 0.25 * want, rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics['loss'], (w * residual**2).sum() / w.sum(), rtol=1e-5
  )
  np.testing.assert_allclose(
    metrics['grad_norm'], np.linalg.norm(gradient), rtol=1e-5
  )
  assert int(new.step) == 1
  np.testing.assert_array_equal(
    jax.random.key_data(new.key), jax.random.key_data(state.key)
  )


def spread(params, batch, key, step, axis_name):
  """Weighted variance of the predictions, and a penalty: no sum of examples."""
  del key, step
  gather = lambda x: (
    x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)
  )
  z, w = gather(batch['x'] @ params['w'] - batch['y']), gather(batch['weight'])
  mean = (z * w).sum() / w.sum()
  variance = (w * (z - mean) ** 2).sum()
  penalty = 0.1 * (params['w'] ** 2).sum() * w.sum()
  return variance + penalty, w.sum(), {'mean': ((z * w).sum(), w.sum())}


def cox(params, batch, key, step, axis_name):
  """Breslow's partial likelihood: each event against its whole risk set."""
  del key, step
  gather = lambda x: (
    x if axis_name is None else jax.lax.all_gather(x, axis_name, tiled=True)
  )
  risk, time = gather(batch['x'] @ params['w']), gather(batch['y'])
  event, w = gather(batch['label']), gather(batch['weight'])
  event = event * w
  at_risk = (time[None, :] >= time[:, None]) & (w[None, :] > 0)
  total = jax.nn.logsumexp(jnp.where(at_risk, risk[None], -1e30), axis=1)
  return jnp.sum(event * (total - risk)), event.sum(), {}


@pytest.mark.parametrize('loss', [spread, cox])
def test_coupled_losses_agree_per_device(loss):
  arrays = toy.arrays(16)
  arrays['weight'] = np.r_[np.ones(13), np.zeros(3)].astype(np.float32)
  data = train.array_data(arrays, 16)
  results, rows = {}, {}
  for parallel in ('jit', 'pmap'):
    rows[parallel] = toy.Rows()
    results[parallel] = train.fit(
      linear(loss, batch_coupled=True), data, steps=20,
      options=train.Options(parallel=parallel, log_every=1),
      writers=[rows[parallel]],
    )  # fmt: skip
  toy.assert_close(results['jit'].state, results['pmap'].state)
  for name in ('loss', 'grad_norm'):
    np.testing.assert_allclose(
      rows['jit'].column(name), rows['pmap'].column(name), atol=1e-6
    )
  assert rows['jit'].column('loss')[-1] < rows['jit'].column('loss')[0]


def test_the_coupled_gradient_is_the_closed_form():
  batch = batch_of([1, 1, 1, 1, 1, 1, 0, 0])
  method = linear(spread, batch_coupled=True)(None)
  state = method.init(jax.random.key(0), batch)
  new, _ = method.update(state, batch)
  x, y = (batch[k][:6].astype(np.float64) for k in ('x', 'y'))
  w = np.full(toy.D, 0.5)
  z = x @ w - y
  centred = x - x.mean(0)
  gradient = 2 * (z - z.mean()) @ centred / 6 + 0.2 * w
  np.testing.assert_allclose(new.params['w'], w - 0.1 * gradient, rtol=1e-5)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (dict(batch_coupled=True, microbatches=2), 'couples the examples'),
    (dict(microbatches=0), 'microbatches must be at least 1, got 0'),
    (dict(ema_decay=1.0), r'ema_decay must be in \(0, 1\) or None, got 1.0'),
  ],
)
def test_options_that_do_not_fit(options, message):
  with pytest.raises(ValueError, match=message):
    linear(**options)(None)


def test_microbatches_must_divide_each_device():
  with pytest.raises(ValueError, match='microbatches=3 does not divide the 8'):
    train.fit(linear(microbatches=3), toy.data(), steps=1)
  options = train.Options(parallel='pmap')
  with pytest.raises(ValueError, match='microbatches=4 does not divide the 2'):
    train.fit(linear(microbatches=4), toy.data(), steps=1, options=options)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'name': 'adamm'}, "optimizer.name 'adamm' is not one of"),
    ({'schedule': 'cos'}, "optimizer.schedule 'cos' is not one of"),
    ({'learning_rate': 0.0}, 'learning_rate must be positive'),
    ({'warmup': 1.0}, r'warmup must be in \[0, 1\)'),
    ({'clip': -1.0}, 'optimizer.clip must be at least 0'),
  ],
)
def test_optimizers_that_do_not_exist(change, message):
  config = {
    'name': 'adam', 'schedule': 'constant', 'learning_rate': 1e-3,
    'warmup': 0.0, 'clip': 0.0, 'weight_decay': 0.0,
  }  # fmt: skip
  train.make_optimizer(config, 10)
  with pytest.raises(ValueError, match=message):
    train.make_optimizer(config | change, 10)


@pytest.mark.parametrize(
  'loss', [lambda *args: 1.0, lambda *args: (1.0, 2.0), lambda *args: (1, 2, 3)]
)
def test_a_loss_that_is_a_mean_is_named(loss):
  with pytest.raises(
    TypeError, match=r'loss_fn must return \(sum, weight, aux'
  ):
    train.fit(toy.build(loss=loss), toy.data(), steps=1)

"""What a user gets wrong is named before anything is solved."""

import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tmlib import unlearning as ul
from tmlib.unlearning import inputs, losses

N, D, C = 12, 4, 3


def net(params, x):
  return x @ params['w']


def setting():
  rng = np.random.default_rng(0)
  params = {'w': jnp.asarray(rng.normal(size=(D, C)), jnp.float32)}
  x = rng.normal(size=(N, D)).astype(np.float32)
  y = np.arange(N) % C
  return params, {'x': x[3:], 'y': y[3:]}, {'x': x[:3], 'y': y[:3]}


def request(loss='softmax', params=None, retain=None, forget=None):
  own, R, F = setting()
  return inputs.check_request(
    net,
    losses.get_loss(loss),
    own if params is None else params,
    R | (retain or {}),
    F | (forget or {}),
  )


class AsDataTest(absltest.TestCase):
  def test_targets_by_hand(self):
    x = np.zeros((3, 2))
    for y in ([0, 2, 1], np.array([0, 2, 1], np.int8), np.eye(3)[[0, 2, 1]],
              np.eye(3, dtype=int)[[0, 2, 1]]):  # fmt: skip
      got = inputs.as_data({'x': x, 'y': y}, 3)
      np.testing.assert_array_equal(got['y'], np.eye(3)[[0, 2, 1]])
      np.testing.assert_array_equal(got['weight'], np.ones(3))
    # Two classes as booleans; one real output.
    got = inputs.as_data({'x': x, 'y': np.array([True, False, True])}, 2)
    np.testing.assert_array_equal(got['y'], np.eye(2)[[1, 0, 1]])
    got = inputs.as_data({'x': x, 'y': np.ones((3, 1))}, 1)
    self.assertEqual(got['y'].shape, (3, 1))


class RequestTest(parameterized.TestCase):
  def test_a_good_one(self):
    retain, forget, flags = request()
    self.assertEqual(retain['y'].shape, (9, C))
    self.assertEqual(forget['y'].shape, (3, C))
    self.assertEqual(flags, ())

  def test_a_class_that_is_gone_from_the_retain_set_is_fine(self):
    params, R, F = setting()
    kept = R['y'] != 2
    R = {k: v[kept] for k, v in R.items()}
    gap = ul.predict_gap(net, 'softmax', params, R, F, F['x'], 0.5)
    self.assertTrue(np.isfinite(gap).all())

  @parameterized.named_parameters(
    ('labels_from_one', dict(y=np.arange(9) % 3 + 1), 'pass y - 1'),
    ('negative_label', dict(y=np.arange(9) % 3 - 1), 'labels -1 to 1'),
    ('label_floats', dict(y=np.ones(9)), 'integer labels'),
    ('nan_target', dict(y=np.full((9, 3), np.nan)), "retain.'y'. holds NaN"),
    ('no_distribution', dict(y=np.ones((9, 3))), 'sum to one'),
    ('nan_input', dict(x=np.full((9, D), np.nan)), "retain.'x'. holds NaN"),
    ('short', dict(y=np.zeros(4, int)), '9 examples but y has 4'),
    ('empty', dict(x=np.zeros((0, D)), y=np.zeros(0, int)), 'retain is empty'),
    ('weight_shape', dict(weight=np.ones(2)), 'expected .9,'),
    ('weight_sign', dict(weight=-np.ones(9)), 'finite and >= 0'),
    ('weight_nan', dict(weight=np.full(9, np.nan)), 'finite and >= 0'),
    ('weight_zero', dict(weight=np.zeros(9)), 'the set is empty'),
  )
  def test_retain(self, change, match):
    with pytest.raises(ValueError, match=match):
      request(retain=change)

  def test_text_and_missing_keys(self):
    params, R, F = setting()
    with pytest.raises(TypeError, match='encode text'):
      request(retain={'y': np.array(['a'] * 9)})
    with pytest.raises(TypeError, match='encode text'):
      request(forget={'x': F['x'].astype(object)})
    with pytest.raises(ValueError, match="forget lacks .'y'."):
      inputs.check_request(net, losses.SOFTMAX, params, R, {'x': F['x']})

  def test_copies_in_the_retain_set(self):
    _, R, F = setting()
    x = R['x'].copy()
    x[4] = F['x'][1]
    with pytest.warns(UserWarning, match='1 of 3 forget examples'):
      self.assertEqual(request(retain={'x': x})[2], ('duplicates',))

  def test_params(self):
    with pytest.raises(ValueError, match='are the params finite'):
      request(params={'w': jnp.full((D, C), jnp.nan)})

  def test_convexity_is_checked_at_the_data(self):
    wave = losses.convex('wave', lambda f, y: -jnp.sum(jnp.cos(f - y)))
    with pytest.raises(ValueError, match="'wave' has the negative curvature"):
      request(wave)
    huber = losses.convex(
      'huber', lambda f, y: jnp.sum(jnp.sqrt(1 + (f - y) ** 2))
    )
    request(huber)

  def test_ridge_and_solver(self):
    params, R, F = setting()
    few = {k: v[:2] for k, v in R.items()}
    noise = np.random.default_rng(0)
    predict = lambda retain, ridge, **s: ul.predict_gap(
      net, 'softmax', params, retain, F, F['x'], ridge, solver=ul.Solver(**s)
    )
    for match, call in (
      ('12 parameters and only 6 retain rows', lambda: predict(few, 0.0)),
      # Softmax does not see a shift of all logits.
      ('singular', lambda: predict(R, 0.0, kind='primal')),
      ('ridge=-1', lambda: predict(R, -1.0)),
      ('ridge=nan', lambda: predict(R, float('nan'))),
      ('solver.batch_size=0', lambda: predict(R, 1.0, batch_size=0)),
      ('solver.max_steps=0', lambda: predict(R, 1.0, max_steps=0)),
      ('solver.tol', lambda: predict(R, 1.0, tol=-1.0)),
      ('matrix-free', lambda: ul.audit_network(
        net, 'softmax', params, R, F, 1.0, solver=ul.Solver('dual'))),
      ('query holds NaN', lambda: ul.predict_gap(
        net, 'softmax', params, R, F, F['x'] * np.nan, 1.0)),
      ('random', lambda: ul.linearize(
        lambda p, x: net(p, x) * noise.normal(size=(len(x), 1)),
        'softmax', params, R, F, 1.0)),
    ):  # fmt: skip
      with pytest.raises(ValueError, match=match):
        call()


if __name__ == '__main__':
  absltest.main()

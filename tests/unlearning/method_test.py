"""Network unlearners in the shared loop."""

import jax
import numpy as np
import optax
import pytest
from absl.testing import absltest, parameterized

from tmlib import train
from tmlib import unlearning as ul
from tmlib.unlearning import data as data_lib
from tmlib.unlearning import method as method_lib

N, D, C = 24, 4, 3


def linear_net(params, x):
  return x @ params['w']


def setting(seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(N, D)).astype(np.float32)
  y = rng.integers(0, C, N).astype(np.int32)
  params = {'w': rng.normal(size=(D, C)).astype(np.float32)}
  arrays = {'x': x, 'y': y, 'teacher': x @ params['w']}
  roles = np.ones((2, N), int)
  roles[0, :5], roles[1, 10:18] = 2, 2
  target = rng.normal(size=(2, N, C)).astype(np.float32)
  return params, arrays, roles, target


def softmax(f):
  e = np.exp(f - f.max(-1, keepdims=True))
  return e / e.sum(-1, keepdims=True)


def expected_gradient(kind, params, arrays, forget, target, w):
  """d loss / d logits of each example, by hand; then X' of it."""
  f, y = arrays['x'] @ params['w'], np.eye(C)[arrays['y']]
  p, teacher = softmax(f), softmax(arrays['teacher'])
  ce = p - y
  zero = np.zeros_like(ce)
  log = lambda f: np.log(softmax(f))[np.arange(N), arrays['y']]
  ratio = np.exp(w.temperature * (log(f) - log(arrays['teacher'])))
  on_R, on_F = {
    'finetune': (ce, zero),
    'gradient_ascent': (zero, -ce),
    'graddiff': (ce, -w.forget * ce),
    'neggrad_plus': (w.beta * ce, -(1 - w.beta) * ce),
    'scrub': (
      w.labels * ce + w.teacher * (p - teacher),
      -w.forget * (p - teacher),
    ),
    'npo': (w.retain * ce, -2 * (ratio / (1 + ratio))[:, None] * ce),
    'corrected_relabel': (ce, p - softmax(target)),
  }[kind]
  each = np.where(forget[:, None] > 0, on_F, on_R)
  return arrays['x'].T @ each


class UnlearnerTest(parameterized.TestCase):
  @parameterized.parameters(
    *(k for k in method_lib.KINDS if k != 'random_label')
  )
  def test_first_step_by_hand(self, kind):
    params, arrays, roles, target = setting()
    arrays['teacher'] = arrays['teacher'] + 0.3 * target[0]
    w = ul.Weights(
      forget=0.3, beta=0.8, labels=0.5, teacher=0.7, retain=1.5, temperature=0.4
    )
    use_R, use_F, _ = ul.needs(kind)
    data = data_lib.request_data(
      arrays, roles, N, uses=(use_R, use_F), per_run={'target': target}
    )
    build = ul.unlearner(
      kind, linear_net, 'softmax', params, optax.sgd(1.0), weights=w, decay=0.2
    )
    result = train.fit(build, data, steps=1, runs=2, writers=())
    for run in range(2):
      forget = (roles[run] == 2).astype(float)
      # The role that a kind does not draw has zero gradient in it anyway.
      drawn = use_R * (1 - forget) + use_F * forget
      grad = expected_gradient(kind, params, arrays, forget, target[run], w)
      want = params['w'] - grad / drawn.sum()
      if kind != 'gradient_ascent':
        want = want - 0.2 * params['w']
      got = result.state.params['w'][run]
      np.testing.assert_allclose(got, want, atol=2e-6)

  def test_random_labels_are_fixed_and_uniform(self):
    params, arrays, roles, _ = setting()
    arrays['id'] = np.arange(N, dtype=np.int32)
    build = ul.unlearner(
      'random_label', linear_net, 'softmax', params, optax.sgd(1.0)
    )
    batch = {
      **arrays,
      'weight': np.ones(N, np.float32),
      'forget': (roles[0] == 2).astype(np.float32),
    }
    method = build(None)
    state = method.init(jax.random.key(0), batch)
    one, _ = method.update(state, batch)
    turned = {k: v[::-1] for k, v in batch.items()}
    two, _ = method.update(state.replace(key=jax.random.key(5)), turned)
    np.testing.assert_allclose(one.params['w'], two.params['w'], atol=1e-6)

  @parameterized.product(kind=['scrub', 'newton'], runs=[0, 2])
  def test_jit_equals_per_device_mode(self, kind, runs):
    params, arrays, roles, _ = setting()
    if kind == 'newton':
      build = ul.newton_cg(linear_net, 'softmax', params, decay=0.1)
    else:
      build = ul.unlearner(
        kind, linear_net, 'softmax', params, optax.adam(0.1), decay=0.1
      )
    if runs:
      data = data_lib.request_data(arrays, roles, 8)
    else:
      forget = (roles[0] == 2).astype(np.float32)
      data = train.array_data(arrays | {'forget': forget}, 8)
    got = [
      train.fit(
        build,
        data,
        steps=4,
        runs=runs,
        writers=(),
        options=train.Options(parallel=parallel),
      ).state.params['w']
      for parallel in ('jit', 'pmap')
    ]
    np.testing.assert_allclose(got[0], got[1], atol=3e-6)
    self.assertGreater(np.abs(np.asarray(got[0]) - params['w']).max(), 0.01)

  def test_newton_steps_equal_dense_algebra(self):
    # Square loss: one step is the exact solution of the ridge problem.
    rng = np.random.default_rng(0)
    x = rng.normal(size=(N, D)).astype(np.float32)
    y = rng.normal(size=(N, C)).astype(np.float32)
    ridge = 0.5
    p = ul.RidgeProblem(x[5:], y[5:], x[:5], y[:5], ridge)
    start = {'w': np.asarray(ul.fit_full(p))}
    forget = (np.arange(N) < 5).astype(np.float32)
    data = train.array_data({'x': x, 'y': y, 'forget': forget}, N)
    for target, spec, n in (
      ('retain', ul.retain_newton(), N - 5),
      ('forget', ul.influence(), N),
    ):
      build = ul.newton_cg(
        linear_net,
        'square',
        start,
        target=target,
        cg_steps=40,
        tol=1e-7,
        decay=ridge / n,
      )
      got = train.fit(build, data, steps=1, writers=()).state.params['w']
      want = ul.fit_retain(p) + ul.closed_form_gap(p, spec).theta
      np.testing.assert_allclose(got, want, atol=1e-4)

  def test_gradient_unlearners_equal_the_linear_family(self):
    # Full-batch SGD on a linear model is the spec with the same weights.
    rng = np.random.default_rng(1)
    x = rng.normal(size=(N, D)).astype(np.float32)
    y = rng.normal(size=(N, C)).astype(np.float32)
    ridge, lr, steps = 0.5, 0.01, 6
    p = ul.RidgeProblem(x[5:], y[5:], x[:5], y[:5], ridge)
    start = {'w': np.asarray(ul.fit_full(p))}
    arrays = {'x': x, 'y': y, 'teacher': x @ start['w']}
    roles = np.ones((1, N), int)
    roles[0, :5] = 2
    weights = ul.Weights(forget=0.1, beta=0.9, labels=1.0, teacher=0.5)
    cases = {
      'gradient_ascent': (ul.gradient_ascent(lr, steps), 5),
      'graddiff': (ul.graddiff(0.1, reduction='sum', lr=lr, steps=steps), N),
      'scrub': (ul.scrub(0.1, 0.5, 1.0, lr, steps), N),
      'finetune': (ul.retain_finetune(lr, steps), N - 5),
    }
    for kind, (spec, n) in cases.items():
      data = data_lib.request_data(arrays, roles, N, uses=ul.needs(kind)[:2])
      build = ul.unlearner(
        kind,
        linear_net,
        'square',
        start,
        optax.sgd(lr * n),
        weights=weights,
        decay=ridge / n,
      )
      got = train.fit(build, data, steps=steps, runs=1, writers=())
      want = ul.fit_retain(p) + ul.closed_form_gap(p, spec).theta
      np.testing.assert_allclose(
        got.state.params['w'][0], want, atol=1e-4, err_msg=kind
      )

  def test_evaluation_and_padding(self):
    params, arrays, _, _ = setting()
    build = ul.unlearner(
      'finetune', linear_net, 'softmax', params, optax.sgd(1.0)
    )
    method = build(None)
    batch = {
      **arrays,
      'weight': np.ones(N, np.float32),
      'id': np.arange(N, dtype=np.int32),
      'forget': np.zeros(N, np.float32),
    }
    state = method.init(jax.random.key(0), batch)
    found = method.evaluate(state, batch)
    f = arrays['x'] @ params['w']
    want = -np.log(softmax(f))[np.arange(N), arrays['y']].mean()
    total, weight = found['sums']['loss']
    np.testing.assert_allclose(total / weight, want, rtol=1e-5)
    padded = {
      k: np.concatenate([v, np.full_like(v[:3], 0)]) for k, v in batch.items()
    }
    padded['x'][-3:] = np.nan
    one, _ = method.update(state, batch)
    two, _ = method.update(state, padded | {'x': np.nan_to_num(padded['x'])})
    np.testing.assert_allclose(one.params['w'], two.params['w'], atol=1e-6)

  def test_a_label_without_an_output_is_not_ignored(self):
    params, arrays, roles, _ = setting()
    arrays['y'] = arrays['y'] + 1
    arrays['forget'] = (roles[0] == 2).astype(np.float32)
    build = ul.unlearner(
      'graddiff', linear_net, 'softmax', params, optax.sgd(0.1)
    )
    with pytest.raises(FloatingPointError, match='loss'):
      train.fit(build, train.array_data(arrays, N), steps=30, writers=())
    # A padded row may hold any label.
    method = build(None)
    batch = arrays | {
      'y': np.where(arrays['y'] < C, arrays['y'], 0),
      'weight': (arrays['y'] < C).astype(np.float32),
      'id': np.arange(N, dtype=np.int32),
    }
    state = method.init(jax.random.key(0), batch)
    one, _ = method.update(state, batch)
    two, _ = method.update(state, batch | {'y': arrays['y']})
    np.testing.assert_allclose(one.params['w'], two.params['w'])

  def test_every_run_has_its_own_share_of_the_ridge(self):
    params, arrays, roles, _ = setting()
    data = data_lib.request_data(
      arrays, roles, N, uses=(True, False), ridge=3.0
    )
    batch = data.load(0, slice(None))
    real = batch['weight'] > 0
    for run, n_R in enumerate((19, 16)):
      np.testing.assert_allclose(batch['decay'][run, real[run]], 3.0 / n_R)
      self.assertEqual(real[run].sum(), n_R)

  def test_bad_input(self):
    params, arrays, roles, _ = setting()
    make = lambda kind='graddiff', loss='softmax', **k: ul.unlearner(
      kind, linear_net, loss, params, optax.sgd(0.1), **k
    )
    for match, call in (
      ('allowed', lambda: make('forgetme')),
      ('beta', lambda: make(weights=ul.Weights(beta=0.0))),
      ('negative', lambda: make(weights=ul.Weights(forget=-1.0))),
      ('temperature', lambda: make(weights=ul.Weights(temperature=0.0))),
      ('decay', lambda: make(decay=-1.0)),
      ('classes', lambda: make('random_label', 'square')),
      (
        'target',
        lambda: ul.newton_cg(linear_net, 'softmax', params, target='all'),
      ),
      (
        'cg_steps',
        lambda: ul.newton_cg(linear_net, 'softmax', params, cg_steps=0),
      ),
      (
        'empty forget',
        lambda: data_lib.request_data(arrays, np.ones((1, N), int), 4),
      ),
      (
        'empty retain',
        lambda: data_lib.request_data(arrays, np.full((1, N), 2), 4),
      ),
      (
        'roles must',
        lambda: data_lib.request_data(arrays, np.full((1, N), 7), 4),
      ),
      ('expected', lambda: data_lib.request_data(arrays, roles[0], 4)),
      (
        "lacks .'target'",
        lambda: train.fit(
          make('corrected_relabel'),
          data_lib.request_data(arrays, roles, 4),
          steps=1,
          runs=2,
          writers=(),
        ),
      ),
    ):
      with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.slow
@pytest.mark.parametrize('kind', [k for k in ul.KINDS if k != 'scrub'])
def test_every_kind_in_per_device_mode(kind):
  params, arrays, roles, target = setting()
  use_R, use_F, _ = ul.needs(kind)
  data = data_lib.request_data(
    arrays, roles, 8, uses=(use_R, use_F), per_run={'target': target}
  )
  build = ul.unlearner(
    kind, linear_net, 'softmax', params, optax.sgd(0.1), decay=0.1
  )
  got = [
    train.fit(
      build, data, steps=4, runs=2, writers=(),
      options=train.Options(parallel=parallel),
    ).state.params['w']
    for parallel in ('jit', 'pmap')
  ]  # fmt: skip
  np.testing.assert_allclose(got[0], got[1], atol=3e-6)
  assert np.abs(np.asarray(got[0]) - params['w']).max() > 1e-3


if __name__ == '__main__':
  absltest.main()

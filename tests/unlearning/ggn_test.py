"""Networks: products, solves and predictions against dense float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize
from absl.testing import absltest, parameterized
from jax.flatten_util import ravel_pytree

from tmlib import unlearning as ul
from tmlib.unlearning import ggn, losses


def net(params, x):
  return jnp.tanh(x @ params['w']) @ params['v']


def setting(seed=0, n=40, width=4, classes=3):
  rng = np.random.default_rng(seed)
  params = {
    'w': rng.normal(size=(5, width)) / 2,
    'v': rng.normal(size=(width, classes)) / 2,
  }
  x = rng.normal(size=(n, 5))
  y = rng.integers(0, classes, n)
  retain = {'x': x[6:], 'y': y[6:]}
  forget = {'x': x[:6], 'y': y[:6]}
  return jax.tree.map(np.asarray, params), retain, forget


def dense(params, data, loss):
  """Jacobians, residuals and curvatures by forward differences of jax only in
  the output space: J from jacfwd, losses in NumPy."""
  flat, unravel = ravel_pytree(params)
  J = np.asarray(jax.jacfwd(lambda v: net(unravel(v), data['x']))(flat))
  f = np.asarray(net(params, data['x']))
  y = np.eye(f.shape[1])[data['y']]
  if loss == 'square':
    return J, y - f, np.broadcast_to(np.eye(f.shape[1]), f.shape + (3,))
  p = np.exp(f) / np.exp(f).sum(1, keepdims=True)
  L = np.einsum('bi,ij->bij', p, np.eye(3)) - p[:, :, None] * p[:, None]
  return J, y - p, L


class LossTest(parameterized.TestCase):
  @parameterized.parameters('softmax', 'square', 'convex')
  def test_root_and_whitening(self, name):
    loss = (
      losses.convex('x', losses.SOFTMAX.value)
      if name == 'convex'
      else (losses.get_loss(name))
    )
    with jax.enable_x64(True):
      f, y = jnp.array([0.3, -1.0, 2.0]), jnp.array([0.0, 1.0, 0.0])
      B_T = np.stack([loss.root(f, y, u) for u in jnp.eye(3)], 1)
      H = jax.hessian(loss.value)(f, y)
      np.testing.assert_allclose(B_T.T @ B_T, H, atol=1e-12)
      np.testing.assert_allclose(
        jnp.stack([loss.curvature(f, y, u) for u in jnp.eye(3)]), H, atol=1e-12
      )
      rho = -jax.grad(loss.value)(f, y)
      np.testing.assert_allclose(loss.residual(f, y), rho, atol=1e-12)
      np.testing.assert_allclose(B_T.T @ loss.whitened(f, y), rho, atol=1e-9)

  def test_certain_wrong_prediction_stays_finite(self):
    f, y = jnp.array([300.0, 0.0]), jnp.array([0.0, 1.0])
    self.assertTrue(np.isfinite(losses.SOFTMAX.whitened(f, y)).all())

  def test_unknown(self):
    with pytest.raises(ValueError, match='allowed'):
      losses.get_loss('hinge')


class GGNTest(parameterized.TestCase):
  @parameterized.product(loss=['softmax', 'square'], batch=[None, 7])
  def test_product_and_gradient_equal_dense(self, loss, batch):
    with jax.enable_x64(True):
      params, retain, _ = setting()
      J, rho, L = dense(params, retain, loss)
      flat, unravel = ravel_pytree(params)
      v = np.random.default_rng(1).normal(size=len(flat))
      got = jax.jit(
        lambda v, data: ggn.ggn_matvec(
          net, loss, params, data, unravel(v), ridge=0.3, batch_size=batch
        )
      )(v, retain)
      want = np.einsum('bcp,bcd,bdq,q->p', J, L, J, v) + 0.3 * v
      np.testing.assert_allclose(ravel_pytree(got)[0], want, rtol=1e-9)
      grad = ggn.gradient(net, loss, params, retain, batch_size=batch)
      np.testing.assert_allclose(
        ravel_pytree(grad)[0], -np.einsum('bcp,bc->p', J, rho), rtol=1e-9
      )

  def test_memory_does_not_grow_with_the_retain_set(self):
    params, _, _ = jax.tree.map(np.float32, setting(width=30))

    def temporary(n, fun):
      shapes = {
        'x': jax.ShapeDtypeStruct((n, 5), np.float32),
        'y': jax.ShapeDtypeStruct((n, 3), np.float32),
        'weight': jax.ShapeDtypeStruct((n,), np.float32),
      }
      compiled = jax.jit(fun).lower(shapes).compile()
      return compiled.memory_analysis().temp_size_in_bytes

    product = lambda size: (
      lambda d: ggn.ggn_matvec(
        net, 'softmax', params, d, params, batch_size=size
      )
    )
    few, many = temporary(512, product(64)), temporary(8192, product(64))
    self.assertLess(many, 1.1 * few)
    self.assertGreater(temporary(8192, product(None)), 10 * many)
    rows = lambda d: ggn.map_examples(lambda b: net(params, b['x']), d, 64)
    self.assertLess(temporary(8192, rows), 8192 * 3 * 4 * 3)

  def test_map_examples_joins_minibatches(self):
    x = np.arange(46.0)[:, None]
    for size in (None, 1, 7, 23, 46, 100):
      got = ggn.map_examples(lambda b: 2 * b['x'][:, 0], {'x': x}, size)
      np.testing.assert_array_equal(got, 2 * x[:, 0])

  def test_weights_are_repetitions(self):
    with jax.enable_x64(True):
      params, retain, _ = setting()
      weight = np.ones(34)
      weight[2] = 3
      again = np.r_[np.arange(34), 2, 2]
      twice = {k: v[again] for k, v in retain.items()}
      f = lambda d: ravel_pytree(
        ggn.ggn_matvec(net, 'softmax', params, d, params)
      )[0]
      np.testing.assert_allclose(
        f(retain | {'weight': weight}), f(twice), rtol=1e-9
      )

  @parameterized.product(
    kind=['cg', 'primal', 'dual'], loss=['softmax', 'square']
  )
  def test_prediction_equals_dense_algebra(self, kind, loss):
    with jax.enable_x64(True):
      params, retain, forget = setting()
      J, rho, L = dense(params, retain, loss)
      flat, _ = ravel_pytree(params)
      A = np.einsum('bcp,bcd,bdq->pq', J, L, J) + 0.2 * np.eye(len(flat))
      g = -np.einsum('bcp,bc->p', J, rho) + 0.2 * np.asarray(flat)
      J_Q, _, _ = dense(params, forget, loss)
      want = J_Q @ np.linalg.solve(A, g)
      if loss == 'softmax':
        want = want - want.mean(1, keepdims=True)
      solver = ul.Solver(kind, 500, 1e-12, batch_size=16)
      got = ul.predict_gap(
        net, loss, params, retain, forget, forget['x'], 0.2, solver=solver
      )
      np.testing.assert_allclose(got, want, atol=1e-7)

  def test_preconditioned_float32_matches_dense_to_1e5(self):
    params, retain, forget = jax.tree.map(
      lambda x: x.astype(np.float32) if x.dtype == np.float64 else x, setting()
    )
    got = [
      ul.predict_gap(
        net, 'softmax', params, retain, forget, forget['x'], 0.5, solver=s
      )
      for s in (ul.Solver('cg', 300, 1e-7, rank=6), ul.Solver('primal'))
    ]
    scale = np.abs(got[1]).max()
    np.testing.assert_allclose(got[0], got[1], atol=1e-5 * scale)

  def test_linear_softmax_local_problem(self):
    # The gradient of the local problem is that of the network.
    with jax.enable_x64(True):
      params, retain, forget = setting()
      p = ul.linearize(net, 'softmax', params, retain, forget, 0.2)
      flat = ravel_pytree(params)[0]
      grad = ggn.gradient(net, 'softmax', params, retain)
      np.testing.assert_allclose(
        -(p.X_R.T @ p.Y_R)[:, 0], ravel_pytree(grad)[0], rtol=1e-9
      )
      np.testing.assert_allclose(p.prior[:, 0], -flat)
      # th - th_R two ways: exact linear theory, and the network's solver.
      move = -ul.fit_retain(p)[:, 0]
      other = ul.retain_displacement(
        net, 'softmax', params, retain, 0.2, solver=ul.Solver('dual')
      )
      np.testing.assert_allclose(move, ravel_pytree(other)[0], atol=1e-9)


class LazyTest(absltest.TestCase):
  def test_error_falls_like_one_over_alpha(self):
    """f = alpha (f(th) - f(th_0)): exact retrain by SciPy in float64.

    (Under cross-entropy a floor is left: the loss itself is not quadratic.)
    """
    with jax.enable_x64(True):
      centre, retain, forget = setting(3, n=40, width=5)
      flat, unravel = ravel_pytree(centre)
      base = np.asarray(flat)
      x = np.concatenate([retain['x'], forget['x']])
      y = np.eye(3)[np.concatenate([retain['y'], forget['y']])]
      kept = np.r_[np.ones(34), np.zeros(6)]

      # In units of 1 / alpha: u = alpha (th - th_0), so that all are alike.
      @jax.jit
      @jax.value_and_grad
      def objective(u, weight, alpha):
        f = alpha * (net(unravel(base + u / alpha), x) - net(centre, x))
        return jnp.sum(weight[:, None] * (y - f) ** 2) / 2 + u @ u / 4

      def fit(weight, u, alpha):
        fun = lambda u: [np.asarray(a) for a in objective(u, weight, alpha)]
        options = dict(maxiter=3000, ftol=1e-16, gtol=1e-9)
        return scipy.optimize.minimize(
          fun, u, jac=True, method='L-BFGS-B', options=options
        ).x

      errors = []
      for alpha in (1.0, 10.0, 100.0):
        lazy = lambda p, x, a=alpha: a * (net(p, x) - net(centre, x))
        full = fit(np.ones(40), np.zeros(len(base)), alpha)
        again = fit(kept, full, alpha)
        full, again = (unravel(base + u / alpha) for u in (full, again))
        query = forget['x']
        got = ul.predict_gap(
          lazy, 'square', full, retain, forget, query, 0.5 * alpha**2,
          prior=centre, solver=ul.Solver('primal'),
        )  # fmt: skip
        want = lazy(full, query) - lazy(again, query)
        errors.append(ul.relative_error(got, want)[0])
    self.assertLess(errors[1], errors[0] / 4)
    self.assertLess(errors[2], errors[1] / 4)
    self.assertLess(errors[2], 0.02)


class BadInputTest(absltest.TestCase):
  def test_errors(self):
    params, retain, forget = jax.tree.map(jnp.asarray, setting())
    args = (net, 'softmax', params, retain, forget, forget['x'])
    for match, call in (
      ('kind', lambda: ul.predict_gap(*args, 0.1, solver=ul.Solver('lu'))),
      (
        'ridge > 0',
        lambda: ul.predict_gap(*args, 0.0, solver=ul.Solver('dual')),
      ),
      (
        'ridge > 0',
        lambda: ul.predict_gap(*args, 0.0, solver=ul.Solver(rank=3)),
      ),
      ('would take', lambda: ul.linearize(*args[:5], 0.1, max_bytes=10)),
      (
        'empty',
        lambda: ul.predict_gap(
          *args[:4], {'x': retain['x'][:0], 'y': retain['y'][:0]}, None, 0.1
        ),
      ),
      (
        'examples but',
        lambda: ggn.gradient(
          net, 'softmax', params, {'x': retain['x'], 'y': retain['y'][:3]}
        ),
      ),
      (
        'NaN',
        lambda: ggn.gradient(
          net, 'softmax', params, retain | {'x': retain['x'] * jnp.nan}
        ),
      ),
      (
        'model has C',
        lambda: ggn.gradient(
          net, 'softmax', params, retain | {'y': jnp.ones((34, 2))}
        ),
      ),
      (
        'must return',
        lambda: ggn.gradient(
          lambda p, x: net(p, x)[:, 0], 'softmax', params, retain
        ),
      ),
    ):
      with pytest.raises(ValueError, match=match):
        call()

  def test_dropout_and_batch_norm_are_found(self):
    params, retain, forget = jax.tree.map(jnp.asarray, setting())
    rng = np.random.default_rng(0)
    drop = lambda p, x: net(p, x) * rng.integers(0, 2, (len(x), 1))
    norm = lambda p, x: net(p, x - x.mean(0, keepdims=True))
    for bad, match in ((drop, 'random'), (norm, 'batch norm')):
      with pytest.raises(ValueError, match=match):
        ul.predict_gap(bad, 'softmax', params, retain, forget, forget['x'], 1)

  def test_indefinite_curvature(self):
    params, retain, forget = jax.tree.map(jnp.asarray, setting())
    concave = losses.SOFTMAX._replace(
      name='concave', curvature=lambda f, y, u: -u
    )
    with pytest.raises(ValueError, match='indefinite'):
      ul.predict_gap(net, concave, params, retain, forget, forget['x'], 0.01)

  def test_no_convergence_warns(self):
    params, retain, forget = jax.tree.map(jnp.asarray, setting())
    with pytest.warns(UserWarning, match='CG stopped'):
      ul.predict_gap(
        net,
        'softmax',
        params,
        retain,
        forget,
        forget['x'],
        1e-3,
        solver=ul.Solver(max_steps=2),
      )


if __name__ == '__main__':
  absltest.main()

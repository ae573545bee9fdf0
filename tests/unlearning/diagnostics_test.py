"""The audit: its numbers by NumPy, its matrix-free form by the dense one."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from tmlib import unlearning as ul
from tmlib.unlearning import diagnostics


def make(n=40, f=5, d=8, ridge=0.7, c=2, seed=0):
  rng = np.random.default_rng(seed)
  X = rng.normal(size=(n, d))
  Y = X @ rng.normal(size=(d, c)) + rng.normal(size=(n, c))
  return ul.RidgeProblem(X[f:], Y[f:], X[:f], Y[:f], ridge)


class AuditTest(absltest.TestCase):
  def test_numbers(self):
    p = make()
    A_R = p.X_R.T @ p.X_R + p.ridge * np.eye(8)
    A = A_R + p.X_F.T @ p.X_F
    H = p.X_F @ np.linalg.solve(A_R, p.X_F.T)
    HR = p.X_R @ np.linalg.solve(A_R, p.X_F.T)
    h = np.linalg.eigvalsh(H)
    full = np.linalg.solve(A, p.X_R.T @ p.Y_R + p.X_F.T @ p.Y_F)
    r = p.Y_F - p.X_F @ full
    with jax.enable_x64(True):
      got = ul.audit(p)
    self.assertEqual(got.flags, ())
    norm = np.linalg.norm
    cos = lambda a, b: np.sum(a * b) / norm(a) / norm(b)
    hat = p.X_F @ np.linalg.solve(A, p.X_F.T)
    K = p.X_F @ p.X_F.T
    move = np.linalg.solve(A_R, p.X_F.T @ r)
    inside = p.X_F.T @ np.linalg.pinv(p.X_F.T) @ move
    for name, value in (
      ('lmax', h[-1]),
      ('trace', np.trace(H)),
      ('dof', np.trace(hat)),  # h / (1 + h) is the hat matrix of the full fit
      ('logdet', np.linalg.slogdet(A)[1] - np.linalg.slogdet(A_R)[1]),
      ('rho_c', 1 / h[-1]),
      ('alpha_c', 5 / 35 / h[-1]),
      ('influence_error', norm(H @ hat @ r) / norm(H @ r)),
      ('cos_forget', cos(H @ r, K @ r)),
      ('cos_retain', cos(HR @ r, p.X_R @ p.X_F.T @ r)),
      ('span_deficiency', norm(move - inside) / norm(move)),
      ('null_share', 0.0),
    ):
      np.testing.assert_allclose(
        getattr(got, name), value, rtol=1e-7, atol=1e-7, err_msg=name
      )
    np.testing.assert_allclose(got.idle, (norm(H @ r), norm(HR @ r)))
    np.testing.assert_allclose(got.forget_gaps, norm(H @ r, axis=1))
    harm = norm(HR @ r, axis=1)
    np.testing.assert_array_equal(got.harmed, np.argsort(-harm)[:10])
    left = norm(H @ hat @ r) / norm(H @ r)
    np.testing.assert_allclose(got.predicted['influence'][0], left)
    self.assertLess(got.predicted['woodbury_influence'][1], 1e-9)
    self.assertIn(got.recommendation, got.reason)

  def test_null_share(self):
    p = make(9, 4, 20, 0.5, c=1)
    A_R = p.X_R.T @ p.X_R + p.ridge * np.eye(20)
    A = A_R + p.X_F.T @ p.X_F
    full = np.linalg.solve(A, p.X_R.T @ p.Y_R + p.X_F.T @ p.Y_F)
    g = p.X_F.T @ (p.Y_F - p.X_F @ full)
    P = np.eye(20) - np.linalg.pinv(p.X_R) @ p.X_R
    want = (g.T @ P @ g / p.ridge) / (g.T @ np.linalg.solve(A_R, g))
    with jax.enable_x64(True):
      got = ul.audit(p)
    np.testing.assert_allclose(got.null_share, want.item(), rtol=1e-9)

  def test_flags(self):
    p = make(9, 3, 20, 1e-9, c=1)
    with jax.enable_x64(True):
      with pytest.warns(UserWarning, match='interpolates'):
        got = ul.audit(p)
      self.assertIn('no_gradient_signal', got.flags)
      self.assertGreater(got.idle[0], 0.1)  # the gap does not vanish
      q = make()
      with pytest.warns(UserWarning, match='not stationary'):
        got = ul.audit(q.replace(start=np.ones((8, 2))))
      self.assertEqual(got.flags, ('not_stationary',))
      copy = q.replace(
        X_R=np.concatenate([q.X_R, q.X_F]), Y_R=np.concatenate([q.Y_R, q.Y_F])
      )
      with pytest.warns(UserWarning, match='5 of 5 forget points'):
        self.assertEqual(ul.audit(copy).flags, ('duplicates',))

  def test_recommendations(self):
    gaps = {'cheap': (0.105, 0.1), 'exact': (0.1, 0.1), 'bad': (2.0, np.inf)}
    say = lambda *a: diagnostics.recommend(*a, gaps, (1.0, 1.0))
    self.assertEqual(say(0.05, 0.95, 0.0, 0.1)[0], 'cheap')
    for args, words in (
      ((0.05, 0.95, 0.0, 0.1), 'any local method'),
      ((0.5, 0.5, 0.0, 0.1), 'moderate'),
      ((5.0, 0.5, 0.0, 0.1), 'retrain'),
      ((5.0, 0.5, 0.95, 0.1), 'no retain row'),
      ((5.0, 0.5, 0.1, 0.8), 'outside the span'),
    ):
      self.assertIn(words, say(*args)[1])
    self.assertEqual(
      diagnostics.recommend(1, 1, 0, 0, gaps, (0.0, 0.0))[0], 'none'
    )

  def test_sequential_requests_compose(self):
    # Forget A, then B, each exactly: the model of a retrain without both.
    p = make(40, 8, 8)
    first = p.replace(
      X_F=p.X_F[:4],
      Y_F=p.Y_F[:4],
      X_R=np.concatenate([p.X_R, p.X_F[4:]]),
      Y_R=np.concatenate([p.Y_R, p.Y_F[4:]]),
    )
    with jax.enable_x64(True):
      one = ul.simulate(first, ul.woodbury_influence())[-1]
      second = p.replace(X_F=p.X_F[4:], Y_F=p.Y_F[4:], start=one)
      report = ul.audit(second)
      self.assertEqual(report.flags, ())
      two = ul.simulate(second, ul.woodbury_influence())[-1]
      np.testing.assert_allclose(two, ul.fit_retain(p), rtol=1e-9)
      # Without the first step done exactly, the audit says so.
      with pytest.warns(UserWarning, match='not stationary'):
        ul.audit(second.replace(start=ul.fit_full(p)))


def net(params, x):
  return jnp.tanh(x @ params['w']) @ params['v']


class NetworkAuditTest(absltest.TestCase):
  def test_matrix_free_equals_dense(self):
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
      params = {
        'w': jnp.asarray(rng.normal(size=(5, 4))) / 2,
        'v': jnp.asarray(rng.normal(size=(4, 3))) / 2,
      }
      x, y = rng.normal(size=(46, 5)), rng.integers(0, 3, 46)
      retain, forget = {'x': x[6:], 'y': y[6:]}, {'x': x[:6], 'y': y[:6]}
      problem = ul.linearize(net, 'softmax', params, retain, forget, 0.3)
      with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        dense = ul.audit(problem, local=True)
        # As many Lanczos steps as rows: quadrature is exact up to probes.
        free = ul.audit_network(
          net,
          'softmax',
          params,
          retain,
          forget,
          0.3,
          lanczos_steps=12,
          probes=10,
          solver=ul.Solver(max_steps=300, tol=1e-12, batch_size=16, rank=5),
        )
      close = lambda a, b, tol, name='': np.testing.assert_allclose(
        a, b, rtol=tol, atol=tol, err_msg=name
      )
      for name in (
        'lmax',
        'cos_forget',
        'cos_retain',
        'span_deficiency',
        'stationarity',
        'idle',
        'rho_c',
        'influence_error',
      ):
        close(getattr(free, name), getattr(dense, name), 1e-5, name)
      close(free.forget_gaps, dense.forget_gaps, 1e-5)
      for name in ('trace', 'dof', 'logdet'):
        close(getattr(free, name), getattr(dense, name), 0.3, name)
      for name, gap in free.predicted.items():
        close(gap, dense.predicted[name], 1e-5, name)
      # Rows against examples: the dense audit names (example, class) rows.
      move = problem.X_R @ -np.asarray(ul.fit_retain(problem))
      harm = np.linalg.norm(np.reshape(move, (40, 3)), axis=1)
      np.testing.assert_array_equal(free.harmed, np.argsort(-harm)[:10])
      close(free.alpha_c, 6 / 40 / dense.lmax, 1e-5)
      self.assertTrue(free.local)

  def test_bad_input(self):
    params = {'w': jnp.ones((5, 4)), 'v': jnp.ones((4, 3))}
    data = {'x': jnp.ones((4, 5)), 'y': jnp.zeros(4, int)}
    with pytest.raises(ValueError, match='ridge'):
      ul.audit_network(net, 'softmax', params, data, data, 0.0)


if __name__ == '__main__':
  absltest.main()

"""The audit: its numbers by NumPy, its matrix-free form by the dense one."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from tmlib import unlearning as ul
from tmlib.unlearning import diagnostics, netaudit


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

  def test_nothing_is_ever_nan(self):
    p = make()
    eye = np.eye(8)
    fit = lambda X: X @ np.ones((8, 2))
    cases = {
      'no leverage': p.replace(X_F=0 * p.X_F),
      'perfect fit': p.replace(Y_R=fit(p.X_R), Y_F=fit(p.X_F), ridge=0.0),
      'orthogonal': p.replace(
        X_R=np.repeat(eye[:4], 3, 0), Y_R=np.ones((12, 2)),
        X_F=eye[5:], Y_F=np.ones((3, 2)),
      ),
      'tiny ridge': p.replace(ridge=1e-300),
      'huge ridge': p.replace(ridge=1e300),
      'one retain point': p.replace(X_R=p.X_R[:1], Y_R=p.Y_R[:1]),
      'five copies': p.replace(X_F=np.repeat(p.X_F[:1], 5, 0)),
    }  # fmt: skip
    with jax.enable_x64(True), warnings.catch_warnings():
      warnings.simplefilter('ignore')
      found = {name: ul.audit(q) for name, q in cases.items()}
    for name, report in found.items():
      for field, value in report._asdict().items():
        if field == 'predicted':
          value = list(value.values())
        if field not in ('recommendation', 'reason', 'flags'):
          self.assertFalse(np.isnan(value).any(), f'{name}: {field}')
    for name in ('no leverage', 'perfect fit'):
      self.assertEqual(found[name].recommendation, 'none', name)
      self.assertIn('nothing_to_undo', found[name].flags)
      self.assertEqual(found[name].predicted['woodbury_influence'], (0, 0))
    self.assertEqual(found['no leverage'].rho_c, np.inf)
    # R and F share no direction: R is untouched, all of F is in null(X_R).
    self.assertEqual(found['orthogonal'].idle[1], 0)
    self.assertAlmostEqual(found['orthogonal'].null_share, 1)
    self.assertEqual(found['tiny ridge'].null_share, 0)

  def test_a_weight_beyond_the_critical_one(self):
    with jax.enable_x64(True):
      report = ul.audit(make())
    self.assertEqual(
      ul.check_weight(report, report.rho_c / 2, reduction='sum'), 0.5
    )
    with pytest.warns(UserWarning, match='diverge with more steps'):
      ul.check_weight(report, 2 * report.alpha_c, reduction='mean')
    with pytest.warns(UserWarning, match='rho_c_local'):
      ul.check_weight(
        report._replace(local=True), 2 * report.rho_c, reduction='sum'
      )
    for match, weight, reduction in (
      ('weight=-1', -1.0, 'sum'),
      ('reduction', 1.0, 'batch'),
    ):
      with pytest.raises(ValueError, match=match):
        ul.check_weight(report, weight, reduction=reduction)

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
      self.assertLess(free.residual, 1e-11)
      # An upper bound of zero here: R sees every direction that F needs.
      self.assertLess(dense.null_share, 1e-20)
      self.assertTrue(0 <= free.null_share < 0.01)
      # At least one product per solve: 12 Lanczos steps for each probe.
      self.assertGreater(free.products, 120)

  def test_null_share_is_an_upper_bound_and_exact_when_resolved(self):
    rng = np.random.default_rng(0)
    X, g = 0.2 * rng.normal(size=(6, 20)), rng.normal(size=20)
    G, ridge = X.T @ X, 0.3
    x = np.linalg.solve(G + ridge * np.eye(20), g)
    P = np.eye(20) - np.linalg.pinv(X) @ X
    want = (g @ P @ g / ridge) / (g @ x)
    self.assertTrue(0.5 < want < 0.99)
    with jax.enable_x64(True):
      # Six directions and null(X): the Krylov space closes after seven steps.
      got = [
        float(
          netaudit._null_share(lambda v: G @ v, jnp.asarray(g), x, ridge, k)
        )
        for k in (1, 2, 4, 7, 10)
      ]
      nothing = netaudit._null_share(lambda v: G @ v, 0 * g, 0 * x, ridge, 4)
      self.assertEqual(float(nothing), 0)
    np.testing.assert_allclose(got[3:], want, rtol=1e-9)
    for value in got[:3]:
      self.assertTrue(want - 1e-12 <= value <= 1)

  def test_named_doubts(self):
    rng = np.random.default_rng(0)
    draw = lambda *s: jnp.asarray(rng.normal(size=s), jnp.float32)
    params = {'w': draw(5, 4) / 2, 'v': draw(4, 3) / 2}
    x, y = draw(46, 5), rng.integers(0, 3, 46)
    args = (net, 'softmax', params)
    forget = {'x': x[:6], 'y': y[:6]}
    with warnings.catch_warnings(record=True) as caught:
      warnings.simplefilter('always')
      # The whole set as retain set, and three steps for cond ~ 1e8.
      got = ul.audit_network(
        *args, {'x': x, 'y': y}, forget, 1e-7, solver=ul.Solver(max_steps=3)
      )
    self.assertEqual(
      got.flags,
      ('duplicates', 'not_stationary', 'not_converged', 'ill_conditioned'),
    )
    self.assertLen([w for w in caught if w.category is UserWarning], 4)

  def test_bad_input(self):
    params = {'w': jnp.ones((5, 4)), 'v': jnp.ones((4, 3))}
    data = {'x': jnp.ones((4, 5)), 'y': jnp.zeros(4, int)}
    with pytest.raises(ValueError, match='ridge'):
      ul.audit_network(net, 'softmax', params, data, data, 0.0)


if __name__ == '__main__':
  absltest.main()

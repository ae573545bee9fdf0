"""Closed forms against simulation, and both against NumPy in float64."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest, parameterized

from tmlib import unlearning as ul

REGIMES = {
  'tall': dict(n=40, f=5, d=8, ridge=0.7),
  'wide': dict(n=9, f=4, d=20, ridge=0.5),
  'ols': dict(n=40, f=5, d=8, ridge=0.0),
  'single': dict(n=30, f=1, d=6, ridge=0.1),
}


def make(n, f, d, ridge, c=2, seed=0):
  rng = np.random.default_rng(seed)
  X = rng.normal(size=(n, d))
  Y = X @ rng.normal(size=(d, c)) + rng.normal(size=(n, c))
  return ul.RidgeProblem(
    X[f:], Y[f:], X[:f], Y[:f], ridge, prior=rng.normal(size=(d, c))
  )


class Truth:
  def __init__(self, p):
    eye = p.ridge * np.eye(p.X_R.shape[1])
    self.A_R = p.X_R.T @ p.X_R + eye
    self.A = self.A_R + p.X_F.T @ p.X_F
    rhs = p.X_R.T @ p.Y_R + eye @ p.prior
    self.retain = np.linalg.solve(self.A_R, rhs)
    self.full = np.linalg.solve(self.A, rhs + p.X_F.T @ p.Y_F)
    self.H = p.X_F @ np.linalg.solve(self.A_R, p.X_F.T)
    self.HR = p.X_R @ np.linalg.solve(self.A_R, p.X_F.T)
    self.r = p.Y_F - p.X_F @ self.full
    self.e = p.Y_F - p.X_F @ self.retain
    self.lmax = np.linalg.eigvalsh(self.H)[-1]
    self.idle = np.linalg.norm(self.H @ self.r)
    self.lr = 0.5 / np.linalg.eigvalsh(self.A)[-1]


def specs(p, t):
  """Every constructor, with every kind of field."""
  rng = np.random.default_rng(1)
  d, c = p.prior.shape
  U = rng.normal(size=(d, 3)) / d**0.5
  return [
    ul.gradient_ascent(t.lr, 7),
    ul.gradient_ascent(t.lr, 3, geometry=lambda p: jnp.eye(d) * 0.5),
    ul.graddiff(0.3 / t.lmax, reduction='sum', lr=t.lr, steps=20),
    ul.graddiff(0.01, reduction='mean', lr=t.lr, steps=20),
    ul.neggrad_plus(0.95, reduction='sum', lr=t.lr, steps=11),
    ul.retain_finetune(t.lr, 100),
    ul.retain_finetune(steps=3, solver='cg'),
    ul.influence(),
    ul.woodbury_influence(),
    ul.retain_newton(),
    ul.relabel(rng.normal(size=p.Y_F.shape), 0.7, t.lr, 25),
    ul.corrected_relabel(1.0, t.lr, 25),
    ul.scrub(0.2, 1.0, 0.5, t.lr, 13),
    ul.projected(ul.gradient_ascent(t.lr, 5)),
    ul.npo_weights(0.5, t.lr, 6, theta=p.prior),
    ul.lora(ul.retain_finetune(t.lr, 9), U),
  ]


class DynamicsTest(parameterized.TestCase):
  @parameterized.parameters(*REGIMES)
  def test_closed_form_equals_simulation(self, regime):
    p = make(**REGIMES[regime])
    t = Truth(p)
    rtol = max(1e-9, 100 * 2.3e-16 * (1 + t.lmax) * np.linalg.cond(t.A_R))
    with jax.enable_x64(True):
      starts = (None, t.retain + 0.1) if regime == 'tall' else (None,)
      for start in starts:
        q = p.replace(start=start)
        for spec in specs(p, t):
          gap = ul.closed_form_gap(q, spec)
          D = np.asarray(ul.simulate(q, spec)[-1]) - t.retain
          for got, want in ((gap.forget, p.X_F @ D), (gap.retain, p.X_R @ D)):
            error = np.linalg.norm(got - want)
            scale = max(t.idle, np.linalg.norm(want))
            self.assertLessEqual(error, rtol * scale, spec.name)

  @parameterized.parameters(0, 1, 2, 17, 64, 255)
  def test_any_number_of_steps(self, steps):
    p = make(**REGIMES['wide'])
    t = Truth(p)
    with jax.enable_x64(True):
      for spec in (
        ul.graddiff(0.3 / t.lmax, reduction='sum', lr=t.lr, steps=steps),
        ul.retain_finetune(steps=min(steps, 8), solver='cg'),
      ):
        gap = ul.closed_form_gap(p, spec)
        D = np.asarray(ul.simulate(p, spec)[-1]) - t.retain
        for got, X in ((gap.forget, p.X_F), (gap.retain, p.X_R)):
          error = np.linalg.norm(got - X @ D)
          self.assertLessEqual(error, 1e-9 * t.idle, spec.name)

  def test_simulation_is_what_people_run(self):
    # Hand-written loops in NumPy; nothing of the family in them.
    p = make(**REGIMES['tall'])
    t = Truth(p)
    res = lambda th: (p.Y_F - p.X_F @ th, p.Y_R - p.X_R @ th)
    pull = lambda th: p.ridge * (th - p.prior) - p.X_R.T @ res(th)[1]

    def run(step, k):
      th = t.full
      for _ in range(k):
        th = step(th)
      return th

    noise = np.random.default_rng(2).normal(size=p.Y_F.shape)
    cases = [
      (
        ul.gradient_ascent(t.lr, 7),
        run(lambda th: th - t.lr * p.X_F.T @ res(th)[0], 7),
      ),
      (
        ul.graddiff(0.1, reduction='sum', lr=t.lr, steps=9),
        run(lambda th: th - t.lr * (pull(th) + 0.1 * p.X_F.T @ res(th)[0]), 9),
      ),
      (
        ul.graddiff(0.02, reduction='mean', lr=t.lr, steps=9),
        run(
          lambda th: (
            th - t.lr * 35 * (pull(th) / 35 + 0.02 * p.X_F.T @ res(th)[0] / 5)
          ),
          9,
        ),
      ),
      (
        ul.neggrad_plus(0.8, reduction='sum', lr=t.lr, steps=9),
        run(
          lambda th: th - t.lr * (0.8 * pull(th) + 0.2 * p.X_F.T @ res(th)[0]),
          9,
        ),
      ),
      (
        ul.relabel(noise, 0.5, lr=t.lr, steps=9),
        run(
          lambda th: (
            th - t.lr * (pull(th) - 0.5 * p.X_F.T @ (noise - p.X_F @ th))
          ),
          9,
        ),
      ),
      (
        ul.scrub(0.2, 1.5, 0.5, t.lr, 9),
        run(
          lambda th: (
            th
            - t.lr
            * (
              0.5 * pull(th)
              + 1.5 * p.X_R.T @ p.X_R @ (th - t.full)
              - 0.2 * p.X_F.T @ p.X_F @ (th - t.full)
            )
          ),
          9,
        ),
      ),
      (ul.influence(), t.full - np.linalg.solve(t.A, p.X_F.T @ t.r)),
    ]
    with jax.enable_x64(True):
      for spec, want in cases:
        got = np.asarray(ul.simulate(p, spec)[-1])
        np.testing.assert_allclose(got, want, rtol=1e-9, err_msg=spec.name)

  @parameterized.parameters(*REGIMES)
  def test_exact_methods_reach_the_retrained_outputs(self, regime):
    p = make(**REGIMES[regime])
    t = Truth(p)
    with jax.enable_x64(True):
      for spec in (
        ul.woodbury_influence(),
        ul.retain_newton(),
        ul.corrected_relabel(),
        ul.retain_finetune(),
      ):
        gap = ul.closed_form_gap(p, spec)
        self.assertLess(np.linalg.norm(gap.forget), 1e-9 * t.idle, spec.name)
        self.assertLess(np.linalg.norm(gap.retain), 1e-9 * t.idle, spec.name)
      # From any start, where Woodbury is not exact any more.
      q = p.replace(start=t.full + 0.3)
      for spec in (ul.retain_newton(), ul.corrected_relabel()):
        gap = ul.closed_form_gap(q, spec)
        self.assertLess(np.linalg.norm(gap.forget), 1e-8 * t.idle, spec.name)
      np.testing.assert_allclose(
        ul.corrected_targets(q), p.X_F @ t.retain, rtol=1e-9
      )

  def test_table_of_closed_forms(self):
    p = make(**REGIMES['tall'])
    t = Truth(p)
    eye = np.eye(len(t.H))
    K = p.X_F @ p.X_F.T
    h = np.linalg.solve(eye + t.H, t.H)
    rho = 0.4 / t.lmax
    Z = np.random.default_rng(3).normal(size=p.Y_F.shape)
    power = np.linalg.matrix_power(eye + t.lr * K, 6)
    over = np.linalg.solve(eye - rho * t.H, t.e)
    cases = [
      (ul.gradient_ascent(0.0, 1), t.H @ t.r, t.HR @ t.r),
      (ul.gradient_ascent(t.lr, 6), (eye + t.H - power) @ t.r, None),
      (ul.influence(), t.H @ h @ t.r, t.HR @ h @ t.r),
      (
        ul.graddiff(rho, reduction='sum'),
        -rho * t.H @ over,
        -rho * t.HR @ over,
      ),
      (
        ul.relabel(Z, 0.7),
        0.7 * t.H @ np.linalg.solve(eye + 0.7 * t.H, Z - p.X_F @ t.retain),
        None,
      ),
    ]
    with jax.enable_x64(True):
      for spec, forget, retain in cases:
        gap = ul.closed_form_gap(p, spec)
        np.testing.assert_allclose(gap.forget, forget, rtol=1e-8)
        if retain is not None:
          np.testing.assert_allclose(gap.retain, retain, rtol=1e-8)

  def test_limit_is_where_many_steps_end(self):
    p = make(**REGIMES['tall'])
    t = Truth(p)
    noise = np.random.default_rng(2).normal(size=p.Y_F.shape)
    U = np.linalg.qr(np.random.default_rng(3).normal(size=(8, 3)))[0]
    with jax.enable_x64(True):
      for spec in (
        ul.graddiff(0.2 / t.lmax, reduction='sum', lr=t.lr),
        ul.relabel(noise, 2.0, lr=t.lr),
        ul.lora(ul.retain_finetune(t.lr), U),
        ul.scrub(0.1, 1.0, 1.0, t.lr, None),
      ):
        limit = ul.closed_form_gap(p, spec)
        late = ul.closed_form_gap(p, spec._replace(steps=20_000))
        np.testing.assert_allclose(limit.theta, late.theta, atol=1e-8)

  def test_limit_with_complex_eigenvalues(self):
    # G M = [[1, -5], [5, 1]] has 1 +- 5i: |1 - lr e| < 1 iff lr < 2 / 26.
    eye, turn = np.eye(2), np.array([[1.0, -5.0], [5.0, 1.0]])
    p = ul.RidgeProblem(eye, eye, np.ones((1, 2)), np.zeros((1, 2)), 0.0)
    with jax.enable_x64(True):
      spec = ul.UnlearnSpec('turn', weight_R=1.0, geometry=turn, steps=None)
      near, far = spec._replace(lr=0.076), spec._replace(lr=0.078)
      np.testing.assert_allclose(
        ul.closed_form_gap(p, near).theta, 0, atol=1e-12
      )
      with pytest.raises(ValueError, match='below 7.692e-02'):
        ul.closed_form_gap(p, far)
      size = lambda s: np.linalg.norm(
        ul.closed_form_gap(p, s._replace(steps=20_000)).theta
      )
      self.assertLess(size(near), 1e-3)
      self.assertGreater(size(far), 1e3)

  @parameterized.parameters(*REGIMES)
  def test_threshold_within_one_percent(self, regime):
    p = make(**REGIMES[regime])
    t = Truth(p)
    with jax.enable_x64(True):
      rho = float(ul.critical_weight(t.lmax, 'sum', len(p.X_R), len(p.X_F)))
      below = ul.graddiff(0.99 * rho, reduction='sum')
      above = ul.graddiff(1.01 * rho, reduction='sum')
      limit = ul.closed_form_gap(p, below)
      with pytest.raises(ValueError, match='no limit exists'):
        ul.closed_form_gap(p, above)
      # And by running it: the distance to the limit shrinks, or grows.
      lr = 1 / np.linalg.eigvalsh(t.A)[-1]
      slow = lambda f: np.linalg.eigvalsh(t.A_R - f * rho * p.X_F.T @ p.X_F)[0]
      self.assertLess(slow(1.01), 0)
      time = int(10 / (lr * -slow(1.01)))
      far = lambda s, k: np.linalg.norm(
        ul.closed_form_gap(p, s._replace(lr=lr, steps=k)).theta
      )
      with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        grown = far(above, 2 * time) / far(above, time)
      self.assertGreater(grown, 1e4)  # exp(10), once it dominates
      np.testing.assert_allclose(
        far(below, int(30 / (lr * slow(0.99)))),
        np.linalg.norm(limit.theta),
        rtol=1e-6,
      )
      alpha = float(ul.critical_weight(t.lmax, 'mean', len(p.X_R), len(p.X_F)))
      with pytest.raises(ValueError, match='no limit exists'):
        ul.closed_form_gap(p, ul.graddiff(1.01 * alpha, reduction='mean'))
      ul.closed_form_gap(p, ul.graddiff(0.99 * alpha, reduction='mean'))

  def test_projection_leaves_the_retain_gap(self):
    p = make(**REGIMES['wide'])
    t = Truth(p)
    with jax.enable_x64(True):
      G = np.eye(20) / p.ridge
      spec = ul.projected(ul.gradient_ascent(1.0, 1, geometry=G))
      gap = ul.closed_form_gap(p, spec)
      np.testing.assert_allclose(gap.retain, t.HR @ t.r, rtol=1e-9)
      _, _, vt = np.linalg.svd(p.X_R, full_matrices=False)
      seen = vt.T @ vt
      parallel = p.X_F @ seen @ np.linalg.solve(t.A_R, p.X_F.T)
      np.testing.assert_allclose(gap.forget, parallel @ t.r, rtol=1e-7)

  def test_projecting_off_the_retain_gradient_stops_everything(self):
    # grad L_R = -grad L_F at a stationary model (one output: one vector).
    p = make(40, 5, 8, 0.7, c=1)
    t = Truth(p)
    g = p.X_F.T @ t.r
    P = np.eye(8) - g @ g.T / (g.T @ g)
    with jax.enable_x64(True):
      spec = ul.projected(ul.gradient_ascent(1.0, 1), P)
      gap = ul.closed_form_gap(p, spec)
      np.testing.assert_allclose(gap.forget, t.H @ t.r, rtol=1e-9)

  def test_npo_starts_as_gradient_ascent(self):
    p = make(**REGIMES['tall'])
    t = Truth(p)
    with jax.enable_x64(True):
      live = np.asarray(ul.simulate_npo(p, 0.5, t.lr, 10))
      frozen = np.asarray(ul.simulate(p, ul.npo_weights(0.5, t.lr, 10)))
      ascent = np.asarray(ul.simulate(p, ul.gradient_ascent(t.lr, 10)))
      np.testing.assert_allclose(frozen, ascent, rtol=1e-12)
      np.testing.assert_allclose(live[1], ascent[1], rtol=1e-9)
      # Live weights shrink as the loss grows: a smaller move.
      moved = lambda path: np.linalg.norm(path[-1] - path[0])
      self.assertLess(moved(live), moved(frozen))

  def test_best_step_and_stopping(self):
    p = make(**REGIMES['tall'])
    t = Truth(p)
    with jax.enable_x64(True):
      spec = ul.gradient_ascent(1.0, 1)
      g = p.X_F.T @ t.r
      for match, X in (
        ('forget', p.X_F),
        ('retain', p.X_R),
        ('both', np.concatenate([p.X_F, p.X_R])),
      ):
        gap, move = X @ (t.full - t.retain), X @ g
        want = np.sum(gap * move) / np.sum(move**2)
        got = ul.optimal_scalar_step(p, spec, match)
        np.testing.assert_allclose(got, want, rtol=1e-9)
      # One point: the right number of steps is log(1+h) / log(1+lr k).
      q = make(**REGIMES['single'])
      s = Truth(q)
      kappa = (q.X_F @ q.X_F.T).item()
      k = np.log1p(s.lmax) / np.log1p(0.01 * kappa)
      loss = ul.stopping_time(q, ul.gradient_ascent(0.01, 500), 'loss')
      self.assertEqual(loss, int(np.ceil(k)))
      path = np.asarray(ul.simulate(q, ul.gradient_ascent(0.01, 500)))
      D = path - s.retain
      size = np.sum((q.X_F @ D) ** 2, (1, 2)) + np.sum((q.X_R @ D) ** 2, (1, 2))
      self.assertEqual(
        ul.stopping_time(q, ul.gradient_ascent(0.01, 500)), size.argmin()
      )

  def test_influence_can_raise_the_retain_gap(self):
    # With a ridge the bound lmax / (1 + lmax) holds on F but not on R.
    with jax.enable_x64(True):
      for seed in range(3):
        p = make(9, 4, 20, 0.01, c=1, seed=seed)
        t = Truth(p)
        bound = t.lmax / (1 + t.lmax) * (1 + 1e-9)
        gap = ul.closed_form_gap(p, ul.influence())
        self.assertLessEqual(np.linalg.norm(gap.forget) / t.idle, bound)
      # Three retain and four forget points: some residual r harms nothing,
      # H_RF r ~ 0, yet H_RF h r does not vanish.
      p = make(7, 4, 20, 0.01, c=1)
      t = Truth(p)
      r = np.linalg.svd(t.HR)[2][-1:].T
      e = r + t.H @ r
      p = p.replace(Y_F=p.X_F @ t.retain + e)
      idle = np.linalg.norm(t.HR @ r)
      gap = ul.closed_form_gap(p, ul.influence())
      self.assertGreater(np.linalg.norm(gap.retain), 100 * idle)


class BadInputTest(absltest.TestCase):
  def test_errors(self):
    p = jax.tree.map(np.float32, make(**REGIMES['tall']))
    for match, call in (
      ('reduction', lambda: ul.graddiff(0.1, reduction='batch')),
      ('must be >= 0', lambda: ul.graddiff(-0.1, reduction='sum')),
      ('beta', lambda: ul.neggrad_plus(0.0, reduction='sum')),
      ('weight', lambda: ul.relabel(p.Y_F, 0.0)),
      ('solver', lambda: ul.retain_finetune(solver='newton')),
      ('beta', lambda: ul.npo_weights(0.0, 0.1)),
      (
        'projection',
        lambda: ul.projected(ul.retain_finetune(solver='cg', steps=1)),
      ),
      ('simulate needs', lambda: ul.simulate(p, ul.retain_finetune())),
      ('target_F', lambda: ul.closed_form_gap(p, ul.relabel(p.Y_F[:2]))),
      (
        'geometry',
        lambda: ul.closed_form_gap(
          p, ul.gradient_ascent(0.1, 1, geometry=np.ones((2, 2)))
        ),
      ),
      ('diverges', lambda: ul.closed_form_gap(p, ul.retain_finetune(10.0))),
      (
        'overflow within 1000000 steps',
        lambda: ul.closed_form_gap(p, ul.gradient_ascent(0.1, 10**6)),
      ),
      ('integer', lambda: ul.closed_form_gap(p, ul.gradient_ascent(0.1, 2.5))),
      ('lr holds', lambda: ul.closed_form_gap(p, ul.gradient_ascent(np.nan))),
      (
        'target_F holds NaN',
        lambda: ul.closed_form_gap(p, ul.relabel(p.Y_F * np.nan)),
      ),
      (
        'weight_F has shape',
        lambda: ul.closed_form_gap(p, ul.UnlearnSpec('x', np.ones(3))),
      ),
      (
        'projection has shape',
        lambda: ul.closed_form_gap(
          p, ul.projected(ul.gradient_ascent(0.1), np.ones((3, 3)))
        ),
      ),
      ('must be > 0', lambda: ul.critical_weight(1.0, 'mean', 0, 3)),
      ('match', lambda: ul.stopping_time(p, ul.gradient_ascent(0.1, 2), 'x')),
      (
        'match',
        lambda: ul.optimal_scalar_step(p, ul.gradient_ascent(0.1, 2), 'x'),
      ),
    ):
      with pytest.raises(ValueError, match=match):
        call()
    with pytest.raises(TypeError):
      ul.graddiff(0.1)  # sums or means must be said

  def test_beyond_critical_warns_for_finite_steps(self):
    p = jax.tree.map(np.float32, make(**REGIMES['tall']))
    with pytest.warns(UserWarning, match='critical value'):
      ul.closed_form_gap(
        p, ul.graddiff(100.0, reduction='sum', lr=1e-4, steps=5)
      )


if __name__ == '__main__':
  absltest.main()

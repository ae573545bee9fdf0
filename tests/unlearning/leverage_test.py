"""The identities of the theory, against NumPy in float64."""

import jax
import numpy as np
import pytest
from absl.testing import absltest, parameterized
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib import unlearning as ul

REGIMES = {
  'tall': dict(n=40, f=5, d=8, ridge=0.7),
  'wide': dict(n=9, f=4, d=20, ridge=0.5),
  'ols': dict(n=40, f=5, d=8, ridge=0.0),
  'single': dict(n=30, f=1, d=6, ridge=0.1),
}


def make(n, f, d, ridge, c=3, seed=0, decades=1.0, prior=True):
  rng = np.random.default_rng(seed)
  spread = np.logspace(0, -decades, d)
  X = rng.normal(size=(n, d)) * spread
  Y = X @ (rng.normal(size=(d, c)) / spread[:, None]) + rng.normal(size=(n, c))
  return ul.RidgeProblem(
    X_R=X[f:],
    Y_R=Y[f:],
    X_F=X[:f],
    Y_F=Y[:f],
    ridge=ridge,
    prior=rng.normal(size=(d, c)) if prior else None,
  )


class Truth:
  """Both models by stacked least squares (QR), never by normal equations."""

  def __init__(self, p):
    d = p.X_R.shape[1]
    root = np.sqrt(p.ridge)
    X_R = np.concatenate([p.X_R, root * np.eye(d)])
    Y_R = np.concatenate(
      [
        p.Y_R,
        root
        * (0 if p.prior is None else p.prior)
        * np.ones((d, p.Y_R.shape[1])),
      ]
    )
    lstsq = lambda x, y: np.linalg.lstsq(x, y, rcond=None)[0]
    self.retain = lstsq(X_R, Y_R)
    self.full = lstsq(
      np.concatenate([X_R, p.X_F]), np.concatenate([Y_R, p.Y_F])
    )
    self.A_R = X_R.T @ X_R
    self.A = self.A_R + p.X_F.T @ p.X_F
    q, r = np.linalg.qr(X_R)
    half = np.linalg.solve(r.T, p.X_F.T)
    self.H_FF = half.T @ half
    self.H_RF = q[: len(p.X_R)] @ half
    self.r_F = p.Y_F - p.X_F @ self.full
    self.lmax = np.linalg.eigvalsh(self.H_FF)[-1]
    self.cond = np.linalg.cond(self.A_R)
    self.rtol = max(1e-9, 50 * 2.3e-16 * (1 + self.lmax) * self.cond)


def close(got, want, rtol, scale=None):
  scale = np.linalg.norm(want) if scale is None else scale
  error = np.linalg.norm(np.asarray(got) - want)
  assert error <= rtol * scale + 1e-13, f'{error} > {rtol} * {scale}'


def check_identities(p):
  t = Truth(p)
  H, HR = t.H_FF, t.H_RF
  eye = np.eye(len(H))
  with jax.enable_x64(True):
    close(ul.fit_full(p), t.full, t.rtol)
    close(ul.fit_retain(p), t.retain, t.rtol)
    forms = ['primal', 'downdate'] + (['dual'] if p.ridge > 0 else [])
    for form in forms:
      lev = ul.leverage(p, form=form)
      close(lev.forget_self, H, t.rtol)
      close(lev.retain_cross, HR, t.rtol)
      close(lev.eigenvalues, np.linalg.eigvalsh(H)[::-1], t.rtol)
    # (3), (1), (2), queries.
    e_F = p.Y_F - p.X_F @ t.retain
    close(ul.loo_residual(lev, t.r_F), e_F, t.rtol)
    close(
      ul.cross_leverage(p, p.X_R) @ t.r_F,
      p.X_R @ (t.full - t.retain),
      t.rtol,
      np.linalg.norm(HR @ t.r_F),
    )
    close(H @ t.r_F, p.X_F @ (t.full - t.retain), t.rtol)
    # (4) hat blocks.
    h_FF = p.X_F @ np.linalg.solve(t.A, p.X_F.T)
    h_RF = p.X_R @ np.linalg.solve(t.A, p.X_F.T)
    close(lev.forget_self @ np.linalg.inv(eye + H), h_FF, t.rtol)
    close(lev.retain_cross @ np.linalg.inv(eye + H), h_RF, t.rtol)
    # (5) and (6).
    inner = p.X_F @ np.linalg.solve(t.A_R, np.linalg.solve(t.A_R, p.X_F.T))
    close(
      lev.retain_cross.T @ lev.retain_cross,
      H - p.ridge * inner,
      t.rtol,
      np.linalg.norm(H),
    )
    L_R = lambda th: (
      0.5 * np.sum((p.Y_R - p.X_R @ th) ** 2)
      + (0.5 * p.ridge * np.sum((th - p.prior) ** 2))
    )
    excess = 0.5 * np.sum(t.r_F * (lev.forget_self @ t.r_F))
    close(excess, L_R(t.full) - L_R(t.retain), 1e-9, L_R(t.full))
    logdet = np.linalg.slogdet(t.A)[1] - np.linalg.slogdet(t.A_R)[1]
    close(np.log1p(lev.eigenvalues).sum(), logdet, t.rtol, 1 + abs(logdet))


class LeverageTest(parameterized.TestCase):
  @parameterized.parameters(*REGIMES)
  def test_identities(self, regime):
    check_identities(make(**REGIMES[regime]))

  def test_by_hand(self):
    # One feature: A_R = 1 + 1 = 2 (x_R = 1, ridge 1), x_F = 2: H_FF = 4 / 2,
    # H_RF = 2 / 2; th_R = 3 / 2, th_* = (3 + 2 * 9) / (2 + 4) = 7 / 2.
    p = ul.RidgeProblem(*(np.float32([[v]]) for v in (1, 3, 2, 9)), ridge=1.0)
    lev = ul.leverage(p)
    np.testing.assert_allclose(lev.forget_self, [[2.0]], rtol=1e-6)
    np.testing.assert_allclose(lev.retain_cross, [[1.0]], rtol=1e-6)
    np.testing.assert_allclose(ul.fit_retain(p), [[1.5]], rtol=1e-6)
    np.testing.assert_allclose(ul.fit_full(p), [[3.5]], rtol=1e-6)
    # r_F = 9 - 7 = 2, e_F = 9 - 3 = 6 = (1 + 2) * 2.
    np.testing.assert_allclose(
      ul.loo_residual(lev, np.float32([[2.0]])), [[6.0]], rtol=1e-6
    )

  # Shapes from a short list, because each one compiles anew.
  @settings(max_examples=30, deadline=None)
  @given(
    st.sampled_from([(40, 5, 8), (9, 4, 20), (30, 1, 6), (7, 6, 3)]),
    st.floats(0.01, 10.0),
    st.floats(0.0, 3.0),
    st.integers(0, 10_000),
  )
  def test_identities_hold_for_any_problem(self, shape, ridge, decades, seed):
    check_identities(make(*shape, ridge, seed=seed, decades=decades))

  def test_downdate_is_accurate_at_extreme_leverage(self):
    p = make(30, 2, 5, 0.1)
    p = p.replace(X_F=p.X_F * 3e3)
    t = Truth(p)
    self.assertGreater(t.lmax, 1e6)
    with jax.enable_x64(True):
      lev = ul.leverage(p, form='downdate')
      close(lev.forget_self, t.H_FF, t.rtol)
      self.assertLess(t.rtol, 1e-4)

  def test_sample_weights_are_repetitions(self):
    p = make(20, 3, 4, 0.5)
    w_R, w_F = np.ones(17), np.array([2.0, 1.0, 3.0])
    w_R[3] = 2
    again = np.repeat(np.arange(3), [2, 1, 3])
    twice = np.append(np.arange(17), 3)
    q = p.replace(
      X_R=p.X_R[twice], Y_R=p.Y_R[twice], X_F=p.X_F[again], Y_F=p.Y_F[again]
    )
    with jax.enable_x64(True):
      weighed = ul.weigh(p, w_R, w_F)
      np.testing.assert_allclose(ul.fit_full(weighed), ul.fit_full(q))
      np.testing.assert_allclose(
        ul.leverage(weighed).eigenvalues,
        ul.leverage(q).eigenvalues[:3],
        rtol=1e-9,
      )


class BadInputTest(absltest.TestCase):
  def setUp(self):
    super().setUp()
    self.p = jax.tree.map(np.float32, make(20, 3, 4, 0.5))

  def bad(self, match, fn=ul.fit_full, error=ValueError, **changes):
    with pytest.raises(error, match=match):
      fn(self.p.replace(**changes))

  def test_sets(self):
    empty = np.zeros((0, 4), np.float32)
    self.bad('X_F is empty', X_F=empty, Y_F=np.zeros((0, 3), np.float32))
    self.bad('X_R is empty', X_R=empty, Y_R=np.zeros((0, 3), np.float32))
    self.bad('rows', Y_F=self.p.Y_F[:2])
    self.bad('outputs', Y_F=self.p.Y_F[:, :2])
    self.bad('features', X_F=self.p.X_F[:, :2])
    self.bad('two axes', Y_F=self.p.Y_F[:, 0])
    self.bad('NaN', Y_F=self.p.Y_F * np.nan)
    self.bad('ridge', ridge=-1.0)
    self.bad('prior has shape', prior=np.zeros((1, 1), np.float32))
    self.bad('floats', error=TypeError, X_F=np.ones((3, 4), int))
    self.bad('pass floats', error=TypeError, X_F=self.p.X_F.astype(str))
    self.bad('masked', error=TypeError, X_F=np.ma.masked_less(self.p.X_F, 0))
    self.bad('finite', ridge=np.inf)
    self.bad('one number', error=TypeError, ridge='1.0')
    self.bad('one number', error=TypeError, ridge=[1.0, 2.0])

  def test_lists_are_arrays(self):
    p = ul.RidgeProblem([[1.0]], [[3.0]], [[2.0]], [[9.0]], 1.0)
    with jax.enable_x64(True):
      np.testing.assert_allclose(ul.fit_retain(p), [[1.5]])

  def test_queries(self):
    with pytest.raises(ValueError, match='X_Q has 2 features'):
      ul.cross_leverage(self.p, np.ones((1, 2), np.float32))
    with pytest.raises(ValueError, match='X_Q holds NaN'):
      ul.cross_leverage(self.p, np.full((1, 4), np.nan, np.float32))
    wide = jax.tree.map(np.float32, make(8, 3, 12, 0.0))
    with pytest.raises(ValueError, match='A_R is singular'):
      ul.cross_leverage(wide, np.ones((1, 12), np.float32))

  def test_float64_is_never_cast_in_silence(self):
    self.bad('x64 is off', X_F=np.float64(self.p.X_F))

  def test_singular(self):
    wide = jax.tree.map(np.float32, make(8, 3, 12, 0.0))
    with pytest.raises(ValueError, match='A_R is singular .rank 5 of 12'):
      ul.fit_retain(wide)
    with pytest.raises(ValueError, match='must be > 0'):
      ul.leverage(wide, form='dual')
    # Removing F loses a direction that only F has.
    X = np.float32(np.eye(4))
    y = np.ones((4, 1), np.float32)
    alone = ul.RidgeProblem(X[:3], y[:3], X[3:], y[3:])
    with pytest.raises(ValueError, match='loses rank'):
      ul.leverage(alone, form='downdate')
    with pytest.raises(ValueError, match='allowed'):
      ul.leverage(self.p, form='fast')

  def test_conditioning_warns_in_float32(self):
    scale = np.float32([1, 1, 1, 1e-2])
    p = self.p.replace(X_R=self.p.X_R * scale, ridge=0.0)
    with pytest.warns(UserWarning, match='leaves no digits'):
      ul.leverage(p)

  def test_weights_and_copies(self):
    with pytest.raises(ValueError, match='negative'):
      ul.weigh(self.p, w_F=np.float32([1, -1, 1]))
    with pytest.raises(ValueError, match='w_F is zero throughout'):
      ul.weigh(self.p, w_F=np.zeros(3))
    with pytest.raises(ValueError, match='w_F has shape .2,.'):
      ul.weigh(self.p, w_F=np.ones(2))
    both = np.concatenate([self.p.X_R, self.p.X_F[:2]])
    self.assertEqual(ul.duplicates(both, self.p.X_F)[0], 2)
    self.assertEqual(ul.duplicates(self.p.X_R, self.p.X_F)[0], 0)
    self.assertAlmostEqual(ul.duplicates(both, self.p.X_F)[1], 1, places=5)


if __name__ == '__main__':
  absltest.main()

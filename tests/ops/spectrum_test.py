"""Lanczos and trace estimators against dense NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl.testing import absltest

from tmlib.ops import spectrum


def spd(dim=40, seed=0):
  rng = np.random.default_rng(seed)
  q, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
  return (q * np.logspace(1, -3, dim)) @ q.T


class LanczosTest(absltest.TestCase):
  def test_all_steps_give_all_eigenpairs(self):
    A = spd(12)
    with jax.enable_x64(True):
      got = spectrum.lanczos(lambda v: A @ v, jnp.ones(12), 12)
    np.testing.assert_allclose(
      got.values, np.linalg.eigvalsh(A)[::-1], rtol=1e-8
    )
    vectors = np.asarray(got.vectors)
    np.testing.assert_allclose(
      A @ vectors, vectors * np.asarray(got.values), atol=1e-8
    )

  def test_largest_value_and_its_bound(self):
    A = spd()
    with jax.enable_x64(True):
      got = spectrum.lanczos(lambda v: A @ v, jnp.ones(40), 15)
    error = abs(got.values[0] - 10.0)
    self.assertLess(error, 1e-6)
    self.assertLessEqual(error, got.bounds[0] + 1e-12)

  def test_quadrature(self):
    A = spd(20)
    v = np.random.default_rng(1).normal(size=20)
    v /= np.linalg.norm(v)
    with jax.enable_x64(True):
      got = spectrum.lanczos(lambda x: A @ x, jnp.asarray(v), 20)
      value = jnp.sum(got.weights * jnp.log1p(got.values))
    eigs, q = np.linalg.eigh(A)
    want = np.sum((q.T @ v) ** 2 * np.log1p(eigs))
    np.testing.assert_allclose(value, want, rtol=1e-9)

  def test_what_the_operator_reports_comes_along(self):
    A = spd(12)
    report = lambda v: (A @ v, jnp.sum(v**2))
    with jax.enable_x64(True):
      got, size = spectrum.lanczos(report, jnp.ones(12), 5, has_aux=True)
      want = spectrum.lanczos(lambda v: A @ v, jnp.ones(12), 5)
    np.testing.assert_array_equal(got.values, want.values)
    np.testing.assert_allclose(size, np.ones(5))  # every direction is a unit

  def test_early_end(self):
    A = jnp.diag(jnp.array([3.0, 1.0, 1.0, 1.0]))
    got = spectrum.lanczos(lambda v: A @ v, jnp.array([1.0, 1, 0, 0]), 4)
    np.testing.assert_allclose(sorted(got.values)[-2:], [1, 3], rtol=1e-6)
    np.testing.assert_allclose(jnp.sum(got.weights * got.values), 2, rtol=1e-6)


class TraceTest(absltest.TestCase):
  def test_estimators(self):
    A = spd()
    matvec = lambda v: A @ v
    key = jax.random.key(0)
    with jax.enable_x64(True):
      dtype = jnp.float64
      value, error = spectrum.hutchinson_trace(matvec, key, 40, 400, dtype)
      self.assertLess(abs(value - np.trace(A)), 4 * error)
      diag = spectrum.hutchinson_diag(matvec, key, 40, 4000, dtype)
      np.testing.assert_allclose(diag, np.diag(A), atol=0.2)
      plus = spectrum.hutchpp_trace(matvec, key, 40, 60, dtype)
      np.testing.assert_allclose(plus, np.trace(A), rtol=0.01)
      full = spectrum.hutchpp_trace(matvec, key, 40, 120, dtype)
      np.testing.assert_allclose(full, np.trace(A), rtol=1e-9)
      logdet = spectrum.slq_logdet(matvec, key, 40, 100, 25, dtype)
      want = np.linalg.slogdet(np.eye(40) + A)[1]
      np.testing.assert_allclose(logdet, want, rtol=0.03)

  def test_identity_is_exact(self):
    got = spectrum.slq_logdet(lambda v: v, jax.random.key(0), 7, 1, 3)
    np.testing.assert_allclose(got, 7 * np.log(2), rtol=1e-5)
    diag = spectrum.hutchinson_diag(lambda v: 2 * v, jax.random.key(0), 7, 2)
    np.testing.assert_allclose(diag, np.full(7, 2.0))

  def test_bad_arguments(self):
    key = jax.random.key(0)
    for call in (
      lambda: spectrum.lanczos(lambda v: v, jnp.ones(3), 4),
      lambda: spectrum.hutchinson_trace(lambda v: v, key, 3, 1),
      lambda: spectrum.hutchpp_trace(lambda v: v, key, 3, 2),
      lambda: spectrum.slq_logdet(lambda v: v, key, 3, 0, 2),
    ):
      with pytest.raises(ValueError, match='must be'):
        call()


if __name__ == '__main__':
  absltest.main()

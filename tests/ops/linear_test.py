"""Solvers against NumPy and SciPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse.linalg
from absl.testing import absltest, parameterized

from tmlib.ops import linear


def spd(dim=30, decades=3.0, seed=0):
  rng = np.random.default_rng(seed)
  q, _ = np.linalg.qr(rng.normal(size=(dim, dim)))
  return (q * np.logspace(0, -decades, dim)) @ q.T, rng.normal(size=dim)


class CGTest(parameterized.TestCase):
  @parameterized.parameters(0, 1, 5, 12)
  def test_iterates_are_those_of_scipy(self, steps):
    A, b = spd()
    want, _ = scipy.sparse.linalg.cg(A, b, rtol=0, maxiter=max(steps, 1))
    want = want if steps else np.zeros(30)
    with jax.enable_x64(True):
      got = linear.cg(lambda v: A @ v, b, max_steps=steps, tol=0.0)
    np.testing.assert_allclose(got.x, want, rtol=1e-6, atol=1e-12)
    self.assertEqual(got.steps, steps)

  def test_solves_to_tolerance_from_a_start(self):
    A, b = spd()
    with jax.enable_x64(True):
      got = jax.jit(
        lambda b, x: linear.cg(lambda v: A @ v, b, x, max_steps=500, tol=1e-10)
      )(b, b)
    np.testing.assert_allclose(got.x, np.linalg.solve(A, b), rtol=1e-6)
    self.assertLess(got.residual, 1e-10)
    self.assertLess(got.steps, 500)

  def test_trees_and_many_right_hand_sides(self):
    A, _ = spd(6, 1.0)
    B = np.random.default_rng(1).normal(size=(3, 6))
    split = lambda v: {'a': v[:2], 'b': v[2:].reshape(2, 2)}
    join = lambda t: jnp.concatenate([t['a'], t['b'].ravel()])
    with jax.enable_x64(True):
      solve = lambda b: join(
        linear.cg(lambda t: split(A @ join(t)), split(b), tol=1e-12).x
      )
      got = jax.vmap(solve)(jnp.asarray(B))
    np.testing.assert_allclose(got, np.linalg.solve(A, B.T).T, rtol=1e-8)

  def test_preconditioner_cuts_steps(self):
    rng = np.random.default_rng(0)
    q, _ = np.linalg.qr(rng.normal(size=(80, 80)))
    eigs = np.concatenate([np.logspace(4, 1, 15), np.full(65, 1e-2)])
    A, b, ridge = (q * eigs) @ q.T, rng.normal(size=80), 0.1
    with jax.enable_x64(True):
      matvec = lambda v: A @ v
      solve = linear.nystrom_preconditioner(
        matvec, jax.random.key(0), 80, 20, ridge
      )
      damped = lambda v: matvec(v) + ridge * v
      plain = linear.cg(damped, b, tol=1e-8, max_steps=500)
      fast = linear.cg(damped, b, tol=1e-8, max_steps=500, preconditioner=solve)
    want = np.linalg.solve(A + ridge * np.eye(80), b)
    np.testing.assert_allclose(fast.x, want, rtol=1e-5, atol=1e-7)
    self.assertLess(2 * int(fast.steps), int(plain.steps))

  def test_negative_curvature_is_reported_and_not_taken(self):
    got = linear.cg(lambda v: jnp.array([1.0, -2.0]) * v, jnp.ones(2))
    self.assertLess(got.curvature, 0)
    self.assertTrue(np.isfinite(got.x).all())

  def test_zero_right_hand_side(self):
    got = linear.cg(lambda v: v, jnp.zeros(3))
    np.testing.assert_array_equal(got.x, np.zeros(3))
    self.assertEqual(got.residual, 0)

  def test_bad_arguments(self):
    with pytest.raises(ValueError, match='max_steps'):
      linear.cg(lambda v: v, jnp.ones(2), max_steps=-1)
    for rank, ridge in ((0, 1.0), (9, 1.0), (2, 0.0)):
      with pytest.raises(ValueError, match='rank|ridge'):
        linear.nystrom_preconditioner(
          lambda v: v, jax.random.key(0), 4, rank, ridge
        )


class ProductTest(absltest.TestCase):
  def test_products_equal_dense_jacobians(self):
    rng = np.random.default_rng(0)
    W, v = rng.normal(size=(3, 4)), rng.normal(size=(3, 4))
    x = rng.normal(size=(5, 3))
    fun = lambda w: jnp.tanh(x @ w)
    with jax.enable_x64(True):
      J = np.asarray(jax.jacfwd(fun)(W)).reshape(20, 12)
      got = linear.jacobian_product(fun, jnp.asarray(W), v)
      np.testing.assert_allclose(np.ravel(got), J @ v.ravel(), rtol=1e-12)
      weight = rng.uniform(1, 2, (5, 4))
      got = linear.ggn_product(fun, lambda f, u: weight * u, W, v)
    want = J.T @ (weight.ravel() * (J @ v.ravel()))
    np.testing.assert_allclose(np.ravel(got), want, rtol=1e-12)

  def test_runs_where_there_is_no_forward_mode(self):
    @jax.custom_vjp
    def square(x):
      return x**2

    square.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
    x, v = jnp.arange(3.0), jnp.ones(3)
    with pytest.raises(TypeError):
      jax.jvp(square, (x,), (v,))
    got = linear.ggn_product(square, lambda f, u: u, x, v)
    np.testing.assert_allclose(got, 4 * x**2)


if __name__ == '__main__':
  absltest.main()

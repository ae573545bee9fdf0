"""Linear systems and curvature products that never form a matrix.

Everything takes `matvec: x -> A x` for a symmetric positive definite A. The
unknown `x` may be any pytree of float arrays in `cg`, `jacobian_product` and
`ggn_product`; the Nystrom sketch works on flat vectors.

Axes: P unknowns, K rank of a sketch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp

__all__ = [
  'CGResult',
  'cg',
  'ggn_product',
  'jacobian_product',
  'nystrom_preconditioner',
  'tree_axpy',
  'tree_dot',
]

Tree = Any
MatVec = Callable[[Tree], Tree]


class CGResult(NamedTuple):
  """Solution of A x = b and what it took.

  `curvature` is the smallest p' A p / p' p met on the way: a value <= 0 proves
  that A is not positive definite, and the iteration stopped there.
  """

  x: Tree
  residual: jax.Array  # [] ||b - A x|| / ||b|| of the recurrence
  steps: jax.Array  # [] int32
  curvature: jax.Array  # []


def tree_dot(a: Tree, b: Tree) -> jax.Array:
  """Inner product of two pytrees of equal structure, a scalar."""
  products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
  return jnp.asarray(sum(jax.tree.leaves(products)))


def tree_axpy(scale: jax.Array | float, a: Tree, b: Tree) -> Tree:
  """The pytree scale * a + b."""
  return jax.tree.map(lambda x, y: scale * x + y, a, b)


def cg(
  matvec: MatVec,
  b: Tree,
  x0: Tree | None = None,
  *,
  preconditioner: MatVec | None = None,
  max_steps: int = 100,
  tol: float = 1e-6,
) -> CGResult:
  r"""Preconditioned conjugate gradients for A x = b.

  After k steps x_k minimises ||x - A^{-1} b||_A over x_0 + the k-th Krylov
  space of M^{-1} A, so that the error falls at least like
  2 ((sqrt(cond) - 1) / (sqrt(cond) + 1))^k in the A norm.

  Several right-hand sides: `jax.vmap` over `b` (the loop runs until the last
  one has converged; the others are frozen).

  Args:
    matvec: x -> A x, A symmetric positive definite.
    b: right-hand side, a pytree of float arrays.
    x0: start; zeros when None.
    preconditioner: x -> M^{-1} x, symmetric positive definite.
    max_steps: most steps, >= 0.
    tol: stop when ||r|| <= tol ||b||; zero runs all `max_steps` steps.

  Returns:
    CGResult. Not reverse-mode differentiable (a `while_loop`).

  Raises:
    ValueError: `max_steps` or `tol` is negative.

  References:
    Hestenes, Stiefel. Methods of conjugate gradients for solving linear
    systems, 1952. Stopping at the first direction of non-positive curvature
    (as Steihaug, 1983) is our choice.
  """
  if max_steps < 0 or tol < 0:
    raise ValueError(
      f'cg: max_steps={max_steps} and tol={tol} must both be >= 0.'
    )
  precondition = preconditioner or (lambda x: x)
  if x0 is None:
    x0 = jax.tree.map(jnp.zeros_like, b)
    r = b
  else:
    r = tree_axpy(-1.0, matvec(x0), b)
  z = precondition(r)
  scale = jnp.sqrt(tree_dot(b, b))
  inf = jnp.full_like(scale, jnp.inf)

  def norm(r):
    return jnp.sqrt(tree_dot(r, r))

  def proceed(carry):
    _, r, _, _, k, curvature = carry
    alive = jnp.logical_and(norm(r) > tol * scale, curvature > 0)
    return jnp.logical_and(k < max_steps, alive)

  def step(carry):
    x, r, p, rz, k, curvature = carry
    ap = matvec(p)
    pap = tree_dot(p, ap)
    bend = pap / jnp.maximum(tree_dot(p, p), jnp.finfo(pap.dtype).tiny)
    # A direction that bends the wrong way is recorded and not taken.
    alpha = jnp.where(pap > 0, rz / jnp.where(pap > 0, pap, 1), 0)
    x = tree_axpy(alpha, p, x)
    r = tree_axpy(-alpha, ap, r)
    z = precondition(r)
    new = tree_dot(r, z)
    beta = jnp.where(rz > 0, new / jnp.where(rz > 0, rz, 1), 0)
    p = tree_axpy(beta, p, z)
    return x, r, p, new, k + 1, jnp.minimum(curvature, bend)

  carry = (x0, r, z, tree_dot(r, z), jnp.int32(0), inf)
  x, r, _, _, k, curvature = jax.lax.while_loop(proceed, step, carry)
  relative = norm(r) / jnp.where(scale > 0, scale, 1)
  return CGResult(x, relative, k, curvature)


def jacobian_product(fun: Callable[[Tree], Tree], x: Tree, v: Tree) -> Tree:
  """J v by two reverse passes, for functions that have no forward mode.

  u -> J' u is linear, so the transpose of it is v -> J v. Kernels with a
  `custom_vjp` cannot be pushed forward; this works wherever their backward
  pass can itself be differentiated with respect to the cotangent.

  Args:
    fun: x -> y.
    x: the point.
    v: a tangent, shaped as x.

  Returns:
    J v, shaped as y.
  """
  y, pull = jax.vjp(fun, x)
  zeros = jax.tree.map(jnp.zeros_like, y)
  _, push = jax.vjp(lambda u: pull(u)[0], zeros)
  return push(v)[0]


def ggn_product(
  fun: Callable[[Tree], Tree],
  curvature: Callable[[Tree, Tree], Tree],
  x: Tree,
  v: Tree,
) -> Tree:
  """Generalised Gauss-Newton product J' L J v, from reverse passes only.

  Args:
    fun: x -> outputs f.
    curvature: (f, u) -> L u, the Hessian of the loss in the outputs.
    x: the point.
    v: a direction, shaped as x.

  Returns:
    J' L J v, shaped as x.

  References:
    Schraudolph. Fast curvature matrix-vector products for second-order
    gradient descent, 2002.
  """
  outputs, pull = jax.vjp(fun, x)
  zeros = jax.tree.map(jnp.zeros_like, outputs)
  _, push = jax.vjp(lambda u: pull(u)[0], zeros)
  return pull(curvature(outputs, push(v)[0]))[0]


def nystrom_preconditioner(
  matvec: MatVec,
  key: jax.Array,
  dim: int,
  rank: int,
  ridge: jax.Array | float,
) -> Callable[[jax.Array], jax.Array]:
  r"""Randomised low-rank preconditioner for A + ridge I.

  With the Nystrom sketch A ~ U diag(l) U', l_1 >= ... >= l_K,
  M^{-1} v = (l_K + ridge) U diag(1 / (l + ridge)) U' v + (v - U U' v).

  Args:
    matvec: x -> A x *without* the ridge, A positive semidefinite, on [P].
    key: PRNG key of the sketch.
    dim: P.
    rank: K, in [1, P]; costs K products.
    ridge: > 0.

  Returns:
    The function v -> M^{-1} v on [P].

  Raises:
    ValueError: `rank` or `ridge` out of range.

  References:
    Frangella, Tropp, Udell. Randomized Nystrom preconditioning, 2021.
  """
  if not 1 <= rank <= dim:
    raise ValueError(f'rank={rank} must be in [1, dim={dim}].')
  if not isinstance(ridge, jax.core.Tracer) and not ridge > 0:
    raise ValueError(
      f'ridge={ridge} must be > 0: the sketch only improves a damped system.'
    )
  test = jax.random.normal(key, (dim, rank))
  test, _ = jnp.linalg.qr(test)
  image = jax.lax.map(matvec, test.T).T
  # A small shift keeps the Cholesky factor real; it is taken off again below.
  shift = jnp.finfo(image.dtype).eps * dim**0.5 * jnp.linalg.norm(image)
  image = image + shift * test
  gram = test.T @ image
  factor = jnp.linalg.cholesky((gram + gram.T) / 2)
  half = jax.scipy.linalg.solve_triangular(factor, image.T, lower=True).T
  basis, singular, _ = jnp.linalg.svd(half, full_matrices=False)
  eigs = jnp.maximum(singular**2 - shift, 0)

  def solve(v):
    inner = basis.T @ v
    return basis @ ((eigs[-1] + ridge) / (eigs + ridge) * inner - inner) + v

  return solve

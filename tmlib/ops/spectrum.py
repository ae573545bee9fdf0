"""Spectra, traces and log-determinants from matrix-vector products.

Everything takes `matvec: [P] -> [P]` for a symmetric A.

Axes: P unknowns, T Lanczos steps, S probes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
  'Lanczos',
  'hutchinson_diag',
  'hutchinson_trace',
  'hutchpp_trace',
  'lanczos',
  'slq_logdet',
  'slq_trace',
]

MatVec = Callable[[jax.Array], jax.Array]


class Lanczos(NamedTuple):
  """Ritz pairs of a symmetric operator, largest value first.

  `weights` are the squared first components of the eigenvectors of the
  tridiagonal matrix: sum_t weights_t f(values_t) = v0' f(A) v0 for a unit v0
  (Gauss quadrature). `bounds` limits the distance of each value from the
  spectrum of A.
  """

  values: jax.Array  # [T]
  weights: jax.Array  # [T]
  bounds: jax.Array  # [T]
  vectors: jax.Array  # [P, T]


def lanczos(
  matvec: Callable[..., Any],
  start: jax.Array,
  steps: int,
  *,
  has_aux: bool = False,
) -> Any:
  """Lanczos tridiagonalisation with full re-orthogonalisation, done twice.

  Args:
    matvec: x -> A x on [P], A symmetric.
    start: [P], the first direction, not zero; need not have unit length.
    steps: T, in [1, P]; one product each.
    has_aux: whether `matvec` returns (A x, aux), such as what an inner solve
      took.

  Returns:
    Lanczos, and with `has_aux` the stacked aux [T, ...] behind it. When the
    Krylov space closes early, the steps that are left over carry weight zero
    and value zero.

  Raises:
    ValueError: `steps` out of range.

  References:
    Golub, Meurant. Matrices, moments and quadrature, 2010. Parlett. The
    symmetric eigenvalue problem, 1980 (two passes of Gram-Schmidt).
  """
  dim = start.shape[0]
  if not 1 <= steps <= dim:
    raise ValueError(f'steps={steps} must be in [1, {dim}], the dimension.')
  eps = jnp.finfo(start.dtype).eps

  def step(carry, t):
    basis, q, scale = carry
    basis = basis.at[t].set(q)
    image, aux = matvec(q) if has_aux else (matvec(q), None)
    alpha = q @ image
    w = image
    for _ in range(2):
      w = w - basis.T @ (basis @ w)
    beta = jnp.linalg.norm(w)
    scale = jnp.maximum(scale, jnp.linalg.norm(image))
    # An invariant subspace: what is left is rounding noise, not a direction.
    grows = beta > 10 * dim * eps * scale
    beta = jnp.where(grows, beta, 0)
    q = jnp.where(grows, w / jnp.where(grows, beta, 1), 0)
    return (basis, q, scale), (alpha, beta, aux)

  start = start / jnp.linalg.norm(start)
  basis = jnp.zeros((steps, dim), start.dtype)
  carry = (basis, start, jnp.zeros((), start.dtype))
  (basis, _, _), (alpha, beta, aux) = jax.lax.scan(
    step, carry, jnp.arange(steps)
  )
  tri = jnp.diag(alpha) + jnp.diag(beta[:-1], 1) + jnp.diag(beta[:-1], -1)
  values, vectors = jnp.linalg.eigh(tri)
  order = jnp.argsort(-values)
  values, vectors = values[order], vectors[:, order]
  bounds = jnp.abs(beta[-1] * vectors[-1])
  ritz = Lanczos(values, vectors[0] ** 2, bounds, basis.T @ vectors)
  return (ritz, aux) if has_aux else ritz


def _rademacher(key, shape, dtype):
  return jax.random.rademacher(key, shape, dtype)


def hutchinson_trace(
  matvec: MatVec,
  key: jax.Array,
  dim: int,
  probes: int,
  dtype: Any = jnp.float32,
) -> tuple[jax.Array, jax.Array]:
  """Trace of A and its standard error, E[z' A z] with random signs z.

  Args:
    matvec: x -> A x on [P].
    key: PRNG key.
    dim: P.
    probes: S >= 2, one product each.
    dtype: of the probes.

  Returns:
    The estimate and its standard error, two scalars.

  References:
    Hutchinson. A stochastic estimator of the trace of the influence matrix,
    1989.
  """
  if probes < 2:
    raise ValueError(f'probes={probes} must be >= 2 for a standard error.')
  z = _rademacher(key, (probes, dim), dtype)
  samples = jax.lax.map(lambda v: v @ matvec(v), z)
  return samples.mean(), samples.std(ddof=1) / probes**0.5


def hutchinson_diag(
  matvec: MatVec,
  key: jax.Array,
  dim: int,
  probes: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Diagonal of A, E[z * A z] with random signs z; same arguments, [P]."""
  z = _rademacher(key, (probes, dim), dtype)
  return jax.lax.map(lambda v: v * matvec(v), z).mean(0)


def hutchpp_trace(
  matvec: MatVec,
  key: jax.Array,
  dim: int,
  probes: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Trace of A by Hutch++: exact on a sketched range, Hutchinson elsewhere.

  tr(A) = tr(Q' A Q) + tr((I - QQ') A (I - QQ')), Q an orthonormal basis of
  A times a random matrix.

  Args:
    matvec: x -> A x on [P], A symmetric.
    key: PRNG key.
    dim: P.
    probes: number of products, >= 3; a third each for the sketch, its trace
      and the remainder.
    dtype: of the probes.

  Returns:
    The estimate, a scalar.

  References:
    Meyer, Musco, Musco, Woodruff. Hutch++: optimal stochastic trace
    estimation, 2021.
  """
  third = probes // 3
  if third < 1:
    raise ValueError(f'probes={probes} must be >= 3.')
  third = min(third, dim)
  sketch_key, rest_key = jax.random.split(key)
  apply = lambda rows: jax.lax.map(matvec, rows)
  q, _ = jnp.linalg.qr(apply(_rademacher(sketch_key, (third, dim), dtype)).T)
  exact = jnp.sum(q.T * apply(q.T))
  z = _rademacher(rest_key, (third, dim), dtype)
  z = z - (z @ q) @ q.T
  return exact + jnp.sum(z * apply(z)) / third


def slq_trace(
  matvec: MatVec,
  fun: Callable[[jax.Array], jax.Array],
  key: jax.Array,
  dim: int,
  probes: int,
  steps: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Trace of f(A) by stochastic Lanczos quadrature.

  Args:
    matvec: x -> A x on [P], A symmetric.
    fun: f, elementwise on eigenvalues.
    key: PRNG key.
    dim: P.
    probes: S >= 1 random starts.
    steps: Lanczos steps per start, clipped to P.
    dtype: of the probes.

  Returns:
    The estimate, a scalar.

  References:
    Ubaru, Chen, Saad. Fast estimation of tr(f(A)) via stochastic Lanczos
    quadrature, 2017.
  """
  if probes < 1:
    raise ValueError(f'probes={probes} must be >= 1.')
  z = _rademacher(key, (probes, dim), dtype)

  def one(v):
    ritz = lanczos(matvec, v, min(steps, dim))
    # A slot left over by an early end has weight zero and must not make
    # 0 * inf out of f(0).
    kept = ritz.weights > 0
    return jnp.sum(jnp.where(kept, ritz.weights * fun(ritz.values), 0))

  return dim * jax.lax.map(one, z).mean()


def slq_logdet(
  matvec: MatVec,
  key: jax.Array,
  dim: int,
  probes: int,
  steps: int,
  dtype: Any = jnp.float32,
) -> jax.Array:
  """Log det(I + A) for a positive semidefinite A; see `slq_trace`."""
  log1p = lambda x: jnp.log1p(jnp.maximum(x, 0))
  return slq_trace(matvec, log1p, key, dim, probes, steps, dtype)

r"""Closed form and simulation of every member of the family.

With D = th - th_R, M = X_R' W_R X_R + X_F' W_F X_F + mu I and
b = X_F' W_F (Z_F - X_F th_R) + X_R' W_R (Z_R - X_R th_R) + mu (a - th_R),
grad J = M D - b, so that th <- th - lr P G grad J gives after k steps

  D_k = S^k D_0 + lr (sum_{j<k} S^j) P G b,   S = I - lr P G M.

Write C = P G = U diag(s) V'. The iterates stay in D_0 + span U, where they stop
at D_0 + U z with V' (b - M (D_0 + U z)) = 0: that is the limit, and it is
reached iff |1 - lr e| < 1 for the eigenvalues e of C M on span U.

Conjugate gradients minimise J over D_0 + K_k, the Krylov space of G M and
G (b - M D_0); with an orthonormal basis V of it,
D_k = D_0 + V (V' M V)^{-1} V' (b - M D_0).

Axes: R retain, F forget points, d features, c outputs.
"""

import functools
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.ops import linear
from tmlib.unlearning import problem as problem_lib
from tmlib.unlearning.problem import RidgeProblem
from tmlib.unlearning.spec import UnlearnSpec

__all__ = [
  'Gap',
  'closed_form_gap',
  'critical_weight',
  'optimal_scalar_step',
  'simulate',
  'simulate_npo',
  'stopping_time',
]


class Gap(NamedTuple):
  """What separates an unlearned from the retrained model.

  Attributes:
    forget: [F, c], X_F (th - th_R).
    retain: [R, c], X_R (th - th_R).
    theta: [d, c], th - th_R; X_Q theta is the gap at any query.
  """

  forget: jax.Array
  retain: jax.Array
  theta: jax.Array


class _Terms(NamedTuple):
  W_F: jax.Array
  W_R: jax.Array
  Z_F: jax.Array
  Z_R: jax.Array
  C: jax.Array  # P G
  G: jax.Array
  mu: jax.Array
  anchor: jax.Array
  lr: jax.Array


def _resolve(p: RidgeProblem, spec: UnlearnSpec) -> _Terms:
  dtype, d = p.X_R.dtype, p.X_R.shape[1]

  def get(name, default=None):
    value = getattr(spec, name)
    value = value(p) if callable(value) else value
    return jnp.asarray(default if value is None else value, dtype)

  eye = jnp.eye(d, dtype=dtype)
  G = get('geometry', eye)
  P = None if spec.projection is None else get('projection')
  for name, value in (('geometry', G), ('projection', P)):
    if value is not None and value.shape != (d, d):
      raise ValueError(
        f'{spec.name}: {name} has shape {value.shape}, expected {(d, d)}.'
      )
  terms = _Terms(
    W_F=get('weight_F'),
    W_R=get('weight_R'),
    Z_F=get('target_F', p.Y_F),
    Z_R=get('target_R', p.Y_R),
    C=G if P is None else P @ G,
    G=G,
    mu=get('mu'),
    anchor=get('anchor', p.prior),
    lr=get('lr', 1.0),
  )
  _check_terms(spec, terms, p, d)
  if spec.solver not in ('gradient', 'cg'):
    raise ValueError(f"solver={spec.solver!r}; allowed: 'gradient', 'cg'.")
  if spec.steps is not None:
    if not isinstance(spec.steps, (int, np.integer)) or spec.steps < 0:
      raise ValueError(
        f'{spec.name}: steps={spec.steps!r} must be an integer >= 0, or None '
        'for the limit.'
      )
  return terms


def _check_terms(spec, t, p, d) -> None:
  n_F, n_R = len(p.X_F), len(p.X_R)
  for name, value, allowed in (
    ('geometry or projection', t.C, ((d, d),)),
    ('target_F', t.Z_F, (p.Y_F.shape,)),
    ('target_R', t.Z_R, (p.Y_R.shape,)),
    ('anchor', t.anchor, (p.prior.shape,)),
    ('weight_F', t.W_F, ((), (n_F,), (n_F, n_F))),
    ('weight_R', t.W_R, ((), (n_R,), (n_R, n_R))),
    ('mu', t.mu, ((),)),
    ('lr', t.lr, ((),)),
  ):
    if value.shape not in allowed:
      raise ValueError(
        f'{spec.name}: {name} has shape {value.shape}, expected '
        f'{" or ".join(map(str, allowed))}.'
      )
    if problem_lib.concrete(value) and not np.isfinite(np.asarray(value)).all():
      raise ValueError(f'{spec.name}: {name} holds NaN or inf.')


def _weighted(W, Z):
  """W Z for a scalar, a diagonal [n] or a full [n, n] weight."""
  if W.ndim == 2:
    return W @ Z
  return W[:, None] * Z if W.ndim == 1 else W * Z


def _hessian(p, t):
  eye = jnp.eye(p.X_R.shape[1], dtype=p.X_R.dtype)
  curvature = p.X_R.T @ _weighted(t.W_R, p.X_R)
  return curvature + p.X_F.T @ _weighted(t.W_F, p.X_F) + t.mu * eye


def _gradient(p, t, theta):
  grad = -p.X_F.T @ _weighted(t.W_F, t.Z_F - p.X_F @ theta)
  grad -= p.X_R.T @ _weighted(t.W_R, t.Z_R - p.X_R @ theta)
  return grad + t.mu * (theta - t.anchor)


def closed_form_gap(problem: RidgeProblem, spec: UnlearnSpec) -> Gap:
  """The gap of a method to retraining, without running the method.

  Args:
    problem: RidgeProblem.
    spec: UnlearnSpec.

  Returns:
    Gap.

  Raises:
    ValueError: bad data or fields, a singular A_R, `steps=None` where no limit
      exists (weights beyond the critical value, or a step size too large), or
      iterates that overflow.
  """
  p = problem_lib.check_problem(problem)
  t = _resolve(p, spec)
  theta_R = problem_lib.fit_retain(p)
  D = problem_lib.initial(p) - theta_R
  M, b = _hessian(p, t), -_gradient(p, t, theta_R)
  if spec.solver == 'cg':
    D = _galerkin(t.G, M, b, D, spec.steps)
  elif spec.steps is None:
    D = _limit(spec, t, M, b, D)
  else:
    _warn_unstable(spec, t, M)
    D = _power(t.lr * t.C, M, b, D, spec.steps)
  if problem_lib.concrete(D) and not np.isfinite(np.asarray(D)).all():
    raise ValueError(
      f'{spec.name}: the iterates overflow within {spec.steps} steps; lower '
      'the step size, the weight of the forget loss or the number of steps.'
    )
  return Gap(p.X_F @ D, p.X_R @ D, D)


def _power(C, M, b, D, steps):
  """S^k D + sum_{j<k} S^j q by repeated squaring."""
  S = jnp.eye(len(M), dtype=M.dtype) - C @ M
  q = C @ b
  while steps:
    if steps % 2:
      D = S @ D + q
    # Two applications of x -> S x + q make x -> S^2 x + (S q + q).
    S, q = S @ S, S @ q + q
    steps //= 2
  return D


def _limit(spec, t, M, b, D):
  U, s, Vt = jnp.linalg.svd(t.C)
  eps = float(np.finfo(s.dtype).eps)
  rank = int((s > eps * len(s) * s[0]).sum())
  if rank == 0:
    return D
  U, s, Vt = U[:, :rank], s[:rank], Vt[:rank]
  inner = Vt @ M @ U
  eigs = np.linalg.eigvals(np.asarray(s[:, None] * inner))
  if not eigs.real.min() > eps * rank * max(abs(eigs).max(), 1e-300):
    raise ValueError(
      f'{spec.name}: no limit exists, the curvature of its objective has an '
      f'eigenvalue of {eigs.real.min():.3e}. The weight of the forget loss is '
      'at or beyond its critical value (see critical_weight), or nothing holds '
      'the iterates. Lower the weight or give a number of steps.'
    )
  # |1 - lr e| < 1; a projection may make eigenvalues complex.
  most = float(np.min(2 * eigs.real / abs(eigs) ** 2))
  if spec.lr is not None and not 0 < float(t.lr) < most:
    raise ValueError(
      f'{spec.name}: lr={float(t.lr):.3e} diverges; it must be above 0 and '
      f'below {most:.3e}.'
    )
  return D + U @ jnp.linalg.solve(inner, Vt @ (b - M @ D))


def _warn_unstable(spec, t, M):
  if not problem_lib.concrete(M) or spec.steps <= 1:
    return
  if t.W_R.ndim or float(t.W_R) <= 0 or t.W_F.ndim or float(t.W_F) >= 0:
    return
  if np.linalg.eigvalsh(np.asarray(M + M.T))[0] <= 0:
    warnings.warn(
      f'{spec.name}: the weight of the forget loss is at or beyond its '
      'critical value; the iterates diverge with more steps.',
      stacklevel=3,
    )


def _galerkin(G, M, b, D, steps):
  """Best point of the Krylov space, one space per output."""
  d = len(M)
  steps = d if steps is None else min(steps, d)

  def column(D, b):
    r = b - M @ D
    V = jnp.zeros((d, steps), M.dtype)
    v = G @ r
    for k in range(steps):
      size = jnp.linalg.norm(v)
      for _ in range(2):
        v = v - V @ (V.T @ v)
      left = jnp.linalg.norm(v)
      # A direction inside the space already spanned adds nothing.
      fresh = left > 1e3 * jnp.finfo(v.dtype).eps * size
      V = V.at[:, k].set(jnp.where(fresh, v / jnp.where(fresh, left, 1), 0))
      v = G @ (M @ V[:, k])
    inner = V.T @ M @ V
    empty = (jnp.abs(V).sum(0) == 0).astype(M.dtype)
    return D + V @ jnp.linalg.solve(inner + jnp.diag(empty), V.T @ r)

  columns = [column(D[:, j], b[:, j]) for j in range(D.shape[1])]
  return jnp.stack(columns, 1)


def simulate(problem: RidgeProblem, spec: UnlearnSpec) -> jax.Array:
  """Runs the method as one would, from residuals and not from the theory.

  Args:
    problem: RidgeProblem.
    spec: UnlearnSpec with a number of steps k.

  Returns:
    [k + 1, d, c], the start and all iterates; for solver='cg' [2, d, c], the
    start and the k-th iterate.

  Raises:
    ValueError: `steps=None`.
  """
  p = problem_lib.check_problem(problem)
  if spec.steps is None:
    raise ValueError(
      f'{spec.name}: simulate needs a number of steps, got None (the limit).'
    )
  t = _resolve(p, spec)
  theta = problem_lib.initial(p)
  if spec.solver == 'cg':
    M = _hessian(p, t)
    solve = lambda b, x: (
      linear.cg(
        lambda v: M @ v,
        b,
        x,
        preconditioner=lambda v: t.G @ v,
        max_steps=spec.steps or 0,
        tol=0.0,
      ).x
    )
    rhs = -_gradient(p, t, jnp.zeros_like(theta))
    end = jax.vmap(solve, (1, 1), 1)(rhs, theta)
    return jnp.stack([theta, end])

  return _iterate(p, t, theta, spec.steps)


@functools.partial(jax.jit, static_argnames='steps')
def _iterate(p, t, theta, steps):
  def step(theta, _):
    theta = theta - t.lr * t.C @ _gradient(p, t, theta)
    return theta, theta

  _, path = jax.lax.scan(step, theta, length=steps)
  return jnp.concatenate([theta[None], path])


def simulate_npo(
  problem: RidgeProblem, beta: float, lr: float, steps: int
) -> jax.Array:
  """NPO with live weights, which is outside the linear family.

  th <- th - lr grad sum_i (2 / beta) log(1 + (p_i(th) / p_i(th_0))^beta).

  Args:
    problem: RidgeProblem.
    beta: inverse temperature > 0.
    lr: step size.
    steps: k.

  Returns:
    [k + 1, d, c].
  """
  p = problem_lib.check_problem(problem)
  start = problem_lib.initial(p)

  def objective(theta):
    loss = lambda th: 0.5 * jnp.sum((p.Y_F - p.X_F @ th) ** 2, -1)
    ratio = loss(start) - loss(theta)
    return 2 / beta * jnp.sum(jax.nn.softplus(beta * ratio))

  def step(theta, _):
    theta = theta - lr * jax.grad(objective)(theta)
    return theta, theta

  _, path = jax.lax.scan(step, start, length=steps)
  return jnp.concatenate([start[None], path])


def critical_weight(
  lmax: jax.Array | float, reduction: str, n_R: int, n_F: int
) -> jax.Array | float:
  """The weight of the forget loss at which GradDiff loses its minimum.

  rho_c = 1 / lmax(H_FF) for sums, alpha_c = n_F / (n_R lmax) for means (the
  ridge inside the retain mean). For cross-entropy it is local: the minimum
  near th_R disappears, another one exists further away.

  Args:
    lmax: largest eigenvalue of H_FF; the weight is inf where it is zero.
    reduction: 'sum' | 'mean'.
    n_R: retain points.
    n_F: forget points.
  """
  if reduction not in ('sum', 'mean'):
    raise ValueError(f"reduction={reduction!r}; allowed: 'sum', 'mean'.")
  if not (n_R > 0 and n_F > 0):
    raise ValueError(f'n_R={n_R} and n_F={n_F} must be > 0.')
  lmax = jnp.asarray(lmax, jnp.result_type(float))
  rho = jnp.where(lmax > 0, 1 / jnp.where(lmax > 0, lmax, 1), jnp.inf)
  return rho if reduction == 'sum' else rho * n_F / n_R


def optimal_scalar_step(
  problem: RidgeProblem, spec: UnlearnSpec, match: str = 'both'
) -> float:
  """The best step size of one step: least squares on the gap.

  Args:
    problem: RidgeProblem.
    spec: its direction C grad J at the start is used, its lr is not.
    match: 'forget', 'retain', or 'both'.

  Returns:
    The step size that minimises ||gap||^2; negative when the direction points
    away, zero when it does not move.
  """
  if match not in ('forget', 'retain', 'both'):
    raise ValueError(f"match={match!r}; allowed: 'forget', 'retain', 'both'.")
  p = problem_lib.check_problem(problem)
  t = _resolve(p, spec)
  theta = problem_lib.initial(p)
  D = theta - problem_lib.fit_retain(p)
  move = t.C @ _gradient(p, t, theta)
  X = {
    'forget': p.X_F,
    'retain': p.X_R,
    'both': jnp.concatenate([p.X_F, p.X_R]),
  }[match]
  gap, seen = X @ D, X @ move
  size = float(jnp.sum(seen**2))
  return float(jnp.sum(gap * seen)) / size if size > 0 else 0.0


def stopping_time(
  problem: RidgeProblem, spec: UnlearnSpec, match: str = 'gap'
) -> int:
  """When to stop: the step closest to retraining, or the forget-loss rule.

  Args:
    problem: RidgeProblem.
    spec: UnlearnSpec with the largest number of steps to consider.
    match: 'gap': smallest ||gap_F||^2 + ||gap_R||^2 (needs the truth, by
      theory); 'loss': first step whose forget loss reaches that of the
      retrained model, which is what people watch.

  Returns:
    The number of steps; `spec.steps` when 'loss' is never reached.
  """
  p = problem_lib.check_problem(problem)
  path = simulate(p, spec)
  theta_R = problem_lib.fit_retain(p)
  if match == 'gap':
    D = path - theta_R[None]
    size = jnp.sum((p.X_F @ D) ** 2, (1, 2)) + jnp.sum((p.X_R @ D) ** 2, (1, 2))
    return int(jnp.argmin(jnp.where(jnp.isfinite(size), size, jnp.inf)))
  if match == 'loss':
    loss = lambda th: jnp.sum((p.Y_F[None] - p.X_F @ th) ** 2, (1, 2))
    reached = np.asarray(loss(path) >= loss(theta_R[None]))
    return int(reached.argmax()) if reached.any() else len(path) - 1
  raise ValueError(f"match={match!r}; allowed: 'gap', 'loss'.")

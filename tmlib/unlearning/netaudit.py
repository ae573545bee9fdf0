r"""The audit of a network, matrix-free: nothing of size [P, P] or [n_R, P].

Only products with the retain curvature (minibatch by minibatch) and the rows
of the forget set, [n_F C, P], are ever held. Norms on the retain set are
quadratic forms: ||X_R D||^2 = D' G_R D with G_R the curvature without ridge.
Spectra come from Lanczos on u -> X_F A_R^{-1} X_F' u, one linear solve per
step; traces from Lanczos quadrature over a few random starts.

Axes: P parameters, F = n_F C forget rows, R retain examples, C outputs.
"""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tmlib.ops import linear, spectrum
from tmlib.unlearning import dynamics, ggn
from tmlib.unlearning.diagnostics import (
  LeverageReport,
  recommend,
  span_deficiency,
)
from tmlib.unlearning.ggn import Apply, Solver
from tmlib.unlearning.losses import Loss, get_loss

__all__ = ['audit_network']


_METHODS = (
  'gradient_ascent',
  'graddiff',
  'neggrad_plus',
  'retain_finetune',
  'retain_cg',
  'influence',
  'woodbury_influence',
  'scrub',
  'corrected_relabel',
)


class _Local(NamedTuple):
  """What the jitted parts share; a pytree of arrays."""

  params: Any
  retain: dict[str, jax.Array]
  X_F: jax.Array  # [F, P]
  r: jax.Array  # [F]
  ridge: jax.Array
  grad: jax.Array  # [P], grad L_R


def _products(apply_fn, loss, solver, local):
  """(v -> G_R v, v -> A_R v, (v, extra) -> (A_R + extra X_F'X_F)^{-1} v)."""
  _, unravel = ravel_pytree(local.params)

  def bend(v):
    return ravel_pytree(ggn.ggn_matvec(
      apply_fn, loss, local.params, local.retain, unravel(v),
      batch_size=solver.batch_size))[0]  # fmt: skip

  matvec = lambda v: bend(v) + local.ridge * v
  precondition = None
  if solver.rank:
    precondition = linear.nystrom_preconditioner(
      bend, jax.random.key(1), len(local.grad), solver.rank, local.ridge
    )

  def solve(v, extra=0.0, steps=solver.max_steps, tol=solver.tol, plain=False):
    full = lambda u: matvec(u) + extra * (local.X_F.T @ (local.X_F @ u))
    return linear.cg(
      full,
      v,
      preconditioner=None if plain else precondition,
      max_steps=steps,
      tol=tol,
    )

  return bend, matvec, solve


@functools.partial(
  jax.jit,
  static_argnames=('apply_fn', 'loss', 'solver', 'probes', 'steps'),
)
def _spectrum(apply_fn, loss, solver, local, key, probes, steps):
  _, _, solve = _products(apply_fn, loss, solver, local)
  apply = lambda u: local.X_F @ solve(local.X_F.T @ u).x
  starts = jax.random.rademacher(key, (probes, len(local.r)), local.r.dtype)
  ritz = jax.lax.map(lambda v: spectrum.lanczos(apply, v, steps), starts)
  return ritz.values, ritz.weights


@functools.partial(
  jax.jit, static_argnames=('apply_fn', 'loss', 'solver', 'steps')
)
def _moves(apply_fn, loss, solver, local, rho, steps):
  """{method: D}, the displacement that each method leaves; CG reports."""
  bend, matvec, solve = _products(apply_fn, loss, solver, local)
  X_F, r = local.X_F, local.r
  sees = lambda v: X_F.T @ (X_F @ v)
  g_F = X_F.T @ r
  retained = solve(local.grad)
  D_0 = retained.x
  dim = len(D_0)
  start = jax.random.normal(jax.random.key(2), (dim,), D_0.dtype)
  top = spectrum.lanczos(
    lambda v: matvec(v) + sees(v), start, min(12, dim)
  ).values[0]
  lr = 1 / top

  def descend(gradient, lr=lr):
    step = lambda _, D: D - lr * gradient(D)
    return jax.lax.fori_loop(0, steps, step, D_0)

  # Best step of ascent for both gaps at once: least squares.
  both = lambda v: bend(v) + sees(v)
  image = both(g_F)
  size = jnp.maximum(g_F @ image, jnp.finfo(g_F.dtype).tiny)
  eta = jnp.maximum((D_0 @ image) / size, 0)
  residual = lambda D: r + X_F @ (D_0 - D)
  diff = lambda D: matvec(D) + rho * X_F.T @ residual(D)
  scrub = lambda D: matvec(D) + bend(D - D_0) - jnp.minimum(rho, 1) * sees(
    D - D_0)  # fmt: skip
  moves = {
    'gradient_ascent': D_0 - eta * g_F,
    'graddiff': descend(diff),
    'neggrad_plus': descend(diff, lr / (1 + rho)),
    'retain_finetune': descend(matvec),
    'retain_cg': D_0 - solve(local.grad, steps=steps, tol=0.0, plain=True).x,
    'influence': D_0 - solve(g_F, extra=1.0).x,
    'woodbury_influence': D_0 - solve(g_F).x,
    'scrub': descend(scrub, lr / 2),
    'corrected_relabel': descend(lambda D: matvec(D) + sees(D)),
  }
  g_tot = local.grad - g_F
  scalars = {
    'image_R': jnp.sqrt(jnp.maximum(g_F @ bend(g_F), 0)),
    'inner_R': D_0 @ bend(g_F),
    'g_F': jnp.linalg.norm(g_F),
    'g_tot': jnp.linalg.norm(g_tot),
    'cg_residual': retained.residual,
    'curvature': retained.curvature,
    'cg_steps': retained.steps,
  }
  H_r = X_F @ solve(g_F).x
  return D_0, g_F, H_r, moves, scalars


@functools.partial(jax.jit, static_argnames=('apply_fn', 'loss', 'solver'))
def _retain_norms(apply_fn, loss, solver, local, moves):
  bend, _, _ = _products(apply_fn, loss, solver._replace(rank=0), local)
  return {k: jnp.sqrt(jnp.maximum(D @ bend(D), 0)) for k, D in moves.items()}


@functools.partial(jax.jit, static_argnames=('apply_fn', 'loss'))
def _harm(apply_fn, loss, params, data, D):
  """||B' J D|| per example, [n]."""
  _, unravel = ravel_pytree(params)
  fun = lambda p: apply_fn(p, data['x'])
  gap = linear.jacobian_product(fun, params, unravel(D))
  rows = jax.vmap(loss.root)(fun(params), data['y'], gap)
  return jnp.sqrt(data['weight']) * jnp.linalg.norm(rows, axis=-1)


def audit_network(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  retain: dict[str, Any],
  forget: dict[str, Any],
  ridge: float,
  *,
  prior: Any = None,
  solver: Solver | None = None,
  lanczos_steps: int = 10,
  probes: int = 2,
  steps: int = 10,
  top: int = 10,
  tol: float = 1e-2,
  seed: int = 0,
) -> LeverageReport:
  """`audit` for a network whose Jacobian does not fit; same report.

  `eigenvalues` are the Ritz values of the best start, `null_share` is NaN (it
  needs the null space of the retain rows), `harmed` counts examples.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C], deterministic.
    loss: 'softmax', 'square' or a Loss.
    params: pytree of P numbers.
    retain: {'x', 'y', 'weight'}.
    forget: the same; n_F C P numbers must fit in memory.
    ridge: > 0, of the objective in sums.
    prior: pytree; None for zeros.
    solver: `batch_size` bounds the memory, `rank` preconditions; None for
      200 steps of CG at most, to a residual of 1e-3.
    lanczos_steps: solves per start.
    probes: random starts.
    steps: number of steps of the iterative methods that are compared.
    top: harmed retain examples to name.
    tol: of stationarity.
    seed: of the starts.

  Returns:
    LeverageReport; gaps are in curvature-weighted outputs (see `linearize`).

  Raises:
    ValueError: bad data, ridge <= 0, dropout or batch norm at work, an
      indefinite curvature.
  """
  loss = get_loss(loss)
  solver = solver or Solver(max_steps=200, tol=1e-3)
  if not ridge > 0:
    raise ValueError(f'ridge={ridge} must be > 0: A_R has to be invertible.')
  outputs = ggn.outputs_of(apply_fn, params, jnp.asarray(retain['x']))
  retain, forget = ggn.as_data(retain, outputs), ggn.as_data(forget, outputs)
  ggn.check_deterministic(apply_fn, params, forget['x'])
  X_F, r = jax.jit(ggn.design, static_argnums=(0, 1))(
    apply_fn, loss, params, forget
  )
  grad = ravel_pytree(ggn.objective_gradient(
    apply_fn, loss, params, retain, ridge, prior,
    batch_size=solver.batch_size))[0]  # fmt: skip
  local = _Local(params, retain, X_F, r, jnp.asarray(ridge, grad.dtype), grad)
  values, weights = map(np.asarray, _spectrum(
    apply_fn, loss, solver, local, jax.random.key(seed), probes,
    min(lanczos_steps, len(r))))  # fmt: skip
  values = np.maximum(values, 0)
  lmax = float(values.max())
  rho = 0.1 / max(lmax, 1e-30)
  D_0, g_F, H_r, moves, scalars = _moves(
    apply_fn, loss, solver, local, rho, steps
  )
  if float(scalars['curvature']) <= 0:
    raise ValueError(
      f'curvature {float(scalars["curvature"]):.2e} <= 0 met in CG: the '
      'operator is indefinite. Use a convex loss or a larger ridge.'
    )
  norms = _retain_norms(apply_fn, loss, solver, local, moves | {'': D_0})
  return _assemble(
    loss, local, (values, weights), (D_0, g_F, H_r, moves), scalars, norms,
    _harm(apply_fn, loss, params, retain, D_0), len(forget['x']), top, tol,
  )  # fmt: skip


def _assemble(
  loss, local, ritz, found, scalars, norms, harm, n_F, top, tol
) -> LeverageReport:
  values, weights = ritz
  D_0, g_F, H_r, moves = found
  scalars = {k: float(v) for k, v in scalars.items()}
  X_F, F = local.X_F, len(local.r)
  trace_of = lambda f: float(F * np.mean(np.sum(weights * f(values), 1)))
  best = values[values.max(1).argmax()]
  lmax = float(values.max())
  gap_F = np.asarray(X_F @ D_0)
  K_r = np.asarray(X_F @ g_F)
  idle = (float(np.linalg.norm(gap_F)), float(norms['']))
  ratio = lambda a, b: float(a) / float(b) if b > 0 else float('nan')
  # Cheapest first; a jitted function returns its dict sorted by name.
  predicted = {
    k: (ratio(jnp.linalg.norm(X_F @ D), idle[0]), ratio(norms[k], idle[1]))
    for k in _METHODS
    for D in (moves[k],)
  }
  span = span_deficiency(X_F, D_0)
  cos_F = ratio(gap_F @ K_r, np.linalg.norm(gap_F) * np.linalg.norm(K_r))
  drift = ratio(scalars['g_tot'], scalars['g_F'])
  # H h r = (H r) - X_F A^{-1} X_F' r, the gap that an influence step leaves
  # of the part that the forget gradient causes.
  left = np.asarray(X_F @ (moves['influence'] - D_0)) + np.asarray(H_r)
  name, reason = recommend(lmax, cos_F, float('nan'), span, predicted, idle)
  n_R = len(local.retain['x'])
  order = np.argsort(-np.asarray(harm))[:top]
  return LeverageReport(
    eigenvalues=best,
    lmax=lmax,
    trace=trace_of(lambda h: h),
    dof=trace_of(lambda h: h / (1 + h)),
    logdet=trace_of(np.log1p),
    rho_c=float(dynamics.critical_weight(lmax, 'sum', 1, 1)),
    alpha_c=float(dynamics.critical_weight(lmax, 'mean', n_R, n_F)),
    local=loss.local,
    influence_error=ratio(np.linalg.norm(left), np.linalg.norm(H_r)),
    cos_forget=cos_F,
    cos_retain=ratio(scalars['inner_R'], idle[1] * scalars['image_R']),
    null_share=float('nan'),
    span_deficiency=span,
    stationarity=drift,
    idle=idle,
    forget_gaps=np.abs(gap_F),
    predicted=predicted,
    harmed=order,
    harm=np.asarray(harm)[order],
    recommendation=name,
    reason=reason,
    flags=_flags(drift, scalars, tol),
  )


def _flags(drift, scalars, tol) -> tuple[str, ...]:
  flags = []
  if drift > tol:
    flags.append('not_stationary')
    warnings.warn(
      f'the start is not stationary (||g_tot|| / ||g_F|| = {drift:.2g}); its '
      'total gradient is included in every prediction.',
      stacklevel=4,
    )
  if scalars['cg_residual'] > 0.1:
    flags.append('not_converged')
    warnings.warn(
      f'CG stopped at relative residual {scalars["cg_residual"]:.1e}; raise '
      'solver.max_steps, solver.rank or the ridge.',
      stacklevel=4,
    )
  return tuple(flags)

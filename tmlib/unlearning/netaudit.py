r"""The audit of a network, matrix-free: nothing of size [P, P] or [n_R, P].

Only products with the retain curvature (minibatch by minibatch) and the rows
of the forget set, [n_F C, P], are ever held. Norms on the retain set are
quadratic forms: ||X_R D||^2 = D' G_R D with G_R the curvature without ridge.
Spectra come from Lanczos on u -> X_F A_R^{-1} X_F' u, one linear solve per
step; traces from Lanczos quadrature over a few random starts.

The null share needs mu_0 = ||P g||^2, the mass of g = X_F' r on null(X_R). For
every function p with p(0) = 1 it is at most ||p(G_R) g||^2, with equality as p
dies out elsewhere. p(s) = ridge / (s + ridge) gives ridge^2 ||A_R^{-1} g||^2;
Lanczos from g gives the Gauss weight at its smallest node (the inequality of
Chebyshev, Markov and Stieltjes), exact once the Krylov space closes. The report
takes the smaller bound.

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
  forget_weight,
  ratio,
  recommend,
  span_deficiency,
)
from tmlib.unlearning.ggn import Solver
from tmlib.unlearning.inputs import Apply, check_request
from tmlib.unlearning.losses import Loss, get_loss

__all__ = ['audit_network']

# Cheapest first.
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


class _Tally(NamedTuple):
  """Products with the retain curvature, and the worst solve among them."""

  products: jax.Array  # [] int32
  residual: jax.Array  # [] relative
  curvature: jax.Array  # [] smallest met

  def add(self, out: linear.CGResult) -> '_Tally':
    return _Tally(
      self.products + jnp.sum(out.steps),
      jnp.maximum(self.residual, jnp.max(out.residual)),
      jnp.minimum(self.curvature, jnp.min(out.curvature)),
    )


def _tally(dtype, products: int = 0) -> _Tally:
  return _Tally(
    jnp.int32(products), jnp.zeros((), dtype), jnp.full((), jnp.inf, dtype)
  )


def _products(apply_fn, loss, solver, local):
  """Products v -> G_R v, and (v, extra) -> (A_R + extra X_F'X_F)^{-1} v."""
  bend, matvec, precondition = ggn.flat_products(
    apply_fn, loss, local.params, local.retain, local.ridge, solver
  )

  def solve(v, extra=0.0):
    full = lambda u: matvec(u) + extra * (local.X_F.T @ (local.X_F @ u))
    return linear.cg(
      full if extra else matvec,
      v,
      preconditioner=precondition,
      max_steps=solver.max_steps,
      tol=solver.tol,
    )

  return bend, solve


@functools.partial(
  jax.jit,
  static_argnames=('apply_fn', 'loss', 'solver', 'probes', 'steps'),
)
def _spectrum(apply_fn, loss, solver, local, key, probes, steps):
  """Ritz values and weights [probes, steps] of H_FF, and the tally."""
  _, solve = _products(apply_fn, loss, solver, local)

  def apply(u):
    out = solve(local.X_F.T @ u)
    return local.X_F @ out.x, out._replace(x=None)

  starts = jax.random.rademacher(key, (probes, len(local.r)), local.r.dtype)
  run = lambda v: spectrum.lanczos(apply, v, steps, has_aux=True)
  ritz, solves = jax.lax.map(run, starts)
  tally = _tally(local.r.dtype, solver.rank).add(solves)
  return ritz.values, ritz.weights, tally


class _Found(NamedTuple):
  """What the methods leave; D are displacements th - th_R [P]."""

  D_0: jax.Array
  moves: dict[str, jax.Array]
  on_R: dict[str, jax.Array]  # ||X_R D||; '' for D_0
  H_r: jax.Array  # [F], H_FF r
  null_share: jax.Array
  cos_retain: jax.Array
  top: jax.Array  # largest eigenvalue of A, approximately
  size: tuple[jax.Array, jax.Array]  # ||g_tot||, ||g_F||
  tally: _Tally


@functools.partial(
  jax.jit, static_argnames=('apply_fn', 'loss', 'solver', 'steps', 'depth')
)
def _moves(apply_fn, loss, solver, local, rho, steps, depth) -> _Found:
  bend, solve = _products(apply_fn, loss, solver, local)
  X_F, r, ridge = local.X_F, local.r, local.ridge
  sees = lambda v: X_F.T @ (X_F @ v)
  g_F = X_F.T @ r
  retained, pushed = solve(local.grad), solve(g_F)
  influence = solve(g_F, extra=1.0)
  few = linear.cg(
    lambda v: bend(v) + ridge * v, local.grad, max_steps=steps, tol=0.0
  )
  D_0, image = retained.x, bend(g_F)
  start = jax.random.normal(jax.random.key(2), D_0.shape, D_0.dtype)
  top = spectrum.lanczos(
    lambda v: bend(v) + ridge * v + sees(v), start, min(12, len(D_0))
  ).values[0]
  # Best step of ascent for both gaps at once: least squares.
  both = image + sees(g_F)
  eta = (D_0 @ both) / jnp.maximum(g_F @ both, jnp.finfo(g_F.dtype).tiny)
  moves = {
    'gradient_ascent': D_0 - jnp.maximum(eta, 0) * g_F,
    'retain_cg': D_0 - few.x,
    'influence': D_0 - influence.x,
    'woodbury_influence': D_0 - pushed.x,
  } | _descents(bend, local, D_0, g_F, rho, top, steps)
  stack = jnp.stack([D_0, *moves.values()])
  square = jax.lax.map(lambda D: D @ bend(D), stack)
  on_R = dict(zip(('', *moves), jnp.sqrt(jnp.maximum(square, 0)), strict=True))
  norm = jnp.linalg.norm
  harm = on_R[''] * jnp.sqrt(jnp.maximum(g_F @ image, 0))
  # Products besides those of the converged solves, which count themselves.
  plain = solver.rank + steps + 13 + 5 * steps + len(stack) + depth
  tally = _tally(g_F.dtype, plain)
  for out in (retained, pushed, influence):
    tally = tally.add(out)
  return _Found(
    D_0,
    moves,
    on_R,
    X_F @ pushed.x,
    _null_share(bend, g_F, pushed.x, ridge, depth),
    (D_0 @ image) / jnp.where(harm > 0, harm, 1),
    top,
    (norm(local.grad - g_F), norm(g_F)),
    tally,
  )


def _descents(bend, local, D_0, g_F, rho, top, steps):
  """Gradient methods on a R L_R-like objective: D <- D - lr (M D - b).

  M = w_R G_R + mu I + w_F X_F'X_F, as in `dynamics`; all at once.
  """
  sees = lambda v: local.X_F.T @ (local.X_F @ v)
  ridge, seen, low = local.ridge, sees(D_0), jnp.minimum(rho, 1)
  zero = jnp.zeros_like(D_0)
  away = -rho * (g_F + seen)
  table = {  # name: w_R, mu, w_F, b, steps per 1 / top
    'graddiff': (1, ridge, -rho, away, 1),
    'neggrad_plus': (1, ridge, -rho, away, 1 / (1 + rho)),
    'retain_finetune': (1, ridge, 0, zero, 1),
    'scrub': (2, ridge, -low, bend(D_0) - low * seen, 0.5),
    'corrected_relabel': (1, ridge, 1, zero, 1),
  }
  w_R, mu, w_F, lr = (
    jnp.asarray([row[i] for row in table.values()], D_0.dtype)[:, None]
    for i in (0, 1, 2, 4)
  )
  b = jnp.stack([row[3] for row in table.values()])

  def step(_, D):
    grad = w_R * jax.lax.map(bend, D) + mu * D + w_F * jax.vmap(sees)(D) - b
    return D - lr / top * grad

  start = jnp.broadcast_to(D_0, b.shape)
  return dict(zip(table, jax.lax.fori_loop(0, steps, step, start), strict=True))


def _null_share(bend, g, x, ridge, depth):
  """Bounds r' H_perp r / r' H_FF r with x = A_R^{-1} g; see the module."""
  size = jnp.linalg.norm(g)
  start = jnp.where(size > 0, g, 1)
  ritz = spectrum.lanczos(bend, start, depth)
  # Slots that an early end left over count as resolved zeros, weight zero.
  floor = 100 * jnp.finfo(g.dtype).eps * ritz.values[0]
  low = ritz.values <= jnp.maximum(floor, ritz.values[-1])
  mass = size**2 * jnp.sum(jnp.where(low, ritz.weights, 0)) / ridge
  signal = g @ x
  share = jnp.minimum(mass, ridge * (x @ x)) / jnp.where(signal > 0, signal, 1)
  return jnp.clip(share, 0, 1)


@functools.partial(jax.jit, static_argnames=('apply_fn', 'loss', 'batch_size'))
def _harm(apply_fn, loss, params, data, D, batch_size):
  """||B' J D|| per example, [n]."""
  _, unravel = ravel_pytree(params)

  def part(batch):
    fun = lambda p: apply_fn(p, batch['x'])
    gap = linear.jacobian_product(fun, params, unravel(D))
    rows = jax.vmap(loss.root)(fun(params), batch['y'], gap)
    return jnp.sqrt(batch['weight']) * jnp.linalg.norm(rows, axis=-1)

  return ggn.map_examples(part, data, batch_size)


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

  `eigenvalues` are the Ritz values of the best start, `null_share` is an upper
  bound (see the module docstring), `harmed` counts examples. `products` and
  `residual` tell what the solves took.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C], deterministic.
    loss: 'softmax', 'square' or a Loss.
    params: pytree of P numbers.
    retain: {'x', 'y', 'weight'}.
    forget: the same; n_F C P numbers must fit in memory.
    ridge: > 0, of the objective in sums.
    prior: pytree; None for zeros.
    solver: of kind 'cg'; `batch_size` bounds the memory, `rank` preconditions;
      None for 200 steps of CG at most, to a residual of 1e-3.
    lanczos_steps: solves per start.
    probes: random starts.
    steps: number of steps of the iterative methods that are compared.
    top: harmed retain examples to name.
    tol: of stationarity.
    seed: of the starts.

  Returns:
    LeverageReport; gaps are in curvature-weighted outputs (see `linearize`).

  Raises:
    ValueError: bad data, ridge <= 0, dropout or batch norm at work, a loss
      that is not convex, an indefinite curvature.
  """
  loss = get_loss(loss)
  solver = solver or Solver(max_steps=200, tol=1e-3)
  ggn.check_solver(solver, ridge)
  if solver.kind != 'cg':
    raise ValueError(
      f"solver.kind={solver.kind!r}: this audit is matrix-free, 'cg'. Use "
      'audit(linearize(...)) for a dense one.'
    )
  if not ridge > 0:
    raise ValueError(f'ridge={ridge} must be > 0: A_R has to be invertible.')
  retain, forget, flags = check_request(apply_fn, loss, params, retain, forget)
  X_F, r = jax.jit(ggn.design, static_argnums=(0, 1))(
    apply_fn, loss, params, forget
  )
  grad = ravel_pytree(ggn.objective_gradient(
    apply_fn, loss, params, retain, ridge, prior,
    batch_size=solver.batch_size))[0]  # fmt: skip
  local = _Local(params, retain, X_F, r, jnp.asarray(ridge, grad.dtype), grad)
  values, weights, tally = _spectrum(
    apply_fn, loss, solver, local, jax.random.key(seed), probes,
    min(lanczos_steps, len(r)))  # fmt: skip
  values = np.maximum(np.asarray(values), 0)
  found = _moves(
    apply_fn, loss, solver, local, forget_weight(float(values.max())), steps,
    min(2 * lanczos_steps, len(grad)),
  )  # fmt: skip
  if float(found.tally.curvature) <= 0:
    raise ValueError(
      f'curvature {float(found.tally.curvature):.2e} <= 0 met in CG: the '
      'operator is indefinite. Use a convex loss or a larger ridge.'
    )
  tally = _Tally(
    tally.products + found.tally.products,
    jnp.maximum(tally.residual, found.tally.residual),
    found.tally.curvature,
  )
  flags += _warn(loss, solver, local, found, tally, forget['y'], tol)
  harm = _harm(apply_fn, loss, params, retain, found.D_0, solver.batch_size)
  return _assemble(
    loss, local, (values, np.asarray(weights)), found, tally,
    np.asarray(harm), len(forget['x']), top, flags,
  )  # fmt: skip


def _assemble(
  loss, local, ritz, found, tally, harm, n_F, top, flags
) -> LeverageReport:
  values, weights = ritz
  X_F, F, n_R = local.X_F, len(local.r), len(local.retain['x'])
  trace_of = lambda f: float(F * np.mean(np.sum(weights * f(values), 1)))
  norm = lambda x: float(np.linalg.norm(x))
  gap_F = np.asarray(X_F @ found.D_0)
  K_r = np.asarray(X_F @ (X_F.T @ local.r))
  idle = (norm(gap_F), float(found.on_R['']))
  predicted = {
    k: (
      ratio(norm(X_F @ found.moves[k]), idle[0]),
      ratio(float(found.on_R[k]), idle[1]),
    )
    for k in _METHODS
  }
  lmax, null_share = float(values.max()), float(found.null_share)
  span = span_deficiency(X_F, found.D_0)
  cos_F = ratio(float(gap_F @ K_r), norm(gap_F) * norm(K_r))
  # H h r = (H r) - X_F A^{-1} X_F' r, the gap that an influence step leaves
  # of the part that the forget gradient causes.
  left = np.asarray(X_F @ (found.moves['influence'] - found.D_0) + found.H_r)
  name, reason = recommend(lmax, cos_F, null_share, span, predicted, idle)
  order = np.argsort(-harm)[:top]
  return LeverageReport(
    eigenvalues=values[values.max(1).argmax()],
    lmax=lmax,
    trace=trace_of(lambda h: h),
    dof=trace_of(lambda h: h / (1 + h)),
    logdet=trace_of(np.log1p),
    rho_c=float(dynamics.critical_weight(lmax, 'sum', n_R, n_F)),
    alpha_c=float(dynamics.critical_weight(lmax, 'mean', n_R, n_F)),
    local=loss.local,
    influence_error=ratio(norm(left), norm(found.H_r)),
    cos_forget=cos_F,
    cos_retain=float(found.cos_retain),
    null_share=null_share,
    span_deficiency=span,
    stationarity=ratio(*map(float, found.size)),
    idle=idle,
    forget_gaps=np.abs(gap_F),
    predicted=predicted,
    harmed=order,
    harm=harm[order],
    recommendation=name,
    reason=reason,
    flags=flags,
    products=int(tally.products),
    residual=float(tally.residual),
  )


def _warn(loss, solver, local, found, tally, y, tol) -> tuple[str, ...]:
  """Names of what makes the report doubtful; each is also a warning."""
  residual = float(tally.residual)
  cond = float(found.top / local.ridge)
  single = local.r.dtype == jnp.float32
  drift = ratio(*map(float, found.size))
  # Outputs of zero say nothing: what the residual would be without a model.
  blank = jax.vmap(loss.whitened)(jnp.zeros_like(y), y)
  signal = ratio(*(float(jnp.linalg.norm(r)) for r in (local.r, blank)))
  doubts = {
    'no_gradient_signal': (
      signal <= 1e-4,
      'the model interpolates the forget set (r_F = 0): every forget gradient '
      'vanishes although the gap to retraining does not. Use a retain-side '
      'method or retrain.',
    ),
    'not_stationary': (
      drift > tol,
      f'the start is not stationary (||g_tot|| / ||g_F|| = {drift:.2g}); its '
      'total gradient is included in every prediction.',
    ),
    'not_converged': (
      residual > 10 * solver.tol,
      f'CG stopped at relative residual {residual:.1e} (wanted {solver.tol:g});'
      ' raise solver.max_steps, solver.rank or the ridge.',
    ),
    'ill_conditioned': (
      single and cond > 1e7,
      f'cond(A_R) may reach {cond:.1e}, which leaves no digits in float32; use '
      'a larger ridge, or float64 inside `with jax.enable_x64(True):`.',
    ),
  }
  for wrong, message in doubts.values():
    if wrong:
      warnings.warn(message, stacklevel=3)
  return tuple(name for name, (wrong, _) in doubts.items() if wrong)

r"""The audit: what deleting a set will do, before anything is deleted.

With the leverages of `leverage`, the residual r of the forget set, the
displacement D_0 = th - th_R (from which doing nothing leaves gap_F = X_F D_0,
gap_R = X_R D_0) and K_QF = X_Q X_F':

  dof        sum h / (1 + h) over the eigenvalues h of H_FF
  rho_c      1 / lmax: critical forget weight of GradDiff (alpha_c for means);
             inf where the forget set has no leverage
  influence  ||H_FF h_FF r|| / ||H_FF r||, what an influence step leaves on F
  alignment  cos_F = cos(gap_F, K_FF r): how far the best step of plain
             gradient ascent can fix F (it leaves sin); cos_R likewise on R
  null share r' H_perp r / r' H_FF r, H_perp = X_F P X_F' / ridge with P the
             projector on null(X_R): what can be undone without touching R
  span deficiency ||(I - Pi_F) D_0|| / ||D_0||, Pi_F on the row space of X_F:
             what forget-only Euclidean methods can never reach

Axes: R retain, F forget rows, d features, c outputs.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tmlib.unlearning import dynamics, leverages
from tmlib.unlearning import problem as problem_lib
from tmlib.unlearning import spec as spec_lib
from tmlib.unlearning.problem import RidgeProblem
from tmlib.unlearning.spec import UnlearnSpec

__all__ = [
  'LeverageReport',
  'audit',
  'check_weight',
  'forget_weight',
  'ratio',
  'recommend',
  'span_deficiency',
  'standard_specs',
]


class LeverageReport(NamedTuple):
  """Everything the audit knows; floats and NumPy arrays.

  Attributes:
    eigenvalues: [F] of H_FF, largest first (the leading ones if matrix-free).
    lmax: the largest of them.
    trace: tr H_FF.
    dof: effective number of parameters that F pins down.
    logdet: log det(I + H_FF).
    rho_c: critical forget weight, sum losses (`rho_c_local` if `local`).
    alpha_c: the same for mean losses.
    local: thresholds are local (cross-entropy): never a reason to refuse.
    influence_error: share of the forget gap that an influence step leaves.
    cos_forget: alignment on F, 0 without signal.
    cos_retain: alignment on R.
    null_share: see above; an upper bound if matrix-free.
    span_deficiency: see above.
    stationarity: ||g_tot|| / ||g_F||, zero at a minimum.
    idle: (||gap_F||, ||gap_R||) of doing nothing, in output units.
    forget_gaps: [F], gap of each forget row when nothing is done.
    predicted: {method: (F, R)}, gaps relative to doing nothing.
    harmed: indices of the retain rows that doing nothing hurts most.
    harm: their gaps, in output units.
    recommendation: name of a method.
    reason: a sentence.
    flags: named warnings.
    products: with the retain curvature that were spent; 0 if dense.
    residual: the largest relative residual of a solve; 0 if dense.
  """

  eigenvalues: np.ndarray
  lmax: float
  trace: float
  dof: float
  logdet: float
  rho_c: float
  alpha_c: float
  local: bool
  influence_error: float
  cos_forget: float
  cos_retain: float
  null_share: float
  span_deficiency: float
  stationarity: float
  idle: tuple[float, float]
  forget_gaps: np.ndarray
  predicted: dict[str, tuple[float, float]]
  harmed: np.ndarray
  harm: np.ndarray
  recommendation: str
  reason: str
  flags: tuple[str, ...]
  products: int = 0
  residual: float = 0.0


def check_weight(
  report: LeverageReport, weight: float, *, reduction: str
) -> float:
  """A weight of the forget loss in units of the critical one; warns from 1 on.

  For squared loss rho_c ends the existence of a limit. For cross-entropy it is
  `rho_c_local`: the minimum near the retrained model is lost, another one
  remains further away. So a weight is never refused here.

  Args:
    report: of `audit` or `audit_network`.
    weight: rho ('sum') or alpha ('mean'), >= 0.
    reduction: 'sum' or 'mean', as the losses are.

  Returns:
    weight / critical weight.
  """
  if reduction not in ('sum', 'mean'):
    raise ValueError(f"reduction={reduction!r}; allowed: 'sum', 'mean'.")
  if not weight >= 0:
    raise ValueError(f'weight={weight} must be >= 0; the sign is the method.')
  critical = report.rho_c if reduction == 'sum' else report.alpha_c
  relative = weight / critical
  if relative >= 1:
    what = (
      'rho_c_local: the minimum near the retrained model is lost'
      if report.local
      else 'rho_c: the iterates diverge with more steps'
    )
    warnings.warn(
      f'the weight {weight:.3g} of the forget loss is {relative:.2g} times the '
      f'critical one ({critical:.3g}), {what}.',
      stacklevel=2,
    )
  return relative


def standard_specs(problem: RidgeProblem, steps: int = 10) -> list[UnlearnSpec]:
  """The methods an audit compares, all with the same number of steps.

  Step sizes are 1 / largest eigenvalue of the full curvature; gradient ascent
  gets its best single step; GradDiff a tenth of its critical weight, 1 at most.
  """
  p = problem_lib.check_problem(problem)
  A = np.asarray(problem_lib.full_curvature(p), np.float64)
  lr = float(1 / np.linalg.eigvalsh(A)[-1])
  lmax = float(leverages.leverage(p).eigenvalues[0])
  rho = forget_weight(lmax)
  ascent = spec_lib.gradient_ascent(1.0)
  best = max(dynamics.optimal_scalar_step(p, ascent), 0.0)
  cg = spec_lib.retain_finetune(steps=steps, solver='cg')
  return [
    spec_lib.gradient_ascent(best),
    spec_lib.graddiff(rho, reduction='sum', lr=lr, steps=steps),
    spec_lib.neggrad_plus(1 / (1 + rho), reduction='sum', lr=lr, steps=steps),
    spec_lib.retain_finetune(lr, steps),
    cg,
    spec_lib.influence(),
    spec_lib.woodbury_influence(),
    spec_lib.scrub(min(rho, 1.0), 1.0, 1.0, lr / 2, steps),
    spec_lib.corrected_relabel(1.0, lr, steps),
  ]


def forget_weight(lmax: float) -> float:
  """The weight of the forget loss that an audit compares: rho_c / 10, <= 1."""
  return min(1.0, 0.1 / max(lmax, 1e-30))


def ratio(a: float, b: float) -> float:
  """Quotient for b >= 0; nothing of nothing is 0, something inf, never NaN."""
  if b > 0:
    return a / b
  return 0.0 if a == 0 else math.inf


def _norm(x) -> float:
  return float(jnp.linalg.norm(x))


def _cos(a, b) -> float:
  size = _norm(a) * _norm(b)
  return ratio(float(jnp.sum(a * b)), size)


def _null_share(p: RidgeProblem, lev, r) -> float:
  if not float(p.ridge) > 0:
    return 0.0  # A_R is regular without ridge: no unseen direction
  P = spec_lib.retain_null(1e-6 if p.X_R.dtype == jnp.float32 else 1e-10)(p)
  if float(jnp.trace(P)) < 0.5:
    return 0.0  # R sees every direction; what P holds is rounding
  unseen = jnp.sum((P @ (p.X_F.T @ r)) ** 2) / p.ridge
  share = ratio(float(unseen), float(jnp.sum(r * (lev.forget_self @ r))))
  return min(share, 1.0)


def span_deficiency(X_F: Any, D: Any) -> float:
  """||(I - Pi_F) D|| / ||D||, Pi_F the projector on the rows of X_F."""
  basis, s, _ = jnp.linalg.svd(X_F.T, full_matrices=False)
  basis = basis * (s > 1e-6 * s[0])[None]
  outside = D - basis @ (basis.T @ D)
  return ratio(_norm(outside), _norm(D))


def _sizes(p: RidgeProblem, theta: Any):
  """(gap_F, gap_R) -> norms, zero below the rounding of the outputs."""
  eps = 100 * float(jnp.finfo(p.X_F.dtype).eps)
  floors = [eps * _norm(X @ theta) for X in (p.X_F, p.X_R)]
  above = lambda gap, floor: _norm(gap) if _norm(gap) > floor else 0.0
  return lambda F, R: (above(F, floors[0]), above(R, floors[1]))


def audit(
  problem: RidgeProblem,
  specs: Sequence[UnlearnSpec] | None = None,
  *,
  top: int = 10,
  local: bool = False,
  tol: float = 1e-2,
) -> LeverageReport:
  """Diagnoses a deletion request and predicts each method's gap.

  Args:
    problem: RidgeProblem, or `ggn.linearize` of a small network.
    specs: methods to predict; None for `standard_specs`.
    top: how many harmed retain rows to name.
    local: the thresholds are local (cross-entropy).
    tol: a start with ||g_tot|| / ||g_F|| beyond it is flagged.

  Returns:
    LeverageReport.

  Raises:
    ValueError: bad data or a singular A_R.
  """
  p = problem_lib.check_problem(problem)
  flags = []
  if problem_lib.warn_duplicates(p.X_R, p.X_F):
    flags.append('duplicates')
  lev = leverages.leverage(p)
  theta = problem_lib.initial(p)
  r = p.Y_F - p.X_F @ theta
  D = theta - problem_lib.fit_retain(p)
  gap_F, gap_R = p.X_F @ D, p.X_R @ D
  g_F = p.X_F.T @ r
  g_tot = problem_lib.retain_curvature(p) @ D - g_F
  drift = ratio(_norm(g_tot), _norm(g_F))
  flags += _signal_flags(p, r, drift, tol)

  eigs = np.asarray(lev.eigenvalues, np.float64)
  hat = jnp.linalg.solve(
    jnp.eye(len(lev.forget_self)) + lev.forget_self, lev.forget_self
  )
  sizes = _sizes(p, theta)
  idle = sizes(gap_F, gap_R)
  if not any(idle):
    flags.append('nothing_to_undo')
  predicted = {}
  for one in standard_specs(p) if specs is None else specs:
    gap = dynamics.closed_form_gap(p, one)
    left = sizes(gap.forget, gap.retain)
    predicted[one.name] = (ratio(left[0], idle[0]), ratio(left[1], idle[1]))
  scores = np.linalg.norm(np.asarray(gap_R), axis=1)
  harmed = np.argsort(-scores)[:top]
  sizes = len(p.X_R), len(p.X_F)
  K_F = p.X_F @ g_F
  null_share = _null_share(p, lev, r)
  span = span_deficiency(p.X_F, D)
  cos_F = _cos(gap_F, K_F)
  name, reason = recommend(
    float(eigs[0]), cos_F, null_share, span, predicted, idle
  )
  return LeverageReport(
    eigenvalues=eigs,
    lmax=float(eigs[0]),
    trace=float(eigs.sum()),
    dof=float((eigs / (1 + eigs)).sum()),
    logdet=float(np.log1p(eigs).sum()),
    rho_c=float(dynamics.critical_weight(eigs[0], 'sum', *sizes)),
    alpha_c=float(dynamics.critical_weight(eigs[0], 'mean', *sizes)),
    local=local,
    influence_error=ratio(
      _norm(lev.forget_self @ hat @ r),
      _norm(lev.forget_self @ r),
    ),
    cos_forget=cos_F,
    cos_retain=_cos(gap_R, p.X_R @ g_F),
    null_share=null_share,
    span_deficiency=span,
    stationarity=drift,
    idle=idle,
    forget_gaps=np.linalg.norm(np.asarray(gap_F), axis=1),
    predicted=predicted,
    harmed=harmed,
    harm=scores[harmed],
    recommendation=name,
    reason=reason,
    flags=tuple(flags),
  )


def _signal_flags(p, r, drift, tol) -> list[str]:
  flags = []
  scale = _norm(p.Y_F - p.X_F @ p.prior)
  if _norm(r) <= 1e-6 * scale and _norm(p.X_F) > 0:
    flags.append('no_gradient_signal')
    warnings.warn(
      'the model interpolates the forget set (r_F = 0): every forget gradient '
      'vanishes although the gap to retraining does not. Use a retain-side '
      'method (retain_finetune, retain_newton) or retrain.',
      stacklevel=3,
    )
  if drift > tol:
    flags.append('not_stationary')
    warnings.warn(
      f'the start is not stationary (||g_tot|| / ||g_F|| = {drift:.2g}); its '
      'total gradient is included in every prediction.',
      stacklevel=3,
    )
  return flags


def recommend(
  lmax: float,
  cos_F: float,
  null_share: float,
  span: float,
  predicted: dict[str, tuple[float, float]],
  idle: tuple[float, float],
) -> tuple[str, str]:
  """The method with the smallest predicted gap on F and R, and why.

  Methods within a percent of doing nothing of the best count as equal; the
  earliest listed (cheapest) of them wins. The reason names the regime.

  Args:
    lmax: largest self-leverage.
    cos_F: alignment of gradient ascent.
    null_share: share that no retain row sees.
    span: span deficiency.
    predicted: {method: (F, R)} relative to doing nothing.
    idle: gaps of doing nothing on F and R.

  Returns:
    Name and a sentence.
  """
  weight = np.square(np.asarray(idle))
  # A side without a gap is left out: there, relative gaps say nothing.
  used = weight > 0
  total = {
    name: float(np.sqrt(np.sum(np.square(gap)[used] * weight[used])))
    for name, gap in predicted.items()
  }
  size = float(np.sqrt(weight.sum()))
  finite = {k: v for k, v in total.items() if np.isfinite(v)}
  if not finite or size == 0:
    return 'none', 'Nothing to undo: the predicted gap of doing nothing is 0.'
  best = min(finite.values())
  name = next(k for k, v in finite.items() if v <= best + 0.01 * size)
  if lmax < 0.1 and cos_F > 0.9:
    why = f'leverage is small (lmax {lmax:.2g}) and ascent is aligned, so '
    why += 'that any local method works'
  elif span > 0.5 and null_share <= 0.9:
    why = f'{span:.0%} of the needed move lies outside the span of the forget '
    why += 'rows, so that forget-only methods cannot make it'
  elif null_share > 0.9:
    why = f'{null_share:.0%} of the self-leverage is in directions that no '
    why += 'retain row sees, so that projected methods can undo it'
  elif lmax <= 1:
    why = f'leverage is moderate (lmax {lmax:.2g}): an uncorrected influence '
    why += f'step leaves up to {lmax / (1 + lmax):.0%} of the forget gap'
  else:
    why = f'leverage is large (lmax {lmax:.2g}): only methods that use the '
    why += 'retained curvature come close, else retrain'
  left = finite[name] / size
  if left > 0.5:
    why += '; no method here comes close, so retrain'
  return name, (
    f'{name}: predicted to leave {left:.1%} of the gap of doing nothing; {why}.'
  )

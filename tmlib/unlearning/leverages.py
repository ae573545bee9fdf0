r"""The two leverage matrices that separate a full from a retrained model.

Axes: R retain, F forget, Q query points, d features, c outputs.

With A_R, A, th_R, th_* of `problem`, and residuals r_F = Y_F - X_F th_* (in
sample) and e_F = Y_F - X_F th_R (out of sample):

  H_FF = X_F A_R^{-1} X_F',  H_RF = X_R A_R^{-1} X_F'

Derivations, in order.
  (1) th_* is stationary: grad L_R(th_*) = -grad L_F(th_*) = X_F' r_F, and L_R
      is quadratic with Hessian A_R and minimum th_R, so that
      th_* - th_R = A_R^{-1} X_F' r_F.
  (2) Apply X_F and X_R: doing nothing leaves the gaps
      gap_F = X_F (th_* - th_R) = H_FF r_F,  gap_R = H_RF r_F.
  (3) e_F = r_F + gap_F = (I + H_FF) r_F: leave-block-out residuals.
  (4) Woodbury: A^{-1} = A_R^{-1} - A_R^{-1} X_F' (I + H_FF)^{-1} X_F A_R^{-1}.
      With h_QF = X_Q A^{-1} X_F' this reads h_QF = H_QF (I + H_FF)^{-1}, whence
      I - h_FF = (I + H_FF)^{-1} and H_QF = h_QF (I - h_FF)^{-1}: the retrained
      geometry follows from the full model alone ("downdate").
  (5) X_R' X_R = A_R - ridge I, so H_RF' H_RF = H_FF - ridge X_F A_R^{-2} X_F'.
      Without ridge ||gap_R||^2 = r' H_FF r and ||gap_F||^2 = r' H_FF^2 r: below
      an eigenvalue of one the damage on R dominates, above it the one on F.
  (6) L_R(th_*) - L_R(th_R) = 1/2 tr r_F' H_FF r_F, and
      log det(I + H_FF) = log det A - log det A_R.
  (7) Push-through, K_AB = X_A X_B': H_RF = (K_RR + ridge I)^{-1} K_RF and
      H_FF = (K_FF - K_FR (K_RR + ridge I)^{-1} K_RF) / ridge ("dual").
  (8) From any th: th - th_R = A_R^{-1} grad L_R(th)
      = A_R^{-1} (X_F' r_F(th) + grad (L_R + L_F)(th)).

For a network with C outputs the rows are (example, output) pairs, so that F
and R stand for n_F C and n_R C (see `local`).

References:
  Cook, Weisberg. Residuals and influence in regression, 1982 (hat matrix,
  leave-out residuals). The retrained-geometry form is derived above.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.unlearning import problem as problem_lib
from tmlib.unlearning.problem import RidgeProblem

__all__ = [
  'Leverage',
  'cross_leverage',
  'downdate',
  'leverage',
  'loo_residual',
]


class Leverage(NamedTuple):
  """Leverages under the retrained geometry.

  Attributes:
    forget_self: [F, F], H_FF, positive semidefinite.
    retain_cross: [R, F], H_RF.
    eigenvalues: [F], of H_FF, largest first, in [0, inf).
  """

  forget_self: jax.Array
  retain_cross: jax.Array
  eigenvalues: jax.Array


def _make(forget_self, retain_cross):
  forget_self = (forget_self + forget_self.T) / 2
  eigs = jnp.linalg.eigvalsh(forget_self)[::-1]
  return Leverage(forget_self, retain_cross, jnp.maximum(eigs, 0))


def leverage(problem: RidgeProblem, form: str = 'primal') -> Leverage:
  """H_FF, H_RF and the spectrum of H_FF.

  Args:
    problem: RidgeProblem.
    form: 'primal' factors A_R [d, d]; 'dual' factors the retain kernel [R, R]
      and needs ridge > 0 (few points, many features); 'downdate' factors the
      curvature A of the *full* model and never that of the retain set.

  Returns:
    Leverage.

  Raises:
    ValueError: unknown form; singular A_R; dual without ridge; a forget set
      whose removal loses rank (downdate).
  """
  p = problem_lib.check_problem(problem)
  if form == 'primal':
    curvature = problem_lib.retain_curvature(p)
    if problem_lib.concrete(curvature):
      problem_lib.condition(curvature)
    solved = jax.scipy.linalg.solve(curvature, p.X_F.T, assume_a='pos')
    return _make(p.X_F @ solved, p.X_R @ solved)
  if form == 'dual':
    if problem_lib.concrete(p.ridge) and not p.ridge > 0:
      raise ValueError(
        f"form='dual' divides by ridge={float(p.ridge)}; it must be > 0. Use "
        "form='primal' for ordinary least squares."
      )
    kernel = p.X_R @ p.X_R.T
    kernel += p.ridge * jnp.eye(len(kernel), dtype=kernel.dtype)
    cross = p.X_R @ p.X_F.T
    retain = jax.scipy.linalg.solve(kernel, cross, assume_a='pos')
    # The symmetric form of K_FF - K_FR retain: both of its terms are positive
    # semidefinite, so that a small ridge costs fewer digits.
    rest = p.X_F - retain.T @ p.X_R
    return _make(rest @ rest.T / p.ridge + retain.T @ retain, retain)
  if form == 'downdate':
    curvature = problem_lib.full_curvature(p)
    if problem_lib.concrete(curvature):
      problem_lib.condition(curvature, 'A')
    return downdate(curvature, p.X_F, p.X_R)
  raise ValueError(f"form={form!r}; allowed: 'primal', 'dual', 'downdate'.")


def downdate(full: jax.Array, X_F: jax.Array, X_Q: jax.Array) -> Leverage:
  """Retrained leverages from the curvature of the full model alone.

  h_QF = X_Q A^{-1} X_F',  H_QF = h_QF (I - h_FF)^{-1}.

  Args:
    full: [d, d], A, curvature of the full objective.
    X_F: [F, d].
    X_Q: [Q, d], retain points or any other query.

  Returns:
    Leverage with `retain_cross` [Q, F].

  Raises:
    ValueError: the largest eigenvalue of h_FF reaches one: without F the
      model is not determined and e_F is infinite.
  """
  solved = jax.scipy.linalg.solve(full, X_F.T, assume_a='pos')
  hat = X_F @ solved
  hat = (hat + hat.T) / 2
  if problem_lib.concrete(hat):
    lmax = float(np.linalg.eigvalsh(np.asarray(hat))[-1])
    if lmax >= 1 - 10 * len(hat) * float(np.finfo(hat.dtype).eps):
      raise ValueError(
        f'the largest leverage of the forget set in the full model is {lmax}: '
        'removing it loses rank and the retrained residual is infinite. Pass '
        'ridge > 0, forget fewer points at once, or use float64.'
      )
  room = jnp.eye(len(hat), dtype=hat.dtype) - hat
  both = jnp.concatenate([hat, X_Q @ solved])
  both = jax.scipy.linalg.solve(room, both.T, assume_a='pos').T
  return _make(both[: len(hat)], both[len(hat) :])


def cross_leverage(problem: RidgeProblem, X_Q: Any) -> jax.Array:
  """H_QF = X_Q A_R^{-1} X_F', [Q, F]: what doing nothing leaves at any query.

  The gap X_Q (th_* - th_R) is H_QF r_F.

  Raises:
    ValueError: bad data or a singular A_R.
  """
  p = problem_lib.check_problem(problem)
  X_Q = jnp.asarray(problem_lib.check_array('X_Q', X_Q))
  if X_Q.shape[1] != p.X_F.shape[1]:
    raise ValueError(
      f'X_Q has {X_Q.shape[1]} features but X_F has {p.X_F.shape[1]}.'
    )
  curvature = problem_lib.retain_curvature(p)
  if problem_lib.concrete(curvature):
    problem_lib.condition(curvature)
  return X_Q @ jax.scipy.linalg.solve(curvature, p.X_F.T, assume_a='pos')


def loo_residual(lev: Leverage, r_F: jax.Array) -> jax.Array:
  """e_F = (I + H_FF) r_F: the residuals of a model that never saw F, [F, c]."""
  return r_F + lev.forget_self @ r_F

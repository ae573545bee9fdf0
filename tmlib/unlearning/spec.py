r"""One family that holds every gradient-based unlearner.

  J(th) = 1/2 tr (Z_F - X_F th)' W_F (Z_F - X_F th)
        + 1/2 tr (Z_R - X_R th)' W_R (Z_R - X_R th) + mu/2 ||th - a||^2
  th <- th - lr P G grad J(th)

Targets Z, signed weights W, geometry G, projection P, anchor (mu, a), step size
and number of steps: at a stationary full model grad L_R = -grad L_F, so that
one plain step of gradient ascent, GradDiff and retain fine-tuning is the same
direction; methods differ by reweighting, geometry, projection and steps only.

A field is a number, an array, or a function of the problem (such as "the
inverse curvature"), so that one spec serves many problems.

Axes: R retain, F forget points, d features, c outputs, r rank.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.unlearning import leverages
from tmlib.unlearning import problem as problem_lib
from tmlib.unlearning.problem import RidgeProblem

__all__ = [
  'UnlearnSpec',
  'corrected_relabel',
  'corrected_targets',
  'graddiff',
  'gradient_ascent',
  'influence',
  'lora',
  'neggrad_plus',
  'npo_weights',
  'projected',
  'relabel',
  'retain_finetune',
  'retain_newton',
  'retain_null',
  'scrub',
  'sum_weight',
  'woodbury_influence',
]

Field = Any  # a number, an array or a function RidgeProblem -> array
Derived = Callable[[RidgeProblem], jax.Array]


class UnlearnSpec(NamedTuple):
  """A member of the family; see the module docstring for the symbols.

  Attributes:
    name: for tables.
    weight_F: W_F, scalar, [F] or symmetric [F, F]; negative pushes away.
    weight_R: W_R, scalar, [R] or symmetric [R, R].
    target_F: Z_F, [F, c]; None for Y_F.
    target_R: Z_R, [R, c]; None for Y_R.
    geometry: G, [d, d]; None for the identity.
    projection: P, [d, d]; None for the identity.
    mu: anchor strength.
    anchor: a, [d, c]; None for the prior of the problem.
    lr: step size, None for 1, or for "small enough" in the limit; ignored by
      solver='cg'.
    steps: number of steps, or None for the limit (a stationary point).
    solver: 'gradient', or 'cg': conjugate gradients on J, preconditioned by G.
  """

  name: str
  weight_F: Field = 0.0
  weight_R: Field = 0.0
  target_F: Field = None
  target_R: Field = None
  geometry: Field = None
  projection: Field = None
  mu: Field = 0.0
  anchor: Field = None
  lr: Field = None
  steps: int | None = 1
  solver: str = 'gradient'


def _ridge(p):
  return p.ridge


def _full_inverse(p):
  return jnp.linalg.inv(problem_lib.full_curvature(p))


def _retain_inverse(p):
  return jnp.linalg.inv(problem_lib.retain_curvature(p))


def sum_weight(weight: float, reduction: str) -> Derived:
  """The weight rho of L_F in L_R - rho L_F for either way of averaging.

  With means, mean_R + ridge - alpha mean_F is 1/R times L_R - rho L_F with
  rho = alpha R / F (the ridge belongs inside the retain mean).

  Args:
    weight: rho ('sum') or alpha ('mean').
    reduction: 'sum' or 'mean'; no default on purpose, because mixing the two
      up moves the weight by R / F.

  Returns:
    A function of the problem.

  Raises:
    ValueError: an unknown reduction or a negative weight.
  """
  if reduction not in ('sum', 'mean'):
    raise ValueError(f"reduction={reduction!r}; allowed: 'sum', 'mean'.")
  if not weight >= 0:
    raise ValueError(f'weight={weight} must be >= 0; the sign is the method.')
  if reduction == 'sum':
    return lambda p: jnp.asarray(weight, p.X_R.dtype)
  return lambda p: jnp.asarray(
    weight * p.X_R.shape[0] / p.X_F.shape[0], p.X_R.dtype
  )


def gradient_ascent(
  lr: Field, steps: int = 1, geometry: Field = None
) -> UnlearnSpec:
  """Ascent on the forget loss: J = -L_F.

  gap_F = [I + H_FF - (I + lr K_FF)^k] r_F with K_FF = X_F G X_F': the forget
  residual grows exponentially; the right stop is (I + lr K_FF)^k r_F =
  (I + H_FF) r_F, which one k can meet only along one eigenvector.

  References:
    Golatkar, Achille, Soatto. Eternal sunshine of the spotless net, 2020
    (NegGrad).
  """
  return UnlearnSpec(
    'gradient_ascent', weight_F=-1.0, geometry=geometry, lr=lr, steps=steps
  )


def graddiff(
  weight: float, *, reduction: str, lr: Field = None, steps: int | None = None
) -> UnlearnSpec:
  """J = L_R - rho L_F.

  Its limit exists iff rho < rho_c = 1 / lmax(H_FF), where it over-forgets:
  gap_F = -rho H_FF (I - rho H_FF)^{-1} e_F.

  Args:
    weight: rho, or alpha when the losses are means.
    reduction: 'sum' | 'mean', see `sum_weight`.
    lr: step size.
    steps: None for the limit.

  References:
    Liu, Liu, Stone. Continual learning and private unlearning, 2022.
  """
  rho = sum_weight(weight, reduction)
  return UnlearnSpec(
    'graddiff',
    weight_F=lambda p: -rho(p),
    weight_R=1.0,
    mu=_ridge,
    lr=lr,
    steps=steps,
  )


def neggrad_plus(
  beta: float, *, reduction: str, lr: Field = None, steps: int | None = None
) -> UnlearnSpec:
  """J = beta L_R - (1 - beta) L_F: `graddiff` with rho = (1 - beta) / beta.

  Args:
    beta: in (0, 1].
    reduction: 'sum' | 'mean'.
    lr: step size.
    steps: None for the limit.

  References:
    Kurmanji et al. Towards unbounded machine unlearning, 2023.
  """
  if not 0 < beta <= 1:
    raise ValueError(f'beta={beta} must be in (0, 1].')
  rho = sum_weight((1 - beta) / beta, reduction)
  return UnlearnSpec(
    'neggrad_plus',
    weight_F=lambda p: -beta * rho(p),
    weight_R=beta,
    mu=lambda p: beta * p.ridge,
    lr=lr,
    steps=steps,
  )


def retain_finetune(
  lr: Field = None, steps: int | None = None, solver: str = 'gradient'
) -> UnlearnSpec:
  """J = L_R, by gradient descent or conjugate gradients.

  gap_F = X_F (I - lr A_R)^k A_R^{-1} X_F' r_F: unbiased, and slowest exactly
  along the directions of high leverage (small eigenvalues of A_R).
  """
  if solver not in ('gradient', 'cg'):
    raise ValueError(f"solver={solver!r}; allowed: 'gradient', 'cg'.")
  name = 'retain_finetune' if solver == 'gradient' else 'retain_cg'
  return UnlearnSpec(
    name, weight_R=1.0, mu=_ridge, lr=lr, steps=steps, solver=solver
  )


def retain_newton() -> UnlearnSpec:
  """One Newton step on L_R: exact in the linear case."""
  return UnlearnSpec(
    'retain_newton', weight_R=1.0, mu=_ridge, geometry=_retain_inverse
  )


def influence() -> UnlearnSpec:
  """th_* + A^{-1} grad L_F: an influence-function step.

  gap_F = H_FF h_FF r_F, gap_R = H_RF h_FF r_F: on F at most lmax / (1 + lmax)
  of doing nothing remains; on R this holds without ridge only, and with one
  the step can raise the gap.

  References:
    Koh, Liang. Understanding black-box predictions via influence functions,
    2017.
  """
  return UnlearnSpec('influence', weight_F=-1.0, geometry=_full_inverse)


def woodbury_influence() -> UnlearnSpec:
  """The influence step with W_F = (I - h_FF)^{-1}: exact in the linear case.

  With one output the same step has per-example weights e_i / r_i, which may
  be negative: positive reweighting alone cannot be enough.

  Exact from th_* only: it knows nothing of a start that is not stationary.
  """

  def weight(p):
    solved = jnp.linalg.solve(problem_lib.full_curvature(p), p.X_F.T)
    return -jnp.linalg.inv(jnp.eye(len(p.X_F)) - p.X_F @ solved)

  return UnlearnSpec(
    'woodbury_influence', weight_F=weight, geometry=_full_inverse
  )


def relabel(
  targets: Field,
  weight: float = 1.0,
  lr: Field = None,
  steps: int | None = None,
) -> UnlearnSpec:
  """Pulls F to other targets, J = L_R + weight/2 ||Z_F - X_F th||^2.

  Random labels, "I don't know", or the outputs of a weak teacher, by choice of
  `targets`. Stable for every weight; in the limit
  gap_F = rho H_FF (I + rho H_FF)^{-1} (Z_F - X_F th_R), exact iff
  H_FF (Z_F - X_F th_R) = 0.

  Args:
    targets: Z_F, [F, c].
    weight: rho > 0 (sum losses).
    lr: step size.
    steps: None for the limit.
  """
  if not weight > 0:
    raise ValueError(f'weight={weight} must be > 0.')
  return UnlearnSpec(
    'relabel',
    weight_F=weight,
    weight_R=1.0,
    target_F=targets,
    mu=_ridge,
    lr=lr,
    steps=steps,
  )


def corrected_targets(problem: RidgeProblem) -> jax.Array:
  """X_F th - H_FF r_F = X_F th_R, the outputs of the retrained model, [F, c].

  From a start that is not stationary the total gradient is included:
  X_F (th - A_R^{-1} grad L_R(th)). Uses the downdate form: no retrained model.
  """
  p = problem_lib.check_problem(problem)
  theta = problem_lib.initial(p)
  lev = leverages.downdate(problem_lib.full_curvature(p), p.X_F, p.X_F)
  r = p.Y_F - p.X_F @ theta
  total = p.ridge * (theta - p.prior) - p.X_R.T @ (p.Y_R - p.X_R @ theta)
  total -= p.X_F.T @ r
  # A_R^{-1} v seen from F, by Woodbury: X_F A_R^{-1} = (I + H) X_F A^{-1}.
  seen = p.X_F @ jnp.linalg.solve(problem_lib.full_curvature(p), total)
  drift = seen + lev.forget_self @ seen
  return p.X_F @ theta - lev.forget_self @ r - drift


def corrected_relabel(
  weight: float = 1.0, lr: Field = None, steps: int | None = None
) -> UnlearnSpec:
  """`relabel` to the leverage-corrected targets: exact in the linear case."""
  spec = relabel(corrected_targets, weight, lr, steps)
  return spec._replace(name='corrected_relabel')


def scrub(
  forget: float = 1.0,
  teacher: float = 1.0,
  labels: float = 1.0,
  lr: Field = None,
  steps: int | None = 1,
) -> UnlearnSpec:
  """Anchors R to the full model and pushes F away from it.

  J = labels L_R + teacher/2 ||X_R (th - th_0)||^2
    - forget/2 ||X_F (th - th_0)||^2, th_0 the start (the teacher).
  The teacher term keeps the gap H_RF r_F alive: freezing retain outputs is
  not retraining.

  References:
    Kurmanji et al. Towards unbounded machine unlearning, 2023 (SCRUB; the
    alternating phases of it are one sum here).
  """
  both = teacher + labels
  if not both > 0 or min(forget, teacher, labels) < 0:
    raise ValueError(
      f'forget={forget}, teacher={teacher}, labels={labels} must be >= 0 and '
      'teacher + labels > 0.'
    )

  def target_R(p):
    taught = p.X_R @ problem_lib.initial(p)
    return (teacher * taught + labels * p.Y_R) / both

  return UnlearnSpec(
    'scrub',
    weight_F=-forget,
    weight_R=both,
    target_F=lambda p: p.X_F @ problem_lib.initial(p),
    target_R=target_R,
    mu=lambda p: labels * p.ridge,
    lr=lr,
    steps=steps,
  )


def npo_weights(
  beta: float, lr: Field, steps: int = 1, theta: jax.Array | None = None
) -> UnlearnSpec:
  """Gradient ascent with the weights of NPO, frozen at `theta`.

  NPO has the gradient of -L_F with weights w_i = 2 s_i / (1 + s_i),
  s_i = (p_i(th) / p_i(th_0))^beta. For squared loss log p_i = -||r_i||^2 / 2.
  At the start all weights are one: the first step of NPO is gradient ascent.
  `simulate_npo` runs the live weights.

  Args:
    beta: inverse temperature > 0.
    lr: step size.
    steps: number of steps.
    theta: [d, c], where the weights are frozen; None for the start.

  References:
    Zhang et al. Negative preference optimization, 2024.
  """
  if not beta > 0:
    raise ValueError(f'beta={beta} must be > 0.')

  def weight(p):
    start = problem_lib.initial(p)
    loss = lambda th: 0.5 * jnp.sum((p.Y_F - p.X_F @ th) ** 2, -1)
    ratio = loss(start) - loss(start if theta is None else theta)
    return -2 * jax.nn.sigmoid(beta * ratio)

  return UnlearnSpec('npo_weights', weight_F=weight, lr=lr, steps=steps)


def retain_null(tol: float = 1e-10) -> Derived:
  """The projector on null(X_R), [d, d]: directions that no retain point sees.

  Args:
    tol: singular values below tol times the largest count as zero.
  """

  def projection(p):
    _, s, vt = jnp.linalg.svd(p.X_R, full_matrices=False)
    seen = vt * (s > tol * s[0])[:, None]
    return jnp.eye(p.X_R.shape[1], dtype=p.X_R.dtype) - seen.T @ seen

  return projection


def projected(spec: UnlearnSpec, projection: Field = None) -> UnlearnSpec:
  """`spec` with its updates projected; by default on null(X_R).

  gap_R = H_RF r_F stays as it was, and of H_FF = H_perp + H_par only the part
  H_perp that no retain point sees can be removed.

  Args:
    spec: any member of the family with solver='gradient'.
    projection: [d, d] projector; None for `retain_null()`.
  """
  if spec.solver == 'cg':
    raise ValueError("projected: solver='cg' has no projection.")
  if projection is None:
    projection = retain_null()
  return spec._replace(name=f'projected_{spec.name}', projection=projection)


def lora(spec: UnlearnSpec, U: jax.Array) -> UnlearnSpec:
  """`spec` that moves in a low-rank space only: G = U U'.

  Args:
    spec: any member of the family.
    U: [d, r].
  """
  return spec._replace(name=f'lora_{spec.name}', geometry=U @ U.T)

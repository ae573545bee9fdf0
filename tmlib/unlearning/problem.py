r"""Ridge regression with a part of the data to be forgotten.

Axes: R retain points, F forget points, d features, c outputs.

Sums, not means:
  L_F(th) = 1/2 ||Y_F - X_F th||^2
  L_R(th) = 1/2 ||Y_R - X_R th||^2 + ridge/2 ||th - prior||^2
  A_R = X_R' X_R + ridge I,  A = A_R + X_F' X_F
  th_R = argmin L_R (the retrained model),  th_* = argmin L_R + L_F (the full
  model, where unlearning starts unless `start` says otherwise).
"""

import warnings
from typing import Any

import flax.struct
import jax
import jax.core
import jax.numpy as jnp
import numpy as np

__all__ = [
  'RidgeProblem',
  'check_array',
  'check_problem',
  'concrete',
  'condition',
  'copies',
  'duplicates',
  'fit_full',
  'fit_retain',
  'full_curvature',
  'initial',
  'residual',
  'retain_curvature',
  'warn_duplicates',
  'weigh',
]


class RidgeProblem(flax.struct.PyTreeNode):
  """Data of one deletion request; every leaf an array.

  Attributes:
    X_R: [R, d] float, retain inputs.
    Y_R: [R, c] float, retain targets.
    X_F: [F, d] float, forget inputs.
    Y_F: [F, c] float, forget targets.
    ridge: [] float >= 0.
    prior: [d, c] or None for zeros; the ridge pulls towards it.
    start: [d, c] or None for th_*; where unlearning starts. A network that
      was not trained to the end starts elsewhere.
  """

  X_R: Any
  Y_R: Any
  X_F: Any
  Y_F: Any
  ridge: Any = 0.0
  prior: Any = None
  start: Any = None


def concrete(*arrays) -> bool:
  """Whether all have values, so that they can be checked: none is traced."""
  return not any(isinstance(a, jax.core.Tracer) for a in arrays)


def check_problem(problem: RidgeProblem) -> RidgeProblem:
  """Checks shapes always and values where they are concrete.

  Returns:
    The problem with jnp leaves of one float dtype and `prior` filled in.

  Raises:
    ValueError: an empty set, mismatched shapes, NaN or inf, a negative ridge,
      or float64 input while x64 is off (it would silently become float32).
    TypeError: text, integer or complex data; a masked array.
  """
  fields = {
    k: check_array(k, getattr(problem, k)) for k in ('X_R', 'Y_R', 'X_F', 'Y_F')
  }
  X_R, Y_R, X_F, Y_F = fields.values()
  for name, x, y in (('R', X_R, Y_R), ('F', X_F, Y_F)):
    if x.shape[0] == 0:
      which = 'retain' if name == 'R' else 'forget'
      raise ValueError(f'X_{name} is empty: the {which} set needs a point.')
    if x.shape[0] != y.shape[0]:
      raise ValueError(
        f'X_{name} has {x.shape[0]} rows but Y_{name} has {y.shape[0]}.'
      )
  if X_R.shape[1] != X_F.shape[1]:
    raise ValueError(
      f'X_R has {X_R.shape[1]} features but X_F has {X_F.shape[1]}.'
    )
  if Y_R.shape[1] != Y_F.shape[1]:
    raise ValueError(
      f'Y_R has {Y_R.shape[1]} outputs but Y_F has {Y_F.shape[1]}.'
    )
  if np.ndim(problem.ridge) or isinstance(problem.ridge, str):
    raise TypeError(f'ridge={problem.ridge!r} must be one number >= 0.')
  if concrete(problem.ridge) and not 0 <= float(problem.ridge) < np.inf:
    raise ValueError(f'ridge={problem.ridge} must be >= 0 and finite.')
  shape = (X_R.shape[1], Y_R.shape[1])
  given = {}
  for name in ('prior', 'start'):
    value = given[name] = getattr(problem, name)
    if value is not None:
      value = given[name] = check_array(name, value)
      if value.shape != shape:
        raise ValueError(f'{name} has shape {value.shape}, expected {shape}.')
  arrays = {k: jnp.asarray(v) for k, v in fields.items()}
  dtype = jnp.result_type(*arrays.values())
  arrays = {k: v.astype(dtype) for k, v in arrays.items()}
  prior, start = given['prior'], given['start']
  return RidgeProblem(
    **arrays,
    ridge=jnp.asarray(problem.ridge, dtype),
    prior=jnp.zeros(shape, dtype)
    if prior is None
    else jnp.asarray(prior, dtype),
    start=None if start is None else jnp.asarray(start, dtype),
  )


def check_array(name: str, value: Any) -> Any:
  """A float matrix without NaN; lists become arrays, the rest is refused."""
  if isinstance(value, np.ma.MaskedArray):
    raise TypeError(f'{name} is a masked array; fill or drop what is missing.')
  if not hasattr(value, 'dtype'):  # lists, data frames
    value = np.asarray(value)
  if np.ndim(value) != 2:
    raise ValueError(
      f'{name} has shape {np.shape(value)}; two axes are needed, '
      'X [n, d] and Y [n, c] (one output is Y[:, None]).'
    )
  if not jnp.issubdtype(value.dtype, jnp.floating):
    raise TypeError(f'{name} has dtype {value.dtype}; pass floats.')
  if value.dtype == np.float64 and not jax.config.jax_enable_x64:  # pyright: ignore
    raise ValueError(
      f'{name} is float64 but x64 is off, so that it would silently become '
      'float32: call inside `with jax.enable_x64(True):` or cast it yourself.'
    )
  if concrete(value) and not np.isfinite(np.asarray(value)).all():
    raise ValueError(f'{name} holds NaN or inf; drop or impute those rows.')
  return value


def copies(X_R: Any, X_F: Any) -> int:
  """How many entries of X_F [F, ...] occur in X_R [R, ...], bit for bit."""
  # Adding zero turns -0.0, which compares equal but has other bits, into 0.0.
  bits = lambda x: (row.tobytes() for row in np.ascontiguousarray(x) + 0)
  kept = set(bits(X_R))
  return sum(row in kept for row in bits(X_F))


def duplicates(X_R: Any, X_F: Any) -> tuple[int, float]:
  """How much of the forget set is still in the retain set.

  Retraining on R keeps whatever copies of F are left in R.

  Args:
    X_R: [R, d].
    X_F: [F, d].

  Returns:
    The number of forget rows that occur in R, and the largest cosine between
    a forget and a retain row.
  """
  X_R, X_F = np.asarray(X_R), np.asarray(X_F)
  unit = lambda x: (
    x
    / np.maximum(
      np.linalg.norm(x, axis=1, keepdims=True), np.finfo(x.dtype).tiny
    )
  )
  return copies(X_R, X_F), float((unit(X_F) @ unit(X_R).T).max())


def warn_duplicates(X_R: Any, X_F: Any) -> int:
  """Warns when copies of forget points are left in the retain set."""
  count, cosine = duplicates(X_R, X_F)
  if count:
    warnings.warn(
      f'{count} of {len(X_F)} forget points are also in the retain set '
      f'(largest cosine {cosine:.6f}): retraining keeps their information. '
      'Remove the copies from X_R.',
      stacklevel=3,
    )
  return count


def weigh(
  problem: RidgeProblem, w_R: Any = None, w_F: Any = None
) -> RidgeProblem:
  """Sample weights as row scalings: L = 1/2 sum_i w_i ||y_i - x_i th||^2.

  Row i of X and Y is multiplied by sqrt(w_i); every formula then holds as it
  stands, with residuals and gaps in units of sqrt(w_i) times the output.

  Args:
    problem: RidgeProblem.
    w_R: [R] >= 0, or None for ones.
    w_F: [F] >= 0, or None for ones.

  Returns:
    RidgeProblem.

  Raises:
    ValueError: another shape, NaN, zeros throughout, or negative weights (the
      signed weights of a method belong into its `UnlearnSpec`).
  """
  scaled = {}
  for name, w in (('R', w_R), ('F', w_F)):
    if w is None:
      continue
    n = len(getattr(problem, f'X_{name}'))
    if np.shape(w) != (n,):
      raise ValueError(f'w_{name} has shape {np.shape(w)}, expected ({n},).')
    if concrete(w):
      values = np.asarray(w)
      if not (np.isfinite(values) & (values >= 0)).all():
        raise ValueError(
          f'w_{name} holds negative sample weights or NaN; they must be >= 0. '
          'Signed weights are part of an UnlearnSpec.'
        )
      if not values.any():
        raise ValueError(f'w_{name} is zero throughout: the set is empty.')
    root = jnp.sqrt(jnp.asarray(w))[:, None]
    for field in (f'X_{name}', f'Y_{name}'):
      scaled[field] = root * getattr(problem, field)
  return problem.replace(**scaled)


def retain_curvature(problem: RidgeProblem) -> jax.Array:
  """A_R = X_R' X_R + ridge I, [d, d]."""
  X = problem.X_R
  return X.T @ X + problem.ridge * jnp.eye(X.shape[1], dtype=X.dtype)


def full_curvature(problem: RidgeProblem) -> jax.Array:
  """A = A_R + X_F' X_F, [d, d]."""
  return retain_curvature(problem) + problem.X_F.T @ problem.X_F


def condition(curvature: jax.Array, name: str = 'A_R') -> float:
  """Condition number of a curvature; refuses a singular one.

  Raises:
    ValueError: numerically singular.
  """
  eigs = np.linalg.eigvalsh(np.asarray(curvature, np.float64))
  eps = float(np.finfo(curvature.dtype).eps)
  if not eigs[0] > eps * len(eigs) * eigs[-1]:
    rank = int((eigs > eps * len(eigs) * eigs[-1]).sum())
    raise ValueError(
      f'{name} is singular (rank {rank} of {len(eigs)}, eigenvalues from '
      f'{eigs[0]:.2e} to {eigs[-1]:.2e}): the retrained model is not unique. '
      'Pass ridge > 0, drop features, or keep more retain points.'
    )
  cond = float(eigs[-1] / eigs[0])
  # float32 cannot resolve 1e7 any more; at 1e5 two digits are left.
  if curvature.dtype == np.float32 and cond > 1e5:
    warnings.warn(
      f'cond({name}) = {cond:.1e} leaves no digits in float32; use float64 '
      'inside `with jax.enable_x64(True):` or a larger ridge.',
      stacklevel=3,
    )
  return cond


def _solve(curvature, problem, rhs):
  if concrete(curvature):
    condition(curvature)
  rhs = rhs + problem.ridge * problem.prior
  return jax.scipy.linalg.solve(curvature, rhs, assume_a='pos')


def fit_full(problem: RidgeProblem) -> jax.Array:
  """th_* = A^{-1} (X_R' Y_R + X_F' Y_F + ridge prior), [d, c].

  Raises:
    ValueError: A is singular, or bad data (`check_problem`).
  """
  p = check_problem(problem)
  return _solve(full_curvature(p), p, p.X_R.T @ p.Y_R + p.X_F.T @ p.Y_F)


def fit_retain(problem: RidgeProblem) -> jax.Array:
  """th_R = A_R^{-1} (X_R' Y_R + ridge prior), [d, c]: the truth of unlearning.

  Raises:
    ValueError: A_R is singular, or bad data (`check_problem`).
  """
  p = check_problem(problem)
  return _solve(retain_curvature(p), p, p.X_R.T @ p.Y_R)


def initial(problem: RidgeProblem) -> jax.Array:
  """Where unlearning starts: `start`, or th_* when it is None; [d, c]."""
  return fit_full(problem) if problem.start is None else problem.start


def residual(problem: RidgeProblem) -> jax.Array:
  """r_F = Y_F - X_F th at the start, [F, c]."""
  return problem.Y_F - problem.X_F @ initial(problem)

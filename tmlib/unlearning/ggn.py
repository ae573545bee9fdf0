r"""The theory for networks: linear outputs, Gauss-Newton curvature.

Around params th the objective L_R + L_F, L_R = sum_R l(f(x), y) + ridge/2
||th - prior||^2, is replaced by its Gauss-Newton model, which *is* a ridge
problem in d = th' - th with the design rows X = B' J and the residuals r of
`losses`: X' X = J' L J and X' r = J' rho. So every formula of the linear
theory holds for it as it stands, with (example, output) pairs as rows and the
start d = 0, which is not stationary.

  th - th_R ~ A_R^{-1} grad L_R(th) = A_R^{-1} (J_F' rho_F + g_tot),
  g_tot = grad (L_R + L_F): a network is never trained to the end.

Axes: B examples, C outputs, P parameters, Q queries. Data is a dict {'x':
[n, ...], 'y': [n, C] or [n] int labels, 'weight': [n], optional}.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tmlib.ops import linear
from tmlib.unlearning import problem as problem_lib
from tmlib.unlearning.inputs import Apply, as_data, check_request, outputs_of
from tmlib.unlearning.losses import Loss, get_loss
from tmlib.unlearning.problem import RidgeProblem

__all__ = [
  'Solver',
  'check_solver',
  'flat_products',
  'ggn_matvec',
  'gradient',
  'linearize',
  'map_examples',
  'predict_gap',
  'retain_displacement',
  'stationarity',
]


class Solver(NamedTuple):
  """How to solve with A_R.

  Attributes:
    kind: 'cg' (matrix-free), 'primal' (dense [P, P]) or 'dual' (dense kernel
      [n C, n C], the NTK form).
    max_steps: of CG.
    tol: of CG, relative residual.
    batch_size: examples per scan step of a curvature product; None for all.
    rank: of a Nystrom preconditioner; 0 for none.
  """

  kind: str = 'cg'
  max_steps: int = 200
  tol: float = 1e-6
  batch_size: int | None = 512
  rank: int = 0


def check_solver(solver: Solver, ridge: float) -> None:
  """Refuses settings out of range, and a ridge that the kind cannot do with.

  Raises:
    ValueError: naming the field.
  """
  if solver.kind not in ('cg', 'primal', 'dual'):
    raise ValueError(
      f"solver.kind={solver.kind!r}; allowed: 'cg', 'primal', 'dual'."
    )
  low = {'max_steps': 1, 'batch_size': 1, 'rank': 0}
  for name, least in low.items():
    value = getattr(solver, name)
    if value is not None and not value >= least:
      raise ValueError(f'solver.{name}={value} must be >= {least}.')
  if not solver.tol >= 0:
    raise ValueError(f'solver.tol={solver.tol} must be >= 0.')
  if not 0 <= ridge < np.inf:
    raise ValueError(f'ridge={ridge} must be >= 0 and finite.')
  for name, on in (('kind', solver.kind == 'dual'), ('rank', solver.rank > 0)):
    if on and not ridge > 0:
      raise ValueError(
        f'solver.{name}={getattr(solver, name)!r} needs ridge > 0, got {ridge}.'
      )


def map_examples(
  fun: Callable[..., jax.Array], data: dict[str, Any], batch_size: int | None
) -> jax.Array:
  """fun(batch) [B, ...] over minibatches of the data, joined to [n, ...]."""
  n = len(data['x'])
  size = n if batch_size is None else min(batch_size, n)
  starts = jnp.minimum(jnp.arange(-(-n // size)) * size, n - size)
  cut = lambda i: jax.tree.map(
    lambda x: jax.lax.dynamic_slice_in_dim(x, i, size), data
  )
  parts = jax.lax.map(lambda i: fun(cut(i)), starts)
  # The last slice was moved back to fit: its first rows are repeated.
  fresh = n - (len(starts) - 1) * size
  tail = parts[-1, size - fresh :]
  return jnp.concatenate([parts[:-1].reshape(-1, *parts.shape[2:]), tail])


def _scan_sum(fun, zeros, data, batch_size):
  """Sum over minibatches of fun(batch), without a copy of the data.

  The last slice is moved back to fit; the rows that it repeats get weight
  zero.
  """
  n = len(data['x'])
  size = n if batch_size is None else min(batch_size, n)

  def step(total, i):
    start = jnp.minimum(i * size, n - size)
    cut = lambda x: jax.lax.dynamic_slice_in_dim(x, start, size)
    batch = jax.tree.map(cut, data)
    fresh = start + jnp.arange(size) >= i * size
    batch['weight'] = jnp.where(fresh, batch['weight'], 0)
    return jax.tree.map(jnp.add, total, fun(batch)), None

  return jax.lax.scan(step, zeros, jnp.arange(-(-n // size)))[0]


def gradient(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  data: dict[str, Any],
  *,
  batch_size: int | None = None,
) -> Any:
  """sum_i weight_i grad l(f(x_i), y_i), a pytree as `params`; no ridge."""
  loss = get_loss(loss)
  data = as_data(data, outputs_of(apply_fn, params, data['x']))

  def part(batch):
    def total(params):
      values = jax.vmap(loss.value)(apply_fn(params, batch['x']), batch['y'])
      return jnp.sum(
        jnp.where(batch['weight'] != 0, batch['weight'] * values, 0)
      )

    return jax.grad(total)(params)

  return _scan_sum(part, jax.tree.map(jnp.zeros_like, params), data, batch_size)


def ggn_matvec(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  data: dict[str, Any],
  v: Any,
  *,
  ridge: Any = 0.0,
  batch_size: int | None = None,
) -> Any:
  """(sum_i weight_i J_i' L_i J_i + ridge I) v, minibatch by minibatch.

  Only reverse passes (`tmlib.ops.linear.ggn_product`), so that it also runs
  through kernels without a forward mode. Pass `data` as an argument of the
  jitted function that calls this; closed over, XLA folds it for seconds.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C].
    loss: 'softmax', 'square' or a Loss.
    params: pytree.
    data: see the module docstring.
    v: pytree as `params`.
    ridge: scalar.
    batch_size: examples per scan step; memory does not grow with n.

  Returns:
    A pytree as `params`.
  """
  loss = get_loss(loss)
  data = as_data(data, outputs_of(apply_fn, params, data['x']))

  def part(batch):
    def curvature(f, u):
      product = jax.vmap(loss.curvature)(f, batch['y'], u)
      weight = batch['weight'][:, None]
      return jnp.where(weight != 0, weight * product, 0)

    return linear.ggn_product(
      lambda p: apply_fn(p, batch['x']), curvature, params, v
    )

  zeros = jax.tree.map(lambda x: ridge * x, v)
  return _scan_sum(part, zeros, data, batch_size)


def objective_gradient(
  apply_fn, loss, params, data, ridge, prior, *, batch_size=None
):
  """Gradient of sum l + ridge/2 ||th - prior||^2."""
  grads = gradient(apply_fn, loss, params, data, batch_size=batch_size)
  if prior is None:
    prior = jax.tree.map(jnp.zeros_like, params)
  return jax.tree.map(lambda g, p, a: g + ridge * (p - a), grads, params, prior)


def stationarity(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  retain: dict[str, Any],
  forget: dict[str, Any],
  ridge: float,
  *,
  prior: Any = None,
  batch_size: int | None = None,
) -> float:
  """||g_tot|| / ||g_F||: how far from stationary, in units of the signal."""
  g_F = gradient(apply_fn, loss, params, forget, batch_size=batch_size)
  g_R = objective_gradient(
    apply_fn, loss, params, retain, ridge, prior, batch_size=batch_size
  )
  total = jax.tree.map(jnp.add, g_F, g_R)
  size = lambda t: float(jnp.sqrt(linear.tree_dot(t, t)))
  return size(total) / max(size(g_F), 1e-300)


def flat_products(
  apply_fn: Apply,
  loss: Loss,
  params: Any,
  data: Any,
  ridge: Any,
  solver: Solver,
) -> tuple[Callable, Callable, Callable | None]:
  """Products with the curvature of a set, on flat vectors [P].

  Returns:
    v -> G v without the ridge, v -> (G + ridge I) v, and the preconditioner of
    the second that the solver asks for (None for none).
  """
  flat, unravel = ravel_pytree(params)

  def bend(v):
    return ravel_pytree(ggn_matvec(
      apply_fn, loss, params, data, unravel(v), batch_size=solver.batch_size
    ))[0]  # fmt: skip

  precondition = None
  if solver.rank:
    precondition = linear.nystrom_preconditioner(
      bend, jax.random.key(0), len(flat), solver.rank, ridge
    )
  return bend, lambda v: bend(v) + ridge * v, precondition


@functools.partial(jax.jit, static_argnames=('apply_fn', 'loss', 'solver'))
def _cg_displacement(apply_fn, loss, params, retain, ridge, prior, solver):
  grad = objective_gradient(
    apply_fn, loss, params, retain, ridge, prior, batch_size=solver.batch_size
  )
  b, unravel = ravel_pytree(grad)
  _, matvec, precondition = flat_products(
    apply_fn, loss, params, retain, ridge, solver
  )
  out = linear.cg(
    matvec,
    b,
    preconditioner=precondition,
    max_steps=solver.max_steps,
    tol=solver.tol,
  )
  return out._replace(x=unravel(out.x))


def retain_displacement(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  retain: dict[str, Any],
  ridge: float,
  *,
  prior: Any = None,
  solver: Solver | None = None,
) -> Any:
  """The move th - th_R to first order: A_R^{-1} grad L_R(th), as `params`.

  `params - retain_displacement(...)` is the Newton-CG unlearning step.

  Raises:
    ValueError: bad data or solver, a curvature that is singular (ridge 0 with
      more parameters than rows fix) or not positive.
  """
  loss, solver = get_loss(loss), solver or Solver()
  check_solver(solver, ridge)
  outputs = outputs_of(apply_fn, params, retain['x'])
  retain = as_data(retain, outputs, 'retain')
  rows, columns = len(retain['x']) * outputs, len(ravel_pytree(params)[0])
  if not ridge > 0 and rows < columns:
    raise ValueError(
      f'ridge=0 with {columns} parameters and only {rows} retain rows: A_R is '
      'singular and the retrained model not unique. Pass ridge > 0.'
    )
  if solver.kind == 'cg':
    out = _cg_displacement(apply_fn, loss, params, retain, ridge, prior, solver)
    _check_cg(out, solver)
    return out.x
  one = {k: v[:1] for k, v in retain.items()}
  p = _local_problem(apply_fn, loss, params, retain, one, ridge, prior)
  if solver.kind == 'primal':
    curvature = problem_lib.retain_curvature(p)
    if problem_lib.concrete(curvature) and not ridge > 0:
      problem_lib.condition(curvature)
    flat = -jax.scipy.linalg.solve(
      curvature,
      p.X_R.T @ p.Y_R + ridge * p.prior,
      assume_a='pos',
    )
  else:
    # (X'X + ridge)^{-1} (-X'r - ridge a) = -a - X'(K + ridge)^{-1} (r - X a).
    inner = jax.scipy.linalg.solve(
      p.X_R @ p.X_R.T + ridge * jnp.eye(len(p.X_R)),
      p.Y_R - p.X_R @ p.prior,
      assume_a='pos',
    )
    flat = -p.prior - p.X_R.T @ inner
  if problem_lib.concrete(flat) and not np.isfinite(np.asarray(flat)).all():
    raise ValueError(
      f'A_R is numerically singular with ridge={ridge}: the retrained model is '
      'not unique. Pass a larger ridge, or use float64.'
    )
  return ravel_pytree(params)[1](flat[:, 0])


def _check_cg(out, solver):
  if isinstance(out.residual, jax.core.Tracer):
    return
  if float(out.curvature) <= 0:
    raise ValueError(
      f'curvature {float(out.curvature):.2e} <= 0 met in CG: the operator is '
      'indefinite or singular. Use the Gauss-Newton curvature of a convex '
      'loss, or a larger ridge.'
    )
  if not float(out.residual) <= 10 * solver.tol:
    warnings.warn(
      f'CG stopped at relative residual {float(out.residual):.1e} after '
      f'{int(out.steps)} steps; raise max_steps, rank or the ridge.',
      stacklevel=3,
    )


def predict_gap(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  retain: dict[str, Any],
  forget: dict[str, Any],
  query: Any,
  ridge: float,
  *,
  prior: Any = None,
  solver: Solver | None = None,
) -> jax.Array:
  """f(x) - f_R(x): what separates the model from a retrained one, predicted.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C], deterministic.
    loss: 'softmax', 'square' or a Loss.
    params: the trained model, stationary or not.
    retain: data that stays.
    forget: data that goes; used for the checks only, since by stationarity
      or not th - th_R ~ A_R^{-1} grad L_R(th).
    query: [Q, ...], inputs.
    ridge: of the training objective in sums (weight decay times n), > 0
      unless the retain set fixes all parameters.
    prior: pytree the ridge pulls to; None for zeros.
    solver: None for `Solver()`.

  Returns:
    [Q, C]; centred over C for softmax, whose logits have no origin.

  Raises:
    ValueError: bad data, dropout or batch norm at work, no convergence.
  """
  loss = get_loss(loss)
  retain, _, _ = check_request(apply_fn, loss, params, retain, forget)
  query = jnp.asarray(query)
  if not np.isfinite(np.asarray(query, np.float32)).all():
    raise ValueError('query holds NaN or inf; drop or impute those rows.')
  move = retain_displacement(
    apply_fn, loss, params, retain, ridge, prior=prior, solver=solver
  )
  gap = linear.jacobian_product(lambda p: apply_fn(p, query), params, move)
  if loss.name == 'softmax':
    gap = gap - gap.mean(-1, keepdims=True)
  return gap


def design(
  apply_fn: Apply, loss: Loss, params: Any, data: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Rows B' J [n C, P] and whitened residuals [n C], weights folded in."""
  flat, unravel = ravel_pytree(params)

  def one(x, y, weight):
    outputs = lambda v: apply_fn(unravel(v), x[None])[0]
    f = outputs(flat)
    root = jnp.sqrt(weight)
    rows = jax.jacrev(lambda v: loss.root(f, y, outputs(v)))(flat)
    return root * rows, root * loss.whitened(f, y)

  rows, residual = jax.lax.map(
    lambda b: one(*b),
    (data['x'], data['y'], data['weight']),
    batch_size=min(64, len(data['x'])),
  )
  return rows.reshape(-1, len(flat)), residual.reshape(-1)


def linearize(
  apply_fn: Apply,
  loss: str | Loss,
  params: Any,
  retain: dict[str, Any],
  forget: dict[str, Any],
  ridge: float,
  *,
  prior: Any = None,
  max_bytes: float = 2e9,
) -> RidgeProblem:
  """The local ridge problem of a network, dense; for small networks.

  Its unknown is d = th' - th, its start zero, its rows (example, output)
  pairs: leverage, methods and audit apply to it as to any RidgeProblem. Gaps
  are in curvature-weighted outputs B' J d, half of whose squared norm is the
  Kullback-Leibler divergence to second order.

  Args:
    apply_fn: (params, x [B, ...]) -> [B, C].
    loss: 'softmax', 'square' or a Loss.
    params: pytree of P numbers.
    retain: data.
    forget: data.
    ridge: of the objective in sums.
    prior: pytree; None for zeros.
    max_bytes: refuse a larger Jacobian.

  Returns:
    RidgeProblem with X_R [n_R C, P], X_F [n_F C, P] and one output.

  Raises:
    ValueError: too large, use `predict_gap` or `audit_network` instead; bad
      data, dropout or batch norm at work.
  """
  loss = get_loss(loss)
  retain, forget, _ = check_request(apply_fn, loss, params, retain, forget)
  outputs, flat = retain['y'].shape[1], ravel_pytree(params)[0]
  size = len(retain['x']) * outputs * len(flat) * flat.dtype.itemsize
  if size > max_bytes:
    raise ValueError(
      f'the retain Jacobian would take {size / 1e9:.1f} GB (limit '
      f'{max_bytes / 1e9:.1f}); use the matrix-free predict_gap and '
      'audit_network, or raise max_bytes.'
    )
  return _local_problem(apply_fn, loss, params, retain, forget, ridge, prior)


def _local_problem(apply_fn, loss, params, retain, forget, ridge, prior):
  X_R, r_R = design(apply_fn, loss, params, retain)
  X_F, r_F = design(apply_fn, loss, params, forget)
  flat = ravel_pytree(params)[0]
  centre = jnp.zeros_like(flat) if prior is None else ravel_pytree(prior)[0]
  return RidgeProblem(
    X_R=X_R,
    Y_R=r_R[:, None],
    X_F=X_F,
    Y_F=r_F[:, None],
    ridge=ridge,
    prior=(centre - flat)[:, None],
    start=jnp.zeros((len(flat), 1), flat.dtype),
  )

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
from tmlib.unlearning.losses import Loss, get_loss
from tmlib.unlearning.problem import RidgeProblem

__all__ = [
  'Solver',
  'check_deterministic',
  'ggn_matvec',
  'gradient',
  'linearize',
  'predict_gap',
  'retain_displacement',
  'stationarity',
]

Apply = Callable[[Any, jax.Array], jax.Array]


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
  batch_size: int | None = None
  rank: int = 0


def as_data(data: dict[str, Any], outputs: int) -> dict[str, jax.Array]:
  """Targets as [n, C], weights filled in; NaN and empty sets refused."""
  x, y = jnp.asarray(data['x']), jnp.asarray(data['y'])
  if x.shape[0] == 0:
    raise ValueError('data is empty: the set needs at least one example.')
  if y.shape[0] != x.shape[0]:
    raise ValueError(f'x has {x.shape[0]} examples but y has {y.shape[0]}.')
  if jnp.issubdtype(y.dtype, jnp.integer):
    y = jax.nn.one_hot(y, outputs)
  if y.shape[1:] != (outputs,):
    raise ValueError(f'y has shape {y.shape}, the model has C={outputs}.')
  if not isinstance(x, jax.core.Tracer):
    floating = jnp.issubdtype(x.dtype, jnp.floating)
    if floating and not np.isfinite(np.asarray(x)).all():
      raise ValueError('x holds NaN or inf; drop or impute those examples.')
  weight = data.get('weight')
  weight = jnp.ones(len(x)) if weight is None else jnp.asarray(weight)
  return {'x': x, 'y': y, 'weight': weight.astype(y.dtype)}


def outputs_of(apply_fn: Apply, params: Any, x: jax.Array) -> int:
  """C, from the shape that the model gives one example."""
  shape = jax.eval_shape(apply_fn, params, x[:1]).shape
  if len(shape) != 2:
    raise ValueError(f'apply_fn must return [B, C], got shape {shape}.')
  return shape[1]


def check_deterministic(apply_fn: Apply, params: Any, x: jax.Array) -> None:
  """Refuses models whose output depends on chance or on batch mates.

  Dropout and batch statistics have no Jacobian per example; pass an `apply_fn`
  with train=False.

  Raises:
    ValueError: two calls, or a batch and its halves, disagree.
  """
  x = x[: min(len(x), 8)]
  whole, again = apply_fn(params, x), apply_fn(params, x)
  single = jnp.concatenate(
    [apply_fn(params, x[i : i + 1]) for i in range(len(x))]
  )
  scale = 1e-3 * (1 + float(jnp.abs(whole).max()))
  if not float(jnp.abs(whole - again).max()) <= scale:
    raise ValueError('apply_fn is random (dropout?): pass train=False to it.')
  if not float(jnp.abs(whole - single).max()) <= scale:
    raise ValueError(
      'apply_fn depends on the batch an example is in (batch norm?): pass '
      'train=False or use running statistics.'
    )


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


@functools.partial(jax.jit, static_argnames=('apply_fn', 'loss', 'solver'))
def _cg_displacement(apply_fn, loss, params, retain, ridge, prior, solver, key):
  flat, unravel = ravel_pytree(params)
  b = ravel_pytree(
    objective_gradient(
      apply_fn, loss, params, retain, ridge, prior, batch_size=solver.batch_size
    )
  )[0]

  def matvec(v, ridge=ridge):
    return ravel_pytree(
      ggn_matvec(
        apply_fn,
        loss,
        params,
        retain,
        unravel(v),
        ridge=ridge,
        batch_size=solver.batch_size,
      )
    )[0]

  precondition = None
  if solver.rank:
    sketch = functools.partial(_nystrom, matvec, key, len(flat), solver.rank)
    precondition = sketch(ridge)
  out = linear.cg(
    matvec,
    b,
    preconditioner=precondition,
    max_steps=solver.max_steps,
    tol=solver.tol,
  )
  return out._replace(x=unravel(out.x))


def _nystrom(matvec, key, dim, rank, ridge):
  return linear.nystrom_preconditioner(
    lambda v: matvec(v, 0.0), key, dim, rank, ridge
  )


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
    ValueError: ridge <= 0 with more parameters than data can fix, an unknown
      solver, or a curvature that is not positive.
  """
  loss, solver = get_loss(loss), solver or Solver()
  outputs = outputs_of(apply_fn, params, retain['x'])
  retain = as_data(retain, outputs)
  if solver.kind == 'cg':
    if solver.rank and not ridge > 0:
      raise ValueError('solver.rank > 0 needs ridge > 0.')
    out = _cg_displacement(
      apply_fn, loss, params, retain, ridge, prior, solver, jax.random.key(0)
    )
    _check_cg(out, solver)
    return out.x
  if solver.kind not in ('primal', 'dual'):
    raise ValueError(
      f"solver.kind={solver.kind!r}; allowed: 'cg', 'primal', 'dual'."
    )
  if solver.kind == 'dual' and not ridge > 0:
    raise ValueError(f"solver.kind='dual' needs ridge > 0, got {ridge}.")
  p = linearize(apply_fn, loss, params, retain, retain, ridge, prior=prior)
  eye = jnp.eye(p.X_R.shape[0 if solver.kind == 'dual' else 1])
  if solver.kind == 'primal':
    g = -p.X_R.T @ p.Y_R - ridge * p.prior
    flat = jax.scipy.linalg.solve(
      p.X_R.T @ p.X_R + ridge * eye, g, assume_a='pos'
    )
  else:
    # (X'X + ridge)^{-1} (-X'r - ridge a) = -a - X'(K + ridge)^{-1} (r - X a).
    inner = jax.scipy.linalg.solve(
      p.X_R @ p.X_R.T + ridge * eye, p.Y_R - p.X_R @ p.prior, assume_a='pos'
    )
    flat = -p.prior - p.X_R.T @ inner
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
  query: jax.Array,
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
  outputs = outputs_of(apply_fn, params, retain['x'])
  as_data(forget, outputs)
  check_deterministic(apply_fn, params, jnp.asarray(forget['x']))
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
    ValueError: too large; use `predict_gap` or `audit_network` instead.
  """
  loss = get_loss(loss)
  outputs = outputs_of(apply_fn, params, retain['x'])
  retain, forget = as_data(retain, outputs), as_data(forget, outputs)
  flat, _ = ravel_pytree(params)
  size = len(retain['x']) * outputs * len(flat) * flat.dtype.itemsize
  if size > max_bytes:
    raise ValueError(
      f'the retain Jacobian would take {size / 1e9:.1f} GB (limit '
      f'{max_bytes / 1e9:.1f}); use the matrix-free predict_gap and '
      'audit_network, or raise max_bytes.'
    )
  X_R, r_R = design(apply_fn, loss, params, retain)
  X_F, r_F = design(apply_fn, loss, params, forget)
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

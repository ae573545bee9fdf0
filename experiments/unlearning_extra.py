"""Further measurements of the unlearning report, each one small program.

Axes: R runs, n examples, C classes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from experiments import unlearning_sets as sets
from tmlib import unlearning as ul
from tmlib.unlearning import ggn, inputs
from tmlib.unlearning.data import FORGET

__all__ = [
  'ascent_to_loss',
  'far_from_local',
  'lazy_curve',
  'request_audit',
  'rho_sweep',
  'sequential',
]


def _full_batch(study, roles, factor=None) -> dict[str, jax.Array]:
  """Every run's whole data as one batch [R, n, ...]."""
  R, n = roles.shape
  tile = lambda x: jnp.broadcast_to(jnp.asarray(x), (R, *x.shape))
  forget = (roles == FORGET).astype(np.float32)
  if factor is not None:
    forget = forget * np.asarray(factor, np.float32)[:, None]
  return {
    'x': tile(study.table.x),
    'y': tile(study.table.y),
    'forget': jnp.asarray(forget),
    'weight': jnp.ones((R, n)),
    'id': tile(np.arange(n, dtype=np.int32)),
    'decay': jnp.full((R, n), study.network.ridge / n),
  }


def ascent_to_loss(
  study, target_loss: np.ndarray, lr: float, steps: int
) -> tuple[np.ndarray, np.ndarray]:
  """Gradient ascent stopped when the forget loss reaches a target.

  Args:
    study: network, data and requests.
    target_loss: [R] mean forget loss of the retrained models.
    lr: step size on the mean forget loss.
    steps: most steps; a run that stops is frozen.

  Returns:
    Logits [R, n, C] at the stop, and the number of steps [R].
  """
  net, roles = study.network, study.requests.roles
  batch = _full_batch(study, roles)
  batch['weight'] = (batch['forget'] > 0).astype(jnp.float32)
  method = ul.unlearner(
    'gradient_ascent', net.apply, 'softmax', study.params, optax.sgd(lr)
  )(None)

  @jax.jit
  def run(batch, target):
    def one(batch, target):
      state = method.init(jax.random.key(0), batch)

      def step(carry, _):
        state, done, count = carry
        new, metrics = method.update(state, batch)
        # The metric is that of the parameters before the step.
        done = done | (metrics['forget_loss'] >= target)
        state = jax.tree.map(
          lambda a, b: jnp.where(done, a, b),
          state.replace(key=jax.random.key_data(state.key)),
          new.replace(key=jax.random.key_data(new.key)),
        )
        state = state.replace(key=jax.random.wrap_key_data(state.key))
        return (state, done, count + ~done), None

      carry = (state, jnp.bool_(False), jnp.int32(0))
      (state, _, count), _ = jax.lax.scan(step, carry, length=steps)
      return net.apply(state.params, batch['x']), count

    return jax.vmap(one)(batch, target)

  logits, count = run(batch, jnp.asarray(target_loss))
  return np.asarray(logits), np.asarray(count)


def rho_sweep(
  study, chosen: np.ndarray, ratios: np.ndarray, truth: np.ndarray, steps: int
) -> np.ndarray:
  """GradDiff run for long at multiples of the local critical weight.

  Args:
    study: network, data and requests.
    chosen: indices of requests.
    ratios: [K] values of rho / rho_c.
    truth: [len(chosen), n, C] logits of the retrained models.
    steps: full-batch steps.

  Returns:
    [len(chosen), K] gap relative to doing nothing, centred logits, all rows.
  """
  net = study.network
  roles = np.repeat(study.requests.roles[chosen], len(ratios), 0)
  rho = ratios[None] / study.requests.lmax[chosen][:, None]
  batch = _full_batch(study, roles, rho.ravel())
  build = ul.unlearner(
    'graddiff', net.apply, 'softmax', study.params,
    optax.sgd(study.plan.lr), weights=ul.Weights(forget=1.0),
    prior=net.prior,
  )  # fmt: skip
  method = build(None)

  @jax.jit
  def run(batch):
    def one(batch):
      state = method.init(jax.random.key(0), batch)
      step = lambda s, _: (method.update(s, batch)[0], None)
      state, _ = jax.lax.scan(step, state, length=steps)
      return net.apply(state.params, batch['x'])

    return jax.vmap(one)(batch)

  logits = np.asarray(run(batch)).reshape(*rho.shape, *truth.shape[1:])
  start = np.asarray(net.apply(study.params, study.table.x))
  size = lambda f: np.sqrt(np.sum(ul.centre(f) ** 2, (-2, -1)))
  return size(logits - truth[:, None]) / size(start - truth)[:, None]


def request_audit(study, index: int) -> ul.LeverageReport:
  """The matrix-free audit of one request."""
  forget = study.requests.roles[index] == FORGET
  part = lambda m: {'x': study.table.x[m], 'y': study.table.y[m]}
  return ul.audit_network(
    study.network.apply, 'softmax', study.params, part(~forget), part(forget),
    study.network.ridge, prior=study.network.prior, tol=0.1,
    solver=ul.Solver(max_steps=300, tol=1e-4),
  )  # fmt: skip


def sequential(study, first: np.ndarray, second: np.ndarray, retrain) -> dict:
  """Two deletion requests, one Newton step each, one audit each.

  Args:
    study: network and data.
    first: indices forgotten first.
    second: indices forgotten afterwards.
    retrain: [n] bool mask of kept examples -> logits [n, C] of the truth.

  Returns:
    {'gap': relative gap after nothing, one and two steps; 'lmax': both
    audits; 'flags': those of the second}.
  """
  net, table = study.network, study.table
  n = len(table.x)
  part = lambda index: {'x': table.x[index], 'y': table.y[index]}
  rest = np.setdiff1d(np.arange(n), first)
  last = np.setdiff1d(rest, second)
  params, reports, outputs = study.params, [], []
  for kept, gone in ((rest, first), (last, second)):
    outputs.append(np.asarray(net.apply(params, table.x)))
    problem = ul.linearize(
      net.apply, 'softmax', params, part(kept), part(gone), net.ridge,
      prior=net.prior,
    )  # fmt: skip
    reports.append(ul.audit(problem, [ul.retain_newton()], tol=0.1))
    _, unravel = ravel_pytree(params)
    move = ul.retain_displacement(
      net.apply, 'softmax', params, part(kept), net.ridge, prior=net.prior,
      solver=ul.Solver('primal'),
    )  # fmt: skip
    params = jax.tree.map(jnp.subtract, params, move)
  outputs.append(np.asarray(net.apply(params, table.x)))
  truth = retrain(np.isin(np.arange(n), last))
  size = [ul.gap_norm(f, truth) for f in outputs]
  return {
    'gap': [s / size[0] for s in size],
    'lmax': [r.lmax for r in reports],
    'flags': reports[1].flags,
  }


def _minimise(net: sets.Network, start: Any, data, loss: str, steps: int):
  """Damped Newton in float64: dense Gauss-Newton with backtracking."""
  flat, unravel = ravel_pytree(start)
  centre = 0 if net.prior is None else ravel_pytree(net.prior)[0]
  data = inputs.as_data(data, inputs.outputs_of(net.apply, start, data['x']))
  loss_fn = ul.get_loss(loss)

  def value(v):
    each = jax.vmap(loss_fn.value)(net.apply(unravel(v), data['x']), data['y'])
    return each.sum() + net.ridge / 2 * jnp.sum((v - centre) ** 2)

  @jax.jit
  def step(v):
    rows, _ = ggn.design(net.apply, loss_fn, unravel(v), data)
    A = rows.T @ rows + net.ridge * jnp.eye(len(v))
    move = jnp.linalg.solve(A, jax.grad(value)(v))
    rates = 0.5 ** jnp.arange(8)
    tries = jax.lax.map(lambda r: value(v - r * move), rates)
    return v - rates[jnp.argmin(tries)] * move

  for _ in range(steps):
    flat = step(flat)
  return unravel(flat)


def lazy_curve(
  table: sets.Table, hidden: int, ridge: float, loss: str, alphas, n_F: int
) -> dict[str, list[float]]:
  """Relative error of the predicted gap against alpha, F and R, float64.

  Full and retrained models are minimised by damped Gauss-Newton; the retrained
  one starts from the full one.

  Returns:
    {'forget': [...], 'retain': [...]}, one number per alpha.
  """
  found: dict[str, list[float]] = {'forget': [], 'retain': []}
  with jax.enable_x64(True):
    x = np.asarray(table.x, np.float64)
    y = np.eye(table.classes)[table.y]
    kept = {'x': x[n_F:], 'y': y[n_F:]}
    for alpha in alphas:
      net = sets.make_network(
        'lazy', (x.shape[1], table.classes), hidden, ridge, alpha
      )
      start = jax.tree.map(jnp.float64, net.prior)
      full = _minimise(net, start, {'x': x, 'y': y}, loss, 30)
      again = _minimise(net, full, kept, loss, 30)
      truth = net.apply(full, x) - net.apply(again, x)
      gap = ul.predict_gap(
        net.apply, loss, full, kept, {'x': x[:n_F], 'y': y[:n_F]},
        jnp.asarray(x), net.ridge, prior=net.prior, solver=ul.Solver('primal'),
      )  # fmt: skip
      for name, rows in (('forget', slice(n_F)), ('retain', slice(n_F, None))):
        found[name].append(ul.relative_error(gap[rows], truth[rows])[0])
  return found


def far_from_local(
  table: sets.Table,
  network: str,
  hidden: int,
  ridge: float,
  loss: str,
  forget: dict[str, np.ndarray],
  steps: tuple[int, int] = (30, 15),
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
  """Predicted against true gap of doing nothing, float64, warm retrains.

  Both models are minimised by damped Gauss-Newton, the retrained one from the
  full one, so that what is left is the error of the theory alone.

  Args:
    table: data.
    network: 'softmax', 'mlp' or 'cnn'.
    hidden: width, or filters.
    ridge: of the objective in sums.
    loss: 'softmax' or 'square'.
    forget: {kind: indices}.
    steps: of the full and of the retrained model.

  Returns:
    {kind: (relative errors, cosines)}, each [2] for forget and retain set.
  """
  found = {}
  with jax.enable_x64(True):
    x, y = np.asarray(table.x, np.float64), np.eye(table.classes)[table.y]
    net = sets.make_network(
      network, (x.shape[1], table.classes), hidden, ridge, 1.0
    )
    start = jax.tree.map(jnp.float64, net.init(jax.random.key(0)))
    full = _minimise(net, start, {'x': x, 'y': y}, loss, steps[0])
    for kind, index in forget.items():
      kept, gone = ul.split_indices(len(x), index)
      part = lambda i: {'x': x[i], 'y': y[i]}
      again = _minimise(net, full, part(kept), loss, steps[1])
      truth = np.asarray(net.apply(full, x) - net.apply(again, x))
      gap = ul.predict_gap(
        net.apply, loss, full, part(kept), part(gone), x, ridge,
        solver=ul.Solver('primal'),
      )  # fmt: skip
      if loss == 'softmax':
        truth = ul.centre(truth)
      rows = [ul.relative_error(gap[i], truth[i]) for i in (gone, kept)]
      found[kind] = tuple(np.array(rows).T)
  return found

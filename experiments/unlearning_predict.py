"""What the leverage theory predicts for every request and method.

All requests of a study go through one compiled function: the retain rows are
all rows with those of the forget set zeroed, the forget rows are padded with
zeros. Neither changes any inner product.

Axes: R requests, n examples, C classes, P parameters, F padded forget rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from experiments import unlearning_sets as sets
from tmlib import unlearning as ul
from tmlib.unlearning.data import FORGET

__all__ = ['Prediction', 'Schedule', 'predict']


class Schedule(NamedTuple):
  """How every method is run; the same numbers drive theory and practice.

  Attributes:
    lr: step size on mean losses.
    steps: minibatch steps of the methods that see R and F, or R.
    ascent_lr: of gradient ascent, full batches of F, mean loss.
    ascent_steps: its steps.
    cg_steps: products of Newton-CG and influence, at equal cost.
    weights: of the terms.
  """

  lr: float
  steps: int
  ascent_lr: float
  ascent_steps: int
  cg_steps: int
  weights: ul.Weights


class Prediction(NamedTuple):
  """NumPy arrays; gaps are norms of curvature-weighted outputs.

  Attributes:
    gaps: {method: [R, 2]}, on F and R; 'nothing' among them.
    idle: [R, n, C], the predicted gap of doing nothing, row by row.
    targets: [R, n, C], corrected outputs f - J D_0 (logits).
    predictors: {name: [R]} for the regression.
  """

  gaps: dict[str, np.ndarray]
  idle: np.ndarray
  targets: np.ndarray
  predictors: dict[str, np.ndarray]


def _specs(plan: Schedule, problem, sizes, random, full):
  """The linear counterpart of every network unlearner, {name: spec}."""
  n_R, n_F = sizes
  lr = plan.lr / (n_R + n_F)
  w = plan.weights
  both: dict[str, Any] = dict(
    weight_R=1.0, mu=problem.ridge, lr=lr, steps=plan.steps
  )
  make: Any = ul.UnlearnSpec
  taught = jnp.zeros_like(problem.Y_F)
  scrub_R = w.labels + w.teacher
  return {
    'gradient_ascent': ul.gradient_ascent(
      plan.ascent_lr / n_F, plan.ascent_steps
    ),
    'graddiff': make('graddiff', weight_F=-w.forget, **both),
    'neggrad_plus': make(
      'neggrad_plus', weight_F=-(1 - w.beta), **(both | {'weight_R': w.beta})
    ),
    'finetune': make('finetune', **(both | {'lr': plan.lr / n_R})),
    'scrub': make(
      'scrub',
      weight_F=-w.forget,
      target_F=taught,
      target_R=w.labels * problem.Y_R / scrub_R,
      **(both | {'weight_R': scrub_R}),
    ),
    'npo': make('npo', weight_F=-1.0, **(both | {'weight_R': w.retain})),
    'random_label': make('random_label', weight_F=1.0, target_F=random, **both),
    'corrected_relabel': make(
      'corrected_relabel',
      weight_F=1.0,
      target_F=problem.X_F @ ul.fit_retain(problem),
      **both,
    ),
    'newton_cg': ul.retain_finetune(steps=plan.cg_steps, solver='cg'),
    'influence': full,
  }


def _influence(problem, steps):
  """D after an influence step whose solve takes `steps` CG products."""
  from tmlib.ops import linear

  X_R, X_F = problem.X_R, problem.X_F
  matvec = lambda v: X_R.T @ (X_R @ v) + X_F.T @ (X_F @ v) + problem.ridge * v
  g = X_F.T @ problem.Y_F
  return linear.cg(matvec, g[:, 0], max_steps=steps, tol=0.0).x[:, None]


def _one(plan, ridge, prior, rows, r, random, role, index):
  """Everything about one request; traced once, mapped over R."""
  n, C, P = rows.shape
  keep = (role != FORGET)[:, None]
  real = (jnp.arange(len(index)) < (role == FORGET).sum())[:, None]
  flat = lambda x: x.reshape(-1, *x.shape[2:])
  pick = lambda x: jnp.where(
    real.reshape(real.shape + (1,) * (x.ndim - 2)), x[index], 0
  )
  problem = ul.RidgeProblem(
    X_R=flat(jnp.where(keep[..., None], rows, 0)),
    Y_R=flat(jnp.where(keep, r, 0))[:, None],
    X_F=flat(pick(rows)),
    Y_F=flat(pick(r))[:, None],
    ridge=ridge,
    prior=prior[:, None],
    start=jnp.zeros((P, 1), rows.dtype),
  )
  lev = ul.leverage(problem)
  theta_R = ul.fit_retain(problem)
  sizes = keep.sum(), (role == FORGET).sum()
  specs = _specs(plan, problem, sizes, flat(pick(random))[:, None], None)
  norm = jnp.linalg.norm
  gap = lambda D: jnp.stack([norm(problem.X_F @ D), norm(problem.X_R @ D)])
  gaps = {'nothing': gap(-theta_R)}
  for name, spec in specs.items():
    if spec is None:
      move = _influence(problem, plan.cg_steps)
      gaps[name] = gap(-theta_R - move)
    else:
      gaps[name] = gap(ul.simulate(problem, spec)[-1] - theta_R)
  Y_F = problem.Y_F
  hat_r = Y_F - jnp.linalg.solve(jnp.eye(len(Y_F)) + lev.forget_self, Y_F)
  g_F = problem.X_F.T @ Y_F
  predictors = {
    'H_FF r': norm(lev.forget_self @ Y_F),
    'H_RF r': norm(lev.retain_cross @ Y_F),
    'predicted gap': norm(gaps['nothing']),
    'r': norm(Y_F),
    'gradient': norm(g_F),
    'n_F': sizes[1].astype(Y_F.dtype),
    'K_FF r': norm(problem.X_F @ g_F),
    'influence': norm(hat_r),
    'lmax': lev.eigenvalues[0],
  }
  idle = (rows.reshape(-1, P) @ -theta_R).reshape(n, C)
  return gaps, idle, -theta_R[:, 0], predictors


def predict(
  network: sets.Network,
  params: Any,
  table: sets.Table,
  requests: sets.Requests,
  plan: Schedule,
  random: np.ndarray,
) -> Prediction:
  """Predicts every request.

  Args:
    network: the model.
    params: the full model.
    table: training data.
    requests: R deletion requests.
    plan: how the methods are run.
    random: [n] the labels of random_label.

  Returns:
    Prediction.
  """
  rows, r = sets.design_of(network, params, table)
  flat, unravel = ravel_pytree(params)
  centre = 0 if network.prior is None else ravel_pytree(network.prior)[0]
  prior = centre - flat
  relabelled = table._replace(y=random.astype(np.int32))
  _, random_r = sets.design_of(network, params, relabelled)
  forget = requests.roles == FORGET
  width = int(forget.sum(1).max())
  index = np.stack([np.resize(np.flatnonzero(f), width) for f in forget])

  @jax.jit
  def run(rows, r, random_r, roles, index):
    one = lambda x: _one(
      plan, network.ridge, prior, rows, r, random_r, x[0], x[1]
    )
    return jax.lax.map(one, (roles, index))

  gaps, idle, moves, predictors = run(rows, r, random_r, requests.roles, index)

  @jax.jit
  def corrected(D):
    f, push = jax.linearize(lambda p: network.apply(p, table.x), params)
    return f - push(unravel(D))

  targets = jax.lax.map(corrected, moves)
  to_numpy = lambda tree: jax.tree.map(np.asarray, tree)
  return Prediction(*to_numpy((gaps, idle, targets, predictors)))

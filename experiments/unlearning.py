"""Unlearning on softmax regression, MLPs and lazy networks.

One part per (network, data set, method): R deletion requests run in one
program. The truth is a retrained model, warm from the full one; the unit of
all gaps is what two retrains from scratch with other seeds differ by.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments import unlearning_predict as predict_lib
from experiments import unlearning_sets as sets
from tmlib import train
from tmlib import unlearning as ul
from tmlib.unlearning.data import request_data
from tmlib.unlearning.method import random_labels

__all__ = ['Study', 'make', 'make_study']


class Study(NamedTuple):
  """One network on one data set, with everything that its parts share."""

  network: sets.Network
  table: sets.Table
  params: Any
  requests: sets.Requests
  plan: predict_lib.Schedule
  prediction: predict_lib.Prediction


class _Lazy(Mapping):
  """Parts that are only made when their turn comes."""

  def __init__(self, makers: Mapping[str, Callable[[], train.Experiment]]):
    self._makers = makers

  def __getitem__(self, name: str) -> train.Experiment:
    return self._makers[name]()

  def __iter__(self) -> Iterator[str]:
    return iter(self._makers)

  def __len__(self) -> int:
    return len(self._makers)


def make(config) -> train.Experiment:
  """Retrains and unlearners of every network and data set, then the report."""
  studies = {
    f'{network}/{data}': functools.cache(
      functools.partial(make_study, config, network, data)
    )
    for network in config.networks
    for data in config.data.sets
  }
  makers = {}
  for key, study in studies.items():
    for name in ('retrain', 'scratch', *config.methods):
      maker = functools.partial(_part, config, study, name)
      makers[f'{key}/{name}'] = maker

  def report(workdir: Path) -> None:
    from experiments import unlearning_report

    made = {key: study() for key, study in studies.items()}
    unlearning_report.write(config, made, workdir)

  return train.Experiment(parts=_Lazy(makers), report=report)


def make_study(config, network: str, data: str) -> Study:
  """Trains the full model, draws the requests, predicts; all in memory."""
  d, m = config.data, config.model
  table = sets.load_table(data, d.examples, d.features, d.flip, config.seed)
  shape = table.x.shape[1], table.classes
  net = sets.make_network(network, shape, m.hidden, m.ridge, m.alpha)
  t = config.train
  params = sets.train_full(
    net, table, t.steps, t.batch_size, config.optimizer.learning_rate,
    config.seed,
  )  # fmt: skip
  requests = sets.make_requests(
    net, params, table, config.requests, config.seed
  )
  plan = _plan(config, net, params, table)
  random = random_labels(
    jax.random.key(0), jnp.arange(len(table.x)), table.classes
  )
  prediction = predict_lib.predict(
    net, params, table, requests, plan, np.asarray(random)
  )
  return Study(net, table, params, requests, plan, prediction)


def _plan(config, net, params, table) -> predict_lib.Schedule:
  """Step sizes from the largest curvature; equal cost in example gradients."""
  rows, _ = sets.design_of(net, params, table)
  flat = rows.reshape(-1, rows.shape[-1]).astype(np.float64)
  top = np.linalg.eigvalsh(flat.T @ flat)[-1] + net.ridge
  n, u = len(table.x), config.unlearn
  return predict_lib.Schedule(
    lr=float(u.lr * n / top),
    steps=max(1, round(u.passes * n / u.batch_size)),
    ascent_lr=float(u.ascent_lr * n / top),
    ascent_steps=u.ascent_steps,
    # A gradient costs one pass, a curvature product two.
    cg_steps=max(1, (u.passes - 1) // 2),
    weights=ul.Weights(
      forget=u.forget_weight, beta=u.beta, temperature=u.temperature
    ),
  )


def _part(config, study: Callable[[], Study], name: str) -> train.Experiment:
  s = study()
  n, roles = len(s.table.x), s.requests.roles
  teacher = np.asarray(s.network.apply(s.params, s.table.x))
  arrays = {'x': s.table.x, 'y': s.table.y, 'teacher': teacher}
  steps, batch, extra = s.plan.steps, config.unlearn.batch_size, {}
  common = dict(prior=s.network.prior)
  args = (s.network.apply, 'softmax', s.params)
  if name in ('retrain', 'scratch'):
    steps, batch, uses = (
      config.train.steps, config.train.batch_size, (True, False)
    )  # fmt: skip
    rate = config.optimizer.learning_rate
    start = s.params
    if name == 'scratch':
      # Two seeds per request: run r starts from a key of its own.
      roles = np.concatenate([roles, roles])
      start = None
    build = _retrain(s, start, steps, rate if start is None else 0.3 * rate)
  elif name in ('newton_cg', 'influence'):
    steps, batch = 1, n
    target, uses = ('forget', (True, True))
    if name == 'newton_cg':
      target, uses = ('retain', (True, False))
    build = ul.newton_cg(
      *args, target=target, cg_steps=s.plan.cg_steps, tol=0.0, **common
    )
  else:
    lr = s.plan.lr
    if name == 'gradient_ascent':
      steps, batch, lr = s.plan.ascent_steps, n, s.plan.ascent_lr
    if name == 'corrected_relabel':
      extra = {'target': s.prediction.targets}
    build = ul.unlearner(
      name, *args, optax.sgd(lr), weights=s.plan.weights, **common
    )
    uses = ul.needs(name)[:2]
  data = request_data(
    arrays, roles, batch, uses=uses, per_run=extra, ridge=s.network.ridge,
    seed=config.seed,
  )  # fmt: skip
  held = {'x': s.table.test_x, 'y': s.table.test_y}
  plain = {'x': s.table.x, 'y': s.table.y}
  return train.Experiment(
    build,
    data,
    steps=steps,
    runs=len(roles),
    evaluations={
      'train': train.pass_data(plain, n),
      'test': train.pass_data(held, len(held['x'])),
    },
  )


def _retrain(s: Study, start, steps: int, lr: float) -> train.Build:
  """Training on R alone, from the full model or from a seed of the run."""
  schedule = optax.cosine_decay_schedule(lr / s.network.scale, steps)
  template = s.params if start is None else start
  build = ul.unlearner(
    'finetune', s.network.apply, 'softmax', template, optax.adam(schedule),
    decay=s.network.ridge / len(s.table.x), prior=s.network.prior,
  )  # fmt: skip
  if start is not None:
    return build

  def fresh(axis_name):
    method = build(axis_name)

    def init(key, batch=None):
      state = method.init(key, batch)
      # The layout of the optimizer's state depends on shapes only.
      return state.replace(params=s.network.init(state.key))

    return method._replace(init=init)

  return fresh

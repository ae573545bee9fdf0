r"""SASRec and DUMoE as methods of the shared loop, and their stages.

Axes: R runs, B examples, L positions, T = B L tokens, I items, E experts.

The loss at each position is the cross entropy of the next item, or of the next
few, over the whole catalogue, plus that of the next item's tags; the losses of
the gate are functions of sums over all tokens of the batch.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmlib.moe import balance_sums, losses_of_sums
from tmlib.recsys import dumoe
from tmlib.recsys.adapter import (
  Adapted,
  apply_experts,
  centre_logits,
  diversity_loss,
  gate_logits,
  kmeans,
  route,
  routing_input,
)
from tmlib.recsys.metrics import target_rank
from tmlib.recsys.options import DUMoEConfig
from tmlib.train import Build, Data, Stage, TrainState, gradient_method

__all__ = [
  'SCHEMES',
  'Outputs',
  'build_stage',
  'dumoe_stages',
  'enter_experts',
  'enter_gate',
  'sasrec_method',
]

# scheme -> its stages, each with its share of the steps
SCHEMES: dict[str, tuple[tuple[str, float], ...]] = {
  'three': (
    ('backbone', 0.7),
    ('experts', 0.15),
    ('distil', 0.05),
    ('gate', 0.1),
  ),
  'four': (
    ('backbone', 0.6),
    ('experts', 0.15),
    ('distil', 0.05),
    ('gate', 0.05),
    ('joint', 0.15),
  ),
  'two': (('backbone', 0.7), ('adapter', 0.3)),
  'joint': (('joint', 1.0),),
  'random': (('backbone', 0.7), ('random', 0.3)),
  'none': (('backbone', 1.0),),
}


class Outputs(NamedTuple):
  """What an evaluation leaves beside ranks.

  Attributes:
    top: items recommended where no target is given, `top_0` the best, counted
      from 1; seen ones are left out, 0 where there are fewer.
    details: z, y, drift, weights of the paths, routing and tag logits.
    drop: ranks with each expert left out, [B, E].
  """

  top: int = 0
  details: bool = False
  drop: bool = False


def _cross_entropy(config, logits, target):
  """[B, L], of the next `ahead` items of the window, the nearest weigh most."""
  ahead, length = config.ahead, target.shape[1]
  later = jnp.pad(target, ((0, 0), (0, ahead - 1)))
  place = np.arange(length)[:, None] + np.arange(ahead)
  label = later[:, place]
  share = jnp.asarray(config.ahead_decay ** np.arange(ahead), jnp.float32)
  share = jnp.where(label > 0, share[None, None], 0)
  logs = jax.nn.log_softmax(logits)
  found = jnp.take_along_axis(logs, jnp.where(label > 0, label, 1), -1)
  total = share.sum(-1)
  return -jnp.sum(share * found, -1) / jnp.where(total > 0, total, 1)


def _task_sums(params, config, batch, y, tags):
  """(sum, weight) of the losses per token, and their total."""
  target = batch['target']
  weight = jnp.where(target > 0, batch['weight'][:, None], 0)
  real = weight > 0
  picked = jnp.where(real, target, 1)
  # where, not multiply: a padded row may hold anything.
  cross = _cross_entropy(
    config, dumoe.catalogue_logits(params, y), jnp.where(real, target, 0)
  )
  cross = jnp.sum(jnp.where(real, weight * cross, 0))
  count, total = weight.sum(), cross
  aux = {'item_loss': (cross, count)}
  if config.num_tags:
    found = dumoe.interest_logits(params, y)
    wanted = jnp.asarray(tags)[picked]
    binary = optax.sigmoid_binary_cross_entropy(found, wanted).mean(-1)
    binary = jnp.sum(jnp.where(real, weight * binary, 0))
    aux['tag_loss'] = (binary, count)
    total = total + config.interest * binary
  return total, count, aux


def _gate_terms(params, config, adapted, axis_name, noise):
  """Losses of the gate over the batch, and what is logged."""
  sums = balance_sums(adapted.routing, adapted.logits, noise_std=noise)
  if axis_name is not None:
    sums = jax.lax.psum(sums, axis_name)
  found = losses_of_sums(sums, config.k)
  terms = config.z * found['z']
  if config.balance == 'loss':
    terms += config.importance * found['importance']
    terms += config.gshard * found['gshard']
    if 'load' in found:
      terms += config.load * found['load']
  else:
    # Worth nothing, but its gradient is the surplus of the load, whose sign
    # moves the bias (stage_optimizer): the rule of `update_bias`.
    surplus = jax.lax.stop_gradient(found['load_frac']) - 1 / config.experts
    pull = jnp.sum(surplus * params['bias'])
    terms += pull - jax.lax.stop_gradient(pull)
  return terms, found


def _distil_sums(params, config, z, valid, weight):
  """Cross entropy of the gate to the soft assignment to its centres."""
  x = routing_input(config, z, valid)
  wanted = jax.nn.softmax(centre_logits(params, config, x))
  found = jax.nn.log_softmax(gate_logits(params, x))
  cross = -jnp.sum(wanted * found, -1)
  return jnp.sum(jnp.where(weight > 0, weight * cross, 0))


def build_stage(
  stage: str,
  config: DUMoEConfig,
  optimizer: optax.GradientTransformation,
  *,
  tags: np.ndarray | None = None,
  outputs: Outputs | None = None,
  **options,
) -> Build:
  """One stage of the training as a Build; all have one structure of metrics.

  Args:
    stage: of `tmlib.recsys.dumoe.STAGES`.
    config: the model.
    optimizer: of the groups that learn in this stage.
    tags: [I, tags], 0 or 1, where the config foretells tags.
    outputs: of the evaluation.
    **options: of `tmlib.train.make_update`.

  Returns:
    axis_name -> Method, state a `TrainState`.

  Raises:
    ValueError: for an unknown stage, experts asked of a config without, or
      tags that do not fit.
  """
  transform = dumoe.stage_optimizer(stage, optimizer)
  learn, source = dumoe.STAGES[stage]
  if source and not config.experts:
    raise ValueError(f'stage={stage!r} needs experts; the config has experts=0')
  tag_table = None
  if config.num_tags:
    shape = None if tags is None else np.shape(tags)
    if shape != (config.num_items, config.num_tags):
      raise ValueError(
        f'tags have shape {shape}, expected'
        f' [{config.num_items}, {config.num_tags}]'
      )
    # Row 0 is padding.
    tag_table = np.zeros((config.num_items + 1, config.num_tags), np.float32)
    tag_table[1:] = tags

  def loss_fn(params, batch, key, step, axis_name=None):
    del step
    # What is frozen needs no backward pass.
    params = {
      group: x if group in learn else jax.lax.stop_gradient(x)
      for group, x in params.items()
    }
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(batch['id'])
    valid = batch['item'] > 0
    noise_keys = keys if 'encoder' in learn else None
    z = dumoe.encode(params, config, batch, keys=noise_keys).z
    weight = jnp.where(batch['target'] > 0, batch['weight'][:, None], 0)
    route_valid = valid & (weight > 0)
    noisy = source == 'gate' and config.noise_std > 0
    gate_keys = None
    if noisy:
      gate_keys = jax.vmap(lambda k: jax.random.fold_in(k, 2000))(keys)
    adapted = _adapt(params, config, z, valid, route_valid, source, gate_keys)
    total, count, aux = _task_sums(params, config, batch, adapted.y, tag_table)
    if stage == 'distil':
      total = _distil_sums(params, config, z, valid, weight)
    if axis_name is not None:
      total, count, aux = jax.lax.psum((total, count, aux), axis_name)
    one = jnp.ones_like(count)
    for name in ('importance', 'gshard', 'load_cv', 'dead_frac'):
      aux[name] = (jnp.zeros_like(count), one)
    if adapted.routing is not None:
      noise = config.noise_std if noisy else 0.0
      terms, found = _gate_terms(params, config, adapted, axis_name, noise)
      if source == 'gate' and stage != 'distil':
        total = total + count * terms
      if config.diversity and 'experts' in learn:
        apart = diversity_loss(params['experts']['w_out'])
        total = total + count * config.diversity * apart
      for name in ('importance', 'gshard', 'load_cv', 'dead_frac'):
        aux[name] = (found[name], one)
    return total, count, aux

  def evaluate(params, batch):
    return _evaluate(params, config, batch, source, outputs or Outputs())

  return gradient_method(
    lambda key, batch: dumoe.init(key, config, batch),
    loss_fn, evaluate, transform, batch_coupled=True, **options,
  )  # fmt: skip


def _adapt(params, config, z, valid, route_valid, source, keys):
  """As `dumoe.adapt`, but padded examples meet no expert and count nowhere."""
  if not source:
    return Adapted(z, None, None)
  x = routing_input(config, z, valid)
  routing, logits = route(params, config, x, source, route_valid, keys)
  return Adapted(apply_experts(params, config, z, routing), routing, logits)


def _evaluate(params, config, batch, source, outputs):
  """Ranks of the last position's target, and what else was asked for.

  A batch without targets, to recommend from, has no ranks and no sums.
  """
  state = dumoe.encode(params, config, batch)
  valid = batch['item'] > 0
  adapted = dumoe.adapt(
    params, config, state.z, valid, source=source, last=True
  )
  seen, out = batch['seen'], {'id': batch['id']}
  if 'target' not in batch:
    if outputs.top:
      scores = dumoe.catalogue_logits(params, adapted.y[:, -1])
      scores, best = jax.lax.top_k(
        jnp.where(seen, -jnp.inf, scores), outputs.top
      )
      out['top'] = jnp.where(scores > -jnp.inf, best, 0).astype(jnp.int32)
    return {'sums': {}, 'outputs': out}
  target = batch['target'][:, -1]
  rank_of = lambda y: target_rank(
    dumoe.catalogue_logits(params, y[:, -1]), target, seen
  )
  out['rank'] = rank_of(adapted.y)
  rank = out['rank'].astype(jnp.float32)
  weight = batch['weight']
  real = weight > 0
  add = lambda x: (jnp.sum(jnp.where(real, weight * x, 0)), weight.sum())
  sums = {
    'hit_rate_10': add((rank <= 10).astype(jnp.float32)),
    'ndcg_10': add(jnp.where(rank <= 10, 1 / jnp.log2(1 + rank), 0)),
    'mrr': add(1 / rank),
  }
  if outputs.details:
    out |= {
      'z': state.z[:, -1],
      'y': adapted.y[:, -1],
      'drift': state.drift[:, -1],
      'mix': state.mix[:, -1],
    }
    if config.num_tags:
      out['tags'] = dumoe.interest_logits(params, adapted.y[:, -1])
    if adapted.routing is not None:
      out['experts'] = adapted.routing.experts
      out['weights'] = adapted.routing.weights
  if outputs.drop and adapted.routing is not None:
    z, routing = state.z[:, -1:], adapted.routing
    without = lambda e: rank_of(
      apply_experts(
        params, config, z,
        routing._replace(
          weights=jnp.where(routing.experts == e, 0, routing.weights)
        ),
      )
    )  # fmt: skip
    out['dropped'] = jax.lax.map(without, jnp.arange(config.experts)).T
  return {'sums': sums, 'outputs': out}


def sasrec_method(
  num_items: int,
  optimizer: optax.GradientTransformation,
  *,
  outputs: Outputs | None = None,
  options: Mapping[str, Any] | None = None,
  **changes,
) -> Build:
  """SASRec as a Build.

  Args:
    num_items: I.
    optimizer: an Optax transformation.
    outputs: of the evaluation.
    options: of `tmlib.train.make_update`.
    **changes: fields of `DUMoEConfig` (dim, blocks, heads, dropout, ...).

  Returns:
    axis_name -> Method.
  """
  config = DUMoEConfig.sasrec(num_items, **changes)
  return build_stage(
    'backbone', config, optimizer, outputs=outputs, **(options or {})
  )


def enter_experts(
  config: DUMoEConfig, optimizer: optax.GradientTransformation, batches: int = 8
) -> Callable[[TrainState, Data | None], TrainState]:
  """The boundary before the experts: k-means on LN(z) gives the centres.

  Args:
    config: the model.
    optimizer: of the stage, as `stage_optimizer` made it.
    batches: of the stream, whose users' states are clustered.

  Returns:
    (state, data) -> state, for `Stage.enter`.
  """

  def points_of(params, batch):
    z = dumoe.encode(params, config, batch).z
    x = routing_input(config, z, batch['item'] > 0)
    weight = jnp.where(batch['target'] > 0, batch['weight'][:, None], 0)
    return x.reshape(-1, x.shape[-1]), weight.reshape(-1)

  def centres_of(key, points, weight):
    return kmeans(key, points, config.experts, weight=weight)[0]

  def enter(state: TrainState, data: Data | None) -> TrainState:
    if data is None:
      raise ValueError('k-means needs data')
    runs = state.step.ndim > 0
    lift = jax.vmap if runs else (lambda f: f)
    encode = jax.jit(lift(points_of))
    found = []
    for step in range(batches):
      batch = data.load(step, slice(0, data.batch_size))
      batch = jax.tree.map(jnp.asarray, data.gather(data.resident, batch))
      if runs:
        batch = _match_runs(batch, data.per_run, state.step.shape[0])
      found.append(encode(state.params, batch))
    points = jnp.concatenate([x for x, _ in found], -2)
    weight = jnp.concatenate([w for _, w in found], -1)
    fold = lambda key: jax.random.fold_in(key, 7)
    keys = lift(fold)(state.key)
    centres = jax.jit(lift(centres_of))(keys, points, weight)
    params = state.params | {'centres': centres}
    return _restart(state.replace(params=params), optimizer)

  return enter


def enter_gate(
  config: DUMoEConfig, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Data | None], TrainState]:
  r"""The boundary before the distillation: a gate that knows the centres.

  softmax_e(-|x - c_e|^2 / (t D)) = softmax_e((2 c_e^T x - |c_e|^2) / (t D)), so
  W_g = 2 C / (t D) is the assignment but for the sizes |c_e|^2, which a gate
  without offsets can only fit by training.

  Args:
    config: the model; t is its `temperature`.
    optimizer: of the stage, as `stage_optimizer` made it.

  Returns:
    (state, data) -> state, for `Stage.enter`.
  """

  def enter(state: TrainState, data: Data | None) -> TrainState:
    del data
    kernel = jnp.swapaxes(state.params['centres'], -1, -2)
    kernel = kernel * 2 / (config.temperature * config.dim)
    params = state.params | {'gate': {'kernel': kernel}}
    return _restart(state.replace(params=params), optimizer)

  return enter


def _match_runs(batch: Any, per_run: bool, runs: int) -> Any:
  """Gives each run its batch; the mesh may have padded the runs with copies."""
  if not per_run:
    return jax.tree.map(
      lambda x: jnp.broadcast_to(x[None], (runs, *x.shape)), batch
    )
  return jax.tree.map(lambda x: jnp.resize(x, (runs, *x.shape[1:])), batch)


def _restart(
  state: TrainState, optimizer: optax.GradientTransformation
) -> TrainState:
  """A fresh optimizer for the next stage."""
  make = jax.vmap(optimizer.init) if state.step.ndim else optimizer.init
  average = state.ema_params
  return state.replace(
    opt_state=jax.jit(make)(state.params),
    ema_params=None
    if average is None
    else jax.tree.map(jnp.copy, state.params),
  )


def dumoe_stages(
  config: DUMoEConfig,
  steps: int,
  make_optimizer: Callable[[int], tuple[optax.GradientTransformation, Any]],
  *,
  scheme: str = 'three',
  tags: np.ndarray | None = None,
  outputs: Outputs | None = None,
  kmeans_batches: int = 8,
  **options,
) -> list[Stage]:
  """The training of DUMoE as stages of one run.

  Backbone; experts under the routing by k-means; gate, first towards that
  routing, then by the task. `SCHEMES` holds the ablations.

  Args:
    config: the model.
    steps: updates in all.
    make_optimizer: steps of a stage -> (transformation, schedule).
    scheme: a key of `SCHEMES`.
    tags: [I, tags].
    outputs: of the evaluation.
    kmeans_batches: batches of users that are clustered.
    **options: of `tmlib.train.make_update`.

  Returns:
    The stages, for `tmlib.train.fit`.

  Raises:
    ValueError: for an unknown scheme, or fewer steps than stages.
  """
  if scheme not in SCHEMES:
    raise ValueError(f'scheme={scheme!r} is not one of {sorted(SCHEMES)}')
  parts = SCHEMES[scheme]
  ends = np.round(np.cumsum([share for _, share in parts]) * steps).astype(int)
  counts = np.diff(ends, prepend=0)
  if counts.min() < 1:
    raise ValueError(
      f'steps={steps} leaves a stage of scheme {scheme!r} without a step'
    )
  stages = []
  for i, (name, _) in enumerate(parts):
    optimizer, schedule = make_optimizer(int(counts[i]))
    begin = int(ends[i] - counts[i])
    rate = lambda step, s=schedule, b=begin: s(step - b)
    build = build_stage(
      name, config, optimizer, tags=tags, outputs=outputs, schedule=rate,
      **options,
    )  # fmt: skip
    transform = dumoe.stage_optimizer(name, optimizer)
    enter = None
    if name == 'experts':
      enter = enter_experts(config, transform, kmeans_batches)
    elif name == 'distil':
      enter = enter_gate(config, transform)
    elif i:
      enter = lambda state, data, t=transform: _restart(state, t)
    stages.append(Stage(name, int(counts[i]), build, enter))
  return stages

"""Gradient-trained methods: one update from sums, never from means.

A loss returns `(sum, weight, aux)`; the update divides total by total once, at
the end. So padded rows, micro-batches, uneven shards and the number of devices
all give the same number.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import optax

from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics

__all__ = ['Skips', 'TrainState', 'gradient_method', 'make_update']

LossFn = Callable[..., tuple[jax.Array, jax.Array, dict[str, Any]]]


class Skips(NamedTuple):
  """What the non-finite guard has seen; all int32 scalars.

  Attributes:
    total: steps skipped so far.
    in_row: steps skipped in a row, up to and including the last step.
    longest: the longest such row.
    culprits: {metric name: number of skipped steps in which it was not finite}.
  """

  total: jax.Array
  in_row: jax.Array
  longest: jax.Array
  culprits: dict[str, jax.Array]


class TrainState(flax.struct.PyTreeNode):
  """State of a gradient-trained method.

  Attributes:
    step: [] int32, updates done, skipped ones included.
    key: PRNG key; the key of a step is `fold_in(key, step)`.
    params: master parameters, float32.
    opt_state: Optax state.
    ema_params: exponential moving average of `params`, or None if not asked.
    skips: what the non-finite guard has seen.
  """

  step: jax.Array
  key: jax.Array
  params: Any
  opt_state: Any
  ema_params: Any
  skips: Skips

  @property
  def eval_params(self) -> Any:
    """The averaged parameters if there are any, else the parameters."""
    return self.params if self.ema_params is None else self.ema_params


def _split(batch: Batch, microbatches: int) -> Batch:
  """[B, ...] -> [m, B/m, ...], example i going to micro-batch i mod m.

  Reshaping to [B/m, m] before the swap keeps each example on its device when
  B is sharded; the other order costs an all-gather.
  """

  def split(x):
    if x.shape[0] % microbatches:
      raise ValueError(
        f'microbatches={microbatches} does not divide the {x.shape[0]} examples'
        ' of a batch on one device; change one of them'
      )
    x = x.reshape(x.shape[0] // microbatches, microbatches, *x.shape[1:])
    return jnp.swapaxes(x, 0, 1)

  return jax.tree.map(split, batch)


def _triple(found: Any) -> Any:
  """What a loss returned, held to be (sum, weight, aux)."""
  if not (
    isinstance(found, tuple)
    and len(found) == 3
    and isinstance(found[2], Mapping)
  ):
    raise TypeError(
      'loss_fn must return (sum, weight, aux) with aux = {name: (sum, weight)},'
      f' got a {type(found).__name__}; return for example'
      " (jnp.sum(loss * batch['weight']), jnp.sum(batch['weight']), {})"
    )
  return found


def _summed_gradients(loss_fn, params, batch, key, step, microbatches):
  """Gradient of the summed loss, with the sums: (grads, sum, weight, aux)."""

  def part(batch):
    def loss(params):
      sums = _triple(loss_fn(params, batch, key, step))
      return sums[0], sums

    grads, sums = jax.grad(loss, has_aux=True)(params)
    return grads, *sums

  if microbatches == 1:
    return part(batch)
  batches = _split(batch, microbatches)
  first = jax.tree.map(lambda x: x[0], batches)
  zeros = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(part, first)
  )
  add = lambda total, batch: (
    jax.tree.map(jnp.add, total, part(batch)),
    None,
  )
  return jax.lax.scan(add, zeros, batches)[0]


def _means(grads, total, weight, aux):
  """Sums over the batch to means: (grads, weight, {loss, grad_norm}, aux)."""
  # A batch of padding alone has weight 0, gradient 0 and takes no step.
  scale = 1 / jnp.where(weight > 0, weight, 1)
  grads = jax.tree.map(lambda g: g * scale.astype(g.dtype), grads)
  observed = {'loss': total * scale, 'grad_norm': optax.tree.norm(grads)}
  aux = {
    name: s / jnp.where(w != 0, w, 1) for name, (s, w) in sorted(aux.items())
  }
  return grads, weight, observed, aux


def _check_options(microbatches, ema_decay, batch_coupled):
  if microbatches < 1:
    raise ValueError(f'microbatches must be at least 1, got {microbatches}')
  if ema_decay is not None and not 0 < ema_decay < 1:
    raise ValueError(f'ema_decay must be in (0, 1) or None, got {ema_decay}')
  if batch_coupled and microbatches > 1:
    raise ValueError(
      f'microbatches={microbatches}: this loss couples the examples of a batch,'
      ' so parts of it do not add up; pass microbatches=1'
    )


def make_update(
  loss_fn: LossFn,
  optimizer: optax.GradientTransformation,
  *,
  axis_name: str | None = None,
  microbatches: int = 1,
  ema_decay: float | None = None,
  schedule: Callable[[jax.Array], jax.Array] | None = None,
  max_skips: int = 10,
  batch_coupled: bool = False,
) -> Callable[[TrainState, Any], tuple[TrainState, Metrics]]:
  """Builds `update(state, batch) -> (state, metrics)` from a summed loss.

  params <- params + optimizer(grad(sum_i loss_i) / sum_i weight_i). A step
  whose loss or gradient is not finite leaves parameters, optimizer and average
  as they were, and is counted.

  Args:
    loss_fn: (params, batch, key, step) -> (sum, weight, aux), with
      aux = {name: (sum, weight)}. Randomness per example must fold
      `batch['id']` into `key`.
    optimizer: an Optax transformation.
    axis_name: data axis to sum over in per-device mode; None in jit mode.
    microbatches: parts that the batch is processed in, in sequence.
    ema_decay: decay of the parameter average, in (0, 1); None keeps none.
    schedule: step -> learning rate; only logged, as `learning_rate`.
    max_skips: skipped steps in a row after which `metrics['diverged']` holds.
    batch_coupled: the loss is not a sum over examples (Cox, InfoNCE). It is
      then called with the keyword `axis_name`, must itself gather over that
      axis and return the loss of the whole batch; micro-batches are refused.

  Returns:
    The update. Metrics: `loss`, `grad_norm` (before any clipping), each aux,
    `learning_rate`, `skipped` (steps so far), `nonfinite/*`, `diverged`.

  Raises:
    ValueError: for a count or a decay out of range, and for micro-batches of a
      batch-coupled loss.
    TypeError: when first traced, if the loss returns something else.
  """
  _check_options(microbatches, ema_decay, batch_coupled)
  if batch_coupled:
    loss_fn = _shared_loss(loss_fn, axis_name)
  blend = 1 - (ema_decay or 0.0)

  def update(state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
    key = jax.random.fold_in(state.key, state.step)
    sums = _summed_gradients(
      loss_fn, state.params, batch, key, state.step, microbatches
    )
    if axis_name is not None:
      sums = jax.lax.psum(sums, axis_name)
    grads, weight, observed, aux = _means(*sums)
    finite = {name: jnp.isfinite(x) for name, x in (observed | aux).items()}
    sound = finite['loss'] & finite['grad_norm']

    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    ema_params = state.ema_params
    if ema_params is not None:
      ema_params = jax.tree.map(
        lambda old, new: old + blend * (new - old), ema_params, params
      )
    skips = _count(state.skips, ~sound, finite)
    keep = sound & (weight > 0)
    old = (state.params, state.opt_state, state.ema_params)
    new = (params, opt_state, ema_params)
    params, opt_state, ema_params = jax.tree.map(
      lambda new, old: jnp.where(keep, new, old), new, old
    )
    metrics = observed | aux
    if schedule is not None:
      metrics['learning_rate'] = jnp.asarray(schedule(state.step))
    metrics |= {f'nonfinite/{k}': v for k, v in skips.culprits.items()}
    metrics |= {'skipped': skips.total, 'diverged': skips.longest >= max_skips}
    state = state.replace(
      step=state.step + 1,
      params=params,
      opt_state=opt_state,
      ema_params=ema_params,
      skips=skips,
    )
    return state, metrics

  return update


def _shared_loss(loss_fn, axis_name):
  """Each device's equal share of a loss that every device computes whole.

  The transpose of `all_gather` adds the cotangents of all devices, and the
  update adds the gradients of all devices: without the share, both would
  count.
  """

  def share(*args):
    total, weight, aux = loss_fn(*args, axis_name=axis_name)
    if axis_name is None:
      return total, weight, aux
    size = jax.lax.axis_size(axis_name)
    return jax.tree.map(lambda x: x / size, (total, weight, aux))

  return share


def _count(skips: Skips, bad: jax.Array, finite: dict[str, jax.Array]) -> Skips:
  count = bad.astype(jnp.int32)
  in_row = jnp.where(bad, skips.in_row + 1, 0)
  culprits = {
    name: skips.culprits[name] + (bad & ~ok).astype(jnp.int32)
    for name, ok in finite.items()
  }
  return Skips(
    skips.total + count, in_row, jnp.maximum(skips.longest, in_row), culprits
  )


def gradient_method(
  init_params: Callable[[jax.Array, Batch], Any],
  loss_fn: LossFn,
  evaluate: Callable[[Any, Batch], Evaluation],
  optimizer: optax.GradientTransformation,
  **options,
) -> Build:
  """A method that is trained by gradients.

  Args:
    init_params: (key, batch) -> params.
    loss_fn: see `make_update`.
    evaluate: (params, batch) -> {'sums': ..., 'outputs': ...}; it is given the
      averaged parameters where an average is kept.
    optimizer: an Optax transformation.
    **options: of `make_update`, less `axis_name`.

  Returns:
    axis_name -> Method, whose state is a `TrainState`.
  """
  ema_decay = options.get('ema_decay')
  coupled = options.get('batch_coupled', False)

  def build(axis_name: str | None) -> Method:
    update = make_update(loss_fn, optimizer, axis_name=axis_name, **options)

    def init(key: jax.Array, batch: Any = None) -> TrainState:
      chex.assert_rank(jax.random.key_data(key), 1)
      params_key, key = jax.random.split(key)
      params = init_params(params_key, batch)
      # A batch-coupled loss is asked for its shapes outside any axis.
      keywords = {'axis_name': None} if coupled else {}
      aux = jax.eval_shape(
        lambda p: _triple(loss_fn(p, batch, key, jnp.int32(0), **keywords))[2],
        params,
      )
      names = sorted(['loss', 'grad_norm', *aux])
      # One fresh array each: donated buffers must not be shared.
      zero = lambda: jnp.zeros((), jnp.int32)
      return TrainState(
        step=zero(),
        key=key,
        params=params,
        opt_state=optimizer.init(params),
        ema_params=None
        if ema_decay is None
        else jax.tree.map(jnp.copy, params),
        skips=Skips(zero(), zero(), zero(), {name: zero() for name in names}),
      )

    def evaluate_state(state: TrainState, batch: Any) -> Evaluation:
      return evaluate(state.eval_params, batch)

    return Method(init, update, evaluate_state)

  return build

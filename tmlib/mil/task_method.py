r"""Any task on bags as a Method of the training loop.

Axes: B rows, N instances, P features, F folds.

A task is a function of a model's output and the batch; what all tasks share
(scaling, dropout keys, auxiliary losses) is here. Classification, which also
takes packed rows, has its own `classification_method`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tmlib.mil.method import Statistics, scale_features
from tmlib.mil.output import MILOutput, auxiliary_losses
from tmlib.train.method import Batch, Build
from tmlib.train.update import gradient_method

__all__ = ['Task', 'bag_method', 'weighted_auxiliary']

Sums = tuple[jax.Array, jax.Array]
# (output, batch, axis name) -> ((loss sum, weight), {metric: (sum, weight)},
# {name: [B, ...]}); the axis name is None but in a batch-coupled loss.
Task = Callable[
  [MILOutput, Batch, str | None],
  tuple[Sums, dict[str, Sums], dict[str, jax.Array]],
]


def weighted_auxiliary(
  output: MILOutput,
  weights: Mapping[str, float],
  loss: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
  """The auxiliary losses of each bag, added up by their weights.

  Args:
    output: of the model.
    weights: {name: lambda}; losses that are not named do not count.
    loss: logits [B, C] -> [B], the task's own.

  Returns:
    total: [B].
    each: {name: [B]}, without weights.

  Raises:
    ValueError: a name that the model does not report.
  """
  each = auxiliary_losses(output, loss)
  missing = sorted(set(weights) - set(each))
  if missing:
    raise ValueError(
      f'aux_weights names {missing}, but for this task the model reports '
      f'{sorted(each) or "no auxiliary loss"}'
    )
  total = jnp.zeros(output.logits.shape[:-1], jnp.float32)
  for name, scale in weights.items():
    total = total + scale * each[name]
  return total, each


def bag_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  task: Task,
  *,
  statistics: Statistics | None = None,
  trace: bool = False,
  **options: Any,
) -> Build:
  """Trains a bag model on a task; one bag per row.

  Batch: 'bag' (leaves [B, N, ...]), 'weight' [B] float32 (zero = padding), 'id'
  [B] int32, what the task reads, and with `statistics` also 'fold' [B] int32.

  Args:
    model: module with apply({'params': p}, bag, train=, dropout_keys=) ->
      MILOutput.
    optimizer: Optax transformation.
    task: see `Task`.
    statistics: mean, std [F, P] of the training instances, or None.
    trace: call the model with trace=True where it is evaluated (TMEvolve).
    **options: of `tmlib.train.make_update`.

  Returns:
    Build. Metrics and outputs as the task says; outputs hold the id too.
  """

  def apply(params, batch, **keywords) -> Any:
    bag = batch['bag']
    if statistics is not None:
      bag = scale_features(bag, batch['fold'], statistics)
    return model.apply({'params': params}, bag, **keywords)

  def init_params(key, batch):
    return model.init({'params': key}, batch['bag'], train=False)['params']

  def loss_fn(params, batch, key, step, axis_name=None):
    del step
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch['id'])
    output = apply(params, batch, train=True, dropout_keys=keys)
    (total, weight), metrics, _ = task(output, batch, axis_name)
    return total, weight, metrics

  def evaluate(params, batch):
    seen = {'trace': True} if trace else {}
    output = apply(params, batch, train=False, **seen)
    loss, metrics, found = task(output, batch, None)
    sums = metrics if options.get('batch_coupled') else {'loss': loss} | metrics
    return {'sums': sums, 'outputs': {'id': batch['id']} | found}

  return gradient_method(init_params, loss_fn, evaluate, optimizer, **options)

r"""Classification of bags as a Method of the training loop.

Axes: B rows, S bags packed into a row (absent where rows are single bags),
N instances, P features, C classes, F folds.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from tmlib.mil.bag import Bag
from tmlib.mil.output import MILOutput, auxiliary_losses
from tmlib.train.method import Build
from tmlib.train.update import gradient_method

__all__ = ['classification_loss', 'classification_method', 'scale_features']

Statistics = tuple[Any, Any]


def classification_loss(
  logits: jax.Array,
  labels: jax.Array,
  *,
  class_weights: Sequence[float] | None = None,
  label_smoothing: float = 0.0,
) -> tuple[jax.Array, jax.Array]:
  r"""Cross entropy of each bag, and the weight of its class.

  l_b = -sum_c q_bc log softmax(x_b)_c,  q = (1 - s) onehot(y) + s / C.

  Args:
    logits: [..., C], float.
    labels: [...], int in [0, C); where a slot is padding, any integer.
    class_weights: C positive numbers w_c, or None for ones.
    label_smoothing: s in [0, 1).

  Returns:
    loss: [...], without the class weight.
    weight: [...], w_y; reduce by sum(w l) / sum(w).
  """
  num_classes = logits.shape[-1]
  chex.assert_shape(labels, logits.shape[:-1])
  labels = jnp.clip(labels, 0, num_classes - 1)
  target = jax.nn.one_hot(labels, num_classes, dtype=logits.dtype)
  smooth = (1 - label_smoothing) * target + label_smoothing / num_classes
  loss = -jnp.sum(smooth * jax.nn.log_softmax(logits), -1)
  if class_weights is None:
    return loss, jnp.ones_like(loss)
  weights = jnp.asarray(class_weights, logits.dtype)
  return loss, jnp.einsum('...c,c->...', target, weights, precision='highest')


def scale_features(
  bag: Bag, fold: jax.Array, statistics: Statistics, limit: float = 10.0
) -> Bag:
  """Standardises a batch with the statistics of each row's own fold.

  x <- clip((x - mean_f) / std_f, -limit, limit); the clip keeps a feature that
  hardly varies in the training bags from exploding in a test bag.

  Args:
    bag: leaves [B, N, ...].
    fold: [B], int in [0, F).
    statistics: mean, std [F, P] from `tmlib.data.fold_statistics`.
    limit: largest absolute value let through, > 0.

  Returns:
    The bag, padded instances zero.
  """
  mean, std = (jnp.asarray(x)[fold][:, None] for x in statistics)
  # Padding may hold NaN; clip would let it pass.
  features = jnp.where(bag.mask[..., None], bag.features, mean)
  return bag.replace(features=jnp.clip((features - mean) / std, -limit, limit))


def classification_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  num_classes: int,
  aux_weights: Mapping[str, float] | None = None,
  class_weights: Sequence[float] | None = None,
  label_smoothing: float = 0.0,
  statistics: Statistics | None = None,
  outputs: Sequence[str] = (),
  **options: Any,
) -> Build:
  r"""Trains a bag model by cross entropy plus weighted auxiliary losses.

  L = sum_b w_b w_{y_b} (CE_b + sum_k lambda_k aux_kb) / sum_b w_b w_{y_b}.

  Batch: 'bag' (leaves [B, N, ...]), 'label' [B] or [B, S] int, 'weight' same
  shape float32 (zero = padding), 'id' same shape int32; with `statistics` also
  'fold' [B] int32 (see `tag_runs`); where there is one, 'class_weight', w_y of
  each bag, for weights that differ between runs. Dropout keys fold the id of a
  row (of its first bag, where packed) into the key of the step.

  Args:
    model: module with apply({'params': p}, bag, train=, dropout_keys=) ->
      MILOutput.
    optimizer: Optax transformation.
    num_classes: C, >= 2.
    aux_weights: lambda of each auxiliary loss that the model reports; those
      that are not named are reported and not trained on.
    class_weights: C positive numbers, or None.
    label_smoothing: in [0, 1).
    statistics: mean, std [F, P] of `fold_statistics`, or None for features
      that are scaled already.
    outputs: extra outputs of `evaluate`, of 'slide_features' and 'attention'
      (the latter for unpacked bags of one padded length only).
    **options: of `tmlib.train.make_update`: schedule, microbatches, ema_decay,
      max_skips.

  Returns:
    Build. Metrics: loss, cross_entropy, accuracy, aux/<name>. Outputs: id,
    label, logits, probability and what `outputs` asks for.

  Raises:
    ValueError: an option out of range; when first traced, an auxiliary loss
      that the model does not have.
  """
  _check_options(num_classes, class_weights, label_smoothing, outputs)
  objective = _Objective(
    num_classes, dict(aux_weights or {}), class_weights, label_smoothing
  )

  def apply(params, batch, **keywords) -> Any:
    bag = batch['bag']
    if statistics is not None:
      bag = scale_features(bag, batch['fold'], statistics)
    return model.apply({'params': params}, bag, **keywords)

  def init_params(key, batch):
    # Shapes alone matter here, so features need no scaling.
    return model.init({'params': key}, batch['bag'], train=False)['params']

  def loss_fn(params, batch, key, step):
    del step
    row_id = batch['id'] if batch['id'].ndim == 1 else batch['id'][:, 0]
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, row_id)
    output = apply(params, batch, train=True, dropout_keys=keys)
    (total, weight), aux = objective.sums(output, batch)
    return total, weight, aux

  def evaluate(params, batch):
    output = apply(params, batch, train=False)
    total, aux = objective.sums(output, batch)
    found = _outputs(output, batch, outputs)
    return {'sums': {'loss': total, **aux}, 'outputs': found}

  return gradient_method(init_params, loss_fn, evaluate, optimizer, **options)


class _Objective(NamedTuple):
  """The loss of a batch; fields as in `classification_method`."""

  num_classes: int
  aux_weights: dict[str, float]
  class_weights: Sequence[float] | None
  label_smoothing: float

  def sums(self, output: MILOutput, batch: dict[str, Any]):
    """((loss sum, weight), {metric: (sum, weight)}) over the real bags."""
    chex.assert_axis_dimension(output.logits, -1, self.num_classes)
    label, weight = batch['label'], batch['weight']
    logits = output.logits.astype(jnp.float32)
    loss = lambda logits: classification_loss(
      logits,
      label,
      class_weights=self.class_weights,
      label_smoothing=self.label_smoothing,
    )
    entropy, class_weight = loss(logits)
    class_weight = class_weight * batch.get('class_weight', 1.0)
    aux = auxiliary_losses(output, lambda logits: loss(logits)[0], label)
    missing = sorted(set(self.aux_weights) - set(aux))
    if missing:
      raise ValueError(
        f'aux_weights names {missing}, but the model reports '
        f'{sorted(aux) or "no auxiliary loss"}'
      )

    def reduced(values, weight):
      # where, not multiply: whatever an empty slot holds must not matter.
      values = jnp.where(batch['weight'] > 0, values, 0)
      return jnp.sum(values * weight), jnp.sum(weight)

    total = entropy
    for name, scale in self.aux_weights.items():
      total = total + scale * aux[name]
    correct = (jnp.argmax(logits, -1) == label).astype(jnp.float32)
    metrics = {
      'cross_entropy': reduced(entropy, class_weight * weight),
      'accuracy': reduced(correct, weight),
    }
    for name, value in aux.items():
      metrics[f'aux/{name}'] = reduced(value, weight)
    return reduced(total, class_weight * weight), metrics


def _outputs(output, batch, names):
  """What `evaluate` returns for each bag."""
  if 'attention' in names and batch['weight'].ndim == 2:
    raise ValueError(
      "outputs=('attention',) needs one bag per row; evaluate unpacked bags, "
      'or apply the model and use tmlib.data.unpack_instances'
    )
  logits = output.logits.astype(jnp.float32)
  found = {
    'id': batch['id'],
    'label': batch['label'],
    'logits': logits,
    'probability': jax.nn.softmax(logits),
  }
  return found | {name: getattr(output, name) for name in names}


def _check_options(num_classes, class_weights, label_smoothing, outputs):
  if num_classes < 2:
    raise ValueError(f'num_classes must be >= 2, got {num_classes}')
  if not 0 <= label_smoothing < 1:
    raise ValueError(
      f'label_smoothing must be in [0, 1), got {label_smoothing}'
    )
  if class_weights is not None:
    given = np.asarray(class_weights, np.float64)
    if given.shape != (num_classes,) or not (given > 0).all():
      raise ValueError(
        f'class_weights must be {num_classes} positive numbers, got '
        f'{tuple(class_weights)}'
      )
  unknown = sorted(set(outputs) - {'slide_features', 'attention'})
  if unknown:
    raise ValueError(
      f"outputs must be of 'slide_features', 'attention'; got {unknown}"
    )

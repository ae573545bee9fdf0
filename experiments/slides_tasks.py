"""What is learned from a bag: a class, a survival time, or expression.

Axes: n bags, C classes, K bins of time, G targets.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tmlib import train
from tmlib.config import config_field
from tmlib.mil import (
  MODELS,
  classification_method,
  classification_summary,
  expression_summary,
  regression_method,
)
from tmlib.mil.survival import (
  concordance_index,
  cox_method,
  digitize,
  discrete_survival_method,
  quantile_bins,
)

__all__ = ['Task', 'aux_weights', 'concordance', 'make_task']


class Task(NamedTuple):
  """One task, for one training set.

  Attributes:
    num_outputs: logits of the model.
    arrays: {name: [n, ...]}, what a batch holds beside the bags.
    build: (model, optimizer, **options) -> train.Build.
    summarize: (outputs, sums) -> metrics.
    meta: what a prediction needs to be read, for JSON.
  """

  num_outputs: int
  arrays: dict[str, np.ndarray]
  build: Callable[..., train.Build]
  summarize: Callable[[dict[str, np.ndarray], dict[str, float]], dict[str, Any]]
  meta: dict[str, Any]


def make_task(config, study, fold) -> Task:
  """The task of `config.task`; its statistics are of `fold.train` alone."""
  if config.task == 'subtype':
    return _subtype(config, study, fold)
  if config.task == 'expression':
    return _expression(config, study, fold)
  return _survival(config, study, fold)


def aux_weights(config) -> dict[str, float]:
  """Weights of the model's auxiliary losses, as its authors use them."""
  spec = MODELS[config.model]
  absent = () if config.task == 'subtype' else spec.class_losses
  return {k: v for k, v in spec.aux_weights.items() if k not in absent}


def _subtype(config, study, fold) -> Task:
  texts = study.cohort.values['label'].astype(str)
  classes = np.unique(texts)
  label = np.searchsorted(classes, texts).astype(np.int32)
  counts = np.bincount(label[fold.train], minlength=len(classes))
  if not counts.all():
    raise ValueError(
      f'{fold.name}: no bag of class {str(classes[counts.argmin()])!r} to train'
      ' on; choose other splits, or fewer folds'
    )
  arrays = {'label': label}
  if config.loss.class_weights:
    # In the batch, not in the program: folds share one.
    weights = len(fold.train) / (len(classes) * counts)
    arrays['class_weight'] = weights[label].astype(np.float32)

  def build(model, optimizer, **options):
    return classification_method(
      model,
      optimizer,
      num_classes=len(classes),
      label_smoothing=config.loss.label_smoothing,
      aux_weights=aux_weights(config),
      **options,
    )

  def summarize(outputs, sums):
    del sums
    return _undisturbed(
      classification_summary, outputs['label'], outputs['probability']
    )

  return Task(
    len(classes), arrays, build, summarize,
    {'classes': classes.tolist()},
  )  # fmt: skip


def _survival(config, study, fold) -> Task:
  time, event = (study.cohort.values[k] for k in ('time', 'event'))
  arrays = {'time': time.astype(np.float32), 'event': event.astype(np.float32)}
  if not event[fold.train].any():
    raise ValueError(
      f'{fold.name}: all {len(fold.train)} training patients are censored, so '
      'there is nothing to learn; lower data.folds, or give data.splits'
    )
  meta: dict[str, Any] = {}
  if config.task == 'survival_nll':
    with config_field('loss.bins'):
      edges = quantile_bins(
        time[fold.train], event[fold.train], config.loss.bins
      )
    arrays['bin'] = digitize(time, edges)
    meta['edges'] = edges.tolist()

  def build(model, optimizer, **options):
    options |= {'aux_weights': aux_weights(config)}
    if config.task == 'survival_cox':
      return cox_method(model, optimizer, **options)
    return discrete_survival_method(
      model, optimizer, alpha=config.loss.alpha, **options
    )

  def summarize(outputs, sums):
    del sums
    names = ('time', 'event', 'risk')
    return {'c_index': concordance(*(outputs[k] for k in names))}

  outputs = 1 if config.task == 'survival_cox' else config.loss.bins
  return Task(outputs, arrays, build, summarize, meta)


def concordance(time: Any, event: Any, risk: Any) -> float:
  """Harrell's C, NaN where no pair can be compared."""
  try:
    return concordance_index(time, event, risk)
  except ValueError:
    return float('nan')


def _expression(config, study, fold) -> Task:
  target = study.cohort.values['targets']
  center = target[fold.train].mean(0)
  scale = target[fold.train].std(0)
  scale = np.where(scale > 1e-7 * np.maximum(np.abs(center), 1e-30), scale, 1)

  def build(model, optimizer, **options):
    return regression_method(
      model, optimizer, center=center, scale=scale,
      aux_weights=aux_weights(config), **options,
    )  # fmt: skip

  def summarize(outputs, sums):
    del sums
    return _undisturbed(
      expression_summary, outputs['target'], outputs['prediction']
    )

  meta = {
    'targets': list(study.cohort.target_names),
    'center': center.tolist(),
    'scale': scale.tolist(),
  }
  arrays = {'target': target.astype(np.float32)}
  return Task(target.shape[1], arrays, build, summarize, meta)


def _undisturbed(metric, *arrays):
  """A metric of few bags may be undefined: NaN says it."""
  with warnings.catch_warnings():
    warnings.simplefilter('ignore')
    return metric(*arrays)

"""Cross-validation of bag models: all folds and seeds in one program.

Axes: R runs = seeds x folds, n bags, S bags packed in a row.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import linen as nn

from tmlib import train
from tmlib.config import config_field
from tmlib.data import (
  BagSet,
  batch_bags,
  fold_statistics,
  pack_bags,
  pack_values,
  read_mil_csv,
  stratified_folds,
  with_knn_graphs,
)
from tmlib.mil import (
  MODELS,
  classification_method,
  create_model,
  cross_validation_runs,
  model_options,
  tag_runs,
)
from tmlib.ops.packing import plan_packing

__all__ = ['Folds', 'load_set', 'make', 'make_folds', 'make_model']

# Bags that share a row; more would only widen the tables of labels.
_SEGMENTS = 16

# Padded instances of all runs that a step holds at once where the config leaves
# its parts open. An activation of 64 features is 64 MB.
_INSTANCES = 2**18


class Folds(NamedTuple):
  """Repeated cross-validation laid out as runs.

  Attributes:
    train: [R, n], one for the bags that a run trains on.
    test: [R, n], one for the bags it is tested on.
    repeat: [R], seed of each run.
    statistics: mean, std [R, P] of each run's training instances.
  """

  train: np.ndarray
  test: np.ndarray
  repeat: np.ndarray
  statistics: tuple[np.ndarray, np.ndarray]


def load_set(config, name: str) -> BagSet:
  """The bags of one set with their feature-space graphs."""
  bagset = read_mil_csv(name)
  with config_field('data.neighbours'):
    return with_knn_graphs(bagset, config.data.neighbours)


def make_folds(config, bagset: BagSet) -> Folds:
  """R = seeds x folds; no statistic of a fold sees its test bags."""
  if config.train.runs < 1:
    raise ValueError(
      f'train.runs is the number of seeds, at least 1, got {config.train.runs}'
    )
  counts = np.bincount(bagset.labels)
  few = int(counts.argmin())
  if counts[few] < config.data.folds:
    raise ValueError(
      f'label {bagset.classes[few]:g} has {counts[few]} bags, fewer than '
      f'data.folds={config.data.folds}: a fold would test without it. Lower '
      'data.folds, or look whether column 0 holds class labels'
    )
  seeds = range(config.seed, config.seed + config.train.runs)
  with config_field('data.folds'):
    folds = np.stack(
      [stratified_folds(bagset.labels, config.data.folds, s) for s in seeds]
    )
  statistics = [fold_statistics(bagset.bags, fold) for fold in folds]
  mean, std = map(np.concatenate, zip(*statistics, strict=True))
  return Folds(*cross_validation_runs(folds), (mean, std))


def make_model(config, name: str, num_classes: int) -> nn.Module:
  """A model by name, at the width that all models share."""
  known = model_options(name)
  shared = {k: v for k, v in config.model.items() if k in known}
  own = {k: v for k, v in config.get(name, {}).items() if k != 'balance'}
  return create_model(name, num_classes=num_classes, **(shared | own))


def make(config) -> train.Experiment:
  """One part per set and model, and a report over all of them."""
  _check_names(config)
  bagsets = {name: load_set(config, name) for name in config.data.sets}
  parts = {
    part_name(config, name, model): _part(config, bagset, model)
    for name, bagset in bagsets.items()
    for model in config.models
  }

  def report(workdir: Path) -> None:
    from experiments import tmevolve_report

    tmevolve_report.write(config, bagsets, workdir)

  return train.Experiment(parts=parts, report=report)


def _check_names(config) -> None:
  stems = [Path(name).stem for name in config.data.sets]
  again = sorted({stem for stem in stems if stems.count(stem) > 1})
  if again:
    raise ValueError(
      f'data.sets has several files named {again[0]!r}; rename them, for their '
      'results would share a folder'
    )
  known = set(MODELS)
  for name in config.models:
    if name not in known:
      raise ValueError(
        f'models has {name!r}; known: {", ".join(sorted(known))}'
      )
    if MODELS[name].needs_text:
      raise ValueError(
        f'models has {name!r}, which needs text embeddings; these bags come '
        'without a text encoder: leave it out'
      )


def part_name(config, name: str, model: str) -> str:
  """Folder of one set and model below the working directory."""
  several = len(config.data.sets) > 1
  return f'{Path(name).stem}/{model}' if several else model


def _part(config, bagset: BagSet, name: str) -> train.Experiment:
  folds = make_folds(config, bagset)
  optimizer, schedule = train.make_optimizer(
    config.optimizer, config.train.steps
  )
  num_classes = len(bagset.classes)
  aux_weights = dict(MODELS[name].aux_weights)
  if name == 'tmevolve':
    aux_weights['region_balance'] = config.tmevolve.balance
  arrays, lay = _arrays(bagset, may_pack=not MODELS[name].unpacks)
  runs = np.arange(len(folds.train))
  # As many rows as hold about `batch_size` bags.
  rows, longest = arrays['bag'].mask.shape
  batch = -(-config.train.batch_size * rows // len(bagset.bags))
  build = classification_method(
    make_model(config, name, num_classes),
    optimizer,
    num_classes=num_classes,
    aux_weights=aux_weights,
    schedule=schedule,
    statistics=folds.statistics,
    microbatches=config.train.microbatches
    or _microbatches(batch, batch * longest * len(runs)),
    ema_decay=config.optimizer.ema_decay or None,
    max_skips=config.train.max_skips,
  )
  stream = train.run_data(arrays, lay(folds.train), batch, seed=config.seed)
  tested = train.pass_data(arrays, batch, run_weights=lay(folds.test))
  return train.Experiment(
    build,
    tag_runs(stream, runs),
    runs=len(runs),
    evaluations={'test': tag_runs(tested, runs)},
    names=bagset.names,
  )


def _microbatches(batch: int, instances: int) -> int:
  """The fewest equal parts of a batch that hold few enough instances each."""
  devices = jax.device_count()
  share = batch // devices if batch % devices == 0 else batch
  wanted = -(-instances // _INSTANCES)
  return next((m for m in range(wanted, share) if share % m == 0), share)


def _arrays(bagset: BagSet, may_pack: bool) -> tuple[dict[str, Any], Any]:
  """Resident arrays, and a function that lays out weights [R, n] like them.

  Bags of similar size are padded to the longest. Where that would more than
  double the work, several bags share a row, if they may.
  """
  lengths = np.array([len(bag.mask) for bag in bagset.bags])
  n, longest = len(lengths), int(lengths.max())
  ids = np.arange(n, dtype=np.int32)
  if not may_pack or n * longest <= 2 * lengths.sum():
    bags = batch_bags(bagset.bags, longest)
    arrays = {'bag': bags, 'label': bagset.labels, 'id': ids}
    return arrays, lambda weights: weights
  plan = plan_packing(lengths, longest, _SEGMENTS)
  arrays = {
    'bag': pack_bags(bagset.bags, plan),
    'label': pack_values(bagset.labels, plan),
    'id': pack_values(ids, plan, fill=-1),
    'weight': pack_values(np.ones(n, np.float32), plan),
  }
  lay = lambda weights: np.stack([pack_values(row, plan) for row in weights])
  return arrays, lay

"""A user's slides: one model per fold, features read from disk at each step.

Axes: n bags, F folds, B rows of a batch, P features.
"""

import ast
import zlib
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from flax import linen as nn

from experiments import slides_text
from experiments.slides_cohort import Fold, Study, load_study
from experiments.slides_tasks import Task, make_task
from tmlib import train
from tmlib.config import config_field
from tmlib.data import bucket_size, slides
from tmlib.mil import MODELS, create_model, model_options, scale_features

__all__ = [
  'graph_of', 'make', 'make_network', 'make_reader', 'predict', 'scaling',
]  # fmt: skip

# Padded sizes that are compiled, at most, for training and for evaluation.
_TRAIN_BUCKETS, _EVAL_BUCKETS = 2, 4


def make(config, workdir: Path | None = None) -> train.Experiment:
  """One part per fold, and a report over all of them."""
  with config_field('model'):
    options = network_options(config)
    if not MODELS[config.model].needs_text:
      # A mistake is told before thousands of files are looked at.
      create_model(config.model, num_classes=2, **options)
  study = load_study(config, workdir)
  config, text = _with_text(config, study)
  options |= slides_text.options_of(config, text, study.dim)
  graph = graph_of(config, study.has_coords)
  plan = _plan(config, study)
  parts = {
    fold.name: _part(config, study, fold, plan, graph, options)
    for fold in study.folds
  }

  def report(folder: Path) -> None:
    from experiments import slides_report

    slides_report.write(config, study, graph, folder, text)

  return train.Experiment(parts=parts, same_programs=True, report=report)


def predict(config, workdir: Path) -> int:
  """Applies the trained models to slides that have no labels."""
  from experiments import slides_predict

  return slides_predict.run(config, workdir)


def _with_text(config, study: Study) -> tuple[Any, np.ndarray | None]:
  """The embeddings of `data.text`, and a config that suits them."""
  if not config.data.text:
    return config, None
  names: list[str] = []
  if config.task == 'subtype':
    names = np.unique(study.cohort.values['label'].astype(str)).tolist()
  text = slides_text.read_text(config.data.text, names)
  if names and len(text) == len(names):
    logging.info('rows of data.text are, in this order: %s', ', '.join(names))
  if text.shape[-1] == study.dim:
    # Cosines of texts and features mean something as the encoder made them.
    config = config.copy_and_resolve_references()
    config.data.standardize = False
  return config, text


def network_options(config) -> dict[str, Any]:
  """Options of the model, those that it does not have left out."""
  known = model_options(config.model)
  found = config.network.to_dict()
  extra = found.pop('options')
  found = {name: value for name, value in found.items() if name in known}
  if config.model == 'tmevolve':
    found |= config.tmevolve.to_dict()
  for item in extra:
    name, equals, text = item.partition('=')
    if not equals:
      raise ValueError(f'network.options: {item!r} must look like name=value')
    try:
      found[name.strip()] = ast.literal_eval(text)
    except (ValueError, SyntaxError):
      found[name.strip()] = text.strip()
  return found


def make_network(
  config, dim: int, num_outputs: int, options: dict[str, Any]
) -> nn.Module:
  """The model of `config.model`."""
  with config_field('model'):
    return create_model(
      config.model, in_dim=dim, num_classes=num_outputs, **options
    )


def graph_of(config, has_coords: bool) -> str:
  """The kind of graph that bags get: 'none', 'grid' or 'knn'."""
  graph = config.data.graph
  needs = MODELS[config.model].needs_graph
  if config.model == 'tmevolve' and config.tmevolve.steps == 0:
    needs = False
  if graph == 'auto':
    graph = 'grid' if needs else 'none'
  if graph == 'none' and needs:
    raise ValueError(
      f"data.graph='none' but model {config.model!r} passes messages over a "
      'graph; use grid or knn'
    )
  if graph == 'grid' and not has_coords:
    raise ValueError(
      f'model {config.model!r} needs the positions of patches, which some '
      'slides do not store. Use files that hold coords (CLAM keeps them in '
      'h5_files), join patches that look alike by --config.data.graph=knn, or '
      'take a model without a graph, such as --config.model=gated_abmil'
    )
  return graph


def make_reader(
  config, files: Any, *, dim: int, graph: str, coords: bool, half: bool
) -> slides.BagReader:
  """Reads bags of any files in the form that training has."""
  return slides.BagReader(
    files,
    dim=dim,
    graph=graph,
    coords=coords,
    dtype=np.float16 if half else np.float32,
    neighbours=config.data.neighbours,
    max_patches=config.data.max_patches,
    seed=config.seed,
  )


def scaling(config, study: Study, fold: Fold) -> Any:
  """Mean and std [1, P] of the training patches, or None."""
  if not config.data.standardize:
    return None
  mean, std = slides.merge_moments(study.rows(fold.train))
  return mean[None], std[None]


class _Plan(NamedTuple):
  """What all folds have in common, so that they share their programs.

  Attributes:
    steps: of training.
    size: bags in a batch.
    buckets: padded sizes of training.
    eval_buckets: and of evaluation.
  """

  steps: int
  size: int
  buckets: list[int]
  eval_buckets: list[int]


def _plan(config, study: Study) -> _Plan:
  counts = [len(fold.train) for fold in study.folds]
  size = min(config.train.batch_size, _multiple(config, min(counts)))
  steps = config.train.steps
  if steps == 0:
    steps = max(config.epochs * -(-max(counts) // size), config.min_steps)
  drawn = [
    _lengths(config, study, _order(config, study, fold, steps, size))
    for fold in study.folds
  ]
  longest = np.concatenate([x.reshape(-1, size).max(1) for x in drawn])
  every = study.lengths(np.arange(len(study.cohort.names)))
  return _Plan(
    steps, size, _buckets(longest, _TRAIN_BUCKETS),
    _buckets(every, _EVAL_BUCKETS),
  )  # fmt: skip


def _lengths(config, study: Study, order: np.ndarray) -> np.ndarray:
  lengths = study.lengths(order)
  most = config.data.max_patches
  return np.minimum(lengths, most) if most else lengths


def _part(
  config, study: Study, fold: Fold, plan: _Plan, graph: str,
  options: dict[str, Any],
) -> train.Experiment:  # fmt: skip
  task = make_task(config, study, fold)
  optimizer, schedule = train.make_optimizer(config.optimizer, plan.steps)
  build = task.build(
    make_network(config, study.dim, task.num_outputs, options),
    optimizer,
    schedule=schedule,
    microbatches=config.train.microbatches,
    ema_decay=config.optimizer.ema_decay or None,
    max_skips=config.train.max_skips,
  )
  reader = make_reader(
    config, study.cohort.files, dim=study.dim, graph=graph,
    coords=study.has_coords, half=study.half,
  )  # fmt: skip
  statistics = scaling(config, study, fold)
  evaluations = {
    name: _scaled(_pass(config, study, reader, task, index, plan), statistics)
    for name, index in (('val', fold.val), ('test', fold.test))
    if len(index)
  }
  return train.Experiment(
    build,
    _scaled(_stream(config, study, fold, reader, task, plan), statistics),
    steps=plan.steps,
    evaluations=evaluations,
    summarize=task.summarize,
    names=study.cohort.names,
  )


def _scaled(data: train.Data, statistics: Any) -> train.Data:
  """Standardises bags by mean and std [1, P], which are data of the program."""
  if statistics is None:
    return data

  def gathered(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    row = jnp.zeros(batch['id'].shape, jnp.int32)
    return batch | {'bag': scale_features(batch['bag'], row, resident)}

  return data._replace(resident=statistics, gather=gathered)


def _devices(config) -> int:
  return config.train.mesh[1] or jax.device_count()


def _multiple(config, size: int) -> int:
  """The least multiple of the devices that holds `size`."""
  return -(-size // _devices(config)) * _devices(config)


class _Draws:
  """Items of a stream: bag `order[k]`, its patches drawn anew for each k."""

  def __init__(self, reader: slides.BagReader, order: np.ndarray, draw: bool):
    self._reader, self._order, self._draw = reader, order, draw

  def __len__(self) -> int:
    return len(self._order)

  def __getitem__(self, k: int):
    index = int(self._order[k])
    return index, self._reader.read(index, k if self._draw else None)


def _collate(reader: slides.BagReader, task: Task):
  """(items, bucket) -> batch."""

  def collate(items, bucket):
    real = np.array([item is not None for item in items])
    index = np.array([-1 if item is None else item[0] for item in items])
    bags = [reader.empty() if item is None else item[1] for item in items]
    return {
      'bag': slides.stack_bags(bags, bucket),
      'id': index.astype(np.int32),
      'weight': real.astype(np.float32),
      # Position 0 stands in for padding, whose weight is 0.
      **{name: x[np.maximum(index, 0)] for name, x in task.arrays.items()},
    }

  return collate


def _order(config, study, fold, steps: int, size: int) -> np.ndarray:
  steps = max(steps, 1)
  seed, draws = config.seed, steps * size
  sampler = config.data.sampler
  if sampler == 'balanced':
    labels = study.cohort.values['label'].astype(str)[fold.train]
    return slides.balanced_order(fold.train, labels, draws, seed)
  if sampler == 'events':
    event = study.cohort.values['event'][fold.train]
    return slides.event_balanced_order(
      fold.train, event, size, steps, seed=seed
    )
  return slides.epoch_order(fold.train, draws, seed)


def _stream(
  config, study: Study, fold: Fold, reader, task: Task, plan: _Plan
) -> train.Data:
  """Training batches; position is a function of the step alone."""
  size = plan.size
  order = _order(config, study, fold, plan.steps, size)
  data = train.source_data(
    cast(Any, _Draws(reader, order, True)),
    _collate(reader, task),
    size,
    lengths=_lengths(config, study, order).tolist(),
    buckets=plan.buckets,
    shuffle=False,
    workers=config.train.workers,
  )
  # Not of the order's length: a run may be lengthened.
  named = '\n'.join(study.cohort.names[i] for i in fold.train)
  fingerprint = dict(
    kind='slides', n=len(fold.train), batch_size=size, seed=config.seed,
    sampler=config.data.sampler, bags=zlib.crc32(named.encode()),
    targets={k: zlib.crc32(np.ascontiguousarray(v[fold.train]).tobytes())
             for k, v in task.arrays.items()},
  )  # fmt: skip
  return data._replace(fingerprint=fingerprint)


def _pass(
  config, study: Study, reader, task: Task, index, plan: _Plan
) -> train.Data:
  """Every bag once, whole, shortest first: little is padded."""
  lengths = study.lengths(index)
  order = np.asarray(index)[np.argsort(lengths, kind='stable')]
  lengths = np.sort(lengths)
  return train.source_data(
    cast(Any, _Draws(reader, order, False)),
    _collate(reader, task),
    _multiple(config, config.train.eval_batch_size),
    lengths=lengths.tolist(),
    buckets=plan.eval_buckets,
    one_pass=True,
    workers=config.train.workers,
  )


def _buckets(lengths: np.ndarray, most: int) -> list[int]:
  """Few padded sizes that hold all lengths."""
  shares = np.linspace(0, 1, most + 1)[1:]
  cuts = np.quantile(lengths, shares, method='higher')
  return sorted({bucket_size(int(cut)) for cut in cuts})

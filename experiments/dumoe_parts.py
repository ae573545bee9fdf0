"""What the recommender experiments share: groups of data, models, predictions.

Axes: G groups (data sets of one size of catalogue), R runs, n windows.

All runs of a part go through one program: run r reads group `groups[r]`.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from tmlib import train
from tmlib.config import config_field
from tmlib.recsys.method import Outputs, build_stage, dumoe_stages
from tmlib.recsys.options import DUMoEConfig

__all__ = [
  'group_pass',
  'group_stream',
  'markdown',
  'model_of',
  'part_of',
  'read_predictions',
  'stack_groups',
]


def stack_groups(
  groups: Sequence[Mapping[str, Any]],
) -> tuple[dict[str, Any], np.ndarray]:
  """The windows of G groups in one, and [n] the group of each."""
  stacked = jax.tree.map(lambda *x: np.concatenate(x), *map(dict, groups))
  sizes = [len(group['user']) for group in groups]
  return stacked, np.repeat(np.arange(len(groups)), sizes)


def group_stream(
  windows: dict[str, Any], member: np.ndarray, groups: np.ndarray, batch: int,
  seed: int,
) -> train.Data:  # fmt: skip
  """An endless stream per run, of the windows of its group."""
  weights = (member[None] == groups[:, None]).astype(np.float32)
  return train.run_data(windows, weights, batch, seed=seed)


def group_pass(
  windows: dict[str, Any], member: np.ndarray, groups: np.ndarray, batch: int,
  first_id: int = 0,
) -> train.Data:  # fmt: skip
  """One pass per run over the windows of its group, and over no others."""
  rows = [np.flatnonzero(member == group) for group in groups]
  longest = max(map(len, rows))
  steps = -(-longest // batch)
  table = np.zeros((len(rows), steps * batch), np.int32)
  real = np.zeros(table.shape, np.float32)
  for run, found in enumerate(rows):
    table[run, : len(found)], real[run, : len(found)] = found, 1
  n = len(member)
  arrays = windows | {
    'id': np.arange(first_id, first_id + n, dtype=np.int32),
    'weight': np.ones(n, np.float32),
  }

  def load(step: int, part: slice) -> dict[str, np.ndarray]:
    at = slice(step * batch + part.start, step * batch + part.stop)
    return {'index': table[:, at], 'weight': real[:, at]}

  fingerprint = dict(kind='group_pass', n=n, batch_size=batch)
  return train.Data(
    load, batch, fingerprint, steps=steps, resident=arrays, per_run=True
  )


def model_of(config, **sizes) -> DUMoEConfig:
  """The DUMoE of a config; `sizes` come from the data."""
  m = config.model.to_dict()
  m['half_lives'] = tuple(m.pop('half_life_hours'))
  m['half_lives'] = tuple(3600.0 * hours for hours in m['half_lives'])
  with config_field('model'):
    return DUMoEConfig(**(m | sizes))


def _optimizer(config, steps: int):
  return train.make_optimizer(config.optimizer, steps)


def part_of(
  config,
  model: DUMoEConfig,
  scheme: str,
  data: train.Data,
  evaluations: Mapping[str, train.Data],
  runs: int,
  *,
  tags: np.ndarray | None = None,
  outputs: Outputs | None = None,
  predict: train.Data | None = None,
  names: Sequence[str] | None = None,
  labels: Mapping[str, Sequence[str]] | None = None,
) -> train.Experiment:
  """One model: its stages, its data, its evaluation.

  Args:
    config: train and optimizer are read.
    model: the network.
    scheme: of `tmlib.recsys.method.SCHEMES`; 'none' where it has no experts.
    data: stream.
    evaluations: finite passes.
    runs: R.
    tags: of the items.
    outputs: of the evaluation.
    predict: pass for `--mode=predict`.
    names: of the example ids.
    labels: {output: what its integers mean}.

  Returns:
    The experiment.
  """
  decay = config.optimizer.ema_decay or None
  options: dict[str, Any] = dict(
    ema_decay=decay, max_skips=config.train.max_skips
  )
  tags = tags if model.num_tags else None
  common: dict[str, Any] = dict(
    data=data,
    runs=runs,
    evaluations=evaluations,
    predict=predict,
    names=names,
    labels=labels,
  )
  if scheme == 'none':
    optimizer, schedule = _optimizer(config, config.train.steps)
    build = build_stage(
      'backbone', model, optimizer, tags=tags, outputs=outputs,
      schedule=schedule, **options,
    )  # fmt: skip
    return train.Experiment(build=build, steps=config.train.steps, **common)
  stages = dumoe_stages(
    model, config.train.steps, lambda steps: _optimizer(config, steps),
    scheme=scheme, tags=tags, outputs=outputs, **options,
  )  # fmt: skip
  return train.Experiment(stages=stages, **common)


def read_predictions(
  path: Path, evaluation: str = 'test'
) -> list[dict[str, np.ndarray]]:
  """The outputs of `predictions.csv`, per run, by id.

  Args:
    path: the file.
    evaluation: which rows.

  Returns:
    Per run {name: [n] or [n, columns]}; columns name_0, name_1, ... become one
    array.
  """
  with path.open(newline='') as file:
    rows = [r for r in csv.DictReader(file) if r['evaluation'] == evaluation]
  if not rows:
    raise ValueError(f'{path}: no rows of evaluation {evaluation!r}')
  fields = [k for k in rows[0] if k not in ('evaluation', 'run', 'name')]
  columns = {k: np.array([float(r[k]) for r in rows]) for k in fields}
  run = np.array([int(r.get('run') or 0) for r in rows])
  wide: dict[str, list[str]] = {}
  for field in fields:
    stem, _, number = field.rpartition('_')
    wide.setdefault(stem if number.isdigit() and stem else field, []).append(
      field
    )
  found = {
    name: columns[members[0]]
    if members == [name]
    else np.stack([columns[m] for m in members], 1)
    for name, members in wide.items()
  }
  out = []
  for r in np.unique(run):
    one = {k: v[run == r] for k, v in found.items()}
    order = np.argsort(one['id'], kind='stable') if 'id' in one else slice(None)
    out.append({k: v[order] for k, v in one.items()})
  return out


def markdown(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """A table in Markdown."""
  line = lambda cells: '| ' + ' | '.join(map(str, cells)) + ' |'
  parts = [line(header), line(['---'] * len(header)), *map(line, rows)]
  return '\n'.join(parts) + '\n'

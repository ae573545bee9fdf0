"""From a config to a finished working directory.

A runner module's `make(config)` says what to do, as an `Experiment`; `run`
does it: train, evaluate, predict or report.
"""

import csv
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import numpy as np
from absl import logging
from ml_collections import ConfigDict

from tmlib.config import identity
from tmlib.options import Options
from tmlib.train.data import Data
from tmlib.train.evaluate import Evaluated, Summarize
from tmlib.train.loop import fit
from tmlib.train.method import Build
from tmlib.train.stages import Stage

__all__ = ['Experiment', 'run', 'write_predictions']

# Outputs with at most so many numbers per example go to predictions.csv.
_CSV_COLUMNS = 64


class Experiment(NamedTuple):
  """What one config asks for.

  Attributes:
    build: the method; or `stages`; or neither, where only `parts` are run.
    data: its stream.
    stages: for several methods in sequence.
    steps: updates; None takes `config.train.steps`.
    runs: None takes `config.train.runs`.
    evaluations: {name: finite pass}.
    summarize: (outputs, sums) of one run -> metrics.
    stop: read metrics -> whether to stop early.
    predict: a finite pass over unlabelled data, for mode 'predict'.
    names: name of each example id, for predictions.csv.
    labels: {output: what each of its integers means, from 0}, for the same.
    parts: {name: experiment}, each run in its own folder, in order: models to
      compare, points of a curve.
    same_programs: the parts' programs are alike: the first compiles them, into
      `workdir/compiled` where `config.train.compilation_cache` names no folder.
    report: writes `report/` from what lies in the working directory.
  """

  build: Build | None = None
  data: Data | None = None
  stages: Sequence[Stage] = ()
  steps: int | None = None
  runs: int | None = None
  evaluations: Mapping[str, Data] | None = None
  summarize: Summarize | None = None
  stop: Callable[[dict[str, Any]], bool] | None = None
  predict: Data | None = None
  names: Sequence[str] | None = None
  labels: Mapping[str, Sequence[str]] | None = None
  parts: Mapping[str, 'Experiment'] | None = None
  same_programs: bool = False
  report: Callable[[Path], None] | None = None


def run(
  make: Callable[[ConfigDict], Experiment],
  config: ConfigDict,
  *,
  workdir: str | Path,
  mode: str = 'train',
  allow_config_change: bool = False,
) -> int:
  """Carries out one config in one working directory.

  Args:
    make: config -> experiment.
    config: see `default_config`.
    workdir: made if absent; a run found there is resumed.
    mode: 'train' (then evaluate and report), 'eval' (the newest checkpoint),
      'predict' (unlabelled data) or 'report'.
    allow_config_change: resume although the experiment changed.

  Returns:
    Exit code, 0.

  Raises:
    ValueError: for a config or data that do not fit.
    OSError: if the working directory cannot be written.
    FileNotFoundError: if there is no checkpoint to evaluate.
  """
  if not str(workdir):
    raise ValueError('workdir is empty; give a folder for what a run leaves')
  workdir = Path(workdir)
  experiment = make(config)
  _prepare(workdir)
  if mode != 'report':
    train: Any = config.train
    options = Options.from_config(
      train, allow_config_change=allow_config_change
    )
    if experiment.same_programs and not options.compilation_cache:
      folder = str(workdir / 'compiled')
      options = dataclasses.replace(options, compilation_cache=folder)
    if mode == 'train' and not (workdir / 'config.json').exists():
      _write_config(config, workdir)
    finished = _run_parts(experiment, config, options, workdir, mode)
    if mode == 'train':
      # Only now: a changed config that was refused must not replace it.
      _write_config(config, workdir)
    if not finished:
      return 0
  if mode in ('train', 'report'):
    _report(experiment, workdir)
  return 0


def _write_config(config: ConfigDict, workdir: Path) -> None:
  if jax.process_index() == 0:
    text = json.dumps(config.to_dict(), indent=2, default=str)
    (workdir / 'config.json').write_text(text + '\n')


def _prepare(workdir: Path) -> None:
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    probe = workdir / f'.probe-{jax.process_index()}'
    probe.touch()
    probe.unlink()
  except OSError as error:
    raise OSError(
      f'workdir={workdir} cannot be written ({error.strerror}); pass a folder'
      ' that can'
    ) from error


def _run_parts(
  experiment: Experiment,
  config: ConfigDict,
  options: Options,
  workdir: Path,
  mode: str,
) -> bool:
  """Runs an experiment and its parts; False if a signal interrupted it."""
  if experiment.build is not None or experiment.stages:
    if not _run_one(experiment, config, options, workdir, mode):
      return False
  for name, part in (experiment.parts or {}).items():
    logging.info('part %s', name)
    folder = workdir / name
    folder.mkdir(parents=True, exist_ok=True)
    if not _run_parts(part, config, options, folder, mode):
      return False
  return True


def _run_one(
  experiment: Experiment,
  config: ConfigDict,
  options: Options,
  workdir: Path,
  mode: str,
) -> bool:
  evaluations = dict(experiment.evaluations or {})
  if mode == 'predict':
    if experiment.predict is None:
      raise ValueError('this experiment has no data to predict on')
    evaluations = {'predict': experiment.predict}
  train, seed = cast(Any, config.train), cast(int, config.seed)
  steps = train.steps if experiment.steps is None else experiment.steps
  runs = train.runs if experiment.runs is None else experiment.runs
  one = experiment.build is not None
  result = fit(
    experiment.build,
    experiment.data,
    steps=steps if one else None,
    stages=experiment.stages,
    seed=seed,
    runs=runs,
    evaluations=evaluations,
    summarize=None if mode == 'predict' else experiment.summarize,
    stop=experiment.stop,
    options=options,
    workdir=workdir,
    identity=identity(config),
    evaluate_only=mode != 'train',
  )
  if jax.process_index() != 0 or result.status == 'interrupted':
    return result.status != 'interrupted'
  stem = 'predictions' if mode == 'train' else mode
  write_predictions(
    workdir / stem, result.evaluations, experiment.names, runs,
    experiment.labels,
  )  # fmt: skip
  summary = {
    'status': result.status,
    'step': result.step,
    'diverged': result.diverged,
    'costs': result.costs,
    'metrics': {
      name: [one.metrics for one in found]
      for name, found in result.evaluations.items()
    },
  }
  path = workdir / ('result.json' if mode == 'train' else f'{mode}.json')
  path.write_text(json.dumps(_without_nan(summary), indent=2) + '\n')
  return True


def _without_nan(tree: Any) -> Any:
  """JSON has no NaN: None instead."""
  return jax.tree.map(
    lambda x: None if isinstance(x, float) and not np.isfinite(x) else x, tree
  )


def _report(experiment: Experiment, workdir: Path) -> None:
  if experiment.report is None or jax.process_index() != 0:
    return
  (workdir / 'report').mkdir(exist_ok=True)
  experiment.report(workdir)
  logging.info('report in %s', workdir / 'report')


def write_predictions(
  stem: Path,
  evaluations: Mapping[str, Sequence[Evaluated]],
  names: Sequence[str] | None,
  runs: int,
  labels: Mapping[str, Sequence[str]] | None = None,
) -> None:
  """Writes `<stem>.csv`, and `<stem>.npz` with outputs too wide for a table.

  Args:
    stem: path without suffix.
    evaluations: {name: one `Evaluated` per run}.
    names: name of each example id.
    runs: 0 leaves out the column `run`.
    labels: {output: what each of its integers means, from 0}.
  """
  rows, wide = [], {}
  words = {name: np.asarray(x) for name, x in (labels or {}).items()}
  for evaluation, found in evaluations.items():
    for run, one in enumerate(found):
      narrow = {}
      for name, value in sorted(one.outputs.items()):
        value = words[name][value] if name in words else value
        flat = value.reshape(len(value), int(np.prod(value.shape[1:])))
        if flat.shape[1] > _CSV_COLUMNS:
          wide[f'{evaluation}/{run}/{name}'] = value
        elif value.ndim == 1:
          narrow[name] = value
        else:
          narrow |= {f'{name}_{i}': x for i, x in enumerate(flat.T)}
      lead = {'evaluation': evaluation} | ({'run': run} if runs else {})
      for i in range(len(one.outputs['weight'])):
        row: dict[str, Any] = lead | {k: v[i].item() for k, v in narrow.items()}
        if names is not None and 'id' in row:
          row['name'] = names[row['id']]
        rows.append(row)
      if wide and 'id' in one.outputs:
        wide[f'{evaluation}/{run}/id'] = one.outputs['id']
  fields = list(dict.fromkeys(key for row in rows for key in row))
  with stem.with_suffix('.csv').open('w', newline='') as file:
    writer = csv.DictWriter(file, fields)
    writer.writeheader()
    writer.writerows(rows)
  if wide:
    np.savez_compressed(stem.with_suffix('.npz'), **wide)

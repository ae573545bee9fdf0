"""Metric writers: log line, JSON lines, TensorBoard.

A metric is a float, or a list of one float per run.
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
import numpy as np
from absl import logging

__all__ = [
  'JsonlWriter',
  'LogWriter',
  'TensorBoardWriter',
  'Writer',
  'default_writers',
]

Value = float | list[float]


class Writer(Protocol):
  """Something that takes metrics; steps arrive in increasing order."""

  def write(self, step: int, metrics: Mapping[str, Value]) -> None:
    """Records the metrics of one step."""
    ...

  def close(self) -> None:
    """Flushes and releases."""
    ...


def _finite(value: Value) -> np.ndarray:
  values = np.atleast_1d(np.asarray(value, float))
  return values[np.isfinite(values)]


def _short(value: Value) -> str:
  if not isinstance(value, list):
    return f'{value:.5g}'
  found = _finite(value)
  if not len(found):
    return 'nan'
  return f'{found.mean():.5g}±{found.std():.2g}'


class LogWriter:
  """One log line per write; lists as mean and standard deviation."""

  def write(self, step: int, metrics: Mapping[str, Value]) -> None:
    """See `Writer`; bookkeeping counters that are zero are left out."""
    quiet = ('nonfinite/', 'skipped', 'diverged')
    shown = [
      f'{name.removeprefix("progress/")} {_short(value)}'
      for name, value in metrics.items()
      if not name.startswith(quiet) or np.any(_finite(value) > 0)
    ]
    logging.info('step %d  %s', step, '  '.join(shown))

  def close(self) -> None:
    """Nothing to release."""


class JsonlWriter:
  """Appends one JSON object per write to a file; NaN is written as null."""

  def __init__(self, path: str | os.PathLike[str], resume_step: int):
    """Opens the file; rows after `resume_step` are dropped."""
    self._path = Path(path)
    kept = []
    if self._path.exists():
      kept = [
        line
        for line in self._path.read_text().splitlines(keepends=True)
        if _row_step(line) <= resume_step
      ]
    # Through a second file: a kill between the two leaves one of them whole.
    fresh = self._path.with_suffix('.tmp')
    fresh.write_text(''.join(kept))
    fresh.replace(self._path)
    self._file = self._path.open('a')

  def write(self, step: int, metrics: Mapping[str, Value]) -> None:
    """See `Writer`; flushed, so that a killed run keeps its rows."""
    row = {'step': step} | {k: _json(v) for k, v in metrics.items()}
    self._file.write(json.dumps(row) + '\n')
    self._file.flush()

  def close(self) -> None:
    """Closes the file."""
    self._file.close()


def _json(value: Value) -> float | list[float | None] | None:
  if isinstance(value, list):
    return [v if math.isfinite(v) else None for v in value]
  return value if math.isfinite(value) else None


def _row_step(line: str) -> float:
  """The row's step; a row cut off by a kill counts as after everything."""
  try:
    return json.loads(line)['step']
  except (ValueError, KeyError, TypeError):
    return math.inf


class TensorBoardWriter:
  """TensorBoard events (tensorboardX); lists as their mean over finite runs."""

  def __init__(self, path: str | os.PathLike[str], resume_step: int):
    """Opens the folder; events after `resume_step` are marked as superseded."""
    import tensorboardX

    self._writer = tensorboardX.SummaryWriter(
      str(path),
      purge_step=resume_step + 1,
      # Files are named by the second; a quick restart must not overwrite one.
      filename_suffix=f'.{resume_step:012d}',
    )

  def write(self, step: int, metrics: Mapping[str, Value]) -> None:
    """See `Writer`."""
    for name, value in metrics.items():
      found = _finite(value)
      if len(found):
        self._writer.add_scalar(name, found.mean(), step)

  def close(self) -> None:
    """Flushes and closes."""
    self._writer.close()


def default_writers(workdir: Path | None, resume_step: int) -> Sequence[Writer]:
  """Log lines, and with a workdir also metrics.jsonl and TensorBoard."""
  if jax.process_index() != 0:
    return ()  # every process computes the same; one of them writes
  if workdir is None:
    return (LogWriter(),)
  return (
    LogWriter(),
    JsonlWriter(workdir / 'metrics.jsonl', resume_step),
    TensorBoardWriter(workdir / 'tensorboard', resume_step),
  )

"""Reading metrics: to the host, checked, written."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tmlib.train.evaluate import Evaluated
from tmlib.train.writers import Value, Writer

__all__ = ['Recorder', 'evaluation_metrics']


class Recorder:
  """Turns device metrics into floats, refuses NaN, and writes rows."""

  def __init__(
    self,
    writers: Sequence[Writer],
    runs: int,
    step: int,
    metrics: Mapping[str, Value] | None = None,
  ):
    """Starts at `step`, with the `metrics` that were last read, if any."""
    self._writers, self.runs, self._step = writers, runs, step
    self.metrics: dict[str, Value] = dict(metrics or {})

  def read(self, metrics: Any, step: int) -> dict[str, Value]:
    """Metrics as floats, or lists of one per run.

    A pair of weight zero saw no example: its value is NaN, and no fault.

    Raises:
      FloatingPointError: if they are not finite. A method with a guard says so
        itself, by `diverged`; runs that diverged beside others are reported
        under that name, not raised.
    """
    host = dict(sorted(jax.device_get(metrics).items()))
    self.metrics = {name: self._value(x) for name, x in host.items()}
    guarded = 'diverged' in host
    finite = {name: self._finite(x) for name, x in host.items()}
    if self.runs and host and not guarded:
      alive = np.all(list(finite.values()), axis=0)
      self.metrics['diverged'] = (~alive).astype(float).tolist()
    gave_up = self.metrics.get(
      'diverged', not all(map(np.all, finite.values()))
    )
    if np.all(gave_up):
      if guarded:
        names, advice = self._skipped()
      else:
        names = [name for name, ok in finite.items() if not np.all(ok)]
        advice = 'the method has no guard; look at its input'
      raise FloatingPointError(
        f'{", ".join(names)} not finite between steps {self._step} and {step};'
        f' {advice}'
      )
    self._step = step
    return self.metrics

  def _value(self, value: Any) -> Value:
    if isinstance(value, tuple):
      total, weight = (np.asarray(x, np.float64) for x in value)
      value = total / np.where(weight != 0, weight, np.nan)
    value = np.asarray(value, np.float64)
    return value[: self.runs].tolist() if self.runs else float(value)

  def _finite(self, value: Any) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    finite = np.all([np.isfinite(np.asarray(x, np.float64)) for x in parts], 0)
    return finite[: self.runs] if self.runs else finite

  def _skipped(self) -> tuple[list[str], str]:
    culprits = [
      name.removeprefix('nonfinite/')
      for name, count in self.metrics.items()
      if name.startswith('nonfinite/') and np.any(np.asarray(count) > 0)
    ]
    skipped = np.max(self.metrics.get('skipped', 0))
    return culprits, (
      f'{skipped:.0f} steps were skipped. Look at the data and lower the'
      ' learning rate, or raise max_skips'
    )

  @property
  def diverged(self) -> list[int]:
    """The runs that gave up, or whose metrics are not finite."""
    if not self.runs:
      return []
    return np.flatnonzero(self.metrics.get('diverged', [])).tolist()

  def write(self, step: int, row: dict[str, Value]) -> None:
    """One row to every writer."""
    for writer in self._writers:
      writer.write(step, row)


def evaluation_metrics(
  evaluations: dict[str, list[Evaluated]], runs: int
) -> dict[str, Value]:
  """{'<evaluation>/<metric>': float, or list of one per run}."""
  row: dict[str, Value] = {}
  for name, found in evaluations.items():
    for metric in found[0].metrics:
      values = [one.metrics[metric] for one in found]
      row[f'{name}/{metric}'] = values if runs else values[0]
  return row

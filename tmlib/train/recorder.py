"""Reading metrics: to the host, checked, written."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from tmlib.train.evaluate import Evaluated
from tmlib.train.writers import Value, Writer

__all__ = ['Recorder', 'evaluation_metrics']


class Recorder:
  """Turns device metrics into floats, refuses NaN, and writes rows."""

  def __init__(self, writers: Sequence[Writer], runs: int, step: int):
    """`step`: where the run starts; for messages and to write no step twice."""
    self._writers, self.runs, self._step = writers, runs, step
    self.metrics: dict[str, Value] = {}

  def read(self, metrics: Any, step: int) -> dict[str, Value]:
    """Metrics as floats, or lists of one per run.

    Raises:
      FloatingPointError: if they are not finite. A method with a guard says so
        itself, by `diverged`; runs that diverged beside others are reported,
        not raised.
    """
    host = jax.device_get(metrics)
    self.metrics = {
      name: self._value(value) for name, value in sorted(host.items())
    }
    bad = self._bad()
    if bad:
      names, advice = bad
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

  def _bad(self) -> tuple[list[str], str] | None:
    if 'diverged' in self.metrics:
      if not np.all(self.metrics['diverged']):
        return None
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
    finite = [np.isfinite(value) for value in self.metrics.values()]
    alive = np.all(finite, axis=0) if finite else True
    if np.any(alive):
      return None
    names = [
      n for n, ok in zip(self.metrics, finite, strict=True) if not ok.all()
    ]
    return names, 'the method has no guard; look at its input'

  @property
  def diverged(self) -> list[int]:
    """The runs that gave up, or whose metrics are not finite."""
    if not self.runs or not self.metrics:
      return []
    if 'diverged' in self.metrics:
      return np.flatnonzero(self.metrics['diverged']).tolist()
    finite = [np.isfinite(value) for value in self.metrics.values()]
    return np.flatnonzero(~np.all(finite, axis=0)).tolist()

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

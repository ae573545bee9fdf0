"""Evaluation: sums are added over batches, outputs are concatenated."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tmlib.train.data import Data
from tmlib.train.layout import Layout
from tmlib.train.method import Method

__all__ = ['Evaluated', 'Evaluator', 'Summarize']

# (outputs, sums) of one run -> metrics. Runs on the host: AUC, C-index, ...
Summarize = Callable[[dict[str, np.ndarray], dict[str, float]], dict[str, Any]]


class Evaluated(NamedTuple):
  """One pass over one data set with one run's state.

  Attributes:
    outputs: {name: [n, ...]}, the examples whose weight is positive; `weight`
      is among them.
    sums: {name: sum / weight}.
    metrics: `sums` and what `summarize` made of both.
  """

  outputs: dict[str, np.ndarray]
  sums: dict[str, float]
  metrics: dict[str, float]


class Evaluator:
  """Evaluates methods on one finite pass over one data set."""

  def __init__(self, name: str, data: Data, layout: Layout):
    """Places resident arrays; raises ValueError if the data do not fit."""
    if data.steps is None:
      raise ValueError(
        f'evaluation data {name!r} is endless; give one finite pass'
      )
    layout.check_data(data)
    self._data, self._layout = data, layout
    self._resident = layout.replicate(data.resident)

  def compile(self, method: Method, state_shapes: Any) -> dict[Any, Any]:
    """{bucket: compiled evaluation}, for every bucket the pass will meet."""
    function = self._layout.evaluate(method, self._data)
    compiled: dict[Any, Any] = {}
    for step in range(self._data.steps or 0):
      key = self._data.bucket(step)
      if key not in compiled:
        batch = self._layout.place(self._data, [step], stacked=False)
        lowered = function.lower(state_shapes, self._resident, batch)
        compiled[key] = lowered.compile()
    return compiled

  def run(
    self,
    compiled: Mapping[Any, Any],
    state: Any,
    summarize: Summarize | None = None,
  ) -> list[Evaluated]:
    """One `Evaluated` per run, a single one without a run axis."""
    sums: dict[str, Any] = {}
    parts: list[dict[str, np.ndarray]] = []
    for step in range(self._data.steps or 0):
      batch = self._layout.place(self._data, [step], stacked=False)
      call = compiled[self._data.bucket(step)]
      found, weight = jax.tree.map(
        self._host, call(state, self._resident, batch)
      )
      for name, (total, count) in found['sums'].items():
        pair = np.stack([total, count]).astype(np.float64)
        sums[name] = sums.get(name, 0) + pair
      parts.append({**found['outputs'], 'weight': weight})
    means = {
      name: total / np.where(count != 0, count, np.nan)
      for name, (total, count) in sums.items()
    }
    runs = range(max(self._layout.runs, 1))
    return [_one_run(r, means, parts, summarize) for r in runs]

  def _host(self, x: Any) -> np.ndarray:
    """As NumPy with a leading run axis, the copies of runs dropped."""
    x = np.asarray(x)
    return x[: self._layout.runs] if self._layout.runs else x[None]


def _one_run(
  run: int,
  means: Mapping[str, np.ndarray],
  parts: list[dict[str, np.ndarray]],
  summarize: Summarize | None,
) -> Evaluated:
  kept: dict[str, list[np.ndarray]] = {}
  for part in parts:
    real = part['weight'][run] > 0
    for name, value in part.items():
      kept.setdefault(name, []).append(value[run][real])
  outputs = {name: np.concatenate(values) for name, values in kept.items()}
  sums = {name: float(value[run]) for name, value in means.items()}
  extra = summarize(outputs, sums) if summarize else {}
  return Evaluated(
    outputs, sums, sums | {k: float(v) for k, v in extra.items()}
  )

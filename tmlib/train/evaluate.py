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
    self._gather = layout.gather(data)

  def lower(
    self, method: Method, state_shapes: Any, known: dict[Any, Any]
  ) -> dict[Any, Any]:
    """{bucket: key in `known`}, for every bucket the pass will meet.

    Args:
      method: built with no axis name.
      state_shapes: with shardings.
      known: {key: lowered evaluation of `method`}, one for each shape of a
        batch, so that passes of one shape share it; what is missing is added.
    """
    function = self._layout.evaluate(method, self._data.per_run)
    keys: dict[Any, Any] = {}
    for step in range(self._data.steps or 0):
      bucket = self._data.bucket(step)
      if bucket in keys:
        continue
      shapes = jax.tree.map(_shape, self._batch(step))
      leaves, treedef = jax.tree.flatten(shapes)
      key = keys[bucket] = (self._data.per_run, treedef, *leaves)
      if key not in known:
        known[key] = function.lower(state_shapes, shapes)
    return keys

  def _batch(self, step: int) -> Any:
    """The batch of one step, on the devices."""
    loaded = self._layout.place(self._data, [step], stacked=False)
    return self._gather(self._resident, loaded)

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
      call = compiled[self._data.bucket(step)]
      found, weight = jax.tree.map(self._host, call(state, self._batch(step)))
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


def _shape(x: jax.Array) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


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

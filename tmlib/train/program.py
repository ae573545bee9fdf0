"""One stage's compiled program: init, a step per bucket, evaluations."""

import time
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from tmlib.train.data import Data
from tmlib.train.evaluate import Evaluated, Evaluator, Summarize
from tmlib.train.layout import Layout
from tmlib.train.method import Build

__all__ = ['Program']


class Program:
  """Everything of one stage that is traced, once."""

  def __init__(
    self,
    build: Build,
    data: Data | None,
    evaluators: Mapping[str, Evaluator],
    layout: Layout,
    *,
    seed: int = 0,
    folds: int = 1,
  ):
    """Places resident data and works out shapes; compiles nothing.

    Args:
      build: axis name or None -> Method.
      data: the stage's stream, or None.
      evaluators: {name: evaluator}.
      layout: mesh and mode.
      seed: of the initial state.
      folds: updates per call.
    """
    self.data, self._layout, self._folds = data, layout, folds
    self._evaluators = evaluators
    self._resident = None if data is None else layout.replicate(data.resident)
    self._method = build(layout.axis_name(data))
    # The global view serves for init and evaluation in both modes.
    self._whole = build(None) if layout.axis_name(data) else self._method
    self._example = None
    if data is not None:
      layout.check_data(data)
      self._example = layout.place(data, [0], stacked=False)
    self.shapes, self.init = layout.init(
      self._whole, seed, self._resident, self._example, data
    )
    self._steps: dict[Any, Any] = {}
    self._evaluations: dict[str, dict[Any, Any]] = {}

  def lower(self) -> dict[Any, Any]:
    """{bucket: the lowered, not yet compiled, step}."""
    function = self._layout.step(
      self._method, self.data, self.shapes, self._folds
    )
    return {
      key: function.lower(self.shapes, self._resident, batch)
      for key, batch in self._batch_shapes().items()
    }

  def compile(self, train: bool = True) -> list[dict[str, Any]]:
    """Compiles the evaluations and, if `train`, the step for every bucket.

    Returns:
      Per bucket: compile seconds, FLOPs and bytes per call and device.
    """
    costs = []
    for key, lowered in self.lower().items() if train else ():
      start = time.monotonic()
      compiled = self._steps[key] = lowered.compile()
      costs.append(
        {'bucket': str(key), 'seconds': round(time.monotonic() - start, 3)}
        | _cost(compiled)
      )
      logging.info('compiled step: %s', costs[-1])
    for name, evaluator in self._evaluators.items():
      self._evaluations[name] = evaluator.compile(self._whole, self.shapes)
    return costs

  def _batch_shapes(self) -> dict[Any, Any]:
    """{bucket: shapes of a loaded batch, with shardings}."""
    data = self.data
    if data is None:
      return {0: None}
    spec = self._layout.batch_spec(data, self._folds > 1)
    sharding = jax.sharding.NamedSharding(self._layout.mesh, spec)
    lead = (self._folds,) if self._folds > 1 else ()

    def struct(x):
      dtype = jax.dtypes.canonicalize_dtype(x.dtype)
      return jax.ShapeDtypeStruct((*lead, *x.shape), dtype, sharding=sharding)

    shapes = data.shapes or {data.bucket(0): self._example}
    return {k: jax.tree.map(struct, batch) for k, batch in shapes.items()}

  def _bucket(self, step: int) -> Any:
    if self.data is None:
      return 0
    keys = {self.data.bucket(step + i) for i in range(self._folds)}
    if len(keys) > 1:
      raise ValueError(
        f'steps_per_call={self._folds} needs batches of one shape, but the'
        f' buckets from step {step} are {sorted(map(str, keys))}; pass 1'
      )
    return keys.pop()

  def load(self, step: int) -> tuple[Any, Any]:
    """(bucket, batch on the devices) of the call that starts at `step`."""
    if self.data is None:
      return 0, None
    key = self._bucket(step)
    steps = range(step, step + self._folds)
    return key, self._layout.place(self.data, steps, stacked=self._folds > 1)

  def step(self, state: Any, loaded: tuple[Any, Any]) -> tuple[Any, Any]:
    """One call: (state, metrics), still in flight; `state` is donated."""
    key, batch = loaded
    return self._steps[key](state, self._resident, batch)

  def evaluate(
    self, state: Any, summarize: Summarize | None
  ) -> dict[str, list[Evaluated]]:
    """{evaluation name: one `Evaluated` per run}."""
    return {
      name: evaluator.run(self._evaluations[name], state, summarize)
      for name, evaluator in self._evaluators.items()
    }


def _cost(compiled: Any) -> dict[str, float | None]:
  """What the compiler says of one call on one device."""
  cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
  return {
    'flops': cost.get('flops'),
    'argument_bytes': getattr(memory, 'argument_size_in_bytes', None),
    'temporary_bytes': getattr(memory, 'temp_size_in_bytes', None),
  }

"""One stage's compiled program: init, a step per bucket, evaluations."""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from absl import logging

from tmlib.train.data import Data
from tmlib.train.evaluate import Evaluated, Evaluator, Summarize
from tmlib.train.layout import Layout
from tmlib.train.method import Build, build_method
from tmlib.train.stages import Stage

__all__ = ['Program', 'make_programs']

# Emitting fusions through MLIR is most of what a small program compiles for.
_QUICK = {'xla_cpu_use_fusion_emitters': False}


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
    quick_compile: bool = False,
  ):
    """Places resident data and works out shapes; compiles nothing.

    Args:
      build: axis name or None -> Method.
      data: the stage's stream, or None.
      evaluators: {name: evaluator}.
      layout: mesh and mode.
      seed: of the initial state.
      folds: updates per call.
      quick_compile: see `tmlib.options.Options`.
    """
    self.data, self._layout, self._folds = data, layout, folds
    self._quick = quick_compile and layout.on_cpu
    self._evaluators = evaluators
    self._resident = None if data is None else layout.replicate(data.resident)
    name = layout.axis_name(data)
    self._method = build_method(build, name)
    # The global view serves for init and evaluation in both modes.
    self._whole = build_method(build, None) if name else self._method
    self._example = None
    if data is not None:
      layout.check_data(data)
      self._example = layout.place(data, [0], stacked=False)
    self.shapes, self._init = layout.init(
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

  def compile(
    self, train: bool = True, init: bool = False, evaluate: bool = True
  ) -> list[dict[str, Any]]:
    """Compiles the step, the evaluations and the init, where asked.

    What is compiled already is not compiled again. On a CPU, programs are
    compiled beside one another; the compiler of a GPU times its kernels, which
    must not disturb one another.

    Args:
      train: compile the step for every bucket.
      init: compile the initial state.
      evaluate: compile the evaluations.

    Returns:
      Per bucket: compile seconds, FLOPs and bytes per call and device.
    """
    wanted: dict[Any, Any] = {}
    if train and not self._steps:
      wanted |= {('step', key): low for key, low in self.lower().items()}
    evaluations: dict[Any, Any] = {}
    keys = {
      name: evaluator.lower(self._whole, self.shapes, evaluations)
      for name, evaluator in self._evaluators.items()
      if evaluate and name not in self._evaluations
    }
    wanted |= {('evaluate', key): low for key, low in evaluations.items()}
    if init:
      wanted['init', 0] = self._init.lower(self._resident, self._example)
    compiled = lambda lowered: _compile(lowered, self._quick)
    with ThreadPoolExecutor(None if self._layout.on_cpu else 1) as pool:
      done = dict(zip(wanted, pool.map(compiled, wanted.values()), strict=True))
    costs = []
    for (kind, key), (compiled, cost) in done.items():
      if kind == 'init':
        self._init = compiled
      if kind == 'step':
        self._steps[key] = compiled
        costs.append({'bucket': str(key)} | cost)
        logging.info('compiled step: %s', costs[-1])
    for name, found in keys.items():
      self._evaluations[name] = {
        bucket: done['evaluate', key][0] for bucket, key in found.items()
      }
    return costs

  def init(self) -> Any:
    """A fresh state on the devices."""
    return self._init(self._resident, self._example)

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


def make_programs(
  stages: Sequence[Stage],
  evaluations: Mapping[str, Data],
  layout: Layout,
  *,
  seed: int,
  folds: int,
  quick_compile: bool = False,
) -> list[Program]:
  """The program of each stage; stages of one method and stream share one.

  Args:
    stages: in their order.
    evaluations: {name: finite pass}, of every stage.
    layout: mesh and mode.
    seed: of the initial state.
    folds: updates per call.
    quick_compile: see `tmlib.options.Options`.

  Returns:
    One per stage.
  """
  evaluators = {
    name: Evaluator(name, data, layout) for name, data in evaluations.items()
  }
  made: dict[tuple[int, int], Program] = {}
  for stage in stages:
    key = id(stage.build), id(stage.data)
    if key not in made:
      made[key] = Program(
        stage.build, stage.data, evaluators, layout, seed=seed, folds=folds,
        quick_compile=quick_compile,
      )  # fmt: skip
  return [made[id(stage.build), id(stage.data)] for stage in stages]


def _compile(lowered: Any, quick: bool) -> tuple[Any, dict[str, float | None]]:
  """The program, and what the compiler says of one call on one device."""
  start = time.monotonic()
  try:
    compiled = lowered.compile(compiler_options=_QUICK if quick else None)
  except jax.errors.JaxRuntimeError as error:
    if not quick or 'No such compile option' not in str(error):
      raise
    compiled = lowered.compile()
  seconds = round(time.monotonic() - start, 3)
  cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
  return compiled, {
    'seconds': seconds,
    'flops': cost.get('flops'),
    'argument_bytes': getattr(memory, 'argument_size_in_bytes', None),
    'temporary_bytes': getattr(memory, 'temp_size_in_bytes', None),
  }

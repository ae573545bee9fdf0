"""The one training loop: a fold of `update` over data.

It knows no method. Each concern (layout, data, checkpoints, signals, writers,
evaluation) has its own small module; what is left here is their order.
"""

import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.options import ALL, Options
from tmlib.train.cache import compilation_cache
from tmlib.train.checkpoint import Checkpoints, Meta
from tmlib.train.data import Data
from tmlib.train.evaluate import Evaluated, Summarize
from tmlib.train.layout import Layout, make_mesh, parse_rules
from tmlib.train.method import Build
from tmlib.train.prefetching import prefetch
from tmlib.train.profile import profiled
from tmlib.train.program import Program, make_programs
from tmlib.train.progress import Chronometer
from tmlib.train.recorder import Recorder, evaluation_metrics
from tmlib.train.signals import StopRequest, stop_request
from tmlib.train.stages import Stage, check_stages, cut_stages, plan_stages
from tmlib.train.writers import Writer, default_writers

__all__ = ['Result', 'fit']


class Result(NamedTuple):
  """What a run leaves.

  Attributes:
    state: the final state; with runs each leaf has a leading run axis, which
      the mesh may have padded with copies.
    step: updates done.
    status: 'finished', 'stopped' (by `stop`) or 'interrupted' (by a signal).
    metrics: the last metrics that were read, floats or one per run.
    evaluations: {name: one `Evaluated` per run}, of the final state.
    diverged: the runs that gave up.
    costs: per stage and bucket: compile seconds, FLOPs and bytes per call.
  """

  state: Any
  step: int
  status: str
  metrics: dict[str, Any]
  evaluations: dict[str, list[Evaluated]]
  diverged: list[int]
  costs: list[dict[str, Any]]


def fit(
  build: Build | None = None,
  data: Data | None = None,
  *,
  steps: int | None = None,
  stages: Sequence[Stage] = (),
  seed: int = 0,
  runs: int = 0,
  evaluations: Mapping[str, Data] | None = None,
  summarize: Summarize | None = None,
  stop: Callable[[dict[str, Any]], bool] | None = None,
  options: Options | None = None,
  workdir: str | Path | None = None,
  identity: Mapping[str, Any] | None = None,
  writers: Sequence[Writer] | None = None,
  evaluate_only: bool = False,
) -> Result:
  """Trains, simulates or solves: folds a method's update over data.

  Args:
    build: axis name or None -> Method. Give `stages` instead for several.
    data: the stream of batches, None for a method without data.
    steps: updates in all.
    stages: parts with their own method; `steps` is then their sum.
    seed: of the initial state; run r folds r into its key.
    runs: independent runs trained in one program; 0 = one, no run axis.
    evaluations: {name: finite pass}.
    summarize: (outputs, sums) -> metrics, on the host.
    stop: metrics read at a log step -> whether to stop (a solver's gap). A run
      that stopped is taken up again only if its last metrics no longer do.
    options: how to carry it out.
    workdir: where checkpoints and metrics go; a run found there is resumed.
      None keeps nothing and catches no signals.
    identity: what must be equal on resume, beside seed, runs and data.
    writers: in place of log lines, metrics.jsonl and TensorBoard.
    evaluate_only: take no step and write nothing; evaluate the newest
      checkpoint of `workdir`.

  Returns:
    The final state and its evaluations.

  Raises:
    ValueError: for options that do not fit, before anything is compiled, and
      on resume for a changed experiment.
    FloatingPointError: if metrics are not finite, or the guard of every run
      gave up; it names the metrics and the steps.
    RuntimeError: if a checkpoint could not be written.
    FileNotFoundError: if `evaluate_only` finds no checkpoint.
  """
  options = options or Options()
  stages = plan_stages(build, steps, stages, data)
  for stage in stages:
    options.check(stage.name, stage.steps)
  mesh = make_mesh(*options.mesh, runs=runs)
  layout = Layout(mesh, options.parallel, runs, parse_rules(options.rules))
  identity = dict(identity or {}) | {'seed': seed, 'runs': runs}
  if len(stages) > 1:
    identity['stages'] = [stage.name for stage in stages]
  workdir = None if workdir is None else Path(workdir)
  if evaluate_only and workdir is None:
    raise ValueError('evaluate_only needs a workdir')
  with contextlib.ExitStack() as stack:
    stack.enter_context(jax.set_mesh(mesh))
    stack.enter_context(compilation_cache(options.compilation_cache))
    checkpoints, meta = None, Meta(0, 0, identity, {})
    if workdir is not None:
      checkpoints = Checkpoints(
        workdir / 'checkpoints', keep=options.keep, read_only=evaluate_only
      )
      stack.callback(checkpoints.close)
    if checkpoints and checkpoints.latest is not None:
      meta = checkpoints.meta(checkpoints.latest)
      check_stages(meta, stages, identity, options, evaluate_only)
    if evaluate_only:
      writers = ()
    if writers is None:
      writers = default_writers(workdir, meta.step)
    for writer in writers:
      stack.callback(writer.close)
    programs = make_programs(
      stages, evaluations or {}, layout, seed=seed,
      folds=options.steps_per_call, quick_compile=options.quick_compile,
    )  # fmt: skip
    if evaluate_only:
      # The run ends where it stands, and nothing is written.
      stages = cut_stages(stages[: meta.stage + 1], meta.step)
    session = _Session(
      stages, programs, options, checkpoints, identity, meta, summarize, stop,
      Recorder(writers, runs, meta.step, meta.metrics),
      Chronometer(**meta.progress),
      stack.enter_context(stop_request(workdir is not None)), workdir,
    )  # fmt: skip
    return session.run()


@dataclasses.dataclass
class _Session:
  """One call of `fit`, everything prepared: the order of things."""

  stages: Sequence[Stage]
  programs: Sequence[Program]
  options: Options
  checkpoints: Checkpoints | None
  identity: dict[str, Any]
  resumed: Meta
  summarize: Summarize | None
  stop: Callable[[dict[str, Any]], bool] | None
  recorder: Recorder
  chronometer: Chronometer
  request: StopRequest
  workdir: Path | None

  evaluations: dict[str, list[Evaluated]] = dataclasses.field(
    default_factory=dict
  )

  def run(self) -> Result:
    """All stages, from the newest checkpoint if there is one."""
    ends = list(itertools.accumulate(stage.steps for stage in self.stages))
    step, index = self.resumed.step, self.resumed.stage
    stopped = self.resumed.stopped and self._stops(self.resumed.metrics)
    fresh = self.checkpoints is None or self.checkpoints.latest is None
    costs = []
    for i in range(index, index + 1 if stopped else len(ends)):
      train = step < ends[i] and not stopped
      if train or stopped or i == len(ends) - 1:
        cost = self.programs[i].compile(
          train, init=fresh and i == 0, evaluate=self._evaluates(i, ends)
        )
        costs += [{'stage': self.stages[i].name} | row for row in cost]
    state, status = self._initial(index), 'stopped'
    if not stopped:
      state, step, status = self._stage(index, state, step, ends)
    while status == 'finished' and index + 1 < len(ends):
      index += 1
      state = self._enter(index, state)
      state, step, status = self._stage(index, state, step, ends)
    self._save(index, state, step)
    if self.checkpoints:
      self.checkpoints.wait()
    if not self.evaluations and status != 'interrupted':
      # A run that was already finished: nothing is written twice.
      self.evaluations = self.programs[index].evaluate(state, self.summarize)
    return Result(
      state, step, status, self.recorder.metrics, self.evaluations,
      self.recorder.diverged, costs,
    )  # fmt: skip

  def _evaluates(self, index: int, ends: Sequence[int]) -> bool:
    """Whether anything is evaluated in a stage: the last one always is."""
    if self.stop is not None or index == len(ends) - 1:
      return True
    every, end = self.options.eval_every, ends[index]
    begin = end - self.stages[index].steps
    return every > 0 and end // every > begin // every

  def _stops(self, metrics: dict[str, Any]) -> bool:
    return self.stop is not None and bool(self.stop(metrics))

  def _initial(self, index: int) -> Any:
    """The state to start from: fresh, or of the newest checkpoint."""
    if not self.checkpoints or self.checkpoints.latest is None:
      return self.programs[0].init()
    return self.checkpoints.restore(
      self.resumed.step, self.programs[index].shapes
    )

  def _enter(self, index: int, state: Any) -> Any:
    """The state at a stage's boundary, laid out for that stage."""
    stage, shapes = self.stages[index], self.programs[index].shapes
    if stage.enter is not None:
      state = stage.enter(state, stage.data)
    describe = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    if describe(state) != describe(shapes):
      raise ValueError(
        f'stage {stage.name!r}: enter must return a state with the structure'
        f" and shapes of the stage's init, {describe(shapes)}, but it returned"
        f' {describe(state)}'
      )
    # A copy: the step donates its state, and two leaves may share an array.
    return jax.tree.map(
      lambda x, s: jnp.copy(jax.device_put(x, s.sharding)), state, shapes
    )

  def _stage(
    self, index: int, state: Any, step: int, ends: Sequence[int]
  ) -> tuple[Any, int, str]:
    """The loop itself, from `step` to the end of the stage."""
    program, folds = self.programs[index], self.options.steps_per_call
    starts = range(step, ends[index], folds)
    flight: collections.deque = collections.deque()
    with (
      contextlib.closing(_batches(program, starts)) as batches,
      profiled(self.options.profile, self.workdir) as profile,
    ):
      self.chronometer.start(step)
      for start, batch in zip(starts, batches, strict=True):
        if self.request.asked():
          if flight:
            saving = frozenset({'save'})
            self._boundary(index, state, flight[-1], start, saving, ends[-1])
          return state, start, 'interrupted'
        profile(start, folds)
        with jax.profiler.StepTraceAnnotation('train', step_num=start):
          state, metrics = program.step(state, batch)
        flight.append(metrics)
        if len(flight) > self.options.max_in_flight:
          jax.block_until_ready(flight.popleft())
        step = start + folds
        due = self.options.due(step) if step < ends[-1] else ALL
        if due and self._boundary(index, state, metrics, step, due, ends[-1]):
          return state, step, 'stopped'
    return state, step, 'finished'

  def _boundary(
    self, index: int, state: Any, metrics: Any, step: int, due: frozenset[str],
    total: int,
  ) -> bool:  # fmt: skip
    """Reads, evaluates, writes and saves what is due; whether to stop."""
    self.chronometer.pause(jax.block_until_ready(metrics), step)
    # Whatever is due: a state that diverged must not be saved.
    self.recorder.read(metrics, step)
    row, stop = {}, False
    if 'log' in due:
      row = self.recorder.metrics | self.chronometer.read(step, total)
      stop = self._stops(self.recorder.metrics)
      if self.checkpoints:
        self.checkpoints.check()
    if 'eval' in due or stop:
      self.evaluations = self.programs[index].evaluate(state, self.summarize)
      row = row | evaluation_metrics(self.evaluations, self.recorder.runs)
    if row:
      self.recorder.write(step, row)
    if 'save' in due or stop:
      self._save(index, state, step, stop)
    self.chronometer.start(step)
    return stop

  def _save(
    self, index: int, state: Any, step: int, stopped: bool = False
  ) -> None:
    if self.checkpoints:
      meta = Meta(
        step, index, self.identity, self.stages[index].fingerprint,
        self.chronometer.progress, self.recorder.metrics, stopped,
      )  # fmt: skip
      self.checkpoints.save(state, meta)


def _batches(program: Program, starts: range) -> Generator[Any, None, None]:
  """The loaded batch of each call, ahead of time where there is one."""
  if program.data is None:
    return (program.load(start) for start in starts)
  return prefetch(program.load, iter(starts))

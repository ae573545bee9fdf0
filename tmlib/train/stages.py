"""Stages: the parts of a run that have their own method."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tmlib.options import Options
from tmlib.train.checkpoint import Meta, check_resume
from tmlib.train.data import Data
from tmlib.train.method import Build

__all__ = ['Stage', 'check_stages', 'cut_stages', 'plan_stages']


class Stage(NamedTuple):
  """A part of a run with its own method.

  Attributes:
    name: for messages.
    steps: updates in this stage.
    build: its method.
    enter: (state, data) -> state, run once at the boundary, on the state that
      the stage before left; its result must have the structure of this stage's
      own `init`. None takes the state as it is. With runs, the state has a
      leading run axis.
    data: its stream; None takes the one given to `fit`.
  """

  name: str
  steps: int
  build: Build
  enter: Callable[[Any, Data | None], Any] | None = None
  data: Data | None = None

  @property
  def fingerprint(self) -> dict[str, Any]:
    """Of its stream; empty for a method without data."""
    return {} if self.data is None else self.data.fingerprint


def plan_stages(
  build: Build | None,
  steps: int | None,
  stages: Sequence[Stage],
  data: Data | None,
) -> list[Stage]:
  """The stages of a run; one where `build` and `steps` are given instead.

  Raises:
    ValueError: if neither or both are given.
  """
  if not stages:
    if build is None or steps is None:
      raise ValueError('give build and steps, or stages')
    return [Stage('main', steps, build, None, data)]
  if build is not None or steps is not None:
    raise ValueError('stages bring their own build and steps; drop these')
  return [stage._replace(data=stage.data or data) for stage in stages]


def check_stages(
  meta: Meta,
  stages: Sequence[Stage],
  identity: Mapping[str, Any],
  options: Options,
  evaluate_only: bool,
) -> None:
  """Refuses a checkpoint that the run asked for cannot go on from.

  Raises:
    ValueError: for another experiment, a step outside its stage, or updates
      per call that do not divide the step.
  """
  stage = stages[min(meta.stage, len(stages) - 1)]
  check_resume(meta, identity, stage.fingerprint, options.allow_config_change)
  ends = list(itertools.accumulate(stage.steps for stage in stages))
  begin = sum(stage.steps for stage in stages[: meta.stage])
  last = meta.stage >= len(stages) - 1
  if meta.stage >= len(stages) or not (
    begin <= meta.step and (last or meta.step <= ends[meta.stage])
  ):
    raise ValueError(
      f'the checkpoint at step {meta.step} is in stage {meta.stage}, but the'
      f' stages now end at steps {ends}; keep the steps of the stages that were'
      ' begun, or use another workdir'
    )
  if not evaluate_only and meta.step > ends[-1]:
    raise ValueError(
      f'steps={ends[-1]}, but the run found has done {meta.step}; ask for at'
      ' least as many, use another workdir, or only evaluate'
    )
  if not evaluate_only and meta.step % options.steps_per_call:
    raise ValueError(
      f'steps_per_call={options.steps_per_call} does not divide the step'
      f' {meta.step} of the checkpoint; pass one that does'
    )


def cut_stages(stages: Sequence[Stage], steps: int) -> list[Stage]:
  """The stages, the last one ended so that `steps` are done in all."""
  before = sum(stage.steps for stage in stages[:-1])
  return [*stages[:-1], stages[-1]._replace(steps=steps - before)]

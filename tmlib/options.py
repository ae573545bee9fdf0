"""How a run is carried out, as opposed to what is trained."""

import dataclasses
from collections.abc import Mapping
from typing import Any

__all__ = ['ALL', 'Options']

# What can be due at a step; all of it is after the last one.
ALL = frozenset({'log', 'eval', 'save'})


@dataclasses.dataclass(frozen=True)
class Options:
  """Operational options of `fit`; none of them changes the mathematics.

  Attributes:
    parallel: 'jit' (global view) or 'pmap' (per-device view).
    mesh: devices along ('run', 'data', 'model'); 0 = as many as fit.
    rules: sharding rules, pairs (regex, action); see `layout.parse_rules`.
    log_every: steps between reads of the metrics.
    eval_every: steps between evaluations; 0 = only at the end.
    save_every: steps between checkpoints; 0 = only at the end.
    keep: checkpoints kept.
    steps_per_call: cheap updates folded into one compiled call.
    max_in_flight: calls dispatched before the oldest is waited for.
    profile: (first, last) steps to profile, or ().
    compilation_cache: folder of JAX's persistent cache, '' for none.
    quick_compile: on CPUs, prefer compiling in less time to running in less,
      where the compiler offers it (jax 0.10): for tiny runs.
    allow_config_change: resume although the experiment changed.
  """

  parallel: str = 'jit'
  mesh: tuple[int, ...] = (0, 0, 1)
  rules: tuple[tuple[str, str], ...] = ()
  log_every: int = 50
  eval_every: int = 0
  save_every: int = 0
  keep: int = 3
  steps_per_call: int = 1
  max_in_flight: int = 2
  profile: tuple[int, ...] = ()
  compilation_cache: str = ''
  quick_compile: bool = False
  allow_config_change: bool = False

  @classmethod
  def from_config(cls, config: Mapping[str, Any], **changes) -> 'Options':
    """The fields of a config that are options; others are ignored."""
    names = {field.name for field in dataclasses.fields(cls)}
    found = {k: v for k, v in config.items() if k in names}
    return cls(**(found | changes))

  def due(self, step: int) -> frozenset[str]:
    """What is due after `step` updates: of 'log', 'eval', 'save'."""
    every = {
      'log': self.log_every,
      'eval': self.eval_every,
      'save': self.save_every,
    }
    return frozenset(k for k, n in every.items() if n and step % n == 0)

  def check(self, stage: str, steps: int) -> None:
    """Raises ValueError, naming the field, if a number does not fit."""
    for name in ('log_every', 'steps_per_call', 'max_in_flight', 'keep'):
      if getattr(self, name) < 1:
        raise ValueError(
          f'{name} must be at least 1, got {getattr(self, name)}'
        )
    for name in ('eval_every', 'save_every'):
      if getattr(self, name) < 0:
        raise ValueError(
          f'{name} must be at least 0, got {getattr(self, name)}'
        )
    if len(self.mesh) != 3:
      raise ValueError(f'mesh must be (run, data, model), got {self.mesh}')
    window = self.profile
    if window and not (len(window) == 2 and 0 <= window[0] < window[1]):
      raise ValueError(f'profile must be (first, last) or (), got {window}')
    if steps < 0:
      raise ValueError(
        f'stage {stage!r}: steps must be at least 0, got {steps}'
      )
    size = self.steps_per_call
    counts = {
      f'steps of stage {stage!r}': steps,
      'log_every': self.log_every,
      'eval_every': self.eval_every,
      'save_every': self.save_every,
    }
    for name, count in counts.items():
      if count % size:
        raise ValueError(
          f'steps_per_call={size} does not divide {name} = {count}; change one'
          ' of them'
        )

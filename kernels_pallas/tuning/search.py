"""The best of several configurations, on a device or without one."""

import math
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax

from kernels_pallas.tuning.chips import Chip, find_chip
from kernels_pallas.tuning.kernels import find_kernels
from kernels_pallas.tuning.profiles import profile

__all__ = ['Ranked', 'autotune']


class Ranked(NamedTuple):
  """A configuration and what it costs.

  Attributes:
    config: as it was given.
    cost: seconds or cycles; infinite where it does not compile, or where the
      number of grid steps depends on data and there is no device.
    unit: 'seconds' (measured), 'cycles' (the compiler's estimate) or 'bundles'
      (instructions of the loop times grid steps, where there is no estimate).
    reason: why it has no cost.
  """

  config: Any
  cost: float
  unit: str
  reason: str = ''


def _first_line(error: Exception) -> str:
  return f'{type(error).__name__}: {str(error).splitlines()[0][:300]}'


def _measure(
  make: Callable[[Any], Callable[..., Any]],
  configs: list[Any],
  operands: tuple[Any, ...],
  repeats: int,
) -> list[Ranked]:
  """Median seconds of each, in turns, after one call that warms up."""
  programs, failed = {}, []
  for n, config in enumerate(configs):
    try:
      program = jax.jit(make(config)).lower(*operands).compile()
      jax.block_until_ready(program(*operands))
      programs[n] = program
    except Exception as error:  # Any refusal only rules this one out.
      failed.append(Ranked(config, math.inf, 'seconds', _first_line(error)))
  seconds = {n: [] for n in programs}
  for _ in range(repeats):
    for n, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*operands))
      seconds[n].append(time.perf_counter() - start)
  return failed + [
    Ranked(configs[n], statistics.median(s), 'seconds')
    for n, s in seconds.items()
  ]


def _estimate(
  function: Callable[..., Any],
  config: Any,
  operands: tuple[Any, ...],
  chip: Chip,
) -> Ranked:
  """Estimated cycles of all kernels of one configuration."""
  try:
    kernels = find_kernels(function, operands, chip)
  except Exception as error:  # As above.
    return Ranked(config, math.inf, 'cycles', _first_line(error))
  if not kernels:
    return Ranked(config, math.inf, 'cycles', 'runs no Pallas kernel there')
  if not all(isinstance(size, int) for k in kernels for size in k.grid):
    why = 'how many steps there are depends on data; measure on a device'
    return Ranked(config, math.inf, 'cycles', why)
  profiles = [profile(kernel, chip) for kernel in kernels]
  for found in profiles:
    if not found.compiles:
      return Ranked(config, math.inf, 'cycles', found.reason)
  cycles = [found.cycles for found in profiles]
  known = [x for x in cycles if x is not None]
  if len(known) == len(cycles):
    return Ranked(config, float(sum(known)), 'cycles')
  bundles = [
    (found.bundles or 0) * kernel.steps
    for found, kernel in zip(profiles, kernels, strict=True)
  ]
  return Ranked(config, float(sum(bundles)), 'bundles', profiles[0].reason)


def autotune(
  make: Callable[[Any], Callable[..., Any]],
  configs: Iterable[Any],
  operands: tuple[Any, ...],
  *,
  chip: str | None = None,
  repeats: int = 5,
) -> list[Ranked]:
  """Ranks configurations of a function, the cheapest first.

    best = autotune(
      lambda blocks: partial(attention, causal=True, blocks=blocks),
      [Blocks(512, 512), Blocks(1024, 1024)], (q, k, v), chip='v5e')[0].config

  Args:
    make: a configuration to a function of arrays.
    configs: to choose from.
    operands: arguments of the function; with `chip`, shapes are enough.
    chip: None measures on the default device. The name of a TPU ranks by the
      static cycles of the kernels (extra `aot`; a process each; what lies
      around the kernels does not count), and for v4, whose compiler estimates
      none, by instructions times grid steps.
    repeats: measured calls of each.

  Returns:
    One `Ranked` per configuration; those without a cost come last.

  Raises:
    ValueError: if there is nothing to choose from, on an unknown chip, and for
      a GPU that is not there: no compiler estimates its cycles.
    ImportError: if the compiler of that chip is not installed.
  """
  configs = list(configs)
  if not configs:
    raise ValueError('configs is empty; name at least one')
  if repeats < 1:
    raise ValueError(f'repeats={repeats} must be at least 1')
  if chip is None:
    return sorted(
      _measure(make, configs, operands, repeats), key=lambda x: x.cost
    )
  target = find_chip(chip)
  if target.platform != 'tpu':
    raise ValueError(
      f'chip={chip!r}: no compiler estimates cycles of a GPU; run on one with '
      'chip=None'
    )
  ranked = [_estimate(make(c), c, operands, target) for c in configs]
  # Bundles are no cycles: one without an estimate ranks behind those with it.
  return sorted(
    ranked, key=lambda x: (math.isinf(x.cost), x.unit != 'cycles', x.cost)
  )

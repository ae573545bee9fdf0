"""A profiler window over some steps."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

__all__ = ['profiled']


@contextlib.contextmanager
def profiled(
  window: tuple[int, ...], workdir: Path | None
) -> Iterator[Callable[[int, int], None]]:
  """Yields a function to call with (step, count) before each call of the step.

  Args:
    window: (first, last): calls that do any of these steps are traced, the
      last excluded; () for nothing.
    workdir: the trace goes to `<workdir>/profile`; None traces nothing.
  """
  running = False

  def at(step: int, count: int) -> None:
    nonlocal running
    if not window or workdir is None:
      return
    inside = step < window[1] and step + count > window[0]
    if inside and not running:
      jax.profiler.start_trace(str(workdir / 'profile'))
    if running and not inside:
      jax.profiler.stop_trace()
    running = inside

  try:
    yield at
  finally:
    if running:
      jax.profiler.stop_trace()

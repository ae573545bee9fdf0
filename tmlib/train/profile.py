"""A profiler window over some steps."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import jax

__all__ = ['profiled']


@contextlib.contextmanager
def profiled(
  window: tuple[int, ...], workdir: Path | None
) -> Iterator[Callable[[int], None]]:
  """Yields a function to call with each step; traces those in the window.

  Args:
    window: (first, last) steps, or () for nothing.
    workdir: the trace goes to `<workdir>/profile`; None traces nothing.
  """
  running = False

  def at(step: int) -> None:
    nonlocal running
    if not window or workdir is None:
      return
    inside = window[0] <= step < window[1]
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

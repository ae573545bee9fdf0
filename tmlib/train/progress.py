"""How far, how fast, how long: a chronometer that survives a resume."""

import time
from typing import Any

__all__ = ['Chronometer']


class Chronometer:
  """Counts the time of stepping, without compiling, evaluating and saving."""

  def __init__(self, seconds: float = 0.0, steps: int = 0):
    """`seconds` and `steps`: of earlier sessions, from `progress`."""
    self._seconds, self._steps = seconds, steps
    self._since: tuple[float, int] | None = None
    self._window = (0.0, 0)

  def start(self, step: int) -> None:
    """Starts or continues counting, at `step`."""
    self._since = (time.monotonic(), step)

  def pause(self, ready: Any, step: int) -> None:
    """Stops counting; `ready` makes the caller wait for the results first."""
    del ready
    if self._since is None:
      return
    begin, first = self._since
    seconds, steps = time.monotonic() - begin, step - first
    self._seconds += seconds
    self._steps += steps
    self._window = (self._window[0] + seconds, self._window[1] + steps)
    self._since = None

  def read(self, step: int, total: int) -> dict[str, float]:
    """Progress metrics, while paused.

    Returns:
      `progress/percent`; `progress/steps_per_second` since the last read;
      `progress/eta_seconds` at the mean speed of the whole run.
    """
    seconds, steps = self._window
    self._window = (0.0, 0)
    mean = self._seconds / max(self._steps, 1)
    return {
      'progress/percent': 100 * step / total,
      'progress/steps_per_second': steps / max(seconds, 1e-9),
      'progress/eta_seconds': (total - step) * mean,
    }

  @property
  def progress(self) -> dict[str, float]:
    """What a checkpoint keeps."""
    return {'seconds': self._seconds, 'steps': self._steps}

"""Checks of survival data, on the host."""

from typing import Any

import numpy as np

__all__ = ['check_survival']


def check_survival(time: Any, event: Any) -> tuple[np.ndarray, np.ndarray]:
  """Float64 times and boolean events.

  Args:
    time: [n].
    event: [n], bool or 0/1; 1 where an event was seen. Tables that hold a
      column "censorship" mean the opposite: pass 1 - censorship.

  Returns:
    time [n] float64, event [n] bool.

  Raises:
    ValueError: for shapes that disagree, no patient, times that are negative
      or not finite, or events other than 0 and 1.
  """
  time, event = np.asarray(time, float), np.asarray(event)
  if time.ndim != 1 or event.shape != time.shape:
    raise ValueError(
      f'time {time.shape} and event {event.shape} must both be [n]'
    )
  if not len(time):
    raise ValueError('there is no patient: time is empty')
  bad = np.flatnonzero(~np.isfinite(time) | (time < 0))
  if len(bad):
    raise ValueError(
      f'time[{bad[0]}] = {time[bad[0]]} is not a time; drop patients without '
      f'follow-up ({len(bad)} of {len(time)})'
    )
  if not np.isin(event, (0, 1)).all():
    wrong = event[~np.isin(event, (0, 1))][0]
    raise ValueError(f'event holds {wrong!r}; it must be 1 (seen) or 0 (not)')
  return time, event.astype(bool)

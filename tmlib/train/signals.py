"""SIGTERM and SIGINT: finish the step, save, leave cleanly."""

import contextlib
import itertools
import os
import signal
import threading
from collections.abc import Iterator

import jax

__all__ = ['StopRequest', 'stop_request']


class StopRequest:
  """Whether this run was asked to stop; agreed between processes."""

  def __init__(self):
    self._signal = 0

  def receive(self, number: int, frame=None) -> None:
    """Signal handler: the first signal asks, a second one ends at once."""
    del frame
    if self._signal:
      signal.signal(number, signal.SIG_DFL)
      os.kill(os.getpid(), number)
    self._signal = number
    if jax.process_count() > 1:  # only SIGINT comes here
      os.kill(os.getpid(), signal.SIGTERM)

  def asked(self) -> bool:
    """Whether to stop now; the same answer in every process.

    All processes must call it equally often: they agree on a call to come.
    """
    if jax.process_count() == 1:
      return bool(self._signal)
    from jax.experimental import multihost_utils

    # JAX waits for one exact number, so it may not skip any, nor start anew
    # with the next run of this process.
    return multihost_utils.reached_preemption_sync_point(next(_calls))


_calls = itertools.count()


@contextlib.contextmanager
def stop_request(active: bool) -> Iterator[StopRequest]:
  """Catches the signals while active; restores the handlers after.

  With several processes JAX's own preemption service listens for SIGTERM and
  agrees on a common step, so that only SIGINT needs a handler: it becomes
  SIGTERM.
  """
  request = StopRequest()
  if not active or threading.current_thread() is not threading.main_thread():
    yield request
    return
  caught = [signal.SIGINT]
  if jax.process_count() == 1:
    caught.append(signal.SIGTERM)
  previous = {n: signal.signal(n, request.receive) for n in caught}
  try:
    yield request
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)

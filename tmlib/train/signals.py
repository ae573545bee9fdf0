"""SIGTERM and SIGINT: finish the step, save, leave cleanly."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator

import jax
from absl import logging

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

  def asked(self, step: int) -> bool:
    """Whether to stop before `step`; the same answer in every process."""
    if jax.process_count() == 1:
      return bool(self._signal)
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


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
  handlers = {signal.SIGINT: request.receive, signal.SIGTERM: request.receive}
  if jax.process_count() > 1:
    forward = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    handlers = {signal.SIGINT: forward}
  previous = {n: signal.signal(n, h) for n, h in handlers.items()}
  try:
    yield request
  finally:
    for number, handler in previous.items():
      signal.signal(number, handler)
    if request.asked and request._signal:
      logging.info('stopped by %s', signal.Signals(request._signal).name)

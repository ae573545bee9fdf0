"""A thread that loads the coming batches and puts them on the devices."""

import queue
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

__all__ = ['prefetch']

_END = object()


def prefetch(
  load: Callable[[Any], Any], items: Iterator[Any]
) -> Generator[Any, None, None]:
  """Yields `load(item)` for each item, computed ahead by one thread.

  An error in `load` is raised at its place in the stream. Closing the iterator
  ends the thread, so that a failed run does not hang at exit.

  Args:
    load: called in the thread.
    items: consumed in the thread.

  Yields:
    The results, in order; at most two are held ready.
  """
  # JAX's setting belongs to a thread; without it float64 would become float32.
  x64 = jax.config.jax_enable_x64  # pyright: ignore[reportAttributeAccessIssue]
  ready: queue.Queue = queue.Queue(maxsize=2)
  closed = threading.Event()

  def put(item: Any) -> bool:
    while not closed.is_set():
      try:
        ready.put(item, timeout=0.1)
        return True
      except queue.Full:
        continue
    return False

  def work() -> None:
    try:
      for item in items:
        with jax.enable_x64(x64):
          loaded = load(item)
        if not put((loaded, None)):
          return
      put((_END, None))
    except BaseException as error:  # noqa: BLE001  (raised by the consumer)
      put((None, error))

  thread = threading.Thread(target=work, name='tmlib-prefetch', daemon=True)
  thread.start()
  try:
    while True:
      value, error = ready.get()
      if error is not None:
        raise error
      if value is _END:
        return
      yield value
  finally:
    closed.set()
    thread.join(timeout=10)

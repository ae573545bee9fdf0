"""Reads HDF5 files in a child process first: libhdf5 may crash on damage.

A damaged file can crash libhdf5, or send it round for ever, where no handler of
Python runs: in 2.0 the global heap, which holds strings of attributes, does
both. `H5Guard` has a child process, which imports h5py and NumPy only, read all
that `read_h5` would; when the child dies, the file is to blame.

This module is also the child's program and imports nothing of tmlib.
"""

import contextlib
import importlib.util
import json
import logging
import math
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ['COORDS', 'FEATURES', 'MOST_PER_BYTE', 'H5Guard', 'touch']

# Names under which datasets are found, first one first.
FEATURES = ('features', 'feats', 'embeddings')
COORDS = ('coords', 'coordinates')
# More than a compressed file of features ever unpacks to, per byte of file.
MOST_PER_BYTE = 2000

_READY, _DONE = b'ready\n', b'done\n'


class H5Guard:
  """A child process that reads a file before this process does.

  It starts at the first file and again after each crash; `close` ends it.
  Where no child can be started, files are read unguarded and a warning says so.

  Args:
    seconds: that a file may take, and one more per megabyte.
    program: what the child runs.
  """

  def __init__(self, seconds: float = 60.0, program: str | Path = __file__):
    self._seconds = seconds
    self._command = [sys.executable, '-P', str(program)]
    self._child: subprocess.Popen[bytes] | None = None
    self._useless = importlib.util.find_spec('h5py') is None

  def __enter__(self) -> 'H5Guard':
    return self

  def __exit__(self, *_: Any) -> None:
    self.close()

  def close(self) -> None:
    """Ends the child."""
    if self._child is not None:
      self._child.communicate()
      self._child = None

  def check(self, path: str | Path, full: bool = True) -> str:
    """Has the child read a file.

    Args:
      path: of the file.
      full: features and positions too, else only what describes them.

    Returns:
      '' if the child survived, else what is wrong with the file. An error that
      HDF5 reports is none here: reading the file again tells it.
    """
    child = self._started()
    if child is None:
      return ''
    try:
      limit = self._seconds + os.path.getsize(path) / 1e6
    except OSError:
      return ''
    request = json.dumps([os.fspath(path), full, limit]).encode() + b'\n'
    # Where the child has no alarm of its own (Windows), this is the limit.
    timer = threading.Timer(limit + 5, child.kill)
    timer.daemon = True
    timer.start()
    answer = self._answer(child, request)
    timer.cancel()
    if answer == _DONE:
      return ''
    self.close()
    code = child.returncode
    if code in (-signal.SIGTERM, -getattr(signal, 'SIGKILL', signal.SIGTERM)):
      return (
        f'{path} was not read: the process that reads it first was killed, for '
        'instance for want of memory; free some and start again'
      )
    how = f'crashed (exit status {code})'
    if code < 0 and -code == getattr(signal, 'SIGALRM', None):
      how = f'did not return in {limit:.0f} s'
    elif code < 0:
      how = f'crashed ({signal.Signals(-code).name})'
    return (
      f'{path} is damaged: the HDF5 library {how} while reading it; copy or '
      'extract it again'
    )

  def _started(self) -> subprocess.Popen[bytes] | None:
    if self._child is None and not self._useless:
      pipe = subprocess.PIPE
      try:
        child = subprocess.Popen(
          self._command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL
        )
      except OSError as error:
        self._give_up(error)
        return None
      if self._answer(child, b'') == _READY:
        self._child = child
      else:
        child.kill()
        child.communicate()
        self._give_up(f'exit status {child.returncode}')
    return self._child

  def _give_up(self, why: Any) -> None:
    self._useless = True
    logging.warning(
      'no child process to read HDF5 files first (%s): a damaged one may crash '
      'this process',
      why,
    )

  def _answer(self, child: subprocess.Popen[bytes], request: bytes) -> bytes:
    """The child's line, empty where it died."""
    if child.stdin is None or child.stdout is None:
      return b''
    try:
      child.stdin.write(request)
      child.stdin.flush()
    except OSError:
      return b''
    # A plugin may print as well.
    for line in child.stdout:
      for answer in (_READY, _DONE):
        if line.endswith(answer):
          return answer
    return b''


def touch(path: str, full: bool) -> None:
  """Reads what `read_h5` reads of a file, and forgets it."""
  import h5py

  most = MOST_PER_BYTE * os.path.getsize(path)
  with h5py.File(path, 'r') as file:
    list(file)
    with contextlib.suppress(Exception):
      dict(file.attrs.items())
    for name in FEATURES + COORDS:
      # Each on its own: what HDF5 reports of one must not hide another.
      with contextlib.suppress(Exception):
        found: Any = file[name] if name in file else None
        if not hasattr(found, 'shape') or not full:
          continue
        with contextlib.suppress(Exception):
          dict(found.attrs.items())
        if math.prod(found.shape) * found.dtype.itemsize <= most:
          found[()]


def _alarm(seconds: float) -> None:
  """Ends this process then, wherever it is, even if its parent is gone."""
  if hasattr(signal, 'setitimer'):  # not on Windows
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _serve() -> None:
  """Answers a line for each request, until there are no more."""
  # Only answers go to the parent: what else is printed joins the errors.
  out = os.fdopen(os.dup(1), 'wb')
  os.dup2(2, 1)
  import h5py  # noqa: F401  (before the first answer: a guard without it fails)

  out.write(_READY)
  out.flush()
  for line in sys.stdin.buffer:
    path, full, seconds = json.loads(line)
    _alarm(seconds)
    try:
      touch(path, full)
    except Exception:  # noqa: S110  (told by whoever reads the file next)
      pass
    _alarm(0)
    out.write(_DONE)
    out.flush()


if __name__ == '__main__':
  _serve()

"""What lies near a path that does not exist."""

import difflib
from collections.abc import Sequence
from pathlib import Path

__all__ = ['near']


def near(path: Path, suffixes: Sequence[str] = ()) -> str:
  """The end of an error message: what was perhaps meant, or what is there.

  Args:
    path: does not exist.
    suffixes: of the files that would do; without any, a folder is wanted.

  Returns:
    '; did you mean ...?' or '; PARENT has ...'.
  """
  parent = path.parent
  while not parent.is_dir() and parent != parent.parent:
    parent = parent.parent
  wants_file = suffixes and parent == path.parent
  known = [
    one.name
    for one in parent.iterdir()
    if (one.suffix.lower() in suffixes if wants_file else one.is_dir())
  ]
  part = path.relative_to(parent).parts[0]
  close = difflib.get_close_matches(part, known, 2, 0.6)
  if close:
    return f'; did you mean {" or ".join(str(parent / c) for c in close)}?'
  kind = 'table' if wants_file else 'folder'
  return f'; {parent} has {", ".join(sorted(known)[:6]) or f"no {kind}"}'

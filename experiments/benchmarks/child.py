"""A measurement in a process of its own, also of another interpreter."""

import json
import subprocess
import sys
from typing import Any

__all__ = ['measured']


def measured(script: str, task: str, python: str) -> Any:
  """Runs `script` again with `--only=TASK` and reads its last line as JSON.

  Args:
    script: path of a benchmark; its own arguments are passed on.
    task: of that process.
    python: interpreter.

  Returns:
    What it printed; None where a module is missing there.

  Raises:
    RuntimeError: it failed otherwise; the message is the end of its errors.
  """
  command = [python, script, *sys.argv[1:], f'--only={task}']
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  if done.returncode and 'No module named' in done.stderr:
    return None
  if done.returncode:
    raise RuntimeError(done.stderr[-2000:])
  return json.loads(done.stdout.splitlines()[-1])

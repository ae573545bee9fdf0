"""One-line answers to mistyped flags and configs; imports nothing heavy.

`parse` is the `flags_parser` of `absl.app.run`. A mistake ends the program
with one line on stderr and exit code 2, before jax is imported.
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import logging
import os
import pathlib
import re
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from absl import flags
from ml_collections import config_dict

__all__ = [
  'connect',
  'fail',
  'guard',
  'integers',
  'is_expected',
  'launch',
  'load_config',
  'parse',
  'quicken',
  'runner',
  'unknown_field',
]

_ROOT = pathlib.Path(__file__).resolve().parent.parent
_OWNERS = ('tmlib', 'kernels_pallas', 'experiments', 'configs')
_OVERRIDE = re.compile(r'-{1,2}(?:no)?config\.([^=]+)')
_HELP = {'-h', '-help', '--help', '--helpshort', '--helpfull'}


def fail(message: str) -> NoReturn:
  """Prints `error: <message>` as one line and exits with code 2."""
  sys.stderr.write('error: ' + ' '.join(str(message).split()) + '\n')
  sys.exit(2)


def is_expected(error: Exception) -> bool:
  """Whether `error` tells a user's mistake, so that one line says it all.

  Args:
    error: an exception that was caught.

  Returns:
    True for OSError, and for a ValueError, TypeError or ModuleNotFoundError
    that this project's own code raised; one from the inside of a dependency may
    be our bug.
  """
  if isinstance(error, OSError):
    return True
  known = ValueError | TypeError | ModuleNotFoundError
  frames = traceback.extract_tb(error.__traceback__)
  if not isinstance(error, known) or not frames:
    return False
  return _ours(frames[-1].filename)


def _ours(filename: str) -> bool:
  path = pathlib.Path(filename)
  return any(path.is_relative_to(_ROOT / owner) for owner in _OWNERS)


def guard(call: Callable[[], Any], show_traceback: bool) -> Any:
  """Returns `call()`; an expected error becomes one line and exit code 2."""
  _quiet()
  try:
    return call()
  except Exception as error:
    if show_traceback or not is_expected(error):
      raise
    fail(f'{error} (--traceback shows where)')


def _quiet() -> None:
  """Drops what other packages say at level INFO through absl's logger."""
  from absl import logging as absl_logging

  absl_logging.get_absl_handler().addFilter(
    lambda record: record.levelno > logging.INFO or _ours(record.pathname)
  )


def _meant(name: str, known: Iterable[str]) -> str:
  close = difflib.get_close_matches(name, list(known), 2, 0.6)
  return f'; did you mean {" or ".join(close)}?' if close else ''


def integers(flag: str, words: Sequence[str], count: int) -> tuple[int, ...]:
  """`count` numbers of at least zero from the words of a list flag."""
  if len(words) != count or not all(word.strip().isdigit() for word in words):
    text = ','.join(words)
    raise ValueError(f'--{flag}={text}: {count} numbers, joined by commas')
  return tuple(int(word) for word in words)


def _get(config: Any, keys: Iterable[str]) -> Any:
  for key in keys:
    config = config[key]
  return config


def _leaves(config: config_dict.ConfigDict, prefix: str = '') -> list[str]:
  names = []
  for key, value in config.items():
    if isinstance(value, config_dict.ConfigDict):
      names += _leaves(value, f'{prefix}{key}.')
    else:
      names.append(prefix + key)
  return names


def _close_fields(
  config: config_dict.ConfigDict, parts: Sequence[str], depth: int
) -> str:
  """A did-you-mean for parts[depth], which its level does not have."""
  level = _get(config, parts[:depth])
  fixed = difflib.get_close_matches(parts[depth], list(level), 1, 0.6)
  if fixed:
    return f'; did you mean {".".join([*parts[:depth], *fixed])}?'
  # Right name, wrong level: steps for train.steps.
  ends = {name.rpartition('.')[2]: name for name in _leaves(config)}
  close = difflib.get_close_matches(parts[-1], list(ends), 2, 0.7)
  names = ' or '.join(ends[name] for name in close)
  return f'; did you mean {names}?' if names else ''


def unknown_field(config: config_dict.ConfigDict, path: str) -> str | None:
  """Says what is wrong with an override path, or None where it exists.

  Args:
    config: the config as its file defines it.
    path: dotted path, such as 'train.steps'.

  Returns:
    One line with the closest fields of the whole config and the fields of
    the level at which the path leaves it.
  """
  parts = path.split('.')
  node: Any = config
  for depth, part in enumerate(parts):
    if '[' in part:
      return f'{path!r}: a tuple is set as a whole, for example "(1, 2)"'
    if not isinstance(node, config_dict.ConfigDict):
      parent = '.'.join(parts[:depth])
      return f'config field {parent!r} holds a value, it has no field {part!r}'
    if part not in node:
      level = '.'.join(['config', *parts[:depth]])
      hint = _close_fields(config, parts, depth)
      return (
        f'unknown config field {path!r}{hint}'
        f' ({level} has: {", ".join(sorted(node))})'
      )
    node = node[part]
  return None


def load_config(spec: str) -> config_dict.ConfigDict:
  """Loads `FILE` or `FILE:ARG` and returns its get_config()."""
  path, colon, arg = spec.partition(':')
  module_spec = importlib.util.spec_from_file_location('config_file', path)
  if module_spec is None or module_spec.loader is None:
    raise ValueError(f'--config={spec}: not a Python file')
  module = importlib.util.module_from_spec(module_spec)
  module_spec.loader.exec_module(module)
  return module.get_config(*([arg] if colon else []))


def _flag_value(argv: Sequence[str], name: str) -> str | None:
  for i, argument in enumerate(argv):
    head, equals, value = argument.lstrip('-').partition('=')
    if argument.startswith('-') and head == name:
      return value if equals else (argv[i + 1] if argv[i + 1 :] else None)
  return None


def _check_config(spec: str) -> None:
  """Answers a missing config file or a bad argument to its get_config."""
  path = pathlib.Path(spec.partition(':')[0])
  if path.is_file():
    try:
      load_config(spec)
    except (ValueError, TypeError) as error:
      fail(f'--config={spec}: {error}')
    return
  folder = path.parent if path.parent.is_dir() else _ROOT / 'configs'
  known = {p.stem: p for p in sorted(folder.glob('*.py'))}
  known = {stem: p for stem, p in known.items() if not stem.startswith('_')}
  close = difflib.get_close_matches(path.stem, list(known), 3, 0.6)
  names = ' or '.join(os.path.relpath(known[stem]) for stem in close)
  hint = f'; did you mean {names}?' if names else ''
  there = f' ({folder} has: {", ".join(known)})' if known else ''
  fail(f'--config: no file {str(path)!r}{hint}{there}')


def _check_choice(argv: Sequence[str], name: str) -> None:
  value = _flag_value(argv, name)
  known = getattr(flags.FLAGS[name].parser, 'enum_values', ())
  if value is not None and value not in known:
    hint = _meant(value, known)
    fail(f'--{name}={value}: allowed are {", ".join(known)}{hint}')


def _overrides(argv: Sequence[str]) -> list[str]:
  return [m.group(1) for a in argv if (m := _OVERRIDE.match(a))]


def _explain(error: Exception, argv: Sequence[str]) -> str:
  """The line to print for an error that flag parsing raised."""
  text = str(error)
  missing = re.findall(r'Flag (--\w+) must have a value', text)
  if missing:
    return f'{" and ".join(missing)} must be given (--help shows an example)'
  spec = _flag_value(argv, 'config')
  config = load_config(spec) if spec and _overrides(argv) else None
  if config is None:
    return text
  for path in _overrides(argv):
    problem = unknown_field(config, path)
    if problem:
      return problem
  unsupported = re.search(r'Type (.*) of field (\S+) is not', text)
  if unsupported:
    return f'{unsupported[2]} holds {unsupported[1]}, which no flag can set'
  wrong = re.match(r'flag --config\.([^=]+)=(.*?): ', text)
  if wrong:
    return _wrong_type(config, *wrong.groups())
  return text


def _wrong_type(config: config_dict.ConfigDict, path: str, value: Any) -> str:
  *parents, key = path.split('.')
  node = _get(config, parents)
  kind = node.get_type(key)
  if issubclass(kind, config_dict.ConfigDict):
    return f'config field {path!r} is a group; set one of its fields'
  return (
    f'config field {path!r} takes {kind.__name__} (default {node[key]!r}), '
    f'not {value!r}'
  )


def _check_tuples(argv: Sequence[str]) -> None:
  """Refuses tuple elements of another type: ml_collections takes any."""
  spec = _flag_value(argv, 'config')
  if not spec or not _overrides(argv):
    return
  before, after = load_config(spec), flags.FLAGS['config'].value
  for path in _overrides(argv):
    keys = path.split('.')
    old, new = _get(before, keys), _get(after, keys)
    if not isinstance(old, tuple) or not old:
      continue
    kinds = {type(x) for x in old}
    kinds |= {int} if float in kinds else set()
    if any(type(x) not in kinds for x in new):
      fail(_wrong_type(before, path, new))


def parse(argv: Sequence[str]) -> list[str]:
  """Parses `argv` into `flags.FLAGS`; a mistake is one line and exit code 2.

  Args:
    argv: program name and arguments, as in sys.argv.

  Returns:
    The program name alone: positional arguments are refused.
  """
  if _HELP & {*argv}:
    sys.stdout.write(sys.modules['__main__'].__doc__ or '')
    sys.stdout.write(flags.FLAGS.main_module_help() + '\n')
    sys.exit(0)
  spec = _flag_value(argv, 'config')
  if spec:
    _check_config(spec)
  for name in ('mode', 'parallel', 'shard'):
    if name in flags.FLAGS:
      _check_choice(argv, name)
  try:
    rest = flags.FLAGS(argv)
  except Exception as error:
    # ml_collections raises KeyError, AttributeError and others from here.
    fail(_explain(error, argv))
  _check_tuples(argv)
  if rest[1:]:
    fail(f'unexpected argument {rest[1]!r}; a flag looks like --name=value')
  return rest


def runner(config: config_dict.ConfigDict) -> types.ModuleType:
  """Imports the runner module experiments/<config.experiment>.py.

  Raises:
    ValueError: where the config names no runner.
  """
  name = config.get('experiment')
  if (
    not isinstance(name, str)
    or not (_ROOT / 'experiments' / f'{name}.py').is_file()
  ):
    known = sorted(p.stem for p in (_ROOT / 'experiments').glob('*.py'))
    raise ValueError(
      f'config.experiment={name!r} names no file experiments/NAME.py'
      + _meant(str(name), known)
    )
  return importlib.import_module(f'experiments.{name}')


def launch(run: Callable[..., int], values: flags.FlagValues) -> int:
  """Hands the runner of the config to `run`.

  Args:
    run: `tmlib.train.run`.
    values: the parsed flags.

  Returns:
    Exit code.
  """
  module, workdir = runner(values.config), pathlib.Path(values.workdir)
  if values.mode == 'predict' and hasattr(module, 'predict'):
    # Data that training has not seen, such as slides without labels.
    return module.predict(values.config, workdir)
  make = module.make
  if 'workdir' in inspect.signature(make).parameters and values.workdir:
    make = functools.partial(make, workdir=workdir)
  return run(
    make,
    values.config,
    workdir=values.workdir,
    mode=values.mode,
    allow_config_change=values.allow_config_change,
  )


def quicken(spec: str) -> None:
  """For a `tiny` config: has XLA compile in half the time, to slower programs.

  A tiny run is nearly all compilation. To be called before jax is imported; an
  optimisation level that is set in XLA_FLAGS already stays.

  Args:
    spec: value of --config.
  """
  words = os.environ.get('XLA_FLAGS', '')
  level = '--xla_backend_optimization_level'
  if spec.partition(':')[2] == 'tiny' and level not in words:
    os.environ['XLA_FLAGS'] = f'{words} {level}=0'.strip()


def connect() -> None:
  """Joins the other processes of this run by jax.distributed.

  JAX detects Slurm, Kubernetes and TPU pods. Elsewhere JAX_COORDINATOR_ADDRESS
  (host:port of process 0), JAX_NUM_PROCESSES and JAX_PROCESS_ID say it.

  Raises:
    ValueError: where neither a cluster nor these variables are found.
  """
  import jax

  names = ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')
  values = [os.environ.get(name) for name in names]
  if any(values) and not all([*values, os.getenv('JAX_COORDINATOR_ADDRESS')]):
    raise ValueError(
      '--distributed needs all of JAX_COORDINATOR_ADDRESS, '
      + ', '.join(names)
      + ', or none of them on a cluster that JAX detects'
    )
  count, index = (None if value is None else int(value) for value in values)
  try:
    jax.distributed.initialize(num_processes=count, process_id=index)
  except (ValueError, RuntimeError) as error:
    raise ValueError(
      f'--distributed: {error} Set JAX_COORDINATOR_ADDRESS (host:port of '
      f'process 0), {" and ".join(names)} where JAX detects no cluster.'
    ) from error

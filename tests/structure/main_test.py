"""main.py answers mistakes in one line, fast, from any folder."""

import json
import os
import pathlib
import subprocess
import sys
import time

import pytest
from ml_collections import config_dict

from experiments import cli

ROOT = pathlib.Path(__file__).resolve().parents[2]
MAIN = ROOT / 'experiments' / 'main.py'

CONFIG = """
from ml_collections import config_dict

def get_config(arg=None):
  if arg not in (None, 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed are None and tiny')
  return config_dict.ConfigDict({
    'experiment': 'no_such_runner',
    'model': {'dim': 3, 'layers': (3, 4)},
    'train': {'steps': 10, 'lr': 1e-3},
  })
"""


@pytest.mark.parametrize(
  ('spec', 'before', 'after'),
  [
    ('a.py:tiny', '', '--xla_backend_optimization_level=0'),
    ('a.py:tiny', '--x=1', '--x=1 --xla_backend_optimization_level=0'),
    ('a.py:tiny', '--xla_backend_optimization_level=2', None),
    ('a.py', '', None),
    ('tiny.py:full', '', None),
  ],
)
def test_only_tiny_programs_are_not_optimised(monkeypatch, spec, before, after):
  monkeypatch.setenv('XLA_FLAGS', before)
  cli.quicken(spec)
  assert os.environ['XLA_FLAGS'] == (before if after is None else after)


def answer(folder, *arguments):
  start = time.perf_counter()
  result = subprocess.run(
    [sys.executable, str(MAIN), *arguments],
    cwd=folder,
    capture_output=True,
    text=True,
    stdin=subprocess.DEVNULL,
    timeout=60,
    check=False,
  )
  return result, time.perf_counter() - start


@pytest.fixture(name='folder')
def folder_fixture(tmp_path):
  (tmp_path / 'blobs.py').write_text(CONFIG, encoding='utf-8')
  return tmp_path


GOOD = ('--config=blobs.py', '--workdir=w')


@pytest.mark.parametrize(
  ('arguments', 'words'),
  [
    ((*GOOD, '--wokdir=x'), ["'wokdir'", 'workdir']),
    ((*GOOD, '--config.train.stps=1'), ['train.stps', 'train.steps']),
    ((*GOOD, '--config.trian.steps=1'), ['trian.steps', 'train']),
    ((*GOOD, '--config.stepps=1'), ['stepps', 'train.steps']),
    ((*GOOD, '--config.train.steps=ten'), ['train.steps', 'int', 'ten']),
    ((*GOOD, '--config.train.steps=1.5'), ['train.steps', 'int', '1.5']),
    ((*GOOD, '--config.model.layers=(a,b)'), ['model.layers', 'tuple']),
    ((*GOOD, '--config.model.layers[0]=2'), ['model.layers[0]', 'whole']),
    ((*GOOD, '--config.train=3'), ["'train'", 'group']),
    ((*GOOD, '--config.train.steps.x=3'), ['train.steps', 'holds a value']),
    (('--config=blob.py', '--workdir=w'), ["'blob.py'", 'blobs.py']),
    (('--config=blobs.py:tyni', '--workdir=w'), ['tyni', 'tiny']),
    ((*GOOD, '--mode=trian'), ['trian', 'predict', 'mean train']),
    ((*GOOD, 'extra'), ["'extra'", '--name=value']),
    (('--config=blobs.py',), ['--workdir']),
    ((), ['--config', '--workdir']),
  ],
)
def test_a_mistake_is_one_line(folder, arguments, words):
  result, _ = answer(folder, *arguments)
  lines = result.stderr.splitlines()
  assert result.returncode == 2
  assert len(lines) == 1, result.stderr
  assert lines[0].startswith('error: ')
  assert not [word for word in words if word not in lines[0]], lines[0]
  assert result.stdout == ''
  assert not (folder / 'w').exists()


@pytest.mark.parametrize(
  'arguments', [('--help',), (*GOOD, '--config.train.stps=1')]
)
def test_answers_within_a_second(folder, arguments):
  runs = [answer(folder, *arguments) for _ in range(3)]
  assert min(seconds for _, seconds in runs) < 1
  assert all('raceback (' not in result.stderr for result, _ in runs)


def test_help_names_every_flag(folder):
  result, _ = answer(folder, '--help')
  assert result.returncode == 0
  for flag in ('config', 'workdir', 'mode', 'distributed', 'traceback'):
    assert f'{flag}:' in result.stdout


def test_an_unknown_runner_is_one_line(folder):
  result, _ = answer(folder, *GOOD)
  assert result.returncode == 2
  assert len(result.stderr.splitlines()) == 1, result.stderr
  assert 'no_such_runner' in result.stderr
  result, _ = answer(folder, *GOOD, '--traceback')
  assert result.returncode == 1
  assert 'Traceback' in result.stderr


def test_main_is_short():
  assert len(MAIN.read_text(encoding='utf-8').splitlines()) <= 60


def test_only_errors_of_our_own_code_are_expected():
  here = cli.is_expected
  assert here(OSError('disk full'))
  assert not here(KeyError('x'))

  def raised(call):
    try:
      call()
    except Exception as error:
      return error
    raise AssertionError('nothing was raised')

  config = config_dict.ConfigDict({'experiment': 'no_such_runner'})
  assert here(raised(lambda: cli.runner(config)))
  # A checkout may lie in a folder of any name: json is not ours.
  assert not here(raised(lambda: json.loads('{')))

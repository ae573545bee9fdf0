"""Two processes with two devices each are one machine with four."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.train import pair, toy, worker
from tmlib import train

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 400

pytestmark = pytest.mark.distributed


def start(scenario, *arguments):
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    port = free.getsockname()[1]
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '2',
    'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
    'JAX_NUM_PROCESSES': '2',
    'PYTHONPATH': str(ROOT),
  }
  command = [sys.executable, '-m', 'tests.train.pair', scenario]
  command += [str(a) for a in arguments]
  return [
    subprocess.Popen(
      command, cwd=ROOT, env=environment | {'JAX_PROCESS_ID': str(i)},
      text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )
    for i in range(2)
  ]  # fmt: skip


def finish(processes):
  found = []
  try:
    for process in processes:
      found.append(process.communicate(timeout=PATIENCE))
  finally:
    for process in processes:
      process.kill()
  for process, (out, err) in zip(processes, found, strict=True):
    assert process.returncode == 0, f'{out[-2000:]}\n{err[-6000:]}'
  return [out for out, _ in found]


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  path = tmp_path_factory.mktemp('agree')
  pair.numbers(path / 'begun_by_one', steps=20)
  finish(start('agree', path))
  return path


@pytest.fixture(scope='module')
def single():
  return pair.numbers()


def assert_file(path, want):
  with np.load(path) as file:
    found = {name: file[name] for name in file.files}
  want = toy.flat(want)
  assert found.keys() == want.keys()
  for name in found:
    np.testing.assert_allclose(
      found[name], want[name], rtol=0, atol=1e-6, err_msg=name
    )


@pytest.mark.parametrize('parallel', ['jit', 'pmap'])
def test_two_processes_give_the_numbers_of_one(folder, single, parallel):
  assert_file(folder / f'{parallel}.npz', single)


def test_two_resume_bitwise(folder):
  with (
    np.load(folder / 'resumed.npz') as found,
    np.load(folder / 'jit.npz') as whole,
  ):
    assert found.files == whole.files
    for name in found.files:
      later = slice(20, None) if name in ("['loss']", "['abs']") else ...
      np.testing.assert_array_equal(found[name], whole[name][later], name)


def test_one_begins_and_two_end(folder, single):
  later = {name: single[name][20:] for name in ('loss', 'abs')}
  assert_file(folder / 'ended.npz', single | later)


def test_two_begin_and_one_ends(folder, single):
  ended = pair.numbers(folder / 'begun_by_two')
  assert len(ended['loss']) == pair.STEPS - 20
  for name in ('params', 'ema', 'prediction'):
    toy.assert_close({0: ended[name]}, {0: single[name]})


def test_runs_over_processes(folder):
  assert_file(folder / 'runs.npz', pair.run_numbers())


@pytest.mark.parametrize(
  'number',
  [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)],
)
def test_a_signal_to_one_stops_both_at_the_same_step(tmp_path, number):
  processes = start('interrupted', tmp_path)
  metrics = tmp_path / 'metrics.jsonl'
  end = time.monotonic() + PATIENCE
  while not (metrics.exists() and metrics.read_text()):
    assert all(p.poll() is None for p in processes), processes[0].communicate()
    assert time.monotonic() < end
    time.sleep(0.05)
  processes[1].send_signal(number)
  found = [json.loads(out.splitlines()[-1]) for out in finish(processes)]
  assert found[0] == found[1]
  assert found[0]['status'] == 'interrupted'
  step = found[0]['step']
  assert step % 4 == 0
  store = train.Checkpoints(tmp_path / 'checkpoints', read_only=True)
  assert store.latest == step
  store.close()
  # And one process goes on from there.
  resumed = worker.fit(tmp_path, steps=step + 3)
  whole = worker.fit(None, steps=step + 3)
  toy.assert_close(resumed.state, whole.state)

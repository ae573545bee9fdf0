"""Real processes, real signals, a real full disk."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time

import pytest

from tests.train import toy, worker
from tmlib import train

ROOT = pathlib.Path(__file__).resolve().parents[2]
PATIENCE = 240  # seconds; an idle machine needs a few


def start(scenario, workdir, *arguments):
  environment = os.environ | {
    'JAX_PLATFORMS': 'cpu',
    'JAX_NUM_CPU_DEVICES': '4',
    'PYTHONPATH': str(ROOT),
  }
  return subprocess.Popen(
    [sys.executable, '-m', 'tests.train.worker', scenario, str(workdir)]
    + [str(a) for a in arguments],
    cwd=ROOT, env=environment, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip


def finish(process, patience=PATIENCE):
  try:
    return process.communicate(timeout=patience)
  except subprocess.TimeoutExpired:
    process.kill()
    out, err = process.communicate()
    pytest.fail(f'did not end: {out[-2000:]}\n{err[-4000:]}')


def wait_for(condition, process):
  end = time.monotonic() + PATIENCE
  while not condition():
    if process.poll() is not None or time.monotonic() > end:
      process.kill()
      out, err = process.communicate()
      pytest.fail(f'ended early, {process.returncode}: {out}\n{err[-4000:]}')
    time.sleep(0.02)


def rows(workdir):
  path = workdir / 'metrics.jsonl'
  text = path.read_text() if path.exists() else ''
  # What follows the last newline is being written.
  return [json.loads(line) for line in text.split('\n')[:-1]]


def steps(workdir):
  return [row['step'] for row in rows(workdir)]


def saved(workdir):
  folder = workdir / 'checkpoints'
  names = [p.name for p in folder.iterdir()] if folder.is_dir() else []
  return sorted(int(name) for name in names if name.isdigit())


def assert_resumes_exactly(workdir, tmp_path, last):
  """Going on to `last` gives what an uninterrupted run gives."""
  every = 5
  whole = worker.fit(tmp_path / 'whole', steps=last, every=every)
  resumed = worker.fit(workdir, steps=last, every=every)
  assert resumed.status == 'finished'
  toy.assert_same(resumed.state, whole.state)
  ours, theirs = rows(workdir), rows(tmp_path / 'whole')
  assert [row['step'] for row in ours] == [row['step'] for row in theirs]
  # The last step of the first part was evaluated too.
  odd = ('progress/', 'held_out/')
  for a, b in zip(ours, theirs, strict=True):
    same = lambda row: {k: v for k, v in row.items() if not k.startswith(odd)}
    assert same(a) == same(b)
  assert ours[-1]['held_out/mse'] == theirs[-1]['held_out/mse']


@pytest.fixture(scope='module')
def started(tmp_path_factory):
  """All at once, as long as there is more than one core."""
  names = ('stuck', 'stuck_save', 'full_disk', 'broken')
  folders = {name: tmp_path_factory.mktemp(name) for name in names}
  found = {name: (start(name, path), path) for name, path in folders.items()}
  process, path = found['broken']

  def ended():
    process.wait()
    (path / 'ended').write_text(str(time.time()))

  threading.Thread(target=ended, daemon=True).start()
  yield found
  for process, _ in found.values():
    process.kill()


def test_a_second_signal_ends_at_once(started):
  process, workdir = started['stuck']
  wait_for((workdir / 'stuck').exists, process)
  process.send_signal(signal.SIGTERM)
  time.sleep(0.5)
  assert process.poll() is None  # the step is not finished, so it waits
  process.send_signal(signal.SIGTERM)
  finish(process, patience=20)
  assert process.returncode == -signal.SIGTERM


def test_kill_during_a_save_loses_that_save_only(started, tmp_path):
  process, workdir = started['stuck_save']
  folder = workdir / 'checkpoints'
  partial = lambda: list(folder.glob('10.orbax-checkpoint-tmp*'))
  wait_for(partial, process)
  process.kill()
  finish(process)
  assert saved(workdir) == [5]
  assert partial()
  assert_resumes_exactly(workdir, tmp_path, 15)
  assert not partial()


def test_a_full_disk_stops_the_run_with_its_cause(started):
  process, workdir = started['full_disk']
  out, err = finish(process)
  assert process.returncode == 1, out
  assert 'RuntimeError: saving a checkpoint to' in err
  assert 'the newest complete step is 5' in err
  assert saved(workdir) == [5]
  assert max(steps(workdir)) < 40
  worker.full_disk(workdir, limit=False)
  assert saved(workdir)[-1] == 40
  assert steps(workdir) == list(range(5, 45, 5))


def test_an_error_in_loading_ends_the_process(started):
  process, workdir = started['broken']
  _, err = finish(process)
  assert process.returncode == 1
  assert 'OSError: slide_30.h5 is truncated' in err
  raised, ended = (
    float((workdir / name).read_text()) for name in ('raised', 'ended')
  )
  assert 0 <= ended - raised < 10


def test_signals_end_a_run_that_profiles_and_caches(tmp_path):
  workdir, cache = tmp_path / 'run', tmp_path / 'cache'
  found, last = [], 0
  for number in (signal.SIGTERM, signal.SIGINT):
    process = start('interrupted', workdir, cache)
    wait_for(lambda x=last: any(s > x for s in steps(workdir)), process)
    process.send_signal(number)
    out, err = finish(process)
    assert process.returncode == 0, err[-4000:]
    found.append(json.loads(out.splitlines()[-1]))
    assert found[-1]['status'] == 'interrupted'
    assert found[-1]['step'] > last
    last = found[-1]['step']
    assert saved(workdir)[-1] == last
  assert found[0]['hits'] == 0
  assert found[0]['misses'] >= 3
  assert found[1]['hits'] >= 2  # the step and the evaluation
  assert list((workdir / 'profile').rglob('*.xplane.pb'))
  assert_resumes_exactly(workdir, tmp_path, last + 7)


@pytest.mark.slow
def test_kill_at_any_time(tmp_path):
  chance = random.Random(0)
  workdir = tmp_path / 'run'
  for _ in range(8):
    process = start('saving', workdir)
    # Beyond the rows that the one before wrote after its last save.
    before = max(steps(workdir), default=0)
    wait_for(lambda x=before: max(steps(workdir), default=0) > x, process)
    time.sleep(chance.uniform(0, 0.5))
    process.kill()
    finish(process)
  last = saved(workdir)[-1] + 3
  whole = worker.fit(tmp_path / 'whole', steps=last, every=1)
  resumed = worker.fit(workdir, steps=last, every=1)
  toy.assert_same(resumed.state, whole.state)
  assert steps(workdir) == list(range(1, last + 1))


def test_an_empty_newest_folder_is_not_a_checkpoint(tmp_path, caplog):
  workdir = tmp_path / 'run'
  worker.fit(workdir, steps=5)
  (workdir / 'checkpoints' / '9').mkdir()
  # Reading must not touch it: another process may be training there.
  params = train.load_params(workdir)
  assert set(params) == {'hidden', 'out'}
  evaluate_only(workdir)
  assert (workdir / 'checkpoints' / '9').is_dir()
  assert_resumes_exactly(workdir, tmp_path, 12)
  assert 'incomplete' in caplog.text


def evaluate_only(workdir):
  return train.fit(
    toy.build(), toy.data(), steps=worker.STEPS, seed=worker.SEED,
    evaluations={'held_out': toy.held_out()}, workdir=workdir,
    evaluate_only=True,
  )  # fmt: skip


def test_evaluation_writes_nothing_and_trains_nothing(tmp_path):
  with pytest.raises(FileNotFoundError, match='no complete checkpoint'):
    evaluate_only(tmp_path / 'nothing')
  assert not (tmp_path / 'nothing').exists()
  trained = worker.fit(tmp_path / 'run', steps=5)
  files = lambda: {
    p: p.stat().st_mtime_ns for p in (tmp_path / 'run').rglob('*')
  }
  before = files()
  found = evaluate_only(tmp_path / 'run')
  assert files() == before
  assert found.step == 5
  toy.assert_same(
    found.evaluations['held_out'][0].outputs,
    trained.evaluations['held_out'][0].outputs,
  )


def test_a_workdir_below_a_file_is_refused(tmp_path):
  from ml_collections import ConfigDict

  (tmp_path / 'file').touch()
  make = lambda config: train.Experiment(build=toy.build(), data=toy.data())
  with pytest.raises(OSError, match='cannot be written .Not a directory'):
    train.run(make, ConfigDict(), workdir=tmp_path / 'file' / 'run')

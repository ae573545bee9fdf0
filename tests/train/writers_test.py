"""Rows are written once, survive a kill, and the official reader reads them."""

import json
import math

import numpy as np
import pytest
from absl import logging

from tests.train import toy
from tmlib import train
from tmlib.train import writers
from tmlib.train.progress import Chronometer


def lines(path):
  return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_resumed_file_has_no_step_twice(tmp_path):
  path = tmp_path / 'metrics.jsonl'
  first = writers.JsonlWriter(path, 0)
  for step in (5, 10, 15):
    first.write(step, {'loss': 1 / step})
  first.close()
  with path.open('a') as file:
    file.write('{"step": 7, "loss"')  # cut off by a kill
  second = writers.JsonlWriter(path, 10)
  second.write(15, {'loss': math.nan, 'runs': [1.0, math.inf]})
  second.close()
  assert lines(path) == [
    {'step': 5, 'loss': 1 / 5},
    {'step': 10, 'loss': 1 / 10},
    {'step': 15, 'loss': None, 'runs': [1.0, None]},
  ]


def events(folder):
  accumulator = pytest.importorskip(
    'tensorboard.backend.event_processing.event_accumulator'
  )
  reader = accumulator.EventAccumulator(str(folder))
  reader.Reload()
  return {
    tag: [(e.step, e.value) for e in reader.Scalars(tag)]
    for tag in reader.Tags()['scalars']
  }


def test_the_official_reader_reads_the_events_once_each(tmp_path):
  for steps in (5, 7, 10):
    train.fit(
      toy.build(), toy.data(), steps=steps, workdir=tmp_path,
      evaluations={'held_out': toy.held_out()},
      options=train.Options(log_every=2),
    )  # fmt: skip
  found = events(tmp_path / 'tensorboard')
  rows = lines(tmp_path / 'metrics.jsonl')
  assert [row['step'] for row in rows] == [2, 4, 5, 6, 7, 8, 10]
  for name in ('loss', 'held_out/mse'):
    want = [(row['step'], row[name]) for row in rows if name in row]
    assert [step for step, _ in found[name]] == [step for step, _ in want]
    np.testing.assert_allclose(
      [v for _, v in found[name]], [v for _, v in want], rtol=1e-6
    )


def test_runs_are_summarised_where_one_number_fits(tmp_path, caplog):
  logging.use_absl_handler()
  logging.set_verbosity(logging.INFO)
  board = writers.TensorBoardWriter(tmp_path, 0)
  log = writers.LogWriter()
  for writer in (board, log):
    writer.write(
      3,
      {
        'loss': [1.0, 3.0, math.nan], 'skipped': [0.0, 0.0, 2.0],
        'diverged': 0.0, 'progress/percent': 30.0, 'gone': [math.nan] * 3,
      },
    )  # fmt: skip
    writer.close()
  assert events(tmp_path)['loss'] == [(3, 2.0)]
  assert 'gone' not in events(tmp_path)
  (line,) = [r.getMessage() for r in caplog.records if 'step 3' in r.message]
  assert 'loss 2±1' in line
  assert 'skipped 0.66667' in line
  assert 'diverged' not in line
  assert 'percent 30' in line


def test_the_chronometer_leaves_pauses_out_and_goes_on(monkeypatch):
  now = [100.0]
  monkeypatch.setattr('time.monotonic', lambda: now[0])
  clock = Chronometer(seconds=10.0, steps=5)
  clock.start(5)
  now[0] += 6
  clock.pause(None, 8)
  now[0] += 1000  # an evaluation
  clock.start(8)
  now[0] += 4
  clock.pause(None, 10)
  found = clock.read(10, 20)
  assert found['progress/percent'] == 50
  assert found['progress/steps_per_second'] == 5 / 10
  assert found['progress/eta_seconds'] == 10 * (20 / 10)
  assert clock.progress == {'seconds': 20.0, 'steps': 10}

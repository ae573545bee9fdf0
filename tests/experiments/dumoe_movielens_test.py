"""MovieLens, or any log: refusals, splits, and recommendations by name."""

import csv
import types

import numpy as np
import pytest

from experiments import cli, dumoe_movielens
from tmlib import train
from tmlib.recsys import windows

# Two that are equal as integers, one over 2^31, one that int() refuses.
NAMES = ('7', '007', '9780441013593', '²', 'song, with a comma', *'abcdefghij')


def write_log(path, users=10, events=8):
  """Users with distinct items, a day apart."""
  rng = np.random.default_rng(0)
  lines = ['user,item,timestamp']
  for user in range(users):
    for t, i in enumerate(rng.permutation(len(NAMES))[:events]):
      lines.append(f'user {user},"{NAMES[i]}",{86400 * t + user}')
  path.write_text('\n'.join(lines) + '\n')
  return str(path)


def config_of(path, **changes):
  config = cli.load_config('configs/dumoe_movielens.py:tiny')
  config.data.path = path
  for key, value in changes.items():
    level, _, leaf = key.rpartition('__')
    (config[level] if level else config)[leaf] = value
  return config


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    (dict(data__users=-1), 'data.users=-1'),
    (dict(data__window=0), 'data.window=0'),
    (dict(data__augment=0), 'data.augment=0'),
    (dict(data__random_orders=0), 'data.random_orders=0'),
    (dict(data__first_order=-1), 'data.first_order=-1'),
    (dict(data__time_runs=0), 'data.time_runs=0'),
    (dict(train__runs=0), 'train.runs=0'),
    (dict(data__now='then'), "data.now='then'"),
    (
      dict(data__time_quantile=1.5, data__protocols=('time',)),
      'data.time_quantile: quantile=1.5',
    ),
    (dict(data__protocols=()), 'data.protocols'),
    (dict(data__recommend=50), 'data.recommend=50.*15 items'),
    (dict(models=()), 'models'),
    (dict(model__k=9), 'model: k=9'),
  ],
)
def test_the_field_is_named(changes, match, tmp_path):
  config = config_of(write_log(tmp_path / 'log.csv'), **changes)
  with pytest.raises(ValueError, match=match):
    dumoe_movielens.make(config)


@pytest.mark.parametrize(
  ('users', 'events', 'match'),
  [(1, 8, "'item' has 1 users"), (9, 2, 'needs three'), (9, 1, 'has 0 users')],
)
def test_logs_that_are_too_small(users, events, match, tmp_path):
  path = write_log(tmp_path / 'log.csv', users, events)
  config = config_of(path, data__recommend=1)
  with pytest.raises(ValueError, match=match):
    dumoe_movielens.make(config)


def test_a_folder_of_recbole(tmp_path):
  (tmp_path / 'x.inter').write_text(
    'user_id:token\titem_id:token\ttimestamp:float\na\t1\t3\n'
  )
  assert dumoe_movielens.load(str(tmp_path)).table.users == ('a',)


def test_validation_of_the_time_split_lies_before_the_cut(tmp_path):
  path = write_log(tmp_path / 'log.csv')
  config = config_of(path, data__time_quantile=0.7)
  group = dumoe_movielens.Group('time', 0, 1)
  test = dumoe_movielens.split_of(config, group)
  config.data.validation = True
  held = dumoe_movielens.split_of(config, group)
  time = test.table.time
  cut = np.quantile(time, 0.7)
  inner = np.quantile(time[time < int(cut)], 0.7)
  assert (time[test.target[test.users]] >= int(cut)).all()
  found = time[held.target[held.users]]
  assert ((found >= int(inner)) & (found < int(cut))).all()
  assert time[np.concatenate(held.history)].max() < int(inner)


def test_repeats_are_no_targets(tmp_path):
  path = tmp_path / 'log.csv'
  path.write_text(
    'user,item,timestamp\na,x,1\na,y,2\na,z,3\na,x,4\nb,x,1\nb,y,2\nb,z,3\n'
  )
  config = config_of(str(path), data__recommend=3)
  split = dumoe_movielens.split_of(config, dumoe_movielens.Group('item', 0, 1))
  np.testing.assert_array_equal(split.target, [2, 6])
  dumoe_movielens.make(config)


@pytest.mark.parametrize('now', windows.NOW)
def test_served_as_trained(now, tmp_path):
  config = config_of(write_log(tmp_path / 'log.csv'), data__now=now)
  log = dumoe_movielens.log_of(config)
  found, names = dumoe_movielens._served(config, log)
  assert 'target' not in found
  for row, name in enumerate(names):
    events = np.flatnonzero(log.table.user == log.table.users.index(name))
    history = [
      (log.table.items[log.table.item[e]], log.table.time[e]) for e in events
    ]
    want = windows.serving_window(
      history, log.table.items, config.data.window, moment=now
    )
    for key in ('item', 'time', 'now', 'seen'):
      np.testing.assert_array_equal(found[key][row], want[key][0], key)


def test_every_scheme_has_a_model():
  assert dumoe_movielens.MODELS['two_stage'] == ('two', {})


@pytest.mark.slow
def test_recommends_names_to_strangers(tmp_path):
  config = config_of(
    write_log(tmp_path / 'log.csv'), models=('sasrec',),
    data__protocols=('random', 'time'), data__time_runs=1,
  )  # fmt: skip
  workdir = tmp_path / 'run'
  launch = lambda config, mode: cli.launch(
    train.run,
    types.SimpleNamespace(
      config=config, workdir=str(workdir), mode=mode, allow_config_change=False
    ),
  )
  assert launch(config, 'train') == 0
  text = (workdir / 'report' / 'summary.md').read_text()
  assert 'Markov in HR@10' in text
  assert 'Markov in NDCG@10' in text
  assert 'difference of NDCG@10' in text
  (tmp_path / 'new.csv').write_text(
    'user,item,timestamp\nnew,007,600\nnew,²,100\nfull,a,1\n'
    + ''.join(f'full,"{name}",2\n' for name in NAMES[:-2])
  )
  config.data.predict, config.data.recommend = str(tmp_path / 'new.csv'), 5
  assert launch(config, 'predict') == 0
  path = workdir / 'sasrec' / 'predict.csv'
  with path.open(newline='') as file:
    rows = list(csv.DictReader(file))
  assert list(rows[0]) == [
    'evaluation', 'run', 'id', *(f'top_{i}' for i in range(5)), 'weight',
    'name',
  ]  # fmt: skip
  assert len(rows) == 2 * 2
  best = {row['name']: [row[f'top_{i}'] for i in range(5)] for row in rows}
  assert len(set(best['new'])) == 5
  assert set(best['new']) <= set(NAMES) - {'007', '²'}
  # Two are left to who has seen the others.
  assert {*best['full'][:2]} == {*NAMES[-2:]}
  assert best['full'][2:] == [''] * 3

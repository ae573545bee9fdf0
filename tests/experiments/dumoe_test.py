"""The recommender experiments: groups, truth, refusals, tiny runs."""

import numpy as np
import pytest

from experiments import cli, dumoe_movielens, dumoe_parts, dumoe_planted


def config_of(name, arg='tiny'):
  return cli.load_config(f'configs/{name}.py:{arg}')


def test_a_pass_gives_each_run_the_rows_of_its_group():
  windows = {'user': np.arange(7, dtype=np.int32)}
  member = np.array([0, 0, 1, 1, 1, 2, 2])
  passed = dumoe_parts.group_pass(windows, member, np.array([1, 0, 1]), 2)
  assert passed.steps == 2
  seen = [[], [], []]
  for step in range(2):
    batch = passed.load(step, slice(0, 2))
    for run in range(3):
      real = batch['weight'][run] > 0
      seen[run] += list(batch['index'][run][real])
  assert seen == [[2, 3, 4], [0, 1], [2, 3, 4]]


def test_predictions_come_back_by_run_and_id(tmp_path):
  path = tmp_path / 'p.csv'
  path.write_text(
    'evaluation,run,id,rank,z_0,z_1,weight\n'
    'test,0,1,5,1,2,1\ntest,0,0,4,3,4,1\ntest,1,2,9,5,6,1\nother,0,0,0,0,0,1\n'
  )
  first, second = dumoe_parts.read_predictions(path)
  np.testing.assert_array_equal(first['rank'], [4, 5])
  np.testing.assert_array_equal(first['z'], [[3, 4], [1, 2]])
  np.testing.assert_array_equal(second['z'], [[5, 6]])
  with pytest.raises(ValueError, match='nothing'):
    dumoe_parts.read_predictions(path, 'nothing')


@pytest.mark.parametrize(
  ('name', 'changes', 'match'),
  [
    ('dumoe_planted', {'variants': ('three_staje',)}, 'three_staje'),
    ('dumoe_planted', {'train.runs': 0}, 'runs=0'),
    ('dumoe_planted', {'data.main_rate': 0.9}, 'main_rate'),
    ('dumoe_planted', {'model.k': 9}, 'k=9'),
    ('dumoe_movielens', {'models': ('sasrek',)}, 'sasrek'),
    ('dumoe_movielens', {'data.protocols': ('items',)}, 'items'),
    ('dumoe_movielens', {'data.path': 'no/such.inter'}, 'such'),
  ],
)
def test_bad_values_are_named(name, changes, match):
  config = config_of(name)
  if name == 'dumoe_movielens' and match != 'such':
    _need_ml100k()
  for key, value in changes.items():
    *level, leaf = key.split('.')
    node = config[level[0]] if level else config
    node[leaf] = value
  with pytest.raises((ValueError, FileNotFoundError), match=match):
    cli.runner(config).make(config)


def _need_ml100k():
  from tmlib import recsys

  try:
    recsys.find_ml100k()
  except ModuleNotFoundError:
    pytest.skip('recbole is not installed')


def test_planted_truth_is_that_of_the_last_event_seen():
  config = config_of('dumoe_planted')
  world = dumoe_planted.world_of(config, 0.2, 0)
  assert world is dumoe_planted.world_of(config, 0.2, 0)
  for user in world.split.users:
    rows = np.flatnonzero(world.truth.table.user == user)
    assert world.split.history[user][-1] == rows[-2]
    assert world.split.target[user] == rows[-1]


def test_ties_are_shuffled_in_histories_and_nowhere_else():
  _need_ml100k()
  config = config_of('dumoe_movielens')
  config.data.augment = 3
  log = dumoe_movielens.log_of(config)
  group = dumoe_movielens.Group('random', 0, 1)
  split = dumoe_movielens.split_of(config, group)
  found = dumoe_movielens._learning_windows(config, group, split, log.profile)
  target = found['target']
  pairs = np.stack(
    [np.broadcast_to(found['user'][:, None], target.shape), target], -1
  )[target > 0]
  allowed = {
    (user, log.table.item[row] + 1)
    for user, rows in enumerate(split.history)
    for row in rows
  }
  assert {tuple(p) for p in pairs.tolist()} <= allowed
  assert len(pairs) == 3 * sum(len(r) - 1 for r in split.history if len(r))
  assert (np.diff(found['time'], axis=1)[found['item'][:, :-1] > 0] >= 0).all()


@pytest.mark.slow
@pytest.mark.parametrize('name', ['dumoe_planted', 'dumoe_movielens'])
def test_tiny_runs_to_its_report_and_predicts(name, tmp_path):
  if name == 'dumoe_movielens':
    _need_ml100k()
  from tmlib.train import run

  config = config_of(name)
  make = cli.runner(config).make
  assert run(make, config, workdir=tmp_path) == 0
  text = (tmp_path / 'report' / 'summary.md').read_text()
  assert 'HR@10' in text
  assert list((tmp_path / 'report').glob('*.png'))
  assert run(make, config, workdir=tmp_path, mode='predict') == 0
  part = 'dumoe' if name == 'dumoe_movielens' else 'three_stage'
  assert (tmp_path / part / 'predict.csv').is_file()

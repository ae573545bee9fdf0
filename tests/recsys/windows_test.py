"""Windows by hand; the generator has the statistics it was asked for."""

import itertools

import numpy as np
import pytest

from tests.recsys import support
from tmlib import recsys
from tmlib.recsys import planted, windows


def split_of(times=(0, 5, 5, 9, 20)):
  table = recsys.make_events([0] * 5, [3, 1, 2, 4, 5], times)
  return recsys.leave_last_out(recsys.order_events(table))


def test_training_windows_by_hand():
  got = windows.training_windows(split_of(), 2, now='target')
  # History 3 1 2 4 (as items 3 1 2 4 of 1..5), pairs 3>1, 1>2, 2>4.
  np.testing.assert_array_equal(got['item'], [[1, 2], [0, 3]])
  np.testing.assert_array_equal(got['target'], [[2, 4], [0, 1]])
  np.testing.assert_array_equal(got['time'], [[0, 0], [0, 0]])
  np.testing.assert_array_equal(got['now'], [[0, 4], [0, 5]])
  last = windows.training_windows(split_of(), 3, now='last')
  np.testing.assert_array_equal(last['item'], [[3, 1, 2]])
  np.testing.assert_array_equal(last['time'], [[0, 5, 5]])
  np.testing.assert_array_equal(last['now'], last['time'])


def test_query_windows_by_hand():
  got = windows.query_windows(split_of(), 6, now='target')
  np.testing.assert_array_equal(got['item'], [[0, 0, 3, 1, 2, 4]])
  np.testing.assert_array_equal(got['target'], [[0, 0, 0, 0, 0, 5]])
  np.testing.assert_array_equal(got['time'], [[0, 0, 0, 5, 5, 9]])
  np.testing.assert_array_equal(got['now'], [[0, 0, 5, 5, 9, 20]])
  np.testing.assert_array_equal(got['seen'], [[1, 1, 1, 1, 1, 0]])
  free = windows.query_windows(split_of(), 6, mask_seen=False)
  assert free['seen'].sum() == 1
  assert free['now'][0, -1] == 9


def test_serving_window_sorts_and_takes_the_end():
  got = windows.serving_window(
    [('b', 9.7), ('a', 1.0), ('b', 5.0)], ('a', 'b'), 2, now=12
  )
  np.testing.assert_array_equal(got['item'], [[2, 2]])
  np.testing.assert_array_equal(got['time'], [[0, 4]])
  np.testing.assert_array_equal(got['now'], [[0, 7]])
  np.testing.assert_array_equal(got['seen'], [[1, 1, 1]])
  other = windows.serving_window(
    [('b', 9.7), ('b', 5.0)], ('a', 'b'), 2, moment='target'
  )
  np.testing.assert_array_equal(other['now'], [[4, 4]])
  empty = windows.serving_window([], ('a', 'b'), 2)
  assert not empty['item'].any()


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: windows.training_windows(split_of(), 0), 'length=0'),
    (lambda: windows.training_windows(split_of(), 2, now='then'), 'now='),
    (
      lambda: windows.query_windows(split_of(), 2, profile=np.zeros((3, 1))),
      'profile',
    ),
    (
      lambda: windows.training_windows(split_of((0, 5, 5, 2**32, 2**33)), 5),
      'milliseconds',
    ),
    (lambda: windows.serving_window([('c', 1)], ('a',), 2), "'c'"),
    (lambda: windows.serving_window([('a', np.nan)], ('a',), 2), 'finite'),
    (
      lambda: windows.serving_window([('a', 1.6e12)], ('a',), 2),
      'history.*milliseconds',
    ),
    (
      lambda: windows.serving_window([('a', 1e30)], ('a',), 2),
      'milliseconds',
    ),
    (
      lambda: windows.serving_window([('a', 1)], ('a',), 2, now=np.nan),
      'now.*finite',
    ),
    (
      lambda: windows.serving_window([('a', 1)], ('a',), 2, now=1.6e12),
      'now.*milliseconds',
    ),
    (
      lambda: windows.training_windows(
        recsys.leave_last_out(
          recsys.order_events(recsys.make_events([0, 0], [1, 2], [0, 1]))
        ),
        4,
      ),
      'a user needs three',
    ),
  ],
)
def test_bad_windows(call, match):
  with pytest.raises(ValueError, match=match):
    call()


def test_stamps_that_are_words():
  with pytest.raises(TypeError, match='history'):
    windows.serving_window([('a', 'x'), ('a', 'y')], ('a',), 2)


def test_each_pair_is_a_target_once():
  _, _, split = support.world()
  train, _ = support.arrays()
  table = split.table
  pairs = [
    (user, table.item[rows[t]] + 1)
    for user, rows in enumerate(split.history)
    for t in range(1, len(rows))
  ]
  real = train['target'] > 0
  who = np.broadcast_to(train['user'][:, None], real.shape)[real]
  assert sorted(zip(who, train['target'][real], strict=True)) == sorted(pairs)


def test_planted_switching():
  catalogue = planted.make_catalogue(60, 4, (5,))
  found = planted.switching_users(catalogue, 400, 50, 0.3, stray=0.2, missing=0)
  interest = found.interest.reshape(400, 50)
  again = found.mixture[np.repeat(np.arange(400), 49), interest[:, :-1].ravel()]
  # Stays with 1 - rho + rho theta_k.
  stay = np.mean(interest[:, 1:] == interest[:, :-1])
  assert stay == pytest.approx(np.mean(0.7 + 0.3 * again), abs=0.01)
  np.testing.assert_array_equal(
    found.switched.reshape(400, 50)[:, 1:], np.diff(interest, axis=1) != 0
  )
  own = np.mean(catalogue.interest[found.table.item] == found.interest)
  assert own == pytest.approx(0.8 + 0.2 / 4, abs=0.015)
  centre = catalogue.centres['m0'][catalogue.interest[found.table.item]]
  residual = found.table.features['m0'] - centre
  assert residual.std() == pytest.approx(1, abs=0.02)
  assert abs(residual.mean()) < 0.02
  assert found.table.num_items == 60


def test_the_filter_against_all_paths():
  catalogue = planted.make_catalogue(12, 3, ())
  found = planted.switching_users(
    catalogue, 5, 4, 0.3, stray=0.2, concentration=1.0
  )
  items = found.table.item.reshape(5, 4)
  chance = 0.8 * catalogue.popularity + 0.2 / 12
  rows = np.array([2, 7, 19])
  got = planted.filter_scores(found, catalogue, rows)
  for score, row in zip(got, rows, strict=True):
    user, last = divmod(row, 4)
    theta, total = found.mixture[user], np.zeros(12)
    step = 0.7 * np.eye(3) + 0.3 * theta
    # Every path of interests up to the next event, weighed by brute force.
    for path in itertools.product(range(3), repeat=last + 2):
      p = theta[path[0]]
      for t in range(last + 1):
        p *= chance[path[t], items[user, t]] * step[path[t], path[t + 1]]
      total += p * catalogue.popularity[path[-1]]
    np.testing.assert_allclose(score, total / total.sum(), rtol=1e-12)


def test_who_knows_more_ranks_better():
  catalogue = planted.make_catalogue(60, 4, ())
  found = planted.switching_users(catalogue, 2000, 12, 0.2)
  rows = np.arange(2000) * 12 + 10
  target = found.table.item[rows + 1]
  hits = []
  for scores in (
    planted.oracle_scores(found, catalogue, rows),
    planted.filter_scores(found, catalogue, rows),
    np.tile(np.bincount(found.table.item, minlength=60), (2000, 1)),
  ):
    own = scores[np.arange(2000), target][:, None]
    hits.append(np.mean((scores >= own).sum(1) <= 10))
  assert hits[0] > hits[1] + 0.01 > hits[2] + 0.1


def test_planted_decay_follows_its_half_life():
  catalogue = planted.make_catalogue(20, 5, ())
  day, users, length = 86400.0, 2000, 12
  found = planted.decaying_users(
    catalogue, users, length, 2 * day, innovation=0.3, gap=day
  )
  interest = found.interest.reshape(users, length)
  times = found.table.time.reshape(users, length)

  def fit(half_life):
    """Mean log likelihood of the interests by the formula."""
    total = 0.0
    for t in range(1, length):
      weight = 2.0 ** -((times[:, t : t + 1] - times[:, :t]) / half_life)
      weight /= weight.sum(1, keepdims=True)
      same = interest[:, :t] == interest[:, t : t + 1]
      chance = 0.7 * np.sum(weight * same, 1) + 0.3 / 5
      total += np.log(chance).mean() / (length - 1)
    return total

  fits = {days: fit(days * day) for days in (0.5, 1, 2, 4, 8)}
  assert max(fits, key=fits.get) == 2
  # Of the law itself, the log likelihood is minus the entropy: better than
  # chance by far.
  assert fits[2] > np.log(1 / 5) + 0.3


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (dict(switch_rate=1.5), 'switch_rate'),
    (dict(length=1), 'length'),
    (dict(stray=-1), 'stray'),
  ],
)
def test_bad_planted(change, match):
  catalogue = planted.make_catalogue(20, 2)
  with pytest.raises(ValueError, match=match):
    planted.switching_users(catalogue, **change)
  with pytest.raises(ValueError, match='interests'):
    planted.make_catalogue(1, 2)


def test_the_oracle_is_the_law_of_the_next_item():
  catalogue, found, _ = support.world()
  rows = np.arange(5)
  got = planted.oracle_scores(found, catalogue, rows)
  for r in rows:
    user, state = found.table.user[r], found.interest[r]
    for item in range(30):
      k = catalogue.interest[item]
      chance = 0.8 * (k == state) + 0.2 * found.mixture[user, k]
      want = chance * catalogue.popularity[k, item]
      assert got[r, item] == pytest.approx(want)

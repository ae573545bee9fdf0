"""Logs, splits, metrics and baselines by hand and by loops."""

import math

import numpy as np
import pytest

from tmlib import recsys


def small():
  """Two users; user b's events come first and are not sorted."""
  return recsys.make_events(
    ['b', 'b', 'a', 'a', 'a', 'b'],
    [10, 9, 9, 10, 11, 100],
    [50, 40, 7, 7, 9, 50],
  )


def test_items_are_ordered_as_numbers():
  table = small()
  assert table.items == ('9', '10', '11', '100')
  assert table.users == ('a', 'b')
  np.testing.assert_array_equal(table.item, [1, 0, 0, 1, 2, 3])
  names = recsys.make_events(['u', 'u'], ['b', 'a'], [0, 1])
  np.testing.assert_array_equal(names.item, [1, 0])


@pytest.mark.parametrize(
  ('ties', 'rows'),
  [
    ('item', [[2, 3, 4], [1, 0, 5]]),
    ('item_descending', [[3, 2, 4], [1, 5, 0]]),
    ('file', [[2, 3, 4], [1, 0, 5]]),
  ],
)
def test_ties_in_time(ties, rows):
  found = recsys.order_events(small(), ties)
  assert [list(x) for x in found.rows] == rows


def test_random_ties_are_drawn_within_ties_only():
  table = recsys.make_events([0] * 40, range(40), np.arange(40) // 10)
  seen = set()
  for seed in range(5):
    (rows,) = recsys.order_events(table, 'random', seed).rows
    assert (np.diff(table.time[rows]) >= 0).all()
    again = recsys.order_events(table, 'random', seed).rows[0]
    np.testing.assert_array_equal(rows, again)
    seen.add(tuple(rows))
  assert len(seen) == 5


def test_leave_last_out():
  table = small()
  split = recsys.leave_last_out(recsys.order_events(table))
  np.testing.assert_array_equal(split.target, [4, 5])
  np.testing.assert_array_equal(split.target_items, [2, 3])
  np.testing.assert_array_equal(split.seen(), [[1, 1, 0, 0], [1, 1, 0, 0]])
  held = recsys.leave_last_out(recsys.order_events(table), skip=1)
  np.testing.assert_array_equal(held.target, [3, 0])
  assert [len(x) for x in held.history] == [1, 1]
  # A user with one event has no target.
  last = recsys.leave_last_out(recsys.order_events(table), skip=2)
  np.testing.assert_array_equal(last.target, [-1, -1])
  assert [len(x) for x in last.history] == [1, 1]


@pytest.mark.parametrize('skip', [3, 4, 9])
def test_nothing_stays_of_who_is_skipped_whole(skip):
  table = recsys.make_events([0] * 3, [1, 2, 3], [0, 1, 2])
  split = recsys.leave_last_out(recsys.order_events(table), skip)
  assert split.target.tolist() == [-1]
  assert [len(x) for x in split.history] == [0]


def test_repeats_are_not_foretold_where_seen_items_are_masked():
  names = {'a': 'xyxzyx', 'b': 'xyz', 'c': 'xx'}
  user = [u for u, items in names.items() for _ in items]
  item = [i for items in names.values() for i in items]
  ordered = recsys.order_events(
    recsys.make_events(user, item, range(len(user))), 'file'
  )
  every = recsys.leave_last_out(ordered)
  np.testing.assert_array_equal(every.target_items, [0, 2, 0])
  # The seen target would be the only seen item that is a candidate.
  with pytest.raises(ValueError, match='unseen_only'):
    every.seen()
  with pytest.raises(ValueError, match='unseen_only'):
    recsys.query_windows(every, 4)
  recsys.query_windows(every, 4, mask_seen=False)
  new = recsys.leave_last_out(ordered, unseen_only=True)
  np.testing.assert_array_equal(new.target, [3, 8, -1])
  assert [x.tolist() for x in new.history] == [[0, 1, 2], [6, 7], [9, 10]]
  seen = new.seen()
  rank = recsys.target_rank(seen.astype(float), new.target_items, seen)
  np.testing.assert_array_equal(rank, 1)  # z alone is left
  # The validation split sees neither the test event nor what follows it.
  held = recsys.leave_last_out(ordered, 1, unseen_only=True)
  np.testing.assert_array_equal(held.target, [1, 7, -1])


def test_time_split_never_looks_ahead():
  rng = np.random.default_rng(0)
  table = recsys.make_events(
    rng.integers(0, 9, 200), rng.integers(0, 30, 200), rng.integers(0, 99, 200)
  )
  split = recsys.time_split(recsys.order_events(table), cut=60)
  old = np.concatenate(split.history)
  assert sorted(old) == sorted(np.flatnonzero(table.time < 60))
  for user in range(9):
    later = [
      row
      for row in np.flatnonzero((table.user == user) & (table.time >= 60))
      if table.item[row] not in table.item[split.history[user]]
    ]
    want = min(later, key=lambda r: (table.time[r], table.item[r]), default=-1)
    got = split.target[user]
    assert (got < 0) == (want < 0)
    if want >= 0:
      assert table.time[got] == table.time[want]
      assert table.item[got] == table.item[want]


def test_span_in_days():
  table = recsys.make_events([0, 0, 0], [0, 1, 2], [0, 86400, 3 * 86400])
  split = recsys.leave_last_out(recsys.order_events(table))
  # The target is no history.
  np.testing.assert_allclose(recsys.history_span(split), [1])


def test_metrics_by_hand():
  scores = np.array([[3.0, 2, 1, 0], [1, 1, 1, 1], [0, 5, 0, 9]], np.float32)
  target = np.array([1, 2, 0])
  seen = np.zeros((3, 4), bool)
  # Ties count against the model.
  rank = recsys.target_rank(scores, target, seen)
  np.testing.assert_array_equal(rank, [2, 4, 4])
  seen[0, 0] = seen[2, 3] = seen[2, 0] = True  # the target stays a candidate
  rank = recsys.target_rank(scores, target, seen)
  np.testing.assert_array_equal(rank, [1, 4, 3])
  np.testing.assert_array_equal(recsys.hit_rate(rank, 3), [1, 0, 1])
  np.testing.assert_array_equal(recsys.recall(rank, 3), [1, 0, 1])
  np.testing.assert_allclose(
    recsys.ndcg(rank, 3), [1, 0, 1 / math.log2(4)], rtol=1e-6
  )
  np.testing.assert_allclose(recsys.mrr(rank), [1, 1 / 4, 1 / 3], rtol=1e-6)
  np.testing.assert_allclose(recsys.mrr(rank, 3), [1, 0, 1 / 3], rtol=1e-6)


def test_a_score_that_is_not_a_number_wins_nothing():
  scores = np.array([[np.nan, 0, 0], [1, np.nan, 0]], np.float32)
  rank = recsys.target_rank(scores, np.array([0, 0]))
  np.testing.assert_array_equal(rank, [3, 2])


def test_markov_against_a_loop():
  rng = np.random.default_rng(1)
  n = 120
  table = recsys.make_events(
    rng.integers(0, 6, n), rng.integers(0, 7, n), rng.permutation(n)
  )
  split = recsys.leave_last_out(recsys.order_events(table))
  size, decay, smoothing = table.num_items, 0.5, 2.0
  count, share = np.zeros((size, size)), np.zeros(size)
  for rows in split.history:
    items = table.item[rows]
    for t, j in enumerate(items):
      share[j] += 1
      for lag in (1, 2, 3):
        if t >= lag:
          count[items[t - lag], j] += decay ** (lag - 1)
  np.testing.assert_array_equal(recsys.popularity_scores(split), share)
  share /= share.sum()
  want = np.zeros((len(split.users), size))
  for r, user in enumerate(split.users):
    items = table.item[split.history[user]]
    for lag in (1, 2, 3):
      if len(items) >= lag:
        i = items[-lag]
        p = (count[i] + smoothing * share) / (count[i].sum() + smoothing)
        want[r] += decay ** (lag - 1) * p
  got = recsys.markov_scores(split, 3, decay, smoothing)
  np.testing.assert_allclose(got, want, rtol=1e-12)
  np.testing.assert_allclose(recsys.markov_table(split).sum(1), 1)


@pytest.mark.parametrize(
  ('arguments', 'match'),
  [
    (dict(user=[], item=[], time=[]), 'no event'),
    (dict(user=[1], item=[1, 2], time=[1]), 'item has 2'),
    (dict(user=[''], item=[1], time=[1]), 'empty name'),
    (dict(user=[' '], item=[1], time=[1]), 'empty name'),
    (dict(user=[np.nan, 1.0], item=[1, 2], time=[0, 1]), 'user: event 0'),
    (dict(user=['a', np.nan], item=[1, 2], time=[0, 1]), 'user: event 1'),
    (dict(user=['a', 'a'], item=['b', None], time=[0, 1]), 'item: event 1'),
    (dict(user=[1], item=[1], time=[np.nan]), 'nan'),
    (dict(user=[1], item=[1], time=[-(2**63)]), 'milliseconds'),
    (dict(user=[1], item=[1], time=[881250949000]), 'milliseconds'),
    (
      dict(user=[1], item=[1], time=[1], features={'x': [[1, np.nan]]}),
      'partly NaN',
    ),
    (dict(user=[1], item=[1], time=[1], features={'x': [1]}), r'\[n, D\]'),
  ],
)
def test_bad_columns(arguments, match):
  with pytest.raises(ValueError, match=match):
    recsys.make_events(**arguments)


def test_blanks_around_names_do_not_count():
  table = recsys.make_events(['a', ' a', 'a '], ['x'] * 3, [0, 1, 2])
  assert table.users == ('a',)


def test_times_must_be_numbers():
  with pytest.raises(TypeError, match='numbers'):
    recsys.make_events([1], [1], ['1997-12-04'])


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda s, _: recsys.order_events(s.table, 'id'), 'ties'),
    (lambda s, _: recsys.leave_last_out(s, -1), 'skip'),
    (lambda s, _: recsys.time_split(s, 1.5), 'quantile'),
    (lambda s, _: recsys.time_split(s, cut=1000), 'no user'),
    (lambda _, x: recsys.markov_scores(x, 0), 'lags'),
    (lambda _, x: recsys.markov_scores(x, decay=0), 'decay'),
    (lambda _, x: recsys.markov_scores(x, smoothing=0), 'smoothing'),
  ],
)
def test_bad_arguments(call, match):
  sequences = recsys.order_events(small())
  with pytest.raises(ValueError, match=match):
    call(sequences, recsys.leave_last_out(sequences))

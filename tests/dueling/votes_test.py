"""Votes and ratings: counts by hand, pooling against other fits."""

import numpy as np
import pytest

from tmlib.dueling import pooling, votes

TABLE = {
  'user': ['ann', 'ann', 'bob', 'bob', 'bob'],
  'left': ['x', 'y', 'x', 'z', 'x'],
  'right': ['y', 'z', 'y', 'x', 'y'],
  'winner': ['left', 'tie', 'right', 'left', 'tie'],
}


def test_counts_by_hand():
  read = votes.read_votes(TABLE, 'half')
  assert read.users == ('ann', 'bob')
  assert read.arms == ('x', 'y', 'z')
  wins, counts = votes.tally_table(read)
  np.testing.assert_array_equal(wins[0], [[0, 1, 0], [0, 0, 0.5], [0, 0.5, 0]])
  np.testing.assert_array_equal(wins[1], [[0, 0.5, 0], [1.5, 0, 0], [1, 0, 0]])
  np.testing.assert_array_equal(counts[1], [[0, 2, 1], [2, 0, 0], [1, 0, 0]])
  dropped = votes.tally_table(votes.read_votes(TABLE, 'drop'))
  np.testing.assert_array_equal(dropped.counts.sum((1, 2)), [2, 4])


def test_other_column_names():
  table = {'worker' if k == 'user' else k: v for k, v in TABLE.items()}
  assert len(votes.read_votes(table, 'half', {'user': 'worker'}).user) == 5
  with pytest.raises(ValueError, match="no column 'user'"):
    votes.read_votes(table)


@pytest.mark.parametrize(
  ('change', 'options', 'message'),
  [
    ({'winner': ['left'] * 4 + ['both']}, {}, "'both' in row 4"),
    ({'right': ['x', 'z', 'y', 'x', 'y']}, {}, 'with itself'),
    ({'left': ['x']}, {}, 'must agree'),
    ({k: [] for k in TABLE}, {}, 'no vote'),
    ({'winner': ['tie'] * 2 + ['left'] * 3}, {'ties': 'drop'}, 'but ties'),
    ({}, {'ties': 'keep'}, 'choose one of'),
  ],
)
def test_bad_tables(change, options, message):
  with pytest.raises(ValueError, match=message):
    votes.read_votes(TABLE | change, **({'ties': 'half'} | options))


@pytest.mark.parametrize(
  ('change', 'options', 'message'),
  [
    ({}, {}, '2 of 5 votes are ties; say ties='),
    ({'user': ['ann', None, 'bob', 'bob', 'bob']}, {}, "row 1 has no 'user'"),
    ({'user': np.array([1, 2, np.nan, 1, 2])}, {}, "row 2 has no 'user'"),
    ({'left': ['x', 'y', 'x', '', 'x']}, {}, "row 3 has no 'left'"),
    (
      {'user': np.array([1, 'a', 1, 'a', 1], object)},
      {},
      "mixes .'int', 'str'",
    ),
    ({'user': np.zeros((5, 1))}, {}, r'expected \[V\]'),
    ({'winner': list('xzxzx')}, {}, 'it names an arm'),
    ({'winner': ['Left', 'Tie', 'right', 'left', 'tie']}, {}, 'pass winners='),
    ({}, {'winners': {'left': 'L'}}, 'must map to'),
    ({}, {'columns': {'worker': 'user'}}, "the key 'worker'"),
  ],
)
def test_messy_tables(change, options, message):
  with pytest.raises(ValueError, match=message):
    votes.read_votes(TABLE | change, **options)


def test_other_words_and_types_say_the_same():
  want = votes.read_votes(TABLE, 'half')
  words = {'model_a': 'left', 'model_b': 'right', 'both bad': 'tie'}
  back = {side: word for word, side in words.items()}
  said = [back[side] for side in TABLE['winner']]
  found = votes.read_votes(TABLE | {'winner': said}, 'half', winners=words)
  as_bytes = {k: np.array(v, 'S') for k, v in TABLE.items()}
  rows = np.rec.fromarrays(list(TABLE.values()), names=list(TABLE))
  as_number = TABLE | {
    'winner': [{'left': 1, 'right': 0, 'tie': 2}[x] for x in TABLE['winner']]
  }
  numbers = votes.read_votes(
    as_number, 'half', winners={1: 'left', 0: 'right', 2: 'tie'}
  )
  for other in (
    found, numbers, votes.read_votes(as_bytes, 'half'),
    votes.read_votes(rows, 'half'),
  ):  # fmt: skip
    assert other.arms == want.arms
    assert other.users == want.users
    np.testing.assert_array_equal(other.outcome, want.outcome)
  with pytest.raises(ValueError, match="no column 'winner'"):
    votes.read_votes(rows[['user', 'left', 'right']], 'half')


def test_trimming_keeps_the_busy_arms_and_users():
  table = {
    'user': ['u', 'u', 'u', 'v', 'w', 'w'],
    'left': ['a', 'b', 'a', 'a', 'c', 'c'],
    'right': ['b', 'a', 'b', 'c', 'd', 'a'],
    'winner': ['left'] * 6,
  }
  few = votes.trim_votes(votes.read_votes(table), 3)
  assert few.arms == ('a', 'b', 'c')
  assert few.users == ('u', 'v', 'w')
  fewer = votes.trim_votes(votes.read_votes(table), 3, min_votes=2)
  assert fewer.users == ('u',)
  assert fewer.arms == ('a', 'b')
  np.testing.assert_array_equal(votes.tally_table(fewer).counts[0, 0, 1], 3)
  with pytest.raises(ValueError, match='lower min_votes'):
    votes.trim_votes(votes.read_votes(table), 3, min_votes=4)


def big_table(rng, users=12, arms=5, each=400, spread=0.7):
  taste = rng.normal(0, 1, arms) + rng.normal(0, spread, (users, arms))
  user = np.repeat(np.arange(users), each)
  left = rng.integers(0, arms, len(user))
  right = (left + rng.integers(1, arms, len(user))) % arms
  p = 1 / (1 + np.exp(taste[user, right] - taste[user, left]))
  winner = np.where(rng.random(len(user)) < p, 'left', 'right')
  truth = 1 / (1 + np.exp(taste[:, None, :] - taste[:, :, None]))
  scores = (truth.sum(-1) - 0.5) / (arms - 1)
  table = {'user': user, 'left': left, 'right': right, 'winner': winner}
  return table, scores, truth


def test_halves_and_resamples_keep_every_user():
  read = votes.read_votes(big_table(np.random.default_rng(0), each=31)[0])
  a, b = votes.split_votes(read, np.random.default_rng(1))
  np.testing.assert_array_equal(np.bincount(a.user), 16)
  np.testing.assert_array_equal(np.bincount(b.user), 15)
  both = votes.tally_table(a).wins + votes.tally_table(b).wins
  np.testing.assert_array_equal(both, votes.tally_table(read).wins)
  again = votes.bootstrap_votes(read, np.random.default_rng(2))
  np.testing.assert_array_equal(np.bincount(again.user), 31)
  assert (votes.tally_table(again).wins != votes.tally_table(read).wins).any()


@pytest.mark.parametrize('kind', pooling.POOLING)
def test_every_pooling_recovers_the_scores_with_honest_errors(kind):
  table, truth, preference = big_table(np.random.default_rng(3))
  found = pooling.from_votes(table, pooling=kind, rank=4)
  p = found.preference
  np.testing.assert_allclose(p + p.swapaxes(1, 2), 1)
  np.testing.assert_allclose(found.b.mean(1), 0.5)
  z = (found.b - truth) / found.b_std
  assert np.abs(found.b - truth).mean() < 0.04
  assert 0.5 < np.sqrt((z**2).mean()) < 1.6
  # The matrix's own errors: of the right size too.
  assert (np.diagonal(found.preference_std, axis1=1, axis2=2) == 0).all()
  i, j = np.triu_indices(5, 1)
  z = (p - preference)[:, i, j] / found.preference_std[:, i, j]
  assert 0.5 < np.sqrt((z**2).mean()) < 1.6


@pytest.mark.parametrize('spread', [0.0, 0.5])
def test_errors_are_honest_where_votes_are_few(spread):
  # Four users with 25 votes each: most of the error is the population's.
  found = []
  for seed in range(25):
    table, truth, _ = big_table(np.random.default_rng(seed), 4, 5, 25, spread)
    fit = pooling.from_votes(table)
    found.append((fit.b - truth) / fit.b_std)
  assert 0.7 < np.sqrt(np.mean(np.square(found))) < 1.4


def test_the_strength_of_tastes_follows_their_spread():
  rng = np.random.default_rng(8)
  same = votes.read_votes(big_table(rng, 40, 5, 60, 0.1)[0])
  own = votes.read_votes(big_table(rng, 40, 5, 60, 1.0)[0])
  low, high = (
    pooling.choose_strength(votes.tally_table(x), 'hierarchical')
    for x in (own, same)
  )
  # The precision of normal(0, 1) tastes is one.
  assert 0.5 <= low <= 2
  assert high >= 16
  with pytest.raises(ValueError, match='choose one of'):
    pooling.choose_strength(votes.tally_table(own), 'none')


def test_groups_that_nobody_compared_are_refused():
  table = {
    'user': ['u', 'v'], 'left': ['a', 'c'], 'right': ['b', 'd'],
    'winner': ['left', 'left'],
  }  # fmt: skip
  for kind in pooling.POOLING:
    with pytest.raises(ValueError, match=r"\['a', 'b'\] and \['c', 'd'\]"):
      pooling.from_votes(table, pooling=kind)


def test_pooling_helps_where_votes_are_few():
  rng = np.random.default_rng(4)
  table, truth, _ = big_table(rng, users=30, arms=6, each=30)
  error = {}
  for kind in ('pairs', 'hierarchical'):
    found = pooling.from_votes(table, pooling=kind)
    error[kind] = np.abs(found.b - truth).mean()
  tally = votes.tally_table(votes.read_votes(table))
  raw = (tally.wins.sum(2) + 1) / (tally.counts.sum(2) + 2)
  alone = np.abs(raw - truth).mean()
  assert error['hierarchical'] < error['pairs'] + 0.01 < alone + 0.01


def test_raw_rates_need_every_pair_and_every_user():
  with pytest.raises(ValueError, match='never compared'):
    pooling.from_votes(TABLE, 'half', 'none')
  tally = votes.tally_table(votes.read_votes(TABLE, 'half'))
  tally.counts[1] = tally.wins[1] = 0
  with pytest.raises(ValueError, match='user 1 has no votes'):
    pooling.pool_users(tally)
  with pytest.raises(ValueError, match='strength'):
    pooling.from_votes(TABLE, 'half', strength=-1.0)
  with pytest.raises(ValueError, match='rank'):
    pooling.from_votes(TABLE, 'half', rank=9)


def test_strength_of_shrinkage_follows_the_spread_of_the_users():
  rng = np.random.default_rng(5)
  counts = np.full((200, 4), 20.0)
  p = np.array([0.3, 0.5, 0.6, 0.8])
  same = rng.binomial(20, np.broadcast_to(p, (200, 4)))
  own = rng.beta(4 * p, 4 * (1 - p), (200, 4))
  found = pooling.beta_strength(rng.binomial(20, own), counts, p)
  assert 2.5 < found < 6
  assert pooling.beta_strength(same, counts, p) > 60


def test_ratings_are_mann_whitney_comparisons():
  rng = np.random.default_rng(6)
  user = rng.integers(0, 3, 60)
  rating = rng.integers(1, 6, 60)
  member = rng.random((60, 4)) < 0.4
  wins, counts = votes.tally_ratings(user, rating, member, 3, range(1, 6))
  for u in range(3):
    for a in range(4):
      for b in range(4):
        x = rating[(user == u) & member[:, a]]
        y = rating[(user == u) & member[:, b]]
        if a == b or not len(x) or not len(y):
          assert counts[u, a, b] == 0
          continue
        share = (x[:, None] > y).mean() + (x[:, None] == y).mean() / 2
        both = np.concatenate([x, y])
        n = len(both)
        t = np.unique(both, return_counts=True)[1]
        spread = max(0.25, 1 - (t**3 - t).sum() / (n**3 - n))
        worth = 3 * len(x) * len(y) / ((n + 1) * spread)
        np.testing.assert_allclose(counts[u, a, b], worth)
        np.testing.assert_allclose(wins[u, a, b], share * worth)
  with pytest.raises(ValueError, match='rating 6'):
    votes.tally_ratings([0], [6], np.ones((1, 2)), 1, range(1, 6))
  with pytest.raises(ValueError, match=r'\[V, K\]'):
    votes.tally_ratings([0], [5], np.ones(2), 1, range(1, 6))


def test_effective_votes_have_the_variance_of_the_statistic():
  rng = np.random.default_rng(7)
  member = np.repeat(np.eye(2, dtype=bool), [7, 12], axis=0)
  user = np.repeat(np.arange(4000), 19)
  rating = rng.choice(5, (4000, 19), p=[0.1, 0.1, 0.3, 0.3, 0.2]) + 1
  wins, counts = votes.tally_ratings(
    user, rating.reshape(-1), np.tile(member, (4000, 1)), 4000, range(1, 6)
  )
  rate = wins[:, 0, 1] / counts[:, 0, 1]
  np.testing.assert_allclose(rate.mean(), 0.5, atol=0.01)
  want = (1 / (4 * counts[:, 0, 1])).mean()
  np.testing.assert_allclose(rate.var(), want, rtol=0.1)


def test_raw_errors_do_not_vanish_with_one_vote():
  table = {'user': ['u'], 'left': ['a'], 'right': ['b'], 'winner': ['left']}
  found = pooling.from_votes(table, pooling='none')
  np.testing.assert_allclose(found.preference[0], [[0.5, 1], [0, 0.5]])
  # Jeffreys' posterior is Beta(3/2, 1/2): variance 1/16.
  np.testing.assert_allclose(found.preference_std[0, 0, 1], 0.25)


@pytest.mark.parametrize(
  ('wins', 'counts', 'message'),
  [
    (np.ones((1, 2, 2)), np.ones((1, 2, 2)), 'must be the count'),
    (np.zeros((2, 2)), np.zeros((2, 2)), 'must be'),
    (np.zeros((1, 2, 2)), np.full((1, 2, 2), np.nan), 'finite'),
    (np.zeros((1, 2, 2)), np.full((1, 2, 2), -1.0), 'finite'),
  ],
)
def test_what_is_no_tally_is_refused(wins, counts, message):
  with pytest.raises(ValueError, match=message):
    pooling.pool_users((wins, counts))

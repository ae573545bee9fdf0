"""Estimators: exact expectations by enumeration, coverage by simulation."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from tmlib.dueling import borda, sampling

# Rock beats scissors, mostly; paper beats both, sometimes.
P = np.array([[[0.5, 0.8, 0.3], [0.2, 0.5, 0.4], [0.7, 0.6, 0.5]]])


def test_scores_by_hand():
  np.testing.assert_allclose(
    borda.borda_scores(P), [[0.55, 0.3, 0.65]], rtol=1e-6
  )


def test_iid_estimate_is_unbiased_by_enumeration():
  expected = np.zeros(3)
  for (x, y), outcome in itertools.product(
    itertools.permutations(range(3), 2), (0, 1)
  ):
    chance = P[0, x, y] if outcome else 1 - P[0, x, y]
    z = borda.borda_estimate([[x, y]], [[outcome]], 3, 'iid').b_hat[0]
    np.testing.assert_allclose(z.mean(), 0.5, rtol=1e-6)
    expected += chance / 6 * np.asarray(z)
  np.testing.assert_allclose(expected, [0.55, 0.3, 0.65], rtol=1e-6)


def test_balanced_estimate_is_unbiased_by_enumeration():
  pairs = [[0, 1], [2, 0], [1, 2]]
  expected = np.zeros(3)
  for outcome in itertools.product((0, 1), repeat=3):
    chance = np.prod(
      [
        P[0, x, y] if o else 1 - P[0, x, y]
        for (x, y), o in zip(pairs, outcome, strict=True)
      ]
    )
    estimate = borda.borda_estimate(pairs, np.array(outcome)[:, None], 3)
    np.testing.assert_allclose(estimate.b_hat.mean(), 0.5, rtol=1e-6)
    expected += chance * np.asarray(estimate.b_hat[0])
  np.testing.assert_allclose(expected, [0.55, 0.3, 0.65], rtol=1e-6)


def test_radii_by_formula():
  pairs = np.array(list(itertools.combinations(range(4), 2)) * 5)
  outcomes = np.full((30, 2), 0.5)
  level = np.log(2 * 2 * 4 / 0.1)
  balanced = borda.borda_estimate(pairs, outcomes, 4, 'balanced', 0.1)
  np.testing.assert_allclose(
    balanced.radius, np.sqrt(4 * level / (4 * 30)), rtol=1e-5
  )
  iid = borda.borda_estimate(pairs, outcomes, 4, 'iid', 0.1)
  x = 4 * level / 30
  np.testing.assert_allclose(iid.radius, np.sqrt(x / 4) + x / 12, rtol=1e-5)
  np.testing.assert_allclose(iid.b_hat, 0.5)


@pytest.mark.parametrize('design', borda.DESIGNS)
def test_radius_covers(design):
  runs, delta, arms, tau = 2000, 0.2, 4, 60
  rng = np.random.default_rng(0)
  upper = np.triu(rng.random((2, arms, arms)), 1)
  p = upper + np.tril(1 - upper.swapaxes(1, 2), -1) + np.eye(arms) / 2
  x, y = np.array(list(itertools.combinations(range(arms), 2))).T
  i, j = map(np.asarray, sampling.regret.pair_order(arms))
  if design == 'balanced':
    counts = np.full((runs, 2, 6), tau // 6)
  else:
    counts = rng.multinomial(tau, np.full(6, 1 / 6), runs)
    counts = np.broadcast_to(counts[:, None], (runs, 2, 6))
  wins = rng.binomial(counts, p[:, i, j])

  def estimate(w, c):
    tally = sampling.tally_of_pairs(w, c, arms)
    return borda.estimate_from_tally(tally, design, delta)

  found = jax.vmap(estimate)(
    jnp.asarray(wins, jnp.float32), jnp.asarray(counts, jnp.float32)
  )
  b = np.asarray(borda.borda_scores(p))
  off = np.abs(np.asarray(found.b_hat) - b) > np.asarray(found.radius)
  fails = int(off.any((1, 2)).sum())
  # One-sided 99.9 % interval for the failure rate must reach below delta.
  assert stats.binomtest(fails, runs).proportion_ci(0.998).low <= delta
  # And the estimate is unbiased: z-test of every score.
  error = np.asarray(found.b_hat) - b
  z = error.mean(0) / (error.std(0) / np.sqrt(runs))
  assert np.abs(z).max() < 4.5
  # A radius that is never wrong by far would be useless.
  assert np.asarray(found.radius).mean() < 8 * error.std()


def test_balanced_variance_is_the_formula():
  runs, tau, arms = 4000, 30, 3
  rng = np.random.default_rng(1)
  i, j = map(np.asarray, sampling.regret.pair_order(arms))
  counts = np.full((runs, 1, 3), tau // 3)
  wins = rng.binomial(counts, P[:, i, j])
  found = jax.vmap(
    lambda w, c: borda.estimate_from_tally(sampling.tally_of_pairs(w, c, 3))
  )(jnp.asarray(wins, jnp.float32), jnp.asarray(counts, jnp.float32))
  off = P[0] * (1 - P[0]) * (1 - np.eye(3))
  want = arms / (2 * tau) * off.sum(1) / (arms - 1)
  np.testing.assert_allclose(
    np.var(np.asarray(found.b_hat)[:, 0], 0), want, rtol=0.12
  )


def test_answers_of_some_users_only():
  pairs = [[0, 1], [0, 1], [1, 0]]
  outcomes = [[1.0, np.nan], [np.nan, 0.0], [0.5, np.nan]]
  answered = [[True, False], [False, True], [True, False]]
  tally = borda.tally_votes(
    jnp.array(pairs), jnp.array(outcomes), 2, jnp.array(answered)
  )
  np.testing.assert_allclose(tally.wins[:, 0, 1], [1.5, 0.0])
  np.testing.assert_allclose(tally.counts[:, 0, 1], [2, 1])
  estimate = borda.borda_estimate(pairs, outcomes, 2, answered=answered)
  np.testing.assert_allclose(estimate.b_hat, [[0.75, 0.25], [0.0, 1.0]])


@pytest.mark.parametrize(
  ('pairs', 'outcomes', 'options', 'message'),
  [
    (np.zeros((0, 2), int), np.zeros((0, 1)), {}, 'empty'),
    ([[0, 3]], [[1.0]], {}, 'allowed'),
    ([[1, 1]], [[1.0]], {}, 'against itself'),
    ([[0, 1]], [1.0], {}, r'must be \[T, 2\] and \[T, N\]'),
    ([[0, 1], [0, 2]], [[1.0]], {}, r'must be \[T, 2\] and \[T, N\]'),
    ([[0.0, 1.0]], [[1.0]], {}, 'astype'),
    ([[0, 1]], [[1.0]], {'answered': [True]}, 'answered has shape'),
    ([[0, 1]], [[1.5]], {}, r'\[0, 1\]'),
    ([[0, 1]], [[np.nan]], {}, 'answered=False'),
    ([[0, 1]], [[1.0]], {'design': 'balanced'}, 'never compared'),
    ([[0, 1]], [[1.0]], {'design': 'magic'}, 'choose one of'),
    ([[0, 1]], [[1.0]], {'delta': 0.0}, 'strictly between'),
    (
      [[0, 1]],
      [[1.0, 1.0]],
      {'answered': [[True, False]]},
      'user 1 answered no duel',
    ),
  ],
)
def test_bad_input(pairs, outcomes, options, message):
  with pytest.raises(ValueError, match=message):
    borda.borda_estimate(pairs, outcomes, 3, **options)

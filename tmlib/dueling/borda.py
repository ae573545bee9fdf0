r"""Borda scores and their two estimators.

b_u(i) = 1/(K-1) sum_{j != i} P^u_ij, hence mean_i b_u(i) = 1/2 for every user.

balanced: every pair was compared, n_ij times, whatever was answered before
  (numbers that depend on the answers bias the rates):
  b^_u(i) = 1/(K-1) sum_{j != i} wins_ij / n_ij, and by Hoeffding
  |b^ - b| <= sqrt(L/2 sum_{j != i} 1/n_ij) / (K-1), L = log(2 N K / delta);
  with tau duels spread evenly, sqrt(K L / (4 tau)).
iid: distinct ordered pairs (x, y) drawn uniformly, for each of t answers
  Z(i) = 1/2 + K/2 (1{x=i} - 1{y=i}) (o - 1/2), b^ = mean Z. Then E Z = b(i)
  (with x = y allowed it would not be), E (Z - 1/2)^2 <= K/8, |Z - 1/2| <= K/4,
  and by Bernstein's bound with an uncentred second moment
  |b^ - b| <= sqrt(K L / (4 t)) + K L / (12 t).

Both keep mean_i b^_u(i) = 1/2 exactly. Balanced duels have the smaller
variance, (K / 2 t) mean_j P_ij (1 - P_ij), and no linear term.

Axes: N users, K arms, T answered rounds.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks

__all__ = [
  'DESIGNS',
  'BordaEstimate',
  'Tally',
  'borda_estimate',
  'borda_scores',
  'estimate_from_tally',
  'tally_votes',
]

DESIGNS = ('balanced', 'iid')


class BordaEstimate(NamedTuple):
  """Estimated scores with a uniform confidence radius.

  Attributes:
    b_hat: [N, K]; unbiased, so the iid estimate may leave [0, 1].
    radius: [N, K]; with probability 1 - delta |b_hat - b| <= radius holds for
      all users and arms together.
  """

  b_hat: jax.Array
  radius: jax.Array


class Tally(NamedTuple):
  """Sufficient statistics of the answers.

  Attributes:
    wins: [N, K, K], how often i beat j (a tie counts 1/2 for both).
    counts: [N, K, K], symmetric, how often i met j; zero diagonal.
  """

  # jax arrays in a simulation, NumPy where real votes were counted.
  wins: Any
  counts: Any


def borda_scores(preference: Any) -> jax.Array:
  """Mean probability to beat another arm: b_u(i) = mean_{j != i} P^u_ij.

  Args:
    preference: [N, K, K] in [0, 1].

  Returns:
    [N, K]; every row has mean 1/2.

  Raises:
    ValueError: see `checks.check_preference`.
  """
  checks.check_preference(preference)
  preference = jnp.asarray(preference)
  arms = preference.shape[-1]
  return (preference.sum(-1) - 0.5) / (arms - 1)


def tally_votes(
  pairs: jax.Array,
  outcomes: jax.Array,
  num_arms: int,
  answered: jax.Array | None = None,
) -> Tally:
  """Counts wins and meetings per user and pair.

  Args:
    pairs: [T, 2] int in [0, K), left and right arm of each duel.
    outcomes: [T, N] in [0, 1]: 1 left wins, 0 right wins, 1/2 tie.
    num_arms: K.
    answered: [T, N] bool, None where every user answered every duel.

  Returns:
    The tally.
  """
  pairs = jnp.asarray(pairs)
  outcomes = jnp.asarray(outcomes, jnp.result_type(float))
  chex.assert_shape(pairs, (None, 2))
  chex.assert_rank(outcomes, 2)
  chex.assert_equal_shape_prefix([pairs, outcomes], 1)
  if answered is None:
    answered = jnp.ones(outcomes.shape, bool)
  answered = jnp.asarray(answered)
  users = outcomes.shape[1]
  left = jnp.where(answered, outcomes, 0).T
  right = jnp.where(answered, 1 - outcomes, 0).T
  seen = answered.T.astype(outcomes.dtype)
  x, y = pairs.T
  zeros = jnp.zeros((users, num_arms, num_arms), outcomes.dtype)
  wins = zeros.at[:, x, y].add(left).at[:, y, x].add(right)
  counts = zeros.at[:, x, y].add(seen).at[:, y, x].add(seen)
  return Tally(wins, counts)


def _check_tally(tally: Tally, design: str) -> None:
  if not checks.concrete(tally.counts):
    return
  counts = np.asarray(tally.counts)
  total = counts.sum((1, 2))
  if (total == 0).any():
    raise ValueError(
      f'user {int(np.argmin(total))} answered no duel; its scores are unknown '
      '(drop the user, pool users, or explore longer)'
    )
  missing = (counts == 0) & ~np.eye(counts.shape[-1], dtype=bool)
  if design == 'balanced' and missing.any():
    user, i, j = np.argwhere(missing)[0]
    raise ValueError(
      f"design='balanced' needs every pair; user {user} never compared arms "
      f"{i} and {j}; use design='iid' (uniform pairs) or pool users"
    )


def estimate_from_tally(
  tally: Tally, design: str = 'balanced', delta: Any = 0.05
) -> BordaEstimate:
  """Estimates Borda scores from counts; the module docstring has the formulas.

  Args:
    tally: wins and counts, [N, K, K] each.
    design: 'balanced' (every pair compared) or 'iid' (uniform distinct pairs).
    delta: in (0, 1), probability that some radius fails.

  Returns:
    Scores and radii, [N, K] each.

  Raises:
    ValueError: a user without answers; a pair without answers in a balanced
      design; an unknown design or a delta outside (0, 1).
  """
  checks.check_choice('design', design, DESIGNS)
  checks.check_probability('delta', delta)
  _check_tally(tally, design)
  wins, counts = tally
  users, arms = wins.shape[:2]
  level = jnp.log(2 * users * arms / delta)
  if design == 'iid':
    total = counts.sum((1, 2)) / 2
    lead = (wins - counts / 2).sum(-1)
    b_hat = 0.5 + arms / 2 * lead / total[:, None]
    x = arms * level / total
    radius = jnp.sqrt(x / 4) + x / 12
    return BordaEstimate(
      b_hat, jnp.broadcast_to(radius[:, None], b_hat.shape).astype(b_hat.dtype)
    )
  other = ~jnp.eye(arms, dtype=bool)[None]
  rate = jnp.where(other, wins / jnp.where(other, counts, 1), 0)
  inverse = jnp.where(other, 1 / jnp.where(other, counts, 1), 0)
  radius = jnp.sqrt(level / 2 * inverse.sum(-1)) / (arms - 1)
  return BordaEstimate(rate.sum(-1) / (arms - 1), radius.astype(rate.dtype))


def borda_estimate(
  pairs: Any,
  outcomes: Any,
  num_arms: int,
  design: str | None = None,
  delta: float = 0.05,
  answered: Any = None,
) -> BordaEstimate:
  """Estimates Borda scores from a log of duels.

  Args:
    pairs: [T, 2] int in [0, K), left and right arm.
    outcomes: [T, N] in [0, 1]: 1 left wins, 0 right wins, 1/2 tie.
    num_arms: K >= 2.
    design: 'balanced' or 'iid'; None takes balanced if every user compared
      every pair, else iid, whose estimate is unbiased only for pairs that were
      drawn uniformly.
    delta: in (0, 1), probability that some radius fails.
    answered: [T, N] bool, which users answered; None: all.

  Returns:
    Scores and radii, [N, K] each.

  Raises:
    ValueError: no duel, an arm outside [0, K), an arm against itself, an
      outcome outside [0, 1] or NaN; see `estimate_from_tally`.
  """
  if num_arms < 2:
    raise ValueError(f'num_arms={num_arms}; Borda scores need at least two')
  if checks.concrete(pairs, outcomes, answered):
    p, o = np.asarray(pairs), np.asarray(outcomes, np.float64)
    if p.size == 0:
      raise ValueError('pairs is empty; at least one duel is needed')
    if p.ndim != 2 or p.shape[1] != 2 or o.ndim != 2 or len(o) != len(p):
      raise ValueError(
        f'pairs {p.shape} and outcomes {o.shape} must be [T, 2] and [T, N] '
        '(one user: outcomes[:, None])'
      )
    if not np.issubdtype(p.dtype, np.integer):
      raise ValueError(
        f'pairs has dtype {p.dtype}; arms are numbered by integers in [0, '
        f'{num_arms}): use pairs.astype(int)'
      )
    if answered is not None and np.shape(answered) != o.shape:
      raise ValueError(
        f'answered has shape {np.shape(answered)}; it must match outcomes, '
        f'{o.shape}'
      )
    if p.min() < 0 or p.max() >= num_arms:
      raise ValueError(
        f'pairs has arms in [{p.min()}, {p.max()}]; allowed: [0, {num_arms})'
      )
    if (p[:, 0] == p[:, 1]).any():
      raise ValueError(
        f'duel {int(np.argmax(p[:, 0] == p[:, 1]))} pits an arm against '
        'itself, which biases the scores by (K-1)/K; drop it'
      )
    used = o if answered is None else o[np.asarray(answered)]
    if not ((used >= 0) & (used <= 1)).all():
      raise ValueError(
        'outcomes must lie in [0, 1] and not be NaN; mark missing answers '
        'with answered=False'
      )
  tally = tally_votes(pairs, outcomes, num_arms, answered)
  if design is None:
    meets = np.asarray(tally.counts) + np.eye(num_arms)
    design = 'balanced' if (meets > 0).all() else 'iid'
  return estimate_from_tally(tally, design, delta)

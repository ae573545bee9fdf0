r"""Few votes per user: estimates that borrow from the other users.

  none          wins / counts; needs every pair of every user.
  pairs         beta-binomial: a user's pair is shrunk to the population's rate
                of that pair, (w + s p) / (c + s), which keeps any structure,
                cycles included. The population's rate is itself shrunk to 1/2.
  hierarchical  Bradley-Terry: P_ij = sigmoid(t_i - t_j), t_u = t_0 + d_u, with
                d_u normal around zero. For votes too few for pairs; it cannot
                express a cycle.
  low_rank      the same, with deviations d_u confined to the first singular
                directions of the hierarchical ones.

The strength of the shrinkage is chosen by marginal likelihood (pairs) or given.
Standard errors of the scores are posterior ones (beta; Laplace).

Axes: N users, K arms, P pairs.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from scipy import special

from tmlib.dueling import borda, checks, glm, votes

__all__ = [
  'POOLING',
  'VotePreferences',
  'beta_strength',
  'from_votes',
  'pool_users',
]

POOLING = ('none', 'pairs', 'hierarchical', 'low_rank')


class VotePreferences(NamedTuple):
  """Preferences estimated from votes, with their uncertainty.

  Attributes:
    preference: [N, K, K], ready for `make_env`.
    b: [N, K], Borda scores.
    b_std: [N, K], their standard errors.
    users: names, length N.
    arms: names, length K.
  """

  preference: np.ndarray
  b: np.ndarray
  b_std: np.ndarray
  users: tuple[Any, ...]
  arms: tuple[Any, ...]


def _scores(p: np.ndarray) -> np.ndarray:
  return (p.sum(-1) - 0.5) / (p.shape[-1] - 1)


def _with_half(p: np.ndarray) -> np.ndarray:
  """Antisymmetrises and sets the diagonal to 1/2."""
  p = (p + 1 - p.swapaxes(-1, -2)) / 2
  arms = p.shape[-1]
  p[..., np.arange(arms), np.arange(arms)] = 0.5
  return p


def beta_strength(wins: np.ndarray, counts: np.ndarray, p: np.ndarray) -> float:
  """Strength s of the prior Beta(s p, s (1 - p)) of greatest likelihood.

  Args:
    wins: [N, P], may be fractional.
    counts: [N, P].
    p: [P] in (0, 1), population rates.

  Returns:
    s, from a grid between 0.5 and 512.
  """
  grid = 2.0 ** np.arange(-1, 9.5, 0.5)
  a = grid[:, None, None] * p
  b = grid[:, None, None] * (1 - p)
  value = special.betaln(a + wins, b + counts - wins) - special.betaln(a, b)
  return float(grid[value.sum((1, 2)).argmax()])


def _pool_pairs(tally, strength):
  arms = tally.wins.shape[1]
  i, j = np.triu_indices(arms, 1)
  wins, counts = tally.wins[:, i, j], tally.counts[:, i, j]
  population = (wins.sum(0) + 1) / (counts.sum(0) + 2)
  if strength is None:
    strength = beta_strength(wins, counts, population)
  rate = (wins + strength * population) / (counts + strength)
  variance = rate * (1 - rate) / (counts + strength + 1)
  shape = tally.wins.shape
  p, v = np.full(shape, 0.5), np.zeros(shape)
  p[:, i, j], p[:, j, i] = rate, 1 - rate
  v[:, i, j] = v[:, j, i] = variance
  return p, np.sqrt(v.sum(-1)) / (arms - 1)


def _raw(tally):
  arms = tally.wins.shape[1]
  missing = (tally.counts == 0) & ~np.eye(arms, dtype=bool)
  if missing.any():
    user, i, j = np.argwhere(missing)[0]
    raise ValueError(
      f'user {user} never compared arms {i} and {j} ({int(missing.sum()) // 2} '
      "such pairs in all); use pooling='pairs' or 'hierarchical'"
    )
  counts = np.where(tally.counts > 0, tally.counts, 1)
  p = _with_half(tally.wins / counts)
  variance = p * (1 - p) / counts * (1 - np.eye(arms))
  return p, np.sqrt(variance.sum(-1)) / (arms - 1)


def _bradley_terry(tally, strength, rank):
  arms = tally.wins.shape[1]
  i, j = np.triu_indices(arms, 1)
  met = tally.counts[:, i, j]
  used = met.sum(0) > 0
  x, y = i[used], j[used]
  phi = np.eye(arms)[x] - np.eye(arms)[y]
  wins, counts = tally.wins[:, x, y], tally.counts[:, x, y]
  fit = lambda f, w, c, l2, offset: np.asarray(
    glm.glm_mle(
      jnp.asarray(f), jnp.asarray(w), jnp.asarray(c), 'logistic', l2, 10, offset
    ),
    np.float64,
  )
  f32 = lambda a: np.asarray(a, np.float32)
  centre = fit(f32(phi), f32(wins.sum(0)[None]), f32(counts.sum(0)[None]), 1.0,
               None)[0]  # fmt: skip
  offset = jnp.asarray(f32(phi @ centre))
  strength = 4.0 if strength is None else strength
  deviation = fit(f32(phi), f32(wins), f32(counts), strength, offset)
  basis = np.eye(arms)
  if rank is not None:
    basis = np.linalg.svd(deviation, full_matrices=False)[2][:rank].T
    part = fit(f32(phi @ basis), f32(wins), f32(counts), strength, offset)
    deviation = part @ basis.T
  taste = centre + deviation
  p = special.expit(taste[:, :, None] - taste[:, None, :])
  slope = p * (1 - p) * (1 - np.eye(arms)) / (arms - 1)
  # Laplace: covariance of t_u in the basis, pushed through db_i / dt.
  jacobian = np.eye(arms) * slope.sum(-1)[:, :, None] - slope
  design = phi @ basis
  margin = phi @ taste.T
  weight = counts * (special.expit(margin) * special.expit(-margin)).T
  hessian = np.einsum('md,nm,me->nde', design, weight, design)
  hessian += strength * np.eye(basis.shape[1])
  push = jacobian @ basis
  solved = np.linalg.solve(hessian, push.swapaxes(1, 2))
  variance = np.einsum('nkd,ndk->nk', push, solved)
  return p, np.sqrt(variance)


def pool_users(
  tally: borda.Tally,
  pooling: str = 'pairs',
  strength: float | None = None,
  rank: int = 2,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Estimates every user's preferences, borrowing strength.

  Args:
    tally: wins and counts, [N, K, K] each; counts may be fractional.
    pooling: one of `POOLING`.
    strength: of the shrinkage, > 0: prior votes per pair ('pairs'; None: by
      marginal likelihood) or precision of a user's deviation from the
      population (Bradley-Terry; None: 4).
    rank: directions of 'low_rank'.

  Returns:
    preference [N, K, K], b [N, K], b_std [N, K], float64.

  Raises:
    ValueError: an unknown pooling, a user without votes, a pair that
      pooling='none' misses, strength <= 0, or rank outside [1, K].
  """
  checks.check_choice('pooling', pooling, POOLING)
  if strength is not None:
    checks.check_positive('strength', strength)
  tally = borda.Tally(*(np.asarray(x, np.float64) for x in tally))
  arms = tally.wins.shape[1]
  if not 1 <= rank <= arms:
    raise ValueError(f'rank={rank} must lie in [1, K = {arms}]')
  seen = tally.counts.sum((1, 2))
  if (seen == 0).any():
    raise ValueError(
      f'user {int(seen.argmin())} has no votes; drop the user (a row of halves '
      'would pass for knowledge)'
    )
  if pooling == 'none':
    p, std = _raw(tally)
  elif pooling == 'pairs':
    p, std = _pool_pairs(tally, strength)
  else:
    p, std = _bradley_terry(
      tally, strength, rank if pooling == 'low_rank' else None
    )
  p = _with_half(p)
  return p, _scores(p), std


def from_votes(
  table: Any,
  ties: str = 'half',
  pooling: str = 'hierarchical',
  strength: float | None = None,
  rank: int = 2,
  columns: Any = None,
) -> VotePreferences:
  """From a table of votes to preferences with uncertainty.

  Args:
    table: see `votes.read_votes`; or a `votes.Votes`.
    ties: 'half' or 'drop'.
    pooling: one of `POOLING`.
    strength: see `pool_users`.
    rank: see `pool_users`.
    columns: see `votes.read_votes`.

  Returns:
    The preferences; `make_env(result.preference)` simulates these users.

  Raises:
    ValueError: see `votes.read_votes` and `pool_users`.
  """
  if not isinstance(table, votes.Votes):
    table = votes.read_votes(table, ties, columns)
  p, b, std = pool_users(votes.tally_table(table), pooling, strength, rank)
  return VotePreferences(p, b, std, table.users, table.arms)

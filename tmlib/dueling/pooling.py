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

The strength of the shrinkage is chosen by marginal likelihood or given. The
population is that of the votes: who votes more, weighs more in it. Standard
errors are posterior ones (beta; Laplace, with the population's own error); for
few votes they lean on the prior, as the estimates do.

Axes: N users, K arms, P pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse, special

from tmlib.dueling import borda, checks, glm, votes

__all__ = [
  'POOLING',
  'Pooled',
  'VotePreferences',
  'beta_strength',
  'choose_strength',
  'from_votes',
  'pool_users',
]

POOLING = ('none', 'pairs', 'hierarchical', 'low_rank')
STRENGTHS = tuple(2.0**k for k in range(-2, 8))


class Pooled(NamedTuple):
  """Estimated preferences and scores of all users.

  Attributes:
    preference: [N, K, K], ready for `make_env`.
    preference_std: [N, K, K], standard errors.
    b: [N, K], Borda scores.
    b_std: [N, K], standard errors.
  """

  preference: np.ndarray
  preference_std: np.ndarray
  b: np.ndarray
  b_std: np.ndarray


class VotePreferences(NamedTuple):
  """Preferences estimated from votes, with their uncertainty.

  Attributes:
    preference: [N, K, K], ready for `make_env`.
    preference_std: [N, K, K], standard errors.
    b: [N, K], Borda scores.
    b_std: [N, K], standard errors.
    users: names, length N.
    arms: names, length K.
  """

  preference: np.ndarray
  preference_std: np.ndarray
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


def choose_strength(tally: borda.Tally, pooling: str) -> float:
  """Strength of the shrinkage of greatest marginal likelihood, on a grid.

  Args:
    tally: wins and counts, [N, K, K] each.
    pooling: 'pairs' (prior votes per pair), or 'hierarchical' or 'low_rank'
      (precision of a user's deviation; Laplace).

  Returns:
    The strength.

  Raises:
    ValueError: another pooling.
  """
  checks.check_choice('pooling', pooling, POOLING[1:])
  if pooling != 'pairs':
    duels = _duels(tally)
    centre = _centre(duels)
    return max(STRENGTHS, key=lambda s: _evidence(duels, centre, s))
  i, j = np.triu_indices(np.shape(tally.wins)[1], 1)
  wins, counts = (np.asarray(x)[:, i, j] for x in tally)
  return beta_strength(wins, counts, _population(wins, counts))


def _population(wins, counts):
  return (wins.sum(0) + 1) / (counts.sum(0) + 2)


def _pool_pairs(tally, strength):
  arms = tally.wins.shape[1]
  i, j = np.triu_indices(arms, 1)
  wins, counts = tally.wins[:, i, j], tally.counts[:, i, j]
  population = _population(wins, counts)
  rate = (wins + strength * population) / (counts + strength)
  variance = rate * (1 - rate) / (counts + strength + 1)
  shape = tally.wins.shape
  p, v = np.full(shape, 0.5), np.zeros(shape)
  p[:, i, j], p[:, j, i] = rate, 1 - rate
  v[:, i, j] = v[:, j, i] = variance
  return p, np.sqrt(v), np.sqrt(v.sum(-1)) / (arms - 1)


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
  # Jeffreys' posterior: one vote of one is not certainty.
  middle = (tally.wins + 0.5) / (counts + 1)
  variance = middle * (1 - middle) / (counts + 2) * (1 - np.eye(arms))
  return p, np.sqrt(variance), np.sqrt(variance.sum(-1)) / (arms - 1)


class _Duels(NamedTuple):
  """The pairs: differences [P, K], wins and counts [N, P]."""

  phi: np.ndarray
  wins: np.ndarray
  counts: np.ndarray


def _fit(phi, wins, counts, l2, offset=None):
  """`glm.glm_mle` in float64; raises where Newton did not converge."""
  with jax.enable_x64(True):
    phi, wins, counts = (jnp.asarray(x) for x in (phi, wins, counts))
    offset = None if offset is None else jnp.asarray(offset)
    fit = glm.glm_mle(phi, wins, counts, 'logistic', l2, 30, offset)
    theta, residual = np.asarray(fit.theta), np.asarray(fit.residual)
  if not (residual < 1e-3).all():
    raise ValueError(
      f'the Bradley-Terry fit of user {int(residual.argmax())} did not '
      f'converge (residual {residual.max():.2g}); raise strength'
    )
  return theta


def _information(duels, taste):
  """phi^T W_u phi of every user, [N, K, K]."""
  margin = duels.phi @ taste.T
  weight = duels.counts * (special.expit(margin) * special.expit(-margin)).T
  return np.einsum('mk,nm,ml->nkl', duels.phi, weight, duels.phi)


def _evidence(duels: _Duels, centre: np.ndarray, strength: float) -> float:
  """Laplace's log marginal likelihood of the users' deviations."""
  offset = duels.phi @ centre
  deviation = _fit(*duels, strength, offset)
  x = deviation @ duels.phi.T + offset
  fit = (duels.wins * x - duels.counts * np.logaddexp(0, x)).sum()
  hessian = _information(duels, centre + deviation) / strength
  hessian += np.eye(len(centre))
  prior = strength / 2 * (deviation**2).sum()
  return fit - prior - np.linalg.slogdet(hessian)[1].sum() / 2


def _duels(tally):
  wins, counts = map(np.asarray, tally)
  arms = wins.shape[1]
  # All pairs, compared or not: one shape, so one compilation.
  i, j = np.triu_indices(arms, 1)
  phi = np.eye(arms)[i] - np.eye(arms)[j]
  return _Duels(phi, wins[:, i, j], counts[:, i, j])


def _centre(duels):
  """The population's taste, from all votes together."""
  wins, counts = duels.wins.sum(0)[None], duels.counts.sum(0)[None]
  return _fit(duels.phi, wins, counts, 1.0)[0]


def _bradley_terry(tally, strength, rank):
  arms = tally.wins.shape[1]
  duels = _duels(tally)
  centre = _centre(duels)
  deviation = _fit(*duels, strength, duels.phi @ centre)
  basis = np.eye(arms)
  if rank is not None:
    basis = np.linalg.svd(deviation, full_matrices=False)[2][:rank].T
    part = _fit(duels.phi @ basis, *duels[1:], strength, duels.phi @ centre)
    deviation = part @ basis.T
  taste = centre + deviation
  p = special.expit(taste[:, :, None] - taste[:, None, :])
  cov = _covariance(_information(duels, taste), basis, strength)
  slope = p * (1 - p)
  spread = np.einsum('nkk->nk', cov)
  spread = spread[:, :, None] + spread[:, None, :] - 2 * cov
  push = slope * (1 - np.eye(arms)) / (arms - 1)
  push = np.eye(arms) * push.sum(-1)[:, :, None] - push
  variance = np.einsum('nkl,nlm,nkm->nk', push, cov, push)
  return p, slope * np.sqrt(np.maximum(spread, 0)), np.sqrt(variance)


def _covariance(information, basis, strength):
  """Laplace's covariance of t_u = t_0 + B d_u, centre included, [N, K, K]."""
  arms = len(basis)
  inner = np.einsum('kd,nkl,le->nde', basis, information, basis)
  inner = np.linalg.inv(inner + strength * np.eye(basis.shape[1]))
  own = np.einsum('kd,nde,le->nkl', basis, inner, basis)
  seen = np.eye(arms) - own @ information
  # Schur complement: what all users together tell about the centre.
  centre = np.eye(arms) + (information @ seen).sum(0)
  return own + seen @ np.linalg.inv(centre) @ seen.swapaxes(1, 2)


def _check_connected(counts, names):
  """Raises where the arms fall into groups that nobody compared."""
  groups, label = sparse.csgraph.connected_components(counts.sum(0) > 0)
  if groups > 1:
    parts = [
      [names[k] for k in np.flatnonzero(label == g)[:4]] for g in range(groups)
    ]
    raise ValueError(
      f'the arms fall into {groups} groups that nobody compared with one '
      f'another, such as {parts[0]} and {parts[1]}; their order is unknown: '
      'keep one group or collect votes between them'
    )


def pool_users(
  tally: borda.Tally,
  pooling: str = 'pairs',
  strength: float | None = None,
  rank: int = 2,
) -> Pooled:
  """Estimates every user's preferences, borrowing strength.

  Args:
    tally: wins and counts, [N, K, K] each; counts may be fractional.
    pooling: one of `POOLING`.
    strength: of the shrinkage, > 0; None: `choose_strength`.
    rank: directions of 'low_rank'.

  Returns:
    The estimates, float64.

  Raises:
    ValueError: an unknown pooling, a user without votes, groups of arms that
      nobody compared, a pair that pooling='none' misses, strength <= 0, rank
      outside [1, K], or a tally that is no tally.
  """
  checks.check_choice('pooling', pooling, POOLING)
  if strength is not None:
    checks.check_positive('strength', strength)
  tally = borda.Tally(*(np.asarray(x, np.float64) for x in tally))
  _check_tally(tally)
  arms = tally.wins.shape[1]
  if not 1 <= rank <= arms:
    raise ValueError(f'rank={rank} must lie in [1, K = {arms}]')
  seen = tally.counts.sum((1, 2))
  if (seen == 0).any():
    raise ValueError(
      f'user {int(seen.argmin())} has no votes; drop the user (a row of halves '
      'would pass for knowledge)'
    )
  _check_connected(tally.counts, range(arms))
  if strength is None and pooling != 'none':
    strength = choose_strength(tally, pooling)
  if pooling == 'none':
    p, p_std, b_std = _raw(tally)
  elif pooling == 'pairs':
    p, p_std, b_std = _pool_pairs(tally, strength)
  else:
    low = rank if pooling == 'low_rank' else None
    p, p_std, b_std = _bradley_terry(tally, strength, low)
  p = _with_half(p)
  return Pooled(p, p_std, _scores(p), b_std)


def _check_tally(tally):
  wins, counts = tally
  shape = counts.shape
  if len(shape) != 3 or shape[1] != shape[2] or wins.shape != shape:
    raise ValueError(
      f'wins {wins.shape} and counts {shape} must be [N, K, K] each'
    )
  if not (np.isfinite(counts).all() and (counts >= 0).all()):
    raise ValueError('counts must be finite and at least 0')
  error = np.abs(wins + wins.swapaxes(1, 2) - counts) > 1e-6 * (1 + counts)
  error |= ~((wins >= 0) & (wins <= counts + 1e-6 * (1 + counts)))
  if error.any():
    user, i, j = np.argwhere(error)[0]
    raise ValueError(
      f'user {user}, arms {i} and {j}: wins {wins[user, i, j]:g} + '
      f'{wins[user, j, i]:g} must be the count {counts[user, i, j]:g}'
    )


def from_votes(
  table: Any,
  ties: str | None = None,
  pooling: str = 'hierarchical',
  strength: float | None = None,
  rank: int = 2,
  columns: Any = None,
  winners: Any = None,
) -> VotePreferences:
  """From a table of votes to preferences with uncertainty.

  Args:
    table: see `votes.read_votes`; or a `votes.Votes`.
    ties: 'half' or 'drop'; needed where the table has ties.
    pooling: one of `POOLING`.
    strength: see `pool_users`.
    rank: see `pool_users`.
    columns: see `votes.read_votes`.
    winners: see `votes.read_votes`.

  Returns:
    The preferences; `make_env(result.preference)` simulates these users.

  Raises:
    ValueError: see `votes.read_votes` and `pool_users`.
  """
  if not isinstance(table, votes.Votes):
    table = votes.read_votes(table, ties, columns, winners)
  tally = votes.tally_table(table)
  _check_connected(tally.counts, table.arms)
  found = pool_users(tally, pooling, strength, rank)
  return VotePreferences(*found, table.users, table.arms)

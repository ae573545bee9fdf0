r"""Real votes: tables of (user, left, right, winner), and ratings.

Ties carry information about closeness but none about direction: 'half' scores
them 1/2 for both sides, 'drop' removes them.

Ratings become comparisons of groups of items (genres, brands): for a user who
rated n_a items of group a and n_b of group b, every pair of them is a duel, and
the share won by a is the Mann-Whitney statistic. Its pairs share items and ties
are common, so its variance is that of
  c = 3 n_a n_b / ((n_a + n_b + 1) (1 - sum_r (t_r^3 - t_r) / (n^3 - n)))
independent votes between equals, n = n_a + n_b, t_r of them with rating r; it
is stored as so many votes (the tie factor is kept above 1/4).

Axes: V votes, N users, K arms, R rating levels.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tmlib.dueling import borda, checks

__all__ = [
  'TIES',
  'Votes',
  'bootstrap_votes',
  'read_votes',
  'split_votes',
  'tally_ratings',
  'tally_table',
  'trim_votes',
]

TIES = ('half', 'drop')
COLUMNS = ('user', 'left', 'right', 'winner')
WINNERS = ('left', 'right', 'tie')


class Votes(NamedTuple):
  """A table of votes with names replaced by numbers.

  Attributes:
    user: [V] int in [0, N).
    left: [V] int in [0, K).
    right: [V] int in [0, K).
    outcome: [V] in {0, 1/2, 1}: 1 left won.
    users: names, length N.
    arms: names, length K.
  """

  user: np.ndarray
  left: np.ndarray
  right: np.ndarray
  outcome: np.ndarray
  users: tuple[Any, ...]
  arms: tuple[Any, ...]


def _is_gap(x: Any) -> bool:
  """None, NaN, pandas' NA or an empty text."""
  return x is None or type(x).__name__ == 'NAType' or x != x or x in ('', b'')


def _column(table: Any, name: str) -> np.ndarray:
  try:
    column = np.asarray(table[name])
  except (KeyError, TypeError, IndexError, ValueError) as error:
    # Mappings list their keys, frames their columns, structured arrays fields.
    found = getattr(getattr(table, 'dtype', None), 'names', None)
    if found is None:
      found = list(table) if hasattr(table, 'keys') else 'unknown'
    raise ValueError(
      f'the table has no column {name!r} (it has {found}); pass '
      "columns={'user': ..., 'left': ..., 'right': ..., 'winner': ...}"
    ) from error
  if column.ndim != 1:
    raise ValueError(f'column {name!r} has shape {column.shape}; expected [V]')
  values = column.tolist()
  missing = np.array([_is_gap(x) for x in values], bool)
  if missing.any():
    row = int(np.argmax(missing))
    raise ValueError(
      f'row {row} has no {name!r} ({int(missing.sum())} such rows); remove them'
    )
  kinds = {type(x).__name__ for x in values}
  if len(kinds) > 1:
    raise ValueError(
      f'column {name!r} mixes {sorted(kinds)}; convert it to one type'
    )
  if kinds == {'bytes'}:
    return np.array([x.decode() for x in values])
  return np.array(values) if column.dtype.kind == 'O' else column


def _sides(winner, left, right, winners):
  """'left', 'right' or 'tie' for every row."""
  said = winner.astype(str)
  table = {str(k): v for k, v in (winners or {k: k for k in WINNERS}).items()}
  if not set(table.values()) <= set(WINNERS):
    raise ValueError(
      f"winners={dict(winners)} must map to 'left', 'right' or 'tie'"
    )
  known = np.isin(said, list(table))
  if not known.all():
    row = int(np.argmin(known))
    fix = "pass winners={'what the table says': 'left' | 'right' | 'tie', ...}"
    if winner[row] in (left[row], right[row]):
      fix = "it names an arm: use np.where(winner == left, 'left', 'right')"
    raise ValueError(
      f'winner {str(said[row])!r} in row {row} must be '
      f'{" or ".join(map(repr, table))}; {fix}'
    )
  word, index = np.unique(said, return_inverse=True)
  return np.array([table[w] for w in word])[index]


def read_votes(
  table: Any,
  ties: str | None = None,
  columns: Mapping[str, str] | None = None,
  winners: Mapping[Any, str] | None = None,
) -> Votes:
  """Reads a table of votes.

  Rows are taken as they are: a vote that stands in the table twice counts
  twice.

  Args:
    table: anything with `table[name] -> [V]`: a dict of arrays, a pandas or
      structured frame. Names may be texts, bytes (UTF-8) or numbers.
    ties: 'half' or 'drop'; needed where the table has ties, as no choice is
      harmless.
    columns: names of the columns user, left, right and winner where they differ
      from these words.
    winners: what the column `winner` says -> 'left', 'right' or 'tie', where it
      does not say just that.

  Returns:
    The votes. Users and arms are sorted by name; a user all of whose votes were
    dropped is an error, not a row of halves.

  Raises:
    ValueError: a missing column or value, columns of different length or mixed
      types, no vote, an unknown winner, an arm against itself, ties without
      `ties`, a user left without votes.
  """
  if ties is not None:
    checks.check_choice('ties', ties, TIES)
  names = {k: k for k in COLUMNS}
  for key, value in (columns or {}).items():
    if key not in names:
      raise ValueError(f'columns has the key {key!r}; allowed: {COLUMNS}')
    names[key] = value
  user, left, right, winner = (_column(table, names[k]) for k in COLUMNS)
  if not len(user) == len(left) == len(right) == len(winner):
    raise ValueError(
      f'columns have lengths {len(user)}, {len(left)}, {len(right)}, '
      f'{len(winner)}; they must agree'
    )
  if len(user) == 0:
    raise ValueError('the table has no vote')
  side = _sides(winner, left, right, winners)
  tied = side == 'tie'
  if tied.any() and ties is None:
    raise ValueError(
      f'{int(tied.sum())} of {len(tied)} votes are ties; say ties="half" (half '
      'a win for both) or ties="drop"'
    )
  users, user = np.unique(user, return_inverse=True)
  arms, both = np.unique(np.concatenate([left, right]), return_inverse=True)
  left, right = both[: len(left)], both[len(left) :]
  if (left == right).any():
    row = int(np.argmax(left == right))
    raise ValueError(
      f'row {row} compares {str(arms[left[row]])!r} with itself '
      f'({int((left == right).sum())} such rows); remove them'
    )
  outcome = np.select([side == 'left', tied], [1.0, 0.5], 0.0)
  keep = ~tied if ties == 'drop' else np.ones(len(user), bool)
  votes = np.bincount(user[keep], minlength=len(users))
  if (votes == 0).any():
    raise ValueError(
      f'user {str(users[int(np.argmin(votes))])!r} has no vote but ties; use '
      "ties='half' or remove the user"
    )
  return Votes(
    user[keep],
    left[keep],
    right[keep],
    outcome[keep],
    tuple(users.tolist()),
    tuple(arms.tolist()),
  )


def tally_table(votes: Votes) -> borda.Tally:
  """Counts wins and meetings per user and pair.

  Args:
    votes: the table.

  Returns:
    The tally, NumPy float64 [N, K, K] each.
  """
  shape = (len(votes.users), len(votes.arms), len(votes.arms))
  wins, counts = np.zeros(shape), np.zeros(shape)
  u, x, y, o = votes.user, votes.left, votes.right, votes.outcome
  np.add.at(wins, (u, x, y), o)
  np.add.at(wins, (u, y, x), 1 - o)
  np.add.at(counts, (u, x, y), 1)
  np.add.at(counts, (u, y, x), 1)
  return borda.Tally(wins, counts)


def _take(votes: Votes, rows: np.ndarray) -> Votes:
  return votes._replace(
    user=votes.user[rows],
    left=votes.left[rows],
    right=votes.right[rows],
    outcome=votes.outcome[rows],
  )


def trim_votes(votes: Votes, num_arms: int, min_votes: int = 1) -> Votes:
  """Keeps the arms with the most votes, then the users with enough of them.

  Args:
    votes: the table.
    num_arms: arms to keep, at least 2.
    min_votes: least votes of a user among these arms.

  Returns:
    The smaller table; users and arms are numbered anew.

  Raises:
    ValueError: nobody is left.
  """
  met = np.bincount(np.concatenate([votes.left, votes.right]))
  arms = np.sort(np.argsort(-met, kind='stable')[:num_arms])
  keep = np.isin(votes.left, arms) & np.isin(votes.right, arms)
  size = np.bincount(votes.user[keep], minlength=len(votes.users))
  keep &= size[votes.user] >= max(min_votes, 1)
  if not keep.any():
    raise ValueError(
      f'no user has min_votes={min_votes} votes among {len(arms)} arms (most: '
      f'{size.max()}); lower min_votes or keep more arms'
    )
  rest = _take(votes, np.flatnonzero(keep))
  users, user = np.unique(rest.user, return_inverse=True)
  arms, both = np.unique(
    np.concatenate([rest.left, rest.right]), return_inverse=True
  )
  left, right = np.split(both, 2)
  return Votes(
    user,
    left,
    right,
    rest.outcome,
    tuple(votes.users[u] for u in users),
    tuple(votes.arms[k] for k in arms),
  )


def split_votes(votes: Votes, rng: np.random.Generator) -> tuple[Votes, Votes]:
  """Splits every user's votes into two halves.

  Args:
    votes: the table.
    rng: decides the split.

  Returns:
    Two tables over the same users and arms; with an odd number of votes the
    first half has one more.
  """
  order = rng.permutation(len(votes.user))
  order = order[np.argsort(votes.user[order], kind='stable')]
  user = votes.user[order]
  first = np.searchsorted(user, user)
  even = (np.arange(len(user)) - first) % 2 == 0
  return _take(votes, order[even]), _take(votes, order[~even])


def bootstrap_votes(votes: Votes, rng: np.random.Generator) -> Votes:
  """Resamples every user's votes with replacement.

  Args:
    votes: the table.
    rng: decides the draw.

  Returns:
    A table of the same size for every user.
  """
  order = np.argsort(votes.user, kind='stable')
  user = votes.user[order]
  start = np.searchsorted(user, user)
  size = np.bincount(user, minlength=len(votes.users))[user]
  return _take(votes, order[start + rng.integers(0, size)])


def tally_ratings(
  user: Any, rating: Any, member: Any, num_users: int, levels: Sequence[float]
) -> borda.Tally:
  """Turns ratings into comparisons between groups of items.

  Args:
    user: [V] int in [0, N), who rated.
    rating: [V], one of `levels`.
    member: [V, K] bool, groups of the rated item; it may belong to several.
    num_users: N.
    levels: [R], the rating scale, ascending.

  Returns:
    The tally, float64 [N, K, K] each, in effective votes (module docstring);
    zero where a user rated nothing of a group.

  Raises:
    ValueError: a rating outside the scale, or arrays that do not match.
  """
  user, rating = np.asarray(user), np.asarray(rating)
  member = np.asarray(member, bool)
  if member.ndim != 2 or not len(user) == len(rating) == len(member):
    raise ValueError(
      f'user {user.shape}, rating {rating.shape} and member {member.shape} '
      'must be [V], [V] and [V, K]'
    )
  scale = np.asarray(levels, np.float64)
  level = np.searchsorted(scale, rating)
  level = np.minimum(level, len(scale) - 1)
  if not np.allclose(scale[level], rating):
    row = int(np.argmin(np.isclose(scale[level], rating)))
    raise ValueError(f'rating {rating[row]} in row {row} is not in {levels}')
  arms = member.shape[1]
  histogram = np.zeros((num_users, len(scale), arms))
  np.add.at(histogram, (user, level), member)
  below = np.cumsum(histogram, 1) - histogram / 2
  won = np.einsum('nra,nrb->nab', histogram, below)
  size = histogram.sum(1)
  pairs = size[:, :, None] * size[:, None, :]
  rate = won / np.where(pairs > 0, pairs, 1)
  total = size[:, :, None] + size[:, None, :]
  tied = histogram[:, :, :, None] + histogram[:, :, None, :]
  cubes = np.maximum(total**3 - total, 1)
  spread = 1 - (tied**3 - tied).sum(1) / cubes
  counts = 3 * pairs / ((total + 1) * np.maximum(spread, 0.25))
  counts *= 1 - np.eye(arms)
  return borda.Tally(rate * counts, counts)

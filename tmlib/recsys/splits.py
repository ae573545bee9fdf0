"""What a recommender may see, and the event that it must foretell.

Axes: U users.
"""

from typing import NamedTuple

import numpy as np

from tmlib.recsys.events import EventTable, Sequences

__all__ = ['Split', 'history_span', 'leave_last_out', 'time_split']


class Split(NamedTuple):
  """Training events and one held-out event per user.

  Attributes:
    table: the log.
    history: U arrays of rows of the table, oldest first.
    target: [U] int64, row of the event to foretell; -1 for none.
  """

  table: EventTable
  history: tuple[np.ndarray, ...]
  target: np.ndarray

  @property
  def users(self) -> np.ndarray:
    """Users with a target."""
    return np.flatnonzero(self.target >= 0)

  @property
  def target_items(self) -> np.ndarray:
    """[users] int32, the items to foretell."""
    return self.table.item[self.target[self.users]]

  def seen(self) -> np.ndarray:
    """[users, I] bool: items in the history of each user with a target.

    Raises:
      ValueError: if a target is among them: as the only seen item that is a
        candidate it could be told from the mask.
    """
    users = self.users
    found = np.zeros((len(users), self.table.num_items), bool)
    for row, user in enumerate(users):
      found[row, self.table.item[self.history[user]]] = True
    again = users[found[np.arange(len(users)), self.target_items]]
    if len(again):
      raise ValueError(
        f'user {self.table.users[again[0]]!r} has the target in the history '
        f'({len(again)} such users): split with unseen_only=True, or mask no '
        'seen item'
      )
    return found


def leave_last_out(
  sequences: Sequences, skip: int = 0, *, unseen_only: bool = False
) -> Split:
  """The last event of each user is the target, all before it the history.

  Args:
    sequences: of `order_events`, whose order of ties decides which event is
      the last.
    skip: how often to drop the target and what follows it first: 1 gives the
      validation split that never sees the test event.
    unseen_only: skip repeats: the target is the last event whose item is new to
      the user, as must be where seen items are no candidates; later events are
      dropped. False foretells repeats too; then mask no seen item.

  Returns:
    The split. A user with a single event (after `skip`), or none that is new,
    keeps them as history and has no target.

  Raises:
    ValueError: if skip is negative.
  """
  if skip < 0:
    raise ValueError(f'skip={skip} must be at least 0')
  history, target = [], np.full(len(sequences.rows), -1, np.int64)
  for user, rows in enumerate(sequences.rows):
    for _ in range(min(skip, len(rows))):
      rows = rows[: _last(sequences.table, rows, unseen_only)]
    end = _last(sequences.table, rows, unseen_only)
    if end > 0:
      target[user] = rows[end]
      rows = rows[:end]
    history.append(rows)
  return Split(sequences.table, tuple(history), target)


def _last(table: EventTable, rows: np.ndarray, unseen_only: bool) -> int:
  """Place of the last event in `rows`, or of the last new item; 0 if none."""
  if not unseen_only or not len(rows):
    return max(len(rows) - 1, 0)
  return int(np.unique(table.item[rows], return_index=True)[1].max())


def time_split(
  sequences: Sequences,
  quantile: float = 0.9,
  *,
  cut: int | None = None,
  unseen_only: bool = True,
) -> Split:
  """One cut in time for all users: nothing of the future is trained on.

  Args:
    sequences: of `order_events`.
    quantile: share of events before the cut, in (0, 1).
    cut: the moment itself, seconds, in place of the quantile.
    unseen_only: skip repeats: the target is the first event after the cut whose
      item is not in the history.

  Returns:
    The split: events before the cut, and the first one at or after it for
    users who have both.

  Raises:
    ValueError: if the quantile is out of range or nobody has a target.
  """
  table = sequences.table
  if cut is None:
    if not 0 < quantile < 1:
      raise ValueError(f'quantile={quantile} must lie in (0, 1)')
    cut = int(np.quantile(table.time, quantile))
  history, target = [], np.full(len(sequences.rows), -1, np.int64)
  for user, rows in enumerate(sequences.rows):
    old = rows[table.time[rows] < cut]
    new = rows[table.time[rows] >= cut]
    if unseen_only:
      new = new[~np.isin(table.item[new], table.item[old])]
    if len(old) and len(new):
      target[user] = new[0]
    history.append(old)
  if not (target >= 0).any():
    raise ValueError(
      f'no user has events both before and after cut={cut}; times run from '
      f'{table.time.min()} to {table.time.max()}'
    )
  return Split(table, tuple(history), target)


def history_span(split: Split) -> np.ndarray:
  """[U] float64: days from the first event of the history to the last.

  The target is no part of it.
  """
  spans = np.zeros(len(split.history))
  for user, rows in enumerate(split.history):
    times = split.table.time[rows]
    spans[user] = np.ptp(times) / 86400 if len(times) else 0
  return spans

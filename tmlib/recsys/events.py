"""A log of interactions as columns, and its order in time.

Axes: n events, U users, I items, D features of a modality.

Many logs hold events of equal time stamps (in MovieLens a page of ratings is
sent at once), so the order inside a tie is a choice, and it decides figures:
`order_events` makes it explicit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = [
  'TIES',
  'EventTable',
  'Sequences',
  'make_events',
  'order_events',
  'to_seconds',
]

TIES = ('item', 'item_descending', 'file', 'random')
# Beyond this a stamp in seconds is later than the year 2200.
_LATEST = 7_258_118_400


class EventTable(NamedTuple):
  """Interactions, in the order of the file.

  Attributes:
    user: [n] int32 in [0, U).
    item: [n] int32 in [0, I).
    time: [n] int64, seconds.
    action: [n] int32 index into `actions`.
    users: U names.
    items: I names, in increasing order: as numbers where all are numbers.
    actions: names; one, '', where the log has no types of action.
    features: {modality: [n, D] float32}, zeros where missing.
    present: {modality: [n] bool}.
  """

  user: np.ndarray
  item: np.ndarray
  time: np.ndarray
  action: np.ndarray
  users: tuple[str, ...]
  items: tuple[str, ...]
  actions: tuple[str, ...]
  features: dict[str, np.ndarray]
  present: dict[str, np.ndarray]

  @property
  def num_items(self) -> int:
    """I."""
    return len(self.items)


class Sequences(NamedTuple):
  """The events of each user, oldest first.

  Attributes:
    table: the log.
    rows: U arrays of rows of the table.
  """

  table: EventTable
  rows: tuple[np.ndarray, ...]


def _index(labels: Any, field: str) -> tuple[tuple[str, ...], np.ndarray]:
  """Sorted names and the index of each label among them."""
  # Before NumPy makes 'nan' and 'None' of them.
  lost = [i for i, label in enumerate(labels) if _is_missing(label)]
  text = np.char.strip(np.asarray(labels).astype(str))
  empty = lost or np.flatnonzero(text == '')
  if len(empty):
    raise ValueError(
      f'{field}: event {empty[0]} has an empty name; drop such rows'
    )
  names, index = np.unique(text, return_inverse=True)
  try:
    order = np.argsort(names.astype(np.int64), kind='stable')
  except (ValueError, OverflowError):
    order = np.arange(len(names))
  place = np.empty(len(names), np.int32)
  place[order] = np.arange(len(names))
  return tuple(names[order].tolist()), place[index]


def _is_missing(label: Any) -> bool:
  """Whether a label is None, NaN or another value that no name equals."""
  try:
    return label is None or bool(label != label)
  except TypeError:  # the missing value of pandas has no truth
    return True


def to_seconds(time: Any, field: str = 'time') -> np.ndarray:
  """Stamps as whole seconds.

  Args:
    time: [n] numbers; fractions are dropped.
    field: what an error calls them.

  Returns:
    [n] int64.

  Raises:
    TypeError: for something but numbers.
    ValueError: for a stamp that is not finite or not in seconds.
  """
  time = np.asarray(time)
  if time.dtype.kind not in 'iuf':
    raise TypeError(f'{field} must hold numbers, got {time.dtype}')
  if not np.isfinite(time).all():
    row = int(np.flatnonzero(~np.isfinite(time))[0])
    raise ValueError(
      f'{field}: event {row} has {time[row]}, which is not finite; drop or '
      'repair it'
    )
  # As floats: the smallest integer has no absolute value.
  size = np.abs(time.astype(np.float64))
  if len(time) and size.max() > _LATEST:
    raise ValueError(
      f'{field}: {time[size.argmax()]} is no time stamp in seconds, which '
      f'end at {_LATEST}; milliseconds must be divided by 1000'
    )
  return np.floor(time).astype(np.int64)


def make_events(
  user: Sequence[Any] | np.ndarray,
  item: Sequence[Any] | np.ndarray,
  time: Sequence[float] | np.ndarray,
  *,
  action: Sequence[Any] | np.ndarray | None = None,
  features: Mapping[str, np.ndarray] | None = None,
) -> EventTable:
  """Builds a table from columns of names.

  Args:
    user: [n] names or numbers; blanks around a name do not count.
    item: [n] names or numbers. Rows that repeat are events of their own.
    time: [n], seconds since any origin; fractions are dropped.
    action: [n] names of types of action, such as 'click'; None for one type.
    features: {modality: [n, D]}; a row of NaN means that the event lacks the
      modality.

  Returns:
    The table, rows in the given order.

  Raises:
    TypeError: if time does not hold numbers.
    ValueError: for no event, columns of unequal length, an empty or missing
      name, a stamp that is not finite or not in seconds, or a feature row that
      is partly NaN.
  """
  size = len(user)
  if not size:
    raise ValueError('user: the log has no event')
  columns = {'item': item, 'time': time, 'action': action} | dict(
    features or {}
  )
  for name, column in columns.items():
    if column is not None and len(column) != size:
      raise ValueError(
        f'{name} has {len(column)} entries but user has {size}; give one each'
      )
  users, user_index = _index(user, 'user')
  items, item_index = _index(item, 'item')
  actions, action_index = ('',), np.zeros(size, np.int32)
  if action is not None:
    actions, action_index = _index(action, 'action')
  values, present = {}, {}
  for name, table in (features or {}).items():
    table = np.asarray(table, np.float32)
    if table.ndim != 2 or not table.shape[1]:
      raise ValueError(
        f'features[{name!r}] has shape {table.shape}, expected [n, D], D >= 1'
      )
    missing = np.all(np.isnan(table), axis=1)
    broken = np.flatnonzero(~missing & ~np.all(np.isfinite(table), axis=1))
    if len(broken):
      raise ValueError(
        f'features[{name!r}]: event {broken[0]} is partly NaN or infinite; a '
        'missing modality is NaN throughout'
      )
    values[name] = np.where(missing[:, None], 0, table)
    present[name] = ~missing
  return EventTable(
    user_index, item_index, to_seconds(time), action_index,
    users, items, actions, values, present,
  )  # fmt: skip


def order_events(
  table: EventTable, ties: str = 'item', seed: int = 0
) -> Sequences:
  """Each user's events by time; equal times in an order that is asked for.

  Args:
    table: the log; unsorted stamps are fine.
    ties: 'item' (increasing item), 'item_descending', 'file', or 'random' (an
      order that `seed` draws).
    seed: of the random order.

  Returns:
    The sequences.

  Raises:
    ValueError: for an unknown order.
  """
  if ties not in TIES:
    raise ValueError(f'ties={ties!r} is not one of {TIES}')
  size = len(table.user)
  last = {
    'item': lambda: table.item,
    'item_descending': lambda: -table.item,
    'file': lambda: np.arange(size),
    'random': lambda: np.random.default_rng(seed).permutation(size),
  }[ties]()
  order = np.lexsort((last, table.time, table.user))
  counts = np.bincount(table.user, minlength=len(table.users))
  return Sequences(
    table, tuple(np.split(order.astype(np.int64), np.cumsum(counts)[:-1]))
  )

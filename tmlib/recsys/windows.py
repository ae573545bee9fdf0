"""Fixed windows of events: what a sequence model is trained and asked on.

Axes: n windows, L events of a window (padded on the left), I items, P profile
features, D features of a modality.

Items are counted from 1 here; 0 is padding. Times are int32 seconds since the
first event of the window, so that differences are exact.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np

from tmlib.recsys.events import EventTable, to_seconds
from tmlib.recsys.splits import Split

__all__ = ['NOW', 'query_windows', 'serving_window', 'training_windows']

# The moment at which position t foretells event t + 1: when that event
# happens, which a server knows, or when event t happened.
NOW = ('target', 'last')


def _check(length: int, now: str, profile: np.ndarray | None, users: int):
  if length < 1:
    raise ValueError(f'length={length} must be at least 1')
  if now not in NOW:
    raise ValueError(f'now={now!r} is not one of {NOW}')
  if profile is not None and profile.shape[:1] != (users,):
    raise ValueError(
      f'profile has shape {profile.shape}, expected one row for each of the '
      f'{users} users'
    )


def _offsets(times: np.ndarray, origin: int) -> np.ndarray:
  found = times - origin
  if len(found) and np.abs(found).max() >= 2**31:
    raise ValueError(
      f'time: a window spans {np.abs(found).max()} seconds, over 2^31; stamps '
      'must be seconds, milliseconds are divided by 1000'
    )
  return found


def _empty(table: EventTable, count: int, length: int, profile) -> dict:
  whole = lambda: np.zeros((count, length), np.int32)
  width = 0 if profile is None else profile.shape[1]
  return {
    'item': whole(),
    'action': whole(),
    'time': whole(),
    'now': whole(),
    'target': whole(),
    'user': np.zeros(count, np.int32),
    'profile': np.zeros((count, width), np.float32),
    'features': {
      name: np.zeros((count, length, x.shape[1]), np.float32)
      for name, x in table.features.items()
    },
    'present': {
      name: np.zeros((count, length), bool) for name in table.features
    },
  }


def _fill(arrays: dict, i: int, table: EventTable, rows, now_times) -> None:
  """Writes events into the end of window i."""
  size = len(rows)
  if not size:
    return
  origin = int(table.time[rows[0]])
  at = slice(arrays['item'].shape[1] - size, None)
  arrays['item'][i, at] = table.item[rows] + 1
  arrays['action'][i, at] = table.action[rows]
  arrays['time'][i, at] = _offsets(table.time[rows], origin)
  arrays['now'][i, at] = _offsets(np.asarray(now_times), origin)
  for name, values in table.features.items():
    arrays['features'][name][i, at] = values[rows]
    arrays['present'][name][i, at] = table.present[name][rows]


def _moments(table: EventTable, rows, after: Any, now: str) -> np.ndarray:
  """The moment of the query at each of `rows`; `after` is the last one's."""
  own = table.time[rows]
  return own if now == 'last' else np.append(own[1:], after)


def training_windows(
  split: Split,
  length: int,
  *,
  now: str = 'last',
  profile: np.ndarray | None = None,
) -> dict[str, Any]:
  """Every event of the histories but the first of each user, once as target.

  A history is cut from its end into windows of `length` pairs (event, next
  event); a short one is padded on the left.

  Args:
    split: its histories.
    length: L.
    now: of `NOW`.
    profile: [U, P] float, or None.

  Returns:
    {item, action, time, now, target: [n, L] int32; user: [n] int32; profile:
    [n, P]; features: {modality: [n, L, D]}; present: {modality: [n, L] bool}}.

  Raises:
    ValueError: for an argument out of range, or if no user has two events.
  """
  table = split.table
  _check(length, now, profile, len(split.history))
  pieces = [
    (user, max(0, end - length), end)
    for user, rows in enumerate(split.history)
    for end in range(len(rows) - 1, 0, -length)
  ]
  if not pieces:
    raise ValueError(
      'no history holds two events, one to learn from the other; with the one '
      'that is held out a user needs three'
    )
  arrays = _empty(table, len(pieces), length, profile)
  for i, (user, start, end) in enumerate(pieces):
    rows = split.history[user][start : end + 1]
    moments = _moments(table, rows[:-1], table.time[rows[-1]], now)
    _fill(arrays, i, table, rows[:-1], moments)
    arrays['target'][i, length - len(rows) + 1 :] = table.item[rows[1:]] + 1
    arrays['user'][i] = user
    if profile is not None:
      arrays['profile'][i] = profile[user]
  return arrays


def query_windows(
  split: Split,
  length: int,
  *,
  now: str = 'last',
  profile: np.ndarray | None = None,
  mask_seen: bool = True,
) -> dict[str, Any]:
  """The end of each history, with the held-out event as target.

  Args:
    split: users with a target are asked; a history may be empty.
    length: L.
    now: of `NOW`.
    profile: [U, P] float, or None.
    mask_seen: whether items of the history are no candidates; then no target
      may be among them.

  Returns:
    As `training_windows`, the target at the last position alone, and `seen`,
    [n, I + 1] bool, column 0 always True.

  Raises:
    ValueError: for an argument out of range, or a target that `mask_seen`
      would give away.
  """
  table = split.table
  _check(length, now, profile, len(split.history))
  arrays = _empty(table, len(split.users), length, profile)
  for i, user in enumerate(split.users):
    rows, target = split.history[user][-length:], split.target[user]
    _fill(
      arrays, i, table, rows, _moments(table, rows, table.time[target], now)
    )
    arrays['target'][i, -1] = table.item[target] + 1
    arrays['user'][i] = user
    if profile is not None:
      arrays['profile'][i] = profile[user]
  seen = np.zeros((len(split.users), table.num_items + 1), bool)
  seen[:, 0] = True
  if mask_seen:
    seen[:, 1:] = split.seen()
  return arrays | {'seen': seen}


def serving_window(
  history: Iterable[tuple[str, float]],
  items: tuple[str, ...],
  length: int,
  *,
  moment: str = 'last',
  now: float | None = None,
  profile: np.ndarray | None = None,
) -> dict[str, Any]:
  """One window from a history of names, for `recommend`.

  Args:
    history: pairs (name of the item, stamp in seconds), in any order; may be
      empty.
    items: names that the model knows.
    length: L.
    moment: of `NOW`, as in training.
    now: moment of the query; None for that of the last event. Events after it
      count as just now.
    profile: [P], or None.

  Returns:
    As `query_windows`, n = 1, no target.

  Raises:
    TypeError: if a stamp is no number.
    ValueError: for an item that the model does not know, or a stamp that is no
      time in seconds.
  """
  _check(length, moment, None, 1)
  pairs = list(history)
  known = {name: i for i, name in enumerate(items)}
  names = [str(name).strip() for name, _ in pairs]
  unknown = [name for name in names if name not in known]
  if unknown:
    raise ValueError(
      f'history: item {unknown[0]!r} is not among the {len(items)} items that '
      'the model was trained on; leave it out or train again'
    )
  stamps = np.asarray([stamp for _, stamp in pairs])
  seconds = to_seconds(stamps, 'history')
  order = np.argsort(stamps, kind='stable')
  index = np.array([known[name] for name in names], np.int32)[order]
  count = len(pairs)
  table = EventTable(
    np.zeros(count, np.int32), index, seconds[order],
    np.zeros(count, np.int32), ('',), items, ('',), {}, {},
  )  # fmt: skip
  rows = np.arange(count)[-length:]
  arrays = _empty(table, 1, length, None)
  if count:
    last = table.time[rows[-1]]
    last = last if now is None else to_seconds([now], 'now')[0]
    moments = _moments(table, rows, last, moment).copy()
    moments[-1] = last
    _fill(arrays, 0, table, rows, moments)
  if profile is not None:
    arrays['profile'] = np.asarray(profile, np.float32)[None]
  seen = np.zeros((1, len(items) + 1), bool)
  seen[0, 0] = True
  seen[0, index + 1] = True
  return arrays | {'seen': seen}

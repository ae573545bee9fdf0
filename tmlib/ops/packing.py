"""Packing of items of unequal length into rows of one capacity.

Axes: n items, R rows, S slots per row (at most S items share a row).

Runs on the host. A plan is a pure function of its arguments, so every process
of a distributed run computes the same one.
"""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = ['PackingPlan', 'check_lengths', 'plan_packing', 'slot_table']


class PackingPlan(NamedTuple):
  """Where each item goes.

  Attributes:
    row: [n], int32, row of each item.
    slot: [n], int32 in [0, S), position of the item among those of its row.
    offset: [n], int32, first instance of the item within its row.
    lengths: [n], int32.
    num_rows: R.
    capacity: instances per row.
    max_segments: S.
    fill: sum of lengths / (R * capacity), in [0, 1].
  """

  row: np.ndarray
  slot: np.ndarray
  offset: np.ndarray
  lengths: np.ndarray
  num_rows: int
  capacity: int
  max_segments: int
  fill: float


def plan_packing(
  lengths: Sequence[int] | np.ndarray,
  capacity: int,
  max_segments: int,
  *,
  seed: int | None = None,
  window: int = 256,
) -> PackingPlan:
  """Packs items by best fit decreasing: O(n log n), few half-empty rows.

  Each item goes to the fullest row that still holds it. Without a seed, items
  come in order of decreasing length. With one, they come in random windows of
  `window` items, decreasing within each, and rows are numbered at random: the
  next epoch's plan mixes other items, and costs a little fill.

  Args:
    lengths: [n], integers in [0, capacity].
    capacity: instances per row, >= 1.
    max_segments: S, items per row at most, >= 1.
    seed: integer, or None for the deterministic tightest plan.
    window: items placed together under a seed, >= 1.

  Returns:
    PackingPlan; every item is in exactly one row.

  Raises:
    ValueError: an item longer than `capacity`, or an argument out of range.

  References:
    Johnson. Near-optimal bin packing algorithms, 1973. The limit on items per
    row and the windows are our additions.
  """
  lengths = check_lengths(lengths, capacity)
  if max_segments < 1 or window < 1:
    raise ValueError(
      f'max_segments and window must be >= 1, got {max_segments}, {window}'
    )
  n = len(lengths)
  row = np.empty(n, np.int32)
  slot = np.empty(n, np.int32)
  offset = np.empty(n, np.int32)
  items_in: list[int] = []
  # Open rows as (free room, row), sorted, so that the first that fits is the
  # fullest that fits.
  rooms: list[tuple[int, int]] = []
  for item in _order(lengths, seed, window):
    length = int(lengths[item])
    place = bisect.bisect_left(rooms, (length, -1))
    if place < len(rooms):
      room, target = rooms.pop(place)
    else:
      room, target = capacity, len(items_in)
      items_in.append(0)
    row[item] = target
    slot[item] = items_in[target]
    offset[item] = capacity - room
    items_in[target] += 1
    if items_in[target] < max_segments:
      bisect.insort(rooms, (room - length, target))
  num_rows = len(items_in)
  if seed is not None:
    row = _rng(seed, 1).permutation(num_rows).astype(np.int32)[row]
  fill = float(lengths.sum()) / (num_rows * capacity) if num_rows else 0.0
  return PackingPlan(
    row, slot, offset, lengths, num_rows, capacity, max_segments, fill
  )


def slot_table(plan: PackingPlan) -> np.ndarray:
  """Which item sits in each slot of each row.

  Args:
    plan: a packing plan.

  Returns:
    [R, S], int32; -1 where a slot is empty.
  """
  table = np.full((plan.num_rows, plan.max_segments), -1, np.int32)
  table[plan.row, plan.slot] = np.arange(len(plan.row), dtype=np.int32)
  return table


def check_lengths(
  lengths: Sequence[int] | np.ndarray, capacity: int
) -> np.ndarray:
  """Checks that every length is an integer in [0, capacity].

  Args:
    lengths: [n].
    capacity: >= 1.

  Returns:
    [n], int32.

  Raises:
    ValueError: otherwise, naming the first offenders.
  """
  if capacity < 1:
    raise ValueError(f'capacity must be >= 1, got {capacity}')
  raw = np.asarray(lengths)
  if raw.ndim != 1:
    raise ValueError(f'lengths must be a vector, got shape {raw.shape}')
  if raw.size and raw.dtype.kind not in 'iu':
    raise ValueError(f'lengths must be integers, got dtype {raw.dtype}')
  bad = np.flatnonzero((raw < 0) | (raw > capacity))
  if len(bad):
    shown = ', '.join(f'{i}: {raw[i]}' for i in bad[:5])
    raise ValueError(
      f'{len(bad)} lengths lie outside [0, capacity={capacity}] (item: length '
      f'= {shown}); raise the capacity to {raw.max()} or subsample the items'
    )
  return raw.astype(np.int32)


def _order(lengths: np.ndarray, seed: int | None, window: int) -> np.ndarray:
  """Order in which items are placed: decreasing, in windows under a seed."""
  if seed is None:
    return np.argsort(-lengths, kind='stable')
  shuffled = _rng(seed, 0).permutation(len(lengths))
  block = np.arange(len(lengths)) // window
  return shuffled[np.lexsort((-lengths[shuffled], block))]


def _rng(seed: int, stream: int) -> np.random.Generator:
  return np.random.default_rng((seed, stream))

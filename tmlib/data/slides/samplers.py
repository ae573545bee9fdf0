"""Orders in which bags are drawn; each is a pure function of a seed.

Axes: n bags, D draws, B draws per batch. A longer order starts with a shorter
one, so a run may be lengthened and resumed.
"""

from typing import Any

import numpy as np

__all__ = ['balanced_order', 'epoch_order', 'event_balanced_order']


def epoch_order(members: Any, num_draws: int, seed: int = 0) -> np.ndarray:
  """Every member once per epoch, each epoch in its own order.

  Args:
    members: [n] int, bags to draw from.
    num_draws: D.
    seed: of the orders.

  Returns:
    [D] int64.

  Raises:
    ValueError: nothing to draw from.
  """
  members = np.asarray(members, np.int64)
  if not len(members):
    raise ValueError('there is no bag to draw from')
  epochs = range(-(-num_draws // len(members)))
  parts = [
    np.random.default_rng((seed, e)).permutation(members) for e in epochs
  ]
  return np.concatenate([np.zeros(0, np.int64), *parts])[:num_draws]


def balanced_order(
  members: Any, labels: Any, num_draws: int, seed: int = 0
) -> np.ndarray:
  """Classes in turn, each through its own bags: a bag weighs 1 / n_c.

  Every run of C draws holds each class once, so batches are balanced to within
  one bag; within a class every bag is drawn before any is drawn again.

  Args:
    members: [n] int, bags to draw from.
    labels: [n], class of each member.
    num_draws: D.
    seed: of the orders.

  Returns:
    [D] int64.

  Raises:
    ValueError: nothing to draw from.
  """
  members, labels = np.asarray(members, np.int64), np.asarray(labels)
  classes = np.unique(labels)
  if not len(classes):
    raise ValueError('there is no bag to draw from')
  rounds = -(-num_draws // len(classes))
  streams = [
    epoch_order(members[labels == c], rounds, seed + 7919 * (i + 1))
    for i, c in enumerate(classes)
  ]
  turns = np.stack(streams, 1)
  rng = np.random.default_rng((seed, 1))
  turns = rng.permuted(turns, axis=1)
  return turns.reshape(-1)[:num_draws]


def event_balanced_order(
  members: Any,
  event: Any,
  batch_size: int,
  num_batches: int,
  *,
  min_events: int = 1,
  seed: int = 0,
) -> np.ndarray:
  """Batches that all hold about the same number of events.

  A Cox loss learns nothing from a batch without an event. Every batch gets as
  many as its share, at least `min_events`; events and censored patients are
  each gone through epoch by epoch.

  Args:
    members: [n] int, bags to draw from.
    event: [n] bool, of each member.
    batch_size: B.
    num_batches: number of batches.
    min_events: per batch, in [1, B].
    seed: of the orders.

  Returns:
    [num_batches * B] int64.

  Raises:
    ValueError: no event at all, or `min_events` out of range.
  """
  members, event = np.asarray(members, np.int64), np.asarray(event, bool)
  if not event.any():
    raise ValueError('all patients are censored: no batch can hold an event')
  if not 1 <= min_events <= batch_size:
    raise ValueError(f'min_events={min_events} must be in [1, {batch_size}]')
  share = max(min_events, round(batch_size * event.mean()))
  share = batch_size if event.all() else min(share, batch_size)
  seen = epoch_order(members[event], num_batches * share, seed + 1)
  rest = batch_size - share
  batches = seen.reshape(num_batches, share)
  if rest:
    other = epoch_order(members[~event], num_batches * rest, seed + 2)
    batches = np.concatenate([batches, other.reshape(num_batches, rest)], 1)
  return batches.reshape(-1)

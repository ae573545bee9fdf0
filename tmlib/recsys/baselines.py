r"""Baselines without learning: popularity and a decayed Markov chain.

Axes: U users with a target, I items.
"""

import numpy as np

from tmlib.recsys.splits import Split

__all__ = ['markov_scores', 'markov_table', 'popularity_scores']


def popularity_scores(split: Split) -> np.ndarray:
  """[I] float64, the number of training events of each item."""
  rows = np.concatenate(split.history)
  return np.bincount(
    split.table.item[rows], minlength=split.table.num_items
  ).astype(np.float64)


def markov_table(
  split: Split, lags: int = 3, decay: float = 0.5, smoothing: float = 10.0
) -> np.ndarray:
  r"""Transition scores from pairs of events at most `lags` apart.

  C_ij = sum over training pairs (i at t - l, j at t) of decay^(l - 1);
  P_ij = (C_ij + smoothing p_j) / (sum_j C_ij + smoothing), with p the share of
  each item among all training events.

  Args:
    split: its histories are counted.
    lags: pairs up to so many positions apart, >= 1.
    decay: factor per further position, in (0, 1].
    smoothing: pseudo-count of the popularity, > 0.

  Returns:
    [I, I] float64; rows sum to one.

  Raises:
    ValueError: for an argument out of range.
  """
  if lags < 1:
    raise ValueError(f'lags={lags} must be at least 1')
  if not 0 < decay <= 1:
    raise ValueError(f'decay={decay} must lie in (0, 1]')
  if not smoothing > 0:
    raise ValueError(f'smoothing={smoothing} must be positive')
  size = split.table.num_items
  counts = np.zeros((size, size))
  for rows in split.history:
    items = split.table.item[rows]
    for lag in range(1, min(lags, len(items) - 1) + 1):
      np.add.at(counts, (items[:-lag], items[lag:]), decay ** (lag - 1))
  share = popularity_scores(split)
  share /= share.sum()
  total = counts.sum(1, keepdims=True)
  return (counts + smoothing * share) / (total + smoothing)


def markov_scores(
  split: Split, lags: int = 3, decay: float = 0.5, smoothing: float = 10.0
) -> np.ndarray:
  r"""Scores of the next item from the last events of each user.

  s_j = sum_{l = 1..lags} decay^(l - 1) P_{i_l, j}, i_l the l-th last item.

  Args:
    split: histories to count and to go on from.
    lags: see `markov_table`; also the events that vote.
    decay: of counts and votes.
    smoothing: see `markov_table`.

  Returns:
    [U, I] float64.
  """
  table = markov_table(split, lags, decay, smoothing)
  scores = np.zeros((len(split.users), split.table.num_items))
  for row, user in enumerate(split.users):
    recent = split.table.item[split.history[user][-lags:]][::-1]
    for lag, item in enumerate(recent):
      scores[row] += decay**lag * table[item]
  return scores

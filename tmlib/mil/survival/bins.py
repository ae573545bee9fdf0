"""Bins of survival time for discrete models. On the host, in float64."""

from typing import Any

import numpy as np

from tmlib.mil.survival.checks import check_survival

__all__ = ['digitize', 'quantile_bins']


def quantile_bins(time: Any, event: Any, num_bins: int = 4) -> np.ndarray:
  """Edges at the quantiles of the times at which events were seen.

  Use the training patients alone.

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    num_bins: K.

  Returns:
    [K - 1] float64, ascending inner edges; bin k holds edge k-1 <= t < edge k.

  Raises:
    ValueError: if no event was seen, there are more bins than distinct times
      of events, or quantiles coincide.
  """
  time, event = check_survival(time, event)
  if num_bins < 2:
    raise ValueError(f'num_bins={num_bins} must be at least 2')
  if not event.any():
    raise ValueError('all patients are censored: there is no event time to bin')
  distinct = len(np.unique(time[event]))
  if num_bins > distinct:
    raise ValueError(
      f'num_bins={num_bins} is more than the {distinct} distinct times of the '
      f'{event.sum()} events; use fewer bins'
    )
  levels = np.arange(1, num_bins) / num_bins
  edges = np.quantile(time[event], levels)
  if len(np.unique(edges)) < len(edges) or edges[0] <= time[event].min():
    raise ValueError(
      f'num_bins={num_bins}: quantiles of the {event.sum()} event times '
      f'coincide ({edges.tolist()}); use fewer bins'
    )
  return edges


def digitize(time: Any, edges: Any) -> np.ndarray:
  """The bin of each time.

  Args:
    time: [n], float.
    edges: [K - 1], ascending inner edges, of `quantile_bins`.

  Returns:
    [n] int32 in [0, K).
  """
  return np.digitize(np.asarray(time, float), np.asarray(edges)).astype(
    np.int32
  )

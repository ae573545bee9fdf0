"""Kaplan-Meier curves and the log-rank test. On the host, in float64.

Axes: n patients, T distinct times, G groups.
"""

from typing import Any, NamedTuple

import numpy as np
from scipy import stats

from tmlib.mil.survival.checks import check_survival

__all__ = ['KaplanMeier', 'LogRank', 'kaplan_meier', 'logrank']


class KaplanMeier(NamedTuple):
  """A survival curve, a step down at each time with an event.

  Attributes:
    time: [T], ascending distinct times of events and of last visits.
    survival: [T], S(t), right-continuous: the step at t is taken.
    std: [T], standard error of S(t) (Greenwood).
    at_risk: [T], patients under observation just before t.
    events: [T], events at t.
  """

  time: np.ndarray
  survival: np.ndarray
  std: np.ndarray
  at_risk: np.ndarray
  events: np.ndarray

  def at(self, times: Any) -> np.ndarray:
    """S at given times; 1 before the first one.

    Args:
      times: [...], float.

    Returns:
      [...], the value of the last step.
    """
    index = np.searchsorted(self.time, np.asarray(times, float), side='right')
    return np.append(1.0, self.survival)[index]


def kaplan_meier(time: Any, event: Any) -> KaplanMeier:
  """The product-limit estimate S(t) = prod_{s <= t} (1 - d_s / n_s).

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1.

  Returns:
    The curve. Patients whose last visit is at the time of an event are at risk
    there.

  Raises:
    ValueError: for bad times or events.
  """
  time, event = check_survival(time, event)
  return _curve(time, event, np.zeros(len(time), bool))


def censoring_curve(time: Any, event: Any) -> KaplanMeier:
  """The distribution of last visits: events leave before visits of their time.

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1.

  Returns:
    G(t) as a curve.
  """
  time, event = check_survival(time, event)
  return _curve(time, ~event, event)


def _curve(time, counted, leaves_first):
  times, index = np.unique(time, return_inverse=True)
  size = len(times)
  total = np.bincount(index, minlength=size)
  events = np.bincount(index[counted], minlength=size)
  early = np.bincount(index[leaves_first], minlength=size)
  at_risk = len(time) - (np.cumsum(total) - total) - early
  safe = np.maximum(at_risk, 1)
  survival = np.cumprod(1 - events / safe)
  gone = events >= safe
  term = np.where(gone, 0, events / (safe * np.maximum(safe - events, 1)))
  std = survival * np.sqrt(np.cumsum(term))
  return KaplanMeier(times, survival, std, at_risk, events)


class LogRank(NamedTuple):
  """Outcome of a log-rank test.

  Attributes:
    statistic: chi-squared.
    dof: groups - 1.
    pvalue: Pr(chi-squared_dof >= statistic).
    observed: [G], events per group.
    expected: [G], events expected if all groups shared one hazard.
  """

  statistic: float
  dof: int
  pvalue: float
  observed: np.ndarray
  expected: np.ndarray


def logrank(time: Any, event: Any, group: Any) -> LogRank:
  """Tests whether groups share one hazard.

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    group: [n], any labels; G distinct ones.

  Returns:
    The test, groups in sorted order.

  Raises:
    ValueError: for bad times or events, one group only, or no event.

  References:
    Mantel. Evaluation of survival data and two new rank order statistics, 1966.
  """
  time, event = check_survival(time, event)
  labels, group = np.unique(np.asarray(group), return_inverse=True)
  if len(labels) < 2:
    raise ValueError(f'group holds one label only ({labels.tolist()})')
  if not event.any():
    raise ValueError('all patients are censored: no hazard to compare')
  times = np.unique(time[event])
  member = group[:, None] == np.arange(len(labels))
  # [T, G]: at risk and events per time and group.
  order = np.argsort(time, kind='stable')
  before = np.searchsorted(time[order], times, side='left')
  gone = np.concatenate([np.zeros((1, len(labels))), member[order].cumsum(0)])
  at_risk = gone[-1] - gone[before]
  deaths = np.zeros((len(times), len(labels)))
  index = np.searchsorted(times, time[event])
  np.add.at(deaths, (index, group[event]), 1)
  n, d = at_risk.sum(1, keepdims=True), deaths.sum(1, keepdims=True)
  share = at_risk / n
  expected = (share * d).sum(0)
  scale = d * (n - d) / np.maximum(n - 1, 1)
  covariance = np.diag((scale * share).sum(0)) - np.einsum(
    'tg,th->gh', scale * share, share
  )
  gap = (deaths.sum(0) - expected)[:-1]
  part = covariance[:-1, :-1]
  statistic = float(gap @ np.linalg.pinv(part, hermitian=True) @ gap)
  dof = len(labels) - 1
  return LogRank(
    statistic,
    dof,
    float(stats.chi2.sf(statistic, dof)),
    deaths.sum(0),
    expected,
  )

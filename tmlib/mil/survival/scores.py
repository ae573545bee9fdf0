"""Errors of predicted survival curves and risks over time, by IPCW.

Axes: m training patients, n patients, T times. On the host, in float64. The
chance G(t) to be uncensored comes from the training patients.
"""

from typing import Any, NamedTuple

import numpy as np

from tmlib.mil.survival.checks import check_survival
from tmlib.mil.survival.curves import censoring_curve, kaplan_meier

__all__ = [
  'TimeAUC',
  'brier_score',
  'cumulative_dynamic_auc',
  'integrated_brier_score',
]


def _times(times, time):
  times = np.atleast_1d(np.asarray(times, float))
  if times.ndim != 1 or not len(times) or (np.diff(times) <= 0).any():
    raise ValueError(f'times must ascend strictly, got {times.tolist()}')
  if times[0] < time.min() or times[-1] >= time.max():
    raise ValueError(
      f'times must lie in [{time.min()}, {time.max()}), where patients are '
      f'followed up; got {times[0]} to {times[-1]}'
    )
  return times


def _inverse(chance: np.ndarray) -> np.ndarray:
  return np.where(chance > 0, 1 / np.where(chance > 0, chance, 1), 0)


def brier_score(
  train_time: Any,
  train_event: Any,
  time: Any,
  event: Any,
  survival: Any,
  times: Any,
) -> np.ndarray:
  """Squared error of Pr(alive at t), weighted for censoring.

  BS(t) = mean_i [ S_i(t)^2 1[t_i <= t, event] / G(t_i)
                 + (1 - S_i(t))^2 1[t_i > t] / G(t) ].

  Args:
    train_time: [m], times that estimate G.
    train_event: [m], their events.
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    survival: [n, T], predicted S_i(t), in [0, 1].
    times: [T], ascending, within the follow-up of the n patients.

  Returns:
    [T] float64; smaller is better, .25 is a coin.

  Raises:
    ValueError: for times outside the follow-up, or survival out of range.

  References:
    Graf et al. Assessment and comparison of prognostic classification schemes
    for survival data, 1999.
  """
  time, event = check_survival(time, event)
  times = _times(times, time)
  survival = np.asarray(survival, float)
  if survival.shape != (len(time), len(times)):
    raise ValueError(
      f'survival has shape {survival.shape}, expected '
      f'{(len(time), len(times))}, patients by times'
    )
  if not ((survival >= 0) & (survival <= 1)).all():
    raise ValueError('survival must lie in [0, 1]; pass probabilities')
  curve = censoring_curve(train_time, train_event)
  own, at = _inverse(curve.at(time)), _inverse(curve.at(times))
  dead = (time[:, None] <= times) & event[:, None]
  alive = time[:, None] > times
  error = survival**2 * dead * own[:, None]
  error += (1 - survival) ** 2 * alive * at[None]
  return error.mean(0)


def integrated_brier_score(
  train_time: Any,
  train_event: Any,
  time: Any,
  event: Any,
  survival: Any,
  times: Any,
) -> float:
  """Mean of the Brier score over [times[0], times[-1]], by trapezoids.

  Args:
    train_time: [m], times that estimate G.
    train_event: [m], their events.
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    survival: [n, T], predicted S_i(t).
    times: [T], ascending, at least two.

  Returns:
    The mean.

  Raises:
    ValueError: as `brier_score`, and for a single time.
  """
  scores = brier_score(train_time, train_event, time, event, survival, times)
  times = np.asarray(times, float)
  if len(times) < 2:
    raise ValueError('an integral needs at least two times')
  return float(np.trapezoid(scores, times) / (times[-1] - times[0]))


class TimeAUC(NamedTuple):
  """AUC over time.

  Attributes:
    auc: [T]; NaN where all patients are dead or all are alive.
    mean: their mean, weighted by the drop of the survival curve.
  """

  auc: np.ndarray
  mean: float


def cumulative_dynamic_auc(
  train_time: Any,
  train_event: Any,
  time: Any,
  event: Any,
  risk: Any,
  times: Any,
) -> TimeAUC:
  """AUC of risk for "dead by t" against "alive after t", IPCW.

  Args:
    train_time: [m], times that estimate G.
    train_event: [m], their events.
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    risk: [n], float, larger for an earlier event.
    times: [T], ascending, within the follow-up of the n patients.

  Returns:
    The curve and its mean.

  Raises:
    ValueError: for times outside the follow-up or risks that are not finite.

  References:
    Uno et al. Evaluating prediction rules for t-year survivors with censored
    regression models, 2007. Lambert, Chevret, 2016 (the mean).
  """
  time, event = check_survival(time, event)
  times = _times(times, time)
  risk = np.asarray(risk, float)
  if risk.shape != time.shape or not np.isfinite(risk).all():
    raise ValueError(f'risk must be finite and of shape {time.shape}')
  curve = censoring_curve(train_time, train_event)
  weight = np.where(event, _inverse(curve.at(time)), 0)
  auc = np.full(len(times), np.nan)
  for k, t in enumerate(times):
    case = (time <= t) & event
    control = np.sort(risk[time > t])
    if not case.any() or not len(control):
      continue
    below = np.searchsorted(control, risk[case], side='left')
    upto = np.searchsorted(control, risk[case], side='right')
    share = (below + upto) / 2 / len(control)
    auc[k] = np.average(share, weights=weight[case])
  alive = np.append(1.0, kaplan_meier(time, event).at(times))
  known = ~np.isnan(auc)
  drop = np.where(known, -np.diff(alive), 0)
  mean = float('nan')
  if drop.sum() > 0:
    mean = float((np.where(known, auc, 0) * drop).sum() / drop.sum())
  return TimeAUC(auc, mean)

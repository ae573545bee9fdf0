r"""Intervals and comparisons of metrics on a finite test set.

Axes: n independent units (bags, patients), K models, P positives, Q negatives.

Host code, NumPy float64. The unit that is resampled must be the independent
one: bags rather than instances, patients rather than slides (`groups`).
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from scipy import special

__all__ = [
  'Interval',
  'UndefinedMetricWarning',
  'adjusted_rand_index',
  'bootstrap_difference',
  'bootstrap_interval',
  'delong_covariance',
  'delong_difference',
  'detectable_difference',
  'midranks',
]


class UndefinedMetricWarning(UserWarning):
  """A metric has no value on this data and was reported as NaN."""


class Interval(NamedTuple):
  """A confidence interval and how it was made.

  Attributes:
    value: the metric on the data itself.
    low: lower end.
    high: upper end.
    standard_error: standard deviation of the resampled metric.
    level: coverage aimed at, for example 0.95.
    method: 'percentile', 'basic' or 'bca'.
    samples: resamples drawn.
    undefined: resamples on which the metric was NaN; they are left out.
    bias: mean of the resampled metric minus `value`.
  """

  value: float
  low: float
  high: float
  standard_error: float
  level: float
  method: str
  samples: int
  undefined: int
  bias: float


def midranks(values: np.ndarray) -> np.ndarray:
  """Ranks from 1 to n; tied values share the mean of their ranks.

  Args:
    values: [n], float.

  Returns:
    [n], float64.
  """
  _, inverse, counts = np.unique(
    values, return_inverse=True, return_counts=True
  )
  last = np.cumsum(counts)
  return (last - (counts - 1) / 2)[inverse]


def adjusted_rand_index(first: Any, second: Any) -> float:
  r"""Agreement of two partitions, 0 for chance, 1 for the same.

  (sum_ij C(n_ij, 2) - e) / ((a + b) / 2 - e), with a and b the pairs that each
  partition keeps together and e = a b / C(n, 2).

  Args:
    first: [n], labels.
    second: [n], labels.

  Returns:
    At most 1; 1 also where both put all in one class, or each alone.

  Raises:
    ValueError: unequal lengths, or no item.

  References:
    Hubert, Arabie. Comparing partitions, 1985.
  """
  one, two = np.asarray(first), np.asarray(second)
  if one.shape != two.shape or one.ndim != 1 or not len(one):
    raise ValueError(
      f'first {one.shape} and second {two.shape} must both be [n]'
    )
  a, b = (np.unique(x, return_inverse=True)[1] for x in (one, two))
  table = np.zeros((a.max() + 1, b.max() + 1))
  np.add.at(table, (a, b), 1)
  pairs = lambda count: float((count * (count - 1) / 2).sum())
  both, left, right = (pairs(x) for x in (table, table.sum(1), table.sum(0)))
  every = len(one) * (len(one) - 1) / 2
  chance = left * right / every if every else 0.0
  room = (left + right) / 2 - chance
  return (both - chance) / room if room else 1.0


def bootstrap_interval(
  metric: Callable[..., float],
  *arrays: Any,
  groups: Any = None,
  samples: int = 2000,
  seed: int = 0,
  level: float = 0.95,
  method: str = 'bca',
) -> Interval:
  r"""Bootstrap confidence interval of metric(*arrays).

  'percentile' takes the quantiles of the resampled metric. 'basic' reflects
  them about the estimate, [2 v - q_high, 2 v - q_low]: it suits metrics that
  repeated rows bias, such as mutual information. 'bca' (bias
  corrected and accelerated) moves them: with z0 = Phi^-1(share of resamples
  below the estimate) and acceleration a from the jackknife, the ends are the
  quantiles Phi(z0 + (z0 + z) / (1 - a (z0 + z))), z = Phi^-1(alpha/2) and
  Phi^-1(1 - alpha/2). It suits skewed metrics such as an AUC near one.

  Args:
    metric: arrays [n, ...] -> float; NaN where undefined.
    *arrays: leading axis n; resampled together.
    groups: [n] labels of the independent units, or None where rows are
      independent; whole groups are drawn.
    samples: resamples, >= 100.
    seed: of the resampling; equal seeds draw equal resamples.
    level: coverage in (0, 1).
    method: 'bca', 'percentile' or 'basic'.

  Returns:
    Interval; its ends are NaN if the metric is.

  Raises:
    ValueError: an option out of range, arrays of unequal length, or fewer
      than two units.

  References:
    Efron. Better bootstrap confidence intervals, 1987.
  """
  tables, units = _check_bootstrap(arrays, groups, samples, level, method)
  with warnings.catch_warnings():
    warnings.simplefilter('ignore', UndefinedMetricWarning)
    value = float(metric(*tables))
    rng = np.random.default_rng(seed)
    draws = np.empty(samples)
    for s in range(samples):
      drawn = rng.integers(0, len(units), len(units))
      index = np.concatenate([units[u] for u in drawn])
      draws[s] = metric(*(a[index] for a in tables))
    defined = draws[~np.isnan(draws)]
    undefined = samples - len(defined)
    if np.isnan(value) or not len(defined):
      nan = float('nan')
      return Interval(
        value, nan, nan, nan, level, method, samples, undefined, nan
      )
    tail = np.array([(1 - level) / 2, (1 + level) / 2])
    if method == 'bca':
      tail = _bca_levels(metric, tables, units, value, defined, tail)
  low, high = np.quantile(defined, tail)
  if method == 'basic':
    low, high = 2 * value - high, 2 * value - low
  error = float(defined.std(ddof=1)) if len(defined) > 1 else float('nan')
  return Interval(
    value, float(low), float(high), error, level, method, samples, undefined,
    float(defined.mean()) - value,
  )  # fmt: skip


def bootstrap_difference(
  metric: Callable[[Any, Any], float],
  targets: Any,
  first: Any,
  second: Any,
  **options: Any,
) -> Interval:
  """Paired bootstrap of metric(targets, first) - metric(targets, second).

  Both models are scored on the same resample, so what they share cancels.

  Args:
    metric: (targets, scores) -> float.
    targets: [n, ...].
    first: [n, ...], scores of one model.
    second: [n, ...], scores of the other, for the same bags in the same order.
    **options: of `bootstrap_interval`.

  Returns:
    Interval of the difference.
  """
  return bootstrap_interval(
    lambda y, a, b: metric(y, a) - metric(y, b),
    targets,
    first,
    second,
    **options,
  )


def delong_covariance(
  labels: np.ndarray, scores: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
  r"""AUCs of K models on the same data, and their covariance.

  With placements V_i = share of negatives below positive i and W_j = share of
  positives above negative j (ties count one half),
  cov = S_V / P + S_W / Q, S the sample covariances over models.

  Args:
    labels: [n], 0 or 1, at least two of each.
    scores: [n, K] or [n].

  Returns:
    auc: [K], float64.
    covariance: [K, K], float64.

  Raises:
    ValueError: fewer than two positives or negatives.

  References:
    DeLong, DeLong, Clarke-Pearson. Comparing the areas under two or more
    correlated ROC curves, 1988. Sun, Xu. Fast implementation of DeLong's
    algorithm, 2014.
  """
  labels = np.asarray(labels).astype(bool)
  scores = np.asarray(scores, np.float64).reshape(len(labels), -1)
  p, q = int(labels.sum()), int((~labels).sum())
  if p < 2 or q < 2:
    raise ValueError(
      f'DeLong needs two positives and two negatives, got {p} and {q}'
    )
  positives, negatives = scores[labels], scores[~labels]
  both = np.concatenate([positives, negatives])
  rank = lambda table: np.stack([midranks(x) for x in table.T], 1)
  ranks = rank(both)
  above = (ranks[:p] - rank(positives)) / q
  below = 1 - (ranks[p:] - rank(negatives)) / p
  covariance = np.cov(above.T, ddof=1) / p + np.cov(below.T, ddof=1) / q
  k = scores.shape[1]
  return above.mean(0), covariance.reshape(k, k)


def delong_difference(
  labels: np.ndarray, first: np.ndarray, second: np.ndarray
) -> tuple[float, float, float]:
  """Paired comparison of two AUCs without resampling.

  Args:
    labels: [n], 0 or 1.
    first: [n], scores.
    second: [n], scores on the same bags.

  Returns:
    difference: AUC of the first minus that of the second.
    standard_error: of the difference.
    p_value: two-sided, normal approximation; 1 where both models rank alike.
  """
  auc, covariance = delong_covariance(labels, np.stack([first, second], 1))
  variance = covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1]
  error = float(np.sqrt(max(variance, 0)))
  difference = float(auc[0] - auc[1])
  if error == 0:
    return difference, error, float(difference == 0)
  return difference, error, float(2 * special.ndtr(-abs(difference) / error))


def detectable_difference(
  standard_error: float, *, power: float = 0.8, level: float = 0.05
) -> float:
  r"""Smallest true difference that a two-sided test would find.

  d = (Phi^-1(1 - level / 2) + Phi^-1(power)) * standard_error, 2.80 standard
  errors by default. The error shrinks with the root of the number of bags, so
  halving d takes four times as many.

  Args:
    standard_error: of the paired difference, from `delong_difference` or
      `bootstrap_difference`, on as many bags as the test will have; >= 0.
    power: chance of finding it, in (0, 1).
    level: size of the test, in (0, 1).

  Returns:
    The difference, in units of the metric.

  Raises:
    ValueError: an argument out of range.
  """
  if not standard_error >= 0:
    raise ValueError(f'standard_error must be >= 0, got {standard_error}')
  if not (0 < power < 1 and 0 < level < 1):
    raise ValueError(
      f'power and level must be in (0, 1), got {power} and {level}'
    )
  quantiles = special.ndtri(1 - level / 2) + special.ndtri(power)
  return float(quantiles * standard_error)


def _check_bootstrap(arrays, groups, samples, level, method):
  """Arrays, and the row indices of each independent unit."""
  arrays = [np.asarray(a) for a in arrays]
  lengths = sorted({len(a) for a in arrays})
  if len(lengths) != 1:
    raise ValueError(f'arrays must have one length n, got {lengths}')
  if samples < 100:
    raise ValueError(f'samples must be >= 100, got {samples}')
  if not 0 < level < 1:
    raise ValueError(f'level must be in (0, 1), got {level}')
  if method not in ('bca', 'percentile', 'basic'):
    raise ValueError(
      f"method must be 'bca', 'percentile' or 'basic', got {method!r}"
    )
  if groups is None:
    units = list(np.arange(lengths[0])[:, None])
  else:
    if len(groups) != lengths[0]:
      raise ValueError(f'groups has {len(groups)} entries, not {lengths[0]}')
    _, member, counts = np.unique(
      groups, return_inverse=True, return_counts=True
    )
    order = np.argsort(member, kind='stable')
    units = np.split(order, np.cumsum(counts)[:-1])
  if len(units) < 2:
    raise ValueError(f'a bootstrap needs two units at least, got {len(units)}')
  return arrays, units


def _bca_levels(metric, tables, units, value, draws, tail):
  """Quantile levels [2] corrected for bias and skewness."""
  # Ties with the estimate count half: discrete metrics repeat it often.
  share = np.mean(draws < value) + np.mean(draws == value) / 2
  size = len(draws)
  z0 = special.ndtri(np.clip(share, 0.5 / size, 1 - 0.5 / size))
  everything = np.arange(len(tables[0]))
  left_out = np.array(
    [
      metric(*(a[np.delete(everything, unit)] for a in tables))
      for unit in units
    ]
  )
  left_out = left_out[~np.isnan(left_out)]
  gap = left_out.mean() - left_out if len(left_out) else np.zeros(1)
  spread = np.sum(gap**2) ** 1.5
  acceleration = np.sum(gap**3) / (6 * spread) if spread > 0 else 0.0
  z = z0 + special.ndtri(tail)
  room = 1 - acceleration * z
  # Beyond the pole, where the skewness has used up its end of the scale, the
  # level is the limit before it: not the other end, where 1 / room jumps to.
  end = np.where(z > 0, np.inf, -np.inf)
  return special.ndtr(
    np.where(room > 0, z0 + z / np.where(room > 0, room, 1), end)
  )

r"""Classification metrics, on the host, in float64.

Axes: n bags, C classes, R repeats of a cross-validation, T thresholds.

Where a metric has no value (one class only, say) it is NaN, with an
`UndefinedMetricWarning` that names it; never 0 or 0.5.
"""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from tmlib.ops.statistics import UndefinedMetricWarning, midranks

__all__ = [
  'auroc',
  'average_precision',
  'balanced_accuracy',
  'classification_summary',
  'cohen_kappa',
  'confusion_matrix',
  'log_loss',
  'macro_f1',
  'over_repeats',
  'pool_out_of_fold',
  'roc_curve',
]


def auroc(labels: Any, scores: Any) -> float:
  r"""Area under the ROC curve: Pr(s+ > s-) + Pr(s+ = s-) / 2.

  Args:
    labels: [n], int class index.
    scores: [n], larger for class 1; or [n, C], then the mean over the classes
      that have bags inside and outside (one against the rest). With C = 2
      this is the AUC of class 1 if the columns add up to a constant.

  Returns:
    In [0, 1]; NaN where no class can be ranked.

  References:
    Hanley, McNeil. The meaning and use of the area under a receiver operating
    characteristic (ROC) curve, 1982. The mean over present classes is our
    choice.
  """
  labels, scores = _checked(labels, scores)
  if scores.ndim == 1:
    return _binary_auroc(labels == 1, scores, 'auroc')
  values = [
    _binary_auroc(labels == c, scores[:, c], f'auroc of class {c}')
    for c in range(scores.shape[1])
  ]
  values = [v for v in values if not np.isnan(v)]
  return float(np.mean(values)) if values else float('nan')


def roc_curve(
  labels: Any, scores: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Points of the ROC curve, one per distinct score.

  Args:
    labels: [n], 0 or 1.
    scores: [n].

  Returns:
    fpr, tpr: [T + 1], from (0, 0) to (1, 1); NaN where a class is absent.
    threshold: [T + 1], decreasing from inf; positive means score >= threshold.
  """
  labels, scores = _checked(labels, scores)
  threshold, true, false = _counts_above(labels == 1, scores)
  with np.errstate(invalid='ignore'):
    tpr, fpr = true / true[-1], false / false[-1]
  if not true[-1] or not false[-1]:
    _undefined('roc_curve', 'it needs both classes')
  start = lambda x, first: np.concatenate([[first], x])
  return start(fpr, 0.0), start(tpr, 0.0), start(threshold, np.inf)


def average_precision(labels: Any, scores: Any) -> float:
  r"""Step-wise area under precision and recall: sum_t (R_t - R_{t-1}) P_t.

  Args:
    labels: [n], 0 or 1.
    scores: [n]; tied scores enter together.

  Returns:
    In (0, 1]; NaN without a positive.
  """
  labels, scores = _checked(labels, scores)
  _, true, false = _counts_above(labels == 1, scores)
  if not true[-1]:
    return _undefined('average_precision', 'there is no positive')
  recall = np.diff(true, prepend=0) / true[-1]
  return float(np.sum(recall * true / (true + false)))


def confusion_matrix(
  labels: Any, predictions: Any, num_classes: int | None = None
) -> np.ndarray:
  """Counts of (true class, predicted class).

  Args:
    labels: [n], int in [0, C).
    predictions: [n], int in [0, C).
    num_classes: C; None takes the largest index seen.

  Returns:
    [C, C], int64; rows are true classes.

  Raises:
    ValueError: an index outside [0, C).
  """
  labels, predictions = np.asarray(labels), np.asarray(predictions)
  _check_same_length(labels, predictions)
  seen = np.concatenate([labels, predictions])
  size = int(seen.max()) + 1 if num_classes is None else num_classes
  if seen.min() < 0 or seen.max() >= size:
    raise ValueError(
      f'class indices must be in [0, {size}), got {seen.min()} to {seen.max()}'
    )
  flat = labels.astype(np.int64) * size + predictions
  return np.bincount(flat, minlength=size * size).reshape(size, size)


def balanced_accuracy(labels: Any, predictions: Any) -> float:
  """Mean recall over the classes that occur.

  Args:
    labels: [n], int.
    predictions: [n], int.

  Returns:
    In [0, 1].
  """
  matrix = confusion_matrix(labels, predictions)
  support = matrix.sum(1)
  present = support > 0
  return float(np.mean(np.diag(matrix)[present] / support[present]))


def macro_f1(labels: Any, predictions: Any) -> float:
  """Mean of 2 TP / (2 TP + FP + FN) over classes that occur or are predicted.

  Args:
    labels: [n], int.
    predictions: [n], int.

  Returns:
    In [0, 1].
  """
  matrix = confusion_matrix(labels, predictions)
  total = matrix.sum(0) + matrix.sum(1)
  return float(np.mean(2 * np.diag(matrix)[total > 0] / total[total > 0]))


def cohen_kappa(
  labels: Any, predictions: Any, weights: str | None = None
) -> float:
  r"""Agreement beyond chance: 1 - sum w O / sum w E.

  O are the observed counts, E those of independent margins, and w the cost of
  a disagreement: 1, |i - j| or (i - j)^2.

  Args:
    labels: [n], int.
    predictions: [n], int.
    weights: None, 'linear' or 'quadratic' (grades).

  Returns:
    At most 1; NaN if one class is all there is.

  Raises:
    ValueError: another kind of weights.

  References:
    Cohen. Weighted kappa, 1968.
  """
  if weights not in (None, 'linear', 'quadratic'):
    raise ValueError(
      f"weights must be None, 'linear' or 'quadratic', got {weights!r}"
    )
  matrix = confusion_matrix(labels, predictions).astype(np.float64)
  grade = np.arange(len(matrix))
  distance = np.abs(grade[:, None] - grade)
  cost = {
    None: (distance > 0) * 1.0,
    'linear': distance,
    'quadratic': distance**2,
  }[weights]
  expected = np.outer(matrix.sum(1), matrix.sum(0)) / matrix.sum()
  chance = np.sum(cost * expected)
  if chance == 0:
    return _undefined('cohen_kappa', 'only one class occurs')
  return float(1 - np.sum(cost * matrix) / chance)


def log_loss(labels: Any, probabilities: Any) -> float:
  """Mean of -log p(true class); p is clipped to float64's resolution.

  Args:
    labels: [n], int in [0, C).
    probabilities: [n, C], rows sum to one; or [n], of class 1.

  Returns:
    >= 0.
  """
  labels, p = _checked(labels, probabilities)
  if p.ndim == 1:
    p = np.stack([1 - p, p], 1)
  own = p[np.arange(len(labels)), labels]
  tiny = np.finfo(np.float64).eps
  return float(-np.mean(np.log(np.clip(own, tiny, 1))))


def classification_summary(labels: Any, probabilities: Any) -> dict[str, float]:
  """The metrics that one puts in a table.

  Args:
    labels: [n], int in [0, C).
    probabilities: [n, C].

  Returns:
    auroc, balanced_accuracy, macro_f1, cohen_kappa, log_loss, accuracy, and
    average_precision for C = 2.
  """
  labels, p = _checked(labels, probabilities)
  predictions = p.argmax(1)
  binary = p.shape[1] == 2
  summary = {
    'auroc': auroc(labels, p[:, 1] if binary else p),
    'accuracy': float(np.mean(predictions == labels)),
    'balanced_accuracy': balanced_accuracy(labels, predictions),
    'macro_f1': macro_f1(labels, predictions),
    'cohen_kappa': cohen_kappa(labels, predictions),
    'log_loss': log_loss(labels, p),
  }
  if binary:
    summary['average_precision'] = average_precision(labels, p[:, 1])
  return summary


def pool_out_of_fold(
  ids: Any, repeats: Any, scores: Any, num_bags: int | None = None
) -> np.ndarray:
  """Puts the test scores of all folds and repeats in one table.

  A fold may have five bags: an AUC per fold is mostly noise. Pool the scores
  of the folds of a repeat first, then take one AUC per repeat.

  Args:
    ids: [m], int, bag of each prediction.
    repeats: [m], int in [0, R), repeat it was made in.
    scores: [m, ...].
    num_bags: n; None takes the largest id.

  Returns:
    [n, R, ...]: out-of-fold scores, each bag once per repeat.

  Raises:
    ValueError: a bag predicted twice in a repeat, or never.
  """
  ids, repeats, scores = map(np.asarray, (ids, repeats, scores))
  n = int(ids.max()) + 1 if num_bags is None else num_bags
  count = np.zeros((n, int(repeats.max()) + 1), np.int64)
  np.add.at(count, (ids, repeats), 1)
  if (count != 1).any():
    bag, repeat = np.argwhere(count != 1)[0]
    raise ValueError(
      f'bag {bag} has {count[bag, repeat]} predictions in repeat {repeat}; '
      'each bag must be tested once per repeat'
    )
  table = np.empty(count.shape + scores.shape[1:], scores.dtype)
  table[ids, repeats] = scores
  return table


def over_repeats(
  metric: Callable[[Any, Any], float],
) -> Callable[[Any, Any], float]:
  """Lifts a metric to repeats: the mean over r of metric(labels, s[:, r]).

  Give the result to `bootstrap_interval` with scores [n, R]: bags are then
  resampled once for all repeats, since repeats share their bags and are not
  independent samples.

  Args:
    metric: (labels [n], scores [n, ...]) -> float.

  Returns:
    (labels [n], scores [n, R, ...]) -> float.
  """

  def lifted(labels, scores):
    scores = np.asarray(scores)
    return float(
      np.mean([metric(labels, scores[:, r]) for r in range(scores.shape[1])])
    )

  return lifted


def _binary_auroc(positive, scores, name):
  p = int(positive.sum())
  q = len(positive) - p
  if not p or not q:
    return _undefined(name, f'there are {p} positives and {q} negatives')
  return float((midranks(scores)[positive].sum() - p * (p + 1) / 2) / (p * q))


def _counts_above(positive, scores):
  """Distinct scores [T], decreasing, with the positives, negatives >= each."""
  order = np.argsort(-scores, kind='stable')
  ends = np.append(np.flatnonzero(np.diff(scores[order])), len(scores) - 1)
  true = np.cumsum(positive[order])[ends].astype(np.float64)
  return scores[order][ends], true, ends + 1 - true


def _checked(labels, scores):
  labels, scores = np.asarray(labels), np.asarray(scores, np.float64)
  _check_same_length(labels, scores)
  if np.isnan(scores).any():
    bags = np.unique(np.argwhere(np.isnan(scores))[:, 0])
    raise ValueError(
      f'scores are NaN for {len(bags)} of {len(scores)} bags (first: {bags[0]})'
    )
  return labels, scores


def _check_same_length(labels, other):
  if labels.ndim != 1 or len(labels) != len(other) or not len(labels):
    raise ValueError(
      f'labels must be a vector as long as the scores and not empty, got '
      f'shapes {labels.shape} and {other.shape}'
    )


def _undefined(name: str, why: str) -> float:
  warnings.warn(
    f'{name} is undefined: {why}; reported as NaN',
    UndefinedMetricWarning,
    stacklevel=3,
  )
  return float('nan')

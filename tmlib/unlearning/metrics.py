"""How close an unlearned model is to a retrained one.

Axes: n examples, C outputs.
"""

import json
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

__all__ = [
  'centre',
  'forget_quality_ks',
  'gap_norm',
  'kl_to_retrained',
  'membership_auc',
  'relative_error',
  'tofu_truth_ratios',
  'truth_ratio',
]


def centre(logits: Any) -> np.ndarray:
  """Logits less their mean: softmax outputs have no origin. [n, C]."""
  logits = np.asarray(logits, np.float64)
  return logits - logits.mean(-1, keepdims=True)


def gap_norm(outputs: Any, truth: Any, logits: bool = True) -> float:
  """Root mean square over examples of ||f - f_R||, centred for logits."""
  gap = np.asarray(outputs, np.float64) - np.asarray(truth, np.float64)
  gap = centre(gap) if logits else gap
  return float(np.sqrt(np.mean(np.sum(gap**2, -1))))


def _log_softmax(logits):
  logits = np.asarray(logits, np.float64)
  logits = logits - logits.max(-1, keepdims=True)
  return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def kl_to_retrained(outputs: Any, truth: Any) -> np.ndarray:
  """KL(p_R || p) per example, from logits; [n], in nats."""
  log_p, log_q = _log_softmax(truth), _log_softmax(outputs)
  return np.sum(np.exp(log_p) * (log_p - log_q), -1)


def forget_quality_ks(unlearned: Any, retrained: Any) -> tuple[float, float]:
  """Two-sample Kolmogorov-Smirnov test, D = sup |F_1 - F_2|.

  Forget quality is the p-value for truth ratios (or losses) of the forget set
  under the unlearned and the retrained model: small means distinguishable.

  Args:
    unlearned: [n] statistics, finite.
    retrained: [m] statistics, finite.

  Returns:
    The statistic D and the p-value, exact or asymptotic as SciPy's
    `ks_2samp(method='auto')` decides.

  Raises:
    ValueError: an empty sample or NaN.

  References:
    Maini et al. TOFU: a task of fictitious unlearning for LLMs, 2024.
  """
  from scipy.stats import ks_2samp

  samples = [
    np.ravel(np.asarray(s, np.float64)) for s in (unlearned, retrained)
  ]
  for name, s in zip(('unlearned', 'retrained'), samples, strict=True):
    if not len(s):
      raise ValueError(f'{name} is empty: the test needs at least one value.')
    if not np.isfinite(s).all():
      raise ValueError(f'{name} holds NaN or inf.')
  result: Any = ks_2samp(samples[0], samples[1])
  return float(result.statistic), float(result.pvalue)


def truth_ratio(wrong: Any, paraphrased: Any) -> np.ndarray:
  """R = geometric mean of P(wrong answers) / P(paraphrased right answer).

  Args:
    wrong: [n, k] log-probability per token of k perturbed wrong answers.
    paraphrased: [n] log-probability per token of a paraphrased right answer.

  Returns:
    [n], >= 0.
  """
  wrong = np.asarray(wrong, np.float64).mean(-1)
  return np.exp(wrong - np.asarray(paraphrased, np.float64))


def tofu_truth_ratios(path: str | PathLike) -> dict[str, float]:
  """Truth ratios of the forget set from an evaluation log of TOFU.

  Args:
    path: `eval_log_forget.json`, or `eval_log_aggregated.json`, which holds
      the former under its name. Losses in it are per token: one paraphrased
      right answer and several perturbed wrong ones for each question.

  Returns:
    {question: ratio}. Compare the questions that two logs share: they were
    not all made with forget sets of one size.

  Raises:
    ValueError: a log of another kind.
  """
  log = json.loads(Path(path).read_text())
  log = log.get('eval_log_forget.json', log)
  try:
    right, wrong = log['avg_paraphrased_loss'], log['average_perturb_loss']
  except KeyError as error:
    raise ValueError(
      f'{path} lacks {error}; pass eval_log_forget.json or '
      'eval_log_aggregated.json of a TOFU run with perturbed answers.'
    ) from None
  questions = list(right)
  ratio = truth_ratio(
    [-np.asarray(wrong[k]) for k in questions], [-right[k] for k in questions]
  )
  return dict(zip(questions, ratio.tolist(), strict=True))


def membership_auc(members: Any, others: Any) -> float:
  """AUC of the attack "a smaller loss means a member", ties count half.

  Args:
    members: [n] losses of the forget set.
    others: [m] losses of data never seen.

  Returns:
    Pr(loss_member < loss_other) + Pr(equal) / 2; 0.5 is what a retrained model
    should show, and *below* 0.5 means over-forgotten.
  """
  members, others = np.ravel(members), np.sort(np.ravel(others))
  if not len(members) or not len(others):
    raise ValueError('membership_auc needs members and others, got none.')
  above = len(others) - np.searchsorted(others, members, 'right')
  equal = len(others) - np.searchsorted(others, members, 'left') - above
  return float(np.mean((above + 0.5 * equal) / len(others)))


def relative_error(predicted: Any, actual: Any) -> tuple[float, float]:
  """||predicted - actual|| / ||actual|| and the cosine between them."""
  a, b = np.ravel(predicted), np.ravel(actual)
  size = np.linalg.norm(a) * np.linalg.norm(b)
  error = np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-300)
  return float(error), float(a @ b / max(size, 1e-300))

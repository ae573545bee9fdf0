r"""Linear Cox regression with a ridge penalty. On the host, in float64.

Axes: n patients, p covariates, L penalties.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tmlib.data.folds import stratified_folds
from tmlib.mil.survival.checks import check_survival

__all__ = ['LinearCox', 'linear_cox', 'select_cox_penalty']


class LinearCox(NamedTuple):
  """A fitted model; the log-risk is x @ coefficients.

  Attributes:
    coefficients: [p].
    loss: penalised negative log partial likelihood at the solution.
    gradient: its largest derivative, in absolute value.
    converged: whether the gradient is below the tolerance.
    steps: Newton steps taken.
  """

  coefficients: np.ndarray
  loss: float
  gradient: float
  converged: bool
  steps: int


def _partial(x, time, event, beta):
  """Breslow's negative log partial likelihood, gradient [p], Hessian [p, p].

  Patients must come by falling time, so that risk sets are leading rows.
  """
  risk = x @ beta
  top = risk.max()
  weight = np.exp(risk - top)
  # The last row of each time: all that are tied with it are at risk.
  last = np.searchsorted(-time, -time, side='right') - 1
  total = np.cumsum(weight)[last]
  mean = np.cumsum(weight[:, None] * x, 0)[last] / total[:, None]
  loss = float((np.log(total) + top - risk)[event].sum())
  gradient = (mean - x)[event].sum(0)
  # Each patient's weight over all risk sets that it belongs to.
  first = np.searchsorted(-time, -time, side='left')
  share = np.cumsum((event / total)[::-1])[::-1][first] * weight
  hessian = (share[:, None] * x).T @ x - mean[event].T @ mean[event]
  return loss, gradient, hessian


def linear_cox(
  x: Any,
  time: Any,
  event: Any,
  penalty: float,
  *,
  max_steps: int = 50,
  tolerance: float = 1e-8,
) -> LinearCox:
  r"""Minimises -log L(beta) + penalty / 2 |beta|^2, ties by Breslow.

  Newton's method with step halving; the problem is convex.

  Args:
    x: [n, p], covariates; scale them, for the penalty is one for all.
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    penalty: > 0.
    max_steps: of Newton.
    tolerance: of the largest derivative, relative to the number of events.

  Returns:
    The solution.

  Raises:
    ValueError: bad times, events or covariates, no event, penalty <= 0.

  References:
    Cox. Regression models and life-tables, 1972. Verweij, Van Houwelingen.
    Penalized likelihood in Cox regression, 1994.
  """
  time, event = check_survival(time, event)
  x = np.asarray(x, np.float64)
  if x.ndim != 2 or len(x) != len(time) or not np.isfinite(x).all():
    raise ValueError(f'x {x.shape} must be finite, [n, p] with n={len(time)}')
  if not penalty > 0:
    raise ValueError(f'penalty={penalty} must be positive')
  if not event.any():
    raise ValueError('all patients are censored: there is nothing to fit')
  order = np.argsort(-time, kind='stable')
  x, time, event = x[order], time[order], event[order]

  def penalised(beta):
    loss, gradient, hessian = _partial(x, time, event, beta)
    hessian[np.diag_indices(len(beta))] += penalty
    loss += penalty / 2 * float(beta @ beta)
    return loss, gradient + penalty * beta, hessian

  beta, limit = np.zeros(x.shape[1]), tolerance * event.sum()
  loss, gradient, hessian = penalised(beta)
  for step in range(max_steps):  # noqa: B007
    if np.abs(gradient).max() <= limit:
      break
    move = np.linalg.solve(hessian, gradient)
    size = 1.0
    while size > 1e-6:
      trial = penalised(beta - size * move)
      if trial[0] <= loss:
        break
      size /= 2
    beta, (loss, gradient, hessian) = beta - size * move, trial
  worst = float(np.abs(gradient).max())
  return LinearCox(beta, loss, worst, bool(worst <= limit), step)


def select_cox_penalty(
  x: Any,
  time: Any,
  event: Any,
  penalties: Sequence[float],
  *,
  folds: int = 5,
  seed: int = 0,
) -> float:
  r"""The penalty with the best cross-validated partial likelihood.

  sum_k [log L(beta_-k) - log L_-k(beta_-k)], where beta_-k and L_-k know
  nothing of fold k; look at training patients alone.

  Args:
    x: [n, p].
    time: [n].
    event: [n].
    penalties: L candidates, positive.
    folds: stratified by event.
    seed: of the folds.

  Returns:
    One of the penalties.

  Raises:
    ValueError: as `linear_cox`.

  References:
    Verweij, Van Houwelingen. Cross-validation in survival analysis, 1993.
  """
  time, event = check_survival(time, event)
  x = np.asarray(x, np.float64)
  fold = stratified_folds(event, folds, seed)

  def log_likelihood(rows, beta):
    order = rows[np.argsort(-time[rows], kind='stable')]
    return -_partial(x[order], time[order], event[order], beta)[0]

  def score(penalty):
    total, every = 0.0, np.arange(len(x))
    for k in range(folds):
      rows = np.flatnonzero(fold != k)
      beta = linear_cox(x[rows], time[rows], event[rows], penalty).coefficients
      total += log_likelihood(every, beta) - log_likelihood(rows, beta)
    return total

  return float(max(penalties, key=score))

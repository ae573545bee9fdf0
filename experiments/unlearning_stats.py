"""Statistics of the unlearning report: regression, ranking, intervals.

Axes: R requests, M methods, K predictors.
"""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

__all__ = [
  'bootstrap',
  'held_out_r2',
  'incremental_r2',
  'kendall_tau',
  'top1_regret',
]


def bootstrap(
  statistic: Callable[[np.ndarray], float], n: int, draws: int, seed: int = 0
) -> tuple[float, float, float]:
  """Value and 95 % percentile interval of `statistic(indices)` over [n]."""
  rng = np.random.default_rng(seed)
  values = [statistic(rng.integers(0, n, n)) for _ in range(draws)]
  low, high = np.nanpercentile(values, [2.5, 97.5])
  return float(statistic(np.arange(n))), float(low), float(high)


def _fit(x: np.ndarray, y: np.ndarray) -> np.ndarray:
  x = np.concatenate([x, np.ones((len(x), 1))], 1)
  return np.linalg.lstsq(x, y, rcond=None)[0]


def _apply(x: np.ndarray, coef: np.ndarray) -> np.ndarray:
  return np.concatenate([x, np.ones((len(x), 1))], 1) @ coef


def held_out_r2(x: np.ndarray, y: np.ndarray, group: np.ndarray) -> np.ndarray:
  """Squared errors [R] of least squares with the request's group left out."""
  error = np.empty(len(y))
  for g in np.unique(group):
    out = group == g
    coef = _fit(x[~out], y[~out])
    error[out] = (y[out] - _apply(x[out], coef)) ** 2
  return error


def incremental_r2(
  base: np.ndarray,
  extra: np.ndarray,
  y: np.ndarray,
  group: np.ndarray,
  draws: int,
) -> dict[str, tuple[float, float, float]]:
  """Held-out R^2 of the base predictors, with the extra ones, and the gain.

  Args:
    base: [R, K] predictors.
    extra: [R, K'] further predictors.
    y: [R] target.
    group: [R] data set of each request; one is left out at a time.
    draws: bootstrap draws over requests.

  Returns:
    {'base', 'extra', 'both', 'gain'}: value and 95 % interval. R^2 can be
    negative: worse than the mean.
  """  # fmt: skip
  errors = {
    'base': held_out_r2(base, y, group),
    'extra': held_out_r2(extra, y, group),
    'both': held_out_r2(np.concatenate([base, extra], 1), y, group),
  }

  def r2(name):
    def value(i):
      spread = np.sum((y[i] - y[i].mean()) ** 2)
      return 1 - errors[name][i].sum() / max(spread, 1e-300)

    return value

  found = {k: bootstrap(r2(k), len(y), draws) for k in errors}
  gain = lambda i: r2('both')(i) - r2('base')(i)
  return found | {'gain': bootstrap(gain, len(y), draws)}


def kendall_tau(a: np.ndarray, b: np.ndarray) -> float:
  """(concordant - discordant) / pairs of two rankings [M]."""
  i, j = np.triu_indices(len(a), 1)
  return float(np.mean(np.sign(a[i] - a[j]) * np.sign(b[i] - b[j])))


def top1_regret(
  predicted: Mapping[str, np.ndarray],
  realised: Mapping[str, np.ndarray],
  group: np.ndarray,
  methods: Sequence[str],
  network: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
  """log2 of (gap of the chosen method / gap of the best one), per request.

  Args:
    predicted: {method: [R]} gaps.
    realised: {method: [R]} gaps.
    group: [R], data set of each request.
    methods: to choose from.
    network: [R], or None for one; a constant choice is made for each.

  Returns:
    'audit': the method with the smallest predicted gap; 'constant': the
    method that was best on average on the *other* data sets; 'oracle
    constant': the method that is best on average on all requests. Each [R].
  """
  p = np.stack([predicted[m] for m in methods], 1)
  q = np.log2(np.maximum(np.stack([realised[m] for m in methods], 1), 1e-12))
  regret = q - q.min(1, keepdims=True)
  row = np.arange(len(p))
  network = np.zeros(len(p)) if network is None else network
  constant, oracle = np.empty(len(p)), np.empty(len(p))
  for one in np.unique(network):
    own = network == one
    oracle[own] = regret[own, regret[own].mean(0).argmin()]
    for g in np.unique(group[own]):
      out, rest = own & (group == g), own & (group != g)
      rest = rest if rest.any() else out
      constant[out] = regret[out, regret[rest].mean(0).argmin()]
  return {
    'audit': regret[row, p.argmin(1)],
    'constant': constant,
    'oracle constant': oracle,
  }

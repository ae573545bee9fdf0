"""Cells of the unlearning report, and the requests that they are made from.

Axes: R requests, n examples, C classes.
"""

import numpy as np

from experiments import unlearning_sets as sets
from experiments import unlearning_stats as stats

__all__ = ['BASE', 'LEVERAGE', 'Stack', 'cell', 'markdown', 'median', 'total']

BASE = ('r', 'gradient', 'n_F', 'K_FF r', 'influence')
LEVERAGE = ('H_FF r', 'H_RF r')


def total(gaps: np.ndarray) -> np.ndarray:
  """Norm [R] over F and R of gaps [R, 2]."""
  return np.linalg.norm(gaps, axis=-1)


def median(values: np.ndarray, draws: int) -> tuple[float, float, float]:
  """Median of [R] and its interval."""
  return stats.bootstrap(
    lambda i: float(np.median(values[i])), len(values), draws
  )


def cell(value: tuple[float, float, float]) -> str:
  """Value [low, high]."""
  return '{:.3g} [{:.3g}, {:.3g}]'.format(*value)


def markdown(header, rows) -> list[str]:
  """Lines of a table."""
  line = lambda cells: '| ' + ' | '.join(map(str, cells)) + ' |'
  return [line(header), line(['---'] * len(header)), *map(line, rows), '']


class Stack:
  """The requests of some studies, stacked: one network, or all of them."""

  def __init__(self, name: str, studies, measured, methods):
    self.name, self.methods = name, list(methods)
    self.studies, self.measured = studies, measured
    stack = lambda get: np.concatenate(
      [get(studies[k], measured[k]) for k in studies]
    )
    names = [[k] * len(m.unit) for k, m in measured.items()]
    split = [k.split('/') for group in names for k in group]
    self.network = np.array([network for network, _ in split])
    self.group = np.array([data for _, data in split])
    self.lmax = stack(lambda s, m: s.requests.lmax)
    self.kind = stack(lambda s, m: s.requests.kind)
    self.unit = stack(lambda s, m: m.unit)
    self.cosine = stack(lambda s, m: m.cosine)
    self.error = stack(lambda s, m: m.error)
    names = ['nothing', *methods]
    self.gaps = {k: stack(lambda s, m, k=k: m.gaps[k]) for k in names}
    self.quality = {k: stack(lambda s, m, k=k: m.quality[k]) for k in names}
    self.predicted = {
      k: stack(lambda s, m, k=k: s.prediction.gaps[k]) for k in names
    }
    self.predictors = {
      k: stack(lambda s, m, k=k: s.prediction.predictors[k])
      for k in (*BASE, *LEVERAGE, 'predicted gap')
    }
    self.band = np.digitize(self.lmax, [b for _, b in sets.BANDS[:-1]])

  def band_name(self, b: int) -> str:
    """Lmax range of a band with its number of requests."""
    low, high = sets.BANDS[b]
    return f'lmax {low:g}-{high:g} (n={int((self.band == b).sum())})'

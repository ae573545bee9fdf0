"""How well risks order survival times. On the host, in float64.

Axes: n patients.

A pair (i, j) is comparable if i has an event and t_i < t_j, or t_i = t_j and
j is censored. It counts 1 if risk_i > risk_j, 1/2 if they are equal.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.mil.survival.checks import check_survival
from tmlib.mil.survival.curves import censoring_curve

__all__ = [
  'Pairs',
  'censoring_weights',
  'concordance_index',
  'concordance_index_ipcw',
  'concordance_pairs',
  'concordance_sums',
]

# Patients whose pairs are looked at one by one; all earlier ones are counted
# by a search in a sorted array.
_BLOCK = 512


class Pairs(NamedTuple):
  """Weighted numbers of comparable pairs, by how their risks lie."""

  concordant: float
  discordant: float
  tied: float

  @property
  def comparable(self) -> float:
    """All of them."""
    return self.concordant + self.discordant + self.tied


def _checked(time, event, risk):
  time, event = check_survival(time, event)
  risk = np.asarray(risk, float)
  if risk.shape != time.shape:
    raise ValueError(f'risk {risk.shape} must be [n] as time {time.shape}')
  if not np.isfinite(risk).all():
    where = np.flatnonzero(~np.isfinite(risk))[0]
    raise ValueError(f'risk[{where}] = {risk[where]} is not finite')
  if not event.any():
    raise ValueError('all patients are censored: no pair can be compared')
  return time, event, risk


def concordance_pairs(
  time: Any,
  event: Any,
  risk: Any,
  *,
  tied_tol: float = 1e-8,
  weight: Any = None,
) -> Pairs:
  """Counts comparable pairs in O(n^1.5), weighted by their earlier patient.

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    risk: [n], float, larger for an earlier event.
    tied_tol: risks closer than this are equal.
    weight: [n], weight of the pairs (i, .); None counts them.

  Returns:
    The numbers of pairs.

  Raises:
    ValueError: for bad input, and if all patients are censored.
  """
  time, event, risk = _checked(time, event, risk)
  weight = np.ones(len(time)) if weight is None else np.asarray(weight, float)
  # Latest first; at one time the censored before the events, which may be
  # compared with them but not with one another.
  order = np.lexsort((event, -time))
  time, event, risk, weight = (x[order] for x in (time, event, risk, weight))
  later = np.empty(0)  # sorted risks of the patients before the block
  lower = equal = higher = 0.0
  for begin in range(0, len(time), _BLOCK):
    block = slice(begin, begin + _BLOCK)
    t, e, r, w = time[block], event[block], risk[block], weight[block]
    below = np.searchsorted(later, r - tied_tol, side='left')
    upto = np.searchsorted(later, r + tied_tol, side='right')
    # Events of earlier blocks at the same time are not to be compared with.
    same = risk[:begin][event[:begin] & (time[:begin] == t[0])]
    gap = np.where((t == t[0])[:, None], r[:, None] - same, np.nan)
    lows = below - (gap > tied_tol).sum(1)
    ties = upto - below - (np.abs(gap) <= tied_tol).sum(1)
    highs = len(later) - upto - (gap < -tied_tol).sum(1)
    gap = r[:, None] - r[None]
    pair = (t[:, None] < t[None]) | ((t[:, None] == t[None]) & ~e[None])
    lows = lows + (pair & (gap > tied_tol)).sum(1)
    ties = ties + (pair & (np.abs(gap) <= tied_tol)).sum(1)
    highs = highs + (pair & (gap < -tied_tol)).sum(1)
    chosen = np.where(e, w, 0)
    lower += float(chosen @ lows)
    equal += float(chosen @ ties)
    higher += float(chosen @ highs)
    later = np.sort(np.concatenate([later, r]), kind='stable')
  return Pairs(lower, higher, equal)


def concordance_index(
  time: Any, event: Any, risk: Any, *, tied_tol: float = 1e-8
) -> float:
  """Harrell's C: the fraction of comparable pairs that risks order rightly.

  Args:
    time: [n], float >= 0.
    event: [n], bool or 0/1; 1 where an event was seen. Tables that hold a
      column "censorship" mean the opposite.
    risk: [n], float, larger for an earlier event.
    tied_tol: risks closer than this are equal.

  Returns:
    In [0, 1].

  Raises:
    ValueError: for bad input, if all patients are censored, or no pair can be
      compared.

  References:
    Harrell et al. Evaluating the yield of medical tests, 1982.
  """
  return _index(concordance_pairs(time, event, risk, tied_tol=tied_tol))


def _index(pairs: Pairs) -> float:
  if not pairs.comparable > 0:
    raise ValueError(
      'no pair of patients can be compared: every event comes at or after all '
      'other times'
    )
  return (pairs.concordant + pairs.tied / 2) / pairs.comparable


def censoring_weights(
  train_time: Any, train_event: Any, time: Any, event: Any
) -> np.ndarray:
  """1 / G(t_i) for events, 0 else; G = Pr(no censoring up to t) in training.

  Args:
    train_time: [m], times that estimate G.
    train_event: [m], their events.
    time: [n], float >= 0.
    event: [n], bool or 0/1.

  Returns:
    [n] float64.

  Raises:
    ValueError: if an event lies beyond the last training time, or where G is 0.
  """
  time, event = check_survival(time, event)
  curve = censoring_curve(train_time, train_event)
  late = event & (time > curve.time[-1])
  if late.any():
    raise ValueError(
      f'time {time[late][0]} lies beyond the last training time '
      f'{curve.time[-1]}, where the censoring distribution is unknown; pass a '
      'smaller tau'
    )
  alive = curve.at(time)
  if (alive[event] <= 0).any():
    raise ValueError(
      'the censoring distribution is zero at an event; pass a smaller tau'
    )
  return np.where(event, 1 / np.where(alive > 0, alive, 1), 0)


def concordance_index_ipcw(
  train_time: Any,
  train_event: Any,
  time: Any,
  event: Any,
  risk: Any,
  *,
  tau: float | None = None,
  tied_tol: float = 1e-8,
) -> float:
  """Uno's C: pairs weighted by the inverse squared chance to be observed.

  Unlike Harrell's it does not depend on how patients were censored, if that
  is independent of their risk.

  Args:
    train_time: [m], times that estimate the censoring distribution.
    train_event: [m], their events.
    time: [n], float >= 0.
    event: [n], bool or 0/1.
    risk: [n], float, larger for an earlier event.
    tau: events at or after this time count as not comparable; None is no limit.
    tied_tol: risks closer than this are equal.

  Returns:
    In [0, 1].

  Raises:
    ValueError: as `concordance_index` and `censoring_weights`.

  References:
    Uno et al. On the C-statistics for evaluating overall adequacy of risk
    prediction procedures with censored survival data, 2011.
  """
  time, event, risk = _checked(time, event, risk)
  early = np.ones(len(time), bool) if tau is None else time < tau
  weight = np.zeros(len(time))
  if early.any():
    weight[early] = censoring_weights(
      train_time, train_event, time[early], event[early]
    )
  pairs = concordance_pairs(
    time, event, risk, tied_tol=tied_tol, weight=weight**2
  )
  return _index(pairs)


def concordance_sums(
  time: jax.Array,
  event: jax.Array,
  risk: jax.Array,
  mask: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Harrell's C on the device: O(n^2) pairs, for a metric inside a step.

  Args:
    time: [n], float.
    event: [n], bool or 0/1.
    risk: [n], float.
    mask: [n], bool, False for padding.

  Returns:
    sum: [] float, concordant pairs plus half of the tied ones.
    weight: [] float, comparable pairs; their quotient is C.
  """
  event = event.astype(bool)
  mask = jnp.ones(time.shape, bool) if mask is None else mask.astype(bool)
  event &= mask
  later = (time[:, None] < time[None]) | (
    (time[:, None] == time[None]) & ~event[None]
  )
  pair = event[:, None] & later & mask[None]
  order = jnp.sign(risk[:, None] - risk[None]) / 2 + 0.5
  return jnp.where(pair, order, 0).sum(), pair.sum().astype(order.dtype)

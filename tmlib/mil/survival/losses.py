r"""Losses of survival models, stable at any logit.

Axes: B patients, K bins of time.
"""

import chex
import jax
import jax.numpy as jnp

__all__ = [
  'cox_nll',
  'cox_sums',
  'discrete_nll',
  'hazards_to_survival',
  'risk_score',
]

# Stands for log 0: its exponential is zero, and so is its gradient.
_NEVER = -1e30


def hazards_to_survival(logits: jax.Array) -> jax.Array:
  r"""S_k = prod_{l <= k} (1 - h_l), with h = sigmoid(logits).

  Args:
    logits: [..., K], float, logits of the hazard in each bin.

  Returns:
    [..., K], probability to survive bin k.
  """
  return jnp.exp(-jnp.cumsum(jax.nn.softplus(logits), -1))


def risk_score(logits: jax.Array) -> jax.Array:
  """-sum_k S_k, minus the expected number of bins survived.

  Args:
    logits: [..., K], float, logits of the hazard in each bin.

  Returns:
    [...], larger for an earlier event.
  """
  return -hazards_to_survival(logits).sum(-1)


def _reduced(values: jax.Array, weight: jax.Array, reduction: str) -> jax.Array:
  values = jnp.where(weight > 0, values, 0)
  if reduction == 'none':
    return values
  if reduction == 'sum':
    return values.sum()
  if reduction == 'mean':
    return values.sum() / jnp.maximum((weight > 0).sum(), 1)
  raise ValueError(f"reduction={reduction!r} must be 'mean', 'sum' or 'none'")


def discrete_nll(
  logits: jax.Array,
  bin: jax.Array,
  censored: jax.Array,
  *,
  alpha: float = 0.0,
  mask: jax.Array | None = None,
  reduction: str = 'mean',
) -> jax.Array:
  r"""Negative log-likelihood of binned survival times.

  With hazards h = sigmoid(x) and survival S:
  event in bin y: -log S_{y-1} - log h_y; censored in bin y: -log S_y, times
  1 - alpha. Written with softplus alone, so its gradient never dies.

  Args:
    logits: [B, K], float, x.
    bin: [B] int in [0, K), the bin y of the event or of the last visit.
    censored: [B], bool or 0/1; 1 where no event was seen.
    alpha: in [0, 1], how much less a censored patient counts.
    mask: [B], bool, False for padding.
    reduction: 'mean' over patients, 'sum', or 'none' for [B].

  Returns:
    The loss, float32 or wider.

  Raises:
    ValueError: if alpha or the reduction is out of range.

  References:
    Zadeh, Schmid. Bias in cross-entropy-based training of deep survival
    networks, 2021.
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f'alpha={alpha} must lie in [0, 1]')
  chex.assert_rank([logits, bin, censored], [2, 1, 1])
  chex.assert_equal_shape_prefix([logits, bin, censored], 1)
  wide = jnp.promote_types(logits.dtype, jnp.float32)
  weight = jnp.ones(bin.shape, bool) if mask is None else jnp.asarray(mask)
  logits = jnp.where(weight[:, None] > 0, logits, 0).astype(wide)
  bins = jnp.arange(logits.shape[1])[None]
  before, at = bins < bin[:, None], bins == bin[:, None]
  censored = jnp.asarray(censored).astype(bool)[:, None]
  lived = jax.nn.softplus(logits)
  died = jax.nn.softplus(-logits)
  terms = jnp.where(before, lived, 0)
  terms = terms + jnp.where(at, jnp.where(censored, lived, died), 0)
  scale = jnp.where(censored, 1 - alpha, 1).astype(wide)
  return _reduced((scale * terms).sum(1), weight, reduction)


def _running(values: jax.Array, first: jax.Array) -> jax.Array:
  """Running logsumexp that starts anew where `first` holds."""

  def combine(a, b):
    a_first, a_value = a
    b_first, b_value = b
    both = jnp.logaddexp(a_value, b_value)
    return a_first | b_first, jnp.where(b_first, b_value, both)

  return jax.lax.associative_scan(combine, (first, values))[1]


def _gathered(axis_name: str | None, *arrays: jax.Array) -> list[jax.Array]:
  if axis_name is None:
    return [jnp.asarray(x) for x in arrays]
  gather = lambda x: jax.lax.all_gather(x, axis_name, tiled=True)
  return [gather(x) for x in arrays]


def cox_sums(
  log_risk: jax.Array,
  time: jax.Array,
  event: jax.Array,
  *,
  ties: str = 'efron',
  strata: jax.Array | None = None,
  mask: jax.Array | None = None,
  axis_name: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  r"""Cox's negative log partial likelihood and the number of events.

  sum over events i of log sum_{j: t_j >= t_i} exp(r_j) - r_i, in
  O(B log B). The d events of one time have one risk set (Breslow), or the
  l-th of them one from which l / d of their own risk is taken (Efron).
  Divide by the number of events, never by the batch: without an event both
  sums are zero, and so is the gradient.

  Args:
    log_risk: [B], float, r.
    time: [B], float, of the event or of the last visit; equal times are ties.
    event: [B], bool or 0/1; 1 where an event was seen.
    ties: 'efron' or 'breslow'.
    strata: [B] int; patients are compared within a stratum. None is one.
    mask: [B], bool, False for padding.
    axis_name: mesh axis that the batch is split over, inside `shard_map`;
      risk sets span it, and every device returns the sums of all of them.

  Returns:
    sum: [] float.
    events: [] float.

  Raises:
    ValueError: if ties is unknown.

  References:
    Cox. Regression models and life-tables, 1972. Efron. The efficiency of
    Cox's likelihood function for censored data, 1977.
  """
  if ties not in ('efron', 'breslow'):
    raise ValueError(f"ties={ties!r} must be 'efron' or 'breslow'")
  chex.assert_rank([log_risk, time, event], 1)
  chex.assert_equal_shape([log_risk, time, event])
  wide = jnp.promote_types(log_risk.dtype, jnp.float32)
  mask = jnp.ones(time.shape, bool) if mask is None else mask.astype(bool)
  strata = jnp.zeros(time.shape, jnp.int32) if strata is None else strata
  risk, time, event, strata, mask = _gathered(
    axis_name, log_risk.astype(wide), time, event.astype(bool), strata, mask
  )
  if not risk.shape[0]:
    return jnp.zeros((), wide), jnp.zeros((), wide)
  # Padding comes last, in a stratum of its own.
  order = jnp.lexsort((-time, strata, ~mask))
  mask, time, strata = mask[order], time[order], strata[order]
  event = event[order] & mask
  risk = jnp.where(mask, risk[order], _NEVER)
  changed = (strata[1:] != strata[:-1]) | (mask[1:] != mask[:-1])
  start = jnp.ones(1, bool)
  new_stratum = jnp.concatenate([start, changed])
  new_time = jnp.concatenate([start, changed | (time[1:] != time[:-1])])
  # The risk set of a patient ends with the last one of the same time.
  position = jnp.arange(len(time))
  last_of = jnp.concatenate([new_time[1:], start])
  last = jax.lax.cummin(jnp.where(last_of, position, len(time)), reverse=True)
  at_risk = _running(risk, new_stratum)[last]
  if ties == 'efron':
    tied = _running(jnp.where(event, risk, _NEVER), new_time)[last]
    begin = jax.lax.cummax(jnp.where(new_time, position, 0))
    count = jnp.cumsum(event) - event
    rank = count - count[begin]
    total = (jnp.cumsum(event)[last] - count[begin]).astype(wide)
    share = jnp.where(event, rank / jnp.maximum(total, 1), 0).astype(wide)
    # where before exp: no event, no tie, and no gradient through either.
    ratio = jnp.exp(jnp.where(share > 0, tied - at_risk, 0))
    at_risk = at_risk + jnp.log1p(-share * ratio)
  terms = jnp.where(event, at_risk - jnp.where(event, risk, 0), 0)
  return terms.sum(), event.sum().astype(wide)


def cox_nll(
  log_risk: jax.Array,
  time: jax.Array,
  event: jax.Array,
  *,
  reduction: str = 'mean_events',
  mask: jax.Array | None = None,
  **options,
) -> jax.Array:
  """Cox's negative log partial likelihood of a batch, see `cox_sums`.

  It couples the patients of a batch: the batches of an epoch, or micro-batches,
  do not add up to the loss of the cohort.

  Args:
    log_risk: [B], float.
    time: [B], float.
    event: [B], bool or 0/1.
    reduction: 'mean_events', 'mean' over patients, or 'sum'. Packages differ
      here, so compare with care.
    mask: [B], bool, False for padding.
    **options: of `cox_sums`.

  Returns:
    [], the loss; 0 without an event.

  Raises:
    ValueError: for an unknown reduction or ties.
  """
  total, events = cox_sums(log_risk, time, event, mask=mask, **options)
  if reduction == 'sum':
    return total
  if reduction == 'mean_events':
    return total / jnp.maximum(events, 1)
  if reduction == 'mean':
    count = jnp.asarray(len(time)) if mask is None else mask.astype(bool).sum()
    axis_name = options.get('axis_name')
    if axis_name is not None:
      count = jax.lax.psum(count, axis_name)
    return total / jnp.maximum(count, 1)
  raise ValueError(
    f"reduction={reduction!r} must be 'mean_events', 'mean' or 'sum'"
  )

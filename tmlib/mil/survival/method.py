r"""Survival of patients as a Method: each bag is a patient.

Axes: B patients of a batch, K bins of time.
"""

from collections.abc import Mapping
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from tmlib.mil.survival.losses import cox_sums, discrete_nll, risk_score

# Survival is a task on bags.
from tmlib.mil.task_method import bag_method, weighted_auxiliary
from tmlib.train.method import Build

__all__ = ['cox_method', 'discrete_survival_method']


def discrete_survival_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  alpha: float = 0.0,
  aux_weights: Mapping[str, float] | None = None,
  **options: Any,
) -> Build:
  r"""Trains hazards in bins of time, see `discrete_nll`.

  Batch, beside what `bag_method` reads: 'bin' [B] int32 in [0, K), 'event' [B]
  and 'time' [B] float32.

  Args:
    model: with K logits.
    optimizer: Optax transformation.
    alpha: in [0, 1], how much less a censored patient counts.
    aux_weights: lambda of auxiliary losses.
    **options: of `bag_method`.

  Returns:
    Build. Metrics: loss, nll, aux/<name>. Outputs: id, logits, risk, time,
    event.

  Raises:
    ValueError: alpha out of range, or when traced an unknown auxiliary loss.
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f'alpha={alpha} must lie in [0, 1]')

  def task(output, batch, axis_name):
    del axis_name  # a sum over patients
    weight, event = batch['weight'], batch['event']
    nll = lambda logits: discrete_nll(
      logits, batch['bin'], 1 - event, alpha=alpha, reduction='none'
    )
    logits = output.logits.astype(jnp.float32)
    own = nll(logits)
    extra, each = weighted_auxiliary(output, aux_weights or {}, nll)
    metrics = {'nll': _total(own, weight)} | _named(each, weight)
    found = {
      'logits': logits,
      'risk': risk_score(logits),
      'time': batch['time'],
      'event': event,
    }
    return _total(own + extra, weight), metrics, found

  return bag_method(model, optimizer, task, **options)


def cox_method(
  model: nn.Module,
  optimizer: optax.GradientTransformation,
  *,
  ties: str = 'efron',
  aux_weights: Mapping[str, float] | None = None,
  **options: Any,
) -> Build:
  r"""Trains a log-risk by Cox's partial likelihood across the whole batch.

  The loss couples the patients of a batch: risk sets span all devices, and
  micro-batches are refused. A batch without an event has loss and gradient zero
  and takes no step; the metric `events` tells.

  Batch, beside what `bag_method` reads: 'event' [B] and 'time' [B] float32.

  Args:
    model: with one logit, the log-risk.
    optimizer: Optax transformation.
    ties: 'efron' or 'breslow'.
    aux_weights: lambda of auxiliary losses, as a mean over patients.
    **options: of `bag_method`.

  Returns:
    Build. Metrics: loss (per event), events, aux/<name>. Outputs: id, risk,
    time, event.

  Raises:
    ValueError: micro-batches; when traced, an unknown auxiliary loss or ties.
  """

  def task(output, batch, axis_name):
    chex.assert_axis_dimension(output.logits, -1, 1)
    weight, event, time = (batch[k] for k in ('weight', 'event', 'time'))
    every = lambda x: x if axis_name is None else jax.lax.psum(x, axis_name)
    sums = lambda logits: cox_sums(
      logits[:, 0].astype(jnp.float32), time, event,
      ties=ties, mask=weight > 0, axis_name=axis_name,
    )  # fmt: skip
    total, events = sums(output.logits)
    if output.aux_logits:
      # Logits of parts of a bag: a partial likelihood of their own would
      # compare parts; their mean stands for the bag.
      raise ValueError(
        f'auxiliary losses {sorted(output.aux_logits)} apply the loss to each '
        'bag alone, which a Cox loss cannot; use task=survival_nll'
      )
    extra, each = weighted_auxiliary(output, aux_weights or {}, lambda x: x[0])
    mean = lambda x: [every(part) for part in _total(x, weight)]
    penalty, count = mean(extra)
    total = total + events * penalty / jnp.maximum(count, 1)
    metrics = {'events': (events, jnp.ones_like(events))}
    metrics |= {f'aux/{name}': tuple(mean(x)) for name, x in each.items()}
    risk = output.logits[:, 0].astype(jnp.float32)
    found = {'risk': risk, 'time': time, 'event': event}
    return (total, events), metrics, found

  return bag_method(model, optimizer, task, batch_coupled=True, **options)


def _total(values, weight):
  # where, not multiply: whatever an empty slot holds must not matter.
  values = jnp.where(weight > 0, values, 0)
  return jnp.sum(values * weight), jnp.sum(weight)


def _named(each, weight):
  return {f'aux/{name}': _total(x, weight) for name, x in each.items()}

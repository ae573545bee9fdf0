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
    aux_weights: lambda of auxiliary losses, as a mean over patients; where one
      applies the task's loss to other logits of a bag (the parts of DTFD, the
      best instance of DSMIL), it is a partial likelihood of its own for each
      set of them, a mean over the sets.
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
    sums = lambda risk, mask: cox_sums(
      risk.astype(jnp.float32), time, event,
      ties=ties, mask=(weight > 0) & mask, axis_name=axis_name,
    )  # fmt: skip
    total, events = sums(output.logits[:, 0], jnp.ones_like(weight, bool))
    own = output.replace(aux_logits={})
    chosen = dict(aux_weights or {})
    parts = {k: chosen.pop(k, 0.0) for k in output.aux_logits}
    extra, each = weighted_auxiliary(own, chosen, lambda x: x[..., 0])
    mean = lambda x: [every(part) for part in _total(x, weight)]
    penalty, count = mean(extra)
    penalty = penalty / jnp.maximum(count, 1)
    losses = {name: tuple(mean(x)) for name, x in each.items()}
    for name, scale in parts.items():
      logits, share = output.aux_logits[name]
      mine, number = losses[name] = _of_parts(logits, share, sums)
      penalty = penalty + scale * mine / jnp.maximum(number, 1)
    total = total + events * penalty
    metrics = {'events': (events, jnp.ones_like(events))}
    metrics |= {f'aux/{name}': x for name, x in losses.items()}
    risk = output.logits[:, 0].astype(jnp.float32)
    found = {'risk': risk, 'time': time, 'event': event}
    return (total, events), metrics, found

  return bag_method(model, optimizer, task, batch_coupled=True, **options)


def _of_parts(logits, share, sums):
  """Losses per event of G sets of logits [B, G, 1], and how many sets have one.

  The g-th part of a bag is compared with the g-th of the others; parts are
  drawn at random, so this is a fair draw.
  """
  found = [
    sums(logits[:, g, 0], share[:, g] > 0) for g in range(logits.shape[1])
  ]
  each = [total / jnp.maximum(events, 1) for total, events in found]
  return sum(each), sum((events > 0).astype(jnp.float32) for _, events in found)


def _total(values, weight):
  # where, not multiply: whatever an empty slot holds must not matter.
  values = jnp.where(weight > 0, values, 0)
  return jnp.sum(values * weight), jnp.sum(weight)


def _named(each, weight):
  return {f'aux/{name}': _total(x, weight) for name, x in each.items()}

"""An Optax optimizer and its schedule, from a config."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

__all__ = ['make_optimizer']

_OPTIMIZERS = ('adamw', 'adam', 'sgd')
_SCHEDULES = ('cosine', 'constant', 'linear')


def make_optimizer(
  config: Mapping[str, Any], steps: int
) -> tuple[optax.GradientTransformation, Callable[[jax.Array], jax.Array]]:
  """Clipping, then the optimizer, on a schedule with linear warm-up.

  Args:
    config: name (adamw, adam, sgd), learning_rate (the peak), schedule (cosine,
      linear: both end at zero; constant), warmup (fraction of the steps, in
      [0, 1)), weight_decay (adamw only), clip (global gradient norm; 0 for
      none).
    steps: length of the schedule.

  Returns:
    (transformation, step -> learning rate).

  Raises:
    ValueError: for an unknown name, or a number out of range.
  """
  name, shape = config['name'], config['schedule']
  peak, warm = config['learning_rate'], config['warmup']
  if name not in _OPTIMIZERS:
    raise ValueError(f'optimizer.name {name!r} is not one of {_OPTIMIZERS}')
  if shape not in _SCHEDULES:
    raise ValueError(f'optimizer.schedule {shape!r} is not one of {_SCHEDULES}')
  if not peak > 0:
    raise ValueError(f'optimizer.learning_rate must be positive, got {peak}')
  if not 0 <= warm < 1:
    raise ValueError(f'optimizer.warmup must be in [0, 1), got {warm}')
  for field in ('clip', 'weight_decay'):
    if config[field] < 0:
      raise ValueError(f'optimizer.{field} must be at least 0, {config[field]}')
  rise = round(warm * steps)
  fall = max(steps - rise, 1)
  decay = {
    'cosine': optax.cosine_decay_schedule(peak, fall),
    'linear': optax.linear_schedule(peak, 0, fall),
    'constant': optax.constant_schedule(peak),
  }[shape]
  schedule = decay
  if rise:  # from above zero, so that no step is lost
    start = optax.linear_schedule(peak / (rise + 1), peak, rise)
    schedule = optax.join_schedules([start, decay], [rise])
  chain = [optax.clip_by_global_norm(config['clip'])] if config['clip'] else []
  if name == 'adamw':
    chain.append(optax.adamw(schedule, weight_decay=config['weight_decay']))
  elif name == 'adam':
    chain.append(optax.adam(schedule))
  else:
    chain.append(optax.sgd(schedule, momentum=0.9))
  return optax.chain(*chain), schedule  # pyright: ignore[reportReturnType]

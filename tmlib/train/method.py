"""The one contract: a method is a few pure functions.

Whatever tmlib trains, simulates, plays or solves step by step is a `Method`.
The loop folds `update`; it knows nothing else about any method.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
  'Batch',
  'Build',
  'Evaluation',
  'Method',
  'Metrics',
  'State',
  'check_update',
]

# Every leaf has the example axis first. `batch['weight']` marks padding with
# zeros and `batch['id']` holds each example's global index.
Batch = dict[str, Any]
# Any pytree of arrays; it holds one PRNG key, which is never split per device.
State = Any
# Scalars, or pairs (sum, weight) whose quotient is reported. Already global.
Metrics = dict[str, Any]
# {'sums': {name: (sum, weight)}, 'outputs': {name: [B, ...]}}
Evaluation = dict[str, dict[str, Any]]


class Method(NamedTuple):
  """Three pure functions that make a method.

  Attributes:
    init: (key, batch or None) -> state. The example batch gives the shapes.
    update: (state, batch or None) -> (state, metrics), one step.
    evaluate: (state, batch or None) -> {'sums': {name: (sum, weight)},
      'outputs': {name: [B, ...]}}. The loop adds `sums` over batches and
      concatenates `outputs` over the examples whose weight is positive.
  """

  init: Callable[[jax.Array, Batch | None], State]
  update: Callable[[State, Batch | None], tuple[State, Metrics]]
  evaluate: Callable[[State, Batch | None], Evaluation]


# The argument names the data axis in per-device mode; None in jit mode.
Build = Callable[[str | None], Method]


def check_update(old: State, new: State, metrics: Metrics) -> None:
  """Holds one update to the contract, while it is traced.

  Args:
    old: the state given to `update`.
    new: the state it returned.
    metrics: the metrics it returned.

  Raises:
    ValueError: if the state's structure, shapes or dtypes changed, or a metric
      is neither a scalar nor a pair of scalars.
  """
  absent = 'absent'
  before, after = (
    {
      jax.tree_util.keystr(path): (jnp.shape(x), str(jnp.result_type(x)))
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for tree in (old, new)
  )
  changed = [
    f'state{name}: {before.get(name, absent)} -> {after.get(name, absent)}'
    for name in sorted(before.keys() | after.keys())
    if before.get(name) != after.get(name)
  ]
  if changed:
    raise ValueError(
      'update must return a state of the shapes and dtypes it was given:\n  '
      + '\n  '.join(changed[:10])
    )
  for name, value in metrics.items():
    for x in value if isinstance(value, tuple) else (value,):
      if jnp.shape(x):
        raise ValueError(
          f'metric {name!r} has shape {jnp.shape(x)}; a metric is a scalar or'
          ' a pair (sum, weight) of scalars'
        )

"""The one contract: a method is a few pure functions.

Whatever tmlib trains, simulates, plays or solves step by step is a `Method`.
The loop folds `update`; it knows nothing else about any method.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

__all__ = ['Batch', 'Build', 'Evaluation', 'Method', 'Metrics', 'State']

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

"""What every multiple-instance model returns.

Axes: B rows, S bags packed into a row (the axis is absent where bags are not
packed), N instances, C classes, D features.
"""

from typing import Any

import jax
from flax import struct

__all__ = ['MILOutput']


class MILOutput(struct.PyTreeNode):
  """Output of a bag model; one bag never depends on another.

  Attributes:
    logits: [B, (S,) C].
    attention: [B, N], importance of each instance; sums to one over each bag,
      zero in padding.
    slide_features: [B, (S,) D], the pooled representation of each bag.
    aux: name -> [B, (S,)], auxiliary losses of each bag, without their weight.
    extras: whatever else a model exposes, for reports; not trained on.
  """

  logits: jax.Array
  attention: jax.Array
  slide_features: jax.Array
  aux: dict[str, jax.Array] = struct.field(default_factory=dict)
  extras: dict[str, Any] = struct.field(default_factory=dict)

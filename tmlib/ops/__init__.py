"""Pure building blocks: masked reductions, packing, statistics, graphs.

Host functions (NumPy) and device functions (jax.numpy) live in separate
modules; import the module you need.
"""

from tmlib.ops.softmax import (
  masked_softmax,
  one_hot_segments,
  segment_softmax,
)

__all__ = ['masked_softmax', 'one_hot_segments', 'segment_softmax']

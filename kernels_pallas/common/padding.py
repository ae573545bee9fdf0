"""How arrays are filled up to whole tiles."""

import jax
import jax.numpy as jnp

__all__ = ['pad_axis', 'split_evenly']


def pad_axis(x: jax.Array, axis: int, size: int, fill: float = 0) -> jax.Array:
  """Fills an axis up to `size`."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, pads, constant_values=fill) if pads[axis][1] else x


def split_evenly(size: int, largest: int, multiple: int) -> tuple[int, int]:
  """Length and number of equal blocks, with as little padding as may be."""
  count = -(-size // largest)
  block = -(-size // count)
  block = -(-block // multiple) * multiple
  return block, -(-size // block)

"""How arrays are filled up to whole tiles."""

import jax
import jax.numpy as jnp

__all__ = ['pad_axis', 'round_up', 'split_evenly']


def pad_axis(x: jax.Array, axis: int, size: int, fill: float = 0) -> jax.Array:
  """Fills an axis up to `size`."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, pads, constant_values=fill) if pads[axis][1] else x


def round_up(size: int, multiple: int) -> int:
  """The least multiple that is not below `size`."""
  return -(-size // multiple) * multiple


def split_evenly(size: int, largest: int, multiple: int) -> tuple[int, int]:
  """Length and number of equal blocks, with as little padding as may be."""
  count = -(-size // largest)
  block = round_up(-(-size // count), multiple)
  return block, -(-size // block)

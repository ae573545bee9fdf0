"""Rows sorted by group, each group padded to whole blocks.

Axes: A rows (assignments of tokens to groups), E groups, B rows per block,
n blocks, S = n B slots.

Every shape is static: n = A // B + E blocks hold any distribution of A rows
over E groups, with at least one block, possibly an empty one, for each group.
So a kernel never meets a block of two groups, and visits every group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['BlockLayout', 'block_layout', 'gather_rows', 'scatter_rows']


class BlockLayout(NamedTuple):
  """Where each row lies.

  Attributes:
    slots: [A] int32, the slot of each row; S for a row without a group.
    rows: [S] int32, the row in each slot; A for an empty slot.
    groups: [n] int32, the group of each block, ascending; E for a block that no
      group needs.
  """

  slots: jax.Array
  rows: jax.Array
  groups: jax.Array


def block_layout(groups: jax.Array, num_groups: int, block: int) -> BlockLayout:
  """Sorts rows by group and pads each group to whole blocks.

  Args:
    groups: [A] int32, the group of each row; a value outside
      [0, num_groups) drops the row.
    num_groups: E, at least 1.
    block: B, rows per block.

  Returns:
    The layout; rows of one group keep their order.

  Raises:
    ValueError: if num_groups or block is smaller than 1.
  """
  for name, value in (('num_groups', num_groups), ('block', block)):
    if value < 1:
      raise ValueError(f'{name} must be at least 1, got {value}')
  total = groups.shape[0]
  num_blocks = total // block + num_groups
  size = num_blocks * block
  valid = (groups >= 0) & (groups < num_groups)
  groups = jnp.where(valid, groups, num_groups).astype(jnp.int32)
  counts = jnp.zeros(num_groups + 1, jnp.int32).at[groups].add(1)
  starts = jnp.cumsum(counts) - counts
  blocks = jnp.maximum(-(-counts[:-1] // block), 1)
  ends = jnp.cumsum(blocks)
  offsets = jnp.append((ends - blocks) * block, size)

  order = jnp.argsort(groups, stable=True).astype(jnp.int32)
  ordered = groups[order]
  rank = jnp.arange(total, dtype=jnp.int32) - starts[ordered]
  slot = jnp.where(ordered < num_groups, offsets[ordered] + rank, size)
  slots = jnp.zeros(total, jnp.int32).at[order].set(slot.astype(jnp.int32))
  rows = jnp.full(size, total, jnp.int32).at[slot].set(order, mode='drop')
  block_groups = jnp.searchsorted(ends, jnp.arange(num_blocks), side='right')
  return BlockLayout(slots, rows, block_groups.astype(jnp.int32))


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[index], zero where the index lies beyond the end."""
  return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def _no_gradient(index: jax.Array) -> np.ndarray:
  return np.zeros(index.shape, jax.dtypes.float0)


@jax.custom_vjp
def gather_rows(x: jax.Array, layout: BlockLayout) -> jax.Array:
  """Rows into their slots, and zeros into the empty ones.

  The layout gives the inverse of its own gather, so that neither this
  function nor its gradient scatters.

  Args:
    x: [A / K, D]; each row serves K consecutive assignments.
    layout: of the A assignments.

  Returns:
    [S, D].
  """
  repeats = layout.slots.shape[0] // max(x.shape[0], 1)
  return _take(x, layout.rows // max(repeats, 1))


@jax.custom_vjp
def scatter_rows(y: jax.Array, layout: BlockLayout) -> jax.Array:
  """Slots back into rows; zeros for a row without a group.

  Args:
    y: [S, D].
    layout: of the A rows.

  Returns:
    [A, D].
  """
  return _take(y, layout.slots)


def _gather_backward(residual, g):
  layout, count = residual
  per_row = scatter_rows(g, layout)
  repeats = layout.slots.shape[0] // max(count, 1)
  dx = per_row.reshape(count, repeats, *g.shape[1:]).sum(1)
  return dx, jax.tree.map(_no_gradient, layout)


def _scatter_backward(layout, g):
  return gather_rows(g, layout), jax.tree.map(_no_gradient, layout)


gather_rows.defvjp(
  lambda x, layout: (gather_rows(x, layout), (layout, x.shape[0])),
  _gather_backward,
)
scatter_rows.defvjp(
  lambda y, layout: (scatter_rows(y, layout), layout), _scatter_backward
)

"""Grouped matrix products, differentiable to any order in reverse mode.

Axes: M rows, E groups, K and N columns; n blocks of B rows, S = n B.

`gmm` and `tgmm` take rows sorted by group, with any sizes. `block_gmm` and
`block_tgmm` take rows that lie in whole blocks of one group (`block_layout`
makes them), which a caller with two products in a row sorts only once.

`implementation`: None is Pallas on TPU and GPU and a loop over blocks
elsewhere, decided when the program is compiled; "pallas" insists on Pallas;
"xla" is the loop; "interpret" and "interpret_gpu" run the TPU's and the GPU's
body in Pallas' interpreter.

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, output columns are
divided over the axis 'model' where it divides them, and all else is repeated:
groups have their sizes in rows of all devices. To divide rows, call these
inside `jax.shard_map`, each device with the groups of its own rows.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels_pallas.common.sharding import find_split, over_mesh
from kernels_pallas.grouped_matmul import vjp
from kernels_pallas.grouped_matmul.layout import (
  BlockLayout,
  block_layout,
  gather_rows,
  scatter_rows,
)
from kernels_pallas.tuning.table import find_blocks

__all__ = ['block_gmm', 'block_tgmm', 'gmm', 'tgmm']

_IMPLEMENTATIONS = (None, 'pallas', 'xla', 'interpret', 'interpret_gpu')


def _check(
  lhs: jax.Array, rhs: jax.Array, rank: int, implementation: str | None
) -> None:
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'implementation={implementation!r} must be one of {_IMPLEMENTATIONS}'
    )
  if implementation == 'pallas' and jax.default_backend() == 'cpu':
    raise ValueError(
      'implementation="pallas" has no CPU body; use None, or "interpret" to '
      'test its numbers'
    )
  for name, array, want in (('lhs', lhs, 2), ('rhs', rhs, rank)):
    if array.ndim != want:
      raise ValueError(f'{name} has shape {array.shape}, expected rank {want}')
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(f'{name} has dtype {array.dtype}, expected a float dtype')


def _check_blocks(rows: int, groups: jax.Array) -> None:
  if groups.ndim != 1 or not groups.shape[0] or rows % groups.shape[0]:
    raise ValueError(
      f'groups has shape {groups.shape}, but the {rows} rows must fall into '
      'that many equal blocks; make both with block_layout'
    )


def _check_tiles(tiles: tuple[int, int] | None) -> None:
  if tiles is not None and (len(tiles) != 2 or min(tiles) < 16):
    raise ValueError(
      f'tiles={tiles} must be two sizes of at least 16 (multiples of 128 on a '
      'TPU, powers of two on a GPU): of contracted and of output columns'
    )


def _over_columns(
  function: Callable[..., jax.Array],
  rhs: tuple[str | None, ...],
  out: tuple[str | None, ...],
  columns: int,
) -> Callable[..., jax.Array]:
  """`function` of lhs, rhs and groups; 'h' marks the axis of the columns."""
  split = find_split(1, columns)
  if split is None:
    return function
  whole = PartitionSpec()
  inputs = whole, split.spec(*rhs), whole
  return over_mesh(function, split, inputs, split.spec(*out))


def block_gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  *,
  transpose_rhs: bool = False,
  tiles: tuple[int, int] | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """y_i = a_i W_e, where e is the group of the block that holds row i.

  Sums run in float32 or wider.

  Args:
    lhs: [S, K], float, rows a in whole blocks.
    rhs: [E, K, N], float, a matrix W per group; [E, N, K] if `transpose_rhs`.
    groups: [n] int32, the group of each block, ascending; E for a block of no
      group.
    transpose_rhs: multiply by W^T.
    tiles: the most contracted and output columns of a Pallas tile, instead of
      the backend's own choice.
    implementation: see the module docstring.

  Returns:
    [S, N], dtype of lhs. What the rows of a block of no group hold is not
    defined; neither the products nor `scatter_rows` read it.

  Raises:
    ValueError: on shapes that disagree or an unknown implementation.
    TypeError: on anything but floating arrays.
  """
  _check(lhs, rhs, 3, implementation)
  _check_blocks(lhs.shape[0], groups)
  _check_tiles(tiles)
  inner = rhs.shape[2 if transpose_rhs else 1]
  if lhs.shape[1] != inner:
    raise ValueError(
      f'lhs {lhs.shape} and rhs {rhs.shape} disagree: {lhs.shape[1]} columns '
      f'meet {inner} rows'
    )
  call = _over_columns(
    lambda *x: vjp.block_gmm(*x, transpose_rhs, implementation, tiles),
    (None, 'h', None) if transpose_rhs else (None, None, 'h'),
    (None, 'h'),
    rhs.shape[1 if transpose_rhs else 2],
  )
  return call(lhs, rhs, groups)


def block_tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  num_groups: int,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """T_e = sum of a_i^T b_i over the rows of group e.

  Args:
    lhs: [S, K], float, rows a in whole blocks.
    rhs: [S, N], float, rows b.
    groups: [n] int32, the group of each block, ascending; each group must
      have a block, as those of `block_layout` have, and those of group E count
      nowhere.
    num_groups: E.
    implementation: see the module docstring.

  Returns:
    [E, K, N]; zeros for a group without rows.

  Raises:
    ValueError: on shapes that disagree or an unknown implementation.
    TypeError: on anything but floating arrays.
  """
  _check(lhs, rhs, 2, implementation)
  _check_blocks(lhs.shape[0], groups)
  if lhs.shape[0] != rhs.shape[0]:
    raise ValueError(f'lhs {lhs.shape} and rhs {rhs.shape} differ in rows')
  call = _over_columns(
    lambda *x: vjp.block_tgmm(*x, num_groups, implementation),
    (None, 'h'),
    (None, None, 'h'),
    rhs.shape[1],
  )
  return call(lhs, rhs, groups)


def _layout(rows: int, group_sizes: jax.Array, block: int) -> BlockLayout:
  if group_sizes.ndim != 1:
    raise ValueError(f'group_sizes has shape {group_sizes.shape}, expected [E]')
  ends = jnp.cumsum(group_sizes)
  groups = jnp.searchsorted(ends, jnp.arange(rows), side='right')
  return block_layout(groups, group_sizes.shape[0], block)


def _key(lhs: jax.Array, rhs: jax.Array, transpose_rhs: bool) -> str:
  """What `blocks.json` distinguishes: dtype, rows per group, K, N."""
  inner, outer = rhs.shape[1:][::-1] if transpose_rhs else rhs.shape[1:]
  sizes = lhs.shape[0] // max(rhs.shape[0], 1), inner, outer
  buckets = (1 << max(x - 1, 0).bit_length() for x in sizes)
  return f'{lhs.dtype} ' + 'x'.join(map(str, buckets))


def gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  *,
  transpose_rhs: bool = False,
  block: int | None = None,
  tiles: tuple[int, int] | None = None,
  implementation: str | None = None,
) -> jax.Array:
  """y_i = a_i W_e for rows that are sorted by their group e.

  Args:
    lhs: [M, K], float, rows a.
    rhs: [E, K, N], float, a matrix W per group; [E, N, K] if `transpose_rhs`.
    group_sizes: [E], int32 >= 0, rows per group; rows beyond their sum
      belong to no group.
    transpose_rhs: multiply by W^T.
    block: rows that a step of the loop handles; None is that of the table of
      block sizes for this chip, or 128.
    tiles: see `block_gmm`; None is that of the same table, if it has one.
    implementation: see the module docstring.

  Returns:
    [M, N], dtype of lhs; zeros for rows of no group.

  Raises:
    ValueError: on shapes that disagree or an unknown implementation.
    TypeError: on anything but floating arrays.
  """
  if rhs.ndim == 3 and group_sizes.shape != rhs.shape[:1]:
    raise ValueError(
      f'group_sizes has shape {group_sizes.shape}, expected ({rhs.shape[0]},), '
      'one size for each matrix of rhs'
    )
  _check(lhs, rhs, 3, implementation)
  if block is None:
    chosen = find_blocks('gmm', _key(lhs, rhs, transpose_rhs))
    block = chosen[0] if chosen else 128
    if tiles is None and chosen:
      tiles = chosen[1], chosen[2]
  layout = _layout(lhs.shape[0], group_sizes, block)
  out = block_gmm(
    gather_rows(lhs, layout),
    rhs,
    layout.groups,
    transpose_rhs=transpose_rhs,
    tiles=tiles,
    implementation=implementation,
  )
  return scatter_rows(out, layout)


def tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  group_sizes: jax.Array,
  *,
  block: int = 128,
  implementation: str | None = None,
) -> jax.Array:
  """T_e = sum of a_i^T b_i over the rows of group e.

  Args:
    lhs: [M, K], float, rows a, sorted by their group.
    rhs: [M, N], float, rows b.
    group_sizes: [E], int32 >= 0, rows per group.
    block: rows that a step of the loop handles.
    implementation: see the module docstring.

  Returns:
    [E, K, N]; zeros for a group without rows.

  Raises:
    ValueError: on shapes that disagree or an unknown implementation.
    TypeError: on anything but floating arrays.
  """
  layout = _layout(lhs.shape[0], group_sizes, block)
  return block_tgmm(
    gather_rows(lhs, layout),
    gather_rows(rhs, layout),
    layout.groups,
    group_sizes.shape[0],
    implementation=implementation,
  )

"""Grouped matrix products, differentiable to any order in reverse mode.

Axes: M rows, E groups, K and N columns; n blocks of B rows, S = n B.

`gmm` and `tgmm` take rows sorted by group, with any sizes. `block_gmm` and
`block_tgmm` take rows that lie in whole blocks of one group (`block_layout`
makes them), which a caller with two products in a row sorts only once.

`implementation`: None is Pallas on TPU and GPU and a loop over blocks
elsewhere, decided when the program is lowered, and the loop wherever Pallas can
not; "pallas" insists on Pallas; "xla" (or "reference") is the loop; "interpret"
and "interpret_gpu" run the TPU's and the GPU's body in Pallas' interpreter. The
bodies take float32, in full precision, and bfloat16, or one of each, which is a
product in float32; and blocks of a multiple of 16 rows on a TPU (8 in float32),
of a power of two from 16 or a multiple of 128 on a GPU.

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, output columns are
divided over the axis 'model' where it divides them, and all else is repeated:
groups have their sizes in rows of all devices. To divide rows, call these
inside `jax.shard_map`, each device with the groups of its own rows.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kernels_pallas.common.checks import (
  check_implementation,
  checked_integers,
  known,
)
from kernels_pallas.common.sharding import find_split, over_mesh
from kernels_pallas.grouped_matmul import vjp
from kernels_pallas.grouped_matmul.layout import (
  BlockLayout,
  block_layout,
  gather_rows,
  scatter_rows,
)
from kernels_pallas.tuning.table import find_blocks

__all__ = ['block_gmm', 'block_tgmm', 'check_group_sizes', 'gmm', 'tgmm']


def _floats(name: str, x: Any, rank: int) -> jax.Array:
  x = jnp.asarray(x)
  if x.ndim != rank:
    axes = '[rows, columns]' if rank == 2 else '[E, K, N], a matrix per group'
    raise ValueError(
      f'{name} has shape {x.shape}, expected {axes}; use jax.vmap for more axes'
    )
  if not jnp.issubdtype(x.dtype, jnp.floating):
    raise TypeError(f'{name} has dtype {x.dtype}, expected a float dtype')
  return x


def _blocks(groups: Any, rows: int, num_groups: int) -> jax.Array:
  """[n] int32 in [0, E]."""
  groups = jnp.asarray(groups)
  if groups.ndim != 1 or not groups.shape[0] or rows % groups.shape[0]:
    raise ValueError(
      f'groups has shape {groups.shape}, but the {rows} rows must fall into '
      'that many equal blocks; make both with block_layout'
    )
  groups = checked_integers('groups', groups, groups.shape)
  values = known(groups)
  if values is not None and (
    values.min() < 0 or values.max() > num_groups or (np.diff(values) < 0).any()
  ):
    raise ValueError(
      f'groups must ascend within [0, {num_groups}], where {num_groups} is no '
      f'group; got {values[:8].tolist()}...; make it with block_layout'
    )
  return jnp.clip(groups, 0, num_groups)


def _check_tiles(tiles: Any) -> tuple[int, int] | None:
  if tiles is None:
    return None
  number = lambda x: isinstance(x, int | np.integer) and x >= 16
  if (
    not isinstance(tiles, tuple | list)
    or len(tiles) != 2
    or not all(map(number, tiles))
  ):
    raise ValueError(
      f'tiles={tiles!r} must be two sizes of at least 16 (multiples of 128 on '
      'a TPU, powers of two on a GPU): of contracted and of output columns'
    )
  return int(tiles[0]), int(tiles[1])


def _check_block(block: Any) -> int:
  if not isinstance(block, int | np.integer) or block < 1:
    raise ValueError(
      f'block={block!r} must be an integer of at least 1, the rows of a step; '
      'None is the choice of the chip'
    )
  return int(block)


def check_group_sizes(group_sizes: Any, rows: int) -> None:
  """Raises if the sizes are known and do not share out the rows.

  Args:
    group_sizes: [E], int, rows per group.
    rows: M.

  Raises:
    ValueError: on a negative size, or if they do not sum to M.
    TypeError: on anything but integers.
  """
  sizes = jnp.asarray(group_sizes)
  values = known(checked_integers('group_sizes', sizes, sizes.shape, 0))
  if values is not None and values.sum() != rows:
    raise ValueError(
      f'group_sizes sum to {values.sum()}, but there are {rows} rows; every '
      'row belongs to a group: cut the rows, or add a group for the rest '
      '(under jit, rows beyond the sum belong to none and give zeros)'
    )


def _sizes(group_sizes: Any, rows: int, groups: int | None) -> jax.Array:
  """[E] int32, at least 0."""
  sizes = jnp.asarray(group_sizes)
  if sizes.ndim != 1 or groups not in (None, sizes.shape[0]):
    want = '[E]' if groups is None else f'({groups},)'
    raise ValueError(
      f'group_sizes has shape {sizes.shape}, expected {want}, one size for '
      'each group'
    )
  check_group_sizes(sizes, rows)
  return jnp.maximum(sizes.astype(jnp.int32), 0)


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


def _check_implementation(
  implementation: str | None, lhs: jax.Array, rhs: jax.Array, block: int
) -> str | None:
  """After the checks, without a second name for the same loop."""
  gpu = implementation == 'interpret_gpu'
  if implementation == 'pallas':
    gpu = jax.default_backend() == 'gpu'
  refusal = vjp.refusal(lhs, rhs, block, 'cuda' if gpu else 'tpu')
  check_implementation(implementation, refusal)
  return 'xla' if implementation == 'reference' else implementation


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
    groups: [n] int, the group of each block, ascending; E for a block of no
      group. Clamped to [0, E] under jit.
    transpose_rhs: multiply by W^T.
    tiles: the most contracted and output columns of a Pallas tile, instead of
      the backend's own choice.
    implementation: see the module docstring.

  Returns:
    [S, N], dtype of lhs. What the rows of a block of no group hold is not
    defined; neither the products nor `scatter_rows` read it.

  Raises:
    ValueError: on shapes that disagree, groups out of range or order as far as
      they are known, or an unknown implementation.
    TypeError: on a wrong dtype.
  """
  lhs, rhs = _floats('lhs', lhs, 2), _floats('rhs', rhs, 3)
  groups = _blocks(groups, lhs.shape[0], rhs.shape[0])
  tiles = _check_tiles(tiles)
  inner, columns = rhs.shape[1:][::-1] if transpose_rhs else rhs.shape[1:]
  if lhs.shape[1] != inner:
    raise ValueError(
      f'lhs {lhs.shape} and rhs {rhs.shape} disagree: {lhs.shape[1]} columns '
      f'meet {inner} rows'
    )
  block = lhs.shape[0] // groups.shape[0]
  implementation = _check_implementation(implementation, lhs, rhs, block)
  if not (lhs.size and rhs.size):
    return jnp.zeros((lhs.shape[0], columns), lhs.dtype)
  call = _over_columns(
    lambda *x: vjp.block_gmm(*x, bool(transpose_rhs), implementation, tiles),
    (None, 'h', None) if transpose_rhs else (None, None, 'h'),
    (None, 'h'),
    columns,
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
    groups: [n] int, the group of each block, ascending; each group must
      have a block, as those of `block_layout` have, and those of group E count
      nowhere. Clamped to [0, E] under jit.
    num_groups: E.
    implementation: see the module docstring.

  Returns:
    [E, K, N], the promoted dtype; zeros for a group without rows.

  Raises:
    ValueError: on shapes that disagree, groups out of range or order as far as
      they are known, or an unknown implementation.
    TypeError: on a wrong dtype.
  """
  lhs, rhs = _floats('lhs', lhs, 2), _floats('rhs', rhs, 2)
  groups = _blocks(groups, lhs.shape[0], num_groups)
  if lhs.shape[0] != rhs.shape[0]:
    raise ValueError(f'lhs {lhs.shape} and rhs {rhs.shape} differ in rows')
  block = lhs.shape[0] // groups.shape[0]
  implementation = _check_implementation(implementation, lhs, rhs, block)
  if not (lhs.size and rhs.size):
    shape = num_groups, lhs.shape[1], rhs.shape[1]
    return jnp.zeros(shape, jnp.promote_types(lhs.dtype, rhs.dtype))
  call = _over_columns(
    lambda *x: vjp.block_tgmm(*x, num_groups, implementation),
    (None, 'h'),
    (None, None, 'h'),
    rhs.shape[1],
  )
  return call(lhs, rhs, groups)


def _layout(rows: int, group_sizes: jax.Array, block: int) -> BlockLayout:
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

  Sums run in float32 or wider, products in the dtypes of the operands, and
  those of float32 in full precision. Differentiable in lhs and rhs.

  Args:
    lhs: [M, K], float, rows a.
    rhs: [E, K, N], float, a matrix W per group; [E, N, K] if `transpose_rhs`.
    group_sizes: [E], int >= 0, rows per group, of any size, which sum to M.
      Under jit, rows beyond their sum belong to no group, negative sizes count
      as 0, and a group ends with the rows.
    transpose_rhs: multiply by W^T.
    block: rows that a step of the loop handles; None is that of the table of
      block sizes for this chip, or 128.
    tiles: see `block_gmm`; None is that of the same table, if it has one.
    implementation: see the module docstring.

  Returns:
    [M, N], dtype of lhs; zeros for rows of no group.

  Raises:
    ValueError: on shapes that disagree, sizes that do not sum to M as far as
      they are known, or an unknown implementation.
    TypeError: on a wrong dtype.
  """
  lhs, rhs = _floats('lhs', lhs, 2), _floats('rhs', rhs, 3)
  inner, columns = rhs.shape[1:][::-1] if transpose_rhs else rhs.shape[1:]
  if lhs.shape[1] != inner:
    raise ValueError(
      f'lhs {lhs.shape} and rhs {rhs.shape} disagree: {lhs.shape[1]} columns '
      f'meet {inner} rows'
    )
  sizes = _sizes(group_sizes, lhs.shape[0], rhs.shape[0])
  if block is None:
    chosen = find_blocks('gmm', _key(lhs, rhs, transpose_rhs))
    block = chosen[0] if chosen else 128
    if tiles is None and chosen:
      tiles = chosen[1], chosen[2]
  block, tiles = _check_block(block), _check_tiles(tiles)
  if not (lhs.size and rhs.size):
    _check_implementation(implementation, lhs, rhs, block)
    return jnp.zeros((lhs.shape[0], columns), lhs.dtype)
  layout = _layout(lhs.shape[0], sizes, block)
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
    group_sizes: [E], int >= 0, rows per group, as of `gmm`.
    block: rows that a step of the loop handles.
    implementation: see the module docstring.

  Returns:
    [E, K, N], the promoted dtype; zeros for a group without rows.

  Raises:
    ValueError: on shapes that disagree, sizes that do not sum to M as far as
      they are known, or an unknown implementation.
    TypeError: on a wrong dtype.
  """
  lhs, rhs = _floats('lhs', lhs, 2), _floats('rhs', rhs, 2)
  if lhs.shape[0] != rhs.shape[0]:
    raise ValueError(f'lhs {lhs.shape} and rhs {rhs.shape} differ in rows')
  sizes, block = _sizes(group_sizes, lhs.shape[0], None), _check_block(block)
  groups = sizes.shape[0]
  if not (lhs.size and rhs.size and groups):
    _check_implementation(implementation, lhs, rhs, block)
    shape = groups, lhs.shape[1], rhs.shape[1]
    return jnp.zeros(shape, jnp.promote_types(lhs.dtype, rhs.dtype))
  layout = _layout(lhs.shape[0], sizes, block)
  rows = gather_rows(lhs, layout), gather_rows(rhs, layout)
  return block_tgmm(*rows, layout.groups, groups, implementation=implementation)

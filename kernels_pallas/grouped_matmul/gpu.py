"""Products of blocks for GPUs (Triton).

Axes: n blocks of B rows, E groups, K and N columns in tiles of k and t.

The loop over the contracted axis lies inside the body. The transposed product
has one program per group and tile of its result, which walks the blocks of
that group: no atomics, the same result every time. Pallas on Triton is
deprecated since jax 0.11; this file alone depends on it.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.common.calls import in_32_bits
from kernels_pallas.common.numerics import dot, promote_dtypes

__all__ = ['block_gmm', 'block_tgmm']

_PARAMS = {'num_warps': 4, 'num_stages': 3}
# Largest tiles of the contracted and of the output columns.
_TILES = 32, 64
# Rows of a tile: more would not fit into registers.
_ROWS = 128


def _tile(size: int, largest: int) -> int:
  """A power of two between 16 and `largest`, not far above `size`."""
  tile = 16
  while tile < min(size, largest):
    tile *= 2
  return tile


def _pad(x: jax.Array, axis: int, tile: int) -> jax.Array:
  pads = [(0, -n % tile if i == axis else 0) for i, n in enumerate(x.shape)]
  return jnp.pad(x, pads) if pads[axis][1] else x


def _gmm_body(groups, lhs, rhs, out, *, k, t, transpose_rhs):
  # A block of no group takes the last matrix; nobody reads what comes out.
  group = jnp.minimum(groups[pl.program_id(0)], rhs.shape[0] - 1)
  column = pl.program_id(1) * t

  def add(j, total):
    a = lhs[:, pl.ds(j * k, k)]
    if transpose_rhs:
      b = rhs[group, pl.ds(column, t), pl.ds(j * k, k)].T
    else:
      b = rhs[group, pl.ds(j * k, k), pl.ds(column, t)]
    return total + dot(a, b)

  total = jnp.zeros((lhs.shape[0], t), jnp.float32)
  total = jax.lax.fori_loop(0, lhs.shape[1] // k, add, total)
  out[...] = total.astype(out.dtype)


def block_gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  transpose_rhs: bool,
  tiles: tuple[int, int] | None = None,
  interpret: bool = False,
) -> jax.Array:
  """[S, K], [E, K, N] (or [E, N, K]), [n] -> [S, N]."""
  inner_axis, outer_axis = (2, 1) if transpose_rhs else (1, 2)
  inner, columns = rhs.shape[inner_axis], rhs.shape[outer_axis]
  most = tiles or _TILES
  k, t = _tile(inner, most[0]), _tile(columns, most[1])
  dtype = lhs.dtype
  rhs = _pad(_pad(rhs, inner_axis, k), outer_axis, t)
  lhs, rhs = promote_dtypes(_pad(lhs, 1, k), rhs)
  block, outer = lhs.shape[0] // groups.shape[0], rhs.shape[outer_axis]
  if block % _ROWS == 0:
    groups = jnp.repeat(groups, block // _ROWS)
    block = _ROWS
  num_blocks = groups.shape[0]
  call = pl.pallas_call(
    functools.partial(_gmm_body, k=k, t=t, transpose_rhs=transpose_rhs),
    out_shape=jax.ShapeDtypeStruct((lhs.shape[0], outer), dtype),
    grid=(num_blocks, outer // t),
    in_specs=[
      pl.BlockSpec(groups.shape, lambda i, c: (0,)),
      pl.BlockSpec((block, lhs.shape[1]), lambda i, c: (i, 0)),
      pl.BlockSpec(rhs.shape, lambda i, c: (0, 0, 0)),
    ],
    out_specs=pl.BlockSpec((block, t), lambda i, c: (i, c)),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name='block_gmm',
  )
  return in_32_bits(call)(groups, lhs, rhs)[:, :columns]


def _tgmm_body(bounds, lhs, rhs, out, *, block):
  group = pl.program_id(0)

  def add(i, total):
    rows = pl.ds(i * block, block)
    return total + dot(lhs[rows, :].T, rhs[rows, :])

  total = jnp.zeros(out.shape, jnp.float32)
  total = jax.lax.fori_loop(bounds[group], bounds[group + 1], add, total)
  out[...] = total.astype(out.dtype)


def block_tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  num_groups: int,
  interpret: bool = False,
) -> jax.Array:
  """[S, K], [S, N], [n] -> [E, K, N], summed over the blocks of a group."""
  shape = (num_groups, lhs.shape[1], rhs.shape[1])
  rows = lhs.shape[0]
  # Shorter steps than a block: the two operands must fit into shared memory.
  block = min(rows // groups.shape[0], 32)
  scale = rows // groups.shape[0] // block
  k, t = _tile(shape[1], 64), _tile(shape[2], 64)
  lhs, rhs = promote_dtypes(_pad(lhs, 1, k), _pad(rhs, 1, t))
  edges = jnp.arange(num_groups + 1, dtype=groups.dtype)
  bounds = jnp.searchsorted(groups, edges).astype(jnp.int32) * scale
  call = pl.pallas_call(
    functools.partial(_tgmm_body, block=block),
    out_shape=jax.ShapeDtypeStruct(
      (num_groups, lhs.shape[1], rhs.shape[1]), lhs.dtype
    ),
    grid=(num_groups, lhs.shape[1] // k, rhs.shape[1] // t),
    in_specs=[
      pl.BlockSpec(bounds.shape, lambda e, a, b: (0,)),
      pl.BlockSpec((rows, k), lambda e, a, b: (0, a)),
      pl.BlockSpec((rows, t), lambda e, a, b: (0, b)),
    ],
    out_specs=pl.BlockSpec((None, k, t), lambda e, a, b: (e, a, b)),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name='block_tgmm',
  )
  return in_32_bits(call)(bounds, lhs, rhs)[:, : shape[1], : shape[2]]

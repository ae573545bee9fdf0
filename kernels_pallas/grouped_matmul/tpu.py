"""Products of blocks for TPUs (Mosaic).

Axes: n blocks of B rows, E groups, K and N columns in tiles of k and t.

The group of each block is prefetched as a scalar and picks the matrix in the
index map. Blocks are the second innermost axis of the grid and ascend in their
group, so a matrix whose K columns fit into one tile is read once per group. The
grid ends with the last block that has a group.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import in_32_bits
from kernels_pallas.common.numerics import precision, promote_dtypes

__all__ = ['block_gmm', 'block_tgmm']

LANES = 128
# Largest tiles of the contracted and of the output columns.
_TILES = 1024, 1024


def _tile(size: int, largest: int) -> int:
  """The largest multiple of 128 that divides `size` and is allowed."""
  return max(t for t in range(LANES, largest + 1, LANES) if size % t == 0)


def _pad(x: jax.Array, axes: tuple[int, ...]) -> jax.Array:
  pads = [(0, -x.shape[i] % LANES if i in axes else 0) for i in range(x.ndim)]
  return jnp.pad(x, pads) if any(p for _, p in pads) else x


def _count(groups: jax.Array, num_groups: int) -> jax.Array:
  """Blocks that have a group."""
  return jnp.sum(groups < num_groups, dtype=jnp.int32)


def _gmm_body(groups, lhs, rhs, out, *total, transpose_rhs):
  """The sums `total` are left out where one step contracts all columns."""
  del groups
  step = pl.program_id(2)

  def product():
    numbers = (((1,), (1 if transpose_rhs else 0,)), ((), ()))
    return jax.lax.dot_general(
      lhs[...],
      rhs[...],
      numbers,
      precision=precision(lhs.dtype),
      preferred_element_type=jnp.float32,
    )

  if not total:
    out[...] = product().astype(out.dtype)
    return
  (sums,) = total

  @pl.when(step == 0)
  def _():
    sums[...] = product()

  @pl.when(step > 0)
  def _():
    sums[...] += product()

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    out[...] = sums[...].astype(out.dtype)


def block_gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  transpose_rhs: bool,
  tiles: tuple[int, int] | None = None,
  interpret: bool = False,
) -> jax.Array:
  """[S, K], [E, K, N] (or [E, N, K]), [n] -> [S, N]."""
  columns = rhs.shape[1 if transpose_rhs else 2]
  block, dtype = lhs.shape[0] // groups.shape[0], lhs.dtype
  lhs, rhs = promote_dtypes(_pad(lhs, (1,)), _pad(rhs, (1, 2)))
  inner, outer = rhs.shape[1:][::-1] if transpose_rhs else rhs.shape[1:]
  # Half of the contracted columns in float32: twice the bytes.
  most = tiles or (_TILES[0] * 2 // max(lhs.dtype.itemsize, 2), _TILES[1])
  k, t = _tile(inner, most[0]), _tile(outer, most[1])
  steps = inner // k
  if transpose_rhs:
    matrix = pl.BlockSpec((None, t, k), lambda c, i, j, g: (g[i], c, j))
  else:
    matrix = pl.BlockSpec((None, k, t), lambda c, i, j, g: (g[i], j, c))
  call = pl.pallas_call(
    functools.partial(_gmm_body, transpose_rhs=transpose_rhs),
    out_shape=jax.ShapeDtypeStruct((lhs.shape[0], outer), dtype),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(outer // t, _count(groups, rhs.shape[0]), steps),
      in_specs=[pl.BlockSpec((block, k), lambda c, i, j, g: (i, j)), matrix],
      out_specs=pl.BlockSpec((block, t), lambda c, i, j, g: (i, c)),
      scratch_shapes=[pltpu.VMEM((block, t), jnp.float32)] * (steps > 1),
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * lhs.shape[0] * inner * outer,
      bytes_accessed=lhs.nbytes + rhs.nbytes + lhs.shape[0] * outer * 4,
      transcendentals=0,
    ),
    interpret=interpret,
    name='block_gmm',
  )
  return in_32_bits(call)(groups, lhs, rhs)[:, :columns]


def _tgmm_body(groups, lhs, rhs, out, total):
  i, last = pl.program_id(2), pl.num_programs(2) - 1
  group = groups[i]
  first = (i == 0) | (group != groups[jnp.maximum(i - 1, 0)])

  def product():
    return jax.lax.dot_general(
      lhs[...],
      rhs[...],
      (((0,), (0,)), ((), ())),
      precision=precision(lhs.dtype),
      preferred_element_type=jnp.float32,
    )

  @pl.when(first)
  def _():
    total[...] = product()

  @pl.when(jnp.logical_not(first))
  def _():
    total[...] += product()

  @pl.when((i == last) | (group != groups[jnp.minimum(i + 1, last)]))
  def _():
    out[...] = total[...].astype(out.dtype)


def block_tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  num_groups: int,
  interpret: bool = False,
) -> jax.Array:
  """[S, K], [S, N], [n] -> [E, K, N], summed over the blocks of a group."""
  shape = (num_groups, lhs.shape[1], rhs.shape[1])
  block = lhs.shape[0] // groups.shape[0]
  lhs, rhs = promote_dtypes(_pad(lhs, (1,)), _pad(rhs, (1,)))
  dtype = lhs.dtype
  # What fits beside its sums in float32.
  most = 2**22 // dtype.itemsize**2
  k = _tile(lhs.shape[1], min(_TILES[0], most // 512))
  t = _tile(rhs.shape[1], min(_TILES[1], most // k))
  out = jax.ShapeDtypeStruct((num_groups, lhs.shape[1], rhs.shape[1]), dtype)
  call = pl.pallas_call(
    _tgmm_body,
    out_shape=out,
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(lhs.shape[1] // k, rhs.shape[1] // t, _count(groups, num_groups)),
      in_specs=[
        pl.BlockSpec((block, k), lambda a, b, i, g: (i, a)),
        pl.BlockSpec((block, t), lambda a, b, i, g: (i, b)),
      ],
      out_specs=pl.BlockSpec((None, k, t), lambda a, b, i, g: (g[i], a, b)),
      scratch_shapes=[pltpu.VMEM((k, t), jnp.float32)],
    ),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * lhs.shape[0] * lhs.shape[1] * rhs.shape[1],
      bytes_accessed=lhs.nbytes + rhs.nbytes + out.size * 4,
      transcendentals=0,
    ),
    interpret=interpret,
    name='block_tgmm',
  )
  return in_32_bits(call)(groups, lhs, rhs)[:, : shape[1], : shape[2]]

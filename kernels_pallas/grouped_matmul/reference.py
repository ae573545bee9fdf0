"""Products of blocks in plain jax.numpy: a loop over blocks.

Axes: n blocks of B rows, E groups, K and N columns. XLA has no grouped product
on a CPU: `lax.ragged_dot` computes every row against every matrix there. A
loop that reads one matrix per block costs what the rows need, and no copy of
a matrix per block.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.common.numerics import precision

__all__ = ['block_gmm', 'block_tgmm']


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
  wide = jnp.promote_types(jnp.float32, jnp.promote_types(a.dtype, b.dtype))
  numbers = (((contract[0],), (contract[1],)), ((), ()))
  return jax.lax.dot_general(
    a,
    b,
    numbers,
    precision=precision(jnp.promote_types(a.dtype, b.dtype)),
    preferred_element_type=wide,
  )


def block_gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  transpose_rhs: bool,
  tiles: tuple[int, int] | None = None,
) -> jax.Array:
  """[S, K], [E, K, N] (or [E, N, K]), [n] -> [S, N]; columns stay whole."""
  del tiles
  columns = rhs.shape[1 if transpose_rhs else 2]

  def product(_, inputs):
    rows, group = inputs

    def some():
      matrix = jax.lax.dynamic_index_in_dim(rhs, group, 0, keepdims=False)
      out = _dot(rows, matrix, (1, 1 if transpose_rhs else 0))
      return out.astype(lhs.dtype)

    none = lambda: jnp.zeros((rows.shape[0], columns), lhs.dtype)
    return None, jax.lax.cond(group < rhs.shape[0], some, none)

  blocks = lhs.reshape(groups.shape[0], -1, lhs.shape[1])
  _, out = jax.lax.scan(product, None, (blocks, groups))
  return out.reshape(lhs.shape[0], out.shape[-1])


def block_tgmm(
  lhs: jax.Array, rhs: jax.Array, groups: jax.Array, num_groups: int
) -> jax.Array:
  """[S, K], [S, N], [n] -> [E, K, N], summed over the blocks of a group."""
  num_blocks = groups.shape[0]

  def add(total, inputs):
    a, b, group = inputs

    def some(total):
      old = jax.lax.dynamic_index_in_dim(total, group, 0, keepdims=False)
      new = old + _dot(a, b, (0, 0))
      return jax.lax.dynamic_update_index_in_dim(total, new, group, 0)

    none = lambda total: total
    return jax.lax.cond(group < num_groups, some, none, total), None

  dtype = jnp.promote_types(lhs.dtype, rhs.dtype)
  wide = jnp.promote_types(jnp.float32, dtype)
  zeros = jnp.zeros((num_groups, lhs.shape[1], rhs.shape[1]), wide)
  split = lambda x: x.reshape(num_blocks, -1, x.shape[1])
  total, _ = jax.lax.scan(add, zeros, (split(lhs), split(rhs), groups))
  return total.astype(dtype)

"""The two products and their derivatives, closed under reverse mode.

With T_e = sum over the rows i of group e of a_i^T b_i and y_i = a_i W_e:
dy/da is a product with W^T, dy/dW a T; dT/da and dT/db are products again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.common.platforms import by_platform
from kernels_pallas.grouped_matmul import reference

__all__ = ['block_gmm', 'block_tgmm', 'refusal']


def refusal(
  lhs: jax.Array, rhs: jax.Array, block: int, platform: str
) -> str | None:
  """Why the Pallas bodies of 'tpu' or 'cuda' do not take them, or None."""
  for x in (lhs, rhs):
    if x.dtype not in (jnp.float32, jnp.bfloat16):
      return f'dtype {x.dtype} is neither float32 nor bfloat16'
  least = 8 if lhs.dtype == rhs.dtype == jnp.float32 else 16  # rows of a tile
  if platform == 'tpu' and block % least:
    return f'blocks of {block} rows are no multiple of {least}'
  if platform == 'cuda' and block % 128 and (block < 16 or block & (block - 1)):
    return (
      f'blocks of {block} rows are neither a power of two from 16 nor a '
      'multiple of 128'
    )
  return None


def _run(
  name: str,
  implementation: str | None,
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  *static: Any,
) -> jax.Array:
  """Resolved at lowering, so that cross-compiling picks the right body."""

  def body(module: Any, **how: Any) -> Callable[..., jax.Array]:
    return lambda *a: getattr(module, name)(*a, *static, **how)

  args, plain = (lhs, rhs, groups), body(reference)
  if implementation == 'xla':
    return plain(*args)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.grouped_matmul import gpu, tpu

  if implementation == 'interpret':
    return body(tpu, interpret=True)(*args)
  if implementation == 'interpret_gpu':
    return body(gpu, interpret=True)(*args)
  block = lhs.shape[0] // groups.shape[0]
  bodies = {
    platform: refusal(lhs, rhs, block, platform) or body(module)
    for platform, module in (('tpu', tpu), ('cuda', gpu))
  }
  return by_platform(implementation, plain, bodies, *args)


def _like(cotangent: Any, primal: jax.Array) -> jax.Array:
  return cotangent.astype(primal.dtype)


def _integers(groups: jax.Array) -> np.ndarray:
  return np.zeros(groups.shape, jax.dtypes.float0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def block_gmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  transpose_rhs: bool,
  implementation: str | None,
  tiles: tuple[int, int] | None = None,
) -> jax.Array:
  """y_i = a_i W_e for the rows of each block; W^T if `transpose_rhs`."""
  static = transpose_rhs, tiles
  return _run('block_gmm', implementation, lhs, rhs, groups, *static)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def block_tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  num_groups: int,
  implementation: str | None,
) -> jax.Array:
  """T_e = sum of a_i^T b_i over the rows of the blocks of group e."""
  return _run('block_tgmm', implementation, lhs, rhs, groups, num_groups)


def _gmm_backward(transpose_rhs, implementation, tiles, residual, g):
  lhs, rhs, groups = residual
  da = block_gmm(g, rhs, groups, not transpose_rhs, implementation, tiles)
  a, b = (g, lhs) if transpose_rhs else (lhs, g)
  dw = block_tgmm(a, b, groups, rhs.shape[0], implementation)
  return _like(da, lhs), _like(dw, rhs), _integers(groups)


def _tgmm_backward(num_groups, implementation, residual, g):
  del num_groups
  lhs, rhs, groups = residual
  da = block_gmm(rhs, g, groups, True, implementation)
  db = block_gmm(lhs, g, groups, False, implementation)
  return _like(da, lhs), _like(db, rhs), _integers(groups)


block_gmm.defvjp(
  lambda lhs, rhs, groups, *static: (
    block_gmm(lhs, rhs, groups, *static),
    (lhs, rhs, groups),
  ),
  _gmm_backward,
)
block_tgmm.defvjp(
  lambda lhs, rhs, groups, num_groups, implementation: (
    block_tgmm(lhs, rhs, groups, num_groups, implementation),
    (lhs, rhs, groups),
  ),
  _tgmm_backward,
)

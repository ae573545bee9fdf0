"""The two products and their derivatives, closed under reverse mode.

With T_e = sum over the rows i of group e of a_i^T b_i and y_i = a_i W_e:
dy/da is a product with W^T, dy/dW a T; dT/da and dT/db are products again.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from kernels_pallas.grouped_matmul import reference

__all__ = ['block_gmm', 'block_tgmm']


def _dispatch(
  name: str, implementation: str | None
) -> Callable[..., jax.Array]:
  """Resolved at lowering, so that cross-compiling picks the right body."""
  plain = getattr(reference, name)
  if implementation == 'xla':
    return plain
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.grouped_matmul import gpu, tpu

  on_tpu, on_gpu = getattr(tpu, name), getattr(gpu, name)
  if implementation == 'interpret':
    return functools.partial(on_tpu, interpret=True)
  if implementation == 'interpret_gpu':
    return functools.partial(on_gpu, interpret=True)

  def call(lhs, rhs, groups, *static):
    keywords = {'tpu': on_tpu, 'cuda': on_gpu}
    if implementation is None:
      keywords['default'] = plain
    branches = {k: lambda *a, f=f: f(*a, *static) for k, f in keywords.items()}
    return jax.lax.platform_dependent(lhs, rhs, groups, **branches)

  return call


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
  call = _dispatch('block_gmm', implementation)
  return call(lhs, rhs, groups, transpose_rhs, tiles)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def block_tgmm(
  lhs: jax.Array,
  rhs: jax.Array,
  groups: jax.Array,
  num_groups: int,
  implementation: str | None,
) -> jax.Array:
  """T_e = sum of a_i^T b_i over the rows of the blocks of group e."""
  call = _dispatch('block_tgmm', implementation)
  return call(lhs, rhs, groups, num_groups)


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

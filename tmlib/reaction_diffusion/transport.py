r"""Transport along the edges of a patch graph.

Axes: ... leading axes, N patches (padded), K slots of the neighbour table, D
channels.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.graph import PatchGraph, ell_spmm

__all__ = [
  'advection',
  'align',
  'laplacian',
  'largest',
  'row_sum',
  'times',
]


def align(vector: jax.Array | float, ndim: int) -> jax.Array:
  """[D] -> [1, ..., 1, D] with `ndim` axes; scalars pass unchanged."""
  vector = jnp.asarray(vector)
  if vector.ndim == 0:
    return vector
  return vector.reshape((1,) * (ndim - vector.ndim) + vector.shape)


def times(values: jax.Array, matrix: jax.Array) -> jax.Array:
  """[..., N, D] times [D, E], as one product of matrices.

  With the rows in one axis the gradient of `matrix` contracts one axis too,
  which XLA turns into a plain matrix product on every platform.
  """
  rows = values.reshape(-1, values.shape[-1]) @ matrix
  return rows.reshape(*values.shape[:-1], matrix.shape[-1])


def row_sum(weights: jax.Array, graph: PatchGraph) -> jax.Array:
  """sum_j w_ij over the edges of each patch: [..., N, K] -> [..., N, 1]."""
  return jnp.sum(jnp.where(graph.emask, weights, 0), -1, keepdims=True)


def largest(values: jax.Array, graph: PatchGraph) -> jax.Array:
  """Maximum over every axis and, where patches are split, over all shards."""
  found = jnp.max(values)
  if graph.axis_name is None:
    return found
  return jax.lax.pmax(found, graph.axis_name)


def laplacian(
  weights: jax.Array, values: jax.Array, graph: PatchGraph
) -> jax.Array:
  r"""Weighted graph Laplacian: (Delta^w U)_i = sum_j w_ij (U_j - U_i).

  Args:
    weights: [..., N, K], w; ignored outside the edge mask.
    values: [..., N, D], U.
    graph: the patch graph.

  Returns:
    [..., N, D]. With symmetric weights the sum over patches is zero.
  """
  spread = ell_spmm(graph, weights, values)
  return spread - row_sum(weights, graph) * values


def advection(
  velocity: jax.Array, values: jax.Array, graph: PatchGraph
) -> jax.Array:
  r"""Upwind transport: dU_i/dt = sum_j (v^-_ij U_j - v^+_ij U_i).

  v^+ = max(v, 0) and v^- = max(-v, 0) with v antisymmetric, v_ij = -v_ji, so
  what leaves i towards j is what arrives at j: total mass is conserved. An
  explicit step keeps positive values positive while tau max_i sum_j v^+_ij <=
  1. There is no maximum principle: mass piles up where the flow converges, by
  at most a factor 1 + tau max_i sum_j v^-_ij a step.

  Args:
    velocity: [..., N, K], v; ignored outside the edge mask.
    values: [..., N, D], U.
    graph: the patch graph.

  Returns:
    [..., N, D].
  """
  inflow = ell_spmm(graph, jnp.maximum(-velocity, 0), values)
  return inflow - row_sum(jnp.maximum(velocity, 0), graph) * values

"""Operations on patch graphs in plain jax.numpy: the truth of this folder.

Nothing here defines its own derivative, so forward mode works too. In reverse
mode these forms end in scatters; `vjp.py` is the fast way.

The forms are chosen for XLA on a CPU. A gather that is fused into its only
consumer is cheap, one that is written to memory costs thirty times as much.
So weighted sums unroll over the slots into one fused loop, inner products go
slot by slot through a product and a matrix product, and a barrier keeps two
operations from sharing (that is, writing out) one gather.

Axes: N nodes, M = N + 2 halo rows within reach, K slots, D features.
Leading batch axes are the same in all arrays.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels_pallas.graph.halo import halo_exchange
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = ['gated_deltas', 'gated_dots', 'sddmm', 'spmm', 'transpose']


def _extend(graph: PatchGraph, x: jax.Array) -> jax.Array:
  """[..., N, D] -> [..., M, D], with the rows of adjoining shards."""
  if graph.axis_name is None:
    return x
  return halo_exchange(x, graph.axis_name, graph.halo)


def _take(x: jax.Array, index: jax.Array, batch: int) -> jax.Array:
  """x [*batch, M, ...] at index [*batch, ...], clamped to the last row.

  One vmap per leading axis makes batch dimensions of the gather, which the
  partitioner splits without collecting x; a flattened index would not do.
  """
  take = lambda x, index: x.at[index].get(
    mode='clip', wrap_negative_indices=False
  )
  for _ in range(batch):
    take = jax.vmap(take)
  return take(x, index)


def _wide(*arrays: jax.Array) -> jnp.dtype:
  """The dtype of sums: at least float32."""
  return jnp.promote_types(jnp.result_type(*arrays), jnp.float32)


def transpose(graph: PatchGraph, w: jax.Array) -> jax.Array:
  """w^T_ik = w[nbr_ik, rev_ik]; [..., N, K] -> [..., N, K]."""
  reach = _extend(graph, w)
  flat = reach.reshape(*reach.shape[:-2], -1)
  index = graph.nbr * graph.num_slots + graph.rev
  return jnp.where(graph.emask, _take(flat, index, w.ndim - 2), 0)


def spmm(graph: PatchGraph, w: jax.Array, x: jax.Array) -> jax.Array:
  """y_i = sum_k w_ik x[nbr_ik]; [..., N, K], [..., N, D] -> [..., N, D]."""
  dtype = _wide(w, x)
  w = jnp.where(graph.emask, w, 0).astype(dtype)
  w, reach = jax.lax.optimization_barrier((w, _extend(graph, x)))
  y = jnp.zeros(x.shape, dtype)
  for k in range(graph.num_slots):
    near = _take(reach, graph.nbr[..., k], x.ndim - 2)
    # where, not multiply: 0 * NaN in a padded row is NaN.
    near = jnp.where(graph.emask[..., k, None], near, 0)
    y += w[..., k, None] * near.astype(dtype)
  return y.astype(x.dtype)


def gated_deltas(
  graph: PatchGraph,
  weights: Sequence[jax.Array],
  gates: Sequence[jax.Array],
  x: jax.Array,
) -> jax.Array:
  """y_i = sum_k (sum_m gates_m weights_m,ik) (x[nbr_ik] - x_i).

  Args:
    graph: the graph.
    weights: M arrays [..., N, K].
    gates: M arrays [..., 1, D], a factor per feature for each weight.
    x: [..., N, D].

  Returns:
    [..., N, D].
  """
  dtype = _wide(*weights, *gates, x)
  weights = [jnp.where(graph.emask, w, 0).astype(dtype) for w in weights]
  gates = [gate.astype(dtype) for gate in gates]
  reach = _extend(graph, x)
  weights, reach = jax.lax.optimization_barrier((weights, reach))
  y = jnp.zeros(x.shape, dtype)
  for k in range(graph.num_slots):
    delta = _take(reach, graph.nbr[..., k], x.ndim - 2).astype(dtype) - x
    delta = jnp.where(graph.emask[..., k, None], delta, 0)
    factor = sum(
      gate * w[..., k, None] for gate, w in zip(gates, weights, strict=True)
    )
    y += factor * delta
  return y.astype(x.dtype)


def _per_slot(graph: PatchGraph, x: jax.Array, reduce) -> jax.Array:
  """Stacks reduce(x[nbr_k]) over the slots k: [..., N, J] -> [K, ..., N, J]."""
  reach = _extend(graph, x)

  def slot(_, columns):
    nbr, emask = columns
    near = _take(reach, nbr, x.ndim - 2)
    return None, reduce(jnp.where(emask[..., None], near, 0), emask[..., None])

  columns = jnp.moveaxis(graph.nbr, -1, 0), jnp.moveaxis(graph.emask, -1, 0)
  return jax.lax.scan(slot, None, columns)[1]


def sddmm(graph: PatchGraph, a: jax.Array, b: jax.Array) -> jax.Array:
  """e_ik = <a_i, b[nbr_ik]>; two [..., N, D] -> [..., N, K]."""
  dtype = _wide(a, b)
  ones = jnp.ones((*a.shape[:-2], a.shape[-1], 1), dtype)

  def reduce(near, valid):
    product = jnp.where(valid, a.astype(dtype) * near, 0)
    # Exact on every platform: a plain matmul may round to bfloat16.
    return jnp.matmul(product, ones, precision=jax.lax.Precision.HIGHEST)

  dots = jnp.moveaxis(_per_slot(graph, b, reduce)[..., 0], 0, -1)
  return dots.astype(jnp.result_type(a, b))


def gated_dots(
  graph: PatchGraph,
  g: jax.Array,
  gates: Sequence[jax.Array],
  x: jax.Array,
) -> tuple[jax.Array, ...]:
  """e_m,ik = <gates_m g_i, x[nbr_ik] - x_i>, one [..., N, K] per gate.

  Args:
    graph: the graph.
    g: [..., N, D].
    gates: M arrays [..., 1, D].
    x: [..., N, D].

  Returns:
    M arrays [..., N, K], zero in empty slots.
  """
  dtype = _wide(g, *gates, x)
  basis = jnp.concatenate([gate.astype(dtype) for gate in gates], -2)
  basis = jnp.swapaxes(basis, -1, -2)

  def reduce(near, valid):
    delta = jnp.where(valid, near - x.astype(dtype), 0)
    product = jnp.where(valid, g.astype(dtype) * delta, 0)
    return jnp.matmul(product, basis, precision=jax.lax.Precision.HIGHEST)

  dots = jnp.moveaxis(_per_slot(graph, x, reduce), 0, -1)
  dots = dots.astype(jnp.result_type(g, x))
  return tuple(dots[..., m, :] for m in range(len(gates)))

"""Operations on patch graphs in plain jax.numpy: the truth of this folder.

Nothing here defines its own derivative, so forward mode works too. In reverse
mode these forms end in scatters; `vjp.py` is the fast way.

The forms are chosen for XLA on a CPU, where a gather that is fused into its
only consumer is cheap and one that is written out costs many times as much.
Weighted sums unroll over the slots into one fused loop; a barrier keeps two of
them from sharing, that is writing out, one gather. Inner products are a fused
product and a matrix product, by blocks of nodes that stay in the cache.

Axes: N nodes, M = N + 2 halo rows within reach, K slots, D features.
Leading batch axes are the same in all arrays.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from kernels_pallas.graph.halo import halo_exchange
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = [
  'gated_adjoint',
  'gated_coefficients',
  'gated_deltas',
  'sddmm',
  'spmm',
  'transpose',
]

# Elements of the edge products that inner products hold at once (2 MiB).
_BLOCK = 2**19
# Rows that a weighted sum writes at once.
_ROWS = 4096


def _extend(graph: PatchGraph, x: jax.Array) -> jax.Array:
  """[..., N, D] -> [..., M, D], with the rows of adjoining shards."""
  if graph.axis_name is None:
    return x
  return halo_exchange(x, graph.axis_name, graph.halo)


def _take(x: jax.Array, index: jax.Array, batch: int) -> jax.Array:
  """Rows of x [*batch, M, ...] at index [*batch, ...], clamped to the last row.

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
  lead, n, dtype = x.ndim - 2, x.shape[-2], _wide(w, x)
  w = jnp.where(graph.emask, w, 0).astype(dtype)
  w, reach = jax.lax.optimization_barrier((w, _extend(graph, x)))

  def add(part):
    w, nbr, emask = part
    y = jnp.zeros((*w.shape[:-1], x.shape[-1]), dtype)
    for k in range(graph.num_slots):
      near = _take(reach, nbr[..., k], lead)
      # where, not multiply: 0 * NaN in a padded row is NaN.
      near = jnp.where(emask[..., k, None], near, 0)
      y += w[..., k, None] * near.astype(dtype)
    return y

  # By blocks, so that y is written out: XLA would give each reader of y a loop
  # of its own, and write out the gathers for them.
  rows = min(_ROWS, -(-n // 2))
  parts = [_split(v, rows) for v in (w, graph.nbr, graph.emask)]
  return _merge(jax.lax.map(add, parts), n, lead).astype(x.dtype)


def _combine(gates, weights, k):
  """sum_m gates_m weights_m,ik for one slot k; [..., N, D]."""
  pairs = zip(gates, weights, strict=True)
  return sum(gate * w[..., k, None] for gate, w in pairs)


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
  return _gated_sum(graph, weights, weights, gates, x)


def gated_adjoint(
  graph: PatchGraph,
  weights: Sequence[jax.Array],
  gates: Sequence[jax.Array],
  g: jax.Array,
) -> jax.Array:
  """The transposed map: y_i = sum_k (c_ki g[nbr_ik] - c_ik g_i).

  Here c_ik = sum_m gates_m weights_m,ik, and c_ki belongs to the opposite edge.

  Args:
    graph: the graph.
    weights: M arrays [..., N, K].
    gates: M arrays [..., 1, D].
    g: [..., N, D].

  Returns:
    [..., N, D].
  """
  turned = [transpose(graph, w) for w in weights]
  return _gated_sum(graph, turned, weights, gates, g)


def _gated_sum(graph, far, own, gates, x):
  """y_i = sum_k (sum_m gates_m far_m,ik) x[nbr_ik] - (... own_m,ik) x_i."""
  same = far is own
  dtype = _wide(*own, *gates, x)
  gates = [gate.astype(dtype) for gate in gates]
  far = [jnp.where(graph.emask, w, 0).astype(dtype) for w in far]
  far, reach = jax.lax.optimization_barrier((far, _extend(graph, x)))
  x, y = x.astype(dtype), jnp.zeros(x.shape, dtype)
  for k in range(graph.num_slots):
    near = _take(reach, graph.nbr[..., k], x.ndim - 2).astype(dtype)
    valid = graph.emask[..., k, None]
    # The difference first: a constant field gives zero without rounding.
    step = near - x if same else near
    y += _combine(gates, far, k) * jnp.where(valid, step, 0)
  if not same:
    # What leaves a node does not depend on where it goes. A product with ones:
    # a plain sum would be fused with the loop above, which then is none.
    ones = jnp.ones((graph.num_slots, 1), dtype)
    left = [jnp.where(graph.emask, w, 0).astype(dtype) for w in own]
    left = [_exact(w, ones) for w in left]
    some = jnp.any(graph.emask, -1, keepdims=True)
    y -= _combine(gates, left, 0) * jnp.where(some, x, 0)
  return y.astype(reach.dtype)


def _limit(features: int, slots: int) -> int:
  """Rows per block whose edge products stay in the cache."""
  return max(_BLOCK // max(features * slots, 1), 64)


def _block_size(n: int, limit: int) -> int:
  """Rows per block: a divisor of n near the limit, which spares a copy."""
  limit = max(1, min(n, limit))
  divisors = (b for b in range(limit, limit // 4, -1) if n % b == 0)
  return next(divisors, limit)


def _split(rows: jax.Array, limit: int) -> jax.Array:
  """[..., N, J] -> [blocks, ..., rows per block, J], zeros at the end."""
  *lead, n, last = rows.shape
  block = _block_size(n, limit)
  count = -(-n // block)
  pad = [(0, 0)] * len(lead) + [(0, count * block - n), (0, 0)]
  rows = jnp.pad(rows, pad).reshape(*lead, count, block, last)
  return jnp.moveaxis(rows, len(lead), 0)


def _merge(blocks: jax.Array, n: int, axis: int) -> jax.Array:
  """[blocks, ..., rows per block (axis), ...] -> [..., N, ...]."""
  rows = jnp.moveaxis(blocks, 0, axis)
  shape = rows.shape
  rows = rows.reshape(*shape[:axis], -1, *shape[axis + 2 :])
  return jax.lax.slice_in_dim(rows, 0, n, axis=axis)


def _exact(a: jax.Array, b: jax.Array) -> jax.Array:
  """A matrix product that no platform rounds to bfloat16."""
  return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def sddmm(graph: PatchGraph, a: jax.Array, b: jax.Array) -> jax.Array:
  """e_ik = <a_i, b[nbr_ik]>; two [..., N, D] -> [..., N, K]."""
  lead, (n, d), slots = a.ndim - 2, a.shape[-2:], graph.num_slots
  dtype = _wide(a, b)
  reach = _extend(graph, b)

  def dots(part):
    a, nbr, emask = part
    near = jnp.where(emask[..., None], _take(reach, nbr, lead), 0)
    product = a.astype(dtype)[..., None, :] * near
    flat = product.reshape(*product.shape[:lead], -1, d)
    e = _exact(flat, jnp.ones((d, 1), dtype)).reshape(emask.shape)
    return jnp.where(emask, e, 0)

  limit = _limit(d, slots)
  parts = [_split(v, limit) for v in (a, graph.nbr, graph.emask)]
  e = _merge(jax.lax.map(dots, parts), n, lead)
  return e.astype(jnp.result_type(a, b))


def gated_coefficients(
  graph: PatchGraph,
  weights: Sequence[jax.Array],
  gates: Sequence[jax.Array],
  x: jax.Array,
  g: jax.Array,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """Gradients of <g, gated_deltas(weights, gates, x)> in weights and gates.

  With the edge products p_ik = g_i (x[nbr_ik] - x_i) they are

    dw_m,ik = <gates_m, p_ik>,    dc_m = sum_ik weights_m,ik p_ik.

  Args:
    graph: the graph.
    weights: M arrays [..., N, K].
    gates: M arrays [..., 1, D].
    x: [..., N, D].
    g: [..., N, D].

  Returns:
    dw: M arrays [..., N, K], zero in empty slots.
    dc: M arrays [..., 1, D].
  """
  lead, (n, d), slots = x.ndim - 2, x.shape[-2:], graph.num_slots
  dtype = _wide(*weights, *gates, x, g)
  basis = jnp.concatenate([gate.astype(dtype) for gate in gates], -2)
  reach = _extend(graph, x)

  def step(total, part):
    x, g, nbr, emask, weights = part
    valid = emask[..., None]
    delta = (
      _take(reach, nbr, lead).astype(dtype) - x.astype(dtype)[..., None, :]
    )
    delta = jnp.where(valid, delta, 0)
    product = jnp.where(valid, g.astype(dtype)[..., None, :] * delta, 0)
    flat = product.reshape(*product.shape[:lead], -1, d)
    dw = _exact(flat, jnp.swapaxes(basis, -1, -2))
    w = [jnp.where(emask, w, 0).astype(dtype) for w in weights]
    w = jnp.stack(w, lead).reshape(*basis.shape[:-1], -1)
    return total + _exact(w, flat), dw.reshape(*emask.shape, -1)

  limit = _limit(d, slots)
  nodes = [_split(v, limit) for v in (x, g, graph.nbr, graph.emask)]
  parts = (*nodes, [_split(w, limit) for w in weights])
  total, dw = jax.lax.scan(step, jnp.zeros_like(basis), parts)
  dw = _merge(dw, n, lead)
  count = range(len(gates))
  dw = tuple(dw[..., m].astype(weights[m].dtype) for m in count)
  dc = tuple(total[..., m, None, :].astype(gates[m].dtype) for m in count)
  return dw, dc

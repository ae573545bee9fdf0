"""Reverse-mode derivatives of the graph operations, without a scatter.

Every cotangent is again one of these operations (with a weight transposed by a
gather through `rev`), so the family is closed under reverse-mode
differentiation of any order, deterministic, and free of atomics.

`spmm`, `sddmm` and `transpose` are the partial gradients of one trilinear form
<g, W x>. The gated operations are those of

  T(w, c, x, g) = sum_i <g_i, sum_k (sum_m c_m w_m,ik) (x[nbr_ik] - x_i)>,

linear in each argument: `gated_deltas` is dT/dg, `gated_adjoint` is dT/dx and
`gated_coefficients` is the pair (dT/dw, dT/dc), which share a gather.

`implementation` comes first everywhere; see `api.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from kernels_pallas.common.platforms import by_platform
from kernels_pallas.common.sharding import find_split, over_mesh
from kernels_pallas.graph import reference
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = [
  'gated_adjoint',
  'gated_coefficients',
  'gated_deltas',
  'refusal',
  'sddmm',
  'spmm',
  'transpose',
]

Arrays = tuple[jax.Array, ...]

_NO_TPU = (
  'the TPU has no body for a graph that is neither a RasterGraph nor a '
  'TiledGraph; make one with raster_layout or tiled_layout'
)


# Slots that a body walks at compile time.
_SLOTS = 32


def refusal(graph: PatchGraph, *arrays: jax.Array) -> str | None:
  """Why the Pallas bodies do not take these operands, or None."""
  for x in arrays:
    if x.dtype not in (jnp.float32, jnp.bfloat16):
      return f'dtype {x.dtype} is neither float32 nor bfloat16'
  if graph.num_slots > _SLOTS:
    return f'{graph.num_slots} slots per node are more than {_SLOTS}'
  if not all(size for x in arrays for size in x.shape):
    return 'an array is empty'
  return None


def _over_graphs(function: Callable[..., Any], args: Any) -> Any:
  """`function` under the mesh of the caller: whole graphs on each device.

  A graph that is split along its nodes is inside a shard_map already.
  """
  lead = args[0].nbr.shape[:-2]
  split = find_split(lead[0] if lead else 0, 1)
  if split is None or args[0].axis_name is not None:
    return function(*args)
  spec = split.spec('b') if lead else PartitionSpec()
  specs = jax.tree.map(lambda _: spec, args)
  outputs = jax.tree.map(lambda _: spec, jax.eval_shape(function, *args))
  return over_mesh(function, split, specs, outputs)(*args)


def _run(name: str, implementation: str | None, *args: Any) -> Any:
  """Resolved at lowering, so that cross-compiling picks the right body."""
  graph, plain = args[0], getattr(reference, name)
  if implementation == 'plain':
    return plain(*args)
  reason = refusal(graph, *jax.tree.leaves(args[1:]))
  if implementation is None and reason:
    return plain(*args)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.graph import block_sparse, gpu, stencil

  def body(module: Any, **how: Any) -> Callable[..., Any]:
    function = functools.partial(getattr(module, name), **how)
    return lambda *a: _over_graphs(function, a)

  if implementation == 'interpret_gpu':
    return body(gpu, interpret=True)(*args)
  known = (m for m in (stencil, block_sparse) if m.takes(graph))
  on_tpu = next((m for m in known if hasattr(m, name)), None)
  if implementation == 'interpret':
    return (body(on_tpu, interpret=True) if on_tpu else plain)(*args)
  # Without a body for one of the derivatives, that one is plain.
  tiled = stencil.takes(graph) or block_sparse.takes(graph)
  bodies = {'cuda': body(gpu), 'tpu': plain if tiled else _NO_TPU}
  if on_tpu:
    bodies['tpu'] = body(on_tpu)
  if reason:
    bodies = dict.fromkeys(bodies, reason)
  return by_platform(implementation, plain, bodies, *args)


def _like(cotangent: Any, primal: jax.Array) -> jax.Array:
  return cotangent.astype(primal.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def transpose(
  implementation: str | None, graph: PatchGraph, w: jax.Array
) -> jax.Array:
  """w^T_ik = w[nbr_ik, rev_ik]; an involution, hence its own adjoint."""
  plain = reference.transpose
  if implementation != 'pallas':
    return plain(graph, w)
  # A gather that XLA does as well; there is none for a CPU all the same.
  bodies = {'tpu': plain, 'cuda': plain}
  return by_platform(implementation, plain, bodies, graph, w)


transpose.defvjp(
  lambda how, graph, w: (transpose(how, graph, w), graph),
  lambda how, graph, g: (None, transpose(how, graph, g)),
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def spmm(
  implementation: str | None,
  graph: PatchGraph,
  w: jax.Array,
  x: jax.Array,
) -> jax.Array:
  """y_i = sum_k w_ik x[nbr_ik]."""
  return _run('spmm', implementation, graph, w, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def sddmm(
  implementation: str | None,
  graph: PatchGraph,
  a: jax.Array,
  b: jax.Array,
) -> jax.Array:
  """e_ik = <a_i, b[nbr_ik]>."""
  return _run('sddmm', implementation, graph, a, b)


def _spmm_backward(how, residual, g):
  graph, w, x = residual
  dw = sddmm(how, graph, g, x)
  dx = spmm(how, graph, transpose(how, graph, w), g)
  return None, _like(dw, w), _like(dx, x)


def _sddmm_backward(how, residual, g):
  graph, a, b = residual
  da = spmm(how, graph, g, b)
  db = spmm(how, graph, transpose(how, graph, g), a)
  return None, _like(da, a), _like(db, b)


spmm.defvjp(lambda how, *args: (spmm(how, *args), args), _spmm_backward)
sddmm.defvjp(lambda how, *args: (sddmm(how, *args), args), _sddmm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_deltas(
  implementation: str | None,
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
) -> jax.Array:
  """dT/dg."""
  return _run('gated_deltas', implementation, graph, weights, gates, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_adjoint(
  implementation: str | None,
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  g: jax.Array,
) -> jax.Array:
  """dT/dx."""
  return _run('gated_adjoint', implementation, graph, weights, gates, g)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated_coefficients(
  implementation: str | None,
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  g: jax.Array,
) -> tuple[Arrays, Arrays]:
  """(dT/dw, dT/dc)."""
  return _run('gated_coefficients', implementation, graph, weights, gates, x, g)


def _deltas_backward(how, residual, g):
  graph, weights, gates, x = residual
  found: Any = gated_coefficients(how, graph, weights, gates, x, g)
  dw, dc = found
  return None, dw, dc, _like(gated_adjoint(how, graph, weights, gates, g), x)


def _adjoint_backward(how, residual, x):
  graph, weights, gates, g = residual
  found: Any = gated_coefficients(how, graph, weights, gates, x, g)
  dw, dc = found
  return None, dw, dc, _like(gated_deltas(how, graph, weights, gates, x), g)


def _coefficients_backward(how, residual, cotangents):
  graph, weights, gates, x, g = residual
  u, v = cotangents
  # The cotangents u, v pair with T(u, c, x, g) + T(w, v, x, g).
  found: Any = gated_coefficients(how, graph, u, v, x, g)
  dw, dc = found
  both = (u, gates), (weights, v)
  adjoints: Any = [gated_adjoint(how, graph, *c, g) for c in both]
  deltas: Any = [gated_deltas(how, graph, *c, x) for c in both]
  dx, dg = sum(adjoints), sum(deltas)
  return None, dw, dc, _like(dx, x), _like(dg, g)


gated_deltas.defvjp(
  lambda how, *args: (gated_deltas(how, *args), args), _deltas_backward
)
gated_adjoint.defvjp(
  lambda how, *args: (gated_adjoint(how, *args), args), _adjoint_backward
)
gated_coefficients.defvjp(
  lambda how, *args: (gated_coefficients(how, *args), args),
  _coefficients_backward,
)

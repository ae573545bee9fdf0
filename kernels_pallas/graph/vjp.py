"""Reverse-mode derivatives of the graph operations, without a scatter.

Every cotangent is again one of these operations (with a weight transposed by a
gather through `rev`), so the family is closed under reverse-mode
differentiation of any order, deterministic, and free of atomics.

`spmm`, `sddmm` and `transpose` are the partial gradients of one trilinear form
<g, W x>. The gated operations are those of

  T(w, c, x, g) = sum_i <g_i, sum_k (sum_m c_m w_m,ik) (x[nbr_ik] - x_i)>,

linear in each argument: `gated_deltas` is dT/dg, `gated_adjoint` is dT/dx and
`gated_coefficients` is the pair (dT/dw, dT/dc), which share a gather.
"""

import jax

from kernels_pallas.graph import reference
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = [
  'gated_adjoint',
  'gated_coefficients',
  'gated_deltas',
  'sddmm',
  'spmm',
  'transpose',
]

Arrays = tuple[jax.Array, ...]


def _like(cotangent: jax.Array, primal: jax.Array) -> jax.Array:
  return cotangent.astype(primal.dtype)


@jax.custom_vjp
def transpose(graph: PatchGraph, w: jax.Array) -> jax.Array:
  """w^T_ik = w[nbr_ik, rev_ik]; an involution, hence its own adjoint."""
  return reference.transpose(graph, w)


transpose.defvjp(
  lambda graph, w: (transpose(graph, w), graph),
  lambda graph, g: (None, transpose(graph, g)),
)


@jax.custom_vjp
def spmm(graph: PatchGraph, w: jax.Array, x: jax.Array) -> jax.Array:
  """y_i = sum_k w_ik x[nbr_ik]."""
  return reference.spmm(graph, w, x)


@jax.custom_vjp
def sddmm(graph: PatchGraph, a: jax.Array, b: jax.Array) -> jax.Array:
  """e_ik = <a_i, b[nbr_ik]>."""
  return reference.sddmm(graph, a, b)


def _spmm_backward(residual, g):
  graph, w, x = residual
  dw = sddmm(graph, g, x)
  dx = spmm(graph, transpose(graph, w), g)
  return None, _like(dw, w), _like(dx, x)


def _sddmm_backward(residual, g):
  graph, a, b = residual
  da = spmm(graph, g, b)
  db = spmm(graph, transpose(graph, g), a)
  return None, _like(da, a), _like(db, b)


spmm.defvjp(
  lambda graph, w, x: (spmm(graph, w, x), (graph, w, x)), _spmm_backward
)
sddmm.defvjp(
  lambda graph, a, b: (sddmm(graph, a, b), (graph, a, b)), _sddmm_backward
)


@jax.custom_vjp
def gated_deltas(
  graph: PatchGraph, weights: Arrays, gates: Arrays, x: jax.Array
) -> jax.Array:
  """dT/dg."""
  return reference.gated_deltas(graph, weights, gates, x)


@jax.custom_vjp
def gated_adjoint(
  graph: PatchGraph, weights: Arrays, gates: Arrays, g: jax.Array
) -> jax.Array:
  """dT/dx."""
  return reference.gated_adjoint(graph, weights, gates, g)


@jax.custom_vjp
def gated_coefficients(
  graph: PatchGraph, weights: Arrays, gates: Arrays, x: jax.Array, g: jax.Array
) -> tuple[Arrays, Arrays]:
  """(dT/dw, dT/dc)."""
  return reference.gated_coefficients(graph, weights, gates, x, g)


def _deltas_backward(residual, g):
  graph, weights, gates, x = residual
  dw, dc = gated_coefficients(graph, weights, gates, x, g)
  return None, dw, dc, _like(gated_adjoint(graph, weights, gates, g), x)


def _adjoint_backward(residual, x):
  graph, weights, gates, g = residual
  dw, dc = gated_coefficients(graph, weights, gates, x, g)
  return None, dw, dc, _like(gated_deltas(graph, weights, gates, x), g)


def _coefficients_backward(residual, cotangents):
  graph, weights, gates, x, g = residual
  u, v = cotangents
  # The cotangents u, v pair with T(u, c, x, g) + T(w, v, x, g).
  dw, dc = gated_coefficients(graph, u, v, x, g)
  dx = gated_adjoint(graph, u, gates, g) + gated_adjoint(graph, weights, v, g)
  dg = gated_deltas(graph, u, gates, x) + gated_deltas(graph, weights, v, x)
  return None, dw, dc, _like(dx, x), _like(dg, g)


gated_deltas.defvjp(lambda *args: (gated_deltas(*args), args), _deltas_backward)
gated_adjoint.defvjp(
  lambda *args: (gated_adjoint(*args), args), _adjoint_backward
)
gated_coefficients.defvjp(
  lambda *args: (gated_coefficients(*args), args), _coefficients_backward
)

"""Reverse-mode derivatives of the graph operations, without a scatter.

Every cotangent is again one of these operations (with a weight transposed by a
gather through `rev`), so the family is closed under reverse-mode
differentiation of any order, deterministic, and free of atomics.

Let T(w, c, x, g) = sum_i <g_i, sum_k (sum_m c_m w_m,ik) (x[nbr_ik] - x_i)>.
It is linear in each argument; `gated_deltas` is its gradient in g,
`gated_dots` the one in w, and those in x and c are

  dT/dx_i = gated_deltas(w^T, c, g)_i
            + g_i sum_m c_m sum_k (w^T_m,ik - w_m,ik),
  dT/dc_m = sum_i g_i * (sum_k w_m,ik (x[nbr_ik] - x_i)),

so both operations share one backward rule.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.graph import reference
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = ['gated_deltas', 'gated_dots', 'sddmm', 'spmm', 'transpose']

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
  """y_i = sum_k (sum_m gates_m weights_m,ik) (x[nbr_ik] - x_i)."""
  return reference.gated_deltas(graph, weights, gates, x)


@jax.custom_vjp
def gated_dots(
  graph: PatchGraph, g: jax.Array, gates: Arrays, x: jax.Array
) -> Arrays:
  """e_m,ik = <gates_m g_i, x[nbr_ik] - x_i>."""
  return reference.gated_dots(graph, g, gates, x)


def _row_sums(graph: PatchGraph, w: jax.Array) -> jax.Array:
  return jnp.where(graph.emask, w, 0).sum(-1, keepdims=True)


def _gradient_x(
  graph: PatchGraph, weights: Arrays, gates: Arrays, g: jax.Array
) -> jax.Array:
  """dT/dx."""
  turned = tuple(transpose(graph, w) for w in weights)
  skew = sum(
    gate * (_row_sums(graph, t) - _row_sums(graph, w))
    for gate, t, w in zip(gates, turned, weights, strict=True)
  )
  linked = graph.emask.any(-1, keepdims=True)
  return gated_deltas(graph, turned, gates, g) + jnp.where(linked, skew * g, 0)


def _gradient_gates(
  graph: PatchGraph, weights: Arrays, gates: Arrays, x: jax.Array, g: jax.Array
) -> Arrays:
  """dT/dc."""
  linked = graph.emask.any(-1, keepdims=True)
  gradients = []
  for w, gate in zip(weights, gates, strict=True):
    delta = gated_deltas(graph, (w,), (jnp.ones_like(gate),), x)
    product = jnp.where(linked, g * delta, 0)
    gradients.append(_like(product.sum(-2, keepdims=True), gate))
  return tuple(gradients)


def _gated_deltas_backward(residual, g):
  graph, weights, gates, x = residual
  dots = gated_dots(graph, g, gates, x)
  return (
    None,
    tuple(_like(e, w) for e, w in zip(dots, weights, strict=True)),
    _gradient_gates(graph, weights, gates, x, g),
    _like(_gradient_x(graph, weights, gates, g), x),
  )


def _gated_dots_backward(residual, weights):
  graph, g, gates, x = residual
  return (
    None,
    _like(gated_deltas(graph, weights, gates, x), g),
    _gradient_gates(graph, weights, gates, x, g),
    _like(_gradient_x(graph, weights, gates, g), x),
  )


gated_deltas.defvjp(
  lambda *args: (gated_deltas(*args), args), _gated_deltas_backward
)
gated_dots.defvjp(lambda *args: (gated_dots(*args), args), _gated_dots_backward)

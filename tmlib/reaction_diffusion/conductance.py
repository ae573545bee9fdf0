r"""How well each edge conducts, inside regions and across their boundaries.

Axes: ... leading axes, N patches, K slots, R regions, M concepts, F channels
of edge stopping.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.graph import PatchGraph, ell_sddmm
from tmlib.reaction_diffusion.transport import times

__all__ = [
  'SAME_REGION',
  'Conductance',
  'edge_conductance',
  'edge_stopping',
  'same_region',
  'uniform_conductance',
  'upwind_velocity',
]

SAME_REGION = ('inner', 'bhattacharyya')
_EPS = 1e-6


class Conductance(NamedTuple):
  """Symmetric weights of the edges.

  Attributes:
    intra: [..., N, K], a in [0, 1 / K].
    boundary: [..., N, K], b in [0, 1 / K]; a + b <= 1 / K.
    same: [..., N, K], rho, probability that both ends share a region.
    gate: [..., N, K], gamma, permeability of the boundary.
  """

  intra: jax.Array
  boundary: jax.Array
  same: jax.Array
  gate: jax.Array


def same_region(
  regions: jax.Array, graph: PatchGraph, kind: str = 'inner'
) -> jax.Array:
  r"""Probability rho_ij that the ends of an edge lie in the same region.

  'inner': rho = <s_i, s_j>, exact if the two memberships are independent draws;
  two equal but undecided rows then give less than one (1 / R if uniform).
  'bhattacharyya': rho = sum_r sqrt(p_ir p_jr) with p = (s + eps) / (1 + R eps),
  which is one for equal rows however undecided they are.

  Args:
    regions: [..., N, R], rows on the simplex.
    graph: the patch graph.
    kind: 'inner' or 'bhattacharyya'.

  Returns:
    [..., N, K], in [0, 1] and symmetric; zero in empty slots.

  Raises:
    ValueError: unknown kind.

  References:
    Bhattacharyya. On a measure of divergence between two multinomial
    populations, 1946. Our choice: eps = 1e-6 inside the simplex, for a finite
    gradient that keeps rho <= 1.
  """
  if kind == 'bhattacharyya':
    size = regions.shape[-1]
    regions = jnp.sqrt((regions + _EPS) / (1 + size * _EPS))
  elif kind != 'inner':
    raise ValueError(
      f'same_region={kind!r} is unknown; allowed: {", ".join(SAME_REGION)}'
    )
  return ell_sddmm(graph, regions, regions)


def edge_stopping(features: jax.Array, graph: PatchGraph) -> jax.Array:
  r"""Perona-Malik stopping: kappa_ij = exp(-|f_i - f_j|^2 / F).

  Args:
    features: [..., N, F], f = H W_k.
    graph: the patch graph.

  Returns:
    [..., N, K], in (0, 1], symmetric.

  References:
    Perona, Malik. Scale-space and edge detection using anisotropic diffusion,
    1990.
  """
  square = jnp.sum(features * features, -1, keepdims=True)
  ones = jnp.ones_like(square)
  # |f_i|^2 + |f_j|^2 - 2 <f_i, f_j> as one inner product, hence one pass.
  left = jnp.concatenate([features, square, ones], -1)
  right = jnp.concatenate([-2 * features, ones, square], -1)
  distance = jnp.maximum(ell_sddmm(graph, left, right), 0)
  return jnp.exp(-distance / features.shape[-1])


def edge_conductance(
  regions: jax.Array,
  concepts: jax.Array,
  graph: PatchGraph,
  *,
  theta: jax.Array | None = None,
  bias: jax.Array | float = 0.0,
  kind: str = 'inner',
  stopping: jax.Array | None = None,
  degree: int | None = None,
) -> Conductance:
  r"""Conductances inside regions (a) and across their boundaries (b).

    a_ij = e_ij rho_ij kappa_ij / K
    b_ij = e_ij (1 - rho_ij) gamma_ij / K
    gamma_ij = sigmoid(z_i^T Theta z_j + bias), Theta symmetric

  All factors lie in [0, 1] and are symmetric in i and j; a patch has at most K
  edges; hence sum_j (a_ij + b_ij) <= 1, which the facts S1-S4 rest on. K is a
  constant, not the degree, since a_ij / deg_i would not be symmetric.

  Args:
    regions: [..., N, R], S, rows on the simplex.
    concepts: [..., N, M], Z.
    graph: the patch graph.
    theta: [M, M], interaction of concepts, symmetrised here; None for zero.
    bias: [], permeability at zero interaction, in logits.
    kind: see `same_region`.
    stopping: [..., N, K], kappa in [0, 1], or None for one.
    degree: K of the formula; None takes the width of the table.

  Returns:
    Conductance; zero in empty slots.
  """
  degree = degree or graph.num_slots
  rho = same_region(regions, graph, kind)
  if theta is None:
    logits = jnp.zeros_like(rho)
  else:
    theta = (theta + theta.T) / 2
    logits = ell_sddmm(graph, times(concepts, theta), concepts)
  gate = jax.nn.sigmoid(logits + bias)
  intra = rho if stopping is None else rho * stopping
  edges = lambda x: jnp.where(graph.emask, x, 0)
  return Conductance(
    intra=edges(intra / degree),
    # rho may exceed one by rounding.
    boundary=edges(jnp.maximum(1 - rho, 0) * gate / degree),
    same=edges(rho),
    gate=edges(gate),
  )


def uniform_conductance(
  graph: PatchGraph, dtype: jnp.dtype, degree: int | None = None
) -> jax.Array:
  """1 / K on every edge: plain diffusion, the control without regions.

  Args:
    graph: the patch graph.
    dtype: of the result.
    degree: K; None takes the width of the table.

  Returns:
    [..., N, K].
  """
  return graph.emask * jnp.asarray(1 / (degree or graph.num_slots), dtype)


def upwind_velocity(
  boundary: jax.Array, concepts: jax.Array, phi: jax.Array, graph: PatchGraph
) -> jax.Array:
  r"""Directed flux across boundaries: b_ij tanh(z_i^T Phi z_j).

  Only the antisymmetric part of Phi acts, so what flows from i to j is minus
  what flows from j to i; tanh bounds the speed by one, so that the outflow of a
  patch, sum_j b_ij v^+_ij, is at most one.

  Args:
    boundary: [..., N, K], b.
    concepts: [..., N, M], Z.
    phi: [M, M].
    graph: the patch graph.

  Returns:
    [..., N, K], antisymmetric, for `advection`.
  """
  phi = (phi - phi.T) / 2
  return boundary * jnp.tanh(ell_sddmm(graph, times(concepts, phi), concepts))

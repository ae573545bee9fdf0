r"""What the evolution did: fluxes, energies, interfaces, tables to read.

Nothing here feeds a prediction.

Axes: ... leading axes, N patches (padded), K slots, S bags packed in a row, R
regions, D channels, M concepts.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from kernels_pallas.graph import PatchGraph, ell_sddmm, ell_spmm
from tmlib.reaction_diffusion.dynamics import Coefficients, Fields
from tmlib.reaction_diffusion.regions import patch_sum
from tmlib.reaction_diffusion.transport import align

__all__ = [
  'boundary_flux',
  'dirichlet_energy',
  'identifiable_tables',
  'interface_matrix',
  'per_bag',
  'region_diagnostics',
]


def boundary_flux(
  fields: Fields, boundary: jax.Array, graph: PatchGraph
) -> jax.Array:
  r"""Flux across boundaries: f_i = sum_j b_ij |[H | Z]_j - [H | Z]_i|_1.

  Args:
    fields: the state.
    boundary: [..., N, K], b.
    graph: the patch graph.

  Returns:
    [..., N].
  """
  l1 = lambda x: jnp.sum(jnp.abs(x), -1)
  return _edge_sum(fields.hidden, boundary, graph, l1) + _edge_sum(
    fields.concepts, boundary, graph, l1
  )


def dirichlet_energy(
  fields: Fields, coefficients: Coefficients, graph: PatchGraph
) -> tuple[jax.Array, jax.Array]:
  r"""Energy of H per patch, inside regions and across boundaries.

  e_i = 1/4 sum_j sum_d g_d w_ij (H_jd - H_id)^2 with (w, g) = (a, alpha) or
  (b, eta). The sum of both over a bag is H^T L H / 2 of fact S4; it goes to
  zero when the evolution smooths everything away.

  Args:
    fields: the state.
    coefficients: conductances and gains.
    graph: the patch graph.

  Returns:
    intra: [..., N].
    inter: [..., N].
  """
  energies = []
  for weights, gain in (
    (coefficients.intra, coefficients.alpha),
    (coefficients.boundary, coefficients.eta),
  ):
    if weights is None:
      energies.append(jnp.zeros_like(fields.hidden[..., 0]))
      continue
    gain = align(gain, fields.hidden.ndim)
    square = lambda x, gain=gain: jnp.sum(gain * x * x, -1) / 4
    energies.append(_edge_sum(fields.hidden, weights, graph, square))
  return energies[0], energies[1]


def interface_matrix(
  regions: jax.Array,
  boundary: jax.Array,
  graph: PatchGraph,
  axis_name: str | None = None,
) -> jax.Array:
  r"""How much boundary regions share: Gamma_rs = sum_ij s_ir b_ij s_js.

  Args:
    regions: [..., N, R], S.
    boundary: [..., N, K], b.
    graph: the patch graph.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., R, R], symmetric; over all bags of a packed row.
  """
  across = ell_spmm(graph, boundary, regions)
  gamma = jnp.einsum('...nr,...ns->...rs', regions, across)
  return patch_sum(gamma, axis_name)


def region_diagnostics(
  same: jax.Array,
  labels: jax.Array,
  graph: PatchGraph,
  axis_name: str | None = None,
) -> dict[str, jax.Array]:
  """Do learned regions respect the true ones?

  Near-uniform assignments make `same` the same number on every edge, and the
  model plain diffusion: report both figures, before and after training.

  Args:
    same: [..., N, K], rho from `edge_conductance`.
    labels: [..., N], int, true region of each patch; negative if unknown.
    graph: the patch graph.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    rho_inside: [...], mean rho over edges within a true region.
    beta_across: [...], mean of 1 - rho over edges between two. Zero where
      there is no such edge.
  """
  values = jnp.stack([labels, jnp.ones_like(labels)], -1).astype(same.dtype)
  # <[l_i, 1], [1, -l_j]> = l_i - l_j along each edge.
  flipped = jnp.stack([values[..., 1], -values[..., 0]], -1)
  equal = ell_sddmm(graph, values, flipped) == 0
  known = (labels >= 0).astype(same.dtype)[..., None]
  known = ell_sddmm(graph, known, known) > 0
  inside, across = known & equal & graph.emask, known & ~equal & graph.emask

  def mean(x, where):
    total = patch_sum(jnp.sum(jnp.where(where, x, 0), (-2, -1)), axis_name)
    count = patch_sum(jnp.sum(where, (-2, -1)), axis_name)
    return total / jnp.maximum(count, 1)

  return {
    'rho_inside': mean(same, inside),
    'beta_across': mean(1 - same, across),
  }


def identifiable_tables(
  theta: jax.Array,
  bias: jax.Array,
  exchange: jax.Array,
  activation: str = 'softmax',
) -> dict[str, jax.Array]:
  """Learned tables in a form that the data can determine.

  On the simplex z_i^T Theta z_j + b is unchanged when a constant moves from b
  to Theta, and (Delta Z) E when a row is added to all rows of E: what is left
  is Theta + b, and E up to its mean row. In the box of sigmoid concepts rows of
  Z need not sum to one, and the symmetric Theta, b and E are all determined.

  Args:
    theta: [M, M], Theta.
    bias: [], b.
    exchange: [M, D], E.
    activation: 'softmax' or 'sigmoid', of the concept field.

  Returns:
    permeability: [M, M], sigmoid of the symmetric Theta plus b: the gate
      between two patches that show one concept each, and nothing else.
    exchange: [M, D], E, minus its mean row on the simplex.
    background: [], for 'sigmoid' only, sigmoid of b: the gate of a patch that
      shows no concept.

  Raises:
    ValueError: unknown activation.
  """
  if activation not in ('softmax', 'sigmoid'):
    raise ValueError(
      f'activation={activation!r} is unknown; allowed: softmax, sigmoid'
    )
  tables = {'permeability': jax.nn.sigmoid((theta + theta.T) / 2 + bias)}
  if activation == 'sigmoid':
    background = jax.nn.sigmoid(jnp.asarray(bias))
    return tables | {'exchange': exchange, 'background': background}
  centred = exchange - jnp.mean(exchange, 0, keepdims=True)
  return tables | {'exchange': centred}


def per_bag(
  values: jax.Array, member: jax.Array, axis_name: str | None = None
) -> jax.Array:
  """Mean over the patches of each bag.

  Args:
    values: [..., N].
    member: [..., N, S], bool; leading axes may be fewer (a time axis is new).
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., S]; zero for an empty bag.
  """
  member = member.astype(values.dtype)
  count = patch_sum(jnp.sum(member, -2), axis_name)
  member = jnp.broadcast_to(member, (*values.shape, member.shape[-1]))
  total = patch_sum(jnp.sum(values[..., None] * member, -2), axis_name)
  return total / align(jnp.maximum(count, 1), total.ndim)


def _edge_sum(
  values: jax.Array,
  weights: jax.Array,
  graph: PatchGraph,
  norm: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """sum_k w_ik norm(x[nbr_ik] - x_i), slot by slot: no [N, K, D] array."""
  # A table of one slot has no opposite edges, so it has no derivative either.
  values, weights = jax.lax.stop_gradient((values, weights))
  first = lambda x: jnp.moveaxis(jnp.asarray(x), -1, 0)[..., None]

  def slot(total, columns):
    edges, weight = columns
    near = ell_spmm(edges, jnp.ones_like(weight), values)
    flux = weight[..., 0] * norm(near - values)
    return total + jnp.where(edges.emask[..., 0], flux, 0), None

  start = jnp.zeros(values.shape[:-1], values.dtype)
  slots = jax.tree.map(first, (graph, weights))
  return jax.lax.scan(slot, start, slots)[0]

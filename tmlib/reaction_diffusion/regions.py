r"""Soft tissue regions: each patch belongs to R compartments by degrees.

Regions are soft clusters of the embedded patches. Prototypes are shared by all
slides, shifted once or more towards what each slide looks like, and the
assignment is smoothed along the patch graph.

Axes: ... leading axes, N patches (padded), K slots, S bags packed in a row, R
regions, D channels, M concepts.
"""

import jax
import jax.numpy as jnp
from flax import struct

from kernels_pallas.graph import PatchGraph, ell_spmm
from tmlib.ops.softmax import one_hot_segments
from tmlib.reaction_diffusion.transport import row_sum

__all__ = [
  'RegionParams',
  'assign_regions',
  'layer_norm',
  'membership',
  'patch_sum',
  'region_usage',
  'smooth_regions',
]

_EPS = 1e-6


class RegionParams(struct.PyTreeNode):
  """What is learned about regions.

  Attributes:
    query: [D, D], W_q.
    prototypes: [R, D], q.
    concept_prototypes: [R, M], u, or None to look at H only.
    update: [D, D], W_u of the refinement, or None for no refinement.
  """

  query: jax.Array
  prototypes: jax.Array
  concept_prototypes: jax.Array | None = None
  update: jax.Array | None = None


def membership(
  mask: jax.Array, segment_ids: jax.Array | None, num_segments: int = 1
) -> jax.Array:
  """Which bag of its row each patch belongs to.

  Args:
    mask: [..., N], bool.
    segment_ids: [..., N], int in [0, S), or None where a row is one bag.
    num_segments: S.

  Returns:
    [..., N, S], bool; all False in padding.
  """
  if segment_ids is None:
    return mask[..., None]
  return one_hot_segments(segment_ids, mask, num_segments)


def patch_sum(x: jax.Array, axis_name: str | None) -> jax.Array:
  """Adds the shares of all devices that split the patches, if any do."""
  return x if axis_name is None else jax.lax.psum(x, axis_name)


def layer_norm(x: jax.Array, eps: float = 1e-6) -> jax.Array:
  """(x - mean) / sqrt(var + eps) over the last axis, without parameters."""
  x = x - jnp.mean(x, -1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + eps)


def assign_regions(
  hidden: jax.Array,
  concepts: jax.Array,
  member: jax.Array,
  params: RegionParams,
  graph: PatchGraph | None = None,
  *,
  temperature: float = 1.0,
  refine_iters: int = 1,
  smooth_iters: int = 2,
  omega: float = 0.5,
  degree: int | None = None,
  axis_name: str | None = None,
) -> jax.Array:
  r"""Soft assignment of patches to regions.

    l_ir = (<LN(H_i) W_q, q_r> / sqrt(D) + <Z_i, u_r>) / temperature
    s_i = softmax_r(l_ir)
  `refine_iters` times, per bag: q_r <- q_r + (c_r - q_r) W_u with the centroid
  c_r = sum_i s_ir H_i / sum_i s_ir, and s anew. Then `smooth_iters` times:
    s_i <- (1 - omega deg_i / K) s_i + omega / K sum_j e_ij s_j.
  Every row stays on the simplex, since the last step is a convex combination.

  Args:
    hidden: [..., N, D], H.
    concepts: [..., N, M], Z.
    member: [..., N, S], bool, see `membership`.
    params: see `RegionParams`.
    graph: the patch graph; needed for smoothing only.
    temperature: > 0.
    refine_iters: >= 0.
    smooth_iters: >= 0.
    omega: smoothing weight in (0, 1].
    degree: K of the formula; None takes the width of the table.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., N, R], S; zeros in padding.
  """
  unit = layer_norm(hidden) / jnp.sqrt(float(hidden.shape[-1]))
  member_f = member.astype(hidden.dtype)
  offset = 0.0
  if params.concept_prototypes is not None:
    offset = jnp.einsum('...nm,rm->...nr', concepts, params.concept_prototypes)
  lead = (*member.shape[:-2], member.shape[-1])
  prototypes = jnp.broadcast_to(
    params.prototypes, (*lead, *params.prototypes.shape)
  )

  def soft(prototypes):
    # W_q meets the few prototypes rather than the many patches.
    keys = prototypes @ params.query.T
    scores = jnp.einsum('...nd,...srd->...nsr', unit, keys)
    scores = jnp.einsum('...nsr,...ns->...nr', scores, member_f) + offset
    s = jax.nn.softmax(scores / temperature, axis=-1)
    return jnp.where(jnp.any(member, -1, keepdims=True), s, 0)

  regions = soft(prototypes)
  update = params.update
  for _ in range(refine_iters):
    if update is None:
      break
    share = member_f[..., None] * regions[..., None, :]
    mass = patch_sum(jnp.sum(share, -3), axis_name)
    total = jnp.einsum('...nsr,...nd->...srd', share, hidden)
    centroid = patch_sum(total, axis_name) / (mass + _EPS)[..., None]
    prototypes = prototypes + (centroid - prototypes) @ update
    regions = soft(prototypes)
  if graph is None:
    return regions
  return smooth_regions(regions, graph, smooth_iters, omega, degree)


def smooth_regions(
  regions: jax.Array,
  graph: PatchGraph,
  iterations: int,
  omega: float = 0.5,
  degree: int | None = None,
) -> jax.Array:
  """Averages the assignment over neighbours; rows stay on the simplex.

  Args:
    regions: [..., N, R], S.
    graph: the patch graph.
    iterations: >= 0.
    omega: weight in (0, 1].
    degree: K of the formula; None takes the width of the table.

  Returns:
    [..., N, R].
  """
  weights = graph.emask * jnp.asarray(
    omega / (degree or graph.num_slots), regions.dtype
  )
  keep = 1 - row_sum(weights, graph)
  for _ in range(iterations):
    regions = keep * regions + ell_spmm(graph, weights, regions)
  return regions


def region_usage(
  regions: jax.Array, member: jax.Array, axis_name: str | None = None
) -> jax.Array:
  """Fraction of a bag's patches in each region; watches for collapse.

  Args:
    regions: [..., N, R], S.
    member: [..., N, S], bool.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., S, R], rows sum to one, or to zero for an empty bag.
  """
  member = member.astype(regions.dtype)
  mass = jnp.einsum('...ns,...nr->...sr', member, regions)
  count = patch_sum(jnp.sum(member, -2), axis_name)[..., None]
  return patch_sum(mass, axis_name) / jnp.maximum(count, 1)

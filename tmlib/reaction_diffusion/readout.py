r"""From evolved patches to regions to one vector per bag, and back.

Axes: ... leading axes, N patches (padded), S bags packed in a row, R regions,
C channels.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tmlib.reaction_diffusion.concepts import unit_rows
from tmlib.reaction_diffusion.regions import patch_sum

__all__ = [
  'RegionSummary',
  'aggregate_regions',
  'assignment_entropy',
  'patch_heatmap',
  'patch_softmax',
  'prototype_overlap',
  'region_balance',
]


class RegionSummary(NamedTuple):
  """Regions of each bag.

  Attributes:
    mass: [..., S, R], soft number of patches.
    mean: [..., S, R, C], mean of the patches of a region; zero if not alive.
    alive: [..., S, R], bool, whether the region holds enough of the bag.
  """

  mass: jax.Array
  mean: jax.Array
  alive: jax.Array


def aggregate_regions(
  values: jax.Array,
  regions: jax.Array,
  member: jax.Array,
  *,
  floor: float = 1e-3,
  axis_name: str | None = None,
) -> RegionSummary:
  r"""Mean of each region: mu_r = sum_i s_ir U_i / sum_i s_ir.

  A region is alive when its mass exceeds `floor` times the patches of its bag,
  counted by the mask: relative to padded rows, padding would change results.

  Args:
    values: [..., N, C], U.
    regions: [..., N, R], S; zeros in padding.
    member: [..., N, S], bool.
    floor: smallest share of the bag's patches, in [0, 1 / R).
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    RegionSummary.
  """
  member = member.astype(values.dtype)
  share = member[..., None] * regions[..., None, :]
  mass = patch_sum(jnp.sum(share, -3), axis_name)
  count = patch_sum(jnp.sum(member, -2), axis_name)[..., None]
  alive = mass > floor * count
  total = patch_sum(
    jnp.einsum('...nsr,...nc->...src', share, values), axis_name
  )
  mean = total / jnp.where(alive, mass, 1)[..., None]
  return RegionSummary(mass, jnp.where(alive[..., None], mean, 0), alive)


def patch_heatmap(
  attention: jax.Array,
  summary: RegionSummary,
  regions: jax.Array,
  member: jax.Array,
) -> jax.Array:
  r"""Importance of each patch: att_i = sum_r p_r s_ir / mass_r.

  Args:
    attention: [..., S, R], p over the regions of a bag; zero where not alive.
    summary: from `aggregate_regions`.
    regions: [..., N, R], S; zeros in padding.
    member: [..., N, S], bool.

  Returns:
    [..., N], sums to one over each bag that is not empty; zero in padding.
  """
  density = attention / jnp.where(summary.alive, summary.mass, 1)
  member = member.astype(density.dtype)
  return jnp.einsum('...nr,...ns,...sr->...n', regions, member, density)


def patch_softmax(
  scores: jax.Array, member: jax.Array, axis_name: str | None = None
) -> jax.Array:
  """Softmax over the patches of each bag, also where devices split them.

  Args:
    scores: [..., N].
    member: [..., N, S], bool.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., N], sums to one over each bag that is not empty; zero in padding.
  """
  lowest = jnp.finfo(scores.dtype).min
  peak = jnp.max(jnp.where(member, scores[..., None], lowest), -2)
  peak = jax.lax.stop_gradient(peak)
  if axis_name is not None:
    peak = jax.lax.pmax(peak, axis_name)
  own = lambda x: jnp.sum(jnp.where(member, x[..., None, :], 0), -1)
  valid = jnp.any(member, -1)
  # where inside exp too: a padded score may be anything.
  shifted = jnp.where(valid, scores - own(peak), 0)
  weights = jnp.where(valid, jnp.exp(shifted), 0)
  total = jnp.sum(jnp.where(member, weights[..., None], 0), -2)
  total = own(patch_sum(total, axis_name))
  return weights / jnp.where(total > 0, total, 1)


def region_balance(usage: jax.Array) -> jax.Array:
  """Minus the entropy of the region usage; smallest when all are used alike.

  Args:
    usage: [..., R], from `region_usage`.

  Returns:
    [...], in [-log R, 0].
  """
  return -jnp.sum(_entropy_terms(usage), -1)


def assignment_entropy(
  regions: jax.Array, member: jax.Array, axis_name: str | None = None
) -> jax.Array:
  """Mean entropy of the rows of S; small when patches are decided.

  Args:
    regions: [..., N, R], S.
    member: [..., N, S], bool.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    [..., S], in [0, log R]; zero for an empty bag.
  """
  entropy = jnp.sum(_entropy_terms(regions), -1, keepdims=True)
  total = jnp.sum(jnp.where(member, entropy, 0), -2)
  count = jnp.sum(member.astype(entropy.dtype), -2)
  total, count = patch_sum(total, axis_name), patch_sum(count, axis_name)
  return total / jnp.maximum(count, 1)


def prototype_overlap(prototypes: jax.Array) -> jax.Array:
  """Mean squared cosine between two prototypes; zero when orthogonal.

  Args:
    prototypes: [R, D].

  Returns:
    [], in [0, 1]; zero for R = 1.
  """
  size = prototypes.shape[0]
  unit = unit_rows(prototypes)
  gram = jnp.square(unit @ unit.T)
  others = jnp.where(jnp.eye(size, dtype=bool), 0, gram)
  return jnp.sum(others) / max(size * (size - 1), 1)


def _entropy_terms(p: jax.Array) -> jax.Array:
  """-p log p with value and gradient zero at p = 0."""
  safe = jnp.where(p > 0, p, 1)
  return -safe * jnp.log(safe)

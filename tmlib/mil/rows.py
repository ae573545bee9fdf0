"""Rows that hold one bag or several, seen alike: always S bags, S = 1 for one.

Axes: B rows, N instances, S bags of a row, A branches of attention, D features.

Models that look at instances of a bag together are written for S bags in a row;
`only_bag` takes the axis away again where rows are not packed.
"""

import jax
import jax.numpy as jnp

from tmlib.mil.bag import Bag
from tmlib.ops.softmax import (
  masked_softmax,
  one_hot_segments,
  segment_softmax,
)

__all__ = [
  'branch_attention',
  'branch_pool',
  'gather_rows',
  'membership',
  'only_bag',
  'own_bag',
  'normalise_in_bag',
  'place_in_bag',
  'top_instances',
  'unpack_rows',
]


def membership(bag: Bag) -> jax.Array:
  """Which instance belongs to which bag of its row: [B, N, S], bool."""
  if bag.segment_ids is None:
    return jnp.asarray(bag.mask)[..., None]
  return one_hot_segments(bag.segment_ids, bag.mask, bag.num_segments)


def only_bag(bag: Bag, x: jax.Array) -> jax.Array:
  """[B, S, ...] -> [B, ...] where a row is one bag; else `x`."""
  return x[:, 0] if bag.segment_ids is None else x


def own_bag(member: jax.Array, table: jax.Array) -> jax.Array:
  """The entry of each instance's own bag, zero in padding.

  Args:
    member: [B, N, S], bool.
    table: [B, N, S, ...], or [B, 1, S, ...] for entries per bag.

  Returns:
    [B, N, ...].
  """
  shape = member.shape + (1,) * (table.ndim - 3)
  return jnp.sum(jnp.where(member.reshape(shape), table, 0), 2)


def normalise_in_bag(weights: jax.Array, member: jax.Array) -> jax.Array:
  """Weights over their sum in each bag; alike where a bag has none.

  Args:
    weights: [B, N], >= 0.
    member: [B, N, S], bool.

  Returns:
    [B, N], zero in padding.
  """
  mask = jnp.any(member, -1)
  totals = lambda x: own_bag(
    member, jnp.sum(jnp.where(member, x[..., None], 0), 1)[:, None]
  )
  weights = jnp.where(totals(weights) > 0, weights, 1)
  weights = jnp.where(mask, weights, 0)
  return weights / jnp.where(mask, totals(weights), 1)


def place_in_bag(member: jax.Array) -> jax.Array:
  """Position of each instance within its bag: [B, N], int32; zero in padding.

  Args:
    member: [B, N, S], bool.
  """
  return own_bag(member, jnp.cumsum(member, 1, dtype=jnp.int32) - 1)


def branch_attention(scores: jax.Array, bag: Bag) -> jax.Array:
  """Softmax within each bag, for each of A branches.

  Args:
    scores: [B, N, A].
    bag: leaves [B, N, ...].

  Returns:
    [B, N, A].
  """
  if bag.segment_ids is None:
    return masked_softmax(scores, jnp.asarray(bag.mask)[..., None], 1)
  ids = jnp.asarray(bag.segment_ids)
  one = lambda e: segment_softmax(e, bag.mask, ids, bag.num_segments)
  return jax.vmap(one, -1, -1)(scores)


def branch_pool(features: jax.Array, weights: jax.Array, bag: Bag) -> jax.Array:
  r"""Weighted sums of each bag: z_sad = sum_{n in s} w_na h_nd.

  Args:
    features: [B, N, D], zero or finite in padding.
    weights: [B, N, A], zero in padding.
    bag: leaves [B, N, ...].

  Returns:
    [B, S, A, D].
  """
  if bag.segment_ids is None:
    return jnp.einsum('bna,bnd->bad', weights, features)[:, None]
  member = membership(bag)[..., None]
  table = jnp.where(member, weights[:, :, None], 0)
  return jnp.einsum('bnsa,bnd->bsad', table, features)


def gather_rows(table: jax.Array, index: jax.Array) -> jax.Array:
  """Rows of each batch entry: table [B, N, ...], index [B, ...] -> [B, ..., D].

  Args:
    table: [B, N, D].
    index: [B, ...], int in [0, N).

  Returns:
    [B, ..., D].
  """
  return jax.vmap(lambda rows, at: rows[at])(table, index)


def top_instances(
  scores: jax.Array, member: jax.Array, k: int
) -> tuple[jax.Array, jax.Array]:
  """The k instances of each bag with the largest scores; all of a small bag.

  Args:
    scores: [B, N, A].
    member: [B, N, S], bool.
    k: >= 1.

  Returns:
    index: [B, S, A, K], int32, K = min(k, N), best first.
    valid: [B, S, A, K], bool; False where the bag has fewer.
  """
  lowest = jnp.finfo(scores.dtype).min
  inside = jnp.moveaxis(member, 1, 2)[:, :, None]
  table = jnp.where(inside, jnp.moveaxis(scores, 1, 2)[:, None], lowest)
  index = jax.lax.top_k(jax.lax.stop_gradient(table), min(k, table.shape[-1]))
  count = jnp.sum(inside, -1, keepdims=True)
  valid = jnp.arange(index[1].shape[-1])[None, None, None] < count
  return index[1], jnp.broadcast_to(valid, index[1].shape)


def unpack_rows(
  features: jax.Array, member: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Each bag in a row of its own, its instances first and in their order.

  Costs S times the memory of the packed rows.

  Args:
    features: [B, N, D].
    member: [B, N, S], bool.

  Returns:
    features: [B, S, N, D], zero beyond the bag.
    count: [B, S], int32, instances of each bag.
  """
  count = jnp.sum(member, 1, dtype=jnp.int32)
  if member.shape[-1] == 1:
    order = jnp.argsort(~member[..., 0], axis=1, stable=True)[:, None]
  else:
    order = jnp.argsort(~jnp.moveaxis(member, 1, 2), axis=2, stable=True)
  rows = gather_rows(features, order)
  inside = jnp.arange(features.shape[1])[None, None] < count[..., None]
  return jnp.where(inside[..., None], rows, 0), count

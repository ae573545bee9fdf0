"""Softmax attention in plain jnp: the truth, and any order of derivative.

Axes: B sequences, T queries, S keys, H query heads, G key heads of R = H / G
query heads each, D and V features. Holds all [B, H, T, S] logits at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.numerics import precision, silu
from kernels_pallas.softmax_attention import tiles
from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['forward', 'key_limit', 'logit_mask', 'split_heads']


def key_limit(
  rows: Rows, config: Config, keys: int, queries: int, pad: int
) -> Any:
  """Number of keys that exist, or None where tiles need no such test.

  Args:
    rows: may hold lengths.
    config: may be causal.
    keys: S.
    queries: T.
    pad: keys that were appended to fill the last block.

  Returns:
    None, S, or [B] int32.
  """
  if rows.lengths is not None:
    return jnp.clip(rows.lengths.astype(jnp.int32), 0, keys)
  if not pad or config.weights == 'silu':
    # A key of zeros has weight 0 of its own.
    return None
  if config.causal and config.offset is not None:
    # The padding lies after the last query.
    return None if queries + config.offset <= keys else keys
  return keys


def logit_mask(
  rows: Rows, config: Config, queries: int, keys: int
) -> jax.Array | None:
  """[B or 1, T, S], True where a query attends to a key; None for all."""
  offset: Any = config.offset
  if rows.offset is not None:
    offset = rows.offset[:, None, None]
  limit = None if rows.lengths is None else rows.lengths[:, None, None]
  column = lambda x: None if x is None else x[:, :, None]
  row = lambda x: None if x is None else x[:, None, :]
  q = tiles.Side(
    jnp.arange(queries)[None, :, None] + offset,
    column(rows.query_segment),
    column(rows.query_span),
  )
  k = tiles.Side(
    jnp.arange(keys)[None, None], row(rows.key_segment), row(rows.key_span)
  )
  return tiles.visible(config, q, k, limit)


def split_heads(pairs: jax.Array, groups: int) -> jax.Array:
  """[1 or B, 1 or H, T, S] -> [1 or B, 1 or G, 1 or R, T, S]."""
  groups = groups if pairs.shape[1] > 1 else 1
  return pairs.reshape(pairs.shape[0], groups, -1, *pairs.shape[2:])


def forward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """out_t = sum_s softmax_s(scale <q_t, R_s k_s> + bias_s) v_s.

  Or with x sigmoid(x) of the logits instead of their softmax.

  Args:
    config: mask and scale.
    q: [B, T, H, D], rotated where a table is given.
    k: [B, S, G, D], not rotated.
    v: [B, S, G, V].
    bias: [B, S] or None.
    table: [B, S, D] of `rope_table`, or None.
    rows: integers of the mask.
    pairs: [1 or B, 1 or H, T, S], added to the logits of silu, or None.

  Returns:
    out: [B, T, H, V], dtype of v; lse: [B, H, T], float32 or wider, or None.
  """
  (batch, queries, heads, dim), groups = q.shape, k.shape[2]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  if table is not None:
    k = tiles.rotate(k, table[:, :, None])
  q = q.reshape(batch, queries, groups, heads // groups, dim)
  options = {
    'preferred_element_type': wide,
    'precision': precision(q.dtype),
  }
  logits = jnp.einsum('btgrd,bsgd->bgrts', q, k, **options) * config.scale
  if bias is not None:
    logits += bias.astype(wide)[:, None, None, None]
  mask = logit_mask(rows, config, queries, k.shape[1])
  mask = None if mask is None else mask[:, None, None]
  values = lambda weights: (
    jnp.einsum('bgrts,bsgv->btgrv', weights.astype(v.dtype), v, **options)
    .reshape(batch, queries, heads, v.shape[-1])
    .astype(v.dtype)
  )
  if config.weights == 'silu':
    if pairs is not None:
      logits += split_heads(pairs, groups).astype(wide)
      shown = logits > -jnp.inf
      mask = shown if mask is None else mask & shown
    return values(silu(tiles.hide(logits, mask, 0.0))[0]), None
  logits = tiles.hide(logits, mask, -jnp.inf)
  peak = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
  seen = peak > -jnp.inf
  # No gradient through the branch that is not taken: log(0) has none.
  weights = jnp.exp(logits - jnp.where(seen, peak, 0.0))
  total = jnp.where(seen, jnp.sum(weights, -1, keepdims=True), 1.0)
  lse = jnp.where(seen, peak + jnp.log(total), -jnp.inf)
  return values(weights / total), lse.reshape(batch, heads, queries)

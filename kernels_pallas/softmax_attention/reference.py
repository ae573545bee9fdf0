"""Softmax attention in plain jnp: the truth, and any order of derivative.

Axes: B sequences, T queries, S keys, H query heads, G key heads of R = H / G
query heads each, D and V features. Holds all [B, H, T, S] logits at once.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.softmax_attention import tiles
from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['forward', 'key_limit', 'logit_mask']


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
  if not pad:
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


def forward(
  config: Config,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
) -> tuple[jax.Array, jax.Array]:
  """out_t = sum_s softmax_s(scale <q_t, R_s k_s> + bias_s) v_s.

  Args:
    config: mask and scale.
    q: [B, T, H, D], rotated where a table is given.
    k: [B, S, G, D], not rotated.
    v: [B, S, G, V].
    bias: [B, S] or None.
    table: [B, S, D] of `rope_table`, or None.
    rows: integers of the mask.

  Returns:
    out: [B, T, H, V], dtype of v; lse: [B, H, T], float32 or wider.
  """
  (batch, queries, heads, dim), groups = q.shape, k.shape[2]
  wide = jnp.promote_types(q.dtype, jnp.float32)
  if table is not None:
    k = tiles.rotate(k, table[:, :, None])
  q = q.reshape(batch, queries, groups, heads // groups, dim)
  options = {
    'preferred_element_type': wide,
    'precision': tiles.precision(q.dtype),
  }
  logits = jnp.einsum('btgrd,bsgd->bgrts', q, k, **options) * config.scale
  if bias is not None:
    logits += bias.astype(wide)[:, None, None, None]
  mask = logit_mask(rows, config, queries, k.shape[1])
  if mask is not None:
    logits = jnp.where(mask[:, None, None], logits, -jnp.inf)
  peak = jax.lax.stop_gradient(jnp.max(logits, -1, keepdims=True))
  seen = peak > -jnp.inf
  # No gradient through the branch that is not taken: log(0) has none.
  weights = jnp.exp(logits - jnp.where(seen, peak, 0.0))
  total = jnp.where(seen, jnp.sum(weights, -1, keepdims=True), 1.0)
  weights = (weights / total).astype(v.dtype)
  out = jnp.einsum('bgrts,bsgv->btgrv', weights, v, **options)
  lse = jnp.where(seen, peak + jnp.log(total), -jnp.inf)
  shape = (batch, queries, heads)
  return (
    out.reshape(*shape, v.shape[-1]).astype(v.dtype),
    lse.reshape(batch, heads, queries),
  )

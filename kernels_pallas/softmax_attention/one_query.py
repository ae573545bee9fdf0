"""One query per sequence: the heads that share keys become its queries.

Keys are then read once for all of them, as decoding wants it.

Axes: B sequences, H = G R query heads, G key heads.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['fold', 'foldable', 'unfold']


def foldable(config: Config, q: jax.Array, groups: int) -> bool:
  """Whether R > 1 heads [B, 1, H, D] may pass for queries [B, R, G, D].

  All heads have the same place, which a window counts from.
  """
  return q.shape[1] == 1 and q.shape[2] > groups and config.window is None


def fold(
  config: Config, rows: Rows, q: jax.Array, groups: int, keys: int
) -> tuple[Config, Rows, jax.Array]:
  """The same call for queries [B, R, G, D]; see `foldable`."""
  batch, _, heads, dim = q.shape
  share = heads // groups
  wide = lambda x: None if x is None else jnp.repeat(x, share, 1)
  rows = rows._replace(
    query_segment=wide(rows.query_segment), query_span=wide(rows.query_span)
  )
  if config.causal:
    # What the one place sees are the first keys.
    offset = jnp.asarray(config.offset if rows.offset is None else rows.offset)
    seen = jnp.broadcast_to(jnp.clip(offset + 1, 0, keys), batch)
    if rows.lengths is not None:
      seen = jnp.minimum(seen, rows.lengths)
    rows = rows._replace(lengths=seen.astype(jnp.int32), offset=None)
    config = config._replace(causal=False, offset=0)
  return config, rows, q.reshape(batch, groups, share, dim).swapaxes(1, 2)


def unfold(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
  """[B, R, G, V] -> [B, 1, H, V] and [B, G, R] -> [B, H, 1]."""
  batch, share, groups, values = out.shape
  out = out.swapaxes(1, 2).reshape(batch, 1, groups * share, values)
  return out, lse.reshape(batch, groups * share, 1)

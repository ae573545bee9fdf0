"""Keys and values in pages of a pool that sequences share.

Axes: B sequences of n pages each, P pages of a pool, G key heads, D features.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.softmax_attention.options import Rows

__all__ = ['count_keys', 'existing', 'fill_pages', 'side_by_side']


def count_keys(k: jax.Array, rows: Rows) -> int:
  """Keys per sequence, of [B, S, G, D] or of a pool [P, page, G, D]."""
  pages = 1 if rows.pages is None else rows.pages.shape[1]
  return pages * k.shape[1]


def side_by_side(
  k: jax.Array, v: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array, Rows]:
  """Copies [B, n page, G, D] of the pages of each sequence, if there are any.

  Keys beyond the end of a sequence are zeros.
  """
  pages = rows.pages
  if pages is None:
    return k, v, rows
  take = lambda x: jnp.take(x, pages, 0, mode='clip').reshape(
    pages.shape[0], -1, *x.shape[2:]
  )
  return *existing(take(k), take(v), rows), rows._replace(pages=None)


def existing(
  k: jax.Array, v: jax.Array, rows: Rows
) -> tuple[jax.Array, jax.Array]:
  """Zeros for keys [B, S, G, D] and values that do not exist.

  They may hold anything, and 0 * NaN is NaN.
  """
  if rows.lengths is None:
    return k, v
  index = jnp.arange(k.shape[1])[None, :, None, None]
  here = index < rows.lengths[:, None, None, None]
  return jnp.where(here, k, 0), jnp.where(here, v, 0)


def fill_pages(pages: jax.Array, count: int) -> jax.Array:
  """[B, count], the last page repeated: one that exists if all do."""
  pad = count - pages.shape[1]
  return jnp.pad(pages, ((0, 0), (0, pad)), mode='edge') if pad else pages

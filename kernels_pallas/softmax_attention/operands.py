"""Operands of the Pallas bodies, and the padding that their tiles want.

Axes: those of the bodies, t queries and s keys per tile.
"""

from typing import Any, NamedTuple

import jax

from kernels_pallas.common.padding import pad_axis

__all__ = [
  'Operands',
  'cut_features',
  'pad_features',
]


class Operands(NamedTuple):
  """Inputs of a call, their specs, or references to their tiles."""

  q: Any
  k: Any
  v: Any
  offset: Any = None
  limit: Any = None
  query_segment: Any = None
  key_segment: Any = None
  query_span: Any = None
  key_span: Any = None
  # Of `tiles.segment_ranges` on TPU, of `tiles.segment_blocks` on GPU, per
  # block of queries and of keys.
  query_range: Any = None
  key_range: Any = None
  # Times `tiles.unit`.
  bias: Any = None
  # [1 or B, 1 or H, T, S], of silu; at least `tiles.HIDDEN`.
  pairs: Any = None
  table: Any = None
  lse: Any = None
  delta: Any = None
  g: Any = None
  # On GPU, of the tiles of keys; k and v are then pools, rows of all pages.
  pages: Any = None


def pad_features(x: jax.Array, size: int, halves: bool) -> jax.Array:
  """Fills the last axis up to `size`, either half of it if `halves`."""
  if not halves:
    return pad_axis(x, x.ndim - 1, size)
  x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
  x = pad_axis(x, x.ndim - 1, size // 2)
  return x.reshape(*x.shape[:-2], size)


def cut_features(x: jax.Array, size: int, halves: bool) -> jax.Array:
  """Undoes `pad_features`."""
  if not halves:
    return x[..., :size]
  x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)[..., : size // 2]
  return x.reshape(*x.shape[:-2], size)

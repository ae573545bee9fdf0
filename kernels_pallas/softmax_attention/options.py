"""What an attention call is told, apart from its queries, keys and values.

Axes: B sequences, T queries, S keys, D features of a query.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['Blocks', 'Config', 'Rope', 'Rows', 'Spans', 'rope_table']


class Rope(NamedTuple):
  """Rotary embedding of all D features.

  Feature pair n turns by position * theta^(-2n/D). Pair n is (n, n + D/2), or
  (2n, 2n + 1) if `interleaved`.
  """

  theta: float = 10000.0
  interleaved: bool = False


class Spans(NamedTuple):
  """Spans of text of which some depend on what came before.

  A query of a dependent span sees all keys, that of an independent span the
  keys of its own span only. Both are cut further by `causal`, which makes
  "all" mean "everything before".

  query: [B, T], int >= 0, the span of each query.
  key: [B, S], int >= 0, the span of each key.
  dependent: [B, T], bool, whether the span of that query is dependent.
  """

  query: jax.Array
  key: jax.Array
  dependent: jax.Array


class Blocks(NamedTuple):
  """Rows of a tile: that many queries meet that many keys."""

  query: int
  key: int


class Config(NamedTuple):
  """What is known when the program is traced; hashable."""

  scale: float
  causal: bool = False
  window: int | None = None
  # The index of the first query among the keys, unless `Rows` holds it.
  offset: int | None = 0
  # 'softmax' of the logits, or 'silu': x sigmoid(x), not normalised.
  weights: str = 'softmax'
  # Tiles of all passes instead of those of each backend's own table.
  blocks: Blocks | None = None


class Rows(NamedTuple):
  """Integers per sequence, query or key; None for what is not asked for.

  offset, lengths: [B]. query_segment, query_span: [B, T]; the span of a query
  that sees all spans is -1. key_segment, key_span: [B, S]. pages: [B, n], where
  the keys and values of a sequence lie in pools of pages, S = n page.
  """

  offset: jax.Array | None = None
  lengths: jax.Array | None = None
  query_segment: jax.Array | None = None
  key_segment: jax.Array | None = None
  query_span: jax.Array | None = None
  key_span: jax.Array | None = None
  pages: jax.Array | None = None


def rope_table(
  positions: jax.Array, dim: int, theta: float, dtype: np.dtype
) -> jax.Array:
  """Cosine and sine of position * theta^(-2n/dim) for n < dim/2.

  A product in float32 is off by 0.03 radians at position 10^6. Angles are
  therefore counted in 2^-32 turns, where integers wrap as angles do.

  Args:
    positions: [..., N], int.
    dim: D, even.
    theta: base of the frequencies.
    dtype: float32 or float64.

  Returns:
    [..., N, D]: the cosines, then the sines.
  """
  frequencies = theta ** (-np.arange(0, dim, 2) / dim)
  positions = positions[..., None]
  frame = (1,) * (positions.ndim - 1) + (-1,)
  if dtype == np.float64:
    angles = positions.astype(dtype) * frequencies.reshape(frame)
  else:
    turns = frequencies / (2 * math.pi) % 1.0 * 2.0**32
    coarse = np.floor(turns).astype(np.uint32).reshape(frame)
    fine = (turns - np.floor(turns)).astype(np.float32).reshape(frame)
    # Two's complement: as a signed integer the phase lies in [-1/2, 1/2) turn.
    rest = jnp.round(positions.astype(jnp.float32) * fine)
    phase = positions.astype(jnp.uint32) * coarse
    phase = phase.astype(jnp.int32) + rest.astype(jnp.int32)
    angles = phase.astype(dtype) * np.float32(math.pi / 2**31)
  return jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)

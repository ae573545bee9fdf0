"""What a call of XOR attention is told, apart from its links and history.

Axes: B sequences, L links, N items of a history.
"""

from typing import Any, NamedTuple

import jax

__all__ = ['Config', 'Operands', 'Rows', 'Tokens']


class Tokens(NamedTuple):
  """Queries, keys and values of links or items, or their gradients."""

  q: Any
  k: Any
  v: Any


class Config(NamedTuple):
  """What is known when the program is traced; hashable."""

  scale: float
  # 'silu' or 'softmax'.
  weights: str = 'silu'
  # Items of a tile instead of the choice of each backend.
  block: int | None = None


class Rows(NamedTuple):
  """Integers of the mask; None for what is not asked for.

  lengths: [B], the items that exist. links: [B, L], items: [B, N], segments.
  """

  lengths: jax.Array | None = None
  links: jax.Array | None = None
  items: jax.Array | None = None


class Operands(NamedTuple):
  """Inputs of a Pallas body, their specs, or references to their tiles.

  link_g and g are the cotangents of the links' and the items' values.
  """

  link_q: Any
  link_k: Any
  link_v: Any
  q: Any
  k: Any
  v: Any
  limit: Any = None
  link_segment: Any = None
  item_segment: Any = None
  lse: Any = None
  delta: Any = None
  link_g: Any = None
  g: Any = None

"""Realistic shapes of attention, shared by tests and benchmarks."""

from typing import NamedTuple

__all__ = ['SHAPES', 'AttentionShape']


class AttentionShape(NamedTuple):
  """Sequences, queries, keys, query heads, key heads, features, values."""

  batch: int
  queries: int
  keys: int
  heads: int
  groups: int
  dim: int
  values: int


SHAPES = {
  'tiny': AttentionShape(2, 37, 53, 4, 2, 32, 32),
  # A layer of a language model.
  'prefill': AttentionShape(2, 2048, 2048, 4, 4, 128, 128),
  # A chunk of a prompt behind a long cache, one key head for four.
  'chunk': AttentionShape(1, 512, 8192, 8, 2, 128, 128),
  # One token per sequence.
  'decode': AttentionShape(8, 1, 4096, 8, 2, 128, 128),
  # A whole slide: patches attend to one another.
  'slide': AttentionShape(1, 16384, 16384, 4, 4, 64, 64),
  # Wide and uneven heads.
  'wide': AttentionShape(1, 1000, 1000, 2, 1, 192, 256),
}

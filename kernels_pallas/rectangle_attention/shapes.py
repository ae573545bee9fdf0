"""Realistic shapes of recommenders' histories, for tests and benchmarks."""

from typing import NamedTuple

__all__ = ['SHAPES', 'RectangleShape']


class RectangleShape(NamedTuple):
  """Sequences, links, items of a history, heads, features, values."""

  batch: int
  links: int
  items: int
  heads: int
  dim: int
  values: int


SHAPES = {
  'tiny': RectangleShape(2, 5, 300, 3, 32, 32),
  # A batch of training: a compression by 32.
  'train': RectangleShape(32, 32, 1024, 4, 64, 64),
  # One request with a lifelong history.
  'lifelong': RectangleShape(1, 64, 65536, 4, 64, 64),
  # Wide heads.
  'wide': RectangleShape(2, 32, 1000, 2, 128, 128),
}

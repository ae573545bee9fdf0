"""Realistic shapes of pooling, shared by tests and benchmarks."""

from typing import NamedTuple

__all__ = ['SHAPES', 'PoolShape']


class PoolShape(NamedTuple):
  """Rows, instances per row, segments per row, features, units of the gate."""

  rows: int
  instances: int
  segments: int
  features: int
  units: int


SHAPES = {
  'tiny': PoolShape(2, 75, 5, 12, 9),
  # One whole slide.
  'slide': PoolShape(1, 100_000, 1, 512, 256),
  # Small bags packed into rows.
  'packed': PoolShape(4, 16_384, 64, 512, 256),
  # Cells or patients: very many, very small segments.
  'many': PoolShape(1, 32_768, 1_000, 256, 128),
}

"""Realistic shapes of expert layers, shared by tests and benchmarks.

Axes: T tokens, D features, F hidden units, E experts, k experts per token.
"""

from typing import NamedTuple

__all__ = ['SHAPES', 'ExpertShape']


class ExpertShape(NamedTuple):
  """Tokens, features, hidden units, experts, experts per token."""

  tokens: int
  features: int
  hidden: int
  experts: int
  k: int = 2


SHAPES = {
  'tiny': ExpertShape(37, 8, 12, 4),
  # User models: narrow experts.
  'small': ExpertShape(4096, 64, 128, 8),
  'medium': ExpertShape(8192, 128, 256, 16),
  # A language model's layer in small.
  'large': ExpertShape(8192, 256, 1024, 32),
}

"""Realistic shapes of expert layers, shared by tests and benchmarks.

Axes: T tokens, D features, F hidden units, E experts, k experts per token.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tuning.cases import Case

__all__ = ['SHAPES', 'ExpertShape', 'cases']


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
  # Few wide experts.
  'wide': ExpertShape(2048, 2048, 4096, 8),
}

_TILES = ((1024, 512), (1024, 1024))
# Rows of a block, and the largest tiles of contracted and output columns.
_TPU = tuple((r, k, c) for r in (128, 256, 512) for k, c in _TILES)
_GPU = ((64, 32, 64), (128, 32, 64), (128, 64, 64), (128, 32, 128))


def _sizes(rows: int, groups: int) -> np.ndarray:
  """Rows per group, the largest four times the smallest; the second is empty.

  The total is `rows`.
  """
  weights = np.linspace(4, 1, groups)
  if groups > 2:
    weights[1] = 0
  sizes = np.floor(weights * (rows / weights.sum())).astype(np.int32)
  sizes[0] += rows - sizes.sum()
  return sizes


def _call(blocks, implementation):
  from kernels_pallas.grouped_matmul.api import gmm

  options = {'implementation': implementation}
  if blocks is not None:
    options |= {'block': blocks[0], 'tiles': blocks[1:]}
  return functools.partial(gmm, **options)


def _reference(lhs, rhs, sizes):
  # Sums in the dtype that the call asks for: float64 in tests.
  return jax.lax.ragged_dot(lhs, rhs, sizes)


def _case(name: str, size: ExpertShape, sizes: np.ndarray) -> Case:
  rows, groups = size.tokens * size.k, size.experts
  shapes = (rows, size.features), (groups, size.features, size.hidden)
  return Case(
    op='gmm',
    shape=name,
    options={'equal': bool((sizes == sizes[0]).all())},
    make=_call,
    reference=_reference,
    operands=(
      *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes),
      sizes,
    ),
    flops=2.0 * rows * size.features * size.hidden,
    bytes_moved=2.0
    * (
      rows * (size.features + size.hidden)
      + groups * size.features * size.hidden
    ),
    blocks={'tpu': _TPU, 'gpu': _GPU},
    scale=(2.0, 2.0),
  )


def cases() -> list[Case]:
  """The first product of an expert layer in bfloat16.

  Experts are uneven; those of 'even' are not, so that a compiler can be told
  what a kernel learns from data otherwise.
  """
  found = [
    _case(name, size, _sizes(size.tokens * size.k, size.experts))
    for name, size in SHAPES.items()
  ]
  size = SHAPES['large']
  per = size.tokens * size.k // size.experts
  equal = np.full(size.experts, per, np.int32)
  return [*found, _case('even', size, equal)]

"""Realistic shapes of pooling, shared by tests and benchmarks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph.pooling.gate import Gate
from kernels_pallas.tuning.cases import Case

__all__ = ['SHAPES', 'PoolShape', 'cases']


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
  # As many as a TPU holds.
  'most': PoolShape(1, 3_000, 2_560, 128, 128),
}


def _call(segments, gated, blocks, implementation):
  """Of values, ids and scores, or the three arrays of a gate."""
  from kernels_pallas.graph.pooling.api import segment_pool

  del blocks
  return lambda values, ids, *scores: segment_pool(
    values,
    Gate(*scores) if gated else scores[0],
    ids,
    segments,
    implementation=implementation,
  )


def _plain(segments, gated, values, ids, *scores):
  """With `jax.ops.segment_sum`."""
  if gated:
    t, u, weight = scores
    scores = jnp.einsum('bna,a->bn', jnp.tanh(t) * jax.nn.sigmoid(u), weight)
  else:
    scores = scores[0]

  def row(values, scores, ids):
    total = lambda x: jax.ops.segment_sum(x, ids, segments)
    peak = jax.ops.segment_max(scores, ids, segments)
    weights = jnp.exp(scores - jax.lax.stop_gradient(peak)[ids])
    return total(weights[:, None] * values) / total(weights)[:, None]

  return jax.vmap(row)(values, scores, ids)


def cases() -> list[Case]:
  """Softmax pooling in bfloat16, segments of equal length in a row."""
  found = []
  for name, gated in (
    ('tiny', True),
    ('slide', False),
    ('slide', True),
    ('packed', True),
    ('many', False),
  ):
    b, n, s, d, a = SHAPES[name]
    ids = np.tile(np.arange(n, dtype=np.int64) * s // n, (b, 1))
    scores = [(b, n, a), (b, n, a), (a,)] if gated else [(b, n)]
    struct = lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    count = 2 * a if gated else 1
    found.append(
      Case(
        op='segment_pool',
        shape=f'{name}, gate' if gated and name != 'tiny' else name,
        options={},
        make=functools.partial(_call, s, gated),
        reference=functools.partial(_plain, s, gated),
        operands=(
          struct((b, n, d)),
          ids.astype(np.int32),
          *map(struct, scores),
        ),
        flops=2.0 * b * n * (d + (a if gated else 0)),
        bytes_moved=2.0 * b * (n * (d + count) + s * d) + 4.0 * b * n,
        blocks={},
      )
    )
  return found

"""Cases of the ops whose folders have none of their own yet.

An op joins the reports by a function `cases` in the `shapes.py` of its folder;
what is here can move there.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph import PatchGraph, ell_spmm, segment_pool
from kernels_pallas.graph.pooling import shapes as pool_shapes
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from kernels_pallas.rectangle_attention import hstu_attention
from kernels_pallas.softmax_attention import Blocks
from kernels_pallas.tuning import Case, all_cases
from tmlib.ops.graph import ell_from_grid

__all__ = ['every_case']


def _struct(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def _spmm(name: str) -> Case:
  """Message passing on tissue; operands are w, x and the table's arrays."""
  shape = SHAPES[name]
  ij = tissue_mask(shape.rows, shape.columns, shape.patches)
  graph = ell_from_grid(ij)
  table = tuple(map(np.asarray, (graph.nbr, graph.emask, graph.rev)))
  (n, k), d = table[0].shape, shape.features

  def make(blocks: Any, implementation: str | None) -> Any:
    del blocks
    return lambda w, x, *table: ell_spmm(
      PatchGraph(*table), w, x, implementation=implementation
    )

  def gathered(w, x, nbr, emask, rev):
    del rev
    return jnp.einsum('nk,nkd->nd', jnp.where(emask, w, 0), x[nbr])

  return Case(
    op='ell_spmm',
    shape=name,
    options={},
    make=make,
    reference=gathered,
    operands=(_struct(n, k), _struct(n, d), *table),
    flops=2.0 * n * k * d,
    bytes_moved=2.0 * (2 * n * d + n * k) + 9.0 * n * k,
    blocks={},
  )


def _pool(name: str) -> Case:
  """Softmax pooling by given scores, segments of equal length in a row."""
  b, n, s, d, _ = pool_shapes.SHAPES[name]
  ids = np.tile(np.arange(n, dtype=np.int64) * s // n, (b, 1)).astype(np.int32)

  def make(blocks: Any, implementation: str | None) -> Any:
    del blocks
    return lambda values, scores, ids: segment_pool(
      values, scores, ids, s, implementation=implementation
    )

  def plain(values, scores, ids):
    def row(values, scores, ids):
      total = lambda x: jax.ops.segment_sum(x, ids, s)
      peak = jax.ops.segment_max(scores, ids, s)
      weights = jnp.exp(scores - peak[ids])
      return total(weights[:, None] * values) / total(weights)[:, None]

    return jax.vmap(row)(values, scores, ids)

  return Case(
    op='segment_pool',
    shape=name,
    options={},
    make=make,
    reference=plain,
    operands=(_struct(b, n, d), _struct(b, n), ids),
    flops=2.0 * b * n * d,
    bytes_moved=2.0 * b * (n * d + n + s * d) + 4.0 * b * n,
    blocks={},
  )


def _hstu(name: str, b: int, t: int, h: int, d: int) -> Case:
  """Causal silu attention over a history, without a bias."""

  def make(blocks: Any, implementation: str | None) -> Any:
    size = None if blocks is None else Blocks(*blocks)
    return lambda q, k, v: hstu_attention(
      q, k, v, blocks=size, implementation=implementation
    )

  def plain(q, k, v):
    logits = jnp.einsum('bthd,bshd->bhts', q, k) * d**-0.5
    weights = jnp.where(jnp.tri(t, dtype=bool), jax.nn.silu(logits), 0) / t
    return jnp.einsum('bhts,bshd->bthd', weights, v)

  return Case(
    op='hstu_attention',
    shape=name,
    options={'causal': True},
    make=make,
    reference=plain,
    operands=(_struct(b, t, h, d),) * 3,
    flops=2.0 * b * h * t * (t + 1) * d,
    bytes_moved=8.0 * b * t * h * d,
    blocks={'tpu': ((512, 512), (512, 1024), (1024, 1024))},
  )


def every_case() -> list[Case]:
  """Those of the kernel folders, then those of this file."""
  return [
    *all_cases(),
    *(_spmm(x) for x in ('tiny', 'biopsy', 'resection')),
    *(_pool(x) for x in ('tiny', 'many')),
    _hstu('tiny', 2, 37, 2, 32),
    _hstu('history', 8, 1024, 4, 64),
  ]

"""How the GPU's bodies cut attention into tiles, and what a program sees.

Axes: B sequences, H = G R query heads, n blocks of t queries, m blocks of s
keys, D and V features, padded to powers of two.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from kernels_pallas.common.padding import pad_axis
from kernels_pallas.softmax_attention import paging, tiles
from kernels_pallas.softmax_attention.operands import Operands, pad_features
from kernels_pallas.softmax_attention.options import Blocks, Config, Rows
from kernels_pallas.softmax_attention.reference import key_limit

__all__ = [
  'Plan',
  'divide',
  'locate_by',
  'make_specs',
  'prepare',
  'takes_pages',
  'within',
]


class Plan(NamedTuple):
  """Sizes of a call: t, n, s, m of the module docstring, R."""

  config: Config
  t: int
  n: int
  s: int
  m: int
  share: int
  # Number of keys if it is known and matters.
  limit: int | None
  warps: int
  stages: int
  # Keys of a page, or 0 if they lie in no pages.
  page: int = 0


def _blocks(
  config: Config, dim: int, single: bool, backward: bool
) -> tuple[Blocks, int]:
  """Tiles and warps that keep the sums of a tile in registers."""
  if dim > 128:
    return (Blocks(32, 32) if single or backward else Blocks(64, 32)), 8
  if dim > 64 or single:
    return (Blocks(32, 32) if backward else Blocks(64, 32)), 4
  return Blocks(64, 64 if config.weights == 'softmax' else 32), 4


def _tile(size: int, largest: int) -> tuple[int, int]:
  """A power of two of at least 16, and how many of them cover `size`."""
  largest = 1 << (largest.bit_length() - 1)
  block = min(largest, max(16, pl.next_power_of_2(size)))
  return block, -(-size // block)


def _width(dim: int, halves: bool) -> int:
  parts = 2 if halves else 1
  return parts * max(16, pl.next_power_of_2(-(-dim // parts)))


def prepare(
  config: Config,
  backward: bool,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None,
) -> tuple[Plan, Operands]:
  """Whole tiles."""
  dim = max(q.shape[-1], v.shape[-1])
  blocks, warps = _blocks(config, dim, q.dtype.itemsize > 2, backward)
  if table is not None and dim > 64 and not backward:
    # Halves of keys and queries, turned in single precision.
    warps = 8
  blocks = config.blocks or blocks
  t, n = _tile(q.shape[1], blocks.query)
  count = paging.count_keys(k, rows)
  s, m = _tile(count, blocks.key)
  limit = key_limit(rows, config, count, q.shape[1], m * s - count)
  known = limit if isinstance(limit, int) else None
  share = q.shape[2] // k.shape[2]
  # Two stages of the widest heads do not fit into the A100's shared memory.
  stages = 1 if dim > 128 and q.dtype.itemsize > 2 else 2
  halves = table is not None
  width = _width(q.shape[-1], halves)
  page, pages = 0, None
  if rows.pages is not None:
    page = k.shape[1]
    pages = paging.fill_pages(rows.pages, -(-s * m // page))
    # All rows of all pages.
    k, v = (x.reshape(1, -1, *x.shape[2:]) for x in (k, v))
  plan = Plan(config, t, n, s, m, share, known, warps, stages, page)
  if pairs is not None:
    pairs = jnp.maximum(pairs, tiles.HIDDEN)
    pairs = pad_axis(pad_axis(pairs, 2, t * n), 3, s * m)
  if bias is not None:
    bias = pad_axis(
      bias.astype(jnp.float32) * tiles.unit(config.weights), 1, s * m
    )
  key_blocks, query_blocks = _segment_blocks(rows, t, n, s, m)
  queries = lambda x: None if x is None else pad_axis(x, 1, t * n)
  keys = lambda x: None if x is None else pad_axis(x, 1, s * m)
  whole = (lambda x: x) if page else keys
  return plan, Operands(
    queries(pad_features(q, width, halves)),
    whole(pad_features(k, width, halves)),
    whole(pad_features(v, _width(v.shape[-1], False), False)),
    rows.offset,
    None if known is not None else limit,
    queries(rows.query_segment),
    keys(rows.key_segment),
    queries(rows.query_span),
    keys(rows.key_span),
    key_blocks,
    query_blocks,
    bias,
    pairs,
    None if table is None else keys(pad_features(table, width, True)),
    pages=pages,
  )


def _segment_blocks(
  rows: Rows, t: int, n: int, s: int, m: int
) -> tuple[Any, Any]:
  """Blocks of keys per block of queries, and the reverse."""
  if rows.query_segment is None or rows.key_segment is None:
    return None, None
  of_query = tiles.segment_ranges(rows.query_segment, t, n)
  of_key = tiles.segment_ranges(rows.key_segment, s, m)
  return (
    tiles.segment_blocks(of_query, of_key),
    tiles.segment_blocks(of_key, of_query),
  )


def within(bounds: tuple[Any, Any], blocks: Any, index: Any) -> Any:
  """First and one past the last block that both allow."""
  if blocks is None:
    return bounds
  return (
    jnp.maximum(bounds[0], blocks[0, index]),
    jnp.minimum(bounds[1], blocks[1, index]),
  )


def make_specs(
  operands: Operands, plan: Plan, locate: Callable[..., Any], walk: str
) -> Operands:
  """What a program sees: one tile of one side, all of the side it walks.

  `locate` maps the program to (b, h or g, i or j).
  """

  def spec(block, index):
    return pl.BlockSpec(block, lambda p: index(*locate(p)))

  queries, keys = plan.t * plan.n, plan.s * plan.m
  dim, values = operands.q.shape[-1], operands.v.shape[-1]
  share = np.int32(plan.share)
  group = lambda h: jax.lax.div(h, share)
  shared = (1, 1) if operands.pairs is None else operands.pairs.shape
  own_b, own_h = (np.int32(size > 1) for size in shared[:2])
  scalar = spec((1,), lambda b, h, i: (b,))
  of_blocks = lambda count: spec((None, 2, count), lambda b, h, i: (b, 0, 0))
  if walk == 'keys':
    of_query = spec((None, plan.t), lambda b, h, i: (b, i))
    of_key = spec((None, keys), lambda b, h, i: (b, 0))
    stats = spec((None, None, plan.t), lambda b, h, i: (b, h, i))
    table = spec((None, keys, dim), lambda b, h, i: (b, 0, 0))
    pairs = spec(
      (None, None, plan.t, keys), lambda b, h, i: (b * own_b, h * own_h, i, 0)
    )
    at_query = lambda size: spec(
      (None, plan.t, None, size), lambda b, h, i: (b, i, h, 0)
    )
    # A pool is everyone's.
    own, length = np.int32(not plan.page), operands.k.shape[1]
    at_key = lambda size: spec(
      (None, length, None, size), lambda b, h, i: (b * own, 0, group(h), 0)
    )
    columns = 1 if operands.pages is None else operands.pages.shape[1]
    pages = spec((None, columns), lambda b, h, i: (b, 0))
  else:
    of_query = spec((None, queries), lambda b, g, j: (b, 0))
    of_key = spec((None, plan.s), lambda b, g, j: (b, j))
    stats = spec((None, plan.share, queries), lambda b, g, j: (b, g, 0))
    table = spec((None, plan.s, dim), lambda b, g, j: (b, j, 0))
    pairs = spec(
      (None, plan.share if shared[1] > 1 else 1, queries, plan.s),
      lambda b, g, j: (b * own_b, g * own_h, 0, j),
    )
    at_query = lambda size: spec(
      (None, queries, plan.share, size), lambda b, g, j: (b, 0, g, 0)
    )
    at_key = lambda size: spec(
      (None, plan.s, None, size), lambda b, g, j: (b, j, g, 0)
    )
    pages = None
  return Operands(
    at_query(dim),
    at_key(dim),
    at_key(values),
    scalar,
    scalar,
    of_query,
    of_key,
    of_query,
    of_key,
    of_blocks(plan.n),
    of_blocks(plan.m),
    of_key,
    pairs,
    table,
    stats,
    stats,
    at_query(values),
    pages,
  )


def divide(x: Any, size: int) -> tuple[Any, Any]:
  """Quotient and remainder of what is not negative."""
  by = np.int32(size)
  return jax.lax.div(x, by), jax.lax.rem(x, by)


def locate_by(heads: int, count: int) -> Callable[..., tuple[Any, ...]]:
  """Program (b heads + h) count + i."""

  def locate(p):
    row, i = divide(p, count)
    return *divide(row, heads), i

  return locate


def takes_pages(k: jax.Array, v: jax.Array, halves: bool) -> bool:
  """Whether no pool has to be copied: heads of whole powers of two."""
  whole = _width(k.shape[3], halves), _width(v.shape[3], False)
  return whole == (k.shape[3], v.shape[3])

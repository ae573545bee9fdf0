"""Realistic shapes of attention, shared by tests and benchmarks."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.tuning.cases import Case

__all__ = ['SHAPES', 'AttentionShape', 'cases']


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
  # A quarter of one head of it: compilers that simulate a grid of tiles step by
  # step need gigabytes for more, which costs as much per query.
  'slide_rows': AttentionShape(1, 4096, 16384, 1, 1, 64, 64),
  # Wide and uneven heads.
  'wide': AttentionShape(1, 1000, 1000, 2, 1, 192, 256),
}

_TPU = tuple((t, s) for t in (512, 1024) for s in (512, 1024, 2048))
_GPU = ((64, 32), (64, 64), (128, 32), (128, 64))
# Name of the case: shape, what is known, the arrays that are not.
_CALLS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
  'tiny': ('tiny', {'causal': True}, ('segment_ids',)),
  'causal': ('prefill', {'causal': True}, ()),
  'causal, rope': ('prefill', {'causal': True, 'rope': True}, ()),
  'slide, segments': ('slide_rows', {}, ('segment_ids',)),
  'chunk': ('chunk', {'causal': True, 'query_offset': 7680}, ()),
  'decode': ('decode', {}, ('lengths',)),
  'decode, pages': ('decode', {}, ('lengths', 'block_table')),
}
# Keys of a page of a pool that holds twice what is needed.
_PAGE = 64


def _operands(
  size: AttentionShape, extra: tuple[str, ...]
) -> tuple[jax.ShapeDtypeStruct | np.ndarray, ...]:
  b, t, s, h, g, d, v = size
  keys = (2 * b * s // _PAGE, _PAGE) if 'block_table' in extra else (b, s)
  shapes = (b, t, h, d), (*keys, g, d), (*keys, g, v)
  found: list = [jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes]
  if 'lengths' in extra:
    found.append(s - np.arange(b, dtype=np.int32) * 100)
  if 'block_table' in extra:
    pages = np.random.default_rng(0).permutation(keys[0])[: b * s // _PAGE]
    found.append(pages.astype(np.int32).reshape(b, -1))
  if 'segment_ids' in extra:
    # Four segments in a row.
    found += [
      np.tile(np.arange(n, dtype=np.int32) * 4 // n, (b, 1)) for n in (t, s)
    ]
  return tuple(found)


def _call(options, extra, blocks, implementation):
  """The public function of the operands."""
  from kernels_pallas.softmax_attention.api import attention
  from kernels_pallas.softmax_attention.options import Blocks, Rope

  known = {k: v for k, v in options.items() if k != 'rope'}
  known |= {
    'implementation': implementation,
    'blocks': None if blocks is None else Blocks(*blocks),
  }

  def function(q, k, v, *arrays):
    told = dict(known)
    if extra == ('segment_ids',):
      told['segment_ids'] = arrays
    else:
      told |= dict(zip(extra, arrays, strict=True))
    if options.get('rope'):
      at = lambda x: jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape[:2])
      told |= {'rope': Rope(), 'positions': at(q), 'key_positions': at(k)}
    return attention(q, k, v, **told)

  return function


def cases() -> list[Case]:
  """Calls in bfloat16 for reports; flops are those of visible pairs."""
  found = []
  for name, (shape, options, extra) in _CALLS.items():
    size = SHAPES[shape]
    b, t, s, h, g, d, v = size
    pairs = t * s
    if options.get('causal'):
      offset = options.get('query_offset', 0)
      pairs = sum(min(s, i + 1 + offset) for i in range(t))
    make = functools.partial(_call, options, extra)
    found.append(
      Case(
        op='attention',
        shape=name,
        options=options | {'arrays': extra},
        make=make,
        reference=make(None, 'reference'),
        operands=_operands(size, extra),
        flops=2.0 * b * h * pairs * (d + v),
        bytes_moved=2.0 * b * (t * h * (d + v) + s * g * (d + v)),
        blocks={'tpu': _TPU, 'gpu': _GPU} if t > 1 else {},
      )
    )
  return found

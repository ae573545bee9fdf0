"""Softmax attention on TPU, GPU and CPU, forward and in reverse mode.

Axes: B sequences, T queries, S keys, H query heads, G key heads, D features of
queries and keys, V features of values. The layout is [B, T, H, D] throughout.

`implementation`: None is Pallas on TPU and GPU and a loop over tiles elsewhere,
decided when the program is compiled, and the loop wherever Pallas can not;
"pallas" insists on Pallas; "xla" is the loop, 64k tokens in bounded memory;
"reference" holds all logits at once, and alone has forward mode; "interpret"
and "interpret_gpu" run the TPU's and the GPU's body in Pallas' interpreter.

In reverse mode all have derivatives of any order, in bounded memory but for
"reference": `jax.grad` of a function of `jax.grad`. Values and gradients come
from the implementation asked for; what is derived from gradients, from a loop
over tiles in plain jnp.

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, sequences are divided
over the axis 'data' and heads over 'model' where these divide them, and
everything is repeated over the other axes.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kernels_pallas.common.checks import (
  check_blocks,
  check_implementation,
  check_operands,
  check_window,
  checked_integers,
  checked_lengths,
  checked_offset,
  checked_scale,
  checked_segments,
)
from kernels_pallas.common.padding import pad_axis
from kernels_pallas.softmax_attention import (
  one_query,
  paging,
  reference,
  tiles,
  vjp,
)
from kernels_pallas.softmax_attention.options import (
  Blocks,
  Config,
  Rope,
  Rows,
  Spans,
  rope_table,
)

__all__ = ['attention']


def _spans(
  spans: Spans | None, batch: int, queries: int, keys: int
) -> tuple[jax.Array | None, jax.Array | None]:
  if spans is None:
    return None, None
  if not isinstance(spans, Spans):
    raise TypeError(
      f'spans={type(spans).__name__}(...), expected a Spans of query, key and '
      'dependent'
    )
  of_query = checked_integers('spans.query', spans.query, (batch, queries), 0)
  of_key = checked_integers('spans.key', spans.key, (batch, keys), 0)
  dependent = jnp.asarray(spans.dependent)
  if dependent.shape != (batch, queries) or dependent.dtype != bool:
    raise ValueError(
      f'spans.dependent has shape {dependent.shape} and dtype '
      f'{dependent.dtype}, expected bool {(batch, queries)}, a value per query'
    )
  return jnp.where(dependent, -1, of_query), of_key


def _rotate(
  q: jax.Array,
  k: jax.Array,
  keys: int,
  rope: Rope | None,
  positions: Any,
  key_positions: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """Rotated queries, keys in halves but not rotated, the table of the keys."""
  if rope is None:
    given = positions is not None or key_positions is not None
    if given:
      raise ValueError('positions are of no use without rope=Rope(...)')
    return q, k, None
  if not isinstance(rope, Rope):
    raise TypeError(
      f'rope={rope!r} is no Rope; Rope() turns halves with theta = 10000'
    )
  batch, queries, _, dim = q.shape
  if dim % 2:
    raise ValueError(
      f'rope turns pairs of features, but q and k have {dim}; pad them with a '
      'zero feature (and give scale)'
    )
  if positions is None or key_positions is None:
    raise ValueError(
      'rope needs positions [B, T] of the queries and key_positions [B, S]; '
      'for a plain sequence both are jnp.arange repeated B times'
    )
  if not (math.isfinite(rope.theta) and rope.theta > 0):
    raise ValueError(f'rope.theta={rope.theta} must be positive and finite')
  positions = checked_integers('positions', positions, (batch, queries), 0)
  key_positions = checked_integers(
    'key_positions', key_positions, (batch, keys), 0
  )
  if rope.interleaved:
    # Products of q and k do not care for the order of their features.
    halves = lambda x: jnp.swapaxes(
      x.reshape(*x.shape[:3], dim // 2, 2), 3, 4
    ).reshape(x.shape)
    q, k = halves(q), halves(k)
  dtype = np.dtype(jnp.promote_types(q.dtype, jnp.float32))
  table = lambda x: rope_table(x, dim, rope.theta, dtype)
  return tiles.rotate(q, table(positions)[:, :, None]), k, table(key_positions)


def _bias(key_bias: Any, batch: int, keys: int) -> jax.Array | None:
  if key_bias is None:
    return None
  key_bias = jnp.asarray(key_bias)
  if not jnp.issubdtype(key_bias.dtype, jnp.floating):
    raise TypeError(
      f'key_bias has dtype {key_bias.dtype}, expected floats; for a mask use '
      'jnp.where(mask, 0.0, -jnp.inf)'
    )
  if key_bias.shape != (batch, keys):
    raise ValueError(
      f'key_bias has shape {key_bias.shape}, expected ({batch}, {keys}), one '
      'number per key'
    )
  return key_bias


def _pages(k: jax.Array, v: jax.Array, table: Any, batch: int) -> jax.Array:
  """Of each sequence, in the pools k and v [P, page, G, D]; int32 [B, n]."""
  table = jnp.asarray(table)
  if table.ndim != 2:
    raise ValueError(
      f'block_table has shape {table.shape}, expected [B, pages per sequence]'
    )
  table = checked_integers('block_table', table, (batch, table.shape[1]), 0)
  if k.shape[:2] != v.shape[:2] or not k.shape[0]:
    raise ValueError(
      f'k {k.shape} and v {v.shape} must agree in pages and keys per page, and '
      'hold a page at least'
    )
  last = k.shape[0] - 1
  if not isinstance(table, Tracer) and table.size:
    highest = int(np.max(np.asarray(table)))
    if highest > last:
      raise ValueError(
        f'block_table holds {highest}, but there are {last + 1} pages'
      )
  return jnp.minimum(table, last)


def _compute(
  config: Config,
  implementation: str | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
) -> tuple[jax.Array, jax.Array]:
  """[B, T, H, V] and [B, H, T] of operands that are not empty."""
  # Annotations do not see through custom_vjp.
  both: Any
  if implementation == 'reference':
    k, v, rows = paging.side_by_side(k, v, rows)
    k, v = paging.existing(k, v, rows)
    both = reference.forward(config, q, k, v, bias, table, rows)
    return both
  folded, groups = one_query.foldable(config, q, k.shape[2]), k.shape[2]
  if folded:
    keys = paging.count_keys(k, rows)
    config, rows, q = one_query.fold(config, rows, q, groups, keys)
  both = vjp.core(config, implementation, q, k, v, bias, table, rows)
  return one_query.unfold(*both) if folded else both


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  scale: float | None = None,
  causal: bool = False,
  query_offset: int | jax.Array = 0,
  window: int | None = None,
  lengths: jax.Array | None = None,
  segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
  spans: Spans | None = None,
  key_bias: jax.Array | None = None,
  rope: Rope | None = None,
  positions: jax.Array | None = None,
  key_positions: jax.Array | None = None,
  block_table: jax.Array | None = None,
  return_lse: bool = False,
  blocks: Blocks | None = None,
  implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  r"""out_t = sum_s softmax_s(scale <R_t q_t, R_s k_s> + bias_s) v_s.

  The sum runs over the keys that pass all masks asked for; a query that sees
  none gets 0 and lse = -inf. Query t sits at index t + query_offset among the
  keys. Sums run in float32 or wider; products in the dtype of q, and those of
  float32 in full precision. Differentiable in q, k, v and key_bias, also
  through lse; parts of a sequence can hence be merged by their lse.

  Args:
    q: [B, T, H, D], float, queries.
    k: [B, S, G, D], dtype of q, keys; head h of q meets head h // (H / G).
    v: [B, S, G, V], dtype of q, values; V may differ from D.
    scale: a finite number; None is 1 / sqrt(D).
    causal: a query sees no key of a larger index than its own.
    query_offset: index of the first query among the keys: an integer, or int
      [] or [B]. With keys that end where the queries end it is S - T.
    window: >= 1; a query sees only keys whose index differs from its own by
      less, so `window` keys if causal and 2 window - 1 if not.
    lengths: [B], int in [0, S], clamped under jit: keys beyond do not exist,
      and may hold anything.
    segment_ids: [B, T] if T = S, or a pair ([B, T], [B, S]), int: a query sees
      keys of its own segment only. Need not be sorted, but only tiles whose
      ranges of ids lie apart are skipped: of packed sequences, most of them.
    spans: see `Spans`.
    key_bias: [B, S], float, added to the logits of a key, as the logarithm of
      its weight; -inf hides it.
    rope: rotary embedding of q and k, which come without it.
    positions: [B, T], int >= 0, of the queries; with rope only.
    key_positions: [B, S], int >= 0, of the keys; they need not be the indices
      that the masks go by.
    block_table: [B, n], int in [0, P), clamped under jit: k and v are then
      pools of pages [P, page, G, D] and [P, page, G, V], and the S = n page
      keys of a sequence are those of its n pages in turn; `lengths` says where
      they end. The forward pass reads pages where they lie: on a TPU if D and V
      are multiples of 128 and pages of 16 (float32: 8) keys, up to 2^16 pages
      in the table; on a GPU if D and V are powers of two. Otherwise, and in a
      backward pass, the pages of the table are copied side by side.
    return_lse: return the logarithm of the sum of exponentials as well.
    blocks: rows of a tile, instead of the backend's own choice.
    implementation: see the module docstring.

  Returns:
    out: [B, T, H, V], dtype of q.
    lse: [B, T, H], float32 or wider, if `return_lse`.

  Raises:
    ValueError: on shapes that disagree, values out of range as far as they are
      known, or an unknown implementation.
    TypeError: on a wrong dtype.

  References:
    Dao. FlashAttention-2: faster attention with better parallelism and work
    partitioning, 2023.
    Su et al. RoFormer: enhanced transformer with rotary position embedding,
    2021.
  """
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  pages = None
  if block_table is not None and q.ndim == k.ndim == v.ndim == 4:
    pages = _pages(k, v, block_table, q.shape[0])
    length = pages.shape[1] * k.shape[1]
    flat = lambda x: jax.ShapeDtypeStruct(
      (q.shape[0], length, *x.shape[2:]), x.dtype
    )
    check_operands(q, flat(k), flat(v))
  else:
    check_operands(q, k, v)
  check_implementation(implementation, vjp.refusal(q, v))
  check_window(window)
  check_blocks(blocks)
  batch, queries, heads, dim = q.shape
  rows = Rows(pages=pages)
  keys = paging.count_keys(k, rows)
  number, offset = checked_offset(query_offset, batch)
  config = Config(
    checked_scale(scale, dim), bool(causal), window, number, blocks=blocks
  )
  rows = Rows(
    offset,
    checked_lengths(lengths, batch, keys),
    *checked_segments(segment_ids, batch, queries, keys),
    *_spans(spans, batch, queries, keys),
    pages,
  )
  bias = _bias(key_bias, batch, keys)
  values = v.shape[3]
  if not values:
    # The logarithm of the sums needs no values.
    v = pad_axis(v, 3, 1)
  q, k, table = _rotate(q, k, keys, rope, positions, key_positions)
  if not (batch and queries and heads and keys):
    out = jnp.zeros((*q.shape[:3], values), v.dtype)
    lse = jnp.full((batch, heads, queries), -jnp.inf, jnp.float32)
  else:
    out, lse = _compute(config, implementation, q, k, v, bias, table, rows)
  out = out[..., :values].astype(v.dtype)
  return (out, jnp.swapaxes(lse, 1, 2)) if return_lse else out

"""HSTU's attention: silu weights, which are not normalised.

Axes: B sequences, T queries, S keys, H query heads, G key heads, D features of
queries and keys, V features of values.

It is built on the bodies of `softmax_attention`, which need only another weight
per tile.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.checks import (
  check_blocks,
  check_implementation,
  check_operands,
  check_window,
  checked_lengths,
  checked_norm,
  checked_offset,
  checked_scale,
  checked_segments,
)
from kernels_pallas.softmax_attention import paging, reference, vjp
from kernels_pallas.softmax_attention.options import Blocks, Config, Rows
from kernels_pallas.tuning.table import find_blocks

__all__ = ['hstu_attention']


def _bias(bias: Any, q: jax.Array, keys: int) -> jax.Array | None:
  """[1 or B, 1 or H, T, S]."""
  if bias is None:
    return None
  bias = jnp.asarray(bias)
  if not jnp.issubdtype(bias.dtype, jnp.floating):
    raise TypeError(
      f'bias has dtype {bias.dtype}, expected floats; for a mask use '
      'jnp.where(mask, 0.0, -jnp.inf)'
    )
  batch, queries, heads, _ = q.shape
  fits = (
    bias.ndim == 4
    and bias.shape[0] in (1, batch)
    and bias.shape[1] in (1, heads)
    and bias.shape[2:] == (queries, keys)
  )
  if not fits:
    raise ValueError(
      f'bias has shape {bias.shape}, expected [1 or {batch}, 1 or {heads}, '
      f'{queries}, {keys}], heads before queries'
    )
  return bias


def _blocks(q: jax.Array, v: jax.Array) -> Blocks | None:
  """Of the table for this chip, where it has some: those without a bias."""
  lanes = -(-max(q.shape[3], v.shape[3]) // 128) * 128
  found = find_blocks('hstu_attention', f'{q.dtype} {lanes}')
  return Blocks(*found) if found else None


def hstu_attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  *,
  bias: jax.Array | None = None,
  causal: bool = True,
  query_offset: int | jax.Array = 0,
  window: int | None = None,
  lengths: jax.Array | None = None,
  segment_ids: jax.Array | tuple[jax.Array, jax.Array] | None = None,
  scale: float | None = None,
  norm: float | jax.Array | None = None,
  blocks: Blocks | None = None,
  implementation: str | None = None,
) -> jax.Array:
  r"""out_t = 1/N sum_s silu(scale <q_t, k_s> + b_ts) v_s.

  The sum runs over the keys that pass all masks asked for; a query that sees
  none gets 0. Sums run in float32 or wider; products in the dtype of q, and
  those of float32 in full precision. Differentiable in q, k, v, bias and norm.

  Args:
    q: [B, T, H, D], float, queries.
    k: [B, S, G, D], dtype of q, keys; head h of q meets head h // (H / G).
    v: [B, S, G, V], dtype of q, values.
    bias: [1 or B, 1 or H, T, S], float, added to the logits: the relative
      positions and times of HSTU. -inf hides a pair. It takes as much memory as
      its shape says, and so does its gradient: leave it out of long histories.
    causal: a query sees no key of a larger index than its own.
    query_offset: index of the first query among the keys: an integer, or int
      [] or [B].
    window: >= 1; a query sees only keys whose index differs from its own by
      less.
    lengths: [B], int in [0, S], clamped under jit: keys beyond do not exist,
      and may hold anything.
    segment_ids: [B, T] if T = S, or a pair ([B, T], [B, S]), int: a query sees
      keys of its own segment only. Need not be sorted.
    scale: a finite number; None is 1 / sqrt(D).
    norm: N, > 0: a number or float [] or [B]; None is S, the padded length.
      For the true lengths pass jnp.maximum(lengths, 1).
    blocks: rows of a tile, instead of the backend's own choice.
    implementation: see `kernels_pallas.rectangle_attention.api`.

  Returns:
    [B, T, H, V], dtype of q.

  Raises:
    ValueError: on shapes that disagree, values out of range as far as they are
      known, or an unknown implementation.
    TypeError: on a wrong dtype.

  References:
    Zhai et al. Actions speak louder than words: trillion-parameter sequential
    transducers for generative recommendations, 2024. The default scale is our
    choice.
  """
  q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
  check_operands(q, k, v)
  check_implementation(implementation, vjp.refusal(q, v))
  check_window(window)
  check_blocks(blocks)
  batch, queries, heads, dim = q.shape
  keys = k.shape[1]
  number, offset = checked_offset(query_offset, batch)
  if blocks is None and bias is None:
    blocks = _blocks(q, v)
  config = Config(
    checked_scale(scale, dim), bool(causal), window, number, 'silu', blocks
  )
  rows = Rows(
    offset,
    checked_lengths(lengths, batch, keys),
    *checked_segments(segment_ids, batch, queries, keys),
  )
  bias = _bias(bias, q, keys)
  norm = checked_norm(norm, batch, keys)
  if not (batch and queries and heads and keys and v.shape[3]):
    return jnp.zeros((*q.shape[:3], v.shape[3]), v.dtype)
  args = None, None, rows, bias
  if implementation == 'reference':
    k, v = paging.existing(k, v, rows)
    out, _ = reference.forward(config, q, k, v, *args)
  else:
    both: Any = vjp.core(config, implementation, q, k, v, *args)
    out, _ = both
  return (out / norm).astype(out.dtype)

"""Other libraries' ops at the shapes of our kernels, for the reports.

A peer gets our operands and returns a function of them, or None where it can
not do what the case asks for. JAX's Pallas attention wants heads before rows;
that transposition lies outside its kernel, as ours lies outside of ours.
"""

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.tuning import Case

__all__ = ['PEERS', 'Peer']


class Peer(NamedTuple):
  """An op of another library.

  make: (case, blocks) -> function of the operands of the case, or None.
  platform: 'tpu', 'gpu' or 'any' (plain XLA, no kernel to be taken apart).
  blocks: block sizes to try.
  note: what its figures leave out.
  """

  op: str
  name: str
  platform: str
  make: Callable[[Case, Any], Callable[..., Any] | None]
  blocks: tuple[Any, ...] = (None,)
  note: str = ''


def _plain_attention(case: Case) -> bool:
  """Whether keys have a head per query head, no offset, lengths or rotation."""
  same = case.operands[0].shape[2] == case.operands[1].shape[2]
  odd = {'query_offset', 'rope'} & set(case.options)
  return same and not odd and 'lengths' not in case.options['arrays']


def _heads_first(x: jax.Array) -> jax.Array:
  return jnp.swapaxes(x, 1, 2)


def flash(case: Case, blocks: Any) -> Callable[..., Any] | None:
  """JAX's TPU flash attention with blocks (queries, keys) in all passes.

  Or (queries, keys in memory, keys of a product), of the forward pass.
  """
  if not _plain_attention(case):
    return None
  from jax.experimental.pallas.ops.tpu import flash_attention as op

  t, s = (
    min(n, size.shape[1])
    for n, size in zip(blocks[:2], case.operands[:2], strict=True)
  )
  inner = min(blocks[2], s) if len(blocks) > 2 else s
  sizes = op.BlockSizes(
    block_b=1,
    **dict.fromkeys(('block_q', 'block_q_dq'), t),
    **dict.fromkeys(('block_q_major_dkv', 'block_q_dkv'), t),
    block_k=inner,
    **dict.fromkeys(('block_k_major', 'block_k_dq'), s),
    **dict.fromkeys(('block_k_major_dkv', 'block_k_dkv'), s),
    block_k_major_dq=s,
  )

  def function(q, k, v, *segments):
    out = op.flash_attention(
      *map(_heads_first, (q, k, v)),
      segment_ids=op.SegmentIds(*segments) if segments else None,
      causal=case.options.get('causal', False),
      sm_scale=q.shape[-1] ** -0.5,
      block_sizes=sizes,
    )
    return _heads_first(out)

  return function


def splash(case: Case, blocks: Any) -> Callable[..., Any] | None:
  """JAX's TPU splash attention, forward."""
  if not _plain_attention(case):
    return None
  from jax.experimental.pallas.ops.tpu import splash_attention as op

  (_, t, h, _), s = case.operands[0].shape, case.operands[1].shape[1]
  causal = case.options.get('causal', False)
  one = op.CausalMask((t, s)) if causal else op.FullMask((t, s))
  sizes = op.BlockSizes(
    block_q=blocks[0], block_kv=blocks[1], block_kv_compute=blocks[1]
  )
  kernel = op.make_splash_mha(
    mask=op.MultiHeadMask([one] * h),
    block_sizes=sizes,
    head_shards=1,
    q_seq_shards=1,
  )

  def function(q, k, v, *segments):
    ids = op.SegmentIds(*segments) if segments else None
    q = q * q.shape[-1] ** -0.5
    out: Any = jax.vmap(kernel)(*map(_heads_first, (q, k, v)), ids)
    return _heads_first(out)

  return function


def mha(case: Case, blocks: Any) -> Callable[..., Any] | None:
  """JAX's GPU attention (Triton)."""
  if not _plain_attention(case):
    return None
  from jax.experimental.pallas.ops.gpu import attention as op

  t, s = blocks
  sizes = op.BlockSizes(
    block_q=t, block_k=s, block_q_dkv=t, block_kv_dkv=t, block_q_dq=t,
    block_kv_dq=t,
  )  # fmt: skip

  def function(q, k, v, *segments):
    return op.mha(
      q, k, v, segments[0] if segments else None,
      sm_scale=q.shape[-1] ** -0.5, causal=case.options.get('causal', False),
      block_sizes=sizes,
    )  # fmt: skip

  return function


def nn_attention(implementation: str) -> Callable[..., Any]:
  """`jax.nn.dot_product_attention` by XLA or by cuDNN."""

  def make(case: Case, blocks: Any) -> Callable[..., Any] | None:
    del blocks
    options, arrays = case.options, case.options['arrays']
    if {'query_offset', 'rope'} & set(options) or 'block_table' in arrays:
      return None

    def function(q, k, v, *extra):
      told: dict[str, Any] = {
        'is_causal': options.get('causal', False),
        'implementation': implementation,
      }
      if arrays == ('segment_ids',):
        told['mask'] = (extra[0][:, :, None] == extra[1][:, None])[:, None]
      elif arrays == ('lengths',):
        told['key_value_seq_lengths'] = extra[0]
      return jax.nn.dot_product_attention(q, k, v, **told)

    return function

  return make


def megablox(case: Case, blocks: Any) -> Callable[..., Any] | None:
  """JAX's TPU gmm with tiles of at most (rows, inner, columns)."""
  # The package hides its modules behind functions of the same names.
  op = importlib.import_module('jax.experimental.pallas.ops.tpu.megablox.ops')
  rows, inner, columns = blocks
  if case.operands[0].shape[0] % rows:
    return None

  def tiling(m, k, n):
    del m
    return rows, min(inner, k), min(columns, n)

  def function(lhs, rhs, sizes):
    static = lhs.dtype, tiling, None, None, False, False
    return op.gmm(lhs, rhs, sizes, *static)

  return function


def ragged_dot(case: Case, blocks: Any) -> Callable[..., Any]:
  """XLA's own grouped product."""
  del blocks
  return lambda lhs, rhs, sizes: jax.lax.ragged_dot(lhs, rhs, sizes)


# The last is one at which the estimate for 7x does not end the compiler.
_FLASH = ((512, 1024), (1024, 1024), (2048, 2048, 512))
_QUERIES_KEYS = ((512, 1024), (1024, 1024), (512, 512))
_BY_DATA = 'which tiles it skips depends on data, which the estimate guesses'
PEERS = (
  Peer('attention', 'jax flash', 'tpu', flash, _FLASH),
  Peer('attention', 'jax splash', 'tpu', splash, _QUERIES_KEYS, _BY_DATA),
  Peer('attention', 'jax mha', 'gpu', mha, ((64, 64), (128, 64))),
  Peer('attention', 'jax.nn (XLA)', 'any', nn_attention('xla')),
  Peer('attention', 'cuDNN', 'device', nn_attention('cudnn')),
  Peer(
    'gmm',
    'jax megablox',
    'tpu',
    megablox,
    ((512, 1024, 1024), (256, 1024, 1024), (128, 128, 128)),
  ),
  Peer('gmm', 'lax.ragged_dot', 'any', ragged_dot),
)

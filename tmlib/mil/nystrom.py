r"""Nystrom self-attention without any T x T matrix.

Axes: B sequences, T tokens (padded), E features, H heads, D features of a head
(E = H D), m landmarks.

Of the T tokens of a sequence the first `count` exist. They are divided into m
blocks of l = ceil(count / m), the landmarks their means. As in the public code
a sequence is filled up in front by F = m l - count zero tokens, which count as
keys and in the means: they enter here as numbers, not as rows.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import attention
from tmlib.mil.layers import linear, wide

__all__ = [
  'NystromParams',
  'landmark_means',
  'nystrom_attention',
  'nystrom_first_token',
  'pseudo_inverse',
]


class NystromParams(NamedTuple):
  """Parameters of one attention layer.

  Attributes:
    qkv: [E, 3, H, D], without bias.
    out: [H, D, E].
    out_bias: [E].
    residual: [W, H], W odd: a convolution of the values along the sequence, one
      filter per head.
  """

  qkv: jax.Array
  out: jax.Array
  out_bias: jax.Array
  residual: jax.Array


def landmark_means(x: jax.Array, count: jax.Array, m: int) -> jax.Array:
  """Means of m blocks of each sequence, zero tokens in front counted.

  Args:
    x: [B, T, E].
    count: [B], int32 in [1, T].
    m: landmarks.

  Returns:
    [B, m, E].
  """
  size = x.shape[1]
  length = -(-count // m)[:, None]  # [B, 1]
  token = jnp.arange(size)[None] + m * length - count[:, None]
  block = jnp.where(jnp.arange(size)[None] < count[:, None], token // length, m)
  # Sums of runs of tokens: a sorted scatter-add, its gradient a gather.
  add = lambda x, block: jax.ops.segment_sum(
    x, block, m, indices_are_sorted=True
  )
  total = jax.vmap(add)(wide(x), block)
  return (total / length[..., None]).astype(x.dtype)


def pseudo_inverse(
  a: jax.Array,
  b: jax.Array | None = None,
  *,
  iterations: int = 6,
  shared_norm: bool = False,
) -> jax.Array:
  r"""Moore-Penrose inverse by an iteration of third order, or it times b.

  Z_0 = A^T / (|A|_1 |A|_inf);
  Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.

  With `b` the last step multiplies thin matrices only.

  Args:
    a: [..., H, m, m].
    b: [..., H, m, V], or None for the inverse itself.
    iterations: steps, >= 1.
    shared_norm: the largest norms of all heads, as in the public code (where
      they are even those of all sequences of a batch, so that a result depends
      on its batch mates); otherwise each head has its own.

  Returns:
    [..., H, m, m or V].

  Raises:
    ValueError: no iteration.

  References:
    Xiong, Zeng, Chakraborty et al. Nystromformer: A Nystrom-based algorithm for
    approximating self-attention, 2021.
  """
  if iterations < 1:
    raise ValueError(f'iterations={iterations} must be >= 1')
  axes = (-2, -1) if shared_norm else -1
  largest = lambda x: jnp.max(x, axes, keepdims=True)
  norm = largest(jnp.sum(jnp.abs(a), -1)) * largest(jnp.sum(jnp.abs(a), -2))
  z = jnp.swapaxes(a, -1, -2) / norm[..., None]
  eye = jnp.eye(a.shape[-1], dtype=a.dtype)[(None,) * (a.ndim - 2)]
  step = lambda z, az, b: z @ (13 * b - az @ (15 * b - az @ (7 * b - az @ b)))
  for _ in range(iterations - 1):
    az = a @ z
    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
  return step(z, a @ z, eye if b is None else b) / 4


class _Landmarks(NamedTuple):
  """What the landmarks know.

  Attributes:
    queries: [B, m, H, D], scaled.
    keys: [B, m, H, D].
    token_keys: [B, T, H, D].
    values: [B, T, H, D], zero in padding.
    softmax: [B, H, m, m], of landmarks over landmarks.
    log_total: [B, m, H], logarithm of the sums of the softmax over tokens, the
      zero tokens among them.
    context: [B, m, H, D], pinv(softmax) @ softmax over tokens @ values.
  """

  queries: jax.Array
  keys: jax.Array
  token_keys: jax.Array
  values: jax.Array
  softmax: jax.Array
  log_total: jax.Array
  context: jax.Array


def _heads(x, kernel):
  """[B, T, E] and [E, H, D] to [B, T, H, D]."""
  size, *heads = kernel.shape
  flat = kernel.reshape(size, -1)
  y = linear(x, flat, jnp.zeros(flat.shape[1], x.dtype))
  return y.reshape(*x.shape[:2], *heads)


def _landmarks(x, count, params, m, iterations, shared_norm):
  """Everything but the queries of single tokens."""
  real = jnp.arange(x.shape[1])[None] < count[:, None]
  x = jnp.where(real[..., None], x, 0)
  of = lambda x, i: _heads(x, params.qkv[:, i])
  means = landmark_means(x, count, m)
  queries = of(means, 0) * params.qkv.shape[-1] ** -0.5
  keys, token_keys, values = of(means, 1), of(x, 1), of(x, 2)
  found, lse = attention(
    queries, token_keys, values, scale=1.0, lengths=count, return_lse=True
  )
  # A zero token has logit zero and value zero.
  zeros = -(-count // m) * m - count
  log_zeros = jnp.log(jnp.maximum(zeros, 1).astype(x.dtype))
  log_total = jnp.where(
    (zeros > 0)[:, None, None],
    jnp.logaddexp(lse, log_zeros[:, None, None]),
    lse,
  )
  found *= jnp.exp(lse - log_total)[..., None]
  softmax = jax.nn.softmax(jnp.einsum('bmhd,bnhd->bhmn', queries, keys))
  context = pseudo_inverse(
    softmax,
    jnp.swapaxes(found, 1, 2),
    iterations=iterations,
    shared_norm=shared_norm,
  )
  return _Landmarks(
    queries,
    keys,
    token_keys,
    values,
    softmax,
    log_total,
    jnp.swapaxes(context, 1, 2),
  )


def nystrom_attention(
  x: jax.Array,
  count: jax.Array,
  params: NystromParams,
  *,
  m: int,
  iterations: int = 6,
  shared_norm: bool = False,
) -> jax.Array:
  r"""softmax(q k~^T) pinv(softmax(q~ k~^T)) softmax(q~ k^T) v + conv(v).

  Both softmaxes over tokens are `kernels_pallas.attention`.

  Args:
    x: [B, T, E], zero beyond `count`.
    count: [B], int32 in [1, T].
    params: of the layer.
    m: landmarks.
    iterations: of `pseudo_inverse`.
    shared_norm: see `pseudo_inverse`.

  Returns:
    [B, T, E]; what stands beyond `count` means nothing.
  """
  marks = _landmarks(x, count, params, m, iterations, shared_norm)
  queries = _heads(x, params.qkv[:, 0])
  looked: Any = attention(queries, marks.keys, marks.context)
  found = looked + _convolve(marks.values, params.residual)
  kernel = params.out.reshape(-1, params.out.shape[-1])
  return linear(found.reshape(*x.shape[:2], -1), kernel, params.out_bias)


def nystrom_first_token(
  x: jax.Array,
  count: jax.Array,
  params: NystromParams,
  *,
  m: int,
  iterations: int = 6,
  shared_norm: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The first token's row of `nystrom_attention`, and whom it looks at: O(m T).

  Args:
    x: [B, T, E], zero beyond `count`.
    count: [B], int32 in [1, T].
    params: of the layer.
    m: landmarks.
    iterations: of `pseudo_inverse`.
    shared_norm: see `pseudo_inverse`.

  Returns:
    row: [B, E].
    attention: [B, T], mean over heads; sums to about one together with the zero
      tokens, and may be negative.
  """
  marks = _landmarks(x, count, params, m, iterations, shared_norm)
  query = jnp.einsum('be,ehd->bhd', x[:, 0], params.qkv[:, 0])
  query *= params.qkv.shape[-1] ** -0.5
  share = jax.nn.softmax(jnp.einsum('bhd,bmhd->bhm', query, marks.keys))
  found = jnp.einsum('bhm,bmhd->bhd', share, marks.context)
  ahead = params.residual[params.residual.shape[0] // 2 :][: x.shape[1]]
  near = marks.values[:, : ahead.shape[0]]
  found += jnp.einsum('wh,bwhd->bhd', ahead, near)
  row = jnp.einsum('bhd,hde->be', found, params.out) + params.out_bias[None]
  inverse = pseudo_inverse(
    marks.softmax, iterations=iterations, shared_norm=shared_norm
  )
  through = jnp.einsum('bhm,bhmn->bhn', share, inverse)
  looks = _mixed_lookup(marks, through)
  real = jnp.arange(x.shape[1])[None] < count[:, None]
  return row, jnp.where(real, looks, 0)


def _mixed_lookup(marks: _Landmarks, through: jax.Array) -> jax.Array:
  """mean_h sum_m through_hm softmax_hmt, head by head: [B, T]."""

  def add(total, head):
    query, key, log_total, through = head
    logits = jnp.einsum('bmd,btd->bmt', query, key)
    weights = jnp.exp(logits - log_total[..., None])
    return total + jnp.einsum('bm,bmt->bt', through, weights), None

  first = lambda x, axis: jnp.moveaxis(x, axis, 0)
  heads = (
    first(marks.queries, 2),
    first(marks.token_keys, 2),
    first(marks.log_total, 2),
    first(through, 1),
  )
  start = jnp.zeros(marks.token_keys.shape[:2], through.dtype)
  return jax.lax.scan(add, start, heads)[0] / through.shape[1]


# Tokens of a block of `_convolve`: of the sizes tried the fastest on a CPU.
_BLOCK = 64


def _convolve(values: jax.Array, taps: jax.Array) -> jax.Array:
  """out_t = sum_w taps_w values_{t + w - W // 2}, zeros outside; per head.

  As products of a banded matrix per head with blocks of the sequence and what
  reaches into them: matrix products take a fraction of the time of W shifted
  sums, the more so backward.
  """
  batch, size, heads, width = values.shape
  reach = taps.shape[0] - 1
  block = max(_BLOCK, reach)
  count = -(-size // block)
  before = taps.shape[0] // 2
  after = (count + 1) * block - size - before
  padded = jnp.pad(values, ((0, 0), (before, after), (0, 0), (0, 0)))
  blocks = padded.reshape(batch, count + 1, block, heads, width)
  near = jnp.concatenate([blocks[:, :-1], blocks[:, 1:, :reach]], 2)
  tap = np.arange(block + reach)[None] - np.arange(block)[:, None]
  inside = (tap >= 0) & (tap <= reach)
  band = jnp.where(inside[..., None], taps[np.clip(tap, 0, reach)], 0)
  out = jnp.einsum('tsh,bnshd->bnthd', band, near)
  return out.reshape(batch, -1, heads, width)[:, :size]

r"""Nystrom self-attention of one sequence, without any T x T matrix.

Axes: T tokens (padded), E features, H heads, D features of a head (E = H D), m
landmarks.

Functions see one sequence of `count` tokens, the rest of the T is padding; use
`jax.vmap` for several. The sequence is divided into m blocks of l = ceil(count
/ m) tokens, the landmarks their means. As in the public code it is filled up in
front by F = m l - count zero tokens, which count as keys and in the means:
they enter here as numbers, not as rows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tmlib.ops.raster import depthwise

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
  """Means of m blocks of the sequence, zero tokens in front counted.

  Args:
    x: [T, E].
    count: [], int32 in [1, T].
    m: landmarks.

  Returns:
    [m, E].
  """
  size = x.shape[0]
  length = -(-count // m)
  within = jnp.arange(-(-size // m))[None]
  token = jnp.arange(m)[:, None] * length + within - (m * length - count)
  token = jnp.where(within < length, token, -1)
  valid = (token >= 0) & (token < count)
  rows = x[jnp.clip(token, 0, size - 1)]
  total = jnp.sum(jnp.where(valid[..., None], rows, 0), 1)
  return total / length.astype(x.dtype)


def pseudo_inverse(
  a: jax.Array, iterations: int = 6, shared_norm: bool = False
) -> jax.Array:
  r"""Moore-Penrose inverse by an iteration of third order.

  Z_0 = A^T / (|A|_1 |A|_inf);
  Z <- Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4.

  Args:
    a: [H, m, m].
    iterations: steps.
    shared_norm: the largest norms of all heads, as in the public code (where
      they are even those of all sequences of a batch, so that a result depends
      on its batch mates); otherwise each head has its own.

  Returns:
    [H, m, m].

  References:
    Xiong, Zeng, Chakraborty et al. Nystromformer: A Nystrom-based algorithm for
    approximating self-attention, 2021.
  """
  axes = (0, 1) if shared_norm else 1
  largest = lambda x: jnp.max(x, axes, keepdims=True)
  norm = largest(jnp.sum(jnp.abs(a), -1)) * largest(jnp.sum(jnp.abs(a), -2))
  z = jnp.swapaxes(a, -1, -2) / norm[..., None]
  eye = jnp.eye(a.shape[-1], dtype=a.dtype)[None]
  for _ in range(iterations):
    az = a @ z
    z = z @ (13 * eye - az @ (15 * eye - az @ (7 * eye - az))) / 4
  return z


class _Middle(NamedTuple):
  """What the landmarks know: keys [m, H, D], inverse and values."""

  keys: jax.Array
  inverse: jax.Array
  lookup: jax.Array  # [H, m, T], softmax of landmarks over tokens
  context: jax.Array  # [H, m, D], inverse @ lookup @ values
  values: jax.Array  # [T, H, D], zero in padding


def _landmarks(x, count, params, m, iterations, shared_norm):
  """Everything but the queries of single tokens."""
  size, (_, _, _, width) = x.shape[0], params.qkv.shape
  means = landmark_means(x, count, m)
  queries = jnp.einsum('me,ehd->mhd', means, params.qkv[:, 0]) * width**-0.5
  keys = jnp.einsum('me,ehd->mhd', means, params.qkv[:, 1])
  token_keys = jnp.einsum('te,ehd->thd', x, params.qkv[:, 1])
  values = jnp.einsum('te,ehd->thd', x, params.qkv[:, 2])
  real = jnp.arange(size) < count
  values = jnp.where(real[:, None, None], values, 0)
  # Zero tokens have logit zero and value zero.
  zeros = (-(-count // m) * m - count).astype(x.dtype)
  logits = jnp.einsum('mhd,thd->hmt', queries, token_keys)
  logits = jnp.where(real[None, None], logits, jnp.finfo(x.dtype).min)
  peak = jnp.maximum(jnp.max(logits, -1, keepdims=True), 0)
  peak = jax.lax.stop_gradient(peak)
  weight = jnp.where(real[None, None], jnp.exp(logits - peak), 0)
  total = jnp.sum(weight, -1, keepdims=True) + zeros * jnp.exp(-peak)
  lookup = weight / total
  small = jax.nn.softmax(jnp.einsum('mhd,nhd->hmn', queries, keys))
  inverse = pseudo_inverse(small, iterations, shared_norm)
  context = inverse @ jnp.einsum('hmt,thd->hmd', lookup, values)
  return _Middle(keys, inverse, lookup, context, values)


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

  Args:
    x: [T, E], zero beyond `count`.
    count: [], int32 in [1, T].
    params: of the layer.
    m: landmarks.
    iterations: of `pseudo_inverse`.
    shared_norm: see `pseudo_inverse`.

  Returns:
    [T, E]; what stands beyond `count` means nothing.
  """
  scale = params.qkv.shape[-1] ** -0.5
  middle = _landmarks(x, count, params, m, iterations, shared_norm)
  queries = jnp.einsum('te,ehd->thd', x, params.qkv[:, 0]) * scale
  logits = jnp.einsum('thd,mhd->htm', queries, middle.keys)
  found = jnp.einsum('htm,hmd->thd', jax.nn.softmax(logits), middle.context)
  found += _convolve(middle.values, params.residual)
  return jnp.einsum('thd,hde->te', found, params.out) + params.out_bias[None]


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
    x: [T, E], zero beyond `count`.
    count: [], int32 in [1, T].
    params: of the layer.
    m: landmarks.
    iterations: of `pseudo_inverse`.
    shared_norm: see `pseudo_inverse`.

  Returns:
    row: [E].
    attention: [T], mean over heads; sums to about one together with the zero
      tokens, and may be negative.
  """
  scale = params.qkv.shape[-1] ** -0.5
  middle = _landmarks(x, count, params, m, iterations, shared_norm)
  query = jnp.einsum('e,ehd->hd', x[0], params.qkv[:, 0]) * scale
  share = jax.nn.softmax(jnp.einsum('hd,mhd->hm', query, middle.keys))
  found = jnp.einsum('hm,hmd->hd', share, middle.context)
  ahead = params.residual[params.residual.shape[0] // 2 :][: x.shape[0]]
  found += jnp.einsum('wh,whd->hd', ahead, middle.values[: ahead.shape[0]])
  row = jnp.einsum('hd,hde->e', found, params.out) + params.out_bias
  through = jnp.einsum('hm,hmn->hn', share, middle.inverse)
  attention = jnp.einsum('hm,hmt->ht', through, middle.lookup)
  return row, jnp.mean(attention, 0)


def _convolve(values: jax.Array, taps: jax.Array) -> jax.Array:
  """out_t = sum_w taps_w values_{t + w - W // 2}, zeros outside; per head."""
  size, _, width = values.shape
  kernel = jnp.repeat(taps, width, 1)[:, None]  # [W, 1, E]
  flat = depthwise(values.reshape(size, 1, -1), kernel)
  return flat.reshape(values.shape)

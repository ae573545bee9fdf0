r"""Attention that knows the time, and noise that belongs to an example.

Axes: B examples, L positions, T queries (= L), H heads, D features, N buckets.

A query at position t sees positions s <= t. Its moment is now_t, and a key's
age is max(0, now_t - time_s): an event from the future counts as just now.
"""

import math

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp

from tmlib.ops.softmax import masked_softmax

__all__ = [
  'Block',
  'age_buckets',
  'ages',
  'causal_mask',
  'decay_attention',
  'dropout',
]


def dropout(
  x: jax.Array, rate: float, keys: jax.Array | None, layer: int
) -> jax.Array:
  """Inverted dropout from a key per example, so that batch mates never matter.

  Args:
    x: [B, ...], float.
    rate: in [0, 1).
    keys: [B] PRNG keys; None for no dropout.
    layer: a number per layer.

  Returns:
    [B, ...].
  """
  if keys is None or rate == 0:
    return x
  draw = lambda key: jax.random.bernoulli(
    jax.random.fold_in(key, layer), 1 - rate, x.shape[1:]
  )
  return jnp.where(jax.vmap(draw)(keys), x / (1 - rate), 0)


def ages(time: jax.Array, now: jax.Array) -> jax.Array:
  """Age of each event at each query: max(0, now_t - time_s).

  Args:
    time: [B, L] int32, seconds.
    now: [B, T] int32, seconds.

  Returns:
    [B, T, L] float32, seconds; the difference is taken in integers.
  """
  chex.assert_rank([time, now], 2)
  difference = jnp.maximum(now[:, :, None] - time[:, None, :], 0)
  return difference.astype(jnp.float32)


def age_buckets(age: jax.Array, count: int) -> jax.Array:
  """floor(log2(1 + age)) as one of `count` buckets, the last one open.

  Args:
    age: [...], seconds >= 0.
    count: N.

  Returns:
    [...] int32 in [0, N).
  """
  bucket = jnp.floor(jnp.log2(1 + age)).astype(jnp.int32)
  return jnp.clip(bucket, 0, count - 1)


def causal_mask(valid: jax.Array, window: int | None = None) -> jax.Array:
  """Which positions a query sees: real, not later, among the last `window`.

  Args:
    valid: [B, L] bool.
    window: positions seen, the own one included; None for all.

  Returns:
    [B, L, L] bool, query before key.
  """
  place = jnp.arange(valid.shape[1])
  back = place[:, None] - place[None]
  near = (back >= 0) if window is None else (back >= 0) & (back < window)
  return near[None] & valid[:, None, :]


def decay_attention(
  logits: jax.Array,
  values: jax.Array,
  age: jax.Array,
  log_half_life: jax.Array | None,
  mask: jax.Array,
) -> jax.Array:
  r"""Heads that forget at their own pace.

  a_{h,t,s} ~ exp(x_{h,s} - ln 2 age_{t,s} / exp(theta_h)) over the positions
  that the mask lets see. theta is the logarithm of the half-life: seconds
  themselves are too large for a step of Adam to change in float32.

  Args:
    logits: [B, H, L], content x.
    values: [B, L, H, D].
    age: [B, T, L], seconds >= 0.
    log_half_life: [H], theta, log seconds; None for no decay.
    mask: [B, T, L] bool.

  Returns:
    [B, T, H, D]; zero for a query that sees nothing.
  """
  chex.assert_rank([logits, values, age, mask], [3, 4, 3, 3])
  scores = jnp.broadcast_to(
    logits[:, :, None, :], (*logits.shape[:2], *age.shape[1:])
  )
  if log_half_life is not None:
    rate = math.log(2) * jnp.exp(-log_half_life)
    scores = scores - rate[None, :, None, None] * age[:, None]
  weights = masked_softmax(scores, mask[:, None])
  return jnp.einsum('bhts,bshd->bthd', weights, values)


class Block(nn.Module):
  """A causal transformer block, normalised before each part.

  Attributes:
    heads: H, divides D.
    hidden: units of the feed-forward part.
    dropout: rate.
    layer: number of the block, for its noise.
    buckets: N, a bias per head and age bucket; 0 for none.
    relative: whether there is a bias per head and distance.
  """

  heads: int
  hidden: int
  dropout: float
  layer: int
  buckets: int = 0
  relative: bool = False

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array,
    hot: jax.Array | None,
    keys: jax.Array | None,
  ) -> jax.Array:
    """Applies the block.

    Args:
      x: [B, L, D].
      mask: [B, L, L] bool.
      hot: [B, L, L, N], one-hot age buckets, where buckets > 0.
      keys: [B] PRNG keys, or None at evaluation.

    Returns:
      [B, L, D].
    """
    size, length, width = x.shape
    normed = nn.LayerNorm(name='norm1')(x)
    qkv = nn.Dense(3 * width, use_bias=False, name='qkv')(normed)
    q, k, v = jnp.split(
      qkv.reshape(size, length, 3 * self.heads, -1), 3, axis=2
    )
    scores = jnp.einsum('bthd,bshd->bhts', q, k) / math.sqrt(q.shape[-1])
    if self.buckets:
      table = self.param(
        'age', nn.initializers.zeros, (self.buckets, self.heads)
      )
      scores = scores + jnp.einsum('btsn,nh->bhts', hot, table)
    if self.relative:
      table = self.param(
        'distance', nn.initializers.zeros, (self.heads, length)
      )
      place = jnp.arange(length)
      back = jnp.maximum(place[:, None] - place[None], 0)
      scores = scores + table[:, back][None]
    weights = masked_softmax(scores, mask[:, None])
    weights = dropout(weights, self.dropout, keys, 3 * self.layer)
    mixed = jnp.einsum('bhts,bshd->bthd', weights, v).reshape(x.shape)
    mixed = nn.Dense(width, use_bias=False, name='out')(mixed)
    x = x + dropout(mixed, self.dropout, keys, 3 * self.layer + 1)
    normed = nn.LayerNorm(name='norm2')(x)
    inner = nn.gelu(nn.Dense(self.hidden, name='up')(normed))
    back_out = nn.Dense(width, name='down')(inner)
    return x + dropout(back_out, self.dropout, keys, 3 * self.layer + 2)

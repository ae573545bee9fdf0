r"""The backbone: profile, recent events and history become one user vector.

Axes: B examples, L positions, D features, H decay heads, P profile features.

Everything is computed at each position of a window at once, causally, so that
one pass trains L predictions. Time enters in attention alone: inside the
embedding it would differ from query to query.
"""

from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.ops.softmax import masked_softmax
from tmlib.recsys.layers import (
  Block,
  age_buckets,
  ages,
  causal_mask,
  decay_attention,
  dropout,
)
from tmlib.recsys.options import DUMoEConfig

__all__ = ['HALF_LIFE_PACE', 'UserEncoder', 'UserState']

_NORMAL = nn.initializers.normal(0.05)
# A half-life is start * exp(pace * shift): its logarithm has farther to go
# than a weight, and weight decay pulls the shift to the start, not to 1 s.
HALF_LIFE_PACE = 5.0


class UserState(NamedTuple):
  """What is known of a user at each position.

  Attributes:
    z: [B, L, D], fused.
    short: [B, L, D], of recent events.
    long: [B, L, D], of the history.
    static: [B, L, D], of the profile.
    drift: [B, L], 1 - cos(recent, history) in [0, 2]; 0 without history.
    mix: [B, L, 3], weights of static, short and long.
  """

  z: jax.Array
  short: jax.Array
  long: jax.Array
  static: jax.Array
  drift: jax.Array
  mix: jax.Array


def _cosine(a: jax.Array, b: jax.Array) -> jax.Array:
  """Cosine along the last axis; 0, with gradient 0, where one is zero."""
  tiny = 1e-6
  norm = lambda x: jnp.sqrt(jnp.sum(x * x, -1) + tiny**2)
  return jnp.sum(a * b, -1) / (norm(a) * norm(b))


class UserEncoder(nn.Module):
  """Backbone of `DUMoEConfig`; SASRec where all but the history is off."""

  config: DUMoEConfig

  @nn.compact
  def __call__(self, batch: dict, keys: jax.Array | None = None) -> UserState:
    """Encodes windows.

    Args:
      batch: of `training_windows` or `query_windows`.
      keys: [B] PRNG keys of the dropout; None at evaluation.

    Returns:
      The user at each position.
    """
    c = self.config
    valid = batch['item'] > 0
    events = self._events(batch, keys)
    age = ages(batch['time'], batch['now'])
    mask = causal_mask(valid)
    history = self._history(events, age, mask, valid, keys)
    zeros = jnp.zeros_like(history)
    short, drift = zeros, jnp.zeros(valid.shape)
    if c.short_path:
      short, pooled, drift = self._recent(events, age, mask, valid)
      history = history + nn.Dense(c.dim, use_bias=False, name='pool')(pooled)
    static = zeros
    if c.profile_dim:
      inner = nn.Dense(c.dim, name='profile')(batch['profile'])
      static = jnp.broadcast_to(inner[:, None], zeros.shape)
    z, mix = self._fuse(static, short, history, drift, valid)
    return UserState(z, short, history, static, drift, mix)

  def _events(self, batch, keys):
    """[B, L, D] embedded events."""
    c = self.config
    table = self.param('items', _NORMAL, (c.num_items + 1, c.dim))
    # Row 0 is padding: it is read nowhere and has no gradient.
    x = jnp.where((batch['item'] > 0)[..., None], table[batch['item']], 0)
    if c.modalities:
      gates, parts = [], []
      for name, _ in c.modalities:
        have = batch['present'][name]
        values = jnp.where(have[..., None], batch['features'][name], 0)
        parts.append(nn.Dense(c.dim, use_bias=False, name=f'in_{name}')(values))
        gates.append(have)
      gate = self.param('modality', nn.initializers.zeros, (len(gates),))
      have = jnp.stack(gates, -1)
      # All missing: weights of zero, so that the sum is zero.
      weights = masked_softmax(jnp.broadcast_to(gate, have.shape), have)
      x = x + jnp.einsum('blm,blmd->bld', weights, jnp.stack(parts, 2))
    if c.num_actions > 1:
      actions = self.param('actions', _NORMAL, (c.num_actions, c.dim))
      x = x + actions[batch['action']]
    if c.normalize_events:
      x = nn.LayerNorm(name='norm_events')(x)
    return dropout(x, c.dropout, keys, 1000)

  def _history(self, events, age, mask, valid, keys):
    """Causal transformer; zero at padding."""
    c, x = self.config, events
    if not c.relative:
      place = self.param('place', _NORMAL, (valid.shape[1], c.dim))
      x = x + place[None]
    hot = None
    if c.buckets:
      hot = jax.nn.one_hot(age_buckets(age, c.buckets), c.buckets)
    for i in range(c.blocks):
      x = Block(
        c.heads, c.hidden, c.dropout, i, c.buckets, c.relative, name=f'block{i}'
      )(x, mask, hot, keys)
    x = nn.LayerNorm(name='norm_history')(x)
    return jnp.where(valid[..., None], x, 0)

  def _recent(self, events, age, mask, valid):
    """Decay heads over recent events, all events pooled alike, the drift.

    Both pools are convex combinations of the same values, so that their
    cosine compares like with like.
    """
    c, heads = self.config, len(self.config.half_lives)
    size, length = valid.shape
    split = lambda x: x.reshape(size, length, heads, -1)
    values = split(nn.Dense(c.dim, use_bias=False, name='values')(events))
    keys = split(nn.Dense(c.dim, use_bias=False, name='keys')(events))
    query = self.param('queries', _NORMAL, (2, heads, keys.shape[-1]))
    content = jnp.einsum('qhd,blhd->qbhl', query, keys)
    content = content / np.sqrt(keys.shape[-1])
    shift = self.param('half_life_shift', nn.initializers.zeros, (heads,))
    start = np.log(np.asarray(c.half_lives, np.float64)).astype(np.float32)
    theta = jnp.asarray(start) + HALF_LIFE_PACE * shift
    window = causal_mask(valid, c.short)
    recent = decay_attention(content[0], values, age, theta, window)
    pooled = decay_attention(content[1], values, age, None, mask)
    flat = lambda x: x.reshape(size, length, c.dim)
    recent, pooled = flat(recent), flat(pooled)
    drift = jnp.where(valid, 1 - _cosine(recent, pooled), 0)
    short = nn.Dense(c.dim, use_bias=False, name='short')(recent)
    return short, pooled, drift

  def _fuse(self, static, short, history, drift, valid):
    c = self.config
    parts = jnp.stack([static, short, history], 2)
    used = np.array([c.profile_dim > 0, c.short_path, True])
    have = jnp.stack([jnp.ones_like(valid), valid, valid], -1)
    have = have & jnp.broadcast_to(used, have.shape)
    if used.sum() == 1:
      return history, jnp.where(have, 1.0, 0.0)
    logits = self.param('mix', nn.initializers.zeros, (3,))
    logits = jnp.broadcast_to(logits, have.shape)
    if c.fusion != 'static':
      seen = [static, short, history]
      if c.fusion == 'drift':
        seen.append(drift[..., None])
      logits = logits + nn.Dense(
        3, use_bias=False, kernel_init=nn.initializers.normal(0.02),
        name='fusion',
      )(jnp.concatenate(seen, -1))  # fmt: skip
    mix = masked_softmax(logits, have)
    return jnp.einsum('blm,blmd->bld', mix, parts), mix

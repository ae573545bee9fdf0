"""Attention problems, and their answers by loops in NumPy float64.

Axes: B sequences, T queries, S keys, H query heads, G key heads, D and V
features.
"""

import math
from typing import NamedTuple

import numpy as np

from kernels_pallas.softmax_attention import Rope, Spans


class Shape(NamedTuple):
  """B, T, S, H, G, D, V."""

  batch: int = 2
  queries: int = 150
  keys: int = 290
  heads: int = 2
  groups: int = 1
  dim: int = 32
  values: int = 32


def operands(shape, seed=0):
  """q, k, v in float64."""
  rng = np.random.default_rng(seed)
  b, t, s, h, g, d, v = shape
  return (
    rng.normal(size=(b, t, h, d)),
    rng.normal(size=(b, s, g, d)),
    rng.normal(size=(b, s, g, v)),
  )


def draw(shape, names, seed=0):
  """The options of `attention` that the names stand for, at random."""
  rng = np.random.default_rng(seed + 1)
  b, t, s = shape.batch, shape.queries, shape.keys
  integers = lambda low, high, size: rng.integers(low, high, size, np.int32)
  made = {
    'causal': {'causal': True, 'query_offset': s - t},
    'offset': {'causal': True, 'query_offset': integers(-9, s, b)},
    'window': {'window': 6},
    'scale': {'scale': 0.3},
    'lengths': {
      'lengths': np.r_[0, integers(0, s + 1, b)][:b].astype(np.int32)
    },
    'segments': {
      'segment_ids': (integers(0, 3, (b, t)), integers(0, 4, (b, s)))
    },
    # In the order of the sequence, some of them empty.
    'packed': {
      'segment_ids': tuple(
        np.sort(integers(0, 9, (b, n)), 1) // 2 * 2 for n in (t, s)
      )
    },
    'bias': {'key_bias': np.where(rng.random((b, s)) < 0.3, -np.inf, 1) + 0.0},
    'spans': {
      'spans': Spans(
        integers(0, 3, (b, t)), integers(0, 3, (b, s)), rng.random((b, t)) < 0.4
      )
    },
    'rope': {'rope': Rope()},
    'interleaved': {'rope': Rope(500.0, interleaved=True)},
  }
  options = {}
  for name in names:
    options |= made[name]
  if 'rope' in options:
    options['positions'] = integers(0, 3000, (b, t))
    options['key_positions'] = integers(0, 3000, (b, s))
  if 'key_bias' in options:
    options['key_bias'] *= rng.normal(size=(b, s)) ** 2
  return options


def turn(x, position, rope):
  """Rotates one vector by its position, pair by pair."""
  out, dim = np.array(x), len(x)
  for n in range(dim // 2):
    angle = position * rope.theta ** (-2 * n / dim)
    a, b = (2 * n, 2 * n + 1) if rope.interleaved else (n, n + dim // 2)
    out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
    out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
  return out


def sees(b, t, s, options):
  """Whether query t of sequence b attends to key s."""
  offset = np.asarray(options.get('query_offset', 0))
  lag = t + (offset[b] if offset.ndim else offset) - s
  window = options.get('window')
  answer = not (options.get('causal') and lag < 0)
  answer &= window is None or abs(lag) < window
  if 'lengths' in options:
    answer &= s < options['lengths'][b]
  if 'segment_ids' in options:
    of_query, of_key = options['segment_ids']
    answer &= of_query[b, t] == of_key[b, s]
  if 'spans' in options:
    spans = options['spans']
    same = spans.query[b, t] == spans.key[b, s]
    answer &= spans.dependent[b, t] or same
  return answer


def brute_force(q, k, v, options):
  """(out, lse) one query at a time."""
  batch, queries, heads, dim = q.shape
  share = heads // k.shape[2]
  scale = options.get('scale', 1 / math.sqrt(dim))
  rope = options.get('rope')
  if rope:
    q, k = q.copy(), k.copy()
    for x, name in ((q, 'positions'), (k, 'key_positions')):
      for b, n, h in np.ndindex(*x.shape[:3]):
        x[b, n, h] = turn(x[b, n, h], options[name][b, n], rope)
  out = np.zeros((batch, queries, heads, v.shape[3]))
  lse = np.full((batch, queries, heads), -np.inf)
  bias = options.get('key_bias', np.zeros((batch, k.shape[1])))
  for b, t in np.ndindex(batch, queries):
    seen = [s for s in range(k.shape[1]) if sees(b, t, s, options)]
    seen = [s for s in seen if bias[b, s] > -np.inf]
    for h in range(heads if seen else 0):
      logits = scale * (k[b, seen, h // share] @ q[b, t, h]) + bias[b, seen]
      weights = np.exp(logits - logits.max())
      lse[b, t, h] = logits.max() + np.log(weights.sum())
      out[b, t, h] = weights @ v[b, seen, h // share] / weights.sum()
  return out, lse

"""Segment pooling in plain jax.numpy: the truth, and the path of CPUs.

A row is reduced through a table of members [B, N, S]: a scatter-add into few
segments is slow on accelerators and unordered on some of them.

Axes: B rows of N instances, S segments per row, D features, A units.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.graph.pooling.gate import (
  Gate,
  gate_scores,
  gate_slopes,
  gate_units,
  wide,
)

__all__ = ['backward', 'forward']


def _clean(gate: Gate, valid: jax.Array) -> Gate:
  """Zeros for instances of no segment: 0 * NaN in a gradient is NaN."""
  clean = lambda x: jnp.where(valid[..., None], x, 0)
  u = None if gate.sigmoid is None else clean(gate.sigmoid)
  return Gate(clean(gate.tanh), u, gate.weight)


def forward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  num_segments: int,
) -> tuple[jax.Array, jax.Array]:
  """Softmax-weighted means, and logarithms of sums of exponentials.

  Args:
    values: [B, N, D].
    scores: [B, N], or None with a gate.
    gate: in place of scores.
    ids: [B, N] int32; outside [0, S) for rows of no segment.
    num_segments: S.

  Returns:
    pooled: [B, S, D], float32 or wider; zeros for an empty segment.
    lse: [B, S], float32 or wider; -inf for an empty segment.
  """
  segments = jnp.arange(num_segments, dtype=ids.dtype)
  member = ids[..., None] == segments[None, None]
  valid = jnp.any(member, -1)
  if gate is not None:
    scores = gate_scores(_clean(gate, valid))
  dtype = wide(values, scores)
  scores = scores.astype(dtype)
  scores = jnp.where(valid, scores, -jnp.inf)
  logits = jnp.where(member, scores[..., None], -jnp.inf)
  peak = jnp.max(logits, 1, initial=-jnp.inf)
  peak = jax.lax.stop_gradient(jnp.where(peak > -jnp.inf, peak, 0))
  # One segment per row, so a sum over where() is a lookup without a gather.
  own = jnp.sum(jnp.where(member, peak[:, None], 0), -1)
  weights = jnp.where(valid, jnp.exp(scores - own), 0)
  table = jnp.where(member, weights[..., None], 0)
  total = jnp.sum(table, 1)
  safe = jnp.where(total > 0, total, 1)
  # where, not multiply: 0 * NaN in a padded row is NaN.
  clean = jnp.where(valid[..., None], values, 0).astype(dtype)
  pooled = jnp.einsum(
    'bns,bnd->bsd', table, clean, precision=jax.lax.Precision.HIGHEST
  )
  lse = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)
  return pooled / safe[..., None], lse


def backward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  g: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
) -> tuple[jax.Array, jax.Array | None, Gate | None]:
  """Gradients, with a_n = exp(e_n - lse_s) for a row n of segment s.

  dvalues_n = a_n g_s,    de_n = a_n (<g_s, values_n> - delta_s).

  Args:
    values: [B, N, D].
    scores: as in `forward`.
    gate: as in `forward`.
    ids: [B, N] int32.
    g: [B, S, D], cotangent of pooled.
    lse: [B, S], +inf for an empty segment.
    delta: [B, S], <g_s, pooled_s> less the cotangent of lse_s.

  Returns:
    dvalues: [B, N, D].
    de: [B, N], or None with a gate.
    dgate: of the gate's arrays, its weight [B, A] still to be summed; or None.
  """
  valid = (ids >= 0) & (ids < lse.shape[1])
  if gate is not None:
    gate = _clean(gate, valid)
  e: Any = gate_scores(gate) if gate is not None else scores
  dtype = wide(values, e)
  own = jnp.where(valid, ids, 0)
  row = lambda x: jnp.take_along_axis(x, own, 1)
  a = jnp.where(valid, jnp.exp(jnp.where(valid, e, 0) - row(lse)), 0)
  near = jax.vmap(lambda g, own: g[own])(g.astype(dtype), own)
  clean = jnp.where(valid[..., None], values, 0).astype(dtype)
  dvalues = a[..., None] * near
  de = a * (jnp.sum(near * clean, -1) - row(delta))
  if gate is None:
    return dvalues.astype(values.dtype), de.astype(e.dtype), None
  return dvalues.astype(values.dtype), None, _gate_backward(gate, de)


def _gate_backward(gate: Gate, de: jax.Array) -> Gate:
  t, u = gate.tanh.astype(de.dtype), gate.sigmoid
  u = None if u is None else u.astype(de.dtype)
  slopes = gate_slopes(t, u)
  outer = de[..., None] * gate.weight.astype(de.dtype)[None, None]
  of = lambda x, slope: (outer * slope).astype(x.dtype)
  du = None if gate.sigmoid is None else of(gate.sigmoid, slopes[1])
  dweight = jnp.einsum(
    'bn,bna->ba', de, gate_units(t, u), precision=jax.lax.Precision.HIGHEST
  )
  return Gate(of(gate.tanh, slopes[0]), du, dweight)

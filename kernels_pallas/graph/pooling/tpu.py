"""Segment pooling for TPUs (Mosaic).

Axes: B rows, m blocks of n instances, c chunks of s segments, D features and A
units, padded to whole lanes.

The last axis of the grid adds blocks of instances to sums that stay in VMEM,
one for each segment. A block is a tile [s, n] of logits, -inf where an instance
is no member, so that the order of instances does not matter; with more than one
chunk, a block visits those between its lowest and its highest segment only.
Instances are the lanes of a tile; what belongs to one lies in HBM as a row.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import dot, precision, softmax_step
from kernels_pallas.common.padding import pad_axis, round_up
from kernels_pallas.graph.pooling.gate import Gate, gate_slopes, gate_units

__all__ = ['backward', 'forward']

LANES = 128
# Bytes of a block of instances, in all arrays.
_BLOCK = 2**20


class _Plan(NamedTuple):
  """Sizes of a call: n, m, s, c of the module docstring."""

  n: int
  m: int
  s: int
  c: int


class _Operands(NamedTuple):
  """Inputs of a call, their specs, or references to their tiles."""

  values: Any
  ids: Any
  scores: Any = None
  tanh: Any = None
  sigmoid: Any = None
  weight: Any = None
  g: Any = None
  lse: Any = None
  delta: Any = None


def _prepare(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  num_segments: int,
) -> tuple[_Plan, _Operands]:
  """Whole lanes; whole blocks of what is small."""
  count = values.shape[1]
  lanes = lambda x: pad_axis(x, 2, round_up(x.shape[2], LANES))
  wide = [lanes(x) for x in (values, *(gate or ())[:2]) if x is not None]
  size = sum(x.shape[2] * x.dtype.itemsize for x in wide)
  n = max(
    LANES, min(_BLOCK // size // LANES * LANES, 1024, round_up(count, LANES))
  )
  m = -(-count // n)
  s = min(LANES, round_up(num_segments, 8))
  plan = _Plan(n, m, s, -(-num_segments // s))
  # A block must not be longer than its array; the last may reach beyond it.
  wide = [pad_axis(x, 1, n) if count < n else x for x in wide]
  row = lambda x, fill: pad_axis(x[:, None], 2, n * m, fill)
  operands = _Operands(wide[0], row(ids, -1))
  if gate is None:
    return plan, operands._replace(scores=row(scores.astype(jnp.float32), 0))
  weight = pad_axis(gate.weight.astype(jnp.float32)[None], 0, 8)
  return plan, operands._replace(
    tanh=wide[1],
    sigmoid=None if gate.sigmoid is None else wide[2],
    weight=pad_axis(weight, 1, wide[1].shape[2]),
  )


def _specs(plan: _Plan, operands: _Operands) -> _Operands:
  def block(x):
    return None if x is None else pl.BlockSpec((None, plan.n, x.shape[2]), at)

  def table(x):
    if x is None:
      return None
    return pl.BlockSpec((None, *x.shape[1:]), lambda b, j: (b, 0, 0))

  at = lambda b, j: (b, j, 0)
  row = pl.BlockSpec((None, 1, plan.n), lambda b, j: (b, 0, j))
  x = operands
  weight = None
  if x.weight is not None:
    weight = pl.BlockSpec(x.weight.shape, lambda b, j: (0, 0))
  return _Operands(
    block(x.values),
    row,
    row,
    block(x.tanh),
    block(x.sigmoid),
    weight,
    table(x.g),
    table(x.lse),
    table(x.delta),
  )


def _launch(
  body: Callable[..., None],
  plan: _Plan,
  operands: _Operands,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  name: str,
  interpret: Any,
) -> list[jax.Array]:
  batch, _, features = operands.values.shape
  logits = batch * plan.n * plan.m * plan.s
  return launch(
    functools.partial(body, plan=plan),
    operands,
    _specs(plan, operands),
    outputs,
    scratch,
    grid=(batch, plan.m),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * logits * features,
      bytes_accessed=sum(x.nbytes for x in operands if x is not None),
      transcendentals=logits,
    ),
    interpret=interpret,
    name=name,
  )


def _column(row: jax.Array) -> jax.Array:
  """[1, N] -> [N, 128], the same number in all lanes."""
  return jnp.broadcast_to(row, (LANES, row.shape[1])).T


def _wide(column: jax.Array, size: int) -> jax.Array:
  """[N, 128] -> [N, size]."""
  return column if size == LANES else jnp.tile(column, (1, size // LANES))


class _Block(NamedTuple):
  """A block of instances: zeros where they belong to no segment."""

  ids: jax.Array
  values: jax.Array
  scores: jax.Array
  tanh: jax.Array | None
  sigmoid: jax.Array | None


def _read(refs: _Operands) -> _Block:
  ids = refs.ids[...]
  column = _column(ids)

  def clean(ref, dtype=None):
    if ref is None:
      return None
    x = ref[...] if dtype is None else ref[...].astype(dtype)
    # where, not multiply: 0 * NaN is NaN, and beyond the end is anything.
    return jnp.where(_wide(column, x.shape[1]) >= 0, x, 0)

  values: Any = clean(refs.values)
  if refs.scores is not None:
    return _Block(ids, values, refs.scores[...], None, None)
  t: Any = clean(refs.tanh, jnp.float32)
  u = clean(refs.sigmoid, jnp.float32)
  scores = dot(refs.weight[...], gate_units(t, u), transpose=True)[:1]
  return _Block(ids, values, scores, t, u)


def _over_chunks(
  plan: _Plan, ids: jax.Array, step: Callable[[Any, jax.Array], None]
) -> None:
  """Calls step(rows, member) for the chunks that the block may touch."""

  def chunk(c):
    start = c * plan.s
    if not isinstance(c, int):
      start = pl.multiple_of(start, plan.s)
    segment = jax.lax.broadcasted_iota(jnp.int32, (plan.s, plan.n), 0)
    step(pl.ds(start, plan.s), ids == segment + start)

  if plan.c == 1:
    chunk(0)
    return
  # Float32 holds these numbers, and reduces on every chip.
  known = ids >= 0
  number = ids.astype(jnp.float32)
  size = np.int32(plan.s)
  low = jnp.min(jnp.where(known, number, plan.c * plan.s)).astype(jnp.int32)
  high = jnp.max(jnp.where(known, number, -1)).astype(jnp.int32)
  first = jax.lax.div(low, size)
  # Truncated, not floored: -1 must not be chunk 0.
  end = jax.lax.div(high + size, size)
  jax.lax.fori_loop(first, end, lambda c, _: chunk(c), None)


def _all_chunks(plan: _Plan, step: Callable[[Any], None]) -> None:
  """Calls step(rows) for all chunks of segments."""
  if plan.c == 1:
    step(pl.ds(0, plan.s))
    return

  def chunk(c, _):
    step(pl.ds(pl.multiple_of(c * plan.s, plan.s), plan.s))

  jax.lax.fori_loop(0, plan.c, chunk, None)


def _forward_body(refs, outputs, space, *, plan):
  (out, lse), j = outputs, pl.program_id(1)
  peak, total, acc = space['peak'], space['total'], space['acc']

  @pl.when(j == 0)
  def _():
    peak[...] = jnp.full_like(peak, -jnp.inf)
    total[...] = jnp.zeros_like(total)
    acc[...] = jnp.zeros_like(acc)

  block = _read(refs)

  def step(rows, member):
    x = jnp.where(member, block.scores, -jnp.inf)
    weights, decay, peak[rows, :], total[rows, :] = softmax_step(
      x,
      peak[rows, :],
      total[rows, :],
      1,
      jnp.exp,
      lambda shift: _wide(shift, plan.n),
    )
    decayed = acc[rows, :] * _wide(decay, acc.shape[1])
    acc[rows, :] = decayed + dot(weights, block.values)

  _over_chunks(plan, block.ids, step)

  def finish(rows):
    seen = total[rows, :] > 0
    safe = jnp.where(seen, total[rows, :], 1.0)
    out[rows, :] = acc[rows, :] / _wide(safe, acc.shape[1])
    lse[rows, :] = jnp.where(seen, peak[rows, :] + jnp.log(safe), -jnp.inf)

  @pl.when(j == plan.m - 1)
  def _():
    # Chunk by chunk: all at once would not fit into registers.
    _all_chunks(plan, finish)


def forward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  num_segments: int,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """The function of `reference.forward`."""
  plan, operands = _prepare(values, scores, gate, ids, num_segments)
  batch, size, width = values.shape[0], plan.s * plan.c, values.shape[2]
  wide = operands.values.shape[2]
  of_row = lambda lanes: (
    jax.ShapeDtypeStruct((batch, size, lanes), jnp.float32),
    pl.BlockSpec((None, size, lanes), lambda b, j: (b, 0, 0)),
  )
  pooled, lse = _launch(
    _forward_body,
    plan,
    operands,
    [of_row(wide), of_row(LANES)],
    {
      'peak': pltpu.VMEM((size, LANES), jnp.float32),
      'total': pltpu.VMEM((size, LANES), jnp.float32),
      'acc': pltpu.VMEM((size, wide), jnp.float32),
    },
    'segment_pool_forward',
    interpret,
  )
  return pooled[:, :num_segments, :width], lse[:, :num_segments, 0]


def _outer(row: jax.Array, other: jax.Array) -> jax.Array:
  """[8, N], [8, A] -> [N, A], of which only the first rows are not zero."""
  return jax.lax.dot_general(
    row,
    other,
    (((0,), (0,)), ((), ())),
    precision=jax.lax.Precision.HIGHEST,
    preferred_element_type=jnp.float32,
  )


def _backward_body(refs, outputs, space, *, plan):
  block = _read(refs)
  acc, row = space['acc'], space['row']
  acc[...] = jnp.zeros_like(acc)
  row[...] = jnp.zeros_like(row)

  def step(rows, member):
    x = jnp.where(member, block.scores, -jnp.inf)
    weights = jnp.exp(x - _wide(refs.lse[rows, :], plan.n))
    g = refs.g[rows, :]
    acc[...] += jax.lax.dot_general(
      weights.astype(g.dtype),
      g,
      (((0,), (0,)), ((), ())),
      precision=precision(g.dtype),
      preferred_element_type=jnp.float32,
    )
    slope = dot(g, block.values, transpose=True)
    slope = weights * (slope - _wide(refs.delta[rows, :], plan.n))
    row[...] += jnp.sum(slope, 0, keepdims=True)

  _over_chunks(plan, block.ids, step)
  outputs[0][...] = acc[...].astype(outputs[0].dtype)
  if refs.scores is not None:
    outputs[1][...] = row[...]
    return
  _gate_backward(refs, block, row[...], outputs[1:])


def _gate_backward(refs, block, row, outputs):
  """Outputs: of the weight, of tanh, of sigmoid if it is there."""
  first = jax.lax.broadcasted_iota(jnp.int32, (8, row.shape[1]), 0) == 0
  eight = jnp.where(first, row, 0.0)
  outer = _outer(eight, refs.weight[...])
  slopes: Any = gate_slopes(block.tanh, block.sigmoid)
  for out, slope in zip(outputs[1:], slopes, strict=False):
    out[...] = (outer * slope).astype(out.dtype)

  @pl.when(pl.program_id(1) == 0)
  def _():
    outputs[0][...] = jnp.zeros_like(outputs[0])

  outputs[0][...] += dot(eight, gate_units(block.tanh, block.sigmoid))


def backward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  g: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array | None, Gate | None]:
  """The function of `reference.backward`."""
  plan, operands = _prepare(values, scores, gate, ids, g.shape[1])
  batch, size = values.shape[0], plan.s * plan.c
  wide = operands.values.shape[2]
  lanes = lambda x, fill: jnp.broadcast_to(
    pad_axis(x, 1, size, fill)[..., None], (batch, size, LANES)
  ).astype(jnp.float32)
  operands = operands._replace(
    g=pad_axis(pad_axis(g.astype(values.dtype), 2, wide), 1, size),
    lse=lanes(lse, jnp.inf),
    delta=lanes(delta, 0),
  )
  specs = _specs(plan, operands)
  like = lambda x, spec: (jax.ShapeDtypeStruct(x.shape, x.dtype), spec)
  outputs = [like(operands.values, specs.values)]
  if gate is None:
    outputs.append(like(operands.scores, specs.scores))
  else:
    width = operands.weight.shape[1]
    outputs += [
      (
        jax.ShapeDtypeStruct((batch, 8, width), jnp.float32),
        pl.BlockSpec((None, 8, width), lambda b, j: (b, 0, 0)),
      ),
      like(operands.tanh, specs.tanh),
    ]
    if operands.sigmoid is not None:
      outputs.append(like(operands.sigmoid, specs.sigmoid))
  dvalues, *rest = _launch(
    _backward_body,
    plan,
    operands,
    outputs,
    {
      'acc': pltpu.VMEM((plan.n, wide), jnp.float32),
      'row': pltpu.VMEM((1, plan.n), jnp.float32),
    },
    'segment_pool_backward',
    interpret,
  )
  cut = lambda x, like: x[:, : like.shape[1], : like.shape[2]]
  dvalues = cut(dvalues, values)
  if gate is None:
    row = rest[0][:, 0, : scores.shape[1]]
    return dvalues, row.astype(scores.dtype), None
  dweight, dtanh, *dsigmoid = rest
  u = None if gate.sigmoid is None else cut(dsigmoid[0], gate.sigmoid)
  units = gate.weight.shape[0]
  return dvalues, None, Gate(cut(dtanh, gate.tanh), u, dweight[:, 0, :units])

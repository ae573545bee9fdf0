"""Segment pooling for GPUs (Triton).

Axes: B rows, m blocks of n instances, S segments in P parts, D features in
tiles of d, A units in tiles of a.

Forward, a program walks its share of the blocks that hold instances of its one
segment; the parts of a segment are merged by their sums of exponentials.
Backward, a program takes one block and gathers what belongs to the segment of
each instance. No atomics: the same result every time. The grid has one axis,
which leaves two of Triton's three to `jax.vmap`. Instances are gathered by
clamped indices, so that nothing large needs padding. Pallas on Triton is
deprecated since jax 0.11; this file alone depends on it.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.common.calls import launch
from kernels_pallas.common.padding import pad_axis, round_up
from kernels_pallas.graph.pooling.gate import Gate, gate_slopes, gate_units

__all__ = ['backward', 'forward']

# Fewer warps spill their registers in single precision, and on a B200.
_PARAMS = {'num_warps': 8, 'num_stages': 2}
# Instances per block, columns per tile.
_ROWS, _COLUMNS = 32, 128
# Programs that fill a GPU.
_PROGRAMS = 1024


class _Plan(NamedTuple):
  """Sizes of a call: N, m, S, P, D, d, A, a of the module docstring."""

  count: int
  m: int
  segments: int
  parts: int
  features: int
  d: int
  units: int
  a: int


class _Operands(NamedTuple):
  """Inputs of a call, their specs, or references to the part of a row."""

  values: Any
  ids: Any
  scores: Any = None
  tanh: Any = None
  sigmoid: Any = None
  weight: Any = None
  bounds: Any = None
  g: Any = None
  lse: Any = None
  delta: Any = None


def _tile(size: int) -> int:
  return min(_COLUMNS, max(16, pl.next_power_of_2(size)))


def _prepare(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  num_segments: int,
) -> tuple[_Plan, _Operands]:
  batch, count, features = values.shape
  m = -(-count // _ROWS)
  parts = max(1, min(_PROGRAMS // (batch * num_segments), m // 4))
  units = 0 if gate is None else gate.weight.shape[0]
  plan = _Plan(
    count,
    m,
    num_segments,
    parts,
    features,
    _tile(features),
    units,
    _tile(units),
  )
  row = lambda x, fill: pad_axis(x, 1, m * _ROWS, fill)
  operands = _Operands(values, row(ids, -1))
  if gate is None:
    return plan, operands._replace(scores=row(scores.astype(jnp.float32), 0))
  weight = gate.weight.astype(jnp.float32)
  return plan, operands._replace(
    tanh=gate.tanh,
    sigmoid=gate.sigmoid,
    weight=pad_axis(weight, 0, round_up(units, plan.a)),
  )


def _specs(plan: _Plan, operands: _Operands, programs: int) -> _Operands:
  """All of a row, for each of the `programs` that it has."""
  size = np.int32(programs)

  def whole(x):
    if x is None:
      return None
    index = lambda p: (jax.lax.div(p, size), *[0] * (x.ndim - 1))
    return pl.BlockSpec((None, *x.shape[1:]), index)

  specs = _Operands(*(whole(x) for x in operands))
  if operands.weight is None:
    return specs
  return specs._replace(weight=pl.BlockSpec(operands.weight.shape, lambda p: 0))


def _bounds(ids: jax.Array, plan: _Plan) -> jax.Array:
  """[B, 2, S]: first and one past the last block that may hold a segment."""
  blocks = ids.reshape(ids.shape[0], plan.m, _ROWS)
  low = jnp.min(jnp.where(blocks < 0, plan.segments, blocks), 2)
  high = jnp.max(blocks, 2)
  segment = jnp.arange(plan.segments, dtype=ids.dtype)[None, None]
  holds = (low[..., None] <= segment) & (segment <= high[..., None])
  place = jnp.arange(plan.m, dtype=ids.dtype)[None, :, None]
  first = jnp.min(jnp.where(holds, place, plan.m), 1)
  end = jnp.max(jnp.where(holds, place + 1, 0), 1)
  return jnp.stack([first, jnp.maximum(end, first)], 1)


def _load(ref: Any, rows: Any, columns: jax.Array, size: int) -> jax.Array:
  """Rows and columns of a matrix of `size` columns, zeros beyond them."""
  if size % columns.shape[0] == 0:
    return ref[rows[:, None], columns[None]].astype(jnp.float32)
  near = jnp.minimum(columns, size - 1)
  x = ref[rows[:, None], near[None]].astype(jnp.float32)
  return jnp.where((columns < size)[None], x, 0.0)


def _columns(size: int, tile: int) -> list[jax.Array]:
  return [c * tile + jnp.arange(tile) for c in range(-(-size // tile))]


def _units(plan: _Plan, refs: _Operands, rows: Any, columns: jax.Array):
  """The pair (t, u) of a tile of the gate."""
  t = _load(refs.tanh, rows, columns, plan.units)
  if refs.sigmoid is None:
    return t, None
  return t, _load(refs.sigmoid, rows, columns, plan.units)


def _scores(plan: _Plan, refs: _Operands, rows: Any, near: Any) -> jax.Array:
  """[n], of a block; `near` are its rows within the arrays."""
  if refs.scores is not None:
    return refs.scores[rows]
  total = jnp.zeros(_ROWS, jnp.float32)
  for columns in _columns(plan.units, plan.a):
    units = gate_units(*_units(plan, refs, near, columns))
    total += jnp.sum(units * refs.weight[columns][None], 1)
  return total


def _forward_body(refs, outputs, space, *, plan):
  del space
  out, lse = outputs
  program = jax.lax.rem(pl.program_id(0), np.int32(plan.segments * plan.parts))
  segment = jax.lax.div(program, np.int32(plan.parts))
  part = jax.lax.rem(program, np.int32(plan.parts))
  first, end = refs.bounds[0, segment], refs.bounds[1, segment]
  share = jax.lax.div(end - first + (plan.parts - 1), np.int32(plan.parts))
  first = first + part * share
  end = jnp.minimum(end, first + share)
  tiles = _columns(plan.features, plan.d)

  def add(j, carry):
    peak, total, acc = carry
    rows = j * _ROWS + jnp.arange(_ROWS)
    near = jnp.minimum(rows, plan.count - 1)
    member = refs.ids[rows] == segment
    x = _scores(plan, refs, rows, near)
    x = jnp.where(member, x, -jnp.inf)
    highest = jnp.maximum(peak, jnp.max(x))
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights, decay = jnp.exp(x - shift), jnp.exp(peak - shift)
    total = total * decay + jnp.sum(weights)

    def pool(acc, columns):
      h = _load(refs.values, near, columns, plan.features)
      h = jnp.where(member[:, None], h, 0.0)
      return acc * decay + jnp.sum(weights[:, None] * h, 0)

    acc = [pool(a, c) for a, c in zip(acc, tiles, strict=True)]
    return highest, total, acc

  start = (
    jnp.full((), -jnp.inf, jnp.float32),
    jnp.zeros((), jnp.float32),
    [jnp.zeros(plan.d, jnp.float32) for _ in tiles],
  )
  peak, total, acc = jax.lax.fori_loop(first, end, add, start)
  safe = jnp.where(total > 0, total, 1.0)
  for tile, pooled in enumerate(acc):
    out[pl.ds(tile * plan.d, plan.d)] = pooled / safe
  lse[...] = jnp.where(total > 0, peak + jnp.log(safe), -jnp.inf)


def forward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  num_segments: int,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
  """The function of `reference.forward`."""
  plan, operands = _prepare(values, scores, gate, ids, num_segments)
  operands = operands._replace(bounds=_bounds(operands.ids, plan))
  batch, programs = values.shape[0], plan.segments * plan.parts
  wide = round_up(plan.features, plan.d)
  pooled, lse = launch(
    functools.partial(_forward_body, plan=plan),
    operands,
    _specs(plan, operands, programs),
    [
      (
        jax.ShapeDtypeStruct((batch * programs, wide), jnp.float32),
        pl.BlockSpec((None, wide), lambda p: (p, 0)),
      ),
      (
        jax.ShapeDtypeStruct((batch * programs,), jnp.float32),
        pl.BlockSpec((None,), lambda p: (p,)),
      ),
    ],
    {},
    grid=(batch * programs,),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name='segment_pool_forward',
  )
  lse = lse.reshape(batch, num_segments, plan.parts)
  pooled = pooled.reshape(batch, num_segments, plan.parts, wide)
  pooled = pooled[..., : plan.features]
  if plan.parts == 1:
    return pooled[:, :, 0], lse[:, :, 0]
  peak = jnp.max(lse, -1, keepdims=True)
  share = jnp.exp(lse - jnp.where(peak == -jnp.inf, 0.0, peak))
  total = jnp.sum(share, -1, keepdims=True)
  share = share / jnp.where(total > 0, total, 1.0)
  whole = jnp.where(total > 0, peak + jnp.log(total), -jnp.inf)
  return jnp.sum(share[..., None] * pooled, 2), whole[..., 0]


def _backward_body(refs, outputs, space, *, plan):
  del space
  block = jax.lax.rem(pl.program_id(0), np.int32(plan.m))
  rows = block * _ROWS + jnp.arange(_ROWS)
  near = jnp.minimum(rows, plan.count - 1)
  ids = refs.ids[rows]
  valid, own = ids >= 0, jnp.maximum(ids, 0)
  x = _scores(plan, refs, rows, near)
  weights = jnp.exp(jnp.where(valid, x - refs.lse[own], -jnp.inf))
  slope = jnp.zeros(_ROWS, jnp.float32)
  for tile, columns in enumerate(_columns(plan.features, plan.d)):
    g = _load(refs.g, own, columns, plan.features)
    h = _load(refs.values, near, columns, plan.features)
    slope += jnp.sum(jnp.where(valid[:, None], g * h, 0.0), 1)
    dh = jnp.where(valid[:, None], weights[:, None] * g, 0.0)
    place = pl.ds(tile * plan.d, plan.d)
    outputs[0][:, place] = dh.astype(outputs[0].dtype)
  de = jnp.where(valid, weights * (slope - refs.delta[own]), 0.0)
  if refs.scores is not None:
    outputs[1][...] = de
    return
  _gate_backward(refs, plan, near, valid, de, outputs[1:])


def _gate_backward(refs, plan, near, valid, de, outputs):
  """Outputs: of the weight, of tanh, of sigmoid if it is there."""
  for tile, columns in enumerate(_columns(plan.units, plan.a)):
    place = pl.ds(tile * plan.a, plan.a)
    clean: Any = lambda x: (
      None if x is None else jnp.where(valid[:, None], x, 0.0)
    )
    t, u = (clean(x) for x in _units(plan, refs, near, columns))
    outer = de[:, None] * refs.weight[columns][None]
    outputs[0][place] = jnp.sum(de[:, None] * gate_units(t, u), 0)
    slopes: Any = gate_slopes(t, u)
    for out, slope in zip(outputs[1:], slopes, strict=False):
      out[:, place] = (outer * slope).astype(out.dtype)


def backward(
  values: jax.Array,
  scores: Any,
  gate: Gate | None,
  ids: jax.Array,
  g: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  interpret: bool = False,
) -> tuple[jax.Array, jax.Array | None, Gate | None]:
  """The function of `reference.backward`."""
  plan, operands = _prepare(values, scores, gate, ids, g.shape[1])
  operands = operands._replace(g=g, lse=lse, delta=delta)
  batch, size = values.shape[0], np.int32(plan.m)

  def blocks(x, tile):
    width = round_up(x.shape[2], tile)
    return (
      jax.ShapeDtypeStruct((batch, plan.m * _ROWS, width), x.dtype),
      pl.BlockSpec(
        (None, _ROWS, width),
        lambda p: (jax.lax.div(p, size), jax.lax.rem(p, size), 0),
      ),
    )

  outputs = [blocks(values, plan.d)]
  if gate is None:
    outputs.append(
      (
        jax.ShapeDtypeStruct((batch, plan.m * _ROWS), jnp.float32),
        pl.BlockSpec(
          (None, _ROWS), lambda p: (jax.lax.div(p, size), jax.lax.rem(p, size))
        ),
      )
    )
  else:
    width = round_up(plan.units, plan.a)
    outputs += [
      (
        jax.ShapeDtypeStruct((batch * plan.m, width), jnp.float32),
        pl.BlockSpec((None, width), lambda p: (p, 0)),
      ),
      blocks(gate.tanh, plan.a),
    ]
    if gate.sigmoid is not None:
      outputs.append(blocks(gate.sigmoid, plan.a))
  dvalues, *rest = launch(
    functools.partial(_backward_body, plan=plan),
    operands,
    _specs(plan, operands, plan.m),
    outputs,
    {},
    grid=(batch * plan.m,),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name='segment_pool_backward',
  )
  cut = lambda x, like: x[:, : like.shape[1], : like.shape[2]]
  dvalues = cut(dvalues, values)
  if gate is None:
    row = rest[0][:, : plan.count]
    return dvalues, row.astype(scores.dtype), None
  dweight, dtanh, *dsigmoid = rest
  u = None if gate.sigmoid is None else cut(dsigmoid[0], gate.sigmoid)
  dweight = dweight.reshape(batch, plan.m, -1).sum(1)[:, : plan.units]
  return dvalues, None, Gate(cut(dtanh, gate.tanh), u, dweight)

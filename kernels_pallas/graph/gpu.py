"""Operations on patch graphs for GPUs (Triton): rows gathered in the kernel.

Axes: B graphs, m blocks of n nodes, K slots, D features in tiles of d, C
weights; R rows within reach of a graph.

A program takes a block of nodes and gathers the rows of their neighbours, which
other programs left in the cache: from memory each row comes about once. All
slots of a node belong to one program: no scatter, no atomics, the same result
every time. The grid has one axis, which leaves two of Triton's three to
`jax.vmap`. Pallas on Triton is deprecated since jax 0.11; this file alone of
message passing depends on it.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from kernels_pallas.common.calls import launch
from kernels_pallas.common.padding import pad_axis
from kernels_pallas.graph.halo import halo_exchange
from kernels_pallas.graph.patch_graph import PatchGraph
from kernels_pallas.graph.reference import transpose

__all__ = [
  'gated_adjoint',
  'gated_coefficients',
  'gated_deltas',
  'sddmm',
  'spmm',
]

_PARAMS = {'num_warps': 4, 'num_stages': 2}
# Nodes per block, columns per tile.
_NODES, _COLUMNS = 16, 128

Arrays = Sequence[jax.Array]


class _Plan(NamedTuple):
  """Sizes of a call: N, R, m, K, D, d of the module docstring."""

  nodes: int
  reach: int
  m: int
  slots: int
  features: int
  d: int


class _Operands(NamedTuple):
  """Inputs of a call, their specs, or references to a graph's part.

  nbr: [N, K], -1 in empty slots. reach: [R, D]. far, own: [C, N, K] and [C, N].
  gates: [C, D]. x, g: [N, D].
  """

  nbr: Any
  reach: Any
  far: Any = None
  own: Any = None
  gates: Any = None
  x: Any = None
  g: Any = None


def _flat(x: jax.Array, lead: int) -> jax.Array:
  """One axis in place of the leading ones."""
  return x.reshape(math.prod(x.shape[:lead]), *x.shape[lead:])


def _prepare(
  graph: PatchGraph, near: jax.Array, **arrays: Any
) -> tuple[_Plan, _Operands]:
  """Operands with one batch axis; `arrays` by the names of `_Operands`.

  `near` [..., N, D] are the rows that neighbours are gathered from.
  """
  lead, features = near.ndim - 2, near.shape[-1]
  nbr = _flat(jnp.where(graph.emask, graph.nbr, -1), lead)
  if graph.axis_name is None:
    reach = near
  else:
    reach = halo_exchange(near, graph.axis_name, graph.halo)
  _, nodes, slots = nbr.shape
  d = min(_COLUMNS, max(16, pl.next_power_of_2(features)))
  m = -(-nodes // _NODES)
  plan = _Plan(nodes, reach.shape[-2], m, slots, features, d)
  stack = lambda parts: jnp.stack([_flat(p, lead) for p in parts], 1)
  given: dict[str, Any] = {}
  for name in ('far', 'own'):
    if arrays.get(name) is not None:
      given[name] = stack(arrays[name]).astype(jnp.float32)
  if arrays.get('gates') is not None:
    gates = stack([g[..., 0, :] for g in arrays['gates']]).astype(jnp.float32)
    given['gates'] = pad_axis(gates, 2, -(-features // d) * d)
  for name in ('x', 'g'):
    if arrays.get(name) is not None:
      given[name] = _flat(arrays[name], lead)
  return plan, _Operands(nbr, _flat(reach, lead), **given)


def _specs(operands: _Operands, programs: int) -> _Operands:
  """All of a graph, for each of the `programs` that it has."""
  size = np.int32(programs)

  def whole(x):
    if x is None:
      return None
    index = lambda p: (jax.lax.div(p, size), *[0] * (x.ndim - 1))
    return pl.BlockSpec((None, *x.shape[1:]), index)

  return _Operands(*(whole(x) for x in operands))


def _load(ref: Any, rows: jax.Array, columns: jax.Array, size: int):
  """Rows and columns of a matrix of `size` columns, zeros beyond them."""
  if size % columns.shape[0] == 0:
    return ref[rows[:, None], columns[None]].astype(jnp.float32)
  near = jnp.minimum(columns, size - 1)
  x = ref[rows[:, None], near[None]].astype(jnp.float32)
  return jnp.where((columns < size)[None], x, 0.0)


def _columns(plan: _Plan) -> list[jax.Array]:
  count = -(-plan.features // plan.d)
  return [c * plan.d + jnp.arange(plan.d) for c in range(count)]


def _edge(plan: _Plan, refs: _Operands, rows: jax.Array, k: int):
  """Neighbours in slot k, and whether there are any."""
  nbr = refs.nbr[rows, k]
  valid = nbr >= 0
  return jnp.clip(nbr, 0, plan.reach - 1), valid


def _factor(refs: _Operands, weights: list[jax.Array], columns: jax.Array):
  """sum_c gates_c weights_c: [n, d], or [n, 1] without gates."""
  if refs.gates is None:
    return weights[0][:, None]
  parts = [
    refs.gates[c, columns][None] * w[:, None] for c, w in enumerate(weights)
  ]
  return functools.reduce(jnp.add, parts)


def _sum_body(refs, outputs, space, *, plan, kind):
  """Kind: 'sum', 'delta' or 'adjoint'."""
  del space
  program = jax.lax.rem(pl.program_id(0), np.int32(plan.m))
  rows = program * _NODES + jnp.arange(_NODES)
  rows = jnp.minimum(rows, plan.nodes - 1)
  count = refs.far.shape[0]
  for tile, columns in enumerate(_columns(plan)):
    y = jnp.zeros((_NODES, plan.d), jnp.float32)
    some = jnp.zeros(_NODES, jnp.bool_)
    if kind != 'sum':
      x = _load(refs.x, rows, columns, plan.features)
    for k in range(plan.slots):
      nbr, valid = _edge(plan, refs, rows, k)
      some |= valid
      near = _load(refs.reach, nbr, columns, plan.features)
      # The difference first: a constant field gives zero without rounding.
      step = near - x if kind == 'delta' else near
      step = jnp.where(valid[:, None], step, 0.0)
      weights = [
        jnp.where(valid, refs.far[c, rows, k], 0.0) for c in range(count)
      ]
      y += _factor(refs, weights, columns) * step
    if kind == 'adjoint':
      left = [refs.own[c, rows] for c in range(count)]
      x = jnp.where(some[:, None], x, 0.0)
      y -= _factor(refs, left, columns) * x
    place = pl.ds(tile * plan.d, plan.d)
    outputs[0][:, place] = y.astype(outputs[0].dtype)


def _sum(
  graph: PatchGraph,
  kind: str,
  far: Arrays,
  own: Arrays | None,
  gates: Arrays | None,
  x: jax.Array,
  interpret: bool,
) -> jax.Array:
  """[..., N, D], dtype of x."""
  plan, operands = _prepare(
    graph, x, far=far, own=own, gates=gates, x=None if kind == 'sum' else x
  )
  batch, wide = operands.nbr.shape[0], -(-plan.features // plan.d) * plan.d
  size = np.int32(plan.m)
  (y,) = launch(
    functools.partial(_sum_body, plan=plan, kind=kind),
    operands,
    _specs(operands, plan.m),
    [
      (
        jax.ShapeDtypeStruct((batch, plan.m * _NODES, wide), x.dtype),
        pl.BlockSpec(
          (None, _NODES, wide),
          lambda p: (jax.lax.div(p, size), jax.lax.rem(p, size), 0),
        ),
      )
    ],
    {},
    grid=(batch * plan.m,),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name=f'graph_{kind}',
  )
  return y[:, : plan.nodes, : plan.features].reshape(x.shape)


def spmm(
  graph: PatchGraph, w: jax.Array, x: jax.Array, interpret: bool = False
) -> jax.Array:
  """The function of `reference.spmm`."""
  return _sum(graph, 'sum', (w,), None, None, x, interpret)


def gated_deltas(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """The function of `reference.gated_deltas`."""
  return _sum(graph, 'delta', weights, None, gates, x, interpret)


def gated_adjoint(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  g: jax.Array,
  interpret: bool = False,
) -> jax.Array:
  """The function of `reference.gated_adjoint`."""
  turned = [transpose(graph, w) for w in weights]
  clean = lambda w: jnp.where(graph.emask, w, 0).astype(jnp.float32)
  left = [jnp.sum(clean(w), -1) for w in weights]
  return _sum(graph, 'adjoint', turned, left, gates, g, interpret)


def _dot_body(refs, outputs, space, *, plan, count):
  """Edge products p_ik = g_i (reach_ik - x_i), or without x_i.

  Outputs: [n, K] of each weight, <gates, p>; then the block's part of
  sum_ik w_ik p_ik, [C, D].
  """
  del space
  program = jax.lax.rem(pl.program_id(0), np.int32(plan.m))
  index = program * _NODES + jnp.arange(_NODES)
  rows = jnp.minimum(index, plan.nodes - 1)
  inside = index < plan.nodes
  tiles = _columns(plan)
  totals = [
    [jnp.zeros(plan.d, jnp.float32) for _ in tiles] for _ in range(count)
  ]
  for k in range(plan.slots):
    nbr, valid = _edge(plan, refs, rows, k)
    valid &= inside
    dots = [jnp.zeros(_NODES, jnp.float32) for _ in range(count)]
    for tile, columns in enumerate(tiles):
      step = _load(refs.reach, nbr, columns, plan.features)
      if refs.x is not None:
        step = step - _load(refs.x, rows, columns, plan.features)
      g = _load(refs.g, rows, columns, plan.features)
      p = jnp.where(valid[:, None], g * step, 0.0)
      for c in range(count):
        if refs.gates is None:
          dots[c] += jnp.sum(p, 1)
          continue
        dots[c] += jnp.sum(p * refs.gates[c, columns][None], 1)
        w = jnp.where(valid, refs.far[c, rows, k], 0.0)
        totals[c][tile] += jnp.sum(p * w[:, None], 0)
    for c in range(count):
      outputs[c][:, k] = dots[c]
  if refs.gates is None:
    return
  for c in range(count):
    for tile, total in enumerate(totals[c]):
      outputs[count][c, pl.ds(tile * plan.d, plan.d)] = total


def _dots(
  graph: PatchGraph,
  weights: Arrays | None,
  gates: Arrays | None,
  x: jax.Array,
  g: jax.Array,
  interpret: bool,
) -> tuple[list[jax.Array], jax.Array | None]:
  """[..., N, K] of each weight, and [..., C, D]."""
  plan, operands = _prepare(
    graph, x, far=weights, gates=gates, x=None if gates is None else x, g=g
  )
  count = 1 if weights is None else len(weights)
  batch, lead, size = operands.nbr.shape[0], x.shape[:-2], np.int32(plan.m)
  edges = (
    jax.ShapeDtypeStruct((batch, plan.m * _NODES, plan.slots), jnp.float32),
    pl.BlockSpec(
      (None, _NODES, plan.slots),
      lambda p: (jax.lax.div(p, size), jax.lax.rem(p, size), 0),
    ),
  )
  outputs = [edges] * count
  if operands.gates is not None:
    wide = operands.gates.shape[2]
    part = (
      jax.ShapeDtypeStruct((batch * plan.m, count, wide), jnp.float32),
      pl.BlockSpec((None, count, wide), lambda p: (p, 0, 0)),
    )
    outputs.append(part)
  found = launch(
    functools.partial(_dot_body, plan=plan, count=count),
    operands,
    _specs(operands, plan.m),
    outputs,
    {},
    grid=(batch * plan.m,),
    compiler_params=plt.CompilerParams(**_PARAMS),
    interpret=interpret,
    name='graph_dots',
  )
  edge_shape = *lead, plan.nodes, plan.slots
  dw = [e[:, : plan.nodes].reshape(edge_shape) for e in found[:count]]
  if gates is None:
    return dw, None
  total = found[count].reshape(batch, plan.m, count, -1).sum(1)
  total = total[..., : plan.features]
  return dw, total.reshape(*lead, count, plan.features)


def sddmm(
  graph: PatchGraph, a: jax.Array, b: jax.Array, interpret: bool = False
) -> jax.Array:
  """The function of `reference.sddmm`."""
  (e,), _ = _dots(graph, None, None, b, a, interpret)
  return e.astype(jnp.result_type(a, b))


def gated_coefficients(
  graph: PatchGraph,
  weights: Arrays,
  gates: Arrays,
  x: jax.Array,
  g: jax.Array,
  interpret: bool = False,
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
  """The function of `reference.gated_coefficients`."""
  dw, total = _dots(graph, weights, gates, x, g, interpret)
  if total is None:
    raise ValueError('no gates')
  count = range(len(gates))
  return (
    tuple(dw[c].astype(weights[c].dtype) for c in count),
    tuple(total[..., c, None, :].astype(gates[c].dtype) for c in count),
  )

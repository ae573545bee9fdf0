"""Segment pooling with a backward pass of its own, on any platform.

Axes: B rows of N instances, S segments per row, D features, A units.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from kernels_pallas.common.platforms import by_platform
from kernels_pallas.common.sharding import find_split, over_mesh
from kernels_pallas.graph.pooling import reference
from kernels_pallas.graph.pooling.gate import Gate

__all__ = ['core', 'refusal']

# Sums of one row that the bodies hold at once, in float32 numbers.
LARGEST_SUM = 2**20


def refusal(
  values: jax.Array, scores: jax.Array | None, gate: Gate | None, segments: int
) -> str | None:
  """Why the Pallas bodies do not take these operands, or None."""
  arrays = [values, scores, *(gate or ())]
  for x in arrays:
    if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
      return f'dtype {x.dtype} is neither float32 nor bfloat16'
  up = lambda size, step: -(-size // step) * step
  size = up(segments, 8) * up(values.shape[2], 128)
  if size > LARGEST_SUM:
    return (
      f'{segments} segments of {values.shape[2]} features in a row need '
      f'{size} sums, more than {LARGEST_SUM}; use more rows of fewer segments'
    )
  return None


def _call(name: str, implementation: str | None, args: Any, *static: Any):
  """Resolved at lowering, so that cross-compiling picks the right body."""

  def body(module: ModuleType, **how: Any) -> Callable[..., Any]:
    return lambda *a: getattr(module, name)(*a, *static, **how)

  values, scores, gate = args[:3]
  segments = static[0] if static else args[5].shape[1]
  plain = body(reference)
  reason = refusal(values, scores, gate, segments)
  if implementation is None and reason:
    return plain(*args)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.graph.pooling import gpu, tpu

  if implementation == 'interpret':
    return body(tpu, interpret=True)(*args)
  if implementation == 'interpret_gpu':
    return body(gpu, interpret=True)(*args)
  bodies = {'tpu': reason or body(tpu), 'cuda': reason or body(gpu)}
  return by_platform(implementation, plain, bodies, *args)


def _over_rows(function: Callable[..., Any], args: Any, outputs: Any) -> Any:
  """`function` under the mesh of the caller: whole rows on each device.

  `outputs` is a tree of the result's leaves, whose first axes are rows.
  """
  split = find_split(args[0].shape[0], 1)
  if split is None:
    return function(*args)
  rows = split.spec('b')
  specs = jax.tree.map(lambda _: rows, args)
  if args[2] is not None:
    gate = specs[2]._replace(weight=PartitionSpec())
    specs = *specs[:2], gate, *specs[3:]
  outputs = jax.tree.map(lambda _: rows, outputs)
  return over_mesh(function, split, specs, outputs)(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(
  implementation: str | None,
  num_segments: int,
  values: jax.Array,
  scores: jax.Array | None,
  gate: Gate | None,
  ids: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """The function of `reference.forward`; pooled in the dtype of values."""
  return _core_forward(implementation, num_segments, values, scores, gate, ids)[
    0
  ]


def _core_forward(implementation, num_segments, *args):
  function = lambda *a: _call('forward', implementation, a, num_segments)
  pooled, lse = _over_rows(function, args, (0, 0))
  return (pooled.astype(args[0].dtype), lse), (args, pooled, lse)


def _core_backward(implementation, num_segments, residual, cotangents):
  del num_segments
  args, pooled, lse = residual
  g, of_lse = cotangents
  delta = jnp.sum(g.astype(pooled.dtype) * pooled, -1)
  # An empty segment has lse = -inf; its weights are exp(-inf) = 0.
  safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
  values, scores, gate, ids = args
  args = *args, g, safe, delta - of_lse
  function = lambda *a: _call('backward', implementation, a)
  outputs = values, scores, gate
  dvalues, dscores, dgate = _over_rows(function, args, outputs)
  if dgate is not None:
    weight = dgate.weight.sum(0).astype(gate.weight.dtype)
    dgate = dgate._replace(weight=weight)
  return dvalues, dscores, dgate, np.zeros(ids.shape, jax.dtypes.float0)


core.defvjp(_core_forward, _core_backward)

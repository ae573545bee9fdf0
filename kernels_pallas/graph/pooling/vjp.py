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

# What a TPU holds at once, in bytes: the sums of all segments of a row, and
# 128 instances in all arrays. What a GPU holds: features of one segment.
LARGEST_SUMS, LARGEST_BLOCK, LARGEST_ON_GPU = 10 * 2**20, 2**20, 1024


def refusal(
  values: jax.Array,
  scores: jax.Array | None,
  gate: Gate | None,
  segments: int,
  platform: str,
) -> str | None:
  """Why the Pallas body of 'tpu' or 'cuda' does not take them, or None."""
  arrays = [values, scores, *(gate or ())]
  for x in arrays:
    if x is not None and x.dtype not in (jnp.float32, jnp.bfloat16):
      return f'dtype {x.dtype} is neither float32 nor bfloat16'
  features = values.shape[2]
  if platform == 'cuda':
    if features > LARGEST_ON_GPU:
      return f'{features} features are more than {LARGEST_ON_GPU}'
    return None
  up = lambda size, step: -(-size // step) * step
  # Sums and what is written of them, twice; peaks, totals and lse in 128 lanes.
  chunk = 8 if segments <= 128 else 128
  size = up(segments, chunk) * (12 * up(features, 128) + 2560)
  if size > LARGEST_SUMS:
    return (
      f'{segments} segments of {features} features in a row need {size} bytes '
      f'of sums, more than {LARGEST_SUMS}; use more rows of fewer segments'
    )
  wide = [values, *(x for x in (gate or ())[:2] if x is not None)]
  size = 128 * sum(up(x.shape[2], 128) * x.dtype.itemsize for x in wide)
  if size > LARGEST_BLOCK:
    return (
      f'128 instances of {features} features hold {size} bytes, more than '
      f'{LARGEST_BLOCK}'
    )
  return None


def _call(name: str, implementation: str | None, args: Any, *static: Any):
  """Resolved at lowering, so that cross-compiling picks the right body."""

  def body(module: ModuleType, **how: Any) -> Callable[..., Any]:
    return lambda *a: getattr(module, name)(*a, *static, **how)

  values, scores, gate = args[:3]
  segments = static[0] if static else args[5].shape[1]
  plain = body(reference)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.graph.pooling import gpu, tpu

  if implementation == 'interpret':
    return body(tpu, interpret=True)(*args)
  if implementation == 'interpret_gpu':
    return body(gpu, interpret=True)(*args)
  why = functools.partial(refusal, values, scores, gate, segments)
  bodies = {
    platform: why(platform) or body(module)
    for platform, module in (('tpu', tpu), ('cuda', gpu))
  }
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

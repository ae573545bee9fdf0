"""Softmax attention with a backward pass of its own, on any platform.

Axes: B sequences, T queries, S keys, H query heads, G key heads, D and V
features.

Of a softmax, with weights p_ts, cotangent g_t of out_t and c_t of lse_t, and
delta_t = <g_t, out_t> - c_t, the logits have the gradient
p_ts (<g_t, v_s> - delta_t), which needs of the forward pass only lse_t.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.platforms import by_platform
from kernels_pallas.common.sharding import Split, find_split, over_mesh
from kernels_pallas.softmax_attention import higher_order, paging, xla
from kernels_pallas.softmax_attention.options import Config, Rows

__all__ = ['core', 'refusal']

# The largest head of the Pallas bodies.
LARGEST_DIM = 256


def refusal(q: jax.Array, v: jax.Array) -> str | None:
  """Why the Pallas bodies do not take these operands, or None."""
  if q.dtype not in (jnp.float32, jnp.bfloat16):
    return f'dtype {q.dtype} is neither float32 nor bfloat16'
  dim = max(q.shape[-1], v.shape[-1])
  if dim > LARGEST_DIM:
    return f'a head of {dim} features has more than {LARGEST_DIM}'
  return None


def _call(
  name: str, config: Config, implementation: str | None, args: tuple[Any, ...]
) -> Any:
  """Resolved at lowering, so that cross-compiling picks the right body."""
  plain = functools.partial(getattr(xla, name), config)
  if implementation == 'xla':
    return plain(*args)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.softmax_attention import gpu, tpu

  def body(module: ModuleType, interpret: bool = False) -> Callable[..., Any]:
    return functools.partial(getattr(module, name), config, interpret=interpret)

  if implementation == 'interpret':
    return body(tpu, True)(*args)
  if implementation == 'interpret_gpu':
    return body(gpu, True)(*args)
  why = refusal(args[0], args[2])
  bodies = {'tpu': why or body(tpu), 'cuda': why or body(gpu)}
  return by_platform(implementation, plain, bodies, *args)


def _pairs_spec(split: Split, pairs: jax.Array | None) -> Any:
  if pairs is None:
    return None
  batch, heads = (size > 1 for size in pairs.shape[:2])
  return split.spec('b' if batch else None, 'h' if heads else None, None, None)


def _shared_axes(split: Split, pairs: jax.Array) -> tuple[str, ...]:
  """Mesh axes over which one of the pairs serves several devices."""
  names = (split.batch, pairs.shape[0]), (split.heads, pairs.shape[1])
  return tuple(name for name, size in names if name and size == 1)


def _specs(split: Split, args: tuple[Any, ...]) -> tuple[Any, ...]:
  """Of q, k, v, bias, table, rows, pairs; see `core`."""
  _, _, _, bias, table, rows, pairs = args
  heads = split.spec('b', None, 'h', None)
  # Any sequence may have any page of a pool.
  keys = heads if rows.pages is None else split.spec(None, None, 'h', None)
  return (
    heads,
    keys,
    keys,
    None if bias is None else split.spec('b', None),
    None if table is None else split.spec('b', None, None),
    jax.tree.map(lambda x: split.spec('b', *[None] * (x.ndim - 1)), rows),
    _pairs_spec(split, pairs),
  )


def _forward(
  config: Config, implementation: str | None, *args: Any
) -> tuple[jax.Array, jax.Array | None]:
  split = find_split(args[0].shape[0], args[1].shape[2])
  function = lambda *a: _call('forward', config, implementation, a)
  if split is not None:
    lse = None if config.weights == 'silu' else split.spec('b', 'h', None)
    outputs = split.spec('b', None, 'h', None), lse
    function = over_mesh(function, split, _specs(split, args), outputs)
  return function(*args)


def _on_devices(
  function: Callable[..., tuple[Any, ...]],
  args: tuple[Any, ...],
  lse: jax.Array | None,
  delta: jax.Array | None,
  g: jax.Array,
) -> tuple[Any, ...]:
  """`function`, as `xla.backward`, of `args`, those of `core`, and the rest."""
  split, pairs = find_split(args[0].shape[0], args[1].shape[2]), args[6]
  own = *args[:6], lse, delta, g, pairs
  if split is None:
    return function(*own)
  heads, rows = split.spec('b', None, 'h', None), split.spec('b', 'h', None)
  *specs, of_pairs = _specs(split, args)
  column = None if lse is None else rows
  shared = () if pairs is None else _shared_axes(split, pairs)

  def part(*own):
    *found, dp = function(*own)
    return *found, jax.lax.psum(dp, shared) if shared else dp

  inputs = *specs, column, column, heads, of_pairs
  bias = None if args[3] is None else rows
  outputs = heads, heads, heads, bias, of_pairs
  return over_mesh(part, split, inputs, outputs)(*own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _backward(
  config: Config,
  implementation: str | None,
  args: tuple[Any, ...],
  lse: jax.Array | None,
  delta: jax.Array | None,
  g: jax.Array,
) -> tuple[Any, ...]:
  """Of `args`, those of `core`."""
  function = lambda *a: _call('backward', config, implementation, a)
  return _on_devices(function, args, lse, delta, g)


def _backward_forward(config, implementation, *operands):
  return _backward(config, implementation, *operands), operands


def _backward_backward(config, implementation, operands, cotangents):
  (q, k, v, bias, table, rows, pairs), *others = operands

  def again(q, k, v, bias, pairs, *others):
    args = q, k, v, bias, table, rows, pairs
    function = functools.partial(higher_order.backward, config)
    return _on_devices(function, args, *others)

  _, vjp = jax.vjp(again, q, k, v, bias, pairs, *others)
  *found, dp, of_lse, of_delta, of_g = vjp(cotangents)
  return (*found, None, None, dp), of_lse, of_delta, of_g


_backward.defvjp(_backward_forward, _backward_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(
  config: Config,
  implementation: str | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  bias: jax.Array | None,
  table: jax.Array | None,
  rows: Rows,
  pairs: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
  """The function of `reference.forward` on the platform of the program.

  But out is in `tiles.out_dtype`. Differentiable to any order in reverse mode.
  """
  return _forward(config, implementation, q, k, v, bias, table, rows, pairs)


def _core_forward(config, implementation, *args):
  # Not _forward: the gradients depend on out and lse, and have gradients too.
  outputs: Any = core(config, implementation, *args)
  return outputs, (args, *outputs)


def _core_backward(config, implementation, residual, cotangents):
  args, out, lse = residual
  g, of_lse = cotangents
  q, k, v, bias, table, rows, pairs = args
  apart = lambda k, v: paging.side_by_side(k, v, rows)[:2]
  (k, v), to_pages = jax.vjp(apart, k, v)
  args = q, k, v, bias, table, rows._replace(pages=None), pairs
  # Exact: it is the cotangent of out in the dtype of v.
  g = g.astype(v.dtype)
  safe = delta = None
  if lse is not None:
    # A product with ones, which is several times as fast on a CPU as sums of
    # short rows.
    product = g.astype(lse.dtype) * out.astype(lse.dtype)
    ones = jnp.ones((g.shape[-1], 1), lse.dtype)
    delta = jnp.matmul(product, ones, precision=jax.lax.Precision.HIGHEST)
    delta = jnp.swapaxes(delta[..., 0], 1, 2) - of_lse
    # A query that sees no key has lse = -inf; its weights are exp(-inf) = 0.
    safe = jnp.where(lse == -jnp.inf, jnp.inf, lse)
  # Annotations do not see through custom_vjp.
  found: Any = _backward(config, implementation, args, safe, delta, g)
  dq, dk, dv, db, dp = found
  dk, dv = to_pages((dk, dv))
  db = None if db is None else db.sum(1).astype(bias.dtype)
  dp = None if dp is None else dp.astype(pairs.dtype)
  return dq, dk, dv, db, None, None, dp


core.defvjp(_core_forward, _core_backward)

"""Checks of what callers pass, with errors that name field, value and fix.

Axes: B sequences, T queries, S keys, H query heads, G key heads, D features.
Shapes and dtypes are always checked, values where they are known.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

__all__ = [
  'check_blocks',
  'check_implementation',
  'check_operands',
  'check_window',
  'checked_integers',
  'checked_lengths',
  'checked_norm',
  'checked_offset',
  'checked_scale',
  'checked_segments',
  'known',
]

_IMPLEMENTATIONS = (
  None,
  'pallas',
  'xla',
  'reference',
  'interpret',
  'interpret_gpu',
)


def check_implementation(
  implementation: str | None, refusal: str | None
) -> None:
  """Names an implementation that does not exist or does not take the call.

  Args:
    implementation: of the caller.
    refusal: why the Pallas bodies do not take the operands, or None.
  """
  if implementation not in _IMPLEMENTATIONS:
    raise ValueError(
      f'implementation={implementation!r} must be one of {_IMPLEMENTATIONS}'
    )
  if implementation not in ('pallas', 'interpret', 'interpret_gpu'):
    return
  if implementation == 'pallas' and jax.default_backend() == 'cpu':
    # What for is known at lowering only; `platforms.by_platform` refuses there.
    return
  if refusal:
    raise ValueError(
      f'implementation={implementation!r}: {refusal}; use None or "xla"'
    )


def check_operands(q: Any, k: Any, v: Any) -> None:
  """Ranks, dtypes and sizes of [B, T, H, D], [B, S, G, D], [B, S, G, V].

  Of arrays, or of `jax.ShapeDtypeStruct`.
  """
  for name, x in (('q', q), ('k', k), ('v', v)):
    if x.ndim != 4:
      raise ValueError(
        f'{name} has shape {x.shape}, expected [B, T, H, D]; add the missing '
        'axis, or use jax.vmap for more'
      )
    if not jnp.issubdtype(x.dtype, jnp.floating):
      raise TypeError(f'{name} has dtype {x.dtype}, expected a float dtype')
    if x.dtype != q.dtype:
      raise TypeError(
        f'{name} has dtype {x.dtype} but q has {q.dtype}; cast one of them'
      )
  if not q.shape[0] == k.shape[0] == v.shape[0]:
    raise ValueError(
      f'q, k, v hold {q.shape[0]}, {k.shape[0]}, {v.shape[0]} sequences; '
      'repeat the keys and values that sequences share'
    )
  if q.shape[3] != k.shape[3] or q.shape[3] < 1:
    raise ValueError(
      f'q has {q.shape[3]} features and k has {k.shape[3]}; they are '
      'multiplied and must agree (only v may differ)'
    )
  if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
    raise ValueError(
      f'k {k.shape} and v {v.shape} must agree in keys and heads'
    )
  if not k.shape[2] or q.shape[2] % k.shape[2]:
    raise ValueError(
      f'q has {q.shape[2]} heads, not a multiple of the {k.shape[2]} heads of '
      'k and v; each of these serves as many query heads as all others'
    )


def known(x: Any) -> np.ndarray | None:
  """The values, or None where a trace or another process holds them."""
  if isinstance(x, Tracer) or not getattr(x, 'is_fully_addressable', True):
    return None
  return np.asarray(x)


def checked_integers(
  name: str, x: Any, shape: tuple[int, ...], least: int | None = None
) -> jax.Array:
  """An int32 array of that shape; values are checked where they are known."""
  x = jnp.asarray(x)
  if not jnp.issubdtype(x.dtype, jnp.integer):
    raise TypeError(f'{name} has dtype {x.dtype}, expected integers')
  if x.shape != shape:
    raise ValueError(f'{name} has shape {x.shape}, expected {shape}')
  values = known(x)
  if least is not None and values is not None and values.size:
    lowest = int(values.min())
    if lowest < least:
      raise ValueError(
        f'{name} holds {lowest}, but must be at least {least} everywhere'
      )
  x = x.astype(jnp.int32)
  return x if least is None else jnp.maximum(x, least)


def checked_scale(scale: float | None, dim: int) -> float:
  """A finite number; None is 1 / sqrt(dim)."""
  if scale is None:
    return 1 / math.sqrt(dim)
  if isinstance(scale, Tracer):
    raise TypeError('scale is traced; multiply q by it and pass scale=1.0')
  if np.ndim(scale) or not np.issubdtype(np.asarray(scale).dtype, np.number):
    raise TypeError(
      f'scale={scale!r} must be one number; None is 1/sqrt({dim})'
    )
  if not math.isfinite(float(scale)):
    raise ValueError(f'scale={scale} must be finite; None is 1/sqrt({dim})')
  return float(scale)


def checked_offset(
  offset: int | jax.Array, batch: int
) -> tuple[int | None, jax.Array | None]:
  """As a number that is known, or as an array."""
  if isinstance(offset, int | np.integer):
    return int(offset), None
  shape = jnp.shape(offset)
  if shape not in ((), (batch,)):
    raise ValueError(
      f'query_offset has shape {shape}, expected an integer or ({batch},)'
    )
  return None, jnp.broadcast_to(
    checked_integers('query_offset', offset, shape), batch
  )


def checked_lengths(
  lengths: Any, batch: int, keys: int, name: str = 'k', unit: str = 'keys'
) -> jax.Array | None:
  """[batch] int32 of at least 0 and, where known, at most `keys`."""
  if lengths is None:
    return None
  lengths = checked_integers('lengths', lengths, (batch,), 0)
  values = known(lengths)
  if values is not None and batch:
    highest = int(values.max())
    if highest > keys:
      raise ValueError(f'lengths holds {highest}, but {name} has {keys} {unit}')
  return lengths


def checked_segments(
  segments: Any,
  batch: int,
  queries: int,
  keys: int,
  names: tuple[str, str] = ('queries', 'keys'),
) -> tuple[jax.Array | None, jax.Array | None]:
  """[batch, queries] and [batch, keys], int32."""
  of_query, of_key = names
  if segments is None:
    return None, None
  if not isinstance(segments, tuple | list):
    if queries != keys:
      raise ValueError(
        f'segment_ids is one array, but there are {queries} {of_query} and '
        f'{keys} {of_key}; pass a pair (of {of_query}, of {of_key})'
      )
    segments = segments, segments
  if len(segments) != 2:
    raise ValueError(
      f'segment_ids has {len(segments)} parts, expected (of {of_query}, '
      f'of {of_key})'
    )
  return (
    checked_integers(
      f'segment_ids of {of_query}', segments[0], (batch, queries)
    ),
    checked_integers(f'segment_ids of {of_key}', segments[1], (batch, keys)),
  )


def check_window(window: int | None) -> None:
  """At least the key of the query itself."""
  number = isinstance(window, int | np.integer) and window >= 1
  if window is not None and not number:
    raise ValueError(
      f'window={window!r} must be an integer of at least 1 (the key of the '
      'query itself), or None'
    )


def check_blocks(blocks: Any, count: int = 2) -> None:
  """That many multiples of 16, and two of them by name."""
  if blocks is None:
    return
  number = lambda x: isinstance(x, int | np.integer) and x >= 16 and not x % 16
  named = isinstance(blocks, tuple) and (count == 1 or hasattr(blocks, 'key'))
  if not named or len(blocks) != count or not all(map(number, blocks)):
    want = 'a multiple' if count == 1 else 'Blocks(query, key) with multiples'
    raise ValueError(
      f'blocks={blocks} must be {want} of 16 (of 128 on a TPU, powers of '
      'two on a GPU)'
    )


def checked_norm(
  norm: float | jax.Array | None, batch: int, length: int
) -> jax.Array:
  """[] or [batch, 1, 1, 1], float32 or wider; None is the length."""
  norm = jnp.asarray(max(length, 1) if norm is None else norm)
  if not any(
    jnp.issubdtype(norm.dtype, x) for x in (jnp.floating, jnp.integer)
  ):
    raise TypeError(f'norm has dtype {norm.dtype}, expected real numbers')
  if norm.shape not in ((), (batch,)):
    raise ValueError(
      f'norm has shape {norm.shape}, expected a number or ({batch},)'
    )
  norm = norm.astype(jnp.promote_types(norm.dtype, jnp.float32))
  values = known(norm)
  if values is not None and values.size:
    if not (np.isfinite(values).all() and values.min() > 0):
      raise ValueError(
        f'norm holds {values.min()}, but must be positive and finite; of '
        'lengths that may be 0 take jnp.maximum(lengths, 1)'
      )
  return norm if norm.ndim == 0 else norm[:, None, None, None]

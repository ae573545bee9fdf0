"""Operands of the Pallas bodies, and the padding that their tiles want.

Axes: those of the bodies, t queries and s keys per tile.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels_pallas.softmax_attention import tiles

__all__ = [
  'Operands',
  'cut_features',
  'dot',
  'launch',
  'pad_axis',
  'pad_features',
]


class Operands(NamedTuple):
  """Inputs of a call, their specs, or references to their tiles."""

  q: Any
  k: Any
  v: Any
  offset: Any = None
  limit: Any = None
  query_segment: Any = None
  key_segment: Any = None
  query_span: Any = None
  key_span: Any = None
  # Times log2(e): logits are to the base of two.
  bias: Any = None
  table: Any = None
  lse: Any = None
  delta: Any = None
  g: Any = None


def pad_axis(x: jax.Array, axis: int, size: int, fill: float = 0) -> jax.Array:
  """Fills an axis up to `size`."""
  pads = [(0, 0)] * x.ndim
  pads[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, pads, constant_values=fill) if pads[axis][1] else x


def pad_features(x: jax.Array, size: int, halves: bool) -> jax.Array:
  """Fills the last axis up to `size`, either half of it if `halves`."""
  if not halves:
    return pad_axis(x, x.ndim - 1, size)
  x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)
  x = pad_axis(x, x.ndim - 1, size // 2)
  return x.reshape(*x.shape[:-2], size)


def cut_features(x: jax.Array, size: int, halves: bool) -> jax.Array:
  """Undoes `pad_features`."""
  if not halves:
    return x[..., :size]
  x = x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)[..., : size // 2]
  return x.reshape(*x.shape[:-2], size)


def dot(a: jax.Array, b: jax.Array, transpose: bool = False) -> jax.Array:
  """Product a b or a b^T, in the dtype of b, summed in float32."""
  return jax.lax.dot_general(
    a.astype(b.dtype),
    b,
    (((1,), (1 if transpose else 0,)), ((), ())),
    precision=tiles.precision(b.dtype),
    preferred_element_type=jnp.float32,
  )


def launch(
  body: Callable[..., None],
  operands: Operands,
  specs: Operands,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  **options: Any,
) -> list[jax.Array]:
  """A `pallas_call` of body(operands, outputs, scratch).

  Args:
    body: gets references in an `Operands`, a list and a dictionary.
    operands: None for what is not there.
    specs: of the operands; more than needed.
    outputs: shape and spec of each.
    scratch: by name.
    **options: of `pallas_call`.
  """
  names = [x for x in Operands._fields if getattr(operands, x) is not None]

  def kernel(*refs):
    given = dict.fromkeys(Operands._fields)
    given |= dict(zip(names, refs[: len(names)], strict=True))
    rest = refs[len(names) :]
    space = dict(zip(scratch, rest[len(outputs) :], strict=True))
    body(Operands(**given), rest[: len(outputs)], space)

  call = pl.pallas_call(
    kernel,
    out_shape=[shape for shape, _ in outputs],
    in_specs=[getattr(specs, x) for x in names],
    out_specs=[spec for _, spec in outputs],
    scratch_shapes=list(scratch.values()),
    **options,
  )
  return call(*(getattr(operands, x) for x in names))

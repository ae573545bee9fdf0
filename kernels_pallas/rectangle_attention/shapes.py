"""Realistic shapes of recommenders' histories, for tests and benchmarks."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.tuning.cases import Case

__all__ = ['SHAPES', 'RectangleShape', 'cases']


class RectangleShape(NamedTuple):
  """Sequences, links, items of a history, heads, features, values."""

  batch: int
  links: int
  items: int
  heads: int
  dim: int
  values: int


SHAPES = {
  'tiny': RectangleShape(2, 5, 300, 3, 32, 32),
  # A batch of training: a compression by 32.
  'train': RectangleShape(32, 32, 1024, 4, 64, 64),
  # One request with a lifelong history.
  'lifelong': RectangleShape(1, 64, 65536, 4, 64, 64),
  # Wide heads.
  'wide': RectangleShape(2, 32, 1000, 2, 128, 128),
}

# Items of a tile; queries and keys.
_XOR = {
  'tpu': ((128,), (256,), (512,), (1024,), (2048,)),
  'gpu': ((16,), (32,), (64,)),
}
_HSTU = {'tpu': ((512, 512), (512, 1024), (1024, 512), (1024, 1024))}


def _xor_call(phi, blocks, implementation):
  """Of the queries, keys and values of links, then those of items."""
  from kernels_pallas.rectangle_attention.api import xor_attention

  return lambda *x: xor_attention(
    x[:3],
    x[3:],
    phi=phi,
    block=blocks[0] if blocks else None,
    implementation=implementation,
  )


def _xor(name: str, phi: str) -> Case:
  b, count, n, h, d, v = SHAPES[name]
  make = functools.partial(_xor_call, phi)
  shapes = [(b, m, h, x) for m in (count, n) for x in (d, d, v)]
  return Case(
    op='xor_attention',
    shape=name if phi == 'silu' else f'{name}, softmax',
    options={'phi': phi},
    make=make,
    reference=make(None, 'reference'),
    operands=tuple(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes),
    flops=4.0 * b * h * count * n * (d + v),
    bytes_moved=2.0 * b * h * (count + n) * (2 * d + 2 * v),
    blocks=_XOR,
  )


def _hstu_call(blocks, implementation):
  from kernels_pallas.rectangle_attention.hstu import hstu_attention
  from kernels_pallas.softmax_attention.options import Blocks

  size = None if blocks is None else Blocks(*blocks)
  return lambda q, k, v: hstu_attention(
    q, k, v, blocks=size, implementation=implementation
  )


def _hstu(name: str) -> Case:
  """Causal, without a bias: what the history of `_xor` costs in full."""
  b, _, n, h, d, v = SHAPES[name]
  shapes = (b, n, h, d), (b, n, h, d), (b, n, h, v)
  return Case(
    op='hstu_attention',
    shape=name,
    options={},
    make=_hstu_call,
    reference=_hstu_call(None, 'reference'),
    operands=tuple(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes),
    flops=1.0 * b * h * n * (n + 1) * (d + v),
    bytes_moved=2.0 * b * n * h * (2 * d + 2 * v),
    blocks=_HSTU,
  )


def cases() -> list[Case]:
  """Calls in bfloat16."""
  return [
    _xor('tiny', 'silu'),
    _xor('train', 'silu'),
    _xor('train', 'softmax'),
    _xor('lifelong', 'silu'),
    _xor('lifelong', 'softmax'),
    _xor('wide', 'silu'),
    _hstu('tiny'),
    _hstu('train'),
  ]

"""Attention between links and a history, forward and in reverse mode.

Axes: B sequences, L links, N items of a history, H heads, D features of queries
and keys, V features of values. The layout is [B, N, H, D] throughout.

`implementation`, also that of `hstu_attention`: None is Pallas on TPU and GPU
and a loop over tiles elsewhere, decided when the program is compiled, and the
loop wherever Pallas can not; "pallas" insists on Pallas; "xla" is the loop, 64k
items in bounded memory; "reference" holds all logits at once, and alone has
forward mode; "interpret" and "interpret_gpu" run the TPU's and the GPU's body
in Pallas' interpreter. Derivatives of higher order, in reverse mode: HSTU's by
all of them, as those of `kernels_pallas.softmax_attention.api`, XOR attention's
by "xla" and "reference".

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, sequences are divided
over the axis 'data' and heads over 'model' where these divide them, and
everything is repeated over the other axes.
"""

from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.checks import (
  check_blocks,
  check_implementation,
  check_operands,
  checked_lengths,
  checked_norm,
  checked_scale,
  checked_segments,
)
from kernels_pallas.rectangle_attention import reference, vjp
from kernels_pallas.rectangle_attention.hstu import hstu_attention
from kernels_pallas.rectangle_attention.options import Config, Rows, Tokens

__all__ = ['hstu_attention', 'xor_attention']

_PHI = ('silu', 'softmax')
_Arrays = tuple[jax.Array, jax.Array, jax.Array]


def _tokens(name: str, arrays: Any) -> Tokens:
  """Queries, keys and values [B, N, H, D], [B, N, H, D], [B, N, H, V]."""
  if not isinstance(arrays, tuple | list) or len(arrays) != 3:
    raise ValueError(
      f'{name} must be (queries, keys, values), three arrays; got '
      f'{type(arrays).__name__}'
    )
  tokens = Tokens(*(jnp.asarray(x) for x in arrays))
  try:
    check_operands(*tokens)
  except (TypeError, ValueError) as error:
    raise type(error)(f'{name}: {error}') from None
  if tokens.q.shape[:3] != tokens.v.shape[:3]:
    raise ValueError(
      f'{name}: q {tokens.q.shape} and v {tokens.v.shape} must agree in all '
      'but the features'
    )
  return tokens


def _check_both(links: Tokens, history: Tokens) -> None:
  if links.q.dtype != history.q.dtype:
    raise TypeError(
      f'links have dtype {links.q.dtype} but history has {history.q.dtype}; '
      'cast one of them'
    )
  parts = (('q', links.q, history.q), ('v', links.v, history.v))
  for name, a, b in parts:
    if (a.shape[0], *a.shape[2:]) != (b.shape[0], *b.shape[2:]):
      raise ValueError(
        f'{name} of links {a.shape} and of history {b.shape} must agree in '
        'sequences, heads and features; repeat links that sequences share'
      )


def _refusal(implementation: str | None, links: Tokens) -> str | None:
  """Of the body that was asked for."""
  gpu = implementation == 'interpret_gpu'
  if implementation == 'pallas':
    gpu = jax.default_backend() == 'gpu'
  return vjp.refusal(links, 'cuda' if gpu else 'tpu')


def xor_attention(
  links: _Arrays,
  history: _Arrays,
  *,
  lengths: jax.Array | None = None,
  segment_ids: tuple[jax.Array, jax.Array] | None = None,
  phi: str = 'silu',
  scale: float | None = None,
  norm: float | jax.Array | None = None,
  block: int | None = None,
  implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  r"""Links attend to items and items to links, neither to its own kind.

  Over the sequence of links and items, token i attends to token j if exactly
  one of the two is a link: of the full square of logits only two thin
  rectangles are left, and N items cost O(N L) instead of O(N^2). With
  phi = "silu", for a link l and an item n,

    out_l = 1/N sum_n silu(scale <q_l, k_n>) v_n,
    out_n = 1/N sum_l silu(scale <q_n, k_l>) v_l,

  and with "softmax" a softmax over n and over l instead of silu and 1/N. A
  token that sees none gets 0. The Pallas bodies read the history once, forward
  and backward. Sums run in float32 or wider; products in the dtype of the
  operands, and those of float32 in full precision. Differentiable in all six
  arrays and in norm.

  Args:
    links: queries [B, L, H, D], keys [B, L, H, D], values [B, L, H, V], float.
    history: queries [B, N, H, D], keys [B, N, H, D], values [B, N, H, V].
    lengths: [B], int in [0, N], clamped under jit: items beyond do not exist,
      get 0 and are seen by no link, and may hold anything.
    segment_ids: a pair ([B, L], [B, N]), int: links and items see each other
      in the same segment only. Need not be sorted.
    phi: "silu" or "softmax".
    scale: a finite number; None is 1 / sqrt(D).
    norm: N of the equations, > 0: a number or float [] or [B], of silu only;
      None is the padded length of the history. For the true lengths pass
      jnp.maximum(lengths, 1).
    block: items of a tile, instead of the backend's own choice.
    implementation: see the module docstring. The Pallas bodies take up to 256
      links (128 in float32 on a TPU) and 256 features; on a GPU the links of a
      head, filled up to powers of two, hold at most 4096 numbers
      (2048 in float32).

  Returns:
    [B, L, H, V] of the links and [B, N, H, V] of the items, dtype of history.

  Raises:
    ValueError: on shapes that disagree, values out of range as far as they are
      known, or an unknown phi or implementation.
    TypeError: on a wrong dtype.

  References:
    LIME: link-based user-item interaction modeling with decoupled XOR attention
    for efficient test time scaling, 2025. The default scale is our choice.
  """
  links, history = _tokens('links', links), _tokens('history', history)
  _check_both(links, history)
  if phi not in _PHI:
    raise ValueError(f'phi={phi!r} must be one of {_PHI}')
  if norm is not None and phi == 'softmax':
    raise ValueError(
      f'norm={norm!r} is of no use with phi="softmax", whose weights sum to '
      'one; leave it out'
    )
  check_implementation(implementation, _refusal(implementation, links))
  check_blocks(None if block is None else (block,), 1)
  (batch, count, heads, dim), items = links.q.shape, history.q.shape[1]
  config = Config(checked_scale(scale, dim), phi, block)
  rows = Rows(
    checked_lengths(lengths, batch, items, 'history', 'items'),
    *checked_segments(segment_ids, batch, count, items, ('links', 'items')),
  )
  norm = checked_norm(norm, batch, items)
  if not (batch and count and heads and items and links.v.shape[3]):
    return jnp.zeros_like(links.v), jnp.zeros_like(history.v)
  args = links, history, rows
  # Annotations do not see through custom_vjp.
  both: Any = (
    reference.forward(config, *args)
    if implementation == 'reference'
    else vjp.core(config, implementation, *args)
  )
  of_links, of_items = both
  if phi == 'silu':
    of_links = (of_links / norm).astype(of_links.dtype)
    of_items = (of_items / norm).astype(of_items.dtype)
  return of_links, of_items

"""Mathematics of a tile of logits between links and items, for all bodies.

Tiles hold links in rows and items in columns, in both directions: one mask
serves both, and few links waste few lanes.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.numerics import silu
from kernels_pallas.rectangle_attention.options import Config, Rows
from kernels_pallas.softmax_attention.tiles import hide

__all__ = ['item_limit', 'link_slopes', 'link_weights', 'visible']


def visible(*parts: jax.Array | None) -> jax.Array | None:
  """All of the conditions that are there, in shapes that broadcast."""
  seen = None
  for part in parts:
    if part is not None:
      seen = part if seen is None else seen & part
  return seen


def item_limit(config: Config, rows: Rows, items: int, pad: int) -> Any:
  """Number of items that exist: [B], an int, or None where it needs no test.

  Args:
    config: how weights come from logits.
    rows: may hold lengths.
    items: N.
    pad: items of zeros that were appended to fill the last tile.
  """
  if rows.lengths is not None:
    return jnp.clip(rows.lengths, 0, items)
  # An item of zeros has weight 0 of its own under silu.
  return items if pad and config.weights == 'softmax' else None


def _softmax(
  x: jax.Array, seen: jax.Array | None, exp: Callable[[jax.Array], jax.Array]
) -> jax.Array:
  x = hide(x, seen, -jnp.inf)
  peak = jnp.max(x, -2, keepdims=True)
  weights = exp(x - jnp.where(peak == -jnp.inf, 0.0, peak))
  total = jnp.sum(weights, -2, keepdims=True)
  return weights / jnp.where(total > 0, total, 1.0)


def link_weights(
  config: Config,
  x: jax.Array,
  seen: jax.Array | None,
  exp: Callable[[jax.Array], jax.Array],
) -> jax.Array:
  """[..., L, N], the weights of all links in each item."""
  if config.weights == 'silu':
    return silu(hide(x, seen, 0.0))[0]
  return _softmax(x, seen, exp)


def link_slopes(
  config: Config,
  x: jax.Array,
  seen: jax.Array | None,
  inner: jax.Array,
  exp: Callable[[jax.Array], jax.Array],
) -> tuple[jax.Array, jax.Array]:
  """The same, and the gradient of the logits.

  Args:
    config: how weights come from logits.
    x: [..., L, N], logits, not masked.
    seen: broadcasts against x, or None for all.
    inner: [..., L, N], <g_n, v_l>.
    exp: exponential in the base of the logits.
  """
  if config.weights == 'silu':
    weights, slope = silu(hide(x, seen, 0.0))
    return weights, hide(slope * inner, seen, 0.0)
  weights = _softmax(x, seen, exp)
  delta = jnp.sum(weights * inner, -2, keepdims=True)
  return weights, weights * (inner - delta)

r"""Gated scores e_n = sum_a w_a tanh(t_na) sigmoid(u_na), written once.

Axes: N rows, A units.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ['Gate', 'gate_scores', 'gate_slopes', 'gate_units', 'wide']


class Gate(NamedTuple):
  """What a gated scorer holds before its nonlinearities.

  Attributes:
    tanh: [..., N, A], float, t = V h + v.
    sigmoid: [..., N, A], float, u = U h + u_0, or None for no gate.
    weight: [A], float, w.
  """

  tanh: jax.Array
  sigmoid: jax.Array | None
  weight: jax.Array


def wide(*arrays: jax.Array | None) -> jnp.dtype:
  """The dtype of sums: at least float32."""
  given = [x for x in arrays if x is not None]
  return jnp.promote_types(jnp.result_type(*given), jnp.float32)


def gate_units(t: jax.Array, u: jax.Array | None) -> jax.Array:
  """tanh(t) sigmoid(u), elementwise."""
  units = jnp.tanh(t)
  return units if u is None else units * jax.nn.sigmoid(u)


def gate_slopes(
  t: jax.Array, u: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
  """Derivatives of `gate_units` in t and u."""
  value = jnp.tanh(t)
  slope = 1 - value * value
  if u is None:
    return slope, None
  open_ = jax.nn.sigmoid(u)
  return slope * open_, value * open_ * (1 - open_)


def gate_scores(gate: Gate) -> jax.Array:
  """[..., N], float32 or wider."""
  dtype = wide(*gate)
  u = None if gate.sigmoid is None else gate.sigmoid.astype(dtype)
  units = gate_units(gate.tanh.astype(dtype), u)
  return jnp.sum(units * gate.weight.astype(dtype)[None, None], -1)

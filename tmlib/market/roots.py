"""Roots of monotone functions, and derivatives through any solver."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

__all__ = ['attach', 'bracketed_root']


def bracketed_root(
  function: Callable[[jax.Array], tuple[jax.Array, jax.Array]],
  low: jax.Array,
  high: jax.Array,
  max_steps: int = 120,
) -> jax.Array:
  """Elementwise root of an increasing function: Newton, kept in a bracket.

  A Newton step is taken where it stays in the bracket and is at most half as
  long as the one before; elsewhere the bracket is halved. Without a sign
  change the end that is closer to a root is returned.

  Args:
    function: x [...] -> value [...] and slope [...]; the slope only steers.
    low: [...], where the value should be negative.
    high: [...], where it should be positive; low <= high.
    max_steps: largest number of evaluations.

  Returns:
    [...], to a few ulps. No derivative flows through; see `attach`.
  """
  low, high = jnp.broadcast_arrays(low, high)
  eps = jnp.finfo(low.dtype).eps
  # Below this, a step of Newton is rounding noise of the value.
  width = high - low
  noise = 4 * eps * width
  at_low, at_high = function(low)[0] >= 0, function(high)[0] <= 0
  settled = at_low | at_high
  x = jnp.where(at_low, low, jnp.where(at_high, high, (low + high) / 2))

  def unfinished(carry):
    *_, done, step = carry
    return ~done.all() & (step < max_steps)

  def body(carry):
    low, high, x, before, done, step = carry
    value, slope = function(x)
    low = jnp.where(value <= 0, x, low)
    high = jnp.where(value >= 0, x, high)
    newton = x - value / slope
    inside = (newton >= low) & (newton <= high)
    step_size, last = jnp.abs(newton - x), jnp.abs(before)
    # Quadratic convergence: before a step of a few ulps came a small one.
    small = inside & (last <= 1e-3 * width) & jnp.isfinite(slope)
    small &= step_size <= jnp.maximum(64 * eps * jnp.abs(x), noise)
    usable = inside & (step_size <= last / 2)
    new = jnp.where(usable | small, newton, (low + high) / 2)
    moved = jnp.where(done, 0, new - x)
    done |= small | (high - low <= 2 * eps * jnp.maximum(abs(low), abs(high)))
    return low, high, x + moved, moved, done, step + 1

  carry = (low, high, x, width, settled, jnp.int32(0))
  return jax.lax.while_loop(unfinished, body, carry)[2]


def attach(residual: Callable[[Any], Any], solution: Any) -> Any:
  """Gives a solution the derivatives of the equations that it solves.

  F(z, theta) = 0 implies dz = -F_z^{-1} F_theta dtheta, whatever found z.

  Args:
    residual: z -> F(z, theta), a pytree of as many numbers as z; closes over
      theta, which may be traced for a derivative of any mode and order.
    solution: z, a pytree of float arrays.

  Returns:
    z, with derivatives.
  """
  flat, unravel = ravel_pytree(jax.lax.stop_gradient(solution))

  def equations(z):
    return ravel_pytree(residual(unravel(z)))[0]

  def tangent_solve(linear, right):
    return jnp.linalg.solve(jax.jacobian(linear)(jnp.zeros_like(right)), right)

  return unravel(
    jax.lax.custom_root(equations, flat, lambda _, z: z, tangent_solve)
  )

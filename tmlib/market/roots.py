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

  def unfinished(carry):
    *_, done, step = carry
    return ~done.all() & (step < max_steps)

  # Both ends are tried inside the loop: `function` may hold such a loop itself,
  # and each place where it is called is compiled anew.
  def body(carry):
    low, high, x, before, done, step = carry
    value, slope = function(x)
    first, second = step == 0, step == 1
    low = jnp.where(value <= 0, x, low)
    high = jnp.where((value >= 0) & ~first, x, high)
    newton = x - value / slope
    inside = (newton >= low) & (newton <= high)
    size, last = jnp.abs(newton - x), jnp.abs(before)
    # Quadratic convergence: before a step of a few ulps came a small one.
    small = inside & (last <= 1e-3 * width) & jnp.isfinite(slope)
    small &= size <= jnp.maximum(64 * eps * jnp.abs(x), noise)
    usable = ((inside & (size <= last / 2)) | small) & ~second
    middle = (low + high) / 2
    narrow = high - low <= 2 * eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
    at_end = jnp.where(first, value >= 0, second & (value <= 0))
    new = jnp.where(usable, newton, middle)
    new = jnp.where(first, high, new)
    before = jnp.where(first | second, width, new - x)
    x = jnp.where(done | at_end, x, new)
    done |= at_end | (~first & ~second & (small | narrow))
    return low, high, x, before, done, step + 1

  carry = (low, high, low, width, jnp.zeros(low.shape, bool), jnp.int32(0))
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

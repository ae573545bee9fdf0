r"""Egalitarian lottery: the matrix game max_pi min_w sum_u w_u <pi, b_u>.

Linear programme: maximise t subject to v_u(pi) - s_u = t, s >= 0, pi on the
simplex; dual: w on the simplex of users, z_i = rho - sum_u w_u b_u(i) >= 0. A
primal-dual interior-point method follows pi_i z_i = mu, w_u s_u = mu. The
certificate needs no trust in it: for the returned pi and w, both renormalised,
  max_i sum_u w_u b_u(i) - min_u v_u(pi)
bounds what any lottery could add to the worst-off user.

Axes: N users, K arms.
"""

import chex
import jax
import jax.numpy as jnp

__all__ = ['game_gap', 'solve_game']

_STEPS = 60


def game_gap(pi: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
  """Certificate of a pair of mixed strategies: max_i (w b)_i - min_u (b pi)_u.

  Args:
    pi: [K], on the simplex.
    w: [N], on the simplex.
    b: [N, K].

  Returns:
    [], non-negative; zero exactly at an equilibrium.
  """
  return (w @ b).max() - (b @ pi).min()


def _direction(b, pi, w, z, s, rho, t, mu):
  """Newton step for the perturbed optimality conditions."""
  # Without dz and ds:
  #   -(z/pi) dpi + b^T dw - drho = r1 := rho - b^T w - mu / pi
  #   b dpi + (s/w) dw - dt       = r2 := t - b pi + mu / w
  #   sum dpi = 1 - sum pi,  sum dw = 1 - sum w
  # and without dw = (w/s) (r2 - b dpi + dt), a system in (dpi, dt, drho).
  arms = pi.shape[0]
  one, zero = jnp.ones((arms, 1), b.dtype), jnp.zeros((1, 1), b.dtype)
  ratio = w / s
  r1, r2 = rho - w @ b - mu / pi, t - b @ pi + mu / w
  loaded = (ratio @ b)[:, None]
  curvature = jnp.diag(z / pi) + b.T @ (ratio[:, None] * b)
  matrix = jnp.block(
    [
      [-curvature, loaded, -one],
      [-loaded.T, ratio.sum()[None, None], zero],
      [one.T, zero, zero],
    ]
  )
  right = jnp.concatenate(
    [
      r1 - (ratio * r2) @ b,
      jnp.stack([1 - w.sum() - ratio @ r2, 1 - pi.sum()]),
    ]
  )
  step = jnp.linalg.solve(matrix, right)
  dpi, dt, drho = step[:arms], step[arms], step[arms + 1]
  dw = ratio * (r2 - b @ dpi + dt)
  dz = mu / pi - z - z / pi * dpi
  ds = mu / w - s - s / w * dw
  return dpi, dw, dz, ds, drho, dt


def _longest(x: jax.Array, dx: jax.Array) -> jax.Array:
  return jnp.where(dx < 0, -x / jnp.where(dx < 0, dx, -1), jnp.inf).min()


def solve_game(b: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Maximises min_u <pi, b_u> over the simplex.

  Args:
    b: [N, K] float, finite.

  Returns:
    pi [K], value [] and the certified gap [] (about 1e-12 in float64).
  """
  chex.assert_rank(b, 2)
  users, arms = b.shape
  # Range-normalised, so that one set of constants serves every scale.
  low, high = b.min(), b.max()
  scale = jnp.where(high > low, high - low, 1)
  game = (b - low) / scale

  eps = float(jnp.finfo(b.dtype).eps)

  def unfinished(carry):
    step, _, best = carry
    return (step < _STEPS) & (best[2] > (1e-12 if eps < 1e-10 else 1e-6))

  def body(carry):
    count, x, best = carry
    pi, w, z, s, rho, t = x
    mu = (pi @ z + w @ s) / (users + arms)
    step = _direction(game, pi, w, z, s, rho, t, 0.1 * mu)
    dpi, dw, dz, ds, drho, dt = step
    length = jnp.minimum(
      jnp.minimum(_longest(pi, dpi), _longest(w, dw)),
      jnp.minimum(_longest(z, dz), _longest(s, ds)),
    )
    length = jnp.minimum(1, 0.95 * length)
    new = tuple(
      a + length * d
      for a, d in zip(x, (dpi, dw, dz, ds, drho, dt), strict=True)
    )
    lottery, weight = new[0] / new[0].sum(), new[1] / new[1].sum()
    gap = game_gap(lottery, weight, game)
    # Near the end the system is singular to working precision: keep the best
    # certified pair, and stop moving once a step is not finite.
    usable = jnp.isfinite(gap) & (pi.min() > 0)
    better = usable & (gap < best[2])
    best = jax.tree.map(
      lambda a, c: jnp.where(better, a, c), (lottery, weight, gap), best
    )
    x = jax.tree.map(lambda a, c: jnp.where(usable, a, c), new, x)
    return count + 1, x, best

  pi = jnp.full(arms, 1 / arms, b.dtype)
  w = jnp.full(users, 1 / users, b.dtype)
  rho, t = (w @ game).max() + 0.5, (game @ pi).min() - 0.5
  start = (pi, w, rho - w @ game, game @ pi - t, rho, t)
  best = (pi, w, game_gap(pi, w, game))
  carry = (jnp.int32(0), start, best)
  _, _, (pi, w, gap) = jax.lax.while_loop(unfinished, body, carry)
  # The value is rounded at the size of b, the game at that of its range.
  rounding = 8 * eps * jnp.maximum(jnp.abs(low), jnp.abs(high))
  gap = (jnp.maximum(gap, 0) + 8 * eps) * scale + rounding
  # A pure strategy may be exactly optimal; prefer it over its interior copy.
  pure = b.min(0)
  value = (b @ pi).min()
  arm = pure.argmax()
  is_pure = pure[arm] >= value
  pi = jnp.where(is_pure, jax.nn.one_hot(arm, arms, dtype=b.dtype), pi)
  gain = jnp.where(is_pure, pure[arm] - value, 0)
  return pi, value + gain, jnp.maximum(gap - gain, rounding)

r"""The equilibrium of the providers, from one scalar equation.

One type of users; A concave; L increasing in x, decreasing and convex in s.
With everybody else's choice fixed, let V(m) be the level at which the other
providers and the outside option hold a mass m of users; V decreases in m. The
users' equilibrium says of provider i, tau = 0 included,

  u_i(x_i) - tau log x_i = W = V(1 - x_i),  u_i(x) = v_i - gamma L(x, s_i)  (*)

1. Potential. By (*), W increases strictly in x_i as alpha_i varies, where
   x_i < 1. So a provider that gains users raises what every user gets: the
   users' welfare W is an ordinal potential of the game. A maximum of W over
   all alpha is a pure equilibrium; best responses that only move for a gain
   never cycle. (Where Wardrop users stay away, W is the outside utility and
   providers do not affect one another; then their total share is one.)
2. Envelope. Let G_i(x) be the maximum over alpha of
   A(alpha B_i) - p_i - gamma L(x, (1 - alpha) B_i), a concave problem with the
   condition A'(c) = -gamma L_s(x, s), for linear latency s A'(c) = gamma L.
   By (*), the largest x_i that i can reach solves
   G_i(x) - tau log x = V(1 - x): the left side decreases, the right increases.
   There alpha_i attains the maximum in G_i.
3. So at an equilibrium every provider with 0 < x_i < 1 is on its envelope, and
   one without users has G_i(0) <= W. Hence all x_i = x_i(W), the inverse of
   G_i(x) - tau log x, which decreases, and sum_i x_i(W) = 1 fixes W: the shares
   and, for shares in (0, 1), the alphas are unique.
4. Budgets. G_i grows with B_i, so W does: a competitor that loses compute never
   makes users better off (claim iii), whatever the accuracy and latency are.
   Strictly, if it had users.

Corners. Under Wardrop a provider may have all users (x_i = 1): then any alpha_i
with u_i(1) at least what others could offer is an equilibrium, and so is any
alpha_j of the others that does not tempt i; we return the limit tau -> 0, where
i is on its envelope, which is best for users, and j offers its most. Where
queues cannot hold all users, providers are paid for the users that they serve,
x_i = s_i; nobody gains by moving there from a split that can hold them.

None of this covers several types of users, a convex A, or prices that
providers choose.

This argument is ours; it assumes nothing of the paper but its model.

Axes: M providers.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tmlib.market import accuracy, roots
from tmlib.market.game import ProviderGame, quality
from tmlib.market.latency import Latency, load_slope

__all__ = ['envelope_alpha', 'envelope_equilibrium', 'envelope_value']


def _capacity_slope(latency: Latency, x, s):
  """L_s(x, s), elementwise."""
  return jax.jvp(lambda s: latency.value(x, s), (s,), (jnp.ones_like(s),))[1]


def _condition(game: ProviderGame, x, alpha):
  """Slope of u_i in alpha_i at load x, over B_i; decreases in alpha."""
  s = (1 - alpha) * game.budgets
  gain = accuracy.slope(game.accuracy, alpha * game.budgets)
  return gain + game.gamma * _capacity_slope(game.latency, x, s)


def _top(game: ProviderGame, x):
  """Largest alpha that is tried: some capacity must be left, above x."""
  eps = 8 * jnp.finfo(x.dtype).eps
  if game.latency.capacitated:
    return jnp.maximum((1 - eps) - x / game.budgets * (1 + eps), 0)
  return jnp.full_like(x, 1 - eps)


def envelope_alpha(game: ProviderGame, x: jax.Array) -> jax.Array:
  """Share of training that serves a load x best.

  Args:
    game: the game, with one type of users.
    x: [M], load of each provider.

  Returns:
    [M], in [0, 1): argmax over alpha of A(alpha B) - gamma L(x, (1-alpha) B).
  """

  def falling(alpha):
    value = lambda a: -_condition(game, x, a)
    return jax.jvp(value, (alpha,), (jnp.ones_like(alpha),))

  return roots.bracketed_root(falling, jnp.zeros_like(x), _top(game, x))


def envelope_value(
  game: ProviderGame, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """G(x), the most that a user can get from each provider at load x.

  Args:
    game: the game, with one type of users.
    x: [M].

  Returns:
    G [M] and its slope -gamma L_x [M].
  """
  alpha = envelope_alpha(game, x)
  v, s = quality(game, alpha)
  value = v - game.gamma * game.latency.value(x, s)
  return value, -game.gamma * load_slope(game.latency, x, s)


def _loads(game: ProviderGame, level, dtype):
  """x_i(W) [M] and slopes, on the envelopes."""
  one = jnp.ones(game.budgets.shape, dtype)
  most = one
  if game.latency.capacitated:
    most = jnp.minimum(one, game.budgets * (1 - 1e-6))
  tiny = jnp.exp(jnp.log(jnp.finfo(dtype).tiny) * 0.98)
  # Shares are searched in logs, but for Wardrop users, who may leave none.
  out = (lambda y: y) if game.wardrop else jnp.exp

  def equation(y):
    x = out(y)
    value, slope = envelope_value(game, x)
    if game.wardrop:
      return level - value, -slope
    return level + game.tau * y - value, game.tau - x * slope

  ends = (tiny * one, most)
  low, high = ends if game.wardrop else (jnp.log(ends[0]), jnp.log(most))
  y = roots.bracketed_root(equation, low, high)
  inside = (y > low) & (y < high)
  rate = equation(jnp.where(inside, y, high))[1]
  x = jnp.where(y > low, out(y), 0)
  change = -1 if game.wardrop else -x
  return x, jnp.where(inside, change / rate, 0)


def _level(game: ProviderGame, dtype):
  """The root of sum_i x_i(W) = 1."""
  budgets = game.budgets
  fair = budgets / budgets.sum()
  if game.latency.capacitated:
    # With an outside option the budgets may hold less than everybody.
    fair = fair * jnp.minimum(1, 0.999 * budgets.sum())
  low = envelope_value(game, fair)[0]
  # The most that anybody could get: all compute in both places.
  high = game.accuracy(budgets) - game.prices
  high = high - game.gamma * game.latency.value(0 * fair, budgets)
  outside = game.outside
  if not game.wardrop:
    low = low - game.tau * jnp.log(fair)
    high = game.tau * jax.nn.logsumexp(high / game.tau)
    if outside is not None:
      high = game.tau * jnp.logaddexp(high / game.tau, outside / game.tau)
  low, high = low.min(), high.max()
  if outside is not None:
    high = jnp.maximum(high, outside)
    low = jnp.minimum(low, outside - 1)
  margin = 1e-6 * (1 + jnp.abs(low) + jnp.abs(high))

  def excess(level):
    x, slope = _loads(game, level, dtype)
    total, slope = x.sum(), slope.sum()
    if game.wardrop:
      return 1 - total, -slope
    if outside is not None:
      away = jnp.exp(jnp.minimum((outside - level) / game.tau, 50))
      total, slope = total + away, slope - away / game.tau
    total = jnp.maximum(total, 1e-30)
    return -jnp.log(total), -slope / total

  level = roots.bracketed_root(excess, low - margin, high + margin)
  if game.wardrop and outside is not None:
    level = jnp.maximum(level, outside)
  return level


def envelope_equilibrium(
  game: ProviderGame,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The equilibrium of providers and users.

  Differentiable in every number of the game, by the implicit function theorem.

  Args:
    game: one type of users, concave accuracy.

  Returns:
    alpha [M], shares x [M] and level W [].
  """
  dtype = jnp.result_type(game.budgets, float)
  frozen = jax.tree.map(jax.lax.stop_gradient, game)
  frozen = _as_dtype(frozen, dtype)
  level = _level(frozen, dtype)
  x = _loads(frozen, level, dtype)[0]
  alpha = envelope_alpha(frozen, x)
  if game.wardrop and game.outside is None:
    # A monopolist's users get G(1); any level down to the best rival's clears.
    level = (x * envelope_value(frozen, x)[0]).sum() / x.sum()
  found = (alpha, x, level)
  return roots.attach(_equations(game, found), found)


def _as_dtype(game: ProviderGame, dtype) -> ProviderGame:
  return jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), game)


def _equations(game: ProviderGame, found: Any):
  """Residual whose root is (alpha, x, W); corners and empty ones are fixed."""
  alpha0, x0, level0 = jax.lax.stop_gradient(found)
  moves = (alpha0 > 0) & (alpha0 < _top(game, x0)) & (x0 > 0)
  some = x0 > 0

  def residual(z):
    alpha, x, level = z
    safe = jnp.where(some, x, 0.5 * jnp.minimum(1, game.budgets))
    inner = jnp.where(moves, alpha, 0)
    first = jnp.where(moves, _condition(game, safe, inner), alpha - alpha0)
    v, s = quality(game, jnp.where(some, alpha, 0))
    second = v - game.gamma * game.latency.value(safe, s) - level
    total = x.sum() - 1
    if not game.wardrop:
      second = second - game.tau * jnp.log(safe)
      if game.outside is not None:
        total = total + jnp.exp((game.outside - level) / game.tau)
    elif game.outside is not None:
      total = jnp.where(x0.sum() < 1, level - game.outside, total)
    third = jnp.where(some.any(), total, level - level0)
    return first, jnp.where(some, second, x - x0), third

  return residual

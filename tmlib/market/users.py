r"""How the users split over providers of given accuracy and capacity.

Type k alone, the others' loads o_i fixed. All its users find the same level W:

  tau log x_i + gamma L(o_i + x_i, s_i) = v_i - W       (tau = 0: where x_i > 0)

The left side increases in x_i, so x_i(W) decreases in W, and sum_i x_i(W) = f_k
has one root. With one type this is the equilibrium. With several, types take
turns: each turn minimises the strictly convex Beckmann potential

  sum_i int_0^{X_i} L(t, s_i) dt - sum_ik x_ik v_i / gamma_k
    + sum_k (tau / gamma_k) sum_i x_ik log(x_ik / f_k),   X_i = sum_k x_ik

over one block, so the turns converge to its only minimum in X. Logs are kept
throughout: exp(v / tau) would overflow at tau = .05 already.

The level is what users get: U = W for Wardrop; U = tau log sum_i exp(u_i / tau)
for logit, the expected utility of the best choice up to a constant.

Where queues cannot hold everybody (sum s <= 1, nobody may stay away), the
utility is -inf and each provider works at capacity, x_i = s_i: the limit of
x_i(W) as W falls.

Axes: M providers, K types of users.

References:
  Beckmann, McGuire, Winsten. Studies in the economics of transportation, 1956.
  Fisk. Some developments in equilibrium traffic assignment, 1980 (logit).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market import checks, roots
from tmlib.market.game import ProviderGame, quality
from tmlib.market.latency import Latency, load_slope

__all__ = [
  'UserEq',
  'rival_level',
  'split_users',
  'user_equilibrium',
  'utilities',
]

_TURNS = 400


class UserEq(NamedTuple):
  """An equilibrium of the users.

  Attributes:
    x: [M], share of each provider.
    U: [], utility of a user, averaged over types.
    latency: [M]; inf where s = 0.
    residual: [], how far x is from equilibrium, from x alone. Wardrop: utility
      that a user could gain by moving, on average. Logit: largest error of
      x = softmax(u(x) / tau).
    outside: [], share that stays away.
    x_types: [K, M], shares by type; a row sums to the weight of its type.
    U_types: [K].
  """

  x: Any
  U: Any
  latency: Any
  residual: Any
  outside: Any
  x_types: Any
  U_types: Any


class _Block(NamedTuple):
  """One type of users and what it faces."""

  v: jax.Array
  s: jax.Array
  other: jax.Array
  gamma: jax.Array
  tau: jax.Array
  mass: jax.Array
  outside: Any


def _log(x):
  return jnp.log(jnp.where(x > 0, x, 1))


def _room(block: _Block, latency: Latency) -> jax.Array:
  """What a provider can still take, at most the whole mass; [M]."""
  free = jnp.broadcast_to(block.mass, block.s.shape)
  if latency.capacitated:
    free = jnp.minimum(free, jnp.maximum(block.s - block.other, 0))
  return jnp.where(block.s > 0, free, 0)


def _wardrop_load(block, latency, level):
  """x(W) and its slope, [M]."""
  s = jnp.where(block.s > 0, block.s, 1)
  gamma = jnp.where(block.gamma > 0, block.gamma, 1)
  total = latency.inverse((block.v - level) / gamma, s)
  x = jnp.minimum(total - block.other, block.mass)
  x = jnp.where((block.s > 0) & (x > 0), x, 0)
  inside = (x > 0) & (x < block.mass)
  rate = gamma * load_slope(latency, x + block.other, s)
  return x, jnp.where(inside, -1 / rate, 0)


def _logit_load(block, latency, level):
  """x(W) and its slope, [M]; a root in log x for each provider."""
  s = jnp.where(block.s > 0, block.s, 1)
  gamma, tau, other = block.gamma, block.tau, block.other
  room = _room(block, latency)
  ok = room > 0
  room = jnp.where(ok, room, 1)
  at = lambda x: gamma * latency.value(jnp.where(ok, other, 0) + x, s)
  target = block.v - level
  high = jnp.minimum(jnp.log(room), (target - at(jnp.zeros_like(s))) / tau)
  # A smaller share counts as none: it is beyond the range of the dtype.
  low = jnp.minimum(jnp.log(jnp.finfo(s.dtype).tiny) * 0.98, high)

  def equation(y):
    x = jnp.exp(y)
    slope = gamma * load_slope(latency, jnp.where(ok, other, 0) + x, s)
    return tau * y + at(x) - target, tau + x * slope

  y = roots.bracketed_root(equation, low, high)
  x = jnp.where(ok & (y > low), jnp.exp(y), 0)
  return x, jnp.where(ok & (x < block.mass), -x / equation(y)[1], 0)


def _stays_away(block: _Block, level: jax.Array, wardrop: bool):
  if block.outside is None or wardrop:
    return jnp.zeros_like(level)
  return block.mass * jnp.exp(
    jnp.minimum((block.outside - level) / block.tau, 0)
  )


def _levels(block: _Block, latency: Latency, wardrop: bool):
  """A bracket of the level of one type."""
  ok = block.s > 0
  s = jnp.where(ok, block.s, 1)
  room = jnp.where(ok, block.s, 0)
  if latency.capacitated:
    room = jnp.where(ok, jnp.maximum(block.s - block.other, 0), 0)
  fair = block.mass * room / jnp.where(room.sum() > 0, room.sum(), 1)
  if latency.capacitated:
    # Only where they cannot hold everybody, and then only to stay finite.
    fair = jnp.minimum(fair, room * (1 - 1e-6))
  ok &= room > 0
  value = lambda x: (
    block.v - block.gamma * latency.value(jnp.where(ok, block.other + x, 0), s)
  )
  empty = jnp.where(ok, value(0 * s), -jnp.inf)
  full = value(fair)
  if not wardrop:
    full = full - block.tau * _log(fair / block.mass)
    peak = jnp.max(empty)
    spread = jnp.where(ok, jnp.exp((empty - peak) / block.tau), 0)
    high = peak + block.tau * jnp.log(spread.sum())
    if block.outside is not None:
      high = jnp.logaddexp(high / block.tau, block.outside / block.tau)
      high = high * block.tau
  else:
    high = jnp.max(empty)
  # Where everybody is served in proportion, nobody is worse off than this.
  low = jnp.min(jnp.where(ok, full, jnp.inf))
  if block.outside is not None:
    # Nobody needs to accept less than by staying away.
    low = jnp.asarray(block.outside, high.dtype)
    high = jnp.maximum(high, low)
  margin = 1e-6 * (1 + jnp.abs(high) + jnp.abs(low))
  return jnp.minimum(low, high) - margin, high + margin


def _split_block(block: _Block, latency: Latency, wardrop: bool):
  """One type's x [M] and level [], the loads of the others given."""
  load = _wardrop_load if wardrop else _logit_load
  scaled = block
  if not wardrop:
    # exp(-W / tau) counts users per unit of mass.
    shift = block.tau * jnp.log(block.mass)
    scaled = block._replace(v=block.v + shift)
  low, high = _levels(block, latency, wardrop)

  def excess(level):
    x, slope = load(scaled, latency, level)
    away = _stays_away(block, level, wardrop)
    total = x.sum() + away
    slope = slope.sum()
    if wardrop:
      return block.mass - total, -slope
    slope = slope - away / block.tau
    total = jnp.maximum(total, 1e-30)
    return jnp.log(block.mass / total), -slope / total

  level = roots.bracketed_root(excess, low, high)
  if wardrop and block.outside is not None:
    level = jnp.maximum(level, block.outside)
  x = load(scaled, latency, level)[0]
  if wardrop:
    x, level = _winner_takes_all(block, x, level)
    # Where one provider has everybody, a range of levels clears the market.
    wait = latency.value(block.other + x, jnp.where(block.s > 0, block.s, 1))
    u = jnp.where(x > 0, block.v - block.gamma * wait, 0)
    served = x.sum() >= block.mass * (1 - 1e-9)
    level = jnp.where(served, (x * u).sum() / block.mass, level)
  away = _stays_away(block, level, wardrop)
  if not (wardrop and block.outside is not None):
    # The root leaves a few ulps of the level; the mass must be exact.
    total = x.sum()
    kept = (block.mass - away) / jnp.where(total > 0, total, 1)
    x = x * jnp.where(jnp.abs(kept - 1) < 1e-3, kept, 1)
  return x, level


def _winner_takes_all(block: _Block, x, level):
  """Wardrop users who do not mind waiting (gamma = 0); ties split equally."""
  v = jnp.where(block.s > 0, block.v, -jnp.inf)
  best = jnp.max(v)
  winners = (v == best).astype(v.dtype)
  count = winners.sum()
  if block.outside is not None:
    count = count + (block.outside == best)
    winners = winners * (block.outside <= best)
    best = jnp.maximum(best, block.outside)
  free = block.gamma == 0
  all_x = block.mass * winners / count
  return jnp.where(free, all_x, x), jnp.where(free, best, level)


def rival_level(
  game: ProviderGame, alpha: jax.Array, i: Any, mass: jax.Array
) -> jax.Array:
  """Level at which everybody but provider i holds a mass of users.

  Args:
    game: the game, with one type of users.
    alpha: [M].
    i: the provider that is left out.
    mass: [], in (0, 1].

  Returns:
    [], V(mass); decreasing in the mass. No derivatives.
  """
  v, s = quality(game, alpha)
  s = jnp.where(jnp.arange(s.shape[0]) == i, 0, s)
  gamma = jnp.reshape(jnp.asarray(game.gamma, s.dtype), ())
  block = _Block(v, s, 0 * s, gamma, game.tau, mass, game.outside)
  level = _split_block(block, game.latency, bool(game.wardrop))[1]
  return level if game.wardrop else level - game.tau * jnp.log(mass)


def utilities(
  game: ProviderGame, alpha: jax.Array, x: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Utilities and latencies at given loads.

  Args:
    game: the game.
    alpha: [M].
    x: [M], total loads.

  Returns:
    u [K, M], -inf where s = 0; latency [M], inf where s = 0.
  """
  v, s = quality(game, alpha)
  ok = s > 0
  wait = game.latency.value(jnp.where(ok, x, 0), jnp.where(ok, s, 1))
  gamma = jnp.reshape(jnp.asarray(game.gamma, v.dtype), (-1, 1))
  late = ~jnp.isfinite(wait)[None]
  u = v[None] - gamma * jnp.where(late, 0, wait[None])
  u = jnp.where((gamma > 0) & late, -jnp.inf, u)
  return jnp.where(ok[None], u, -jnp.inf), jnp.where(ok, wait, jnp.inf)


def _residual(game, alpha, x_types, mass):
  """Distance of x from equilibrium, by its definition; []."""
  x = x_types.sum(0)
  u, _ = utilities(game, alpha, x)
  away = mass - x_types.sum(1)
  if game.outside is not None:
    u = jnp.concatenate([u, jnp.full((len(u), 1), game.outside, u.dtype)], 1)
    x_types = jnp.concatenate([x_types, away[:, None]], 1)
    away = jnp.zeros_like(away)
  if game.wardrop:
    lost = u.max(1, keepdims=True) - u
    gap = jnp.where(x_types > 0, x_types * lost, 0).sum()
    wrong = jnp.abs(away).sum() + jnp.maximum(-x_types.min(), 0)
    found = gap + wrong
  else:
    choice = mass[:, None] * jax.nn.softmax(u / game.tau, axis=1)
    found = jnp.abs(x_types - choice).max()
  return jnp.where(jnp.isnan(found), jnp.inf, found)


def _feasible(game: ProviderGame, s: jax.Array) -> jax.Array:
  if game.outside is not None:
    return jnp.bool_(True)
  return s.sum() > 1 if game.latency.capacitated else (s > 0).any()


def _turns(game, v, s, gamma, mass):
  """Shares [K, M] and levels [K], by turns of the types; no derivatives."""

  def block(x, k):
    other = x.sum(0) - x[k]
    found = _Block(v, s, other, gamma[k], game.tau, mass[k], game.outside)
    return _split_block(found, game.latency, bool(game.wardrop))

  types, providers = mass.shape[0], s.shape[0]
  x = jnp.zeros((types, providers), s.dtype)
  level = jnp.zeros(types, s.dtype)
  if types == 1:
    one, level = block(x, 0)
    return one[None], level[None]

  def turn(carry):
    x, level, _, step = carry
    before = x
    for k in range(types):
      one, w = block(x, k)
      x, level = x.at[k].set(one), level.at[k].set(w)
    return x, level, jnp.abs(x - before).max(), step + 1

  def unfinished(carry):
    *_, moved, step = carry
    return (moved > 8 * jnp.finfo(s.dtype).eps) & (step < _TURNS)

  carry = (x, level, jnp.asarray(1.0, s.dtype), jnp.int32(0))
  x, level, *_ = jax.lax.while_loop(unfinished, turn, carry)
  return x, level


def _equations(game: ProviderGame, alpha, mass, found):
  """Residual whose root is (x, W), for derivatives; fixed active set."""
  x0, w0 = jax.lax.stop_gradient(found)
  active = x0 > 0
  if game.wardrop:
    active &= jnp.reshape(jnp.asarray(game.gamma), (-1, 1)) > 0

  def residual(z):
    x, w = z
    u, _ = utilities(game, alpha, x.sum(0))
    u = jnp.where(active, u, 0)
    entropy = 0.0
    if not game.wardrop:
      entropy = game.tau * (_log(jnp.where(active, x, 1)) - _log(mass)[:, None])
    level = jnp.where(active, u - entropy - w[:, None], x - x0)
    total = x.sum(1) - mass
    if game.outside is not None:
      slack = x0.sum(1) < mass
      if game.wardrop:
        total = jnp.where(slack, w - game.outside, total)
      else:
        total = total + mass * jnp.exp((game.outside - w) / game.tau)
    # Nobody active: nothing to differentiate.
    return level, jnp.where(active.any(1), total, w - w0)

  return residual


def split_users(game: ProviderGame, alpha: jax.Array) -> UserEq:
  """`user_equilibrium` without checks, in the dtype of its arguments.

  Differentiable in alpha and in every number of the game, by the implicit
  function theorem; at a kink (a provider about to enter) one-sided.

  Args:
    game: the game.
    alpha: [M].

  Returns:
    The equilibrium.
  """
  v, s = quality(game, alpha)
  dtype = jnp.result_type(v, s)
  v, s = v.astype(dtype), s.astype(dtype)
  types = game.num_types
  gamma = jnp.reshape(jnp.asarray(game.gamma, dtype), (types,))
  one = jnp.ones((1,), dtype)
  mass = one if game.weights is None else jnp.asarray(game.weights, dtype)
  feasible = _feasible(game, s)
  frozen = jax.lax.stop_gradient
  still = jax.tree.map(frozen, game)
  x, level = _turns(still, frozen(v), frozen(s), frozen(gamma), frozen(mass))
  level = jnp.where(feasible, level, 0)
  if game.latency.capacitated:
    work = mass[:, None] / mass.sum() * frozen(s)[None]
  else:
    work = jnp.zeros_like(x)
  x = jnp.where(feasible, x, work)
  residual = _residual(still, frozen(alpha), x, frozen(mass))
  x, level = roots.attach(_equations(game, alpha, mass, (x, level)), (x, level))
  total = x.sum(0)
  _, wait = utilities(game, alpha, total)
  level = jnp.where(feasible, level, -jnp.inf)
  away = jnp.where(feasible, mass.sum() - total.sum(), 0)
  if game.outside is None:
    away = jnp.zeros_like(away)
  residual = jnp.where(feasible, residual, jnp.inf)
  return UserEq(total, mass @ level, wait, residual, away, x, level)


_split_users = jax.jit(split_users)


def user_equilibrium(game: ProviderGame, alpha: Any) -> UserEq:
  """The users' equilibrium at given splits of the budgets.

  Args:
    game: the game.
    alpha: [M] in [0, 1]; share of each budget that is spent on training.

  Returns:
    The equilibrium; NumPy in float64 unless game or alpha hold jax arrays.

  Raises:
    ValueError: alpha of another shape or outside [0, 1]; nobody serves, or
      queues too short for all users, where nobody may stay away.
  """
  alpha = checks.check_alpha(alpha, game.num_providers)
  if game.outside is None and checks.concrete(alpha, game.budgets):
    s = (1 - np.asarray(alpha)) * np.asarray(game.budgets)
    if not (s > 0).any():
      raise ValueError(
        'alpha is 1 for every provider: nobody serves; lower one of them or '
        'set outside, the utility of staying away'
      )
    if game.latency.capacitated and s.sum() <= 1:
      raise ValueError(
        f'serving capacity {s.sum():g} is at most the mass of users, 1: the '
        f'{game.latency.name} queues grow for ever; lower alpha, raise budgets '
        'or set outside'
      )
  return checks.precise(_split_users, game, alpha)

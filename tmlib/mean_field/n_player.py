r"""Finitely many players of a mean-field game.

n players (of each population) move by the game's tables and see their own
empirical law mu^n in place of mu. Where transitions do not depend on the
population, and the others play `pi`, they are independent draws of its flow
mu_t whatever one player does: a deviating player faces a decision problem with
rewards

  r_t(s, a) = E r(s, a, (delta_s + sum of n - 1 draws of mu_t) / n, t),

so that the n-player exploitability of `pi` (against deviations that see the
player's own state) is exact once these are. They are, as sums over a binomial
law, where the reward of a state depends on the population only through the
mass of that state ('local'); elsewhere they are Monte Carlo means.

Axes: n players, H time steps, S states, A actions, M episodes, K samples.
"""

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import gammaln, xlog1py, xlogy
from jax.tree_util import Partial

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame

__all__ = [
  'Deviation',
  'NPlayerGame',
  'Play',
  'deviation_gain',
  'n_player_exploitability',
  'simulate',
  'to_n_player',
]


class NPlayerGame(flax.struct.PyTreeNode):
  """A mean-field game among finitely many players; from `to_n_player`.

  Attributes:
    game: a finite-horizon game.
    players: n, of each population (static).
  """

  game: MFGame
  players: int = flax.struct.field(pytree_node=False)


class Play(NamedTuple):
  """Simulated episodes.

  Attributes:
    flow: [M, H, S], empirical law before each decision.
    returns: [M, n P], discounted return of each player.
  """

  flow: jax.Array
  returns: jax.Array


class Deviation(NamedTuple):
  """What one player gained by another policy, estimated.

  Attributes:
    gain: [], mean over episodes.
    error: [], its standard error.
  """

  gain: jax.Array
  error: jax.Array


def to_n_player(game: MFGame, n: int) -> NPlayerGame:
  """The game among n players (n of each population).

  Args:
    game: a finite-horizon game.
    n: number of players, at least one.

  Returns:
    The n-player game, for `simulate`, `n_player_exploitability` and
    `deviation_gain`.

  Raises:
    ValueError: a stationary game, n < 1.
  """
  checks.check_count('n', n)
  if game.horizon is None:
    raise ValueError(
      'a stationary game has no episodes; give it a horizon (game.replace('
      'horizon=..., mu0=...)) first'
    )
  return NPlayerGame(game, n)


def _draw(uniform: jax.Array, p: jax.Array) -> jax.Array:
  """Index drawn from p [..., K] by inverse transform of uniform [...]."""
  cumulative = jnp.cumsum(p, -1)
  passed = uniform[..., None] * cumulative[..., -1:] >= cumulative
  return passed[..., :-1].sum(-1).astype(jnp.int32)


def _episode(key, ngame, policies):
  """One episode; policies [2, H, S, A]: of player 0, and of the others."""
  game, n = ngame.game, ngame.players
  dtype = checks.float_type()
  sizes = game.populations
  idx = jnp.asarray(game.idx)
  start = operators.start(game)
  ends = np.cumsum(sizes)
  starts = ends - np.asarray(sizes)
  who = jnp.arange(n * len(sizes))
  own = jnp.where(who == 0, 0, 1)

  def uniforms(key, count):
    draw = lambda i: jax.random.uniform(
      jax.random.fold_in(key, i), (count,), dtype
    )
    return jax.vmap(draw)(who)

  begin_key, step_key = jax.random.split(key)
  first = uniforms(begin_key, 1)[:, 0].reshape(len(sizes), n)
  state = jnp.concatenate([
    low + _draw(first[p], jnp.broadcast_to(start[low:high], (n, high - low)))
    for p, (low, high) in enumerate(zip(starts, ends, strict=True))
  ]).astype(jnp.int32)  # fmt: skip

  def step(state, t):
    mu = jnp.zeros(game.num_states, dtype).at[state].add(1 / n)
    u = uniforms(jax.random.fold_in(step_key, t), 2)
    action = _draw(u[:, 0], policies[own, t, state])
    reward, prob = operators.tables(game, mu, t)
    outcome = _draw(u[:, 1], prob[state, action])
    return idx[state, action, outcome], (mu, reward[state, action])

  times = jnp.arange(game.horizon, dtype=jnp.int32)
  _, (flow, rewards) = jax.lax.scan(step, state, times)
  weight = jnp.asarray(game.discount, dtype) ** times.astype(dtype)
  return Play(flow, (weight[:, None] * rewards).sum(0))


@jax.jit
def _episodes(keys, ngame, policies):
  return jax.lax.map(lambda key: _episode(key, ngame, policies), keys)


def simulate(
  key: jax.Array, ngame: NPlayerGame, pi: jax.Array, episodes: int
) -> Play:
  """Plays episodes in which everybody uses `pi`.

  Args:
    key: PRNG key; consumed.
    ngame: the game.
    pi: [H, S, A].
    episodes: M.

  Returns:
    Flows and returns.

  Raises:
    ValueError: see `checks.check_policy`; no episode.
  """
  checks.check_count('episodes', episodes)
  checks.check_policy(pi, ngame.game.policy_shape, ngame.game.mask)
  pi = jnp.asarray(pi, checks.float_type())
  return _episodes(jax.random.split(key, episodes), ngame, jnp.stack([pi, pi]))


def deviation_gain(
  key: jax.Array,
  ngame: NPlayerGame,
  pi: jax.Array,
  deviation: jax.Array,
  episodes: int,
) -> Deviation:
  """What player 0 gains by `deviation` while the others play `pi`.

  Both are played with the same random numbers. For any transitions; with a
  best response to the mean-field flow it bounds the n-player exploitability
  from below.

  Args:
    key: PRNG key; consumed.
    ngame: the game.
    pi: [H, S, A].
    deviation: [H, S, A].
    episodes: M, at least two.

  Returns:
    The mean gain and its standard error.

  Raises:
    ValueError: see `checks.check_policy`; fewer than two episodes.
  """
  checks.check_count('episodes', episodes, 2)
  for one in (pi, deviation):
    checks.check_policy(one, ngame.game.policy_shape, ngame.game.mask)
  dtype = checks.float_type()
  pi, deviation = jnp.asarray(pi, dtype), jnp.asarray(deviation, dtype)
  keys = jax.random.split(key, episodes)
  changed = _episodes(keys, ngame, jnp.stack([deviation, pi]))
  usual = _episodes(keys, ngame, jnp.stack([pi, pi]))
  gain = changed.returns[:, 0] - usual.returns[:, 0]
  return Deviation(gain.mean(), gain.std(ddof=1) / np.sqrt(episodes))


def _binomial(n: int, p: jax.Array) -> jax.Array:
  """[..., n + 1], law of Bin(n, p)."""
  k = jnp.arange(n + 1, dtype=p.dtype)
  ways = gammaln(n + 1.0) - gammaln(k + 1) - gammaln(n - k + 1)
  ways = ways.reshape((1,) * p.ndim + (-1,))
  k = k.reshape((1,) * p.ndim + (-1,))
  return jnp.exp(ways + xlogy(k, p[..., None]) + xlog1py(n - k, -p[..., None]))


@jax.jit
def _local_rewards(ngame, mu):
  """[H, S, A] by sums over how many others share one's state."""
  game, n = ngame.game, ngame.players
  dtype = mu.dtype
  shares = (jnp.arange(n, dtype=dtype) + 1) / n

  def at(now):
    mu_t, t = now
    # For a local reward the other entries do not matter.
    each = lambda share: operators.tables(
      game, jnp.full(game.num_states, share), t
    )[0]
    rewards = jax.vmap(each)(shares)
    return jnp.einsum('ksa,sk->sa', rewards, _binomial(n - 1, mu_t))

  return jax.lax.map(at, (mu, jnp.arange(game.horizon, dtype=jnp.int32)))


@jax.jit
def _sampled_rewards(keys, ngame, mu):
  """[H, S, A] and their standard errors, by draws of the others."""
  game, n = ngame.game, ngame.players
  own = jnp.eye(game.num_states, dtype=mu.dtype)

  def sample(now, key):
    mu_t, t = now
    counts = jax.random.multinomial(
      jax.random.fold_in(key, t), jnp.asarray(n - 1, mu.dtype), mu_t
    )
    seen = (counts[None] + own) / n
    each = jax.vmap(lambda m: operators.tables(game, m, t)[0])(seen)
    return jnp.diagonal(each, axis1=0, axis2=1).T

  def at(now):
    rewards = jax.lax.map(lambda key: sample(now, key), keys)
    return rewards.mean(0)

  return jax.lax.map(at, (mu, jnp.arange(game.horizon, dtype=jnp.int32)))


def _is_local(game: MFGame, mu: jax.Array) -> bool:
  """Whether d r(s, .) / d mu(s') vanishes for s' != s, at a random point."""
  rng = np.random.default_rng(0)
  at = jnp.asarray(0.5 * np.asarray(mu) + 0.5 * rng.dirichlet(np.ones(len(mu))))

  def slope(tangent):
    f = lambda m: operators.tables(game, m, jnp.int32(0))[0]
    _, moved = jax.jvp(f, (at,), (tangent,))
    return moved / tangent[:, None]

  draw = lambda: jnp.asarray(rng.uniform(1, 2, len(mu)), at.dtype)
  a, b = slope(draw()), slope(draw())
  return bool(jnp.abs(a - b).max() <= 1e-4 * (1 + jnp.abs(a).max()))


def _table(rewards, mu, t):
  del mu
  return rewards[t]


def n_player_exploitability(
  ngame: NPlayerGame,
  pi: jax.Array,
  *,
  key: jax.Array | None = None,
  samples: int = 0,
) -> jax.Array:
  """What one of n players can gain by deviating from `pi`.

  Exact where the reward is local; else pass a key and samples, and know that a
  maximum over noisy values is biased upwards.

  Args:
    ngame: the game; transitions that do not depend on the population, and one
      population.
    pi: [H, S, A].
    key: PRNG key, for rewards that are not local.
    samples: K, draws of the others per time step.

  Returns:
    [], at least zero.

  Raises:
    ValueError: transitions depend on the population or there are several (use
      `deviation_gain`); a reward that is not local, without samples.
  """
  game = ngame.game
  checks.check_policy(pi, game.policy_shape, game.mask)
  if callable(game.prob) or len(game.populations) > 1:
    raise ValueError(
      'transitions depend on the population, or there are several: the other '
      'players are then not independent of the deviation; use deviation_gain'
    )
  pi = jnp.asarray(pi, checks.float_type())
  mu = operators.flow(game, pi)
  if samples:
    if key is None:
      raise ValueError(f'samples={samples} needs a key')
    rewards = _sampled_rewards(jax.random.split(key, samples), ngame, mu)
  elif _is_local(game, mu[0]):
    rewards = _local_rewards(ngame, mu)
  else:
    raise ValueError(
      'the reward of a state depends on the mass of others; pass key= and '
      'samples= for a Monte Carlo estimate'
    )
  return _gap(game, rewards, pi)


@jax.jit
def _gap(game: Any, rewards: jax.Array, pi: jax.Array) -> jax.Array:
  leaves, treedef = jax.tree.flatten(game)
  own = jax.tree.unflatten(treedef, leaves)
  object.__setattr__(own, 'reward_fn', Partial(_table, rewards))
  return operators.gap(own, pi)

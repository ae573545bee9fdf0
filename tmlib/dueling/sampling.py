"""Counts of duels without playing them one by one.

Answers to repeated duels of a pair are binomial, so an algorithm that looks at
counts only can be simulated in time independent of the horizon, exactly.

Axes: N users, K arms, P = K (K - 1) / 2 pairs in the order of
`regret.pair_order`.
"""

import math

import jax
import jax.numpy as jnp

from tmlib.dueling import borda, envs, regret

__all__ = [
  'explore',
  'meeting_rounds',
  'pair_preference',
  'round_robin_counts',
  'sample_wins',
  'tally_of_pairs',
]


def meeting_rounds(arms: int, users: int, feedback: str) -> int:
  """Rounds of round-robin until every user has met every pair.

  Args:
    arms: K.
    users: N.
    feedback: 'all' or 'one'. One answering user per round: until it holds but
      for probability 1/1000 (a user has half of the expected m answers but for
      probability exp(-m / 8)).

  Returns:
    The rounds.
  """
  pairs = arms * (arms - 1) // 2
  if feedback == 'all' or users == 1:
    return pairs
  return users * max(2 * pairs, math.ceil(8 * math.log(1000 * users)))


def pair_preference(env: envs.DuelingEnv) -> jax.Array:
  """P_ij of the ordered pairs, [N, P]."""
  i, j = regret.pair_order(env.num_arms)
  return env.preference[:, i, j]


def round_robin_counts(total: jax.Array, pairs: int) -> jax.Array:
  """How often each pair was met after `total` rounds of round-robin.

  Args:
    total: [...] int.
    pairs: P.

  Returns:
    [..., P] int32.
  """
  total = jnp.asarray(total)[..., None]
  rank = jnp.arange(pairs, dtype=total.dtype)
  rank = rank.reshape((1,) * (total.ndim - 1) + (pairs,))
  return total // pairs + (rank < total % pairs)


def sample_wins(
  key: jax.Array, p: jax.Array, counts: jax.Array, outcomes: str
) -> jax.Array:
  """Wins of the first arm in repeated duels.

  Args:
    key: PRNG key; consumed.
    p: [N, P], probability that the first arm wins.
    counts: [N, P] int, duels; equal rows where outcomes are shared.
    outcomes: 'independent' or 'shared'. Shared: one uniform number per duel, so
      the users' wins are nested counts; sorted by p they are sequential
      binomials.

  Returns:
    [N, P] float.
  """
  n = counts.astype(p.dtype)
  if outcomes == 'independent' or p.shape[0] == 1:
    return jax.random.binomial(key, n, p)
  order = jnp.argsort(p, 0)
  ranked = jnp.take_along_axis(p, order, 0)
  keys = jax.random.split(key, p.shape[0])

  def body(carry, inputs):
    below, previous = carry
    user_key, current = inputs
    # Chance to fall in [previous, current) given not below previous.
    room = jnp.maximum(1 - previous, 1e-7)
    share = jnp.clip((current - previous) / room, 0, 1)
    below = below + jax.random.binomial(user_key, n[0] - below, share)
    return (below, current), below

  start = (jnp.zeros_like(p[0]), jnp.zeros_like(p[0]))
  _, nested = jax.lax.scan(body, start, (keys, ranked))
  return jnp.take_along_axis(nested, jnp.argsort(order, 0), 0)


def tally_of_pairs(
  wins: jax.Array, counts: jax.Array, arms: int
) -> borda.Tally:
  """Spreads [N, P] wins and counts to [N, K, K] tallies."""
  i, j = regret.pair_order(arms)
  counts = counts.astype(wins.dtype)
  zeros = jnp.zeros((wins.shape[0], arms, arms), wins.dtype)
  return borda.Tally(
    zeros.at[:, i, j].set(wins).at[:, j, i].set(counts - wins),
    zeros.at[:, i, j].set(counts).at[:, j, i].set(counts),
  )


def explore(
  key: jax.Array,
  env: envs.DuelingEnv,
  before: jax.Array,
  rounds: jax.Array,
  design: str = 'balanced',
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Adds exploration rounds.

  balanced: every user goes through the pairs in round-robin, from where it
  stopped. iid: uniform distinct pairs.

  Args:
    key: PRNG key; consumed.
    env: the environment.
    before: [N] int, answers that each user gave so far.
    rounds: [] int, further rounds.
    design: 'balanced' or 'iid'.

  Returns:
    after [N] int, wins [N, P] and counts [N, P] of the added rounds.
  """
  users, arms = env.num_users, env.num_arms
  pairs = arms * (arms - 1) // 2
  user_key, pair_key, win_key = jax.random.split(key, 3)
  rounds = jnp.asarray(rounds)
  added = jnp.broadcast_to(rounds, (users,))
  if env.feedback == 'one':
    uniform = jnp.full(users, 1 / users)
    added = jax.random.multinomial(user_key, rounds.astype(float), uniform)
  after = before + added.astype(before.dtype)
  if design == 'balanced':
    counts = round_robin_counts(after, pairs)
    counts -= round_robin_counts(before, pairs)
  else:
    uniform = jnp.full(pairs, 1 / pairs)
    draw = lambda k, n: jax.random.multinomial(k, n.astype(float), uniform)
    if env.feedback == 'one':
      counts = jax.vmap(draw)(jax.random.split(pair_key, users), added)
    else:
      counts = jnp.broadcast_to(draw(pair_key, rounds), (users, pairs))
    counts = counts.astype(before.dtype)
  outcomes = 'independent' if env.feedback == 'one' else env.outcomes
  wins = sample_wins(win_key, pair_preference(env), counts, outcomes)
  return after, wins, counts

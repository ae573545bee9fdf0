r"""Fair epsilon-greedy, in closed form.

Epoch k plays rounds [t_k, t_{k+1}), t_{k+1} about 1.5 t_k. In every round of
it, with probability
  eps_k = min(1, (2/3) (C / t_k)^(1/3)),   C = c^2 K L / (16 a^2),
the next pair of the round-robin is explored; else both arms come from the fair
lottery of the last epoch's end. Exploration up to T adds to about the tau of
explore-then-commit for every T at once. Within an epoch the number of
explorations is binomial and the answers are binomial, so a run costs
O(log T) draws; `method` plays the same algorithm round by round.

Axes: N users, K arms, P pairs, E epochs.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import (
  checks,
  envs,
  nsw,
  regret,
  sampling,
  theory,
  welfare,
)

__all__ = [
  'Epochs',
  'GreedyResult',
  'fair_eps_greedy',
  'greedy_epochs',
  'simulate_eps_greedy',
]

GROWTH = 1.5


class Epochs(NamedTuple):
  """Schedule of epsilon-greedy.

  Attributes:
    start: [E] int, first round of each epoch.
    length: [E] int, its rounds; they sum to the horizon.
    epsilon: [E] in [0, 1], exploration probability.
  """

  start: Any
  length: Any
  epsilon: Any


class GreedyResult(NamedTuple):
  """One run.

  Attributes:
    pi: [K], the last lottery.
    b_hat: [N, K], the last estimate.
    explored: [] int, exploration rounds.
    total: `regret.Regret`, up to the horizon, [] each.
    curve: `regret.Regret`, cumulative at the end of every epoch, [E] each.
  """

  pi: jax.Array
  b_hat: jax.Array
  explored: jax.Array
  total: regret.Regret
  curve: regret.Regret


def greedy_epochs(
  num_arms: int,
  num_users: int,
  horizon: int,
  kind: str = 'geometric',
  *,
  scale: float = 1.0,
  feedback: str = 'all',
) -> Epochs:
  """Epochs and their exploration probabilities.

  The first epoch explores until every user has met every pair
  (`sampling.meeting_rounds`).

  Args:
    num_arms: K.
    num_users: N.
    horizon: T, below 2^31.
    kind: one of `welfare.KINDS`.
    scale: factor on the exploration probabilities, > 0.
    feedback: 'all' or 'one'.

  Returns:
    The schedule.

  Raises:
    ValueError: a horizon below the first epoch or from 2^31 on.
  """
  checks.check_rounds('horizon', horizon)
  checks.check_positive('scale', scale)
  first = sampling.meeting_rounds(num_arms, num_users, feedback)
  if horizon < first:
    raise ValueError(
      f'horizon={horizon} is shorter than the first {first} rounds, which meet '
      'every pair; raise the horizon or drop arms'
    )
  tau = theory.etc_tau(
    num_arms, num_users, horizon, None, kind, feedback=feedback
  )
  rate = 2 / 3 * tau / horizon ** (2 / 3)
  starts, probabilities = [0], [1.0]
  t = first
  while t < horizon:
    starts.append(t)
    probabilities.append(min(1.0, scale * rate * t ** (-1 / 3)))
    t = math.ceil(GROWTH * t)
  length = np.diff([*starts, horizon])
  return Epochs(
    np.asarray(starts, np.int32),
    np.asarray(length, np.int32),
    np.asarray(probabilities, np.float32),
  )


@functools.partial(jax.jit, static_argnames=('kind',))
def simulate_eps_greedy(
  key: jax.Array,
  env: envs.DuelingEnv,
  epochs: Epochs,
  kind: str = 'geometric',
) -> GreedyResult:
  """`fair_eps_greedy` without checks; env may be traced (vmap).

  Args:
    key: PRNG key; consumed.
    env: the environment.
    epochs: schedule, [E] each.
    kind: one of `welfare.KINDS` (static).

  Returns:
    The run.
  """
  users, arms = env.num_users, env.num_arms
  pairs = arms * (arms - 1) // 2
  b = (env.preference.sum(-1) - 0.5) / (arms - 1)
  losses = regret.instance_losses(b, kind)
  price = regret.pair_losses(losses)

  def body(carry, epoch):
    wins, met, answers, lottery_loss, total, explored, index = carry
    _, length, epsilon = epoch
    count_key, explore_key = jax.random.split(jax.random.fold_in(key, index))
    n = jax.random.binomial(count_key, length.astype(b.dtype), epsilon)
    n = jnp.where(epsilon >= 1, length.astype(b.dtype), n)
    answers, new, counts = sampling.explore(
      explore_key, env, answers, n.astype(jnp.int32)
    )
    wins, met = wins + new, met + counts
    played = counts.sum(0) if env.feedback == 'one' else counts[0]
    total = jax.tree.map(
      lambda t, x: t + played.astype(x.dtype) @ x + (length - n) * lottery_loss,
      total,
      price,
    )
    # A pair that a user has not met yet counts as a coin.
    rate = jnp.where(met > 0, wins / jnp.maximum(met, 1), 0.5)
    p = sampling.tally_of_pairs(rate, jnp.ones_like(met), arms).wins
    b_hat = p.sum(-1) / (arms - 1)
    pi = nsw.maximize_welfare(b_hat, kind).pi
    loss = losses.best - welfare.nash_welfare(pi, b, kind)
    carry = (
      wins,
      met,
      answers,
      jnp.maximum(loss, 0),
      total,
      explored + n.astype(jnp.int32),
      index + 1,
    )
    return carry, (total, pi, b_hat)

  zero = jnp.zeros((), b.dtype)
  start = (
    jnp.zeros((users, pairs), b.dtype),
    jnp.zeros((users, pairs), jnp.int32),
    jnp.zeros(users, jnp.int32),
    zero,
    regret.Regret(zero, zero, zero),
    jnp.int32(0),
    jnp.int32(0),
  )
  epochs = jax.tree.map(jnp.asarray, epochs)
  end, (curve, pi, b_hat) = jax.lax.scan(body, start, epochs)
  return GreedyResult(pi[-1], b_hat[-1], end[5], end[4], curve)


def fair_eps_greedy(
  key: jax.Array,
  env: Any,
  horizon: int,
  kind: str = 'geometric',
  *,
  scale: float = 1.0,
) -> GreedyResult:
  """Runs fair epsilon-greedy once; vmap over keys for many seeds.

  Args:
    key: PRNG key; consumed.
    env: `envs.DuelingEnv` or `glm.GlmEnv`.
    horizon: T.
    kind: one of `welfare.KINDS`.
    scale: factor on the exploration probabilities, > 0.

  Returns:
    The run.

  Raises:
    ValueError: an unknown kind, or a horizon that is too short.
  """
  checks.check_choice('kind', kind, welfare.KINDS)
  env = envs.DuelingEnv(env.preference, env.outcomes, env.feedback)
  checks.check_preference(env.preference)
  epochs = greedy_epochs(
    env.num_arms,
    env.num_users,
    horizon,
    kind,
    scale=scale,
    feedback=env.feedback,
  )
  return simulate_eps_greedy(key, env, epochs, kind)

r"""Fair explore-then-commit, in closed form.

Duel every pair in turn for tau rounds, estimate all users' Borda scores, solve
for the fair lottery once, and draw both arms from it until T. Only the counts
matter, so a run costs the same for every horizon. `method` plays the same
algorithm round by round.

Axes: N users, K arms, P pairs.
"""

import functools
import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import (
  borda,
  checks,
  envs,
  nsw,
  regret,
  sampling,
  theory,
  welfare,
)

__all__ = ['RULES', 'EtcResult', 'choose_lottery', 'fair_etc', 'simulate_etc']

RULES = ('welfare', 'vote')


class EtcResult(NamedTuple):
  """One run.

  Attributes:
    pi: [K], the lottery that was committed to.
    b_hat: [N, K], estimated scores.
    radius: [N, K], their confidence radii.
    gap: [], solver's certificate for pi under b_hat.
    tau: [] int, exploration rounds.
    explore: `regret.Regret`, summed over the exploration, [] each.
    commit: [], regret per round afterwards (all three names agree).
    total: `regret.Regret`, up to the horizon, [] each.
  """

  pi: jax.Array
  b_hat: jax.Array
  radius: jax.Array
  gap: jax.Array
  tau: jax.Array
  explore: regret.Regret
  commit: jax.Array
  total: regret.Regret


def choose_lottery(
  b_hat: jax.Array, kind: str, rule: str = 'welfare'
) -> nsw.Solution:
  """The lottery that an algorithm commits to.

  Args:
    b_hat: [N, K], estimated scores.
    kind: one of `welfare.KINDS`.
    rule: 'welfare' maximises it; 'vote' lets a uniform user dictate: the mean
      of the users' own best arms (per-user commitment, a baseline).

  Returns:
    The solution; the gap of a vote is infinite, as nothing certifies it.

  Raises:
    ValueError: an unknown rule.
  """
  checks.check_choice('rule', rule, RULES)
  if rule == 'welfare':
    return nsw.maximize_welfare(b_hat, kind)
  arms = b_hat.shape[1]
  pi = jax.nn.one_hot(b_hat.argmax(1), arms, dtype=b_hat.dtype).mean(0)
  value = welfare.nash_welfare(pi, b_hat, kind)
  return nsw.Solution(pi, value, jnp.full_like(value, jnp.inf))


@functools.partial(jax.jit, static_argnames=('kind', 'design', 'rule'))
def simulate_etc(
  key: jax.Array,
  env: envs.DuelingEnv,
  tau: jax.Array,
  horizon: jax.Array,
  delta: jax.Array,
  kind: str = 'geometric',
  design: str = 'balanced',
  rule: str = 'welfare',
) -> EtcResult:
  """`fair_etc` without checks; tau, horizon and env may be traced (vmap).

  Args:
    key: PRNG key; consumed.
    env: the environment.
    tau: [] int, exploration rounds; balanced: at least P per user.
    horizon: [] int.
    delta: [] in (0, 1), failure probability of the radii.
    kind: one of `welfare.KINDS` (static).
    design: one of `borda.DESIGNS` (static).
    rule: one of `RULES` (static).

  Returns:
    The run.
  """
  b = (env.preference.sum(-1) - 0.5) / (env.num_arms - 1)
  losses = regret.instance_losses(b, kind)
  tau = jnp.asarray(tau)
  start = jnp.zeros(env.num_users, jnp.int32)
  _, wins, counts = sampling.explore(key, env, start, tau, design)
  tally = sampling.tally_of_pairs(wins, counts, env.num_arms)
  estimate = borda.estimate_from_tally(tally, design, delta)
  solution = choose_lottery(estimate.b_hat, kind, rule)
  met = counts.sum(0) if env.feedback == 'one' else counts[0]
  explore = jax.tree.map(
    lambda x: met.astype(x.dtype) @ x, regret.pair_losses(losses)
  )
  loss = losses.best - welfare.nash_welfare(solution.pi, b, kind)
  commit = jnp.maximum(loss, 0)
  total = jax.tree.map(lambda x: x + (horizon - tau) * commit, explore)
  return EtcResult(
    solution.pi,
    estimate.b_hat,
    estimate.radius,
    solution.gap,
    tau,
    explore,
    commit,
    total,
  )


def settle_tau(tau: int, horizon: int, least: int, name: str) -> int:
  """Clamps the exploration to [least, horizon], saying so.

  Args:
    tau: wanted rounds.
    horizon: T.
    least: rounds that the estimator needs.
    name: of what needs them.

  Returns:
    The rounds to use.

  Raises:
    ValueError: the horizon is below `least` or not a number of rounds.

  Warns:
    UserWarning: tau was changed.
  """
  checks.check_rounds('horizon', horizon)
  if not math.isfinite(tau):
    raise ValueError(f'tau={tau} must be a number of rounds')
  if horizon < least:
    raise ValueError(
      f'horizon={horizon} is shorter than the {least} rounds that {name} needs;'
      ' raise the horizon or drop arms'
    )
  settled = int(min(max(int(tau), least), horizon))
  if settled != tau:
    warnings.warn(
      f'tau={tau} was clamped to {settled} (allowed: [{least}, horizon='
      f'{horizon}] for {name})',
      stacklevel=3,
    )
  return settled


def fair_etc(
  key: jax.Array,
  env: Any,
  horizon: int,
  tau: int | None = None,
  kind: str = 'geometric',
  *,
  delta: float | None = None,
  design: str | None = None,
  rule: str = 'welfare',
) -> EtcResult:
  """Runs fair explore-then-commit once; vmap over keys for many seeds.

  Args:
    key: PRNG key; consumed.
    env: `envs.DuelingEnv` or `glm.GlmEnv` (used through its preferences).
    horizon: T, below 2^31.
    tau: exploration rounds; None: `theory.etc_tau`.
    kind: one of `welfare.KINDS`.
    delta: failure probability of the radii; None: 1/T.
    design: 'balanced' or 'iid'; None: balanced if tau reaches every pair.
    rule: 'welfare' or 'vote' (per-user commitment, averaged).

  Returns:
    The run.

  Raises:
    ValueError: an unknown choice, a horizon that is too short, or (feedback
      'one') a user who did not meet every pair.

  Warns:
    UserWarning: tau was clamped.
  """
  checks.check_choice('kind', kind, welfare.KINDS)
  checks.check_choice('rule', rule, RULES)
  env = envs.DuelingEnv(env.preference, env.outcomes, env.feedback)
  checks.check_preference(env.preference)
  arms, users = env.num_arms, env.num_users
  pairs = arms * (arms - 1) // 2
  if tau is None:
    tau = theory.etc_tau(
      arms, users, horizon, delta, kind, feedback=env.feedback
    )
    least = sampling.meeting_rounds(arms, users, env.feedback)
    tau = max(tau, min(least, horizon))
  if design is None:
    design = 'balanced' if tau >= pairs else 'iid'
  checks.check_choice('design', design, borda.DESIGNS)
  least = pairs if design == 'balanced' else arms
  tau = settle_tau(tau, horizon, least, f"design='{design}'")
  delta = 1 / horizon if delta is None else delta
  checks.check_probability('delta', delta)
  result = simulate_etc(key, env, tau, int(horizon), delta, kind, design, rule)
  if checks.concrete(*jax.tree.leaves(result)):
    lost = ~np.isfinite(np.asarray(result.b_hat)).all(1)
    lost |= ~np.isfinite(np.asarray(result.radius)).all(1)
    if lost.any():
      raise ValueError(
        f'user {int(lost.argmax())} answered too few duels for an estimate '
        f'(feedback={env.feedback!r}, tau={tau}); raise tau'
      )
  return result

r"""How much exploration does a new item set need?

Given a guess b0 of the scores (from a pilot, or of a similar item set):
  certified: tau with c eps(tau) <= eps for the worst instance (`theory`);
  simulated: the first of tau, 2 tau, 4 tau.. at which the welfare lost by
  committing stays below eps in all but a share delta of simulated runs on users
  who score like b0: P_ij = 1/2 + (b_i - b_j) (K - 1) / K, clipped, has these
  very Borda scores.

The first is safe and large, the second is what such users would need.

Axes: N users, K arms.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks, envs, etc, sampling, theory, welfare

__all__ = ['Plan', 'plan', 'preference_from_scores']

MOST_SIMULATED = 2**30


class Plan(NamedTuple):
  """Rounds of exploration.

  Attributes:
    certified: enough for every instance, with probability 1 - delta.
    simulated: enough for users who score like b0; None if not even the largest
      simulated tau (at most 2^30) was.
    taus: [X], simulated rounds.
    loss: [X], (1 - delta) quantile of the welfare lost at each.
  """

  certified: int
  simulated: int | None
  taus: np.ndarray
  loss: np.ndarray


def preference_from_scores(b: Any) -> np.ndarray:
  """Linear preferences with given Borda scores.

  Args:
    b: [N, K] in [0, 1]; rows are shifted to mean 1/2.

  Returns:
    [N, K, K]; the scores are exact unless a difference is beyond K / (2 (K-1)).
  """
  b = np.asarray(b, np.float64)
  arms = b.shape[1]
  lead = (b[:, :, None] - b[:, None, :]) * (arms - 1) / arms
  return np.clip(0.5 + lead, 0, 1)


def plan(
  b0: Any,
  eps: float,
  kind: str = 'geometric',
  *,
  delta: float = 0.05,
  feedback: str = 'all',
  outcomes: str = 'independent',
  runs: int = 200,
  seed: int = 0,
) -> Plan:
  """Plans the exploration of an item set.

  Args:
    b0: [N, K] in [0, 1], guessed scores.
    eps: welfare that may be lost by committing too early, in (0, 1).
    kind: one of `welfare.KINDS`.
    delta: accepted share of failures, in (0, 1).
    feedback: 'all' or 'one'.
    outcomes: 'independent' or 'shared'.
    runs: simulated runs per tau.
    seed: of the simulation.

  Returns:
    The plan.

  Raises:
    ValueError: a number out of range, NaN, an unknown kind.
  """
  checks.check_choice('kind', kind, welfare.KINDS)
  checks.check_probability('eps', eps)
  checks.check_probability('delta', delta)
  if runs < 1:
    raise ValueError(f'runs={runs} must be at least 1')
  b0 = np.asarray(b0, np.float64)
  if b0.ndim != 2 or not np.isfinite(b0).all() or b0.min() < 0 or b0.max() > 1:
    raise ValueError('b0 must be [N, K], finite and in [0, 1]')
  env = envs.make_env(
    np.asarray(preference_from_scores(b0), np.float32), outcomes, feedback
  )
  users, arms = b0.shape
  certified = _certified(arms, users, eps, kind, delta, feedback)
  first = sampling.meeting_rounds(arms, users, feedback)
  last = min(max(certified, first), MOST_SIMULATED)
  keys = jax.random.split(jax.random.key(seed), runs)
  simulate = jax.jit(
    jax.vmap(
      lambda key, tau: etc.simulate_etc(key, env, tau, tau, delta, kind).commit,
      (0, None),
    )
  )
  taus, losses = [], []
  tau = first
  while tau <= last:
    loss = np.asarray(simulate(keys, jnp.int32(tau)))
    taus.append(tau)
    losses.append(float(np.quantile(loss, 1 - delta)))
    if losses[-1] <= eps:
      break
    tau *= 2
  enough = losses[-1] <= eps
  return Plan(
    certified, taus[-1] if enough else None, np.array(taus), np.array(losses)
  )


def _certified(arms, users, eps, kind, delta, feedback) -> int:
  """Smallest tau whose bound on the commit loss is eps (and is valid).

  With one answer per round a user has tau / (2 N) of them but for probability
  exp(-tau / (8 N)), by Chernoff's bound.
  """
  pairs = arms * (arms - 1) // 2
  one = feedback == 'one'
  # Half of delta for the radii, half for users who are asked too seldom.
  radius = theory.upper_bound(
    arms, users, 2, kind, tau=1, delta=delta / 2 if one else delta
  ).radius
  # radius ~ n^(-1/2) in the answers n of a user: its constant is that of n = 1.
  answers = (theory.commit_constant(kind, users) * radius / eps) ** 2
  if kind in welfare.NASH and users > 1:
    answers = max(answers, (4 * users * radius) ** 2)
  # Whole round-robins, or the radius would be that of the rarest pair.
  answers = pairs * math.ceil(answers / pairs)
  if not one:
    return answers
  enough = math.ceil(8 * users * math.log(2 * users / delta))
  return max(2 * users * answers, enough)

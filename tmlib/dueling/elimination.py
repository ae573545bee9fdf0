r"""Sequential elimination for the fair lottery.

Phases of balanced duels; a pair is played while one of its arms is active.
After each phase, with b in [b^ - r, b^ + r] for all users and active arms, w =
v(pi^) and pi^ the fair lottery of b^ over the active arms:
  h = max_i mean_u (b^ + r)_u(i) / w_u - 1   =>  mean_u v*_u / w_u <= 1 + h
  s = log G(pi^; b^) - log G(pi^; b^ - r)    =>  mean_u log v*_u / w_u >= -s
The second holds as G* >= G(pi^; b). Both together keep every ratio v*_u / w_u
above the smaller root rho of
  (1/N) [log rho + (N - 1) log((N (1 + h) - rho) / (N - 1))] = -s.
An arm of the support has mean_u b_u(i) / v*_u = 1, so arm i is dropped when
mean_u (b^ + r)_u(i) / (w_u rho) < 1. For one user this is the familiar
b^(i) + r < max b^ - r. It stops at one active arm, or after tau rounds.

The phases' ends are fixed in advance, so a union bound over them suffices.

Axes: N users, K arms, P pairs.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.dueling import (
  borda,
  checks,
  envs,
  etc,
  nsw,
  regret,
  sampling,
  theory,
  welfare,
)

__all__ = [
  'EliminationResult',
  'eliminate',
  'fair_elimination',
  'num_phases',
  'simulate_elimination',
  'survivor_ratio',
]

GROWTH = 1.5


class EliminationResult(NamedTuple):
  """One run.

  Attributes:
    pi: [K], the lottery that was committed to.
    b_hat: [N, K], estimated scores; loose for dropped arms.
    active: [K] bool, arms that were never dropped.
    tau: [] float, exploration rounds used.
    commit: [], regret per round afterwards.
    total: `regret.Regret`, up to the horizon, [] each.
  """

  pi: jax.Array
  b_hat: jax.Array
  active: jax.Array
  tau: jax.Array
  commit: jax.Array
  total: regret.Regret


def survivor_ratio(s: jax.Array, h: jax.Array, users: int) -> jax.Array:
  """Smallest possible v*_u / w_u: the root rho of the module docstring.

  Args:
    s: [] >= 0.
    h: [] >= 0.
    users: N.

  Returns:
    [], in [0, 1 + h].
  """
  if users == 1:
    return jnp.exp(-s)

  def mean_log(ratio):
    others = (users * (1 + h) - ratio) / (users - 1)
    return (jnp.log(ratio) + (users - 1) * jnp.log(others)) / users

  def body(_, bracket):
    low, high = bracket
    middle = (low + high) / 2
    below = mean_log(middle) < -s
    return jnp.where(below, middle, low), jnp.where(below, high, middle)

  start = (jnp.zeros_like(h), 1 + h)
  return jax.lax.fori_loop(0, 40, body, start)[0]


def eliminate(
  b_hat: jax.Array,
  radius: jax.Array,
  active: jax.Array,
  kind: str = 'geometric',
) -> tuple[jax.Array, jax.Array]:
  """Drops the arms that cannot be in the best lottery.

  Args:
    b_hat: [N, K], estimated scores.
    radius: [N, K], uniform confidence radii.
    active: [K] bool.
    kind: a Nash kind or 'utilitarian'.

  Returns:
    The arms that stay, [K] bool (never none), and the best lottery over
    `active` under b_hat, [K].
  """
  users = b_hat.shape[0]
  masked = jnp.where(active[None], b_hat, nsw.FLOOR)
  pi = nsw.maximize_welfare(masked, kind).pi
  high = b_hat + radius
  low = jnp.maximum(b_hat - radius, nsw.FLOOR)
  if kind == 'utilitarian':
    lead = jnp.where(active, (b_hat - radius).mean(0), -jnp.inf).max()
    stay = high.mean(0) >= lead
  else:
    w = welfare.user_utility(pi, jnp.maximum(masked, nsw.FLOOR))
    s = jnp.log(w).mean() - jnp.log(welfare.user_utility(pi, low)).mean()
    reach = (high / w[:, None]).mean(0)
    h = jnp.maximum(jnp.where(active, reach, -jnp.inf).max() - 1, 0)
    stay = reach >= survivor_ratio(s, h, users)
  stay = active & stay
  return jnp.where(stay.any(), stay, active), pi


def num_phases(tau: int, pairs: int) -> int:
  """Phases until `tau` rounds are used up if no arm is dropped."""
  return max(1, math.ceil(math.log(max(tau / pairs, 1), GROWTH)) + 1)


@functools.partial(jax.jit, static_argnames=('phases', 'kind'))
def simulate_elimination(
  key: jax.Array,
  env: envs.DuelingEnv,
  tau: jax.Array,
  horizon: jax.Array,
  delta: jax.Array,
  phases: int,
  kind: str = 'geometric',
) -> EliminationResult:
  """`fair_elimination` without checks; tau, horizon and env may be traced.

  Args:
    key: PRNG key; consumed.
    env: the environment, feedback 'all'.
    tau: [] int, largest number of exploration rounds.
    horizon: [] int.
    delta: [] in (0, 1), failure probability over all phases.
    phases: at least `num_phases(tau, P)` (static).
    kind: a Nash kind or 'utilitarian' (static).

  Returns:
    The run.
  """
  users, arms = env.num_users, env.num_arms
  i, j = regret.pair_order(arms)
  b = (env.preference.sum(-1) - 0.5) / (arms - 1)
  losses = regret.instance_losses(b, kind)
  p = sampling.pair_preference(env)

  def estimate(wins, counts):
    tally = sampling.tally_of_pairs(wins, counts, arms)
    return borda.estimate_from_tally(tally, 'balanced', delta / phases)

  def body(phase, carry):
    wins, counts, active, used = carry
    playing = active[i] | active[j]
    share = jnp.floor((tau - used) / playing.sum()).astype(jnp.int32)
    goal = jnp.round(GROWTH ** phase.astype(p.dtype)).astype(jnp.int32)
    # At the first phase every pair is met once; later ones grow the count.
    extra = jnp.minimum(jnp.maximum(goal - counts[0].max(), 1), share)
    extra = jnp.where(playing & (active.sum() > 1), extra, 0)
    added = jnp.broadcast_to(extra, counts.shape)
    new = sampling.sample_wins(
      jax.random.fold_in(key, phase), p, added, env.outcomes
    )
    wins, counts = wins + new, counts + added
    b_hat, radius = estimate(wins, counts)
    # Nothing new, nothing dropped: a look without data costs no confidence.
    stay, _ = eliminate(b_hat, radius, active, kind)
    active = jnp.where(extra.sum() > 0, stay, active)
    return wins, counts, active, used + extra.sum()

  zero = jnp.zeros((users, len(i)), p.dtype)
  counts = jnp.zeros((users, len(i)), jnp.int32)
  carry = (zero, counts, jnp.ones(arms, bool), jnp.int32(0))
  wins, counts, active, used = jax.lax.fori_loop(0, phases, body, carry)
  b_hat, _ = estimate(wins, counts)
  masked = jnp.where(active[None], b_hat, nsw.FLOOR)
  pi = nsw.maximize_welfare(masked, kind).pi
  loss = losses.best - welfare.nash_welfare(pi, b, kind)
  commit = jnp.maximum(loss, 0)
  explored = jax.tree.map(
    lambda x: counts[0].astype(x.dtype) @ x, regret.pair_losses(losses)
  )
  total = jax.tree.map(lambda x: x + (horizon - used) * commit, explored)
  return EliminationResult(pi, b_hat, active, used, commit, total)


def check_elimination(env: Any, kind: str) -> None:
  """Raises where the elimination rule is not derived."""
  checks.check_choice('kind', kind, welfare.NASH + ('utilitarian',))
  if env.feedback != 'all':
    raise ValueError(
      f'feedback={env.feedback!r} is not supported by elimination: its phases '
      "need every user's answer; use fair_etc"
    )


def fair_elimination(
  key: jax.Array,
  env: Any,
  horizon: int,
  tau: int | None = None,
  kind: str = 'geometric',
  *,
  delta: float | None = None,
) -> EliminationResult:
  """Runs sequential elimination once; vmap over keys for many seeds.

  Args:
    key: PRNG key; consumed.
    env: `envs.DuelingEnv` or `glm.GlmEnv`.
    horizon: T.
    tau: most exploration rounds; None: `theory.etc_tau`.
    kind: a Nash kind or 'utilitarian'.
    delta: failure probability; None: 1/T.

  Returns:
    The run.

  Raises:
    ValueError: an unsupported kind or feedback, or a horizon below P.

  Warns:
    UserWarning: tau was clamped.
  """
  check_elimination(env, kind)
  env = envs.DuelingEnv(env.preference, env.outcomes, env.feedback)
  checks.check_preference(env.preference)
  arms = env.num_arms
  pairs = arms * (arms - 1) // 2
  if tau is None:
    tau = theory.etc_tau(arms, env.num_users, horizon, delta, kind)
    tau = max(tau, min(pairs, horizon))
  tau = etc.settle_tau(tau, horizon, pairs, 'elimination')
  delta = 1 / horizon if delta is None else delta
  checks.check_probability('delta', delta)
  phases = num_phases(tau, pairs) + 2
  return simulate_elimination(key, env, tau, int(horizon), delta, phases, kind)

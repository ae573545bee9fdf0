r"""Fair explore-then-commit for generalized-linear preferences.

Compare pairs in the proportions of a D-optimal design for tau rounds, fit every
user's taste by ridge quasi-likelihood, plug in b^_u(i) = mean_j mu(<phi_ij,
theta^_u>), solve for the fair lottery, commit.

Axes: N users, K arms, D features, M compared pairs.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import (
  checks,
  design,
  etc,
  glm,
  nsw,
  regret,
  sampling,
  theory,
  welfare,
)

__all__ = [
  'GlmEtcResult',
  'GlmPlan',
  'design_pairs',
  'fair_glm_etc',
  'plan_design',
  'simulate_glm_etc',
]


class GlmPlan(NamedTuple):
  """Which pairs to compare, and how often.

  Attributes:
    pairs: [M, 2] int, left and right arm.
    counts: [M] int, duels; they sum to tau.
    gap: Kiefer-Wolfowitz certificate of the design before rounding.
  """

  pairs: Any
  counts: Any
  gap: float


class GlmEtcResult(NamedTuple):
  """One run.

  Attributes:
    pi: [K], the lottery that was committed to.
    theta_hat: [N, D], estimated tastes; NaN for a user who was never asked.
    residual: [N], Newton decrement of the fit (see `glm.glm_mle`).
    b_hat: [N, K], plug-in scores.
    gap: [], solver's certificate for pi under b_hat.
    tau: [] int, exploration rounds.
    commit: [], regret per round afterwards.
    total: `regret.Regret`, up to the horizon, [] each.
  """

  pi: jax.Array
  theta_hat: jax.Array
  residual: jax.Array
  b_hat: jax.Array
  gap: jax.Array
  tau: jax.Array
  commit: jax.Array
  total: regret.Regret


def plan_design(phi: Any, tau: int, tol: float = 1e-2) -> GlmPlan:
  """Optimal design over the distinct rows of phi, rounded to tau duels.

  Args:
    phi: [K, K, D], antisymmetric.
    tau: exploration rounds, at least D.
    tol: tolerance of the design's certificate.

  Returns:
    The plan, with the M pairs that are compared at least once.

  Raises:
    ValueError: tau below D, or features of rank below D.
  """
  dim = np.shape(phi)[-1]
  if tau < dim:
    raise ValueError(
      f'tau={tau} is below D={dim}: theta cannot be identified; raise tau'
    )
  pairs, weights, gap = design_pairs(phi, tol)
  counts = design.round_design(weights, tau)
  used = counts > 0
  return GlmPlan(pairs[used], counts[used], gap)


def design_pairs(
  phi: Any, tol: float = 1e-2
) -> tuple[np.ndarray, np.ndarray, float]:
  """Optimal design over the pairs with distinct rows of phi.

  Args:
    phi: [K, K, D], antisymmetric.
    tol: tolerance of the design's certificate.

  Returns:
    pairs [M, 2] with positive weight, weights [M] and the certificate.

  Raises:
    ValueError: features of rank below D.
  """
  pairs, rows = glm.pair_rows(phi)
  # A row and its negative inform alike: keep one pair of each.
  sign = np.where(rows[np.arange(len(rows)), np.abs(rows).argmax(1)] < 0, -1, 1)
  _, first = np.unique(
    np.round(rows * sign[:, None], 6), axis=0, return_index=True
  )
  first = first[np.abs(rows[first]).max(1) > 0]
  best = design.optimal_design(rows[first].astype(np.float64), tol)
  used = best.weights > 1e-9
  return pairs[first][used], best.weights[used], float(best.gap)


@functools.partial(jax.jit, static_argnames=('kind',))
def simulate_glm_etc(
  key: jax.Array,
  env: glm.GlmEnv,
  pairs: jax.Array,
  counts: jax.Array,
  horizon: jax.Array,
  l2: jax.Array,
  kind: str = 'geometric',
) -> GlmEtcResult:
  """`fair_glm_etc` without checks and with a given plan (vmap over keys).

  Args:
    key: PRNG key; consumed.
    env: the environment.
    pairs: [M, 2] int.
    counts: [M] int.
    horizon: [] int.
    l2: [] > 0, ridge weight.
    kind: one of `welfare.KINDS` (static).

  Returns:
    The run.
  """
  arms, users = env.num_arms, env.num_users
  preference = env.preference
  b = (preference.sum(-1) - 0.5) / (arms - 1)
  losses = regret.instance_losses(b, kind)
  x, y = pairs[:, 0], pairs[:, 1]
  tau = counts.sum()
  user_key, win_key = jax.random.split(key)
  met = jnp.broadcast_to(counts, (users, counts.shape[0]))
  if env.feedback == 'one':
    # Each duel of a pair is answered by a uniform user.
    split = lambda k, n: jax.random.multinomial(
      k, n.astype(b.dtype), jnp.full(users, 1 / users, b.dtype)
    )
    keys = jax.random.split(user_key, counts.shape[0])
    met = jax.vmap(split, out_axes=1)(keys, counts).astype(counts.dtype)
  outcomes = 'independent' if env.feedback == 'one' else env.outcomes
  wins = sampling.sample_wins(win_key, preference[:, x, y], met, outcomes)
  theta, residual = glm.glm_mle(
    env.phi[x, y], wins, met.astype(b.dtype), env.link, l2
  )
  # The ridge would pass off a user who was never asked as indifferent.
  theta = jnp.where(met.sum(1, keepdims=True) > 0, theta, jnp.nan)
  p_hat = env.replace(theta=theta).preference
  b_hat = (p_hat.sum(-1) - 0.5) / (arms - 1)
  solution = nsw.maximize_welfare(b_hat, kind)
  loss = losses.best - welfare.nash_welfare(solution.pi, b, kind)
  commit = jnp.maximum(loss, 0)
  price = regret.round_regret(losses.arm[x], losses.arm[y])
  total = jax.tree.map(
    lambda c: counts.astype(b.dtype) @ c + (horizon - tau) * commit, price
  )
  return GlmEtcResult(
    solution.pi, theta, residual, b_hat, solution.gap, tau, commit, total
  )


def fair_glm_etc(
  key: jax.Array,
  env: glm.GlmEnv,
  horizon: int,
  tau: int | None = None,
  kind: str = 'geometric',
  *,
  l2: float = 1e-3,
) -> GlmEtcResult:
  """Runs generalized-linear explore-then-commit once; vmap over keys.

  Args:
    key: PRNG key; consumed.
    env: generalized-linear environment (concrete features).
    horizon: T, below 2^31.
    tau: exploration rounds; None: `theory.etc_tau` with D and kappa.
    kind: one of `welfare.KINDS`.
    l2: ridge weight, > 0.

  Returns:
    The run.

  Raises:
    ValueError: an unknown kind, tau or horizon below D, rank-deficient
      features, l2 <= 0, or (feedback 'one') a user who was never asked.

  Warns:
    UserWarning: tau was clamped.
  """
  checks.check_choice('kind', kind, welfare.KINDS)
  checks.check_positive('l2', l2)
  dim = env.theta.shape[1]
  if tau is None:
    kappa = max(float(glm.curvature(env)), 1e-3)
    tau = theory.etc_tau(
      env.num_arms,
      env.num_users,
      horizon,
      None,
      kind,
      feedback=env.feedback,
      dim=dim,
      kappa=kappa,
    )
    tau = max(tau, min(dim, horizon))
  tau = etc.settle_tau(tau, horizon, dim, 'a design of full rank')
  plan = plan_design(env.phi, tau)
  result = simulate_glm_etc(
    key,
    env,
    jnp.asarray(plan.pairs),
    jnp.asarray(plan.counts),
    int(horizon),
    l2,
    kind,
  )
  if checks.concrete(*jax.tree.leaves(result)):
    lost = ~np.isfinite(np.asarray(result.theta_hat)).all(1)
    if lost.any():
      raise ValueError(
        f'user {int(lost.argmax())} was never asked (feedback='
        f'{env.feedback!r}, tau={tau}); raise tau'
      )
  return result

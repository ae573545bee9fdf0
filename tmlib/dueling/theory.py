r"""Rates: what explore-then-commit guarantees, and what nobody can beat.

L = log(2 N K / delta), eps = uniform error of the estimated scores.

Users at the optimum. First-order optimality of pi* for the log welfare is
(1/N) sum_u v_u(pi) / v_u(pi*) <= 1 for every pi. Uniform pi has v_u = 1/2, so
mean_u 1/v_u(pi*) <= 2. As v_u <= 1, each user keeps v_u(pi*) >= 1/(N + 1)
(attained for N = 2). For estimates, which may exceed 1, v_u >= 1/(2N) is used.

Commit loss, geometric. Let eps <= 1/(4N). At pi*, v^_u >= v_u - eps >= v_u / 2,
so mean log v_u(pi*) - mean log v^_u(pi*) <= mean eps / (v_u - eps)
<= 2 eps mean 1/v_u <= 4 eps. The estimate keeps mean_i b^_u(i) = 1/2 (raising
negative entries only helps), so the same holds at pi^ for b^. Adding both, and
G^(pi*) <= G^(pi^), gives log G* - log G(pi^) <= 8 eps: the loss is at most
8 eps G*, with no factor N. The product loses at most 8 N F* eps. Utilitarian
and egalitarian welfare are 1-Lipschitz in the scores: 2 eps. So is one user.

Regret. A round of exploration costs at most 1 (1/2 for one user and for the
utilitarian welfare, as the mean arm is worth 1/2). Balanced duels have
eps = sqrt(K L / (4 tau)), so R_T <= a tau + c eps(tau) T + delta T is least at
  tau = (c T sqrt(K L) / (4 a))^(2/3),   R_T <= 3 a tau + delta T;
geometric: tau = (4 K L)^(1/3) T^(2/3), R_T <= 4.77 (K L)^(1/3) T^(2/3). The
bound does not use that independent answers of equal users average out (1/N).
With one answering user per round K becomes 2 N K (at least half of the expected
answers arrive for every user, up to probability N exp(-tau / (8 N))).
Generalized-linear: a D-optimal design has max leverage D, so for the linear
link eps = sqrt(D L' / (2 tau)) / kappa, L' = log(2 N K^2 / delta); for the
others this is the leading order.

Lower bound, tabular. Hard family of `instances.hard_instance`, level 0.8,
m = floor(K/2) good arms (for K = 3: 2 good, 1 bad), eps <= 0.1; identical
users, so G is the one score. With no hidden arm, a duel against a bad arm costs
at least 1/10. Let n be their expected number. Hiding a good arm s raises its
score by at least eps / 2 and changes the law of its duels against bad arms by
KL <= 6.25 eps^2 c each; c = N for independent answers of all users, 1 for
shared answers or one user a round. Every such duel has one good arm.
  m >= 8: some s has at most 3 n / m of the duels and 3/m of the played mass. By
  Pinsker, if n <= m / (600 eps^2 c), then s still gets at most 3/m + 1/8 <= 1/2
  of the mass and the regret is >= eps T / 4; else it is >= m / (6000 eps^2 c).
  Equal at eps^3 = m / (1500 c T): R_T >= (1/4) (m / (1500 c))^(1/3) T^(2/3).
  m >= 2: some s has at most 1/2 of the mass. If n <= 1 / (200 eps^2 c), then s
  still gets at most 5/8, regret >= 3 eps T / 16; else >= 1 / (2000 eps^2 c).
  Equal at eps^3 = 1 / (375 c T): R_T >= (3/16) (1 / (375 c))^(1/3) T^(2/3).
Where T is so short that this eps exceeds 0.1, 0.1 is used. Two arms have no bad
one: their only duel is between the candidates, and sqrt(T) is possible.

Lower bound, generalized-linear. Hard family of `glm_hard_instance`, d bits,
d delta <= 1/8. A duel between the halves costs at least 1/16 and tells at most
KL <= 36.6 delta^2 c about each sign. Assouad: with n of them, the regret is at
least T d delta (1 - delta sqrt(18.3 n c)) / 2. Either n >= 1 / (73.2 c
delta^2), or R_T >= T d delta / 4; equal at delta^3 = 1 / (293 c d T):
R_T >= 0.0376 (d T)^(2/3) c^(-1/3), with delta capped at 1 / (8 d).

Axes: N users, K arms, S seeds.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from tmlib.dueling import checks, envs, welfare

__all__ = [
  'Bound',
  'Exponent',
  'commit_constant',
  'etc_tau',
  'fit_exponent',
  'lower_bound',
  'upper_bound',
]


class Bound(NamedTuple):
  """A worst-case regret bound of explore-then-commit.

  Attributes:
    value: bound on the expected pair pseudo-regret.
    tau: exploration rounds that it is for.
    radius: uniform error of the scores after tau rounds.
    valid: whether the derivation applies (radius <= 1/(4N) for Nash kinds and
      more than one user; tau <= T).
  """

  value: float
  tau: int
  radius: float
  valid: bool


class Exponent(NamedTuple):
  """Slope of log(mean regret) against log(size), with a bootstrap band."""

  slope: float
  low: float
  high: float
  intercept: float


def _constants(kind: str, users: int) -> tuple[float, float]:
  """Price of a round of exploration, and commit loss per unit of error."""
  checks.check_choice('kind', kind, welfare.KINDS)
  if kind == 'log' and users > 1:
    raise ValueError(
      "kind='log' has unbounded regret (log 0 while exploring); use "
      "kind='geometric', which has the same optimum"
    )
  if users == 1 or kind == 'utilitarian':
    return 0.5, 2.0
  commit = {'geometric': 8.0, 'product': 8.0 * users, 'egalitarian': 2.0}
  return 1.0, commit[kind]


def commit_constant(kind: str, num_users: int) -> float:
  """c: welfare lost by committing is at most c times the scores' error.

  Args:
    kind: one of `welfare.KINDS` but 'log' (several users).
    num_users: N.

  Returns:
    c.
  """
  return _constants(kind, num_users)[1]


def _complexity(arms, users, delta, feedback, dim, kappa):
  """C such that radius = sqrt(C / (4 tau))."""
  if dim is not None:
    c = 2 * dim * math.log(2 * users * arms**2 / delta) / kappa**2
  else:
    c = arms * math.log(2 * users * arms / delta)
  return c * (2 * users if feedback == 'one' else 1)


def _check_sizes(arms, users, horizon, feedback):
  if arms < 2:
    raise ValueError(f'num_arms={arms} must be at least 2')
  if users < 1:
    raise ValueError(f'num_users={users} must be at least 1')
  if not 2 <= horizon < math.inf:
    raise ValueError(f'horizon={horizon} must be finite and at least 2')
  checks.check_choice('feedback', feedback, envs.FEEDBACK)


def etc_tau(
  num_arms: int,
  num_users: int,
  horizon: int,
  delta: float | None = None,
  kind: str = 'geometric',
  *,
  feedback: str = 'all',
  dim: int | None = None,
  kappa: float = 1.0,
) -> int:
  """Exploration rounds that minimise the worst-case bound.

  Args:
    num_arms: K >= 2.
    num_users: N >= 1.
    horizon: T >= 2.
    delta: failure probability in (0, 1); None: 1/T.
    kind: one of `welfare.KINDS` (for 'product' with F* <= 1).
    feedback: 'all' or 'one'.
    dim: D for generalized-linear preferences, None for tabular ones.
    kappa: smallest slope of the link, > 0.

  Returns:
    tau in [1, T]; T where the horizon is too short for any commitment.

  Raises:
    ValueError: a number out of range.
  """
  _check_sizes(num_arms, num_users, horizon, feedback)
  delta = 1 / horizon if delta is None else delta
  checks.check_probability('delta', delta)
  checks.check_positive('kappa', kappa)
  price, loss = _constants(kind, num_users)
  c = _complexity(num_arms, num_users, delta, feedback, dim, kappa)
  tau = (loss * horizon * math.sqrt(c) / (4 * price)) ** (2 / 3)
  return max(1, min(horizon, math.ceil(tau)))


def upper_bound(
  num_arms: int,
  num_users: int,
  horizon: int,
  kind: str = 'geometric',
  *,
  tau: int | None = None,
  delta: float | None = None,
  feedback: str = 'all',
  dim: int | None = None,
  kappa: float = 1.0,
) -> Bound:
  """Bound on the regret of explore-then-commit with balanced duels.

  R_T <= a tau + c eps(tau) T + delta T; see the module docstring.

  Args:
    num_arms: K >= 2.
    num_users: N >= 1.
    horizon: T >= 2.
    kind: one of `welfare.KINDS`.
    tau: exploration rounds; None: the minimiser, `etc_tau`.
    delta: failure probability in (0, 1); None: 1/T.
    feedback: 'all' or 'one'.
    dim: D for generalized-linear preferences.
    kappa: smallest slope of the link, > 0.

  Returns:
    The bound. It says nothing where value >= T.

  Raises:
    ValueError: a number out of range.
  """
  if tau is None:
    tau = etc_tau(
      num_arms,
      num_users,
      horizon,
      delta,
      kind,
      feedback=feedback,
      dim=dim,
      kappa=kappa,
    )
  _check_sizes(num_arms, num_users, horizon, feedback)
  checks.check_positive('tau', tau)
  delta = 1 / horizon if delta is None else delta
  checks.check_probability('delta', delta)
  checks.check_positive('kappa', kappa)
  price, loss = _constants(kind, num_users)
  c = _complexity(num_arms, num_users, delta, feedback, dim, kappa)
  radius = math.sqrt(c / (4 * tau))
  value = price * tau + loss * radius * horizon + delta * horizon
  nash = kind in welfare.NASH and num_users > 1
  valid = tau <= horizon and (not nash or radius <= 1 / (4 * num_users))
  return Bound(value, int(tau), radius, valid)


def lower_bound(
  num_arms: int,
  num_users: int,
  horizon: int,
  *,
  outcomes: str = 'independent',
  feedback: str = 'all',
  bits: int | None = None,
) -> float:
  """Regret that no algorithm can beat on all instances (geometric welfare).

  Args:
    num_arms: K >= 3 (>= 2 with bits, which fix K themselves).
    num_users: N >= 1.
    horizon: T.
    outcomes: 'independent' or 'shared'.
    feedback: 'all' or 'one'.
    bits: d, for the generalized-linear family; None for the tabular one.

  Returns:
    The bound; the module docstring derives its constants.

  Raises:
    ValueError: a number out of range.
  """
  _check_sizes(num_arms, num_users, horizon, feedback)
  checks.check_choice('outcomes', outcomes, envs.OUTCOMES)
  informed = outcomes == 'independent' and feedback == 'all'
  c = num_users if informed else 1
  if bits is not None:
    if bits < 1:
      raise ValueError(f'bits={bits} must be at least 1')
    delta = min(1 / (8 * bits), (293 * c * bits * horizon) ** (-1 / 3))
    return bits * delta * horizon / 4
  if num_arms < 3:
    raise ValueError(
      'num_arms=2 has no T^(2/3) lower bound: the only duel is between the two '
      'candidates, so sqrt(T) is possible; use num_arms >= 3'
    )
  good = num_arms // 2
  few = 3 / 16 * min(0.1, (375 * c * horizon) ** (-1 / 3))
  many = 1 / 4 * min(0.1, (good / (1500 * c * horizon)) ** (1 / 3))
  return horizon * (max(few, many) if good >= 8 else few)


def fit_exponent(
  sizes: Any,
  regret: Any,
  confidence: float = 0.95,
  resamples: int = 1000,
  seed: int = 0,
) -> Exponent:
  """Fits regret ~ size^slope on log axes, with a band over seeds.

  Args:
    sizes: [X] > 0, e.g. horizons; at least two different ones.
    regret: [S, X] > 0 on average, one row per seed, or [X].
    confidence: of the percentile band, in (0, 1).
    resamples: bootstrap resamples of the seeds.
    seed: of the bootstrap.

  Returns:
    Least-squares slope of log(mean over seeds), its band (equal to the slope
    for one seed) and the intercept.

  Raises:
    ValueError: fewer than two sizes, NaN, or a mean regret that is not
      positive.
  """
  x = np.asarray(sizes, np.float64)
  y = np.atleast_2d(np.asarray(regret, np.float64))
  checks.check_probability('confidence', confidence)
  if x.ndim != 1 or np.unique(x).size < 2 or (x <= 0).any():
    raise ValueError('sizes must be [X] with at least two different, > 0')
  if y.shape[1] != x.size:
    raise ValueError(f'regret has shape {y.shape}; expected [S, {x.size}]')
  if not np.isfinite(y).all() or (y.mean(0) <= 0).any():
    raise ValueError(
      'regret must be finite with a positive mean at every size; drop sizes at '
      'which nothing was lost'
    )
  log_x = np.log(x)
  centred = log_x - log_x.mean()

  def slope_of(mean):
    return np.log(mean) @ centred / (centred @ centred)

  mean = y.mean(0)
  slope = slope_of(mean)
  rng = np.random.default_rng(seed)
  draws = []
  for _ in range(resamples if y.shape[0] > 1 else 0):
    resampled = y[rng.integers(y.shape[0], size=y.shape[0])].mean(0)
    if (resampled > 0).all():
      draws.append(slope_of(resampled))
  low = high = slope
  if draws:
    tail = (1 - confidence) / 2
    low, high = np.quantile(draws, [tail, 1 - tail])
  intercept = np.log(mean).mean() - slope * log_x.mean()
  return Exponent(float(slope), float(low), float(high), float(intercept))

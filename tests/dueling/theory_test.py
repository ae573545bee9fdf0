"""Bounds by hand, and slopes with bands."""

import numpy as np
import pytest
from scipy import optimize

from tmlib.dueling import planning, theory


def test_geometric_bound_by_hand():
  arms, users, horizon = 8, 4, 2**22
  delta = 0.01
  kl = arms * np.log(2 * users * arms / delta)
  tau = (4 * kl) ** (1 / 3) * horizon ** (2 / 3)
  bound = theory.upper_bound(arms, users, horizon, delta=delta)
  assert bound.tau == np.ceil(tau)
  want = 3 * 4 ** (1 / 3) * kl ** (1 / 3) * horizon ** (2 / 3) + delta * horizon
  np.testing.assert_allclose(bound.value, want, rtol=1e-6)
  np.testing.assert_allclose(
    bound.radius, np.sqrt(kl / (4 * bound.tau)), rtol=1e-9
  )
  assert bound.valid


@pytest.mark.parametrize('kind', ['geometric', 'product', 'utilitarian'])
@pytest.mark.parametrize('users', [1, 3])
@pytest.mark.parametrize('feedback', ['all', 'one'])
def test_tau_minimises_the_bound(kind, users, feedback):
  options = {'kind': kind, 'delta': 1e-3, 'feedback': feedback}
  value = lambda tau: (
    theory.upper_bound(6, users, 10**7, tau=float(tau), **options).value
  )
  best = optimize.minimize_scalar(value, bounds=(1, 10**7), method='bounded')
  tau = theory.etc_tau(6, users, 10**7, 1e-3, kind, feedback=feedback)
  assert value(tau) <= best.fun * (1 + 1e-6)


def test_validity_follows_the_radius():
  assert not theory.upper_bound(8, 64, 2**14).valid
  assert theory.upper_bound(8, 1, 2**14).valid
  assert not theory.upper_bound(8, 2, 100, tau=200).valid


def test_lower_is_below_upper():
  for horizon in (2**16, 2**20, 2**24):
    low = theory.lower_bound(16, 1, horizon)
    assert 0 < low < theory.upper_bound(16, 1, horizon).value
    np.testing.assert_allclose(
      theory.lower_bound(16, 8, horizon), low / 2, rtol=1e-9
    )
    for same in ({'outcomes': 'shared'}, {'feedback': 'one'}):
      assert theory.lower_bound(16, 8, horizon, **same) == low
  ratio = theory.lower_bound(16, 1, 2**20, bits=8) / theory.lower_bound(
    16, 1, 2**20, bits=1
  )
  np.testing.assert_allclose(ratio, 4)


@pytest.mark.parametrize('arms', [3, 4, 5, 8, 17, 40])
@pytest.mark.parametrize('eps', [1e-3, 0.03, 0.1])
def test_the_steps_of_the_tabular_lower_bound(arms, eps):
  # K // 2 good arms (2 of 3), one of which is hidden: level 0.8 and 0.8 - eps.
  good = max(arms // 2, 2)

  def matrix(hidden):
    p = np.full((arms, arms), 0.5)
    p[:good, good:] = 0.8 - eps
    if hidden:
      p[0, good:] = 0.8
    p[good:, :good] = 1 - p[:good, good:].T
    return p

  for hidden in (False, True):
    b = (matrix(hidden).sum(1) - 0.5) / (arms - 1)
    # A duel against a bad arm costs at least 1/10 ...
    assert b.max() - (b[1] + b[-1]) / 2 >= 0.1
    if hidden:  # ... and missing the hidden arm at least eps / 2 a round,
      assert b[0] - b[1] >= eps / 2 - 1e-15
  # while it shows by little.
  base, lead = 0.8 - eps, 0.8
  kl = base * np.log(base / lead) + (1 - base) * np.log((1 - base) / (1 - lead))
  assert 0 < kl <= 6.25 * eps**2


@pytest.mark.parametrize('bits', [1, 3, 6])
def test_the_steps_of_the_generalized_linear_lower_bound(bits):
  delta = 1 / (8 * bits)
  half = 2**bits
  share = half / (2 * half - 1)
  # Best good arm, average good arm and bad arm of `glm_hard_instance`.
  best, mean, bad = 0.75 + bits * delta, 0.75, 0.25
  assert share * (best - (mean + bad) / 2) >= 1 / 16
  assert share * 2 * delta >= delta  # per wrong sign
  for q in np.linspace(0.75 - bits * delta, 0.75 + bits * delta, 9):
    for p in (q - 2 * delta, q + 2 * delta):
      if abs(p - 0.75) <= bits * delta + 1e-12:
        kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        assert kl <= 36.6 * delta**2


def test_lower_bounds_by_hand():
  # (3/16) (1/375)^(1/3) T^(2/3) for few arms, whatever their number.
  want = 3 / 16 * (2**30 / 375) ** (1 / 3) * 2**10
  for arms in (3, 4, 9):
    np.testing.assert_allclose(theory.lower_bound(arms, 1, 2**30), want)
  np.testing.assert_allclose(
    theory.lower_bound(64, 1, 2**30), 0.25 * (64 / 3000) ** (1 / 3) * 2**20
  )
  # A game too short for its worst eps: eps = 0.1.
  assert theory.lower_bound(10_000, 1, 10) == 0.25 * 0.1 * 10
  assert theory.lower_bound(4, 1, 10, bits=20) == 10 / 32
  with pytest.raises(ValueError, match=r'sqrt\(T\)'):
    theory.lower_bound(2, 1, 1000)
  assert theory.lower_bound(2, 1, 1000, bits=3) > 0


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: theory.upper_bound(1, 1, 100), 'num_arms'),
    (lambda: theory.upper_bound(4, 0, 100), 'num_users'),
    (lambda: theory.upper_bound(4, 1, 1), 'horizon'),
    (lambda: theory.upper_bound(4, 1, np.nan), 'horizon=nan'),
    (lambda: theory.upper_bound(4, 1, np.inf), 'horizon=inf'),
    (lambda: theory.upper_bound(4, 1, 100, delta=1.0), 'delta'),
    (lambda: theory.upper_bound(4, 2, 100, 'log'), 'geometric'),
    (lambda: theory.etc_tau(4, 1, 100, kappa=0.0), 'kappa'),
    (lambda: theory.lower_bound(4, 1, 100, outcomes='?'), 'outcomes'),
    (lambda: theory.lower_bound(4, 1, 100, bits=0), 'bits'),
    (lambda: theory.fit_exponent([1, 1], [1, 2]), 'different'),
    (lambda: theory.fit_exponent([1, 2], [1, 2, 3]), 'expected'),
    (lambda: theory.fit_exponent([1, 2], [1, np.nan]), 'finite'),
    (lambda: theory.fit_exponent([1, 2], [0, 1]), 'positive mean'),
    (lambda: planning.plan([[0.5, 0.5]], 0.0), 'eps'),
    (lambda: planning.plan([[0.5, np.nan]], 0.1), 'finite'),
    (lambda: planning.plan([[0.5, 0.5]], 0.1, 'rawls'), 'kind'),
    (lambda: planning.plan([[0.5, 0.5]], 0.1, runs=0), 'runs=0'),
  ],
)
def test_bad_input(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_exponent_is_recovered_with_a_band_that_covers():
  sizes = 2.0 ** np.arange(10, 20)
  exact = theory.fit_exponent(sizes, 3 * sizes**0.66)
  np.testing.assert_allclose(exact.slope, 0.66)
  np.testing.assert_allclose(np.exp(exact.intercept), 3)
  assert exact.low == exact.high == exact.slope
  rng = np.random.default_rng(0)
  covered = 0
  for trial in range(60):
    noise = rng.lognormal(-0.5, 1, (40, 10))
    fit = theory.fit_exponent(
      sizes, noise * sizes**0.66, resamples=200, seed=trial
    )
    covered += fit.low <= 0.66 <= fit.high
  assert covered >= 48  # 95 % nominal; five standard errors below


def test_plan_is_enough_for_such_users():
  b0 = np.array([[0.75, 0.55, 0.4, 0.3], [0.3, 0.6, 0.5, 0.6]])
  p = planning.preference_from_scores(b0)
  np.testing.assert_allclose((p.sum(-1) - 0.5) / 3, b0)
  plan = planning.plan(b0, 0.05, runs=100)
  assert plan.simulated is not None
  assert plan.simulated < plan.certified
  assert plan.loss[-1] <= 0.05
  assert (plan.loss[:-1] > 0.05).all()
  want = (8 * np.sqrt(4 * np.log(2 * 2 * 4 / 0.05) / 4) / 0.05) ** 2
  # Whole round-robins of the six pairs.
  assert plan.certified == 6 * np.ceil(want / 6)


def test_a_certified_plan_covers_one_answering_user():
  # Half of the expected answers for all users: checked by simulation.
  b0 = np.array([[0.6, 0.5, 0.4], [0.4, 0.5, 0.6], [0.5, 0.5, 0.5]])
  plan = planning.plan(b0, 0.3, feedback='one', runs=20)
  every = planning.plan(b0, 0.3, delta=0.025, runs=20)
  assert plan.certified == 2 * 3 * every.certified
  answers = np.random.default_rng(0).multinomial(
    plan.certified, np.full(3, 1 / 3), 2000
  )
  assert (answers.min(1) < every.certified).mean() <= 0.025


def test_a_plan_beyond_counting_is_capped():
  # Two arms that differ by 1e-7 in one run of many: no tau below 2^30 is sure.
  b0 = np.array([[0.5 + 1e-3, 0.5 - 1e-3]])
  plan = planning.plan(b0, 1e-9, runs=2, delta=0.5)
  assert plan.certified > 2**40
  assert plan.taus[-1] <= 2**30

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


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: theory.upper_bound(1, 1, 100), 'num_arms'),
    (lambda: theory.upper_bound(4, 0, 100), 'num_users'),
    (lambda: theory.upper_bound(4, 1, 1), 'horizon'),
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
  assert plan.certified == np.ceil(want)

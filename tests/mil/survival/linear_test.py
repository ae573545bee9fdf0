"""Ridge Cox regression against loops, SciPy and a closed form."""

import numpy as np
import pytest
from scipy import optimize

from tmlib.mil.survival import linear_cox, select_cox_penalty


def cohort(n=40, p=3, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, p))
  time = np.ceil(rng.exponential(np.exp(-x[:, 0]) * 8))
  return x, time, rng.random(n) < 0.7


def loss(beta, x, time, event, penalty):
  total = penalty / 2 * beta @ beta
  for i in np.flatnonzero(event):
    total += np.log(np.exp(x[time >= time[i]] @ beta).sum()) - x[i] @ beta
  return total


@pytest.mark.parametrize('penalty', [0.1, 10.0])
def test_is_the_minimum_of_its_definition(penalty):
  data = cohort()
  found = linear_cox(*data, penalty)
  want = optimize.minimize(loss, np.zeros(3), (*data, penalty), tol=1e-10)
  assert found.converged
  np.testing.assert_allclose(found.coefficients, want.x, atol=1e-5)
  np.testing.assert_allclose(
    found.loss, loss(found.coefficients, *data, penalty), rtol=1e-12
  )


def test_two_patients_by_hand():
  # One event against one at risk, gap 2: sigmoid(-2b) * 2 = penalty * b.
  found = linear_cox([[1.0], [-1.0]], [1, 2], [1, 0], 0.5)
  b = found.coefficients[0]
  np.testing.assert_allclose(2 / (1 + np.exp(2 * b)), 0.5 * b, rtol=1e-9)


def test_noise_asks_for_a_larger_penalty_than_signal():
  x, time, event = cohort(150)
  noise = np.random.default_rng(1).normal(size=(150, 30))
  penalties = (0.01, 1e4)
  assert select_cox_penalty(x, time, event, penalties) == 0.01
  assert select_cox_penalty(noise, time, event, penalties) == 1e4


def test_bad_input_is_named():
  x, time, event = cohort()
  with pytest.raises(ValueError, match='penalty=0'):
    linear_cox(x, time, event, 0)
  with pytest.raises(ValueError, match='all patients are censored'):
    linear_cox(x, time, event * 0, 1)
  with pytest.raises(ValueError, match='finite'):
    linear_cox(x * np.nan, time, event, 1)

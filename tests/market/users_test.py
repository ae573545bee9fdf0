"""The users' equilibrium against closed forms and other solvers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import optimize

from tmlib import market

B = np.array([10.0, 6.0, 1.0])
ALPHA = np.array([0.4, 0.5, 0.3])

# L(x, s), written again for NumPy.
CURVES = {
  'linear': lambda x, s: x / s,
  'mm1': lambda x, s: 1 / (s - x),
  'processor_sharing': lambda x, s: 1 / (1 - x / s),
  'bpr': lambda x, s: 1 + 0.15 * (x / s) ** 4,
}
# int_0^x L(t, s) dt by hand.
INTEGRALS = {
  'linear': lambda x, s: x**2 / (2 * s),
  'mm1': lambda x, s: -np.log(1 - x / s),
  'processor_sharing': lambda x, s: -s * np.log(1 - x / s),
  'bpr': lambda x, s: x + 0.15 * s * (x / s) ** 5 / 5,
}


def linear_wardrop(a, s, gamma):
  """Closed form: the active set is a prefix of the most accurate."""
  order = np.argsort(-a)
  for n in range(len(a), 0, -1):
    on = order[:n]
    level = (s[on] @ a[on] - gamma) / s[on].sum()
    if (a[on] >= level).all():
      x = np.zeros(len(a))
      x[on] = s[on] * (a[on] - level) / gamma
      return x, level
  raise AssertionError


@pytest.mark.parametrize('gamma', [1e-6, 0.3, 1.0, 30.0])
def test_linear_wardrop_closed_form(gamma):
  game = market.ProviderGame(budgets=B, gamma=gamma, tau=0)
  found = market.user_equilibrium(game, ALPHA)
  a = 1 - (1 + ALPHA * B) ** -0.3
  x, level = linear_wardrop(a, (1 - ALPHA) * B, gamma)
  np.testing.assert_allclose(found.x, x, atol=1e-9)
  np.testing.assert_allclose(found.U, level, atol=1e-12)
  assert found.x.dtype == np.float64
  assert found.residual < 1e-10


@pytest.mark.parametrize('latency', sorted(CURVES))
def test_logit_is_the_softmax_of_its_own_utilities(latency):
  game = market.ProviderGame(budgets=B, latency=latency, outside=0.1)
  found = market.user_equilibrium(game, ALPHA)
  s = (1 - ALPHA) * B
  u = 1 - (1 + ALPHA * B) ** -0.3 - CURVES[latency](found.x, s)
  odds = np.exp(np.append(u, 0.1) / 0.05)
  np.testing.assert_allclose(
    np.append(found.x, found.outside), odds / odds.sum(), atol=1e-12
  )
  np.testing.assert_allclose(found.U, 0.05 * np.log(odds.sum()), atol=1e-12)
  np.testing.assert_allclose(found.latency, CURVES[latency](found.x, s))


@pytest.mark.parametrize(
  'latency',
  [
    'linear',
    pytest.param('mm1', marks=pytest.mark.slow),
    pytest.param('bpr', marks=pytest.mark.slow),
  ],
)
def test_types_minimise_the_potential(latency):
  gamma, weights, tau = (
    np.array([0.3, 1.0, 4.0]),
    np.array([0.2, 0.5, 0.3]),
    0.1,
  )
  game = market.ProviderGame(
    budgets=B, latency=latency, gamma=gamma, weights=weights, tau=tau
  )
  found = market.user_equilibrium(game, ALPHA)
  s, a = (1 - ALPHA) * B, 1 - (1 + ALPHA * B) ** -0.3

  def potential(flat):
    x = flat.reshape(3, 3)
    load = x.sum(0)
    if latency == 'mm1' and (load >= s).any():
      return 1e6
    cost = INTEGRALS[latency](load, s).sum() - (x * a / gamma[:, None]).sum()
    entropy = x * np.log(x / weights[:, None])
    return cost + (tau / gamma[:, None] * entropy).sum()

  start = weights[:, None] * s / s.sum()
  best = optimize.minimize(
    potential,
    start.ravel(),
    bounds=[(1e-9, 1)] * 9,
    constraints={
      'type': 'eq',
      'fun': lambda f: f.reshape(3, 3).sum(1) - weights,
    },
    options={'ftol': 1e-15, 'maxiter': 500},
  )
  x = np.asarray(found.x_types)
  assert potential(x.ravel()) <= best.fun + 1e-9
  np.testing.assert_allclose(x.sum(1), weights, atol=1e-12)
  np.testing.assert_allclose(found.x, best.x.reshape(3, 3).sum(0), atol=2e-3)
  assert found.residual < 1e-9


def test_wardrop_types_sort_by_patience():
  game = market.ProviderGame(
    budgets=B[:2], gamma=(0.3, 1.0, 3.0), weights=(0.2, 0.5, 0.3), tau=0
  )
  found = market.user_equilibrium(game, [0.5, 0.1])
  assert found.residual < 1e-10
  np.testing.assert_allclose(found.x_types.sum(1), [0.2, 0.5, 0.3])
  # The more a type minds waiting, the less it goes to the accurate provider.
  part = found.x_types[:, 0] / found.x_types.sum(1)
  assert (np.diff(part) <= 1e-9).all()


def test_without_congestion_the_best_takes_all_and_ties_split():
  game = market.ProviderGame(budgets=(4.0, 4.0, 4.0), gamma=0, tau=0)
  find = lambda alpha: market.user_equilibrium(game, alpha).x
  np.testing.assert_array_equal(find([0.5, 0.4, 0.3]), [1, 0, 0])
  np.testing.assert_array_equal(find([0.5, 0.5, 0.3]), [0.5, 0.5, 0])
  # Perfectly accurate, but it serves nobody.
  np.testing.assert_array_equal(find([1.0, 0.4, 0.3]), [0, 1, 0])


@pytest.mark.parametrize('tau', [0, 0.05])
def test_no_capacity_no_users(tau):
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=tau)
  found = market.user_equilibrium(game, [1.0, 0.5])
  np.testing.assert_allclose(found.x, [0, 1])
  assert found.latency[0] == np.inf
  assert np.isfinite(found.U)
  assert found.residual < 1e-12


def test_equal_providers_share_equally():
  game = market.ProviderGame(budgets=(3.0, 3.0), tau=0)
  found = market.user_equilibrium(game, [0.4, 0.4])
  np.testing.assert_allclose(found.x, [0.5, 0.5])


def test_wardrop_is_the_limit_of_logit():
  find = lambda tau: market.user_equilibrium(
    market.ProviderGame(budgets=B, latency='mm1', tau=tau), ALPHA
  )
  np.testing.assert_allclose(find(1e-5).x, find(0).x, atol=1e-3)


def test_derivatives_equal_differences():
  def welfare(theta, tau):
    game = market.ProviderGame(
      budgets=jnp.stack([theta[0], theta[1]]),
      gamma=theta[2],
      tau=tau,
      accuracy=market.PowerLaw(beta=theta[3]),
    )
    found = market.split_users(game, theta[4:])
    return found.U + found.x @ jnp.array([1.0, 3.0])

  with jax.enable_x64(True):
    theta = jnp.array([10.0, 6.0, 1.0, 0.3, 0.5, 0.6])
    for tau in (0.0, 0.05):
      call = jax.jit(lambda t, tau=tau: welfare(t, tau))
      step = 1e-6 * np.eye(6)
      wanted = [(call(theta + d) - call(theta - d)) / 2e-6 for d in step]
      np.testing.assert_allclose(jax.grad(call)(theta), wanted, rtol=1e-6)
      np.testing.assert_allclose(jax.jacfwd(call)(theta), wanted, rtol=1e-6)


def test_jax_arrays_keep_their_precision():
  game = market.ProviderGame(budgets=jnp.array([10.0, 6.0]))
  found = market.user_equilibrium(game, jnp.array([0.5, 0.6]))
  assert found.x.dtype == jnp.float32
  exact = market.user_equilibrium(
    market.ProviderGame(budgets=(10.0, 6.0)), [0.5, 0.6]
  )
  np.testing.assert_allclose(found.x, exact.x, atol=1e-5)


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    ({'budgets': (10.0, 0.0)}, r'budgets\[1\] = 0'),
    ({'budgets': (10.0, -1.0)}, 'positive'),
    ({'budgets': (10.0, np.nan)}, 'finite'),
    ({'budgets': (10.0,)}, 'at least two'),
    ({'budgets': ((1.0, 2.0),)}, 'stack_games'),
    ({'gamma': -1.0}, 'gamma=-1'),
    ({'gamma': (1.0, 2.0)}, 'weights'),
    ({'gamma': (1.0, 2.0), 'weights': (0.5, 0.6)}, 'sum to one'),
    ({'tau': -0.1}, 'tau=-0.1'),
    ({'tau': np.nan}, 'tau=nan'),
    ({'prices': (1.0, 2.0, 3.0)}, 'prices'),
    ({'outside': np.inf}, 'outside'),
    ({'latency': 'lineal'}, "'lineal'.*processor_sharing"),
    ({'accuracy': 'power'}, "'power'.*power_law"),
    ({'latency': 'mm1', 'budgets': (0.5, 0.4)}, 'budgets sum to 0.9'),
  ],
)
def test_bad_games_are_named(change, match):
  with pytest.raises(ValueError, match=match):
    market.ProviderGame(**({'budgets': (10.0, 6.0)} | change))


@pytest.mark.parametrize(
  ('latency', 'alpha', 'match'),
  [
    ('linear', [0.5, 1.5], r'alpha\[1\] = 1.5'),
    ('linear', [-0.1, 0.5], r'alpha\[0\]'),
    ('linear', [np.nan, 0.5], r'alpha\[0\]'),
    ('linear', [0.5], 'shape'),
    ('linear', [1.0, 1.0], 'nobody serves'),
    ('mm1', [0.95, 0.95], 'capacity 0.8'),
  ],
)
def test_bad_alphas_are_named(latency, alpha, match):
  game = market.ProviderGame(budgets=(10.0, 6.0), latency=latency)
  with pytest.raises(ValueError, match=match):
    market.user_equilibrium(game, alpha)


def test_a_convex_accuracy_is_warned_about():
  with pytest.warns(UserWarning, match='concave'):
    market.ProviderGame(budgets=(2.0, 1.0), accuracy=lambda c: c**2)


def test_queues_shorter_than_the_crowd_need_an_outside_option():
  # Capacity .005 for users of mass 1: almost everybody stays away.
  game = market.ProviderGame(
    budgets=B, latency='processor_sharing', outside=0.3
  )
  found = market.user_equilibrium(game, [0.9997, 0.9998, 0.9996])
  assert found.residual < 1e-12
  assert 0 < found.x.sum() < 1e-4
  np.testing.assert_allclose(found.x.sum() + found.outside, 1)


def test_an_accuracy_that_is_not_elementwise_is_named():
  with pytest.raises(ValueError, match='elementwise'):
    market.ProviderGame(budgets=(2.0, 1.0), accuracy=lambda c: c.sum())

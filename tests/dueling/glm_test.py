"""Generalized-linear preferences: estimates, designs, commitment."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats

from tmlib.dueling import design, glm, glm_etc, instances


def problem(seed=0, rows=12, dim=3, users=2):
  rng = np.random.default_rng(seed)
  phi = rng.normal(size=(rows, dim))
  counts = rng.integers(1, 30, (users, rows)).astype(float)
  wins = rng.binomial(counts.astype(int), 0.3 + 0.4 * rng.random((users, rows)))
  return phi, wins.astype(float), counts


@pytest.mark.parametrize('link', glm.LINKS)
def test_mle_against_a_general_optimiser(link):
  phi, wins, counts = problem()
  integral = {
    'logistic': lambda x: np.logaddexp(0, x),
    'probit': lambda x: x * stats.norm.cdf(x) + stats.norm.pdf(x),
    'linear': lambda x: x / 2 + x**2 / 2,
  }[link]
  with jax.enable_x64(True):
    found, residual = map(
      np.asarray, glm.glm_mle(*map(jnp.asarray, (phi, wins, counts)), link, 0.7)
    )
    rough = glm.glm_mle(
      *map(jnp.asarray, (phi, wins, counts)), link, 0.7, steps=0
    )
    rough = np.asarray(rough.residual)
  assert residual.max() < 1e-7
  for user in range(2):
    loss = lambda t, u=user: (
      counts[u] @ integral(phi @ t) - wins[u] @ (phi @ t) + 0.35 * t @ t
    )
    want = optimize.minimize(loss, np.zeros(3), tol=1e-12).x
    # Twice the objective still to gain, for a quadratic one.
    gain = loss(np.zeros(3)) - loss(want)
    np.testing.assert_allclose(rough[user] ** 2 / 2, gain, rtol=0.2)
    np.testing.assert_allclose(found[user], want, atol=2e-5)


def test_logistic_against_scikit_learn():
  linear_model = pytest.importorskip('sklearn.linear_model')
  phi, wins, counts = problem(1, users=1)
  model = linear_model.LogisticRegression(
    C=1 / 0.5, fit_intercept=False, tol=1e-10, max_iter=1000
  )
  model.fit(
    np.concatenate([phi, phi]),
    np.repeat([1, 0], len(phi)),
    np.concatenate([wins[0], counts[0] - wins[0]]),
  )
  with jax.enable_x64(True):
    found = glm.glm_mle(*map(jnp.asarray, (phi, wins, counts)), l2=0.5).theta
  np.testing.assert_allclose(found, model.coef_, atol=1e-5)


def test_linear_link_is_ridge_regression():
  phi, wins, counts = problem(2, users=1)
  gram = phi.T @ (counts[0][:, None] * phi) + 0.3 * np.eye(3)
  want = np.linalg.solve(gram, phi.T @ (wins[0] - counts[0] / 2))
  with jax.enable_x64(True):
    found = glm.glm_mle(*map(jnp.asarray, (phi, wins, counts)), 'linear', 0.3)
  found = found.theta
  np.testing.assert_allclose(found[0], want, atol=1e-9)


def test_offset_moves_the_centre():
  phi, wins, counts = problem(3, users=1)
  with jax.enable_x64(True):
    args = tuple(map(jnp.asarray, (phi, wins, counts)))
    whole = glm.glm_mle(*args, l2=1e-9).theta
    centre = jnp.ones(3)
    rest = glm.glm_mle(*args, l2=1e-9, offset=args[0] @ centre).theta
  np.testing.assert_allclose(centre + rest[0], whole[0], atol=1e-5)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'phi': np.zeros((2, 3, 1))}, 'expected'),
    ({'phi': np.ones((3, 3, 2))}, 'antisymmetric'),
    ({'phi': np.zeros((3, 3, 2))}, 'rank 0'),
    ({'theta': np.zeros((1, 5))}, 'theta has shape'),
    ({'theta': np.zeros((0, 2))}, 'theta has shape'),
    ({'theta': np.full((1, 2), np.nan)}, 'finite'),
    ({'link': 'cauchy'}, 'choose one of'),
  ],
)
def test_bad_environments(change, message):
  x = np.random.default_rng(0).normal(size=(3, 2))
  good = {'phi': x[:, None] - x[None], 'theta': np.ones((1, 2))}
  glm.glm_env(**good)
  with pytest.raises(ValueError, match=message):
    glm.glm_env(**(good | change))


def test_a_saturated_link_warns():
  x = np.random.default_rng(0).normal(size=(3, 2))
  with pytest.warns(UserWarning, match='saturated'):
    glm.glm_env(x[:, None] - x[None], np.full((1, 2), 60.0))


def test_mle_refuses_no_ridge():
  with pytest.raises(ValueError, match='l2'):
    glm.glm_mle(jnp.ones((1, 1)), jnp.ones((1, 1)), jnp.ones((1, 1)), l2=0.0)


def test_designs_that_are_known():
  # Quadratic regression on [-1, 1]: a third on each of -1, 0, 1.
  x = np.linspace(-1, 1, 21)
  rows = np.stack([np.ones(21), x, x**2], 1)
  found = design.optimal_design(rows, tol=1e-6)
  want = np.zeros(21)
  want[[0, 10, 20]] = 1 / 3
  np.testing.assert_allclose(found.weights, want, atol=1e-3)
  assert 0 <= float(found.gap) <= 1e-6
  found = design.optimal_design(np.eye(4), tol=1e-6)
  np.testing.assert_allclose(found.weights, 0.25, atol=1e-6)


def test_the_certificate_is_the_largest_leverage():
  rows = np.random.default_rng(0).normal(size=(40, 5))
  w, gap = map(np.asarray, design.optimal_design(rows, tol=1e-4))
  v = rows.T @ (w[:, None] * rows)
  leverage = np.einsum('md,md->m', rows, np.linalg.solve(v, rows.T).T)
  np.testing.assert_allclose(leverage.max() / 5 - 1, gap, atol=1e-9)
  assert gap <= 1e-4
  np.testing.assert_allclose(w @ leverage, 5)


def test_design_refuses_rank_deficient_rows():
  with pytest.raises(ValueError, match='rank 1 < D = 2'):
    design.optimal_design(np.ones((5, 2)))
  with pytest.raises(ValueError, match='finite'):
    design.optimal_design(np.full((5, 2), np.nan))
  with pytest.raises(ValueError, match='expected'):
    design.optimal_design(np.ones(5))


@settings(max_examples=50, deadline=None)
@given(
  st.lists(st.floats(0, 1), min_size=1, max_size=9).filter(
    lambda x: sum(x) > 0
  ),
  st.integers(0, 60),
)
def test_rounding_hands_out_every_duel(weights, rounds):
  w = np.array(weights) / sum(weights)
  counts = design.round_design(w, rounds)
  assert counts.sum() == rounds
  assert counts.min() >= 0
  assert (np.abs(counts - w * rounds) <= len(w)).all()


def test_commitment_finds_the_hidden_signs():
  env = instances.glm_hard_instance(jax.random.key(0), 3, 0.06)
  found = glm_etc.fair_glm_etc(jax.random.key(1), env, 40_000, tau=8000)
  assert int(found.pi.argmax()) == int(
    np.asarray(env.preference[0]).sum(1).argmax()
  )
  np.testing.assert_allclose(found.theta_hat, env.theta, atol=0.04)
  assert float(found.commit) == 0
  assert int(found.tau) == 8000


def test_commitment_of_several_users_without_a_condorcet_winner():
  env = instances.glm_cyclic_instance(jax.random.key(0), 7, 3, 3)
  found = glm_etc.fair_glm_etc(jax.random.key(1), env, 30_000, tau=20_000)
  assert 0 <= float(found.commit) < 0.01


@pytest.mark.slow
def test_commitment_with_one_answer_per_round():
  env = instances.glm_cyclic_instance(jax.random.key(0), 7, 3, 3)
  one = env.replace(feedback='one', outcomes='shared')
  rough = glm_etc.fair_glm_etc(jax.random.key(1), one, 30_000, tau=20_000)
  assert 0 <= float(rough.commit) < 0.03


def test_a_user_who_was_never_asked_is_not_indifferent():
  env = instances.glm_cyclic_instance(jax.random.key(0), 7, 3, 40)
  one = env.replace(feedback='one')
  with pytest.raises(ValueError, match='was never asked'):
    glm_etc.fair_glm_etc(jax.random.key(1), one, 1000, tau=20)


def test_mle_refuses_wins_beyond_counts():
  with pytest.raises(ValueError, match='counts'):
    glm.glm_mle(jnp.ones((1, 1)), jnp.full((1, 1), 2.0), jnp.ones((1, 1)))


def test_plan_refuses_too_few_rounds():
  env = instances.glm_cyclic_instance(jax.random.key(0), 7, 3)
  with pytest.raises(ValueError, match='below D=3'):
    glm_etc.plan_design(env.phi, 2)

"""The fair lottery against other solvers, and its certificate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize

from tmlib.dueling import nsw, welfare


def scores(seed, users, arms, spread=1.0):
  """Borda scores of random preference matrices; rows have mean 1/2."""
  rng = np.random.default_rng(seed)
  upper = np.triu(rng.beta(0.5, 0.5, (users, arms, arms)), 1)
  lower = np.tril(1 - upper.swapaxes(1, 2), -1)
  b = (upper + lower).sum(-1) / (arms - 1)
  return 0.5 + spread * (b - 0.5)


def oracle(b):
  """Best mean log utility by sequential quadratic programming."""
  arms = b.shape[1]
  best = -np.inf
  for start in (np.full(arms, 1 / arms), np.eye(arms)[b.mean(0).argmax()]):
    found = optimize.minimize(
      lambda p: -np.log(np.maximum(b @ p, 1e-12)).mean(),
      start,
      jac=lambda p: -(b / np.maximum(b @ p, 1e-12)[:, None]).mean(0),
      bounds=[(0, 1)] * arms,
      constraints={'type': 'eq', 'fun': lambda p: p.sum() - 1},
      method='SLSQP',
      options={'ftol': 1e-14, 'maxiter': 500},
    )
    p = np.maximum(found.x, 0)
    best = max(best, np.log(b @ (p / p.sum())).mean())
  return best


@pytest.mark.parametrize(('users', 'arms'), [(2, 3), (3, 8), (12, 5)])
def test_value_against_quadratic_programming(users, arms):
  for seed in range(6):
    b = scores(seed, users, arms, spread=0.3 if seed % 2 else 1.0)
    solution = nsw.solve_nsw(b, 'log')
    assert abs(float(solution.value) - oracle(b)) < 1e-7
    assert float(solution.gap) <= 1e-9


@pytest.mark.parametrize(('users', 'arms'), [(2, 4), (5, 9), (20, 6)])
def test_value_against_cvxpy(users, arms):
  cvxpy = pytest.importorskip('cvxpy')
  for seed in range(3):
    b = scores(100 + seed, users, arms)
    pi = cvxpy.Variable(arms, nonneg=True)
    problem = cvxpy.Problem(
      cvxpy.Maximize(cvxpy.sum(cvxpy.log(b @ pi)) / users),
      [cvxpy.sum(pi) == 1],
    )
    problem.solve(solver='CLARABEL')
    solution = nsw.solve_nsw(b)
    assert abs(float(solution.value) - np.exp(problem.value)) < 1e-7


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**20), st.sampled_from([(2, 3), (4, 6), (9, 4)]))
def test_every_user_keeps_a_share(seed, shape):
  users = shape[0]
  b = scores(seed, *shape)
  pi, value, gap = map(np.asarray, nsw.solve_nsw(b))
  v = b @ pi
  assert pi.min() >= 0
  assert abs(pi.sum() - 1) < 1e-12
  assert 0 <= gap <= 1e-9
  assert (1 / v).mean() <= 2 + 1e-8
  assert v.min() >= 1 / (users + 1) - 1e-9
  assert value >= 0.5 - 1e-12  # the uniform lottery gives exactly 1/2


def test_the_share_is_attained_by_two_users():
  # b_1 has maximum 1, b_2 = (2 - b_1) / 3: user 2 is left with 1/3.
  b1 = np.array([1.0, 0.3, 0.2])
  b = np.stack([b1, (2 - b1) / 3])
  assert abs((b @ np.asarray(nsw.solve_nsw(b).pi)).min() - 1 / 3) < 1e-9


@pytest.mark.parametrize('kind', welfare.NASH)
@pytest.mark.parametrize('steps', [0, 1, 2, 4])
def test_an_unfinished_solution_is_never_optimistic(kind, steps):
  for seed in range(8):
    b = scores(seed, 3, 6, spread=0.4)
    best = nsw.solve_nsw(b, kind)
    rough = nsw.solve_nsw(b, kind, max_steps=steps)
    assert best.value <= rough.value + rough.gap + 1e-15
    assert rough.value <= best.value + 1e-12


def test_one_user_gets_the_argmax_exactly():
  b = np.array([[0.5, 0.5 + 1e-12, 0.5 - 1e-12]])
  for kind in welfare.KINDS:
    np.testing.assert_array_equal(nsw.solve_nsw(b, kind).pi, [0, 1, 0])


def test_two_dictators_by_hand():
  # v = (p, 1 - p): the product p (1 - p) is best at 1/2.
  b = np.eye(2)
  pi, value, _ = nsw.solve_nsw(b, 'product')
  np.testing.assert_allclose(pi, [0.5, 0.5], atol=1e-5)
  np.testing.assert_allclose(value, 0.25, atol=1e-9)
  np.testing.assert_allclose(nsw.solve_nsw(b, 'geometric').value, 0.5)


@pytest.mark.parametrize(('users', 'arms'), [(1, 4), (2, 5), (6, 3), (15, 9)])
def test_egalitarian_against_linear_programming(users, arms):
  for seed in range(3):
    b = scores(seed, users, arms)
    programme = optimize.linprog(
      np.append(np.zeros(arms), -1),
      A_ub=np.column_stack([-b, np.ones(users)]),
      b_ub=np.zeros(users),
      A_eq=np.append(np.ones(arms), 0)[None],
      b_eq=[1],
      bounds=[(0, None)] * arms + [(None, None)],
    )
    solution = nsw.solve_nsw(b, 'egalitarian')
    assert abs(float(solution.value) + programme.fun) < 1e-9
    assert float(solution.gap) <= 1e-9
    assert -programme.fun <= float(solution.value + solution.gap) + 1e-15


def test_precision_follows_the_input():
  b = scores(3, 4, 6)
  assert nsw.solve_nsw(b).pi.dtype == np.float64
  single = nsw.solve_nsw(jnp.asarray(b, jnp.float32))
  assert single.pi.dtype == np.float32
  assert float(single.gap) < 1e-5
  np.testing.assert_allclose(single.value, nsw.solve_nsw(b).value, rtol=1e-5)


def test_estimates_below_zero_are_floored_inside_only():
  b = np.array([[-0.2, 0.9, 0.8], [0.9, 0.1, 0.5]])
  solution = nsw.solve_nsw(b)
  raised = nsw.solve_nsw(np.maximum(b, nsw.FLOOR))
  np.testing.assert_allclose(solution.pi, raised.pi)
  assert b[0, 0] == -0.2


def test_vmap_agrees_with_one_by_one():
  b = np.stack([scores(s, 3, 5) for s in range(4)]).astype(np.float32)
  many = jax.vmap(nsw.maximize_welfare)(jnp.asarray(b))
  for i in range(4):
    one = nsw.maximize_welfare(jnp.asarray(b[i]))
    np.testing.assert_allclose(many.value[i], one.value, rtol=1e-5)


@pytest.mark.parametrize('shape', [(1, 8), (3, 8), (64, 128), (300, 16)])
@pytest.mark.parametrize('kind', ['geometric', 'utilitarian', 'egalitarian'])
def test_a_single_precision_gap_is_never_optimistic(shape, kind):
  for seed in range(4):
    b = scores(seed, *shape, spread=0.5 if seed % 2 else 0.02)
    b = b.astype(np.float32)
    best = nsw.solve_nsw(b.astype(np.float64), kind)
    found = nsw.solve_nsw(jnp.asarray(b), kind)
    assert best.value <= float(found.value) + float(found.gap)


def test_scores_of_any_size():
  b = scores(5, 3, 6)
  want = nsw.solve_nsw(b, 'log')
  for size in (1e-290, 1e-30, 1e30, 1e290):
    # Users may even measure in different units.
    found = nsw.solve_nsw(b * np.array([[size], [1], [1]]), 'log')
    np.testing.assert_allclose(found.pi, want.pi, atol=1e-7)
    assert float(found.gap) <= 1e-9
  np.testing.assert_allclose(nsw.solve_nsw(jnp.eye(2, dtype=int)).value, 0.5)


@pytest.mark.parametrize(
  ('b', 'kind', 'message'),
  [
    (np.array([['a', 'b']]), 'geometric', 'expected numbers'),
    (np.full((2, 3), 1e-310), 'geometric', 'no positive score'),
    (np.ones((2, 3)), 'nash', 'choose one of'),
    (np.ones(3), 'geometric', 'expected'),
    (np.ones((0, 3)), 'geometric', 'expected'),
    (np.array([[0.5, np.nan]]), 'geometric', 'pool such users'),
    (np.array([[0.5, 0.6], [0.0, -1.0]]), 'geometric', 'no positive score'),
  ],
)
def test_bad_input(b, kind, message):
  with pytest.raises(ValueError, match=message):
    nsw.solve_nsw(b, kind)

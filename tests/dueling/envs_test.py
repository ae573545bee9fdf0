"""Environments, instances and regret names."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib.dueling import borda, envs, glm, instances, regret, welfare


def test_answers_have_the_stated_frequencies():
  env = envs.make_env([[[0.5, 0.9], [0.1, 0.5]], [[0.5, 0.3], [0.7, 0.5]]])
  keys = jax.random.split(jax.random.key(0), 4000)
  found = jax.vmap(lambda k: envs.duel(k, env, 0, 1))(keys)
  np.testing.assert_allclose(found.wins.mean(0), [0.9, 0.3], atol=0.03)
  assert found.answered.all()
  # Independent coins: the covariance of the two users is zero.
  assert abs(np.cov(np.asarray(found.wins).T)[0, 1]) < 0.02


def test_shared_answers_are_nested():
  env = envs.make_env(
    [[[0.5, 0.9], [0.1, 0.5]], [[0.5, 0.3], [0.7, 0.5]]], outcomes='shared'
  )
  keys = jax.random.split(jax.random.key(0), 500)
  wins = jax.vmap(lambda k: envs.duel(k, env, 0, 1))(keys).wins
  assert (wins[:, 0] >= wins[:, 1]).all()


def test_one_user_answers():
  env = envs.make_env(np.full((3, 2, 2), 0.5), feedback='one')
  keys = jax.random.split(jax.random.key(0), 3000)
  answered = jax.vmap(lambda k: envs.duel(k, env, 0, 1))(keys).answered
  assert (answered.sum(1) == 1).all()
  np.testing.assert_allclose(answered.mean(0), 1 / 3, atol=0.04)


@pytest.mark.parametrize(
  ('p', 'message'),
  [
    (np.full((2, 2), 0.5), 'expected'),
    (np.full((1, 2, 3), 0.5), 'expected'),
    (np.zeros((0, 2, 2)), 'no user'),
    (np.full((1, 1, 1), 0.5), 'at least two'),
    (np.full((1, 2, 2), np.nan), 'needs a probability'),
    ([[[0.5, 1.2], [-0.2, 0.5]]], r'\[0, 1\]'),
    ([[[0.5, 0.7], [0.7, 0.5]]], 'symmetrize=True'),
    ([[[0.0, 0.7], [0.3, 0.5]]], 'diagonal'),
  ],
)
def test_bad_preferences(p, message):
  with pytest.raises(ValueError, match=message):
    envs.make_env(p)


def test_symmetrize_mends_a_matrix():
  env = envs.make_env([[[0.1, 0.7], [0.5, 0.9]]], symmetrize=True)
  np.testing.assert_allclose(env.preference, [[[0.5, 0.6], [0.4, 0.5]]])


def test_bad_choices():
  with pytest.raises(ValueError, match='outcomes'):
    envs.make_env(np.full((1, 2, 2), 0.5), outcomes='same')
  with pytest.raises(ValueError, match='feedback'):
    envs.make_env(np.full((1, 2, 2), 0.5), feedback='none')


@pytest.mark.parametrize('eps', [0.0, 0.05, 0.2])
def test_hard_instance_hides_one_arm_at_a_fixed_level(eps):
  env = instances.hard_instance(jax.random.key(1), 8, 3, eps, groups=3)
  envs.make_env(np.asarray(env.preference))
  b = np.asarray(borda.borda_scores(env.preference))
  # (4 x 0.8 + 3 x 0.5) / 7 for the hidden arm, whatever eps is.
  np.testing.assert_allclose(b.max(1), 4.7 / 7, rtol=1e-5)
  second = np.sort(b, 1)[:, -2]
  np.testing.assert_allclose(b.max(1) - second, 4 * eps / 7, atol=1e-6)
  if eps:
    assert len(set(b.argmax(1))) == 3


def test_cyclic_instance_has_no_condorcet_winner():
  env = instances.cyclic_instance(5, 2, 0.3, 0.1)
  p = np.asarray(env.preference)
  assert ((p < 0.5).any(2)).all()
  np.testing.assert_array_equal(borda.borda_scores(p).argmax(1), [0, 1])
  assert instances.easy_instance(4, 2).preference.shape == (2, 4, 4)
  envs.make_env(
    np.asarray(instances.random_instance(jax.random.key(0), 5, 2).preference)
  )


def test_glm_hard_instance_by_formula():
  env = instances.glm_hard_instance(jax.random.key(2), 3, 0.05)
  p = np.asarray(env.preference)[0]
  theta = np.asarray(env.theta)[0, :3]
  assert p.shape == (16, 16)
  for arm in range(8):
    signs = [1 if arm >> k & 1 else -1 for k in range(3)]
    np.testing.assert_allclose(p[arm, 8:], 0.75 + signs @ theta, atol=1e-6)
  np.testing.assert_allclose(p[:8, :8], 0.5)
  glm.glm_env(env.phi, env.theta, 'linear')


def test_glm_cyclic_instance_has_no_condorcet_winner():
  env = instances.glm_cyclic_instance(jax.random.key(0), 7, 4, 2)
  assert (np.asarray(env.preference) < 0.5).any(2).all()


@pytest.mark.parametrize(
  ('make', 'message'),
  [
    (lambda k: instances.hard_instance(k, 5), 'even'),
    (lambda k: instances.hard_instance(k, 8, eps=0.5), 'level'),
    (lambda k: instances.hard_instance(k, 8, 2, groups=3), 'groups'),
    (lambda k: instances.easy_instance(4, gap=0.7), 'gap'),
    (lambda k: instances.cyclic_instance(4), 'odd'),
    (lambda k: instances.glm_hard_instance(k, 0, 0.1), 'bits'),
    (lambda k: instances.glm_hard_instance(k, 4, 0.2), 'delta'),
    (lambda k: instances.glm_cyclic_instance(k, 4, 3), 'odd'),
  ],
)
def test_bad_instances(make, message):
  with pytest.raises(ValueError, match=message):
    make(jax.random.key(0))


def test_regret_names_by_hand():
  # Two users, three arms; welfare of arms: sqrt(.6 * .3) etc.
  b = jnp.array([[0.6, 0.5, 0.4], [0.3, 0.5, 0.7]])
  losses = regret.instance_losses(b, 'geometric')
  arm = [np.sqrt(0.18), 0.5, np.sqrt(0.28)]
  np.testing.assert_allclose(losses.best - losses.arm, arm, rtol=1e-5)
  pair = regret.pair_losses(losses)
  i, j = map(np.asarray, regret.pair_order(3))
  lost = np.asarray(losses.arm)
  np.testing.assert_allclose(pair.pair, (lost[i] + lost[j]) / 2)
  np.testing.assert_allclose(pair.weak, np.minimum(lost[i], lost[j]))
  np.testing.assert_allclose(pair.strong, np.maximum(lost[i], lost[j]))


def test_welfare_by_hand():
  b = jnp.array([[0.2, 0.8], [0.9, 0.1]])
  pi = jnp.array([0.5, 0.5])
  want = {
    'geometric': 0.5, 'product': 0.25, 'log': np.log(0.5),
    'utilitarian': 0.5, 'egalitarian': 0.5,
  }  # fmt: skip
  for kind, value in want.items():
    np.testing.assert_allclose(
      welfare.nash_welfare(pi, b, kind), value, rtol=1e-6
    )
  with pytest.raises(ValueError, match='choose one of'):
    welfare.nash_welfare(pi, b, 'rawls')

"""Statistics of the unlearning report by hand; its tiny configs end to end."""

import numpy as np
import pytest

from experiments import (
  unlearning_extra,
  unlearning_measure,
  unlearning_sets,
  unlearning_stats,
)


def test_kendall_tau_by_hand():
  # Pairs of (1, 2, 3) against (1, 3, 2): two agree, one does not.
  tau = unlearning_stats.kendall_tau(np.arange(3), np.array([1, 3, 2]))
  np.testing.assert_allclose(tau, 1 / 3)


def test_regret_by_hand():
  predicted = {'a': np.array([1.0, 2.0]), 'b': np.array([2.0, 1.0])}
  realised = {'a': np.array([1.0, 4.0]), 'b': np.array([8.0, 4.0])}
  got = unlearning_stats.top1_regret(
    predicted, realised, np.array([0, 1]), ['a', 'b']
  )
  np.testing.assert_allclose(got['audit'], [0, 0])
  # Left out request 0, both tie on request 1: the first named is taken.
  np.testing.assert_allclose(got['constant'], [0, 0])
  predicted = {'a': np.array([2.0, 2.0]), 'b': np.array([1.0, 1.0])}
  got = unlearning_stats.top1_regret(
    predicted, realised, np.array([0, 1]), ['a', 'b']
  )
  np.testing.assert_allclose(got['audit'], [3, 0])  # log2(8 / 1)


def test_held_out_r2_leaves_the_group_out():
  rng = np.random.default_rng(0)
  x, noise = rng.normal(size=(60, 1)), rng.normal(size=(60, 1))
  group = np.repeat([0, 1, 2], 20)
  y = 3 * x[:, 0]
  found = unlearning_stats.incremental_r2(noise, x, y, group, 50)
  np.testing.assert_allclose(found['both'][0], 1, atol=1e-9)
  assert found['base'][0] < 0.2
  assert found['gain'][1] > 0.5
  # A rule that holds in one group only does not carry over.
  y = np.where(group == 0, 3, -3) * x[:, 0]
  assert unlearning_stats.incremental_r2(noise, x, y, group, 5)['both'][0] < 0.2


def test_weighted_gap_is_the_divergence_to_second_order():
  rng = np.random.default_rng(0)
  f = rng.normal(size=(1, 5, 4))
  step = 1e-3 * rng.normal(size=f.shape)
  log_p = lambda f: f - np.log(np.exp(f).sum(-1, keepdims=True))
  kl = np.sum(np.exp(log_p(f)) * (log_p(f) - log_p(f + step)), -1)
  size = np.linalg.norm(unlearning_measure.weighted(f[0], step), axis=-1)
  np.testing.assert_allclose(size**2 / 2, kl, rtol=1e-2)


def test_losses():
  f = np.log([[[0.7, 0.3], [0.2, 0.8]]])
  got = unlearning_measure.losses_of(f, np.array([0, 0]))
  np.testing.assert_allclose(got, -np.log([[0.7, 0.2]]))


def test_tables_are_standardised_and_flipped():
  table = unlearning_sets.load_table('wine', 100, 6, 0.1, 0)
  assert table.x.shape == (100, 7)
  assert table.flipped.sum() == 10
  np.testing.assert_allclose(table.x[:, -1], 1)
  np.testing.assert_allclose(table.x[:, :-1].mean(0), 0, atol=1e-5)
  with pytest.raises(ValueError, match='allowed'):
    unlearning_sets.load_table('iris', 100, 6, 0.1, 0)


def test_constant_choice_is_made_per_network():
  # Network 0 is best served by a, network 1 by b; two data sets each.
  realised = {'a': np.array([1.0, 1, 4, 4]), 'b': np.array([2.0, 2, 1, 1])}
  worst = {'a': np.array([2.0, 2, 1, 1]), 'b': np.array([1.0, 1, 2, 2])}
  network, group = np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
  got = unlearning_stats.top1_regret(
    worst, realised, group, ['a', 'b'], network
  )
  np.testing.assert_allclose(got['constant'], 0)
  np.testing.assert_allclose(got['oracle constant'], 0)
  np.testing.assert_allclose(got['audit'], [1, 1, 2, 2])
  pooled = unlearning_stats.top1_regret(worst, realised, group, ['a', 'b'])
  np.testing.assert_allclose(pooled['oracle constant'], [1, 1, 0, 0])


def digits(n, flipped):
  """Raw pixels in [0, 1] and a constant; the first labels are wrong."""
  from sklearn.datasets import load_digits

  x, y = load_digits(return_X_y=True)
  rng = np.random.default_rng(0)
  chosen = rng.permutation(len(x))[:n]
  x, y = np.c_[x[chosen] / 16, np.ones(n)], y[chosen]
  wrong = np.arange(n) < flipped
  y = np.where(wrong, (y + rng.integers(1, 10, n)) % 10, y)
  return unlearning_sets.Table(x, y, wrong, x[:1], y[:1])


@pytest.mark.slow
def test_softmax_regression_on_digits_is_predicted():
  forget = {
    'random': 20 + np.random.default_rng(1).choice(380, 20, replace=False),
    'mislabelled': np.arange(20),
  }
  found = unlearning_extra.far_from_local(
    digits(400, 20), 'softmax', 0, 1.0, 'softmax', forget, (10, 6)
  )
  for kind, (_, cosine) in found.items():
    assert min(cosine) > 0.95, (kind, cosine)


def test_square_loss_of_a_linear_network_is_predicted_exactly():
  forget = {'mislabelled': np.arange(6)}
  found = unlearning_extra.far_from_local(
    digits(80, 6), 'softmax', 0, 1.0, 'square', forget, (2, 1)
  )
  error, cosine = found['mislabelled']
  np.testing.assert_allclose(error, 0, atol=1e-9)
  np.testing.assert_allclose(cosine, 1)


def test_cnn_by_hand():
  net = unlearning_sets.make_network('cnn', (17, 2), 1, 0.1, 1.0)
  params = {
    'k': np.zeros((3, 3, 1, 1), np.float32),
    'c': np.zeros(1, np.float32),
    'v': np.ones((4, 2), np.float32),
  }
  params['k'][0, 0] = 1  # picks one pixel of each window
  x = np.concatenate([np.arange(16.0), [1.0]])[None].astype(np.float32) / 20
  # 4 x 4 pixels, stride 2, one row and column of padding below and right.
  want = np.tanh(np.array([0, 2, 8, 10]) / 20).sum()
  np.testing.assert_allclose(net.apply(params, x), [[want] * 2], rtol=1e-5)
  with pytest.raises(ValueError, match='square images'):
    unlearning_sets.make_network('cnn', (16, 2), 1, 0.1, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['ridge', 'softmax', 'mlp'])
def test_tiny_runs_to_its_report(name, tmp_path):
  from experiments import cli
  from tmlib.train import run

  config = cli.load_config(f'configs/unlearning_{name}.py:tiny')
  assert run(cli.runner(config).make, config, workdir=tmp_path) == 0
  text = (tmp_path / 'report' / 'summary.md').read_text()
  assert 'doing nothing' in text

"""Balance losses against counts by hand, over devices, and the bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from scipy import special

from tmlib.moe import balance_losses, balance_sums, topk_route, update_bias


def test_balance_by_hand():
  # Two tokens, three experts, one choice each: experts 0 and 1.
  logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25], [0.25, 0.5, 0.25]]))
  losses = balance_losses(topk_route(logits, 1), logits)
  probs = np.asarray([0.75, 0.75, 0.5])
  np.testing.assert_allclose(
    losses['importance'], probs.var() / probs.mean() ** 2, rtol=1e-5
  )
  np.testing.assert_allclose(losses['load_frac'], [0.5, 0.5, 0])
  np.testing.assert_allclose(
    losses['gshard'], 3 * (0.5 * 0.375 + 0.5 * 0.375), rtol=1e-6
  )
  np.testing.assert_allclose(losses['z'], 0, atol=1e-12)
  np.testing.assert_allclose(losses['dead_frac'], 1 / 3, rtol=1e-6)
  assert 'load' not in losses


def test_gshard_is_one_at_a_uniform_load_for_any_k():
  logits = jnp.zeros((12, 4)).at[jnp.arange(12), jnp.arange(12) % 4].set(5.0)
  for k in (1, 4):
    value = balance_losses(topk_route(logits, k), logits)['gshard']
    np.testing.assert_allclose(value, 1, rtol=1e-5)


@pytest.mark.parametrize('k', [1, 2, 4])
def test_gshard_counts_first_choices(k):
  logits = jax.random.normal(jax.random.key(0), (23, 4)).at[:, 0].add(1.0)
  mask = np.arange(23) < 20
  # Algorithm 1: c_e counts argmax, m_e is the mean gate, over the tokens.
  count, gate = np.zeros(4), np.zeros(4)
  for row in np.asarray(logits, float)[mask]:
    gates = special.softmax(row)
    count[gates.argmax()] += 1
    gate += gates
  want = 4 * (count / 20 * gate / 20).sum()
  routing = topk_route(logits, k, mask=jnp.asarray(mask))
  losses = balance_losses(routing, logits)
  np.testing.assert_allclose(losses['gshard'], want, rtol=1e-5)
  # The load counts every choice.
  load = np.bincount(np.asarray(routing.experts[:20]).ravel(), minlength=4)
  np.testing.assert_allclose(losses['load_frac'], load / (20 * k), rtol=1e-6)


def test_the_load_loss_counts_what_fresh_noise_would_choose():
  """Resampling the noise of one expert chooses it as often as predicted."""
  experts, k, noise_std = 5, 2, 3.0
  logits = jax.random.normal(jax.random.key(0), (1, experts))
  routing = topk_route(logits, k, key=jax.random.key(1), noise_std=noise_std)
  wins = balance_sums(routing, logits, noise_std=noise_std).wins
  fresh = np.random.default_rng(0).normal(size=40_000) * noise_std / experts
  scores = np.asarray(routing.scores, float)[0]
  for e in range(experts):
    others = np.sort(np.delete(scores, e))[::-1]
    chance = (float(logits[0, e]) + fresh > others[k - 1]).mean()
    np.testing.assert_allclose(wins[e], chance, atol=0.012)


def test_identical_users_and_empty_batches_give_numbers():
  logits = jnp.zeros((6, 4))
  for routing in (
    topk_route(logits, 2),
    topk_route(logits, 2, mask=jnp.zeros(6, bool)),
    topk_route(logits, 2, key=jax.random.key(0), noise_std=1.0),
  ):
    for name, value in balance_losses(routing, logits).items():
      assert np.isfinite(value).all(), name
  loss = lambda r: balance_losses(topk_route(r, 2), r)['importance']
  assert np.isfinite(jax.grad(loss)(logits)).all()


def test_balance_is_the_same_over_devices():
  logits = jax.random.normal(jax.random.key(0), (16, 4))
  kind = jax.sharding.AxisType.Auto
  mesh = jax.make_mesh((4,), ('data',), axis_types=(kind,))

  def local(r):
    return balance_losses(topk_route(r, 2), r, axis_name='data')

  split = jax.shard_map(
    local, mesh=mesh, in_specs=P('data'), out_specs=P(), check_vma=False
  )
  want = balance_losses(topk_route(logits, 2), logits)
  for name, value in split(logits).items():
    np.testing.assert_allclose(value, want[name], rtol=1e-5, err_msg=name)


def test_a_bias_balances_without_a_loss():
  logits = jax.random.normal(jax.random.key(0), (512, 8))
  logits = logits + jnp.linspace(0, 3, 8)[None]
  bias = jnp.zeros(8)
  cv = lambda bias: balance_losses(topk_route(logits, 2, bias=bias), logits)[
    'load_cv'
  ]
  start = cv(bias)
  step = jax.jit(
    lambda b: update_bias(
      b,
      balance_losses(topk_route(logits, 2, bias=b), logits)['load_frac'],
      0.02,
    )
  )
  for _ in range(300):
    bias = step(bias)
  assert start > 0.8
  assert cv(bias) < 0.1

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib.mil import pooling, soft_pooling

# Names of the pools that need no scores.
_POOLS = {
  'mean': pooling.mean_pool,
  'max': pooling.max_pool,
  'log_sum_exp': soft_pooling.log_sum_exp_pool,
  'top_k': functools.partial(soft_pooling.top_k_pool, k=2),
  'noisy_or': soft_pooling.noisy_or_pool,
}


def test_attention_by_hand():
  # exp(0) : exp(ln 3) = 1 : 3.
  features = jnp.array([[[0.0, 4.0], [8.0, 0.0], [np.nan, np.nan]]])
  scores = jnp.array([[0.0, np.log(3.0), 5.0]])
  mask = jnp.array([[True, True, False]])
  pooled, attention = jax.jit(pooling.attention_pool)(features, scores, mask)
  np.testing.assert_allclose(pooled, [[6.0, 1.0]], rtol=1e-6)
  np.testing.assert_allclose(attention, [[0.25, 0.75, 0.0]], rtol=1e-6)


def test_max_by_hand_with_ties():
  features = jnp.array([[[1.0, 5.0], [3.0, 5.0], [9.0, 9.0]]])
  mask = jnp.array([[True, True, False]])
  pooled, share = jax.jit(pooling.max_pool)(features, mask)
  np.testing.assert_array_equal(pooled, [[3.0, 5.0]])
  # The first feature belongs to instance 1, the second to both.
  np.testing.assert_allclose(share, [[0.25, 0.75, 0]])


@pytest.mark.parametrize('name', ['attention', *_POOLS])
def test_packed_rows_equal_bags_one_by_one(name):
  rng = np.random.default_rng(0)
  lengths, size = (4, 1, 6, 0), 14
  features = np.full((1, size, 3), np.nan, np.float32)
  scores = np.full((1, size), np.inf, np.float32)
  ids = np.zeros((1, size), np.int32)
  bags, start = [], 1  # the first cell is padding as well
  for s, n in enumerate(lengths):
    x = rng.normal(size=(n, 3)).astype(np.float32)
    e = rng.normal(size=n).astype(np.float32)
    cells = slice(start, start + n)
    features[0, cells], scores[0, cells], ids[0, cells] = x, e, s
    bags.append((x, e, cells))
    start += n
  mask = np.isfinite(features).all(-1)

  def pool(features, scores, mask, ids=None, count=1):
    if name == 'attention':
      return pooling.attention_pool(features, scores, mask, ids, count)
    return _POOLS[name](features, mask, ids, count)

  pool = jax.jit(pool, static_argnums=4)
  pooled, weights = pool(features, scores, mask, ids, 4)
  assert pooled.shape == (1, 4, 3)
  for s, (x, e, cells) in enumerate(bags):
    if not len(x):
      np.testing.assert_array_equal(pooled[0, s], np.zeros(3))
      continue
    one, w = pool(x[None], e[None], np.ones((1, len(x)), bool))
    np.testing.assert_allclose(pooled[0, s], one[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(weights[0, cells], w[0], rtol=1e-6, atol=1e-7)
  np.testing.assert_array_equal(np.asarray(weights)[~mask], 0)


@pytest.mark.parametrize('name', sorted(set(_POOLS) - {'noisy_or'}))
def test_gradients_ignore_padding(name):
  mask = jnp.array([[True, False], [False, False]])
  features = jnp.where(mask[..., None], jnp.ones((2, 2, 3)), jnp.nan)
  grad = jax.jit(jax.grad(lambda x: _POOLS[name](x, mask)[0].sum()))(features)
  want = np.zeros((2, 2, 3))
  want[0, 0] = 1
  np.testing.assert_allclose(grad, want, atol=1e-6)


def test_soft_pools_by_hand():
  x = jnp.array([[[0.0], [np.log(3.0)], [np.log(8.0)], [np.nan]]])
  mask = jnp.array([[True, True, True, False]])
  pooled, share = jax.jit(soft_pooling.log_sum_exp_pool)(x, mask)
  np.testing.assert_allclose(pooled, [[np.log(4)]], rtol=1e-6)
  np.testing.assert_allclose(share, [[1 / 12, 1 / 4, 2 / 3, 0]], rtol=1e-6)
  pooled, share = _POOLS['top_k'](x, mask)
  np.testing.assert_allclose(pooled, [[np.log(24) / 2]], rtol=1e-6)
  np.testing.assert_allclose(share, [[0, 0.5, 0.5, 0]])
  # 1 - sigmoid = 1/2, 1/4, 1/9.
  pooled, share = soft_pooling.noisy_or_pool(x, mask)
  np.testing.assert_allclose(pooled, [[np.log(72)]], rtol=1e-6)
  want = np.log([2, 4, 9, 1]) / np.log(72)
  np.testing.assert_allclose(share, [want], rtol=1e-6)


def test_log_sum_exp_lies_between_mean_and_maximum():
  x = np.random.default_rng(0).normal(size=(1, 9, 2)).astype(np.float32)
  mask = np.ones((1, 9), bool)
  pool = lambda r: soft_pooling.log_sum_exp_pool(x, mask, sharpness=r)[0]
  np.testing.assert_allclose(pool(1e-2), x.mean(1), atol=2e-2)
  np.testing.assert_allclose(pool(1e3), x.max(1), atol=1e-2)


def test_soft_pool_errors():
  x, mask = jnp.ones((1, 2, 3)), jnp.ones((1, 2), bool)
  with pytest.raises(ValueError, match='sharpness must be > 0, got 0'):
    soft_pooling.log_sum_exp_pool(x, mask, sharpness=0)
  with pytest.raises(ValueError, match='k must be >= 1, got 0'):
    soft_pooling.top_k_pool(x, mask, k=0)

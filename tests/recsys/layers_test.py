"""Attention, experts and clusters against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tmlib.recsys import adapter, layers

DAY = 86400.0


def test_ages_are_exact_and_never_negative():
  time = jnp.array([[0, 2_000_000_000, 2_000_000_003]], jnp.int32)
  now = jnp.array([[5, 2_000_000_001, 2_000_000_004]], jnp.int32)
  got = layers.ages(time, now)
  np.testing.assert_array_equal(got[0, 1, 1:], [1, 0])
  np.testing.assert_allclose(got[0, 1, 0], 2_000_000_001, rtol=1e-7)
  np.testing.assert_array_equal(got[0, 0], [5, 0, 0])


def test_age_buckets():
  age = jnp.array([0.0, 1, 2, 3, 6, 7, 1e6, 1e9])
  np.testing.assert_array_equal(
    layers.age_buckets(age, 12), [0, 1, 1, 2, 2, 3, 11, 11]
  )


def test_decay_attention_against_loops():
  rng = np.random.default_rng(0)
  size, heads, length, width = 2, 3, 5, 4
  logits = rng.normal(size=(size, heads, length))
  values = rng.normal(size=(size, length, heads, width))
  time = np.sort(rng.integers(0, 9 * DAY, (size, length)))
  valid = np.array([[0, 1, 1, 1, 1], [0, 0, 0, 1, 1]], bool)
  half = np.array([0.3, 2, 20]) * DAY
  window = 3
  want = np.zeros((size, length, heads, width))
  for b in range(size):
    for t in range(length):
      for h in range(heads):
        places = [
          s for s in range(length) if t - window < s <= t and valid[b, s]
        ]
        weight = np.array([
          np.exp(logits[b, h, s])
          * 2 ** (-(time[b, t] - time[b, s]) / half[h])
          for s in places
        ])  # fmt: skip
        for w, s in zip(weight, places, strict=True):
          want[b, t, h] += w / weight.sum() * values[b, s, h]
  with jax.enable_x64(True):
    got = layers.decay_attention(
      jnp.asarray(logits), jnp.asarray(values),
      layers.ages(jnp.asarray(time), jnp.asarray(time)).astype(jnp.float64),
      jnp.log(jnp.asarray(half)),
      layers.causal_mask(jnp.asarray(valid), window),
    )  # fmt: skip
  np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-12)


def decayed_choices(users, length, half_life, seed=0):
  """Labels that are taken up again with weight 2^(-age / half-life)."""
  rng = np.random.default_rng(seed)
  time = np.cumsum(rng.exponential(0.5 * DAY, (users, length)), 1)
  label = np.zeros((users, length), int)
  label[:, 0] = rng.integers(0, 5, users)
  for t in range(1, length):
    weight = 2 ** (-(time[:, t : t + 1] - time[:, :t]) / half_life)
    cumulative = np.cumsum(weight, 1)
    draw = rng.random(users) * cumulative[:, -1]
    past = (draw[:, None] > cumulative).sum(1)
    taken = label[np.arange(users), past]
    fresh = rng.random(users) < 0.05
    label[:, t] = np.where(fresh, rng.integers(0, 5, users), taken)
  return time.astype(np.int32), label


def test_a_half_life_of_three_days_is_recovered_from_one_day():
  time, label = decayed_choices(400, 24, 3 * DAY)
  valid = jnp.ones((400, 23), bool)
  values = jax.nn.one_hot(label[:, :-1], 5)[:, :, None]
  age = layers.ages(jnp.asarray(time[:, :-1]), jnp.asarray(time[:, 1:]))
  mask = layers.causal_mask(valid)
  target = jnp.asarray(label[:, 1:])

  def loss(theta):
    chance = layers.decay_attention(
      jnp.zeros((400, 1, 23)), values, age, theta, mask
    )[:, :, 0]
    own = jnp.take_along_axis(chance, target[..., None], 2)
    return -jnp.log(0.95 * own + 0.05 / 5).mean()

  tx = optax.adam(0.05)
  theta = jnp.log(jnp.array([DAY]))

  @jax.jit
  def step(carry, _):
    theta, state = carry
    updates, state = tx.update(jax.grad(loss)(theta), state)
    return (optax.apply_updates(theta, updates), state), None

  (theta, _), _ = jax.lax.scan(step, (theta, tx.init(theta)), None, 120)
  found = float(jnp.exp(theta[0])) / DAY
  assert 2.1 < found < 3.9


def test_dropout_belongs_to_the_example():
  keys = jax.random.split(jax.random.key(0), 4)
  x = jnp.ones((4, 200))
  whole = layers.dropout(x, 0.25, keys, 1)
  part = layers.dropout(x[2:], 0.25, keys[2:], 1)
  np.testing.assert_array_equal(whole[2:], part)
  assert set(np.unique(whole)) == {0, np.float32(1 / 0.75)}
  assert 0.15 < float((whole == 0).mean()) < 0.35
  np.testing.assert_array_equal(layers.dropout(x, 0.25, None, 1), x)


def test_diversity_by_hand():
  w = np.zeros((2, 1, 2), np.float32)
  assert float(adapter.diversity_loss(jnp.asarray(w))) == 0
  grad = jax.grad(adapter.diversity_loss)(jnp.asarray(w))
  np.testing.assert_array_equal(grad, np.zeros_like(w))
  w[0, 0], w[1, 0] = [3, 0], [0, 5]
  assert float(adapter.diversity_loss(jnp.asarray(w))) == 0
  w[1, 0] = [5, 0]
  np.testing.assert_allclose(adapter.diversity_loss(jnp.asarray(w)), 1, 1e-5)
  w[1, 0] = [3, 4]  # cos^2 = 9 / 25
  np.testing.assert_allclose(
    adapter.diversity_loss(jnp.asarray(w)), 0.36, rtol=1e-5
  )
  assert float(adapter.diversity_loss(jnp.ones((1, 2, 2)))) == 0


def test_kmeans_finds_what_is_apart_and_bears_what_is_alike():
  rng = np.random.default_rng(0)
  truth = rng.integers(0, 4, 200)
  points = 10 * np.eye(4)[truth] + 0.1 * rng.normal(size=(200, 4))
  weight = np.ones(200)
  points = np.concatenate([points, np.full((5, 4), 1e3)])
  weight = np.concatenate([weight, np.zeros(5)])  # of no weight, of no say
  centres, found = adapter.kmeans(
    jax.random.key(0), jnp.asarray(points, jnp.float32), 4,
    weight=jnp.asarray(weight, jnp.float32),
  )  # fmt: skip
  found = np.asarray(found)[:200]
  for k in range(4):
    assert len(set(found[truth == k])) == 1
    at = found[truth == k][0]
    np.testing.assert_allclose(
      centres[at], points[:200][truth == k].mean(0), atol=1e-3
    )
  centres, found = adapter.kmeans(jax.random.key(0), jnp.ones((8, 3)), 3)
  assert np.isfinite(centres).all()
  assert not np.asarray(found).any()
  with pytest.raises(ValueError, match='clusters=9'):
    adapter.kmeans(jax.random.key(0), jnp.ones((8, 3)), 9)

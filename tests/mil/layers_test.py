"""The layers of bags against Flax's, in float64, values and all gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from tmlib.mil import layers

PAIRS = {
  'dense': (layers.Dense(5), nn.Dense(5)),
  'no_bias': (layers.Dense(1, use_bias=False), nn.Dense(1, use_bias=False)),
  'layer_norm': (layers.LayerNorm(), nn.LayerNorm(epsilon=1e-5)),
}


@pytest.mark.parametrize('name', PAIRS)
@pytest.mark.parametrize('shape', [(7, 3), (2, 4, 3), (0, 3)])
def test_equals_flax(name, shape):
  ours, theirs = PAIRS[name]
  rng = np.random.default_rng(0)
  with jax.enable_x64(True):
    # Far from zero: the variance must not be a difference of squares.
    x = jnp.asarray(rng.normal(size=shape) + 1e3)
    params = ours.init(jax.random.key(0), x)
    jax.tree.map(
      np.testing.assert_array_equal, params, theirs.init(jax.random.key(0), x)
    )
    noise = lambda p: jnp.asarray(rng.normal(size=p.shape))
    params = jax.tree.map(noise, params)
    weights = noise(theirs.apply(params, x))

    def loss(layer):
      return lambda p, x: jnp.sum(jnp.tanh(layer.apply(p, x) / 1e3) * weights)

    for got, want in zip(
      jax.tree.leaves(jax.value_and_grad(loss(ours), (0, 1))(params, x)),
      jax.tree.leaves(jax.value_and_grad(loss(theirs), (0, 1))(params, x)),
      strict=True,
    ):
      np.testing.assert_allclose(got, want, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.bfloat16])
def test_statistics_of_half_precision_are_wide(dtype):
  """A square of 400 is none in float16."""
  x = np.random.default_rng(0).normal(size=(3, 48)) * 400
  x = jnp.asarray(x, dtype)
  ours, theirs = layers.LayerNorm(), nn.LayerNorm(epsilon=1e-5, dtype=dtype)
  params = ours.init(jax.random.key(0), x)
  wide = lambda y: np.asarray(y, np.float32)
  got, want = (m.apply(params, x) for m in (ours, theirs))
  np.testing.assert_allclose(wide(got), wide(want), rtol=1e-2, atol=1e-2)
  loss = lambda m: lambda x: jnp.sum(jnp.tanh(m.apply(params, x)))
  got, want = (jax.grad(loss(m))(x) for m in (ours, theirs))
  assert got.dtype == dtype
  np.testing.assert_allclose(wide(got), wide(want), rtol=0.05, atol=2e-4)


def test_half_precision():
  x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
  ours, theirs = (
    kind(5, dtype=jnp.bfloat16) for kind in (layers.Dense, nn.Dense)
  )
  params = ours.init(jax.random.key(0), x)
  got, want = (np.asarray(m.apply(params, x)) for m in (ours, theirs))
  assert got.dtype == want.dtype == jnp.bfloat16
  assert all(p.dtype == jnp.float32 for p in jax.tree.leaves(params))
  np.testing.assert_array_equal(got, want)

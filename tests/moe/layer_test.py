"""The Linen layer: router plus experts, noise, dtypes, training."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tmlib.moe import MoELayer, expert_mlp, topk_route


class TestLayer:
  @pytest.mark.parametrize('impl', ['dense', 'blocked', 'capacity'])
  def test_layer_is_router_plus_experts(self, impl):
    layer = MoELayer(4, 6, impl=impl, capacity_factor=4.0, block=8)
    x = jax.random.normal(jax.random.key(0), (3, 5, 8))
    variables = layer.init(jax.random.key(1), x)
    y, aux = jax.jit(layer.apply)(variables, x)
    p = variables['params']
    flat = x.reshape(-1, 8)
    routing = topk_route(flat @ p['gate'], 2)
    want = expert_mlp(flat, p['w_in'], p['w_out'], routing, impl='dense')
    np.testing.assert_allclose(y, want.reshape(3, 5, 8), atol=1e-6)
    assert aux['experts'].shape == (3, 5, 2)
    assert aux['dropped_frac'] == 0

  def test_a_capacity_layer_says_what_it_dropped(self):
    layer = MoELayer(4, 6, k=1, impl='capacity', capacity_factor=1.0)
    x = jnp.ones((8, 3))  # all to one expert, which has two slots
    variables = layer.init(jax.random.key(0), x)
    _, aux = layer.apply(variables, x)
    np.testing.assert_allclose(aux['dropped_frac'], 0.75)

  def test_zero_out_is_the_identity_of_a_residual(self):
    layer = MoELayer(4, 6, shared_hidden=5, zero_out=True)
    x = jax.random.normal(jax.random.key(0), (7, 3))
    y, _ = layer.apply(layer.init(jax.random.key(1), x), x)
    np.testing.assert_array_equal(y, 0)

  def test_noise_is_asked_for_by_train_alone(self):
    layer = MoELayer(6, 4, noise_std=5.0)
    x = jax.random.normal(jax.random.key(0), (40, 3))
    variables = layer.init(jax.random.key(1), x)
    still, aux = layer.apply(variables, x)
    assert 'load' not in aux
    noisy, aux = layer.apply(
      variables, x, train=True, rngs={'router': jax.random.key(2)}
    )
    assert 'load' in aux
    assert not np.allclose(still, noisy)

  def test_half_precision(self):
    layer = MoELayer(4, 6, dtype=jnp.bfloat16, shared_hidden=4, use_bias=True)
    x = jax.random.normal(jax.random.key(0), (9, 8), jnp.bfloat16)
    variables = layer.init(jax.random.key(1), x)
    y, _ = layer.apply(variables, x)
    assert y.dtype == jnp.bfloat16
    assert variables['router']['bias'].shape == (4,)

  def test_inside_a_model_it_trains(self):
    class Model(nn.Module):
      @nn.compact
      def __call__(self, x):
        y, aux = MoELayer(4, 16, block=16)(x)
        return nn.Dense(1)(x + y)[:, 0], aux

    x = jax.random.normal(jax.random.key(0), (256, 4))
    target = jnp.abs(x).sum(1)
    params = Model().init(jax.random.key(1), x)

    def loss(params):
      y, aux = Model().apply(params, x)
      return ((y - target) ** 2).mean() + 0.01 * aux['gshard']

    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
      value, grads = jax.value_and_grad(loss)(params)
      updates, state = optimizer.update(grads, state)
      return optax.apply_updates(params, updates), state, value

    state, first = optimizer.init(params), None
    for _ in range(200):
      params, state, value = step(params, state)
      first = value if first is None else first
    assert value < 0.1 * first

"""Experts that are needed: they learn what one readout cannot, each its own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.recsys import support
from tmlib import train
from tmlib.recsys import adapter, method
from tmlib.train.update import Skips

CLUSTERS, DIM = 3, 12


@pytest.fixture(scope='module')
def needed():
  """Vectors around three centres, each with a map of its own to be learned.

  Returns the config, trained parameters, vectors [n, D], targets [n, D] and
  clusters [n]. One map for all would leave most of the error.
  """
  rng = np.random.default_rng(0)
  cluster = rng.integers(0, CLUSTERS, 600)
  centre = 6 * np.linalg.qr(rng.normal(size=(DIM, CLUSTERS)))[0].T
  code = rng.normal(size=(600, DIM))
  # Codes orthogonal to the centres, so that these say nothing of them.
  code -= code @ centre.T @ centre / 36
  maps = rng.normal(size=(CLUSTERS, DIM, DIM)) / np.sqrt(DIM)
  z = (centre[cluster] + code).astype(np.float32)
  y = z + np.einsum('nd,nde->ne', code, maps[cluster]).astype(np.float32)
  config = support.config(
    dim=DIM, experts=CLUSTERS, k=2, expert_hidden=24, profile_dim=0
  )
  params = adapter.init_adapter(jax.random.key(0), config)
  x = adapter.normalized(jnp.asarray(z))
  params['centres'] = jax.jit(adapter.kmeans, static_argnames='clusters')(
    jax.random.key(1), x, clusters=CLUSTERS
  )[0]
  tokens = jnp.asarray(z)[:, None]
  valid = jnp.ones((600, 1), bool)
  routing, _ = adapter.route(params, config, x[:, None], 'centres', valid)
  optimizer = optax.adam(1e-2)

  def loss(experts):
    group = params | {'experts': experts}
    out = adapter.apply_experts(group, config, tokens, routing)[:, 0]
    return jnp.mean((out - y) ** 2)

  def step(carry, _):
    experts, state = carry
    updates, state = optimizer.update(jax.grad(loss)(experts), state)
    return (optax.apply_updates(experts, updates), state), None

  @jax.jit
  def fit(experts):
    return jax.lax.scan(step, (experts, optimizer.init(experts)), length=600)

  params['experts'] = fit(params['experts'])[0][0]
  return config, params, z, y, cluster, routing


def errors(needed, without=None):
  config, params, z, y, _, routing = needed
  if without is not None:
    weights = jnp.where(routing.experts == without, 0, routing.weights)
    routing = routing._replace(weights=weights)
  tokens = jnp.asarray(z)[:, None]
  out = adapter.apply_experts(params, config, tokens, routing)[:, 0]
  return np.mean((np.asarray(out) - y) ** 2, 1)


def test_experts_learn_what_one_map_cannot(needed):
  _, _, z, y, cluster, routing = needed
  first = np.asarray(routing.experts)[:, 0]
  # k-means on the vectors found the clusters, up to names.
  pairs = {(int(a), int(b)) for a, b in zip(first, cluster, strict=True)}
  assert len(pairs) == CLUSTERS
  design = np.c_[z, np.ones(len(z))]
  best = design @ np.linalg.lstsq(design, y, rcond=None)[0]
  linear = np.mean((best - y) ** 2)
  assert errors(needed).mean() < linear / 4


@pytest.mark.parametrize('expert', range(CLUSTERS))
def test_leaving_an_expert_out_hurts_its_own_users(needed, expert):
  # Each vector has two experts, so that the others could have leant on it.
  first = np.asarray(needed[-1].experts)[:, 0]
  cluster = needed[-2]
  own = cluster == np.bincount(cluster[first == expert]).argmax()
  change = errors(needed, without=expert) - errors(needed)
  assert change[own].mean() > 5 * errors(needed)[own].mean()
  assert change[own].mean() > 20 * abs(change[~own]).mean()


def test_the_gate_starts_as_the_assignment_to_the_centres():
  config = support.config(experts=3, dim=8, temperature=0.7)
  keys = jax.random.split(jax.random.key(0), 3)
  runs = [adapter.init_adapter(key, config) for key in keys[:2]]
  params = jax.tree.map(lambda *x: jnp.stack(x), *runs)
  params['centres'] = jax.random.normal(keys[2], (2, 3, 8))
  optimizer, zero = optax.sgd(0.1), jnp.zeros(2, jnp.int32)
  state = train.TrainState(
    step=zero, key=keys[:2], params=params, opt_state=(),
    ema_params=None, skips=Skips(zero, zero, zero, {}),
  )  # fmt: skip
  new = method.enter_gate(config, optimizer)(state, None)
  x = np.random.default_rng(0).normal(size=(5, 8))
  for run in range(2):
    one = jax.tree.map(lambda a, run=run: a[run], new.params)
    gate = adapter.gate_logits(one, jnp.asarray(x, jnp.float32))
    c = np.asarray(params['centres'][run], np.float64)
    squares = ((x[:, None] - c) ** 2).sum(-1)
    want = (-squares + (c**2).sum(-1)) / (0.7 * 8)
    # Equal up to what the softmax does not see.
    shift = lambda a: np.asarray(a) - np.asarray(a).mean(-1, keepdims=True)
    np.testing.assert_allclose(shift(gate), shift(want), rtol=1e-5, atol=1e-5)

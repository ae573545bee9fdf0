"""The model: causality, padding, empty histories, identity, ablations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.recsys import support
from tmlib.recsys import dumoe, method
from tmlib.recsys.options import DUMoEConfig
from tmlib.recsys.recommend import Recommender

# Networks are compiled in nearly every test.
pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def model():
  """(config, params away from their start, queries of eight users)."""
  config = support.config()
  batch = support.take(support.arrays()[1], slice(0, 8))
  params = dumoe.init(jax.random.key(0), config, batch)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(1), len(leaves))
  leaves = [
    x + 0.1 * jax.random.normal(k, x.shape)
    for x, k in zip(leaves, keys, strict=True)
  ]
  return config, jax.tree.unflatten(tree, leaves), batch


@pytest.fixture(scope='module')
def answer(model):
  """A compiled function from a batch to (state, y) of the last position."""
  config, params, _ = model

  @jax.jit
  def run(batch):
    state = dumoe.encode(params, config, batch)
    valid = batch['item'] > 0
    y = dumoe.adapt(params, config, state.z, valid, last=True).y
    return state, y[:, 0]

  return run


def test_the_future_changes_nothing(model, answer):
  _, _, batch = model
  state, _ = answer(batch)
  other = dict(batch)
  other['item'] = batch['item'].copy()
  other['item'][:, 4:] = 1 + (batch['item'][:, 4:] + 3) % 30
  other['time'] = batch['time'].copy()
  other['time'][:, 4:] += 10_000
  other['now'] = batch['now'].copy()
  other['now'][:, 4:] += 20_000
  changed, _ = answer(other)
  np.testing.assert_allclose(
    changed.z[:, :4], state.z[:, :4], rtol=1e-5, atol=1e-6
  )
  assert float(jnp.abs(changed.z[:, 4:] - state.z[:, 4:]).max()) > 1e-3


def test_padding_and_batch_mates_change_nothing(model, answer):
  _, _, batch = model
  short = dict(batch)
  short['item'] = batch['item'].copy()
  short['item'][:, :3] = 0
  state, y = answer(short)
  poison = dict(short)
  for name in ('time', 'now', 'action'):
    poison[name] = short[name].copy()
    poison[name][:, :3] = 0 if name == 'action' else 77
  poison['features'] = {
    k: np.where(np.arange(6)[None, :, None] < 3, 9.0, x).astype(np.float32)
    for k, x in short['features'].items()
  }
  other, other_y = answer(poison)
  np.testing.assert_allclose(other_y, y, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(other.drift[:, -1], state.drift[:, -1], atol=1e-6)
  mates = jax.tree.map(lambda x: np.roll(x, 1, 0), short)
  _, rolled = answer(mates)
  np.testing.assert_allclose(np.roll(rolled, -1, 0), y, rtol=1e-5, atol=1e-6)


def test_an_empty_history_is_the_profile(model, answer):
  config, params, batch = model
  empty = dict(batch)
  empty['item'] = np.zeros_like(batch['item'])
  state, y = answer(empty)
  assert np.isfinite(y).all()
  np.testing.assert_array_equal(state.mix[:, -1], [[1, 0, 0]] * 8)
  np.testing.assert_array_equal(state.drift, 0)
  np.testing.assert_allclose(state.z[:, -1], state.static[:, -1], rtol=1e-6)

  def loss(p):
    z = dumoe.encode(p, config, empty).z
    return dumoe.adapt(p, config, z, empty['item'] > 0).y.sum()

  grads = jax.grad(loss)(params)
  for x in jax.tree.leaves(grads):
    assert np.isfinite(x).all()


def test_missing_modalities_and_a_single_event_are_finite(model, answer):
  _, _, batch = model
  bare = dict(batch)
  bare['present'] = {k: np.zeros_like(x) for k, x in batch['present'].items()}
  bare['features'] = {
    k: np.full_like(x, np.nan) for k, x in batch['features'].items()
  }
  bare['item'] = batch['item'].copy()
  bare['item'][:, :-1] = 0
  state, y = answer(bare)
  assert np.isfinite(y).all()
  assert np.isfinite(state.z).all()
  # One event: recent and all are the same.
  np.testing.assert_allclose(state.drift[:, -1], 0, atol=1e-5)


def test_users_who_are_all_alike(model):
  config, params, batch = model
  same = jax.tree.map(lambda x: np.repeat(x[:1], 8, 0), batch)
  same['id'] = np.arange(8)
  build = method.build_stage('joint', config, _sgd(), tags=_tags())
  made = build(None)
  state = made.init(jax.random.key(0), same).replace(params=params)
  state, metrics = jax.jit(made.update)(state, same)
  for name, value in metrics.items():
    assert np.isfinite(value), name


def _sgd():
  import optax

  return optax.sgd(0.1)


def _tags():
  return support.world()[0].tags


def test_the_adapter_starts_as_the_identity():
  config = support.config(shared_hidden=4)
  batch = support.take(support.arrays()[1], slice(0, 4))
  params = dumoe.init(jax.random.key(0), config, batch)
  z = dumoe.encode(params, config, batch).z
  got = dumoe.adapt(params, config, z, batch['item'] > 0).y
  np.testing.assert_array_equal(got, z)


def test_experts_against_a_loop_in_float64(model):
  config, params, batch = model
  z = np.asarray(dumoe.encode(params, config, batch).z)[:, -1]
  out = dumoe.adapt(
    params, config, jnp.asarray(z)[:, None], jnp.ones((8, 1), bool)
  )
  f = lambda x: np.asarray(x, np.float64)
  w_in, w_out = (f(params['experts'][k]) for k in ('w_in', 'w_out'))
  for b in range(8):
    x = f(z[b])
    normed = (x - x.mean()) / np.sqrt(x.var() + 1e-6)
    r = normed @ f(params['gate']['kernel'])
    best = np.argsort(-r, kind='stable')[:2]
    pi = np.exp(r[best] - r[best].max())
    pi /= pi.sum()
    want = x.copy()
    for p, e in zip(pi, best, strict=True):
      h = x @ w_in[e]
      gelu = h / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
      want += p * (gelu @ w_out[e])
    np.testing.assert_allclose(out.y[b, 0], want, rtol=2e-4, atol=2e-5)
    np.testing.assert_array_equal(out.routing.experts[b], best)


def test_centres_route_to_the_nearest(model):
  config, params, batch = model
  z = dumoe.encode(params, config, batch).z[:, -1:]
  out = dumoe.adapt(params, config, z, jnp.ones((8, 1), bool), source='centres')
  x = np.asarray(z[:, 0], np.float64)
  x = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-6)
  d = ((x[:, None] - np.asarray(params['centres'])[None]) ** 2).sum(-1)
  near = np.argsort(d, 1)[:, :2]
  np.testing.assert_array_equal(out.routing.experts, near)
  best = np.take_along_axis(d, near, 1) / (config.temperature * config.dim)
  pi = np.exp(-best + best.min(1, keepdims=True))
  np.testing.assert_allclose(
    out.routing.weights, pi / pi.sum(1, keepdims=True), rtol=1e-3, atol=1e-6
  )


def test_user_routing_is_the_mean_of_the_past(model):
  _, _, batch = model
  config = support.config(routing='user')
  from tmlib.recsys.adapter import normalized, routing_input

  z = jnp.asarray(np.random.default_rng(0).normal(size=(8, 6, 8)), jnp.float32)
  valid = batch['item'] > 0
  got = routing_input(config, z, jnp.asarray(valid))
  x = np.asarray(normalized(z))
  for b in range(8):
    for t in range(6):
      at = [s for s in range(t + 1) if valid[b, s]]
      want = x[b, at].mean(0) if at else x[b, t]
      np.testing.assert_allclose(got[b, t], want, rtol=1e-4, atol=1e-5)


def test_scores_agree(model, answer):
  _, params, batch = model
  y = answer(batch)[1]
  whole = dumoe.catalogue_logits(params, y)
  assert np.isneginf(whole[:, 0]).all()
  items = jnp.tile(jnp.arange(1, 31)[None], (8, 1))
  np.testing.assert_allclose(
    dumoe.score_items(params, y, items), whole[:, 1:], rtol=1e-5, atol=1e-5
  )


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (dict(k=5), 'k=5'),
    (dict(k=0), 'k=0'),
    (dict(experts=-1), 'experts=-1'),
    (dict(load=0.1), 'noise_std'),
    (dict(routing='expert'), 'serve'),
    (dict(routing='item'), 'routing'),
    (dict(fusion='gate'), 'fusion'),
    (dict(dim=9), 'heads'),
    (dict(half_lives=(1.0, 2.0, 3.0)), 'half_lives'),
    (dict(half_lives=(0.0, 1.0)), 'positive'),
    (dict(dropout=1.0), 'dropout'),
    (dict(temperature=0.0), 'temperature'),
    (dict(ahead=0), 'ahead=0'),
    (dict(ahead_decay=0.0), 'ahead_decay'),
    (dict(balance='bias', noise_std=1.0), 'balance'),
    (dict(num_actions=0), 'num_actions=0'),
    (dict(interest=float('nan')), 'interest=nan'),
    (dict(diversity=float('nan')), 'diversity=nan'),
    (dict(z=float('inf')), 'z=inf'),
    (dict(dim=8.0), 'dim=8.0'),
    (dict(k=1.0), 'k=1.0'),
    (dict(modalities=(('m0', 0),)), "'m0'=0"),
  ],
)
def test_bad_configs(change, match):
  with pytest.raises(ValueError, match=match):
    support.config(**change)


@pytest.mark.parametrize(
  ('change', 'match'),
  [
    (lambda b: b['item'].__setitem__((0, -1), 31), 'item: values'),
    (lambda b: b['item'].__setitem__((0, -1), -1), 'item: values'),
    (lambda b: b['action'].__setitem__((0, -1), 1), 'action'),
    (lambda b: b['features'].pop('m1'), "no modality 'm1'"),
    (lambda b: b.__setitem__('profile', np.zeros((8, 2))), 'profile'),
  ],
)
def test_what_jax_would_clamp_is_refused(model, change, match):
  config, _, batch = model
  broken = jax.tree.map(np.copy, batch)
  change(broken)
  with pytest.raises(ValueError, match=match):
    dumoe.check_batch(config, broken)


def test_recommend(model):
  config, params, _ = model
  names = tuple(f'film {i}' for i in range(30))
  served = Recommender(params, config, names, 6)
  history = [('film 3', 50.0), ('film 7', 10.0)]
  got = served.recommend(history, 5)
  assert len(got) == 5
  assert not {'film 3', 'film 7'} & {name for name, _ in got}
  scores = [score for _, score in got]
  assert scores == sorted(scores, reverse=True)
  # The order of the list is not the order of time.
  assert served.recommend(history[::-1], 5) == got
  assert len(served.recommend([], 30)) == 30
  assert len(served.recommend(history, 30, exclude_seen=False)) == 30
  # An event from the future is just now.
  later = served.recommend(history, 5, now=20.0)
  assert all(np.isfinite(score) for _, score in later)
  for bad, match in (
    (lambda: served.recommend(history, 29), 'n=29'),
    (lambda: served.recommend([('film 99', 1)], 5), 'film 99'),
    (lambda: served.recommend(history, 5, profile=np.zeros(2)), 'profile'),
    (lambda: Recommender(params, config, names[:3], 6), '3 names'),
    (lambda: Recommender(params, config, names, 6, 'centers'), 'centers'),
  ):
    with pytest.raises(ValueError, match=match):
      bad()


def test_sasrec_is_the_backbone_alone():
  config = DUMoEConfig.sasrec(30, dim=8, hidden=8, blocks=1)
  batch = support.take(support.arrays()[1], slice(0, 4))
  params = dumoe.init(jax.random.key(0), config, batch)
  assert set(params) == {'encoder', 'heads'}
  assert set(params['encoder']) == {
    'items', 'place', 'block0', 'norm_history',
  }  # fmt: skip
  state = dumoe.encode(params, config, batch)
  np.testing.assert_array_equal(state.z, state.long)

"""Every model must see bags, never their surroundings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib.data.packing import pack_bags, unpack_instances, unpack_values
from tmlib.mil import Bag, MILOutput, batch_bags, create_model
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.models import MODELS
from tmlib.ops.packing import plan_packing

_LENGTHS = (5, 1, 9, 3)
_CLOSE = dict(rtol=1e-6, atol=1e-6)
models = pytest.mark.parametrize('name', sorted(MODELS))


def _bags(lengths=_LENGTHS, seed=0):
  rng = np.random.default_rng(seed)
  return [
    Bag(rng.normal(size=(n, 6)).astype(np.float32), np.ones(n, bool))
    for n in lengths
  ]


@functools.cache
def _model(name):
  """One set of compiled functions per model, shared by all tests."""
  model = create_model(name, 3, hidden=16, dropout=0.5)
  variables = jax.jit(model.init)(jax.random.key(0), batch_bags(_bags()))

  def shifted(x):
    # Biases start at zero, which would hide mistakes.
    steps = jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)
    return x + 0.1 * steps / x.size

  variables = jax.tree.map(shifted, variables)
  return model, variables, jax.jit(model.apply, static_argnames='train')


def _junk(bag):
  """Fills padding with NaN and infinities."""
  junk = np.where(np.arange(bag.features.shape[-1]) % 2, np.nan, np.inf)
  features = np.where(bag.mask[..., None], bag.features, junk)
  return bag.replace(features=features.astype(np.float32))


@models
def test_padding_batch_mates_and_order(name):
  _, variables, apply = _model(name)
  bags = _bags()
  want = apply(variables, batch_bags(bags, n=16))
  padded = apply(variables, _junk(batch_bags(bags, n=32)))
  others = [
    apply(variables, _junk(batch_bags([bag, *_bags((2, 16, 0), 9)], n=16)))
    for bag in bags
  ]
  order = np.array([2, 0, 3, 1])
  shuffled = apply(variables, batch_bags([bags[i] for i in order], n=16))
  for field in ('logits', 'slide_features'):
    base = getattr(want, field)
    np.testing.assert_allclose(getattr(padded, field), base, **_CLOSE)
    np.testing.assert_allclose(getattr(shuffled, field), base[order], **_CLOSE)
    for b, mates in enumerate(others):
      np.testing.assert_allclose(getattr(mates, field)[0], base[b], **_CLOSE)
  np.testing.assert_allclose(padded.attention[:, :16], want.attention, **_CLOSE)
  assert not np.asarray(padded.attention[:, 16:]).any()
  np.testing.assert_allclose(want.attention.sum(-1), np.ones(4), rtol=1e-6)


def test_a_batch_of_one_equals_no_padding_at_all():
  _, variables, apply = _model('gated_abmil')
  want = apply(variables, batch_bags(_bags(), n=16)).logits[2]
  got = apply(variables, batch_bags(_bags()[2:3], n=9)).logits[0]
  np.testing.assert_allclose(got, want, **_CLOSE)


@models
def test_permutation_of_instances(name):
  _, variables, apply = _model(name)
  bags = _bags()
  orders = [np.random.default_rng(1).permutation(n) for n in _LENGTHS]
  moved = [
    bag.replace(features=bag.features[order])
    for bag, order in zip(bags, orders, strict=True)
  ]
  want = apply(variables, batch_bags(bags, n=16))
  got = apply(variables, batch_bags(moved, n=16))
  np.testing.assert_allclose(got.logits, want.logits, **_CLOSE)
  for b, order in enumerate(orders):
    np.testing.assert_allclose(
      got.attention[b, : len(order)], want.attention[b][order], **_CLOSE
    )


@models
def test_packing(name):
  _, variables, apply = _model(name)
  bags = _bags((5, 1, 9, 0))
  want = apply(variables, batch_bags(bags, n=16))
  plan = plan_packing([len(bag.mask) for bag in bags], 12, 3)
  got = apply(variables, _junk(pack_bags(bags, plan)))
  assert got.logits.shape == (plan.num_rows, 3, 3)
  np.testing.assert_allclose(
    unpack_values(got.logits, plan), want.logits, **_CLOSE
  )
  for b, attention in enumerate(unpack_instances(got.attention, plan)):
    np.testing.assert_allclose(
      attention, want.attention[b, : len(attention)], **_CLOSE
    )


@models
def test_empty_and_single_bags_are_finite_and_so_are_gradients(name):
  model, variables, apply = _model(name)
  batch = _junk(batch_bags(_bags((0, 1, 0, 2)), n=16))
  out = apply(variables, batch)
  bias = variables['params']['head']['bias']
  np.testing.assert_allclose(out.logits[0], bias, rtol=1e-6)

  def loss(variables, features):
    out = model.apply(variables, batch.replace(features=features))
    return jnp.sum(jax.nn.log_softmax(out.logits) ** 2)

  grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, batch.features)
  for leaf in jax.tree.leaves(grads):
    assert np.isfinite(leaf).all()


def test_dropout_belongs_to_the_bag():
  _, variables, apply = _model('gated_abmil')
  bags, keys = _bags(), jax.random.split(jax.random.key(3), 8)
  run = lambda bags, keys, n=16: (
    apply(
      variables, batch_bags(bags, n=n), train=True, dropout_keys=keys
    ).logits
  )
  want = run(bags, keys[:4])
  np.testing.assert_allclose(run(bags, keys[:4], 32), want, **_CLOSE)
  order = np.array([2, 0, 3, 1])
  mixed = run([bags[i] for i in order], keys[order])
  np.testing.assert_allclose(mixed, want[order], **_CLOSE)
  still = apply(variables, batch_bags(bags, n=16)).logits
  assert np.abs(want - still).max() > 1e-2
  assert np.abs(want - run(bags, keys[4:])).max() > 1e-2


def test_the_dropout_stream_works_too():
  _, variables, apply = _model('max_pool')
  rngs = {'dropout': jax.random.key(0)}
  out = apply(variables, batch_bags(_bags(), n=16), train=True, rngs=rngs)
  assert isinstance(out, MILOutput)
  assert np.isfinite(out.logits).all()


def test_dropout_keeps_the_mean_and_layers_differ():
  keys = jax.random.split(jax.random.key(0), 2)
  x = jnp.ones((2, 500, 20))
  drop = jax.jit(bag_dropout, static_argnums=1)
  one, two = (np.asarray(drop(x, 0.25, keys, i)) for i in (0, 1))
  assert one.mean() == pytest.approx(1, abs=0.02)
  assert set(np.unique(one)) == {0.0, np.float32(4 / 3)}
  assert (one != two).mean() == pytest.approx(2 * 0.25 * 0.75, abs=0.02)
  assert (one[0] != one[1]).mean() == pytest.approx(0.375, abs=0.02)
  assert bag_dropout(x, 0.25, None) is x
  with pytest.raises(ValueError, match=r'rate must be in \[0, 1\)'):
    bag_dropout(x, 1.0, keys)


def test_gated_attention_equals_numpy():
  _, variables, apply = _model('gated_abmil')
  bags = _bags()
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  dense = lambda x, layer: x @ layer['kernel'] + layer.get('bias', 0)
  h = np.maximum(dense(bags[2].features.astype(np.float64), p['embed']), 0)
  a = p['attention']
  assert 'bias' not in a['w']
  units = np.tanh(dense(h, a['v'])) / (1 + np.exp(-dense(h, a['u'])))
  e = np.exp(dense(units, a['w'])[:, 0])
  z = (e / e.sum()) @ h
  out = apply(variables, batch_bags(bags, n=16))
  np.testing.assert_allclose(out.attention[2, :9], e / e.sum(), rtol=1e-5)
  np.testing.assert_allclose(out.slide_features[2], z, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(
    out.logits[2], dense(z, p['head']), rtol=1e-5, atol=1e-6
  )


def test_bfloat16_keeps_float32_parameters_and_attention():
  model = create_model('gated_abmil', 2, hidden=16, dtype=jnp.bfloat16)
  batch = batch_bags(_bags())
  out, variables = jax.eval_shape(
    model.init_with_output, jax.random.key(0), batch
  )
  assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype('float32')}
  assert out.logits.dtype == out.attention.dtype == jnp.float32


def test_errors():
  with pytest.raises(ValueError, match="did you mean 'gated_abmil'"):
    create_model('gated_abml', 2)
  with pytest.raises(ValueError, match='num_classes must be >= 2'):
    create_model('abmil', 1)
  model = create_model('mean_pool', 2)
  with pytest.raises(ValueError, match="'mean' or 'max'"):
    model.clone(pool='sum').init(jax.random.key(0), batch_bags(_bags()))


@models
def test_only_a_batch_of_bags_is_taken(name):
  model = create_model(name, 2, hidden=4)
  init = lambda bag: jax.eval_shape(model.init, jax.random.key(0), bag)
  with pytest.raises(TypeError, match=r'bag must be a Bag, got .* \(5, 6\)'):
    init(np.ones((5, 6), np.float32))
  with pytest.raises(ValueError, match=r'shape \(5, 6\), expected \[B, N, P\]'):
    init(_bags()[0])

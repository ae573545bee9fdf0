"""Every model must see bags, never their surroundings."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.mil.bags import LENGTHS, compiled, grid_bags, junk, small
from tmlib.data.packing import pack_bags, unpack_instances, unpack_values
from tmlib.mil import (
  MODELS,
  MILOutput,
  auxiliary_losses,
  batch_bags,
  classification_loss,
  create_model,
)
from tmlib.mil.dropout import bag_dropout
from tmlib.ops.packing import plan_packing

_CLOSE: Any = {'rtol': 1e-6, 'atol': 1e-6}
# Models that read the order of the file.
_ORDERED = {'dtfd', 'transmil'}
# Pooling functions have tests of their own; one model after them is enough.
_ALIKE = {
  'log_sum_exp_instance',
  'max_instance',
  'mean_instance',
  'top_k_instance',
}
_NAMES = sorted(set(MODELS) - _ALIKE)
models = pytest.mark.parametrize('name', _NAMES)


@models
def test_padding_batch_mates_and_order(name):
  _, variables, apply = compiled(name)
  bags = grid_bags()
  want = apply(variables, batch_bags(bags, n=16))
  padded = apply(variables, junk(batch_bags(bags, n=32)))
  others = [
    apply(variables, junk(batch_bags([bag, *grid_bags((2, 16, 0), 9)], n=16)))
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
  _, variables, apply = compiled('gated_abmil')
  want = apply(variables, batch_bags(grid_bags(), n=16)).logits[2]
  got = apply(variables, batch_bags(grid_bags()[2:3], n=9)).logits[0]
  np.testing.assert_allclose(got, want, **_CLOSE)


@pytest.mark.parametrize('name', sorted(set(_NAMES) - _ORDERED))
def test_permutation_of_instances(name):
  _, variables, apply = compiled(name)
  order = [np.random.default_rng(1).permutation(n) for n in LENGTHS]
  want = apply(variables, batch_bags(grid_bags(), n=16))
  got = apply(variables, batch_bags(grid_bags(order=order), n=16))
  np.testing.assert_allclose(got.logits, want.logits, **_CLOSE)
  for b, moved in enumerate(order):
    np.testing.assert_allclose(
      got.attention[b, : len(moved)], want.attention[b][moved], **_CLOSE
    )


@models
def test_packing(name):
  _, variables, apply = compiled(name)
  bags = grid_bags((5, 1, 9, 0))
  want = apply(variables, batch_bags(bags, n=16))
  plan = plan_packing([len(bag.mask) for bag in bags], 12, 3)
  got = apply(variables, junk(pack_bags(bags, plan)))
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
  model, variables, apply = compiled(name)
  batch = junk(batch_bags(grid_bags((0, 1, 0, 2)), n=16))
  out = apply(variables, batch)
  assert all(np.isfinite(x).all() for x in jax.tree.leaves(out))
  label = jnp.arange(4) % 3

  def loss(variables, features):
    out: Any = model.apply(variables, batch.replace(features=features))
    nll = lambda logits: classification_loss(logits, label)[0]
    losses = auxiliary_losses(out, nll, label)
    return jnp.sum(nll(out.logits) + sum(losses.values()))

  grads = jax.jit(jax.grad(loss, argnums=(0, 1)))(variables, batch.features)
  for leaf in jax.tree.leaves(grads):
    assert np.isfinite(leaf).all()


def test_dropout_belongs_to_the_bag():
  _, variables, apply = compiled('gated_abmil')
  bags, keys = grid_bags(), jax.random.split(jax.random.key(3), 8)
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
  _, variables, apply = compiled('max_pool')
  rngs = {'dropout': jax.random.key(0)}
  out = apply(variables, batch_bags(grid_bags(), n=16), train=True, rngs=rngs)
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
  _, variables, apply = compiled('gated_abmil')
  bags = grid_bags()
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
  model = small('gated_abmil', hidden=16, dtype=jnp.bfloat16)
  batch = batch_bags(grid_bags())
  out, variables = jax.eval_shape(
    model.init_with_output, jax.random.key(0), batch
  )
  assert {x.dtype for x in jax.tree.leaves(variables)} == {jnp.dtype('float32')}
  assert out.logits.dtype == out.attention.dtype == jnp.float32


def test_instance_space_noisy_or_by_hand():
  _, variables, apply = compiled('noisy_or_instance')
  bags = grid_bags()
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  dense = lambda x, layer: x @ layer['kernel'] + layer['bias']
  h = np.maximum(dense(bags[2].features.astype(np.float64), p['embed']), 0)
  miss = np.prod(1 - 1 / (1 + np.exp(-dense(h, p['head']))), 0)
  out = apply(variables, batch_bags(bags, n=16))
  np.testing.assert_allclose(
    out.logits[2], np.log((1 - miss) / miss), rtol=1e-5, atol=1e-5
  )


def test_errors():
  with pytest.raises(ValueError, match="did you mean 'gated_abmil'.* Known: a"):
    create_model('gated_abml', num_classes=2)
  with pytest.raises(ValueError, match='num_classes must be >= 1'):
    create_model('abmil', num_classes=0)
  with pytest.raises(ValueError, match='in_dim must be >= 1, got 0'):
    create_model('abmil', in_dim=0, num_classes=2)
  with pytest.raises(ValueError, match="'hiden'; did you mean 'hidden'"):
    create_model('abmil', num_classes=2, hiden=4)
  init = lambda model: jax.eval_shape(
    model.init, jax.random.key(0), batch_bags(grid_bags())
  )
  model = create_model('mean_pool', num_classes=2)
  with pytest.raises(ValueError, match='pool must be one of mean, max'):
    init(model.clone(pool='sum'))
  with pytest.raises(ValueError, match="'embedding' or 'instance'"):
    init(model.clone(space='image'))
  with pytest.raises(ValueError, match='features have dim 6 .*in_dim=7'):
    init(create_model('abmil', in_dim=7, num_classes=2))


@pytest.mark.parametrize(
  ('name', 'options', 'match'),
  [
    ('abmil', {'hidden': 0}, 'hidden=0 must be an integer >= 1'),
    ('abmil', {'hidden': 8.0}, r'hidden=8\.0 must be an integer'),
    ('abmil', {'slide': -1}, 'slide=-1 must be an integer >= 0'),
    ('abmil', {'dropout': 1.0}, r'dropout=1\.0 must be in \[0, 1\)'),
    ('abmil', {'dropout': 'none'}, "dropout='none' must be a number"),
    ('abmil', {'gated': 1}, 'gated=1 must be True or False'),
    ('abmil', {'dtype': 'float99'}, "dtype='float99' must be a floating"),
    ('abmil', {'dtype': 'int8'}, "dtype='int8' must be a floating"),
    ('clam_sb', {'instances': 0}, 'instances=0 must be'),
    ('transmil', {'heads': 0}, 'heads=0 must be'),
    ('transmil', {'layout': 3}, "layout=3 must be a name, such as 'order'"),
    ('patch_gcn', {'layers': 0}, 'layers=0 must be'),
    ('patch_gcn', {'layer_dropout': -0.1}, r'layer_dropout=-0\.1 must be in'),
    ('tmevolve', {'hidden': 0}, 'hidden=0 must be'),
    ('tmevolve', {'dropout': 1.0}, r'dropout=1\.0 must'),
  ],
)
def test_values_that_no_layer_takes(name, options, match):
  with pytest.raises(ValueError, match=match):
    create_model(name, num_classes=2, **options)
  if name == 'abmil':
    create_model(name, num_classes=2, dtype='bfloat16', hidden=np.int32(8))


@pytest.mark.parametrize('name', sorted(set(MODELS) - {'tmevolve'}))
def test_only_a_batch_of_bags_is_taken(name):
  model = small(name)
  init = lambda bag: jax.eval_shape(model.init, jax.random.key(0), bag)
  with pytest.raises(TypeError, match=r'bag must be a Bag, got .* \(5, 6\)'):
    init(np.ones((5, 6), np.float32))
  with pytest.raises(ValueError, match=r'shape \(5, 6\), expected \[B, N, P\]'):
    init(grid_bags()[0])

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tmlib.data import Bag, batch_bags, fold_statistics, pack_bags, pack_values
from tmlib.mil import (
  MILOutput,
  classification_loss,
  classification_method,
  create_model,
  cross_validation_runs,
  scale_features,
  tag_runs,
)
from tmlib.ops.packing import plan_packing
from tmlib.train.data import pass_data, run_data


def _bags(n=8, seed=0):
  rng = np.random.default_rng(seed)
  sizes = rng.integers(1, 9, n)
  labels = np.arange(n) % 2
  bags = [
    Bag((rng.normal(size=(m, 5)) + y).astype(np.float32), np.ones(m, bool))
    for m, y in zip(sizes, labels, strict=True)
  ]
  return bags, labels.astype(np.int32)


def _batch(bags, labels, n=16):
  size = len(bags)
  return {
    'bag': batch_bags(bags, n=n),
    'label': labels,
    'weight': np.ones(size, np.float32),
    'id': np.arange(size, dtype=np.int32),
  }


@functools.cache
def _plain():
  return _method()


def _method(model=None, **options):
  """The method with its functions compiled: quicker than op by op."""
  model = model or create_model(
    'gated_abmil', num_classes=2, hidden=8, attention=4, dropout=0.0
  )
  method = classification_method(
    model, optax.sgd(0.1), num_classes=2, **options
  )(None)
  return type(method)(*(jax.jit(f) for f in method))


def test_loss_by_hand():
  logits = jnp.log(jnp.array([[0.75, 0.25], [0.5, 0.5]]))
  labels = jnp.array([1, 0])
  loss, weight = jax.jit(classification_loss)(logits, labels)
  np.testing.assert_allclose(loss, np.log([4, 2]), rtol=1e-6)
  np.testing.assert_array_equal(weight, [1, 1])
  loss, weight = classification_loss(
    logits, labels, class_weights=(1, 3), label_smoothing=0.2
  )
  # .9 log 4 + .1 log(4/3), log 2.
  want = [0.9 * np.log(4) + 0.1 * np.log(4 / 3), np.log(2)]
  np.testing.assert_allclose(loss, want, rtol=1e-6)
  np.testing.assert_array_equal(weight, [3, 1])


def test_padding_rows_change_nothing():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  batch['weight'][5:] = 0
  junk = jax.tree.map(np.copy, batch)
  junk['label'][5:] = -7
  junk['id'][5:] = 99
  junk['bag'].features[5:] = np.nan
  junk['bag'].mask[5:] = False
  method = _plain()
  state = method.init(jax.random.key(0), batch)
  (one, a), (two, b) = method.update(state, batch), method.update(state, junk)
  jax.tree.map(np.testing.assert_array_equal, one.params, two.params)
  assert a['loss'] == b['loss']
  # The mean over the five real bags.
  logits = np.asarray(method.evaluate(state, batch)['outputs']['logits'])
  own = logits[np.arange(5), labels[:5]] - np.log(np.exp(logits[:5]).sum(1))
  np.testing.assert_allclose(a['loss'], -own.mean(), rtol=1e-5)
  np.testing.assert_allclose(
    a['accuracy'], np.mean(logits[:5].argmax(1) == labels[:5]), rtol=1e-6
  )
  assert set(a) >= {'loss', 'cross_entropy', 'accuracy'}


def test_packed_rows_give_the_same_step():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  plan = plan_packing([len(bag.mask) for bag in bags], 16, 4)
  packed = {
    'bag': pack_bags(bags, plan),
    'label': pack_values(labels, plan, fill=-1),
    'weight': pack_values(np.ones(8, np.float32), plan),
    'id': pack_values(np.arange(8, dtype=np.int32), plan),
  }
  method = _plain()
  state = method.init(jax.random.key(0), batch)
  update = method.update
  (one, a), (two, b) = update(state, batch), update(state, packed)
  assert packed['weight'].shape[0] < 8
  np.testing.assert_allclose(a['loss'], b['loss'], rtol=1e-6)
  np.testing.assert_allclose(a['accuracy'], b['accuracy'])
  for x, y in zip(
    jax.tree.leaves(one.params), jax.tree.leaves(two.params), strict=True
  ):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)
  found = method.evaluate(state, packed)['outputs']
  assert found['logits'].shape == (*packed['weight'].shape, 2)


def test_microbatches_and_dropout_agree_with_the_whole_batch():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  model = create_model('mean_pool', num_classes=2, hidden=8, dropout=0.5)
  results = []
  for m in (1, 4):
    method = _method(model, microbatches=m)
    state = method.init(jax.random.key(0), batch)
    results.append(method.update(state, batch)[1]['loss'])
  np.testing.assert_allclose(results, results[0], rtol=1e-6)


class _WithAux:
  """A model whose auxiliary losses are known."""

  def init(self, key, bag, train):
    del key, train
    return {'params': {'w': jnp.ones((bag.features.shape[-1], 2)) * 0.1}}

  def apply(self, variables, bag, train, dropout_keys=None):
    del train, dropout_keys
    pooled = jnp.where(bag.mask[..., None], bag.features, 0).sum(1)
    size = bag.mask.sum(1).astype(jnp.float32)
    return MILOutput(
      pooled @ variables['params']['w'],
      bag.mask / jnp.maximum(size, 1)[:, None],
      pooled,
      {'size': size, 'other': 2 * size},
    )


def test_auxiliary_losses_are_added_and_reported_apart():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  sizes = np.array([len(bag.mask) for bag in bags])
  method = _method(_WithAux(), aux_weights={'size': 0.5})
  state = method.init(jax.random.key(0), batch)
  metrics = method.update(state, batch)[1]
  np.testing.assert_allclose(metrics['aux/size'], sizes.mean(), rtol=1e-6)
  np.testing.assert_allclose(metrics['aux/other'], 2 * sizes.mean(), rtol=1e-6)
  np.testing.assert_allclose(
    metrics['loss'], metrics['cross_entropy'] + sizes.mean() / 2, rtol=1e-6
  )
  wrong = _method(_WithAux(), aux_weights={'sise': 0.5})
  with pytest.raises(ValueError, match="names \\['sise'\\], but .* 'size'"):
    wrong.init(jax.random.key(0), batch)


def test_it_learns_what_is_there():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  method = _plain()
  state = method.init(jax.random.key(0), batch)
  for _ in range(150):
    state, metrics = method.update(state, batch)
  found = method.evaluate(state, batch)
  assert found['sums']['accuracy'][0] / found['sums']['accuracy'][1] > 0.9
  probability = found['outputs']['probability']
  np.testing.assert_allclose(probability.sum(-1), np.ones(8), rtol=1e-6)
  assert metrics['loss'] < 0.5


def test_outputs_on_request():
  bags, labels = _bags()
  batch = _batch(bags, labels)
  method = _method(outputs=('attention', 'slide_features'))
  state = method.init(jax.random.key(0), batch)
  outputs = method.evaluate(state, batch)['outputs']
  assert outputs['attention'].shape == (8, 16)
  assert outputs['slide_features'].shape == (8, 8)
  packed = batch | {
    name: batch[name][:, None] for name in ('label', 'weight', 'id')
  }
  ids = np.zeros((8, 16), np.int32)
  packed['bag'] = batch['bag'].replace(segment_ids=ids)
  with pytest.raises(ValueError, match='one bag per row'):
    method.evaluate(state, packed)


def test_each_row_is_scaled_by_its_own_fold():
  bags, labels = _bags()
  folds = np.arange(8) % 2
  statistics = fold_statistics(bags, folds)
  batch = _batch(bags, labels)
  junk = np.where(batch['bag'].mask[..., None], batch['bag'].features, np.nan)
  bag = batch['bag'].replace(features=junk)
  scale = jax.jit(
    lambda fold, limit: scale_features(bag, fold, statistics, limit)
  )
  found = scale(jnp.array([0, 1] * 4), 1e9)
  for b in range(8):
    f, m = b % 2, len(bags[b].mask)
    want = (bags[b].features - statistics[0][f]) / statistics[1][f]
    np.testing.assert_allclose(
      found.features[b, :m], want, rtol=1e-4, atol=1e-5
    )
    assert not np.asarray(found.features[b, m:]).any()
  clipped = scale(jnp.zeros(8, int), 0.5)
  assert np.abs(clipped.features).max() == 0.5
  # The loss sees the scaled features.
  by_fold = batch | {'fold': folds.astype(np.int32)}
  scaled = batch | {'bag': scale(jnp.asarray(folds), 10.0)}
  method, plain = _method(statistics=statistics), _plain()
  state = method.init(jax.random.key(0), by_fold)
  got = method.evaluate(state, by_fold)['outputs']['logits']
  want = plain.evaluate(state, scaled)['outputs']['logits']
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_cross_validation_as_runs():
  folds = np.array([[0, 1, 2, 0, 1, 2], [2, 1, 0, 1, 0, 2]])
  train, test, repeat = cross_validation_runs(folds)
  np.testing.assert_array_equal(train + test, np.ones((6, 6)))
  np.testing.assert_array_equal(repeat, [0, 0, 0, 1, 1, 1])
  np.testing.assert_array_equal(test[4], folds[1] == 1)
  # Each bag is tested once per repeat.
  np.testing.assert_array_equal(test[:3].sum(0), np.ones(6))


def test_runs_carry_their_fold():
  arrays = {'x': np.arange(6.0)}
  weights = cross_validation_runs(np.array([[0, 1, 2, 0, 1, 2]]))[0]
  data = tag_runs(run_data(arrays, weights, 4), np.arange(3))
  batch = data.load(0, slice(0, 4))
  np.testing.assert_array_equal(batch['fold'], [[0] * 4, [1] * 4, [2] * 4])
  one = jax.tree.map(lambda x: x[1], batch)
  found = data.gather(data.resident, one)
  assert set(found) >= {'x', 'weight', 'id', 'fold'}
  np.testing.assert_array_equal(found['fold'], [1] * 4)
  with pytest.raises(ValueError, match='batch per run'):
    tag_runs(pass_data(arrays, 4), np.arange(3))


def test_class_weights_may_lie_in_the_batch():
  batch = _batch(*_bags())
  weights = np.array([0.5, 3.0], np.float32)
  state = _plain().init(jax.random.key(0), batch)
  want = _method(class_weights=(0.5, 3.0)).evaluate(state, batch)['sums']
  weighted = batch | {'class_weight': weights[batch['label']]}
  found = _plain().evaluate(state, weighted)['sums']
  plain = _plain().evaluate(state, batch)['sums']
  for name in ('loss', 'cross_entropy', 'accuracy'):
    np.testing.assert_allclose(found[name], want[name], rtol=1e-6)
  assert abs(float(plain['loss'][0] - want['loss'][0])) > 0.1


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'num_classes': 1}, 'num_classes must be >= 2'),
    ({'label_smoothing': 1.0}, r'label_smoothing must be in \[0, 1\)'),
    ({'class_weights': (1.0,)}, '2 positive numbers'),
    ({'class_weights': (1.0, -1.0)}, '2 positive numbers'),
    ({'outputs': ('atention',)}, "got \\['atention'\\]"),
  ],
)
def test_option_errors(options, words):
  options = {'num_classes': 2} | options
  model = create_model('abmil', num_classes=2)
  with pytest.raises(ValueError, match=words):
    classification_method(model, optax.sgd(0.1), **options)

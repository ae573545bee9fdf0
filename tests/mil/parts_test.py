"""Pieces of the published models against brute force in NumPy, float64."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.mil.bags import (
  CLASSES,
  FEATURES,
  compiled,
  grid_bags,
  junk,
  small,
)
from tmlib.mil import (
  MODELS,
  Bag,
  batch_bags,
  clam,
  classification_method,
  create_model,
  dtfd,
  nystrom,
  transmil,
  wikg,
)
from tmlib.mil.concept_models import orthogonality
from tmlib.mil.patch_gcn import softmax_aggregate
from tmlib.mil.rows import normalise_in_bag, top_instances
from tmlib.ops.graph import ell_from_grid
from tmlib.ops.raster import (
  depthwise,
  depthwise_on_grid,
  depthwise_on_square,
)

CLOSE: Any = {'rtol': 1e-5, 'atol': 1e-5}


def softmax(x, axis=-1):
  e = np.exp(x - x.max(axis, keepdims=True))
  return e / e.sum(axis, keepdims=True)


def unit(x):
  return x / np.linalg.norm(x, axis=-1, keepdims=True)


def test_smooth_svm_by_hand():
  # exp(0) + exp(1 + ln 2 - 0): the wrong class is ln 2 ahead.
  logits, label = jnp.array([0.0, np.log(2)]), jnp.int32(0)
  loss = clam.smooth_top1_svm(logits, label)
  np.testing.assert_allclose(loss, np.log(1 + 2 * np.e), rtol=1e-6)
  hard = clam.smooth_top1_svm(logits, label, temperature=1e-3)
  np.testing.assert_allclose(hard, 1 + np.log(2), rtol=1e-5)
  # Scores far apart need no other branch.
  far = jnp.array([-5e3, 5e3])
  loss, grad = jax.value_and_grad(clam.smooth_top1_svm)(far, label)
  assert loss == 10001
  np.testing.assert_array_equal(grad, [-1, 1])


def test_small_bags_give_what_they_have():
  scores = jnp.array([[[3.0], [1.0], [2.0], [9.0]]])
  member = jnp.array([[[True], [True], [True], [False]]])
  index, valid = top_instances(scores, member, 8)
  assert index.shape == (1, 1, 1, 4)
  assert index[0, 0, 0, :3].tolist() == [0, 2, 1]
  assert valid[0, 0, 0].tolist() == [True, True, True, False]


def test_cluster_loss_is_the_mean_over_what_is_valid():
  logits = np.random.default_rng(0).normal(size=(2, 2, 3, 2))
  valid = np.array([[True, True, False], [True, False, False]])
  got = clam.cluster_loss(logits[0], logits[1], valid)
  log = np.log(softmax(logits))
  for c, n in ((0, 2), (1, 1)):
    want = -(log[0, c, :n, 1].mean() + log[1, c, :n, 0].mean()) / 2
    np.testing.assert_allclose(got[c], want, **CLOSE)


def test_pseudo_bags_are_balanced_and_know_no_batch_mates():
  keys = jax.random.split(jax.random.key(0), 3)
  sizes = np.array([11, 3, 0])
  member = lambda n: (np.arange(n) < sizes[:, None])[..., None]
  split = jax.jit(dtfd.pseudo_bags, static_argnums=2)
  group = np.asarray(split(keys, member(12), 4))
  assert sorted(np.bincount(group[0, :11], minlength=4)) == [2, 3, 3, 3]
  assert sorted(group[1, :3]) == [0, 1, 2]
  assert (group[2] == 4).all()
  wide = np.asarray(split(keys, member(20), 4))
  np.testing.assert_array_equal(wide[:, :12], group)
  other = np.asarray(split(jnp.flip(keys), member(12), 4))
  assert (other[0, :11] != group[0, :11]).any()


def test_splits_outside_of_training_follow_the_seed_or_the_key():
  """An explicit key is the same on any machine; splits are averaged."""
  model, variables, apply = compiled('dtfd')
  batch = batch_bags(grid_bags(), n=16)
  want = apply(variables, batch).logits
  keys = jnp.broadcast_to(jax.random.key(model.seed), (4,))
  got = apply(variables, batch, dropout_keys=keys).logits
  np.testing.assert_array_equal(got, want)
  other = jnp.broadcast_to(jax.random.key(1), (4,))
  got = apply(variables, batch, dropout_keys=other).logits
  assert np.abs(got - want)[2].max() > 1e-4


def test_weights_of_a_bag_sum_to_one_even_where_all_are_zero():
  member = np.array([[[1, 0], [1, 0], [0, 1], [0, 1], [0, 0]]], bool)
  weights = jnp.array([[1.0, 3.0, 0.0, 0.0, 9.0]])
  got = normalise_in_bag(weights, member)
  np.testing.assert_allclose(got, [[0.25, 0.75, 0.5, 0.5, 0]])


def test_square_sides_are_exact():
  count = np.concatenate([np.arange(3000), np.arange(4090, 4100) ** 2 - 1])
  side = np.asarray(transmil.square_side(jnp.asarray(count, jnp.int32)))
  exact = np.ceil(np.sqrt(count.astype(np.float64))).astype(int)
  np.testing.assert_array_equal(side, exact)


def correlate(x, kernel):
  """[I, J, E] with [W, W, E], zeros outside, by loops."""
  reach = kernel.shape[0] // 2
  padded = np.pad(x, ((reach, reach), (reach, reach), (0, 0)))
  out = np.zeros_like(x)
  for u in range(kernel.shape[0]):
    for v in range(kernel.shape[1]):
      part = padded[u : u + x.shape[0], v : v + x.shape[1]]
      out += part * kernel[u, v]
  return out


def test_depthwise_convolutions():
  rng = np.random.default_rng(0)
  kernel = rng.normal(size=(5, 5, 2)).astype(np.float32)
  x = rng.normal(size=(16, 2)).astype(np.float32)
  want = correlate(x[:9].reshape(3, 3, 2), kernel).reshape(9, 2)
  got = jax.jit(depthwise_on_square)(x, jnp.int32(3), kernel)
  np.testing.assert_allclose(got[:9], want, **CLOSE)
  cells = rng.permutation(30)[:12]
  coords = np.stack(np.divmod(cells, 6), -1) + np.array([7, -3])
  slide = np.zeros((5, 6, 2), np.float32)
  slide[tuple((coords - [7, -3]).T)] = x[:12]
  want = correlate(slide, kernel)[tuple((coords - [7, -3]).T)]
  padded = np.concatenate([coords, np.full((4, 2), 99)]).astype(np.int32)
  got = jax.jit(depthwise_on_grid)(x, padded, jnp.int32(12), kernel)
  np.testing.assert_allclose(got[:12], want, **CLOSE)


def test_gradient_of_the_depthwise_convolution():
  """Against the gradient that is traced through shifted sums."""
  rng = np.random.default_rng(0)
  x, y = (rng.normal(size=(4, 3, 2)).astype(np.float32) for _ in range(2))
  kernel = rng.normal(size=(5, 1, 2)).astype(np.float32)

  def traced(x, kernel):
    padded = jnp.pad(x, ((2, 2), (0, 0), (0, 0)))
    return sum(padded[u : u + 4] * kernel[u][None] for u in range(5))

  loss = lambda convolve: lambda *args: jnp.sum(jnp.tanh(convolve(*args)) * y)
  grad = lambda f: jax.jit(jax.grad(loss(f), argnums=(0, 1)))(x, kernel)
  for got, want in zip(grad(depthwise), grad(traced), strict=True):
    np.testing.assert_allclose(got, want, **CLOSE)


def test_pseudo_inverse():
  a = softmax(np.random.default_rng(0).normal(size=(2, 5, 5)) * 2)
  with jax.enable_x64(True):
    got = nystrom.pseudo_inverse(jnp.asarray(a), iterations=25)
  np.testing.assert_allclose(got, np.linalg.pinv(a), rtol=1e-6, atol=1e-8)


def test_as_many_landmarks_as_tokens_give_exact_attention():
  rng = np.random.default_rng(1)
  n, e, h = 6, 4, 2
  x, qkv = rng.normal(size=(n, e)), rng.normal(size=(e, 3, h, 2))
  out, bias = rng.normal(size=(h, 2, e)), rng.normal(size=e)
  with jax.enable_x64(True):
    params = nystrom.NystromParams(
      *map(jnp.asarray, (qkv, out, bias, np.zeros((3, h))))
    )
    options: Any = {'m': n, 'iterations': 40}
    args = jnp.asarray(x)[None], jnp.full(1, n, jnp.int32), params
    (got,) = nystrom.nystrom_attention(*args, **options)
    (row,), (look,) = nystrom.nystrom_first_token(*args, **options)
  q, k, v = np.einsum('te,eihd->ihtd', x, qkv)
  a = softmax(np.einsum('htd,hsd->hts', q, k) / np.sqrt(2))
  want = np.einsum('hts,hsd,hde->te', a, v, out) + bias
  np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-8)
  np.testing.assert_allclose(row, want[0], rtol=1e-6, atol=1e-8)
  np.testing.assert_allclose(look, a[:, 0].mean(0), rtol=1e-6, atol=1e-8)


def test_grid_layout_equals_file_order_on_a_full_square():
  """And does not see where on the slide the square lies."""
  _, variables, apply = compiled('transmil')
  x = np.random.default_rng(2).normal(size=(16, 6)).astype(np.float32)
  ij = np.stack(np.divmod(np.arange(16, dtype=np.int32), 4), -1)
  bags = [Bag(x, np.ones(16, bool), None, ij + s) for s in (0, 100)]
  batch = batch_bags(bags, n=16)
  want = apply(variables, batch).logits
  got = jax.jit(small('transmil', layout='grid').apply)(variables, batch).logits
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_neighbours_are_the_nearest_of_the_same_bag():
  rng = np.random.default_rng(0)
  heads, tails = rng.normal(size=(2, 1, 10, 3)).astype(np.float32)
  slot = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]], np.int32)
  mask = np.arange(10)[None] < 8
  bag = Bag(tails, mask, segment_ids=slot, num_segments=2)
  for chunk in (3, 64):
    find = functools.partial(wikg.top_neighbours, k=4, chunk=chunk)
    index, valid = jax.jit(find)(heads, tails, bag)
    score = heads[0] @ tails[0].T
    for i in range(8):
      same = np.flatnonzero((slot[0] == slot[0, i]) & mask[0])
      want = same[np.argsort(-score[i, same])][:4]
      assert index[0, i][np.asarray(valid[0, i])].tolist() == want.tolist()
    assert not np.asarray(valid[0, 8:]).any()


def test_softmax_aggregation():
  ij = np.array([[0, 0], [0, 1], [1, 0], [5, 5]])
  graph = ell_from_grid(ij, connectivity=8)
  graph = jax.tree.map(lambda leaf: leaf[None], graph)
  m = np.random.default_rng(0).uniform(0, 3, (1, 4, 2)).astype(np.float32)
  # A message that leaves the others far below the largest of the slide.
  m[0, 3] = 500
  t = jnp.float32(0.1)
  got = jax.jit(softmax_aggregate)(graph, m, t)[0]
  for i in range(3):
    near = np.delete(m[0, :3], i, 0).astype(np.float64)
    want = (softmax(0.1 * near, 0) * near).sum(0)
    np.testing.assert_allclose(got[i], want, rtol=1e-5)
  np.testing.assert_array_equal(got[3], [0, 0])
  # Beyond the span neighbours weigh alike, and nothing is divided by zero.
  got = jax.jit(softmax_aggregate)(graph, m, jnp.float32(1))[0]
  np.testing.assert_allclose(got[0], m[0, 1:3].mean(0), rtol=1e-5)


def _numbers(name):
  """A compiled model, its parameters and one bag in float64."""
  model, variables, apply = compiled(name)
  bags = grid_bags()
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), variables['params'])
  text = np.asarray(model.text, np.float64)
  output = apply(variables, batch_bags(bags, n=16))
  return p, text, bags[2].features.astype(np.float64), output


def test_zero_shot_by_numpy():
  p, text, x, output = _numbers('zero_shot')
  cosine = unit(x) @ unit(text).T
  want = np.exp(p['log_scale']) * np.sort(cosine, 0)[-4:].mean(0)
  np.testing.assert_allclose(output.logits[2], want, **CLOSE)


def test_concep_path_by_numpy():
  p, text, x, output = _numbers('concep_path')
  text = unit(unit(text) + p['text_shift'])
  scale, x = np.exp(p['log_scale']), unit(x)
  slide, concepts = text[:, 0], text[:, 1:]
  flat = concepts.reshape(-1, x.shape[1])
  share = softmax(scale * x @ flat.T)
  found = unit(share.T @ x).reshape(concepts.shape)
  weight = np.einsum('kq,kmq->km', slide, concepts)
  weight /= weight.sum(1, keepdims=True)
  feature = unit(((1 + weight)[..., None] * found).mean(1))
  want = scale * (feature * slide).sum(1)
  np.testing.assert_allclose(output.logits[2], want, rtol=1e-4, atol=1e-5)
  cosines = [np.dot(*unit(c)) for c in concepts]
  loss = sum(1 + 0.5 * c for c in cosines)
  got = orthogonality(jnp.asarray(concepts, jnp.float32))
  np.testing.assert_allclose(got, loss, rtol=1e-5)
  np.testing.assert_allclose(output.aux['orthogonality'][2], loss, rtol=1e-5)


def test_vila_mil_by_numpy():
  p, text, x, output = _numbers('vila_mil')
  dense = lambda x, name: x @ p[name]['kernel'] + p[name]['bias']

  def attend(number, q, kv):
    q, k, v = (
      dense(a, f'{n}_{number}')
      for a, n in ((q, 'query'), (kv, 'key'), (kv, 'value'))
    )
    share = softmax(q @ k.T / np.sqrt(x.shape[1]))
    return dense(share @ v, f'out_{number}')

  proto = p['prototypes'] + attend(1, p['prototypes'], x)
  centred = proto - proto.mean(1, keepdims=True)
  proto = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-6)
  proto = proto * p['norm']['scale'] + p['norm']['bias']
  a = p['attention']
  units = np.tanh(proto @ a['v']['kernel'] + a['v']['bias'])
  units /= 1 + np.exp(-(proto @ a['u']['kernel'] + a['u']['bias']))
  image = softmax((units @ a['w']['kernel'])[:, 0]) @ proto
  text = unit(text) + p['text_shift']
  text = text + attend(2, text, np.concatenate([proto, x]))
  np.testing.assert_allclose(output.logits[2], text @ image, **CLOSE)


def test_vila_mil_of_two_scales_is_the_sum_of_both():
  text = np.random.default_rng(8).normal(size=(CLASSES, FEATURES))
  model = small('vila_mil', low_text=text, dropout=0.0)
  bags, low = grid_bags(), batch_bags(grid_bags((2, 3, 1, 0), seed=5), n=4)
  bag = batch_bags(bags, n=16)
  shapes = jax.eval_shape(model.init, jax.random.key(0), bag, low=low)
  rng = np.random.default_rng(2)
  params = jax.tree.map(
    lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), shapes
  )['params']
  apply = jax.jit(
    lambda bag, low: model.apply({'params': params}, bag, low=low)
  )
  output = apply(bag, low)
  _, _, one = compiled('vila_mil')
  fine = {k: v for k, v in params.items() if not k.endswith('_low')}
  want = one({'params': fine}, bag)
  coarse = {k[:-4]: v for k, v in params.items() if k.endswith('_low')}
  other = jax.jit(small('vila_mil', text=text).apply)({'params': coarse}, low)
  np.testing.assert_allclose(output.logits, want.logits + other.logits, **CLOSE)
  np.testing.assert_allclose(output.attention, want.attention, **CLOSE)
  np.testing.assert_allclose(
    output.extras['low_attention'], other.attention, **CLOSE
  )
  assert output.slide_features.shape == (4, 2 * FEATURES)
  # The junk of one scale's padding stays out of the other.
  again = apply(junk(bag), junk(low))
  np.testing.assert_allclose(again.logits, output.logits, **CLOSE)


def test_two_scales_need_two_texts():
  bag = batch_bags(grid_bags(), n=16)
  init = lambda model, **more: jax.eval_shape(
    model.init, jax.random.key(0), bag, **more
  )
  with pytest.raises(ValueError, match='low_text absent and low given'):
    init(small('vila_mil'), low=bag)
  text = np.ones((CLASSES, FEATURES))
  two = small('vila_mil', low_text=text)
  with pytest.raises(ValueError, match='low_text given and low absent'):
    init(two)
  with pytest.raises(ValueError, match='must hold the same bags'):
    init(two, low=batch_bags(grid_bags((2, 3)), n=16))
  with pytest.raises(ValueError, match=r'expected \(3, 6\)'):
    small('vila_mil', low_text=text[:, :5])


@pytest.mark.parametrize(
  'name',
  [
    'clam_mb',
    'dsmil',
    pytest.param('concep_path', marks=pytest.mark.slow),
    pytest.param('dtfd', marks=pytest.mark.slow),
  ],
)
def test_auxiliary_losses_train_through_the_one_method(name):
  weights = MODELS[name].aux_weights
  (key,) = weights
  batch = {
    'bag': batch_bags(grid_bags((5, 1, 9, 0)), n=16),
    'label': np.array([0, 2, 1, 1], np.int32),
    'weight': np.array([1, 1, 1, 0], np.float32),
    'id': np.arange(4, dtype=np.int32),
  }
  build = classification_method(
    small(name, dropout=0.0),
    optax.adam(0.01),
    num_classes=CLASSES,
    aux_weights=weights,
  )
  method = build(None)
  state = jax.jit(method.init)(jax.random.key(0), batch)
  update = jax.jit(method.update)
  losses = []
  for _ in range(25):
    state, metrics = update(state, batch)
    losses.append(float(metrics['loss']))
  total = metrics['cross_entropy'] + weights[key] * metrics[f'aux/{key}']
  np.testing.assert_allclose(metrics['loss'], total, rtol=1e-5)
  assert losses[-1] < losses[0] - 0.01


def test_text_is_checked():
  text = np.ones((2, 4))
  make = functools.partial(create_model, num_classes=2)
  with pytest.raises(ValueError, match="'zero_shot' needs text=..., the emb"):
    make('zero_shot')
  with pytest.raises(ValueError, match=r'shape \(2, 4\), expected \(2, any'):
    make('concep_path', text=text)
  text[1] = 0
  with pytest.raises(ValueError, match=r'text\[\(1,\)\] is zero or not finite'):
    make('vila_mil', text=text)
  model = make('zero_shot', text=np.ones((2, 5)))
  bag = grid_bags()[0]
  wrong = bag.replace(concepts=np.ones((5, 4), np.float32))
  with pytest.raises(ValueError, match='concepts have dim 4 but text has 5'):
    jax.eval_shape(model.init, jax.random.key(0), batch_bags([wrong]))


@pytest.mark.parametrize(
  ('name', 'options', 'words'),
  [
    ('clam_sb', {'instance_loss': 'hinge'}, 'cross_entropy, svm'),
    ('dsmil', {'values': 'none'}, "'identity', 'linear' or 'relu'"),
    ('dsmil', {'query_layers': 'deep'}, "'mlp' or 'linear'"),
    ('dtfd', {'distil': 'min'}, "'afs', 'max' or 'max_min'"),
    ('dtfd', {'groups': 0}, 'groups=0 must be an integer >= 1'),
    ('transmil', {'layout': 'file'}, "'order' or 'grid'"),
    ('transmil', {'heads': 3}, 'hidden=8 must be divisible by heads=3'),
    ('transmil', {'taps': 4}, 'taps must be odd'),
    ('wikg', {'pool': 'max'}, "'attention' or 'mean'"),
    ('wikg', {'neighbours': 0}, 'neighbours=0 must be an integer >= 1'),
  ],
)
def test_option_errors(name, options, words):
  make = lambda key, bags: small(name, **options).init(key, bags)
  with pytest.raises(ValueError, match=words):
    jax.eval_shape(make, jax.random.key(0), batch_bags(grid_bags()))


def test_models_of_a_graph_ask_for_it():
  bags = batch_bags([bag.replace(graph=None) for bag in grid_bags()])
  with pytest.raises(ValueError, match='PatchGCN needs a patch graph'):
    jax.eval_shape(small('patch_gcn').init, jax.random.key(0), bags)

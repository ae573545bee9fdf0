"""Batches are a pure function of the step, whoever reads them.

Axes: n examples, B batch.
"""

import threading
import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.train import toy
from tmlib import train
from tmlib.train.prefetching import prefetch

LENGTHS = np.random.default_rng(3).integers(1, 13, 24)
BUCKETS = (4, 8, 12)


class Sequences:
  """Item i: LENGTHS[i] rows of three numbers, and their mean as target."""

  def __init__(self, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    self.items = [rng.normal(size=(n, 3)).astype(np.float32) for n in lengths]
    self.threads = set()

  def __len__(self):
    return len(self.items)

  def __getitem__(self, i):
    self.threads.add(threading.current_thread().name.split('_')[0])
    x = self.items[i]
    return {'x': x, 'y': x.mean(), 'id': i}


def collate(items, bucket):
  b = len(items)
  batch = {
    # Padding may hold anything.
    'x': np.full((b, bucket, 3), np.nan, np.float32),
    'mask': np.zeros((b, bucket), bool),
    'y': np.zeros(b, np.float32),
    'weight': np.zeros(b, np.float32),
    'id': np.zeros(b, np.int32),
  }
  for row, item in enumerate(items):
    if item is not None:
      n = len(item['x'])
      batch['x'][row, :n], batch['mask'][row, :n] = item['x'], True
      batch['y'][row], batch['id'][row] = item['y'], item['id']
      batch['weight'][row] = 1
  return batch


def stream(buckets=BUCKETS, source=None, **options):
  source = source or Sequences()
  return train.source_data(
    source, collate, 4, lengths=LENGTHS, buckets=buckets, **options
  )


def mean_method():
  def predict(params, batch):
    x = jnp.where(batch['mask'][..., None], batch['x'], 0).sum(1)
    return (x / batch['mask'].sum(1, keepdims=True).clip(1)) @ params['w']

  def loss(params, batch, key, step):
    error = (predict(params, batch) - batch['y']) ** 2
    total = jnp.where(batch['weight'] > 0, error, 0).sum()
    return total, batch['weight'].sum(), {}

  def evaluate(params, batch):
    outputs = {'prediction': predict(params, batch), 'id': batch['id']}
    return {'sums': {}, 'outputs': outputs}

  init = lambda key, batch: {'w': jnp.zeros(batch['x'].shape[-1])}
  return train.gradient_method(init, loss, evaluate, optax.sgd(0.1))


def fit(data, passed=None, build=None):
  return train.fit(
    build or mean_method(), data, steps=18,
    evaluations={'all': passed or stream(one_pass=True)},
  )  # fmt: skip


@pytest.fixture(scope='module')
def one_bucket():
  return fit(stream((12,)), stream((12,), one_pass=True))


@pytest.mark.parametrize('workers', [0, 2])
def test_buckets_change_shapes_and_nothing_else(one_bucket, workers):
  counts, source = {}, Sequences()
  data = stream(source=source, workers=workers)
  passed = stream(one_pass=True, workers=workers)
  used = {passed.bucket(step) for step in range(passed.steps)}
  result = fit(data, passed, toy.counting(mean_method(), counts))
  assert counts == {'update': len(BUCKETS), 'evaluate': len(used)}
  assert {c['bucket'] for c in result.costs} == {'4', '8', '12'}
  toy.assert_close(result.state, one_bucket.state)
  found, want = (r.evaluations['all'][0].outputs for r in (result, one_bucket))
  toy.assert_close(found, want)
  np.testing.assert_array_equal(found['id'], np.arange(24))
  names = {'tmlib-read'} if workers else {'tmlib-prefetch', 'MainThread'}
  assert source.threads >= names if workers else source.threads == names


def test_a_batch_takes_the_least_bucket_that_holds_it():
  data = stream(shuffle=False)
  for step in range(6):
    longest = LENGTHS[4 * step : 4 * step + 4].max()
    want = next(b for b in BUCKETS if b >= longest)
    assert data.bucket(step) == want
    batch = data.load(step, slice(0, 4))
    assert batch['x'].shape == (4, want, 3)
    assert data.shapes[want]['x'].shape == (4, want, 3)


def test_the_last_batch_of_a_pass_is_padded():
  lengths = LENGTHS[:10]
  data = train.source_data(
    Sequences(lengths), collate, 4, lengths=lengths, buckets=(12,),
    one_pass=True,
  )  # fmt: skip
  assert data.steps == 3
  weights = [data.load(step, slice(0, 4))['weight'] for step in range(3)]
  np.testing.assert_array_equal(weights[2], [1, 1, 0, 0])


def test_steps_per_call_needs_one_bucket():
  options = train.Options(steps_per_call=2, log_every=2)
  with pytest.raises(ValueError, match='needs batches of one shape'):
    train.fit(mean_method(), stream(), steps=18, options=options)


@pytest.mark.parametrize('make', [toy.data, stream])
def test_every_epoch_holds_every_example_once(make):
  data = make()
  n, b = (toy.N, 8) if make is toy.data else (24, 4)
  ids = lambda step, rows: data.load(step, rows)['id']
  epochs = [
    np.concatenate([ids(e * n // b + s, slice(0, b)) for s in range(n // b)])
    for e in range(2)
  ]
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(n))
  assert (epochs[0] != epochs[1]).any()
  # Any part of any batch, in any order.
  np.testing.assert_array_equal(ids(2, slice(1, 3)), epochs[0][2 * b + 1 :][:2])


def test_a_batch_may_cross_the_end_of_an_epoch():
  data = train.array_data(toy.arrays(10), 4, shuffle=False)
  ids = np.concatenate([data.load(s, slice(0, 4))['id'] for s in range(5)])
  np.testing.assert_array_equal(ids, np.tile(np.arange(10), 2))


@pytest.mark.parametrize(
  ('call', 'message'),
  [
    (lambda: train.array_data(toy.arrays(), 0), 'batch_size must be at least'),
    (
      lambda: train.array_data({'x': np.ones(3), 'y': np.ones(4)}, 2),
      r"\['x'\]\W+3, .*\['y'\]\W+4",
    ),
    (lambda: train.array_data({'x': np.ones((0, 2))}, 2), 'hold no example'),
    (lambda: train.source_data([], collate, 4), 'the source holds no example'),
    (
      lambda: stream((4, 8)),
      r'item \d+ has length \d+, over the last bucket 8',
    ),
    (lambda: stream((8, 4, 12)), 'buckets increasing'),
    (lambda: stream(workers=-1), 'workers must be at least 0, got -1'),
    (lambda: train.source_data([1], collate, 4, lengths=[1]), 'give both'),
  ],
)
def test_bad_data(call, message):
  with pytest.raises(ValueError, match=message):
    call()


def test_changed_data_are_seen_on_resume(tmp_path):
  def run(arrays, **options):
    data = train.array_data(arrays, 8)
    return train.fit(
      toy.build(), data, steps=1, workdir=tmp_path, writers=[],
      options=train.Options(**options),
    )  # fmt: skip

  run(toy.arrays())
  run(toy.arrays())
  changed = toy.arrays()
  changed['x'][7, 2] = np.nextafter(changed['x'][7, 2], np.float32(9))
  with pytest.raises(ValueError, match=r'data\.contents\.\[.x.\]: \d+ -> \d+'):
    run(changed)
  assert run(changed, allow_config_change=True).step == 1
  changed = toy.arrays()
  changed['label'][3] ^= 1
  with pytest.raises(ValueError, match=r'data\.contents\.\[.label.\]'):
    run(changed)
  with pytest.raises(ValueError, match=r'data\.n: 48 -> 47'):
    run(toy.arrays(47))


def test_a_checksum_is_of_values_not_of_their_layout():
  x = np.arange(12, dtype=np.float32).reshape(6, 2)
  contents = lambda x: train.array_data({'x': x}, 2).fingerprint['contents']
  assert contents(x) == contents(np.asfortranarray(x))
  assert contents(x) == contents(x.astype('>f4'))
  assert contents(x) == contents(jnp.asarray(x))
  assert contents(x) != contents(x[::-1])


@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    ({'x': [[1.0], [2.0]]}, r"arrays\['x'\]\[0\]\[0\] is a float; .*asarray"),
    ({'x': np.ones(3), 'y': 1.0}, r"arrays\['y'\] is a float"),
    ({'x': np.ones(3), 'y': np.ones(())}, r"arrays\['y'\] is a ndarray"),
    ({'x': np.array(['a', 'b'])}, r"arrays\['x'\] has dtype <U1; give numbers"),
  ],
)
def test_what_is_no_array_is_named(arrays, message):
  for make in (
    lambda: train.array_data(arrays, 2), lambda: train.pass_data(arrays, 2),
    lambda: train.run_data(arrays, np.ones((2, 3)), 2),
  ):  # fmt: skip
    with pytest.raises(TypeError, match=message):
      make()


def test_a_batch_larger_than_the_data_is_said():
  with pytest.warns(UserWarning, match='batch_size=8 is more than the 5 exam'):
    data = toy.data(8, n=5)
  ids = data.load(0, slice(0, 8))['id']
  np.testing.assert_array_equal(np.bincount(ids, minlength=5) > 0, True)
  with pytest.warns(UserWarning, match='batch_size=4 is more than the 2'):
    train.source_data([1, 2], lambda items, bucket: {'x': np.array(items)}, 4)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    toy.data(5, n=5)
    toy.held_out(batch_size=32)


def test_packed_rows_weigh_their_parts():
  """[B, S]: a row holds S examples, some of them absent."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(12, 3, 2)).astype(np.float32)
  weight = (rng.random((12, 3)) < 0.7).astype(np.float32)
  weight[5] = 0
  y = np.where(weight > 0, x.sum(-1), np.nan).astype(np.float32)

  def loss(params, batch, key, step):
    error = (batch['x'] @ params['w'] - batch['y']) ** 2
    real = batch['weight'] > 0
    total = jnp.where(real, error, 0).sum()
    return total, batch['weight'].sum(), {}

  def evaluate(params, batch):
    prediction = batch['x'] @ params['w']
    total = (prediction * batch['weight']).sum(), batch['weight'].sum()
    outputs = {'prediction': prediction, 'id': batch['id']}
    return {'sums': {'mean': total}, 'outputs': outputs}

  build = train.gradient_method(
    lambda key, batch: {'w': jnp.zeros(2)}, loss, evaluate, optax.sgd(0.1),
    microbatches=1,
  )  # fmt: skip
  arrays = {'x': x, 'y': np.nan_to_num(y), 'weight': weight}
  results = {
    parallel: train.fit(
      build, train.array_data(arrays, 12), steps=200,
      evaluations={'all': train.pass_data(arrays, 8)},
      options=train.Options(parallel=parallel, log_every=100),
    )
    for parallel in ('jit', 'pmap')
  }  # fmt: skip
  toy.assert_close(results['jit'].state, results['pmap'].state)
  np.testing.assert_allclose(
    results['jit'].state.params['w'], [1, 1], atol=1e-3
  )
  found = results['jit'].evaluations['all'][0]
  real = weight > 0
  np.testing.assert_array_equal(found.outputs['id'], np.flatnonzero(real))
  np.testing.assert_allclose(
    found.outputs['prediction'], x.sum(-1)[real], atol=1e-2
  )
  np.testing.assert_allclose(
    found.sums['mean'], found.outputs['prediction'].mean(), rtol=1e-5
  )


class TestPrefetch:
  def test_order_and_errors(self):
    def load(i):
      if i == 3:
        raise KeyError('three')
      return i * i

    found = []
    with pytest.raises(KeyError, match='three'):
      found.extend(prefetch(load, iter(range(9))))
    assert prefetch_threads() == 0
    assert list(prefetch(load, iter([5, 4]))) == [25, 16]

  def test_few_are_held_ready(self):
    seen = []
    stream = prefetch(seen.append, iter(range(100)))
    next(stream)
    deadline = threading.Event()
    deadline.wait(0.3)
    assert len(seen) <= 4  # one taken, two ready, one at the door
    stream.close()
    assert prefetch_threads() == 0


def prefetch_threads():
  names = [t.name for t in threading.enumerate()]
  return sum(name == 'tmlib-prefetch' for name in names)


def test_a_grain_dataset_is_a_source():
  """Without parsed absl flags, as in a notebook."""
  import grain

  source = grain.MapDataset.source(Sequences()).map(lambda item: item)
  ours, theirs = stream(shuffle=False), stream(source=source, shuffle=False)
  toy.assert_same(ours.load(3, slice(0, 4)), theirs.load(3, slice(0, 4)))


def test_packed_rows_of_runs():
  """[R, n, S]: a run may hold out one part of a row and draw the other."""
  arrays = {'x': np.zeros((4, 2, 3)), 'weight': np.ones((4, 2), np.float32)}
  weights = np.ones((2, 4, 2))
  weights[0, 1] = 0  # a whole row of the first run
  weights[1, 2, 1] = 0  # half a row of the second
  drawn = train.run_data(arrays, weights, 8)
  batch = drawn.load(0, slice(0, drawn.batch_size))
  assert batch['weight'].shape == (2, 8, 2)
  real = batch['weight'].any(-1)
  assert sorted(batch['index'][0][real[0]]) == [0, 2, 3]
  assert sorted(batch['index'][1][real[1]]) == [0, 1, 2, 3]
  row = np.flatnonzero(real[1] & (batch['index'][1] == 2))[0]
  np.testing.assert_array_equal(batch['weight'][1, row], [1, 0])

  tested = train.pass_data(arrays, 4, run_weights=1 - weights)
  batch = tested.load(0, slice(0, 4))
  np.testing.assert_array_equal(batch['weight'], 1 - weights)
  found = tested.gather(
    {k: jnp.asarray(v) for k, v in tested.resident.items()},
    {k: v[1] for k, v in batch.items()},
  )
  np.testing.assert_array_equal(found['weight'], 1 - weights[1])
  np.testing.assert_array_equal(found['id'], np.arange(8).reshape(4, 2))

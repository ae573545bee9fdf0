"""What is saved comes back as it was, or the difference is named."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from absl import logging
from ml_collections import ConfigDict

from tests.train import toy
from tmlib import train
from tmlib.train import checkpoint


class Pair(NamedTuple):
  first: jax.Array
  second: jax.Array | None


def odd_state():
  return {
    'by_number': {1: jnp.arange(3), 10: jnp.ones((2, 2), jnp.bfloat16)},
    'pair': Pair(jnp.float32(2.5), None),
    'nested': (Pair(jnp.arange(2), jnp.array([True, False])), [jnp.int8(4)]),
    'key': jax.random.key(3),
    'keys': jax.random.split(jax.random.key(4, impl='rbg'), 2),
    'nothing': None,
    'empty': {},
  }


def shapes_of(state):
  sharding = jax.sharding.NamedSharding(
    train.make_mesh(), jax.sharding.PartitionSpec()
  )
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state
  )


@pytest.fixture
def store(tmp_path):
  found = train.Checkpoints(tmp_path / 'checkpoints', keep=2)
  yield found
  found.close()


def save(store, state, step):
  store.save(state, checkpoint.Meta(step, 0, {}, {}))


def test_any_tree_comes_back_as_it_was(store):
  state = odd_state()
  save(store, state, 1)
  store.wait()
  again = store.restore(1, shapes_of(state))
  assert jax.tree.structure(again) == jax.tree.structure(state)
  assert isinstance(again['pair'], Pair)
  assert list(again['by_number']) == [1, 10]
  assert jax.random.key_impl(again['keys']) == jax.random.key_impl(
    state['keys']
  )
  for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
    assert a.dtype == b.dtype
  toy.assert_same(again, state)


def test_background_saves_are_not_touched_by_later_steps(store):
  step = jax.jit(lambda x: x + 1, donate_argnums=0)
  state = {'x': jnp.zeros(100_000)}
  for i in range(1, 7):
    state = {'x': step(state['x'])}
    save(store, state, i)
    for _ in range(3):
      state = {'x': step(state['x'])}
  store.wait()
  assert [p.name for p in sorted(store.folder.iterdir())] == ['5', '6']
  again = store.restore(6, shapes_of(state))
  np.testing.assert_array_equal(again['x'], 21)


def test_another_model_is_named_leaf_by_leaf(store):
  state = odd_state()
  save(store, state, 1)
  store.wait()
  other = odd_state() | {'pair': Pair(jnp.ones(4), jnp.ones(2))}
  with pytest.raises(ValueError, match='does not fit this model') as error:
    store.restore(1, shapes_of(other))
  text = str(error.value)
  assert 'pair/first: stored (), needed (4,)' in text
  assert 'pair/second: stored (absent), needed (2,)' in text
  assert 'by_number' not in text


def test_paths_must_differ(store):
  with pytest.raises(ValueError, match='same path'):
    save(store, {'a': {'b': jnp.ones(1)}, 'a/b': jnp.ones(1)}, 1)


def test_load_params_reads_the_average_quietly(tmp_path, caplog):
  logging.use_absl_handler()
  caplog.clear()
  options = train.Options(save_every=2)
  result = train.fit(
    toy.build(ema_decay=0.9), toy.data(), steps=4, workdir=tmp_path,
    options=options,
  )  # fmt: skip
  caplog.clear()
  toy.assert_same(train.load_params(tmp_path), result.state.ema_params)
  earlier = train.load_params(tmp_path, step=2)
  assert (earlier['out']['w'] != result.state.ema_params['out']['w']).any()
  assert not [r for r in caplog.records if r.levelname == 'WARNING']
  with pytest.raises(FileNotFoundError, match='no complete checkpoint'):
    train.load_params(tmp_path / 'elsewhere')
  with pytest.raises(FileNotFoundError):
    train.load_params(tmp_path, step=3)


def test_differences_are_readable():
  old = {'model': {'hidden': 64, 'dims': (1, (2, 3))}, 'seed': 0}
  as_json = {'model': {'hidden': 64, 'dims': [1, [2, 3]]}, 'seed': 0}
  assert checkpoint.differences(as_json, old) == []
  new = {'model': {'hidden': 128, 'dims': (1, (2, 3))}, 'name': 'x'}
  assert checkpoint.differences(as_json, new) == [
    'model.hidden: 64 -> 128',
    'name: (absent) -> x',
    'seed: 0 -> (absent)',
  ]


def config(**changes):
  found = train.default_config()
  found.model = ConfigDict({'hidden': 8, 'dims': (1, 2)})
  found.train.update(steps=2, batch_size=8)
  found.update_from_flattened_dict(changes)
  return found


def run(config, workdir, **options):
  def make(config):
    optimizer, schedule = train.make_optimizer(
      config.optimizer, config.train.steps
    )
    return train.Experiment(
      build=toy.build(
        optimizer, schedule=schedule, microbatches=config.train.microbatches
      ),
      data=toy.data(config.train.batch_size, seed=config.seed),
      evaluations={'held_out': toy.held_out()},
      predict=toy.held_out(n=5),
      names=[f'slide_{i}' for i in range(21)],
      report=lambda path: (path / 'report' / 'table.txt').touch(),
    )

  return train.run(make, config, workdir=workdir, **options)


def test_a_changed_experiment_is_refused_and_free_fields_are_free(tmp_path):
  assert run(config(), tmp_path) == 0
  free = {
    'train.steps': 3, 'train.parallel': 'pmap', 'train.mesh': (1, 2, 2),
    'train.microbatches': 2, 'train.log_every': 1, 'train.save_every': 1,
    'train.eval_every': 1, 'train.keep': 1, 'train.profile': (0, 1),
  }  # fmt: skip
  assert run(config(**free), tmp_path) == 0
  changed = {
    'model.hidden': 16, 'seed': 1, 'train.batch_size': 16,
    'optimizer.learning_rate': 0.5, 'train.steps': 4,
  }  # fmt: skip
  with pytest.raises(ValueError, match='made with another conf') as error:
    run(config(**changed), tmp_path)
  lines = str(error.value).splitlines()[1:-1]
  assert [line.strip() for line in lines] == [
    'model.hidden: 8 -> 16',
    'optimizer.learning_rate: 0.001 -> 0.5',
    'seed: 0 -> 1',
    'train.batch_size: 8 -> 16',
    'data.batch_size: 8 -> 16',
    'data.seed: 0 -> 1',
  ]
  assert run(config(**changed), tmp_path, allow_config_change=True) == 0
  assert sorted(p.name for p in (tmp_path / 'checkpoints').iterdir())[-1] == '4'


def test_every_mode_leaves_what_it_says(tmp_path):
  import csv
  import json

  assert run(config(), tmp_path) == 0
  names = {p.name for p in tmp_path.iterdir()}
  assert names == {
    'config.json', 'metrics.jsonl', 'tensorboard', 'checkpoints', 'report',
    'predictions.csv', 'result.json',
  }  # fmt: skip
  result = json.loads((tmp_path / 'result.json').read_text())
  assert (result['status'], result['step']) == ('finished', 2)
  with (tmp_path / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [row['name'] for row in rows] == [f'slide_{i}' for i in range(21)]
  assert run(config(), tmp_path, mode='eval') == 0
  evaluated = json.loads((tmp_path / 'eval.json').read_text())
  assert evaluated['metrics'] == result['metrics']
  assert run(config(), tmp_path, mode='predict') == 0
  with (tmp_path / 'predict.csv').open() as file:
    predicted = list(csv.DictReader(file))
  assert [r['prediction'] for r in predicted] == [
    r['prediction'] for r in rows[:5]
  ]
  (tmp_path / 'report' / 'table.txt').unlink()
  assert run(config(), tmp_path, mode='report') == 0
  assert (tmp_path / 'report' / 'table.txt').exists()


def test_the_logged_rate_is_the_schedule_after_a_resume(tmp_path):
  optimizer, schedule = train.make_optimizer(
    train.default_config().optimizer, 20
  )
  rows = []
  for steps in (7, 20):
    rows.append(toy.Rows())
    train.fit(
      toy.build(optimizer, schedule=schedule), toy.data(), steps=steps,
      workdir=tmp_path, options=train.Options(log_every=1), writers=rows[-1:],
    )  # fmt: skip
  found = np.concatenate([r.column('learning_rate') for r in rows])
  np.testing.assert_allclose(found, [schedule(i) for i in range(20)], rtol=1e-5)
  # One step of warm-up in twenty, then a cosine that ends at zero.
  peak = 1e-3
  np.testing.assert_allclose(found[0], peak / 2, rtol=1e-5)
  t = np.arange(19) / 19
  np.testing.assert_allclose(
    found[1:], peak * (1 + np.cos(np.pi * t)) / 2, rtol=1e-5
  )

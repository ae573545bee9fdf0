"""A small regression with noise per example, shared by the loop's tests.

Axes: B examples, D features, H hidden units.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmlib import train

D, H, N = 5, 8, 48


def arrays(n=N, seed=0):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, D)).astype(np.float32)
  # int64 on purpose: what users bring.
  label = (x.sum(1) > 0).astype(np.int64)
  y = (np.sin(x).sum(1) / 4 + 0.1 * rng.normal(size=n)).astype(np.float32)
  return {'x': x, 'y': y, 'label': label}


def data(batch_size=8, n=N, **options):
  return train.array_data(arrays(n), batch_size, **options)


def held_out(batch_size=8, n=21):
  return train.pass_data(arrays(n, seed=1), batch_size)


def init_params(key, batch):
  a, b = jax.random.split(key)
  d = batch['x'].shape[-1]
  return {
    'hidden': {'w': jax.random.uniform(a, (d, H)) - 0.5, 'b': jnp.zeros(H)},
    'out': {'w': jax.random.uniform(b, (H,)) - 0.5, 'b': jnp.zeros(())},
  }


def predict(params, x, gain=1.0):
  h = jnp.tanh(x @ params['hidden']['w'] + params['hidden']['b'][None])
  return (h * gain) @ params['out']['w'] + params['out']['b']


def loss_fn(params, batch, key, step):
  del step
  keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch['id'])
  noise = jax.vmap(lambda k: jax.random.uniform(k, (H,)))(keys)
  error = predict(params, batch['x'], 0.6 + 0.8 * noise) - batch['y']
  weight = batch['weight']
  total = lambda v: jnp.sum(jnp.where(weight > 0, v, 0) * weight)
  return (
    total(error**2),
    weight.sum(),
    {'abs': (total(abs(error)), weight.sum())},
  )


def evaluate(params, batch):
  prediction = predict(params, batch['x'])
  weight = batch['weight']
  error = jnp.where(weight > 0, (prediction - batch['y']) ** 2, 0)
  return {
    'sums': {'mse': (jnp.sum(error * weight), weight.sum())},
    'outputs': {'prediction': prediction, 'id': batch['id']},
  }


def build(optimizer=None, loss=loss_fn, **options):
  return train.gradient_method(
    init_params, loss, evaluate, optimizer or optax.adam(3e-3), **options
  )


def counting(build, counts):
  """The method, counting how often its functions are traced."""

  def counted(axis_name):
    method = build(axis_name)

    def wrap(name):
      function = getattr(method, name)

      def call(state, batch):
        counts[name] = counts.get(name, 0) + 1
        return function(state, batch)

      return call

    return method._replace(update=wrap('update'), evaluate=wrap('evaluate'))

  return counted


def scalar_method(update):
  """A method whose state is a step and a number x, from 1."""

  def build(axis_name):
    del axis_name
    init = lambda key, batch: {
      'step': jnp.zeros((), jnp.int32),
      'x': jnp.ones(()),
    }
    evaluate = lambda state, batch: {'sums': {}, 'outputs': {}}
    return train.Method(init, update, evaluate)

  return build


class Rows:
  """A writer that keeps what it is given."""

  def __init__(self):
    self.rows = {}
    self.closed = False

  def write(self, step, metrics):
    assert step not in self.rows
    self.rows[step] = dict(metrics)

  def close(self):
    self.closed = True

  def column(self, name):
    return np.array([row[name] for row in self.rows.values() if name in row])


def flat(tree):
  """{path: NumPy array}, keys as their words."""
  words = lambda x: (
    jax.random.key_data(x)
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    else x
  )
  return {
    jax.tree_util.keystr(path): np.asarray(words(x))
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def pick(tree, run):
  """One run of a tree with a leading run axis."""
  return jax.tree.map(lambda x: x[run], tree)


def assert_same(a, b):
  """Bitwise."""
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def assert_close(a, b, atol=1e-6):
  a, b = flat(a), flat(b)
  assert a.keys() == b.keys()
  for name in a:
    np.testing.assert_allclose(
      a[name], b[name], rtol=0, atol=atol, err_msg=name
    )


def bandit(axis_name=None, runs=3, steps_seen=None):
  """Explore-then-commit of tests' own: no gradient, no data."""
  del axis_name
  preference = jnp.array([[0.5, 0.8, 0.7], [0.2, 0.5, 0.6], [0.3, 0.4, 0.5]])
  scores = (preference.sum(1) - 0.5) / 2

  def duel(key):
    pair_key, outcome_key = jax.random.split(key)
    i, j = jax.random.choice(pair_key, 3, (2,), replace=False)
    outcome = jax.random.bernoulli(outcome_key, preference[i, j]) - 0.5
    return jnp.zeros(3).at[i].set(outcome).at[j].set(-outcome)

  def init(key, batch=None):
    del batch
    zero = jnp.zeros((), jnp.int32)
    return {'key': key, 'step': zero, 'wins': jnp.zeros((runs, 3))}

  def update(state, batch=None):
    del batch
    if steps_seen is not None:
      steps_seen.append(1)
    key = jax.random.fold_in(state['key'], state['step'])
    keys = jax.vmap(lambda m: jax.random.fold_in(key, m))(jnp.arange(runs))
    wins = state['wins'] + jax.vmap(duel)(keys)
    regret = scores.max() - scores[wins.argmax(1)]
    metrics = {'regret': (regret.sum(), runs)}
    return {**state, 'step': state['step'] + 1, 'wins': wins}, metrics

  def evaluate_state(state, batch):
    del state, batch
    return {'sums': {}, 'outputs': {}}

  return train.Method(init, update, evaluate_state)

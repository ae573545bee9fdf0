"""Data, networks and deletion requests of the unlearning experiments.

Axes: n training examples, D features, C classes, R deletion requests.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from tmlib import train
from tmlib import unlearning as ul

__all__ = [
  'BANDS',
  'Network',
  'Requests',
  'Table',
  'load_table',
  'make_network',
  'make_requests',
  'train_full',
]

# Limits of the largest self-leverage of a forget set.
BANDS = ((0.0, 0.1), (0.1, 1.0), (1.0, np.inf))
KINDS = ('random', 'class', 'mislabelled', 'outlier', 'cluster')


class Table(NamedTuple):
  """A data set; the last feature is the constant one.

  Attributes:
    x: [n, D] float32, standardised (and reduced by PCA where D is large).
    y: [n] int32, with a few labels flipped on purpose.
    flipped: [n] bool, which.
    test_x: held-out examples.
    test_y: their labels.
  """

  x: np.ndarray
  y: np.ndarray
  flipped: np.ndarray
  test_x: np.ndarray
  test_y: np.ndarray

  @property
  def classes(self) -> int:
    """C."""
    return int(max(self.y.max(), self.test_y.max())) + 1


def load_table(
  name: str, n: int, features: int, flip: float, seed: int
) -> Table:
  """One of scikit-learn's bundled sets: digits, wine or breast_cancer."""
  from sklearn import datasets

  loaders = {
    'digits': datasets.load_digits,
    'wine': datasets.load_wine,
    'breast_cancer': datasets.load_breast_cancer,
  }
  if name not in loaders:
    raise ValueError(f'data set {name!r}; allowed: {", ".join(loaders)}')
  x, y = loaders[name](return_X_y=True)
  rng = np.random.default_rng(seed)
  order = rng.permutation(len(x))
  n = min(n, int(0.8 * len(x)))
  kept, held = order[:n], order[n : n + 300]
  mean, std = x[kept].mean(0), x[kept].std(0)
  x = (x - mean) / np.where(std > 0, std, 1)
  if x.shape[1] > features:
    _, _, vt = np.linalg.svd(x[kept], full_matrices=False)
    x = x @ vt[:features].T
  x = np.concatenate([x / x[kept].std(), np.ones((len(x), 1))], 1)
  x, y = x.astype(np.float32), y.astype(np.int32)
  labels = y[kept].copy()
  flipped = np.zeros(n, bool)
  flipped[rng.choice(n, int(flip * n), replace=False)] = True
  shift = rng.integers(1, y.max() + 1, flipped.sum())
  labels[flipped] = (labels[flipped] + shift) % (y.max() + 1)
  return Table(x[kept], labels, flipped, x[held], y[held])


class Network(NamedTuple):
  """A model as free functions.

  Attributes:
    apply: (params, x [B, D]) -> [B, C].
    init: key -> params.
    prior: params that the ridge pulls to, or None for zeros.
    ridge: of the objective in sums.
    scale: of the outputs in the parameters; steps are divided by it.
  """

  apply: Callable[..., jax.Array]
  init: Callable[[jax.Array], Any]
  prior: Any
  ridge: float
  scale: float


def make_network(
  name: str, shape: tuple[int, int], hidden: int, ridge: float, alpha: float
) -> Network:
  """'softmax' (linear logits), 'mlp' (tanh), 'cnn' (square images), or 'lazy'.

  The CNN has one layer of `hidden` 3 x 3 filters with stride 2.
  Lazy: alpha (f(th) - f(th_0)), with the ridge around th_0 scaled by alpha^2,
  so that the problem in function space stays the same while the network moves
  less and less.
  """
  features, classes = shape
  linear_init = lambda key: {
    'w': 0.1 * jax.random.normal(key, (features, classes))
  }
  if name == 'softmax':
    return Network(lambda p, x: x @ p['w'], linear_init, None, ridge, 1.0)

  if name == 'cnn':
    return _cnn(features, classes, hidden, ridge)

  def init(key):
    one, two = jax.random.split(key)
    return {
      'u': jax.random.normal(one, (features, hidden)) / features**0.5,
      'v': jax.random.normal(two, (hidden, classes)) / hidden**0.5,
    }

  mlp = lambda p, x: jnp.tanh(x @ p['u']) @ p['v']
  if name == 'mlp':
    return Network(mlp, init, None, ridge, 1.0)
  if name != 'lazy':
    raise ValueError(
      f"network {name!r}; allowed: 'softmax', 'mlp', 'cnn', 'lazy'"
    )
  centre = jax.tree.map(np.asarray, init(jax.random.key(7)))
  lazy = lambda p, x: alpha * (mlp(p, x) - mlp(centre, x))
  return Network(lazy, lambda key: centre, centre, ridge * alpha**2, alpha)


def _cnn(features, classes, hidden, ridge) -> Network:
  side = int((features - 1) ** 0.5)
  if side * side != features - 1:
    raise ValueError(
      f"network 'cnn' needs square images, got {features - 1} features: use "
      'data.sets=("digits",) and data.features=64.'
    )
  half = -(-side // 2)

  def init(key):
    one, two = jax.random.split(key)
    draw = jax.random.normal
    return {
      'k': draw(one, (3, 3, 1, hidden)) / 3,
      'c': jnp.zeros(hidden),
      'v': draw(two, (half * half * hidden, classes)) / (half * hidden**0.5),
    }

  def apply(p, x):
    image = x[:, :-1].reshape(-1, side, side, 1)
    maps = jax.lax.conv_general_dilated(
      image, p['k'], (2, 2), 'SAME', dimension_numbers=('NHWC', 'HWIO', 'NHWC')
    )
    maps = jnp.tanh(maps + p['c'][None, None, None])
    return maps.reshape(len(x), -1) @ p['v']

  return Network(apply, init, None, ridge, 1.0)


def fit_method(network: Network, start: Any, steps: int, n: int, lr: float):
  """Plain training of the objective: 'finetune' from `start`."""
  schedule = optax.cosine_decay_schedule(lr / network.scale, steps)
  return ul.unlearner(
    'finetune',
    network.apply,
    'softmax',
    start,
    optax.adam(schedule),
    decay=network.ridge / n,
    prior=network.prior,
  )


def train_full(
  network: Network, table: Table, steps: int, batch: int, lr: float, seed: int
) -> Any:
  """The model that shall forget, trained on everything; params."""
  n = len(table.x)
  arrays = {'x': table.x, 'y': table.y, 'forget': np.zeros(n, np.float32)}
  data = train.run_data(arrays, np.ones((1, n)), batch, seed=seed)
  start = network.init(jax.random.key(seed))
  build = fit_method(network, start, steps, n, lr)
  options = train.Options(log_every=steps)
  result = train.fit(
    build, data, steps=steps, runs=1, writers=(), options=options
  )
  return jax.tree.map(lambda x: np.asarray(x)[0], result.state.params)


class Requests(NamedTuple):
  """Deletion requests of one data set and network.

  Attributes:
    roles: [R, n] int, see `tmlib.unlearning.data`.
    kind: [R] str, how the forget set was chosen.
    lmax: [R], largest self-leverage, from the full model.
  """

  roles: np.ndarray
  kind: np.ndarray
  lmax: np.ndarray


@functools.partial(jax.jit, static_argnames=('apply',))
def _design(apply, params, x, y):
  from tmlib.unlearning import ggn, inputs, losses

  data = inputs.as_data({'x': x, 'y': y}, inputs.outputs_of(apply, params, x))
  return ggn.design(apply, losses.SOFTMAX, params, data)


def design_of(network: Network, params: Any, table: Table):
  """Rows [n, C, P] and whitened residuals [n, C] of all examples, NumPy."""
  rows, residual = _design(network.apply, params, table.x, table.y)
  n = len(table.x)
  return (
    np.asarray(rows).reshape(n, -1, rows.shape[1]),
    np.asarray(residual).reshape(n, -1),
  )


def _candidates(table, leverage, rng, count):
  """Forget sets of every kind and many sizes: (kind, indices)."""
  n = len(table.x)
  sizes = [s for s in (1, 2, 4, 8, 16, 32, 48) if s <= n // 4]
  for i in range(count):
    kind, size = KINDS[i % len(KINDS)], int(rng.choice(sizes))
    if kind == 'class':
      members = np.flatnonzero(table.y == rng.choice(np.unique(table.y)))
    elif kind == 'mislabelled':
      members = np.flatnonzero(table.flipped)
    elif kind == 'outlier':
      members = np.argsort(-leverage)[: max(2 * size, 8)]
    elif kind == 'cluster':
      far = np.sum((table.x - table.x[rng.integers(n)]) ** 2, 1)
      members = np.argsort(far)[:size]
    else:
      members = np.arange(n)
    size = min(size, len(members))
    yield kind, rng.choice(members, size, replace=False)


def _largest(matrix: np.ndarray, steps: int = 60) -> float:
  """Largest eigenvalue of a positive semidefinite matrix, by powers."""
  v = np.random.default_rng(0).normal(size=len(matrix))
  for _ in range(steps):
    v = matrix @ (v / np.linalg.norm(v))
  return float(np.linalg.norm(v))


def make_requests(
  network: Network, params: Any, table: Table, per_band: int, seed: int
) -> Requests:
  """Forget sets spread evenly over `BANDS` of the largest self-leverage.

  Bands that the data cannot fill stay short; the report counts them.
  """
  rows, _ = design_of(network, params, table)
  n, C, P = rows.shape
  flat = rows.reshape(n * C, P).astype(np.float64)
  A = flat.T @ flat + network.ridge * np.eye(P)
  hat = (flat @ np.linalg.solve(A, flat.T)).reshape(n, C, n, C)
  own = np.array([np.trace(hat[i, :, i]) for i in range(n)])
  rng = np.random.default_rng(seed)
  chosen: list[list] = [[] for _ in BANDS]
  for kind, index in _candidates(table, own, rng, 60 * per_band):
    block = hat[index][:, :, index].reshape(len(index) * C, -1)
    top = _largest(block)
    lmax = top / (1 - top)
    band = next(i for i, (a, b) in enumerate(BANDS) if a <= lmax < b)
    if len(chosen[band]) < per_band:
      chosen[band].append((kind, index, lmax))
    if all(len(c) == per_band for c in chosen):
      break
  found = [c for band in chosen for c in band]
  return Requests(
    ul.assign_roles(n, [index for _, index, _ in found]),
    np.array([kind for kind, _, _ in found]),
    np.array([lmax for _, _, lmax in found]),
  )


def count_parameters(params: Any) -> int:
  """P."""
  return len(ravel_pytree(params)[0])

"""Small bags on a grid, and every model once, compiled once for all tests."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.mil import Bag, batch_bags, create_model, model_options
from tmlib.ops.graph import ell_from_grid

LENGTHS = (5, 1, 9, 3)
FEATURES = 6
CLASSES = 3
# What a model needs beyond its size to be small here.
_TEXT = np.random.default_rng(7).normal(size=(CLASSES, 3, FEATURES))
OPTIONS = {
  'clam_sb': {'attention': 4, 'instances': 3},
  'clam_mb': {'attention': 4, 'instances': 3, 'subtyping': True},
  'concep_path': {'text': _TEXT},
  'dsmil': {'query': 4},
  'dtfd': {'attention': 4, 'groups': 2},
  'patch_gcn': {'layers': 2},
  'transmil': {'heads': 2, 'landmarks': 3, 'taps': 5},
  'vila_mil': {'text': _TEXT[:, 0], 'prototypes': 3, 'attention': 4},
  'wikg': {'neighbours': 3, 'chunk': 5},
  'zero_shot': {'text': _TEXT[:, 0], 'k': 4},
  'tmevolve': {'regions': 2, 'num_concepts': 2, 'steps': 2, 'remat': False},
}


def grid_bags(lengths=LENGTHS, seed=0, order=None):
  """Bags on a grid four wide; `order` permutes the instances of each."""
  rng = np.random.default_rng(seed)
  bags = []
  for index, n in enumerate(lengths):
    ij = np.stack(np.divmod(np.arange(n, dtype=np.int32), 4), -1)
    x = rng.normal(size=(n, FEATURES)).astype(np.float32)
    if order is not None:
      ij, x = ij[order[index]], x[order[index]]
    graph = ell_from_grid(ij, connectivity=8)
    bags.append(Bag(x, np.ones(n, bool), graph, ij))
  return bags


def junk(bag):
  """Fills padding with NaN and infinities."""
  trash = np.where(np.arange(bag.features.shape[-1]) % 2, np.nan, np.inf)
  features = np.where(bag.mask[..., None], bag.features, trash)
  return bag.replace(features=features.astype(np.float32))


def small(name, **options):
  """A model of few units."""
  options = {'dropout': 0.5} | OPTIONS.get(name, {}) | options
  if 'hidden' in model_options(name):
    options = {'hidden': 8} | options
  return create_model(name, in_dim=FEATURES, num_classes=CLASSES, **options)


@functools.cache
def compiled(name, **options):
  """Model, variables and a jitted apply, shared by all tests."""
  model = small(name, **options)
  shapes = jax.eval_shape(
    model.init, jax.random.key(0), batch_bags(grid_bags())
  )
  # Drawn, not initialised: biases start at zero, which would hide mistakes.
  rng = np.random.default_rng(1)
  variables = jax.tree.map(
    lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), leaf.dtype),
    shapes,
  )
  return model, variables, jax.jit(model.apply, static_argnames='train')

"""Planted truth on one grid: data, variants and runs of simulated tissue.

Shared by the runners `touching_blobs` and `capsule`. All bags lie on one grid,
so its graph is stored once and spread over the batch inside the step.

Axes: R runs, n bags, N patches of the grid, P features, Q text dimensions, K
slots of the graph, C classes.
"""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from kernels_pallas.graph import PatchGraph
from tmlib import train
from tmlib.mil import Bag, classification_method, create_model
from tmlib.ops.graph import ell_from_grid
from tmlib.reaction_diffusion import TMEvolve

__all__ = [
  'SPLITS',
  'VARIANTS',
  'count_parameters',
  'data_seeds',
  'grid_bag',
  'grid_data',
  'grid_graph',
  'initial_params',
  'make_method',
  'make_model',
  'split_sizes',
  'take_runs',
]

SPLITS = ('train', 'validation', 'test')

Array = jax.Array | np.ndarray

# Name -> what it changes in TMEvolve. Each is reported under its name.
VARIANTS: Mapping[str, dict[str, Any]] = {
  'tmevolve': {},
  'tmevolve_patch_pool': {'pooling': 'patch'},
  'uniform': {'uniform': True},
  'uniform_patch_pool': {'uniform': True, 'pooling': 'patch'},
  'uniform_relax': {'uniform': True, 'reaction': 'relax'},
  'no_flux': {'boundary_flux': False},
  'no_diffusion': {'diffusion': False},
  'no_concept_flux': {'concept_flux': False},
  'static': {'steps': 0, 'smooth_iters': 0},
}


def make_model(config, name: str, num_classes: int, **options) -> nn.Module:
  """A variant of TMEvolve, or a model of `tmlib.mil.MODELS`, at equal width.

  Args:
    config: with `tmevolve`, options of `TMEvolve` but the number of outputs.
    name: of a variant or a model.
    num_classes: C.
    **options: further options of TMEvolve.

  Returns:
    A bag model.

  Raises:
    ValueError: an unknown name.
  """
  if name in VARIANTS:
    chosen = config.tmevolve.to_dict() | VARIANTS[name] | options
    return TMEvolve(num_classes, **chosen)
  hidden = config.tmevolve.hidden
  # Width and scorer as in TMEvolve; few weights need no dropout.
  return create_model(
    name,
    num_classes=num_classes,
    hidden=hidden,
    attention=hidden,
    dropout=0.0,
  )


def make_method(config, model: nn.Module, num_classes: int) -> train.Build:
  """Cross entropy under the config's optimizer."""
  optimizer, schedule = train.make_optimizer(
    config.optimizer, config.train.steps
  )
  return classification_method(
    model,
    optimizer,
    num_classes=num_classes,
    schedule=schedule,
    microbatches=config.train.microbatches,
    ema_decay=config.optimizer.ema_decay or None,
    max_skips=config.train.max_skips,
  )


def split_sizes(config) -> tuple[int, int, int]:
  """Bags for training, validation and test, checked.

  Raises:
    ValueError: too few bags to estimate an AUC.
  """
  sizes = tuple(config.data[f'{name}_bags'] for name in SPLITS)
  for name, size in zip(SPLITS, sizes, strict=True):
    if size < 4:
      raise ValueError(f'data.{name}_bags={size} must be at least 4')
  if config.train.runs < 2:
    raise ValueError(
      f'train.runs={config.train.runs} must be at least 2: runs are seeds, and '
      'one says nothing about their spread'
    )
  return sizes


def data_seeds(config, split: str, *point: float) -> tuple[int, int]:
  """Seeds of the tissue and of the noise of one set of bags.

  Args:
    config: with `seed`.
    split: one of `SPLITS`.
    *point: what else names the bags, such as a noise level; to a millionth.

  Returns:
    Two seeds. They are independent of one another and of those of every other
    split and point.
  """
  entropy = [config.seed, SPLITS.index(split)]
  entropy += [round(1e6 * value) for value in point]
  tissue, noise = np.random.SeedSequence(entropy).generate_state(2)
  return int(tissue), int(noise)


def grid_graph(
  positions: np.ndarray, connectivity: Literal[4, 8]
) -> PatchGraph:
  """The graph of one grid, in NumPy."""
  return ell_from_grid(positions, connectivity=connectivity)


def grid_bag(
  features: Array, graph: PatchGraph, concepts: Array | None = None
) -> Bag:
  """Bags that share one graph.

  Args:
    features: [n, N, P].
    graph: leaves [N, K].
    concepts: [n, N, Q] or None.

  Returns:
    Bag with leaves [n, N, ...].
  """
  spread = lambda x: jnp.broadcast_to(
    jnp.asarray(x), (features.shape[0], *x.shape)
  )
  return Bag(
    features=features,
    mask=jnp.ones(features.shape[:2], bool),
    graph=jax.tree.map(spread, graph),
    concepts=concepts,
  )


def grid_data(data: train.Data, graph: PatchGraph) -> train.Data:
  """Turns arrays 'features' (and 'concepts') of a batch into a 'bag'.

  Args:
    data: with resident arrays 'features' [n, N, P] and perhaps 'concepts' [n,
      N, Q].
    graph: of the grid, leaves [N, K].

  Returns:
    Data whose batches hold 'bag'.
  """
  gather = data.gather

  def gathered(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    found = dict(gather(resident, batch))
    features, concepts = found.pop('features'), found.pop('concepts', None)
    return found | {'bag': grid_bag(features, graph, concepts)}

  return data._replace(gather=gathered)


def initial_params(part: train.Experiment, seed: int, runs: int) -> Any:
  """Parameters that the runs of a part started from, leaves [R, ...]."""
  data, build = part.data, part.build
  if data is None or build is None:
    raise ValueError('a part of its own build and data is needed')
  method = build(None)
  loaded = data.load(0, slice(0, data.batch_size))
  resident = jax.tree.map(jnp.asarray, data.resident)

  def one(run, batch):
    key = jax.random.fold_in(jax.random.key(seed), run)
    return method.init(key, data.gather(resident, batch)).params

  return jax.device_get(jax.jit(jax.vmap(one))(jnp.arange(runs), loaded))


def take_runs(params: Any, runs: Any) -> Any:
  """Parameters of one run (an index) or of several (a list of them)."""
  return jax.tree.map(lambda x: x[runs], params)


def count_parameters(params: Any) -> int:
  """Numbers in a tree with a leading run axis, per run."""
  return sum(int(np.prod(x.shape[1:])) for x in jax.tree.leaves(params))

"""Planted truth: do a tumour and an immune disc touch?

Every variant of TMEvolve, its controls and ABMIL on the same bags, R seeds of a
variant in one program. Seeds differ in initial weights and in the order of the
bags; the bags are the same. A second set of parts asks whether the concept
matrix matters, on the tissue of `configs/capsule.py`: patch embeddings in a
text-like space, with the given rows, shuffled rows or random ones.

Axes: R runs (seeds), n bags, N patches, P features, Q text dimensions, M
concepts.
"""

from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from experiments import planted
from tmlib import train
from tmlib.data import tissue
from tmlib.mil import auroc

__all__ = ['CONCEPTS', 'concept_matrix', 'concept_model', 'make', 'simulate']

# Name -> concept mode, and what is done to the given rows; None for no rows.
CONCEPTS = {
  'given': ('similarity', 'given'),
  'shuffled': ('similarity', 'shuffled'),
  'random': ('similarity', 'random'),
  'projected': ('projected', 'given'),
  'learned': ('learned', None),
  'none': ('none', None),
}


def simulate(config, split: str, concepts: bool = False) -> dict[str, Any]:
  """Bags of one split.

  Args:
    config: of the experiment.
    split: 'train', 'validation' or 'test'; each has its own seed.
    concepts: the bags of the concept task: cords in a capsule (see
      `configs/capsule.py`), noisier features, and embeddings.

  Returns:
    features [n, N, P], label [n], kinds [n, N], positions [N, 2], and
    concepts [n, N, Q] where asked for.
  """
  data = config.data
  size = planted.split_sizes(config)[planted.SPLITS.index(split)]
  seed = 10 * config.seed + planted.SPLITS.index(split)
  if concepts:
    c = config.concepts
    bags = tissue.capsule(size, seed=seed, size=c.size, thickness=c.thickness)
    noise = c.feature_noise
  else:
    bags = tissue.touching_blobs(
      size, seed=seed, size=data.size, radius=data.radius
    )
    noise = data.noise
  found = {
    'features': tissue.noisy_one_hot(
      bags.kinds, dim=data.dim, noise=noise, seed=seed
    ),
    'label': bags.labels,
    'kinds': bags.kinds,
    'positions': bags.positions,
  }
  if concepts:
    found['concepts'] = tissue.text_like(
      bags.kinds,
      concept_matrix(config, 'given'),
      noise=config.concepts.embedding_noise,
      seed=seed + 500,  # not the noise of the features
    )
  return found


def concept_matrix(config, rows: str) -> np.ndarray:
  """Rows [M, Q] of the text space.

  Args:
    config: of the experiment.
    rows: 'given': the true ones; 'shuffled': one permutation of the Q
      coordinates of all rows, which keeps their lengths and angles and loses
      what they mean (a permutation of the rows would change nothing: the model
      learns what each is for); 'random': rows from another seed.
  """
  c = config.concepts
  make_rows = lambda seed: tissue.concept_rows(
    c.rows, dim=c.dim, seed=seed, cone=c.cone
  )
  if rows == 'random':
    return make_rows(config.seed + 1000)
  matrix = make_rows(config.seed)
  if rows == 'shuffled':
    order = np.random.default_rng(config.seed).permutation(c.dim)
    matrix = matrix[:, order]
  return matrix


def concept_model(config, name: str) -> nn.Module:
  """TMEvolve with one of `CONCEPTS`."""
  mode, rows = CONCEPTS[name]
  options: dict[str, Any] = {'concept_mode': mode, **config.concepts.model}
  if rows is not None:
    options['concept_matrix'] = concept_matrix(config, rows)
  return planted.make_model(config, 'tmevolve', 2, **options)


def make(config) -> train.Experiment:
  """One part per variant, one per concept matrix, and a report over all."""
  unknown = set(config.concepts.variants) - set(CONCEPTS)
  if unknown:
    raise ValueError(
      f'concepts.variants has {sorted(unknown)}; allowed: {", ".join(CONCEPTS)}'
    )
  if config.data.positions:
    # A missing file is better found before training than after.
    tissue.read_positions(config.data.positions)
  parts = {
    name: _part(config, planted.make_model(config, name, 2))
    for name in config.variants
  }
  for name in config.concepts.variants:
    parts[f'concepts_{name}'] = _part(
      config, concept_model(config, name), concepts=True
    )

  def report(workdir: Path) -> None:
    from experiments import touching_blobs_report

    touching_blobs_report.write(config, parts, workdir)

  return train.Experiment(parts=parts, report=report)


def _part(config, model: nn.Module, concepts: bool = False):
  splits = {s: simulate(config, s, concepts) for s in planted.SPLITS}
  graph = planted.grid_graph(
    splits['train']['positions'], config.data.connectivity
  )
  keys = ('features', 'label', *(('concepts',) if concepts else ()))
  arrays = {s: {k: found[k] for k in keys} for s, found in splits.items()}
  runs, batch = config.train.runs, config.train.batch_size
  everything = np.ones((runs, len(arrays['train']['label'])), np.float32)
  stream = train.run_data(arrays['train'], everything, batch, seed=config.seed)
  passes = {
    s: planted.grid_data(train.pass_data(arrays[s], 8 * batch), graph)
    for s in ('validation', 'test')
  }
  return train.Experiment(
    planted.make_method(config, model, 2),
    planted.grid_data(stream, graph),
    evaluations=passes,
    summarize=lambda outputs, sums: {
      'auroc': auroc(outputs['label'], outputs['probability'][:, 1])
    },
  )

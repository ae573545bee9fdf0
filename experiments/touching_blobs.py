"""Planted truth: do a tumour and an immune disc touch?

Every variant of TMEvolve, its controls and ABMIL on the same bags, R seeds of a
variant in one program. Seeds differ in initial weights and in the order of the
bags; the bags are the same. A second set of parts asks whether the concept
matrix matters, on the tissue of `configs/capsule.py`: patch embeddings in a
text-like space, with the given rows, shuffled rows or random ones.

Axes: R runs (seeds), n bags, N patches, P features, Q text dimensions, M
concepts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flax import linen as nn

from experiments import planted
from tmlib import train
from tmlib.data import tissue
from tmlib.mil import auroc

__all__ = [
  'CONCEPTS',
  'concept_matrix',
  'concept_model',
  'concept_noise',
  'make',
  'simulate',
]

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
  if concepts:
    layout, disturb = planted.data_seeds(config.concepts, split)
    bags = _cords(config, size, layout)
    noise, spread = concept_noise(config)
  else:
    layout, disturb = planted.data_seeds(config, split)
    bags = tissue.touching_blobs(
      size, seed=layout, size=data.size, radius=data.radius
    )
    noise, spread = data.noise, 0.0
  found = {
    'features': tissue.noisy_one_hot(
      bags.kinds, dim=data.dim, noise=noise, seed=disturb
    ),
    'label': bags.labels,
    'kinds': bags.kinds,
    'positions': bags.positions,
  }
  if concepts:
    found['concepts'] = tissue.text_like(
      bags.kinds,
      concept_matrix(config, 'given'),
      noise=spread,
      seed=disturb + 1,  # not the noise of the features
    )
  return found


def _cords(config, size: int, seed: int) -> tissue.Tissue:
  c = config.concepts
  return tissue.capsule(size, seed=seed, size=c.size, thickness=c.thickness)


def concept_noise(config) -> tuple[float, float]:
  """Noise of features and embeddings in the concept task, by a rule.

  The rule sees simulated patches of the training bags, no label and no model:
  it takes the noise at which the kind of a single patch, of those that occur,
  is told right by its largest feature, or by the given row that is nearest to
  its embedding, as often as the config asks.

  Args:
    config: of the experiment, with concepts.feature_accuracy and
      concepts.embedding_accuracy.

  Returns:
    noise for `tissue.noisy_one_hot`, noise for `tissue.text_like`.
  """
  layout, disturb = planted.data_seeds(config.concepts, 'train')
  kinds = _cords(config, 64, layout).kinds
  rows = concept_matrix(config, 'given')
  present = np.unique(kinds)

  def by_feature(noise):
    x = tissue.noisy_one_hot(
      kinds, dim=config.data.dim, noise=noise, seed=disturb
    )
    return np.mean(present[x[..., present].argmax(-1)] == kinds)

  def by_row(noise):
    x = tissue.text_like(kinds, rows, noise=noise, seed=disturb)
    return np.mean(present[(x @ rows[present].T).argmax(-1)] == kinds)

  c = config.concepts
  return (
    _noise_for(by_feature, c.feature_accuracy),
    _noise_for(by_row, c.embedding_accuracy),
  )


def _noise_for(right: Callable[[float], float], accuracy: float) -> float:
  """The noise, to a hundredth, at which a falling share reaches `accuracy`."""
  low, high = 0.0, 16.0
  while high - low > 0.01:
    middle = (low + high) / 2
    low, high = (middle, high) if right(middle) > accuracy else (low, middle)
  return round(high, 2)


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
    return make_rows(c.seed + 1000)
  matrix = make_rows(c.seed)
  if rows == 'shuffled':
    order = np.random.default_rng(c.seed).permutation(c.dim)
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
  bags = {s: simulate(config, s) for s in planted.SPLITS}
  parts = {
    name: _part(config, planted.make_model(config, name, 2), bags)
    for name in config.variants
  }
  if config.concepts.variants:
    bags = {s: simulate(config, s, concepts=True) for s in planted.SPLITS}
  for name in config.concepts.variants:
    parts[f'concepts_{name}'] = _part(config, concept_model(config, name), bags)

  def report(workdir: Path) -> None:
    from experiments import touching_blobs_report

    touching_blobs_report.write(config, parts, workdir)

  return train.Experiment(parts=parts, report=report)


def _part(config, model: nn.Module, splits: Mapping[str, dict[str, Any]]):
  graph = planted.grid_graph(
    splits['train']['positions'], config.data.connectivity
  )
  arrays = {
    s: {k: found[k] for k in ('features', 'label', 'concepts') if k in found}
    for s, found in splits.items()
  }
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

"""Where must gating beat plain diffusion? Curves over noise and thickness.

A point of the curve is one noise level and one thickness, with tissue and noise
of its own; all points and seeds of a model are runs of one program. Runs of a
point share its bags and differ in initial weights and in the order of the bags.

Axes: L points, R runs (L x seeds), n bags of a point, N patches, P features.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import planted
from tmlib import train
from tmlib.data import tissue
from tmlib.mil import auroc

__all__ = ['Points', 'TASKS', 'make', 'point_of', 'points', 'simulate']

TASKS = ('capsule', 'pairs')


class Points(NamedTuple):
  """Bags of one split, for every point of the curve.

  Attributes:
    features: [L, n, N, P].
    label: [L, n].
    kinds: [L, n, N].
    positions: [N, 2].
    names: of the kinds.
  """

  features: np.ndarray
  label: np.ndarray
  kinds: np.ndarray
  positions: np.ndarray
  names: tuple[str, ...]


def points(config) -> list[tuple[int, float]]:
  """(thickness, noise) of the L points; noise runs fastest."""
  return [(w, s) for w in config.data.thickness for s in config.data.noise]


def point_of(config) -> np.ndarray:
  """Point of each run, [R]."""
  return np.repeat(np.arange(len(points(config))), config.train.runs)


def simulate(config, split: str) -> Points:
  """Bags of one split; no two points share tissue or noise.

  Args:
    config: of the experiment.
    split: 'train', 'validation' or 'test'; each has its own seeds.
  """
  data = config.data
  if data.task not in TASKS:
    raise ValueError(
      f'data.task={data.task!r} is unknown; allowed: {", ".join(TASKS)}'
    )
  size = planted.split_sizes(config)[planted.SPLITS.index(split)]
  features, bags = [], []
  for thickness, noise in points(config):
    layout, disturb = planted.data_seeds(config, split, thickness, noise)
    bags.append(_tissue(data, size, layout, thickness))
    features.append(
      tissue.noisy_one_hot(
        bags[-1].kinds, dim=data.dim, noise=noise, seed=disturb,
        contrast={3: data.contrast} if data.task == 'capsule' else None,
      )
    )  # fmt: skip
  return Points(
    np.stack(features),
    np.stack([one.labels for one in bags]),
    np.stack([one.kinds for one in bags]),
    bags[0].positions,
    bags[0].names,
  )


def _tissue(data, size: int, seed: int, thickness: int) -> tissue.Tissue:
  if data.task == 'capsule':
    return tissue.capsule(
      size, seed=seed, size=data.size, thickness=thickness, cord=data.cord
    )
  return tissue.touching_pairs(
    size, seed=seed, height=data.size + 4, width=data.size - 4,
    thickness=thickness, classes=2,
  )  # fmt: skip


def make(config) -> train.Experiment:
  """One part per model, over all points, and a report."""
  splits = {split: simulate(config, split) for split in planted.SPLITS}
  parts = {name: _part(config, name, splits) for name in config.models}

  def report(workdir: Path) -> None:
    from experiments import capsule_report

    capsule_report.write(config, parts, splits['test'], workdir)

  return train.Experiment(parts=parts, report=report)


def _part(config, name: str, splits: dict[str, Points]) -> train.Experiment:
  graph = planted.grid_graph(
    splits['train'].positions, config.data.connectivity
  )
  mine, batch = point_of(config), config.train.batch_size
  found = splits['train']
  own = mine[:, None] == np.repeat(
    np.arange(len(found.label)), found.label[0].size
  )
  stream = train.run_data(
    _flat(found), own.astype(np.float32), batch, seed=config.seed
  )
  passes = {
    split: planted.grid_data(_pass(splits[split], mine, 4 * batch), graph)
    for split in ('validation', 'test')
  }
  return train.Experiment(
    planted.make_method(config, planted.make_model(config, name, 2), 2),
    planted.grid_data(stream, graph),
    runs=len(mine),
    evaluations=passes,
    summarize=lambda outputs, sums: {
      'auroc': auroc(outputs['label'], outputs['probability'][:, 1])
    },
  )


def _flat(found: Points) -> dict[str, Any]:
  """Resident arrays [L n, ...]."""
  return {
    'features': found.features.reshape(-1, *found.features.shape[2:]),
    'label': found.label.ravel(),
  }


def _pass(found: Points, mine: np.ndarray, batch: int) -> train.Data:
  """One pass in which each run sees the bags of its own point only."""
  whole = train.pass_data(_flat(found), batch)
  n = found.label.shape[1]

  def load(step: int, rows: slice) -> dict[str, np.ndarray]:
    index = step * batch + np.arange(rows.start, rows.stop)
    real = np.broadcast_to(index < n, (len(mine), len(index)))
    index = mine[:, None] * n + np.minimum(index, n - 1)
    return {
      'index': index.astype(np.int32), 'weight': real.astype(np.float32)
    }  # fmt: skip

  return whole._replace(load=load, steps=-(-n // batch), per_run=True)

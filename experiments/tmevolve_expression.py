"""Expression of spots across sections of one patient, and regions of others.

Axes: s sections, n spots of a section, N spots padded, G genes, P features, F
folds (a tested section each), R runs = seeds x folds or seeds x sections.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from experiments import contact
from experiments.contact_windows import concept_rows, signature_table
from experiments.planted import VARIANTS
from experiments.touching_blobs import CONCEPTS
from kernels_pallas.graph import PatchGraph
from tmlib import train
from tmlib.config import config_field
from tmlib.data import SpotSection, planted_spots, read_spots
from tmlib.mil import (
  Bag,
  batch_bags,
  log_normalize,
  spot_regression_method,
  tag_runs,
  variable_genes,
)
from tmlib.ops.graph import ell_from_grid
from tmlib.reaction_diffusion import TMEvolve

__all__ = [
  'Fold', 'Study', 'concept_controls', 'load_study', 'make', 'make_network',
  'region_tables',
]  # fmt: skip

# As `tmlib.mil.scale_features`: a feature that hardly varies must not explode.
_LIMIT = 10.0


class Fold(NamedTuple):
  """One tested section; every statistic is of the other sections.

  Attributes:
    genes: [G] names, by decreasing variance.
    features: s arrays [n, P], standardised.
    targets: s arrays [n, G], log-normalised and standardised.
  """

  genes: tuple[str, ...]
  features: list[np.ndarray]
  targets: list[np.ndarray]


class Study(NamedTuple):
  """The sections and their graphs.

  Attributes:
    sections: s sections with features.
    graphs: of their spots, 8 neighbours.
    folds: s, one per tested section.
    labelled: sections with a pathologist's labels.
    labelled_graphs: of theirs.
  """

  sections: list[SpotSection]
  graphs: list[PatchGraph]
  folds: list[Fold]
  labelled: list[SpotSection]
  labelled_graphs: list[PatchGraph]


def load_study(config) -> Study:
  """Reads, or simulates, all sections."""
  data, wanted = config.data, config.regions.sections
  if config.train.runs < 1:
    raise ValueError(
      f'train.runs={config.train.runs} is the number of seeds, at least 1'
    )
  if data.dir:
    with config_field('data.patch'):
      sections = [
        read_spots(data.dir, name, image=True, patch=data.patch)
        for name in data.sections
      ]
    labelled = [read_spots(data.dir, name, labels=True) for name in wanted]
  elif data.synthetic:
    sections = planted_spots(data.synthetic, seed=config.seed)
    labelled = planted_spots(2, seed=config.seed + 1)
  else:
    raise ValueError(
      'data.dir is empty: pass --config.data.dir=FOLDER with the her2st files, '
      'or try --config=configs/tmevolve_expression.py:tiny, which simulates '
      'sections'
    )
  if len(sections) < 3:
    raise ValueError(
      f'data.sections has {len(sections)} sections; give at least 3, for one '
      'is tested and a penalty is chosen among the others'
    )
  graphs = lambda found: [ell_from_grid(one.grid[:, ::-1]) for one in found]
  return Study(
    sections, graphs(sections), make_folds(sections, data.genes), labelled,
    graphs(labelled),
  )  # fmt: skip


def make_folds(sections: Sequence[SpotSection], count: int) -> list[Fold]:
  """A fold per section, which tests it."""
  shared = set(sections[0].genes).intersection(*(s.genes for s in sections))
  genes = [gene for gene in sections[0].genes if gene in shared]
  if not genes:
    raise ValueError('data.sections: they share no gene')
  logs = []
  for one in sections:
    place = {gene: i for i, gene in enumerate(one.genes)}
    logs.append(log_normalize(one.counts)[:, [place[g] for g in genes]])
  folds = []
  for test in range(len(sections)):
    rest = [i for i in range(len(sections)) if i != test]
    with config_field('data.genes'):
      chosen = variable_genes(np.concatenate([logs[i] for i in rest]), count)
    targets = _standardised([x[:, chosen] for x in logs], rest)
    features = _standardised([np.asarray(s.features) for s in sections], rest)
    names = tuple(genes[i] for i in chosen)
    clipped = [np.clip(x, -_LIMIT, _LIMIT) for x in features]
    folds.append(Fold(names, clipped, targets))
  return folds


def _standardised(tables: list[np.ndarray], rest: list[int]):
  """All tables by the mean and the deviation of some of them."""
  seen = np.concatenate([tables[i] for i in rest]).astype(np.float64)
  spread = seen.std(0)
  spread = np.where(spread > 1e-9, spread, 1)
  return [(x - seen.mean(0)) / spread for x in tables]


def region_tables(
  config, section: SpotSection
) -> tuple[np.ndarray, np.ndarray]:
  """Components [n, P] and genes [n, G] of one section; no label is read."""
  wanted = config.regions
  logs = log_normalize(section.counts)
  with config_field('regions.genes'):
    chosen = variable_genes(logs, wanted.genes)
  table = _standardised([logs[:, chosen]], [0])[0]
  if not 1 <= wanted.components <= min(table.shape):
    raise ValueError(
      f'regions.components={wanted.components} must be in [1, '
      f'{min(table.shape)}]'
    )
  left, scale, _ = np.linalg.svd(table - table.mean(0), full_matrices=False)
  components = left[:, : wanted.components] * scale[: wanted.components]
  # One scale for all: the leading components stay the larger ones.
  return components / components[:, 0].std(), table[:, : wanted.targets]


def make_network(config, name: str, outputs: int, **options) -> TMEvolve:
  """TMEvolve, or a variant of it, with a prediction for every spot."""
  chosen = config.tmevolve.to_dict() | VARIANTS[name] | options
  return TMEvolve(outputs, task='expression', **chosen)


def make(config) -> train.Experiment:
  """One part per model, one for the regions, and a report."""
  for name in config.models:
    if name not in VARIANTS:
      raise ValueError(
        f'models has {name!r}, which predicts no spots; known: '
        f'{", ".join(VARIANTS)}'
      )
  study = load_study(config)
  parts = {name: _expression(config, study, name) for name in config.models}
  if study.labelled:
    parts['regions'] = _regions(config, study)
    for rows in concept_controls(config, study):
      parts[f'regions_{rows}'] = _regions(config, study, rows)
  parts |= contact.make_parts(config, study)

  def report(workdir: Path) -> None:
    from experiments import tmevolve_expression_report

    tmevolve_expression_report.write(config, study, workdir)

  return train.Experiment(parts=parts, report=report)


def concept_controls(config, study: Study) -> tuple[str, ...]:
  """Concept matrices of the regions; none where no signature is measured.

  Raises:
    ValueError: an unknown matrix.
  """
  wanted = tuple(config.regions.concepts)
  unknown = sorted(set(wanted) - set(CONCEPTS))
  if unknown:
    raise ValueError(
      f'regions.concepts has {unknown}; allowed: {", ".join(CONCEPTS)}'
    )
  return wanted if signature_table(study.labelled, config.contact)[0] else ()


def _build(
  config, name: str, outputs: int, seen: tuple[str, ...], **network: Any
):
  optimizer, schedule = train.make_optimizer(
    config.optimizer, config.train.steps
  )
  return spot_regression_method(
    make_network(config, name, outputs, **network),
    optimizer,
    aux_weights={'region_balance': config.balance},
    outputs=seen,
    schedule=schedule,
    microbatches=config.train.microbatches,
    ema_decay=config.optimizer.ema_decay or None,
    max_skips=config.train.max_skips,
  )


def _blank(graphs: Sequence[PatchGraph]) -> Bag:
  """The sections as one batch, features still to come."""
  return batch_bags(
    [
      Bag(
        features=np.zeros((len(graph.nbr), 1), np.float32),
        mask=np.ones(len(graph.nbr), bool),
        graph=graph,
      )
      for graph in graphs
    ]
  )


def _padded(tables: Sequence[np.ndarray], size: int) -> np.ndarray:
  return np.stack(
    [np.pad(x, ((0, size - len(x)), (0, 0))) for x in tables]
  ).astype(np.float32)


def _expression(config, study: Study, name: str) -> train.Experiment:
  """Runs = seeds x tested sections."""
  bags = _blank(study.graphs)
  size, count = bags.mask.shape[1], len(study.sections)
  lay = lambda key: np.stack(
    [_padded(getattr(fold, key), size) for fold in study.folds], 1
  )
  arrays = {'bag': bags, 'features': lay('features'), 'target': lay('targets')}
  fold = np.tile(np.arange(count), config.train.runs)
  test = np.eye(count, dtype=np.float32)[fold]
  batch = config.train.batch_size
  stream = train.run_data(arrays, 1 - test, batch, seed=config.seed)
  # One section at a time: the outputs are large.
  tested = train.pass_data(arrays, count, run_weights=test)
  finish = lambda data: _by_fold(tag_runs(data, fold))
  return train.Experiment(
    _build(config, name, len(study.folds[0].genes), ()),
    finish(stream),
    runs=len(fold),
    evaluations={'test': finish(tested)},
    names=[one.name for one in study.sections],
  )


def _by_fold(data: train.Data) -> train.Data:
  """Picks the run's fold of the resident tables [s, F, ...]."""
  gather = data.gather

  def gathered(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    found = dict(gather(resident, batch))
    rows, fold = jnp.arange(len(found['fold'])), found['fold']
    features = found.pop('features')[rows, fold]
    found['target'] = found['target'][rows, fold]
    return found | {'bag': found['bag'].replace(features=features)}

  return data._replace(gather=gathered)


def _regions(
  config, study: Study, concepts: str | None = None
) -> train.Experiment:
  """Runs = seeds x labelled sections, each of which trains on itself alone.

  Args:
    config: of the experiment.
    study: with labelled sections.
    concepts: one of `CONCEPTS`, or None for what config.tmevolve says.
  """
  bags = _blank(study.labelled_graphs)
  tables = [region_tables(config, one) for one in study.labelled]
  size, count = bags.mask.shape[1], len(tables)
  bags = bags.replace(features=_padded([x for x, _ in tables], size))
  options: dict[str, Any] = {}
  if concepts is not None:
    genes, signatures = signature_table(study.labelled, config.contact)
    mode, rows = CONCEPTS[concepts]
    options['concept_mode'] = mode
    if rows is not None:
      options['concept_matrix'] = concept_rows(genes, rows, config.seed)
      bags = bags.replace(concepts=_padded(signatures, size))
  arrays = {'bag': bags, 'target': _padded([y for _, y in tables], size)}
  mine = np.eye(count, dtype=np.float32)
  mine = np.tile(mine, (config.train.runs, 1))
  outputs, seen = tables[0][1].shape[1], ('regions', 'hidden')
  return train.Experiment(
    _build(config, 'tmevolve', outputs, seen, **options),
    train.run_data(arrays, mine, 1, seed=config.seed),
    runs=len(mine),
    evaluations={'seen': train.pass_data(arrays, count, run_weights=mine)},
    names=[one.name for one in study.labelled],
  )

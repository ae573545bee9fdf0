"""Parts of `tmevolve_expression`: matched windows, does tumour touch immune?

Three inputs for the same question. `stain`: colour and texture of the image,
for the sections of one patient that have one, leaving out a section.
`expression`: components of the genes that mark no kind, leaving out a patient.
`kinds`: the two kinds themselves, a control that shows what can be learned from
so many windows; leaving out a patient.

Axes: W windows, N spots padded, P features, F folds, R runs = seeds x folds, Q
signature genes.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from ml_collections import ConfigDict

from experiments import contact_windows as windows
from experiments import planted
from experiments.contact_windows import Window
from experiments.touching_blobs import CONCEPTS
from tmlib import train
from tmlib.data import Bag, SpotSection, batch_bags
from tmlib.mil import auroc, create_model, model_options, tag_runs
from tmlib.ops.graph import ell_from_grid

__all__ = ['INPUTS', 'Task', 'make_parts', 'make_task']

INPUTS = ('stain', 'expression', 'kinds')


class Task(NamedTuple):
  """Matched windows with one input.

  Attributes:
    sections: their names.
    windows: W of them.
    features: [W, F, N, P].
    bag: graph and mask of the windows, leaves [W, N, ...].
    fold: [W] int, the fold that tests a window.
    folds: F names of what is left out.
    concepts: [W, N, Q], or None.
    genes: Q names.
  """

  sections: tuple[str, ...]
  windows: list[Window]
  features: np.ndarray
  bag: Bag
  fold: np.ndarray
  folds: tuple[str, ...]
  concepts: np.ndarray | None = None
  genes: tuple[str, ...] = ()


def make_task(config, study: Any, name: str) -> Task | None:
  """The windows and what models see of them; None where too few match.

  Args:
    config: with `contact`.
    study: of `tmevolve_expression`.
    name: one of `INPUTS`.
  """
  contact = config.contact
  stain = name == 'stain'
  sections: list[SpotSection] = list(study.sections)
  if not stain:
    sections = [*study.labelled, *sections]
  kinds = [windows.spot_kinds(one, contact) for one in sections]
  found = [
    window
    for i, one in enumerate(sections)
    for window in windows.find_windows(
      one.grid, kinds[i], contact.window, section=i
    )
  ]
  found = windows.match_windows(found, config.seed)
  patients = [windows.patient_of(one.name) for one in sections]
  held = [one.name for one in sections] if stain else patients
  folds = tuple(
    name for name in dict.fromkeys(held)
    if any(held[w.section] == name for w in found)
  )  # fmt: skip
  if len(folds) < 2:
    return None
  fold = np.array([folds.index(held[w.section]) for w in found])
  tables: list[list[np.ndarray]]
  if stain:
    names = [one.name for one in sections]
    tables = [study.folds[names.index(test)].features for test in folds]
  elif name == 'expression':
    all_folds = windows.components(sections, patients, contact)
    tables = [all_folds[test] for test in folds]
  else:
    tables = [[np.eye(3)[k] for k in kinds]] * len(folds)
  task = Task(
    tuple(one.name for one in sections), found,
    np.stack([_cut(found, table) for table in tables], 1),
    _graphs(found, sections), fold, folds,
  )  # fmt: skip
  if name != 'expression':
    return task
  genes, signatures = windows.signature_table(sections, contact)
  if not genes:
    return task
  return task._replace(concepts=_cut(found, signatures), genes=genes)


def _cut(found: Sequence[Window], tables: Sequence[np.ndarray]) -> np.ndarray:
  """[W, N, P] of the windows' spots, padded by zeros."""
  size = max(len(w.spots) for w in found)
  cut = [tables[w.section][w.spots] for w in found]
  return np.stack(
    [np.pad(x, ((0, size - len(x)), (0, 0))) for x in cut]
  ).astype(np.float32)


def _graphs(found: Sequence[Window], sections: Sequence[SpotSection]) -> Bag:
  """Spots that share a side are joined: contact is an edge."""
  bags = []
  for window in found:
    grid = sections[window.section].grid[window.spots][:, ::-1]
    bags.append(
      Bag(
        features=np.zeros((len(grid), 1), np.float32),
        mask=np.ones(len(grid), bool),
        graph=ell_from_grid(grid, connectivity=4),
      )
    )
  return batch_bags(bags, max(len(w.spots) for w in found))


def make_parts(config, study: Any) -> dict[str, train.Experiment]:
  """One part per input and model, and per concept matrix.

  Raises:
    ValueError: an unknown input, model or concept matrix.
  """
  contact = config.contact
  for field, known in (('inputs', INPUTS), ('concepts', tuple(CONCEPTS))):
    unknown = sorted(set(contact[field]) - set(known))
    if unknown:
      raise ValueError(
        f'contact.{field} has {unknown}; allowed: {", ".join(known)}'
      )
  settings = _settings(config)
  parts = {}
  for name in contact.inputs:
    task = make_task(config, study, name)
    if task is None:
      continue
    for model in contact.models:
      parts[f'contact_{name}_{model}'] = _part(
        settings, task, _network(settings, model)
      )
    if name == 'expression' and task.genes:
      for rows in contact.concepts:
        parts[f'contact_concepts_{rows}'] = _part(
          settings, task, _concept_network(settings, task.genes, rows)
        )
  return parts


def _settings(config) -> Any:
  """The config with the settings of this task in their usual places."""
  settings: Any = ConfigDict(config.to_dict())
  contact = settings.contact
  settings.tmevolve = contact.network
  settings.optimizer.update(contact.optimizer)
  settings.train.update(
    steps=contact.steps, runs=contact.seeds, batch_size=contact.batch_size
  )
  return settings


def _network(settings, name: str) -> nn.Module:
  """A model of the comparison, all of one width."""
  if name in planted.VARIANTS:
    return planted.make_model(settings, name, 2)
  hidden = settings.tmevolve.hidden
  options = {'hidden': hidden, 'attention': hidden, 'dropout': 0.0}
  known = model_options(name)
  return create_model(
    name, num_classes=2, **{k: v for k, v in options.items() if k in known}
  )


def _concept_network(settings, genes: Sequence[str], name: str) -> nn.Module:
  mode, rows = CONCEPTS[name]
  options: dict[str, Any] = {'concept_mode': mode}
  if rows is not None:
    options['concept_matrix'] = windows.concept_rows(genes, rows, settings.seed)
  return planted.make_model(settings, 'tmevolve', 2, **options)


def _part(settings, task: Task, model: nn.Module) -> train.Experiment:
  """Runs = seeds x folds."""
  arrays: dict[str, Any] = {
    'bag': task.bag,
    'features': task.features,
    'label': np.array([w.touch for w in task.windows], np.int32),
  }
  if task.concepts is not None:
    arrays['concepts'] = task.concepts
  fold = np.tile(np.arange(len(task.folds)), settings.train.runs)
  test = (task.fold == fold[:, None]).astype(np.float32)
  stream = train.run_data(
    arrays, 1 - test, settings.train.batch_size, seed=settings.seed
  )
  tested = train.pass_data(arrays, 64, run_weights=test)
  finish = lambda data: _by_fold(tag_runs(data, fold))
  return train.Experiment(
    planted.make_method(settings, model, 2),
    finish(stream),
    steps=settings.train.steps,
    runs=len(fold),
    evaluations={'test': finish(tested)},
    summarize=_summarize,
  )


def _summarize(
  outputs: Mapping[str, np.ndarray], sums: Mapping[str, float]
) -> dict[str, Any]:
  del sums
  return {'auroc': auroc(outputs['label'], outputs['probability'][:, 1])}


def _by_fold(data: train.Data) -> train.Data:
  """Picks the run's fold of the features [W, F, N, P]."""
  gather = data.gather

  def gathered(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    found = dict(gather(resident, batch))
    rows = jnp.arange(len(found['fold']))
    bag = found['bag'].replace(
      features=found.pop('features')[rows, found['fold']],
      concepts=found.pop('concepts', None),
    )
    return found | {'bag': bag}

  return data._replace(gather=gathered)

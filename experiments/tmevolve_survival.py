"""Survival on the published folds of a cohort, a bag of pathways per patient.

Axes: n patients, G genes, N pathways, q components, F folds, R runs = seeds x
folds, B patients of a batch, P = N (1 + q) features.
"""

from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from experiments.planted import VARIANTS
from kernels_pallas.graph import PatchGraph
from tmlib import train
from tmlib.config import config_field
from tmlib.data import (
  PathwayCohort,
  pathway_components,
  pathway_graph,
  planted_pathways,
  read_pathway_cohort,
)
from tmlib.mil import MODELS, Bag, create_model, model_options, tag_runs
from tmlib.mil.survival import (
  cox_method,
  digitize,
  discrete_survival_method,
  quantile_bins,
)
from tmlib.reaction_diffusion import TMEvolve

__all__ = [
  'Study', 'fold_bags', 'load_study', 'loss_of', 'make', 'make_network',
]  # fmt: skip

# Their auxiliary losses judge parts of one bag, which no Cox loss can.
_BY_BAG = ('dsmil', 'dtfd')


class Study(NamedTuple):
  """A cohort and what its folds make of it.

  Attributes:
    cohort: the patients.
    graph: of the pathways, leaves [N, K].
    components: [n, F, N, q], of the training patients of each fold.
    fold: [R], the fold of each run.
  """

  cohort: PathwayCohort
  graph: PatchGraph
  components: np.ndarray
  fold: np.ndarray


def load_study(config) -> Study:
  """Reads, or simulates, the cohort; folds see their training patients only."""
  data = config.data
  if data.dir:
    with config_field('data.endpoint'):
      cohort = read_pathway_cohort(
        data.dir,
        data.study,
        signatures=data.signatures,
        endpoint=data.endpoint,
      )
  elif data.synthetic:
    with config_field('data.synthetic'):
      cohort = planted_pathways(data.synthetic, seed=config.seed)
  else:
    raise ValueError(
      'data.dir is empty: pass --config.data.dir=FOLDER with the SurvPath '
      f'tables of {data.study}, or try --config=configs/tmevolve_survival.py'
      ':tiny, which simulates patients'
    )
  if config.train.runs < 1:
    raise ValueError(
      f'train.runs={config.train.runs} is the number of seeds, at least 1'
    )
  for fold, rows in enumerate(cohort.train):
    if not cohort.event[rows].any():
      raise ValueError(f'fold {fold}: all training patients are censored')
  with config_field('data.components'):
    components = np.stack(
      [
        pathway_components(
          cohort.expression, cohort.membership, rows, data.components
        )
        for rows in cohort.train
      ],
      1,
    )
  with config_field('data.neighbours'):
    graph = pathway_graph(cohort.membership, data.neighbours)
  fold = np.tile(np.arange(len(cohort.train)), config.train.runs)
  return Study(cohort, graph, components, fold)


def loss_of(name: str) -> str:
  """'cox', or 'nll' for a model whose losses are of one bag."""
  return 'nll' if name in _BY_BAG else 'cox'


def make_network(config, name: str) -> nn.Module:
  """A model, or a variant of TMEvolve, at the width that all share."""
  shared, own = config.model.to_dict(), config.tmevolve.to_dict()
  own.pop('balance')
  outputs = 1 if loss_of(name) == 'cox' else config.loss.bins
  if name in VARIANTS:
    del shared['attention']
    return TMEvolve(outputs, task='survival', **(own | shared | VARIANTS[name]))
  known = model_options(name)
  shared = {k: v for k, v in shared.items() if k in known}
  return create_model(name, num_classes=outputs, **shared)


def fold_bags(components: Any, graph: PatchGraph) -> Bag:
  """Bags in which each pathway has its own block of features.

  Pathway i has [1, its components] in block i and zeros elsewhere: the first
  linear layer of any bag model is then a layer of its own per pathway.

  Args:
    components: [B, N, q].
    graph: leaves [N, K].

  Returns:
    Bag with features [B, N, N (1 + q)].
  """
  count, nodes, size = components.shape
  one = jnp.ones((count, nodes, 1), components.dtype)
  values = jnp.concatenate([one, components], -1)
  own = jnp.eye(nodes, dtype=values.dtype)[None, :, :, None]
  blocks = own * values[:, :, None]
  spread = lambda x: jnp.broadcast_to(jnp.asarray(x), (count, *x.shape))
  return Bag(
    features=blocks.reshape(count, nodes, nodes * (1 + size)),
    mask=jnp.ones((count, nodes), bool),
    graph=jax.tree.map(spread, graph),
  )


def make(config) -> train.Experiment:
  """One part per model, all folds and seeds its runs, and a report."""
  known = {*MODELS, *VARIANTS}
  for name in config.models:
    if name not in known or (name in MODELS and MODELS[name].needs_text):
      raise ValueError(
        f'models has {name!r}; known: '
        f'{", ".join(n for n in sorted(known) if n != name)}'
      )
  study = load_study(config)
  parts = {name: _part(config, study, name) for name in config.models}

  def report(workdir: Path) -> None:
    from experiments import tmevolve_survival_report

    tmevolve_survival_report.write(config, study, workdir)

  return train.Experiment(parts=parts, report=report)


def _part(config, study: Study, name: str) -> train.Experiment:
  optimizer, schedule = train.make_optimizer(
    config.optimizer, config.train.steps
  )
  options: dict[str, Any] = dict(
    schedule=schedule,
    microbatches=config.train.microbatches,
    ema_decay=config.optimizer.ema_decay or None,
    max_skips=config.train.max_skips,
  )
  if name in VARIANTS:
    options['aux_weights'] = {'region_balance': config.tmevolve.balance}
  network = make_network(config, name)
  if loss_of(name) == 'cox':
    build = cox_method(network, optimizer, ties=config.loss.ties, **options)
  else:
    options['aux_weights'] = dict(MODELS[name].aux_weights)
    build = discrete_survival_method(
      network, optimizer, alpha=config.loss.alpha, **options
    )
  arrays = _arrays(config, study)
  cohort, fold = study.cohort, study.fold
  batch = config.train.batch_size
  weights = cohort.train[fold].astype(np.float32)
  stream = train.run_data(arrays, weights, batch, seed=config.seed)
  tested = train.pass_data(
    arrays, min(batch, len(cohort.cases)),
    run_weights=cohort.test[fold].astype(np.float32),
  )  # fmt: skip
  lay = lambda data: _bags(tag_runs(data, fold), study.graph)
  return train.Experiment(
    build,
    lay(stream),
    runs=len(fold),
    evaluations={'test': lay(tested)},
    names=cohort.cases,
  )


def _arrays(config, study: Study) -> dict[str, Any]:
  """What lives on the device once for all runs; bins [n, F] are per fold."""
  cohort = study.cohort
  bins = []
  for rows in cohort.train:
    with config_field('loss.bins'):
      edges = quantile_bins(
        cohort.time[rows], cohort.event[rows], config.loss.bins
      )
    bins.append(digitize(cohort.time, edges))
  return {
    'components': study.components,
    'time': cohort.time.astype(np.float32),
    'event': cohort.event.astype(np.float32),
    'bin': np.stack(bins, 1).astype(np.int32),
  }


def _bags(data: train.Data, graph: PatchGraph) -> train.Data:
  """Picks the run's fold from the resident arrays and makes bags of it."""
  gather = data.gather

  def gathered(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    found = dict(gather(resident, batch))
    rows, fold = jnp.arange(len(found['fold'])), found['fold']
    components = found.pop('components')[rows, fold]
    found['bin'] = found['bin'][rows, fold]
    return found | {'bag': fold_bags(components, graph)}

  return data._replace(gather=gathered)

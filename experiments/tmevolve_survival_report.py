"""Report of `experiments/tmevolve_survival.py`: concordance, curves, pathways.

It reads predictions.csv and checkpoints from the working directory only.

Axes: n patients, F folds, S seeds, N pathways.
"""

import csv
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import plots, slides_plots
from experiments import tmevolve_survival as runner
from experiments.planted_report import markdown, write_csv
from tmlib import train
from tmlib.data import pathway_components
from tmlib.mil.survival import (
  concordance_index_ipcw,
  linear_cox,
  select_cox_penalty,
)
from tmlib.ops.statistics import (
  bootstrap_difference,
  bootstrap_interval,
  detectable_difference,
)
from tmlib.reaction_diffusion import identifiable_tables

__all__ = ['fold_concordance', 'linear_risks', 'write']

_NOTE = """
{patients} patients, {events} events ({endpoint}), {folds} published folds of
{sizes} tested patients, {seeds} seeds per fold. {missing}

`C`: Harrell's index over the pairs of patients that one fold tests, all folds'
pairs together: the log-risks of two models are never compared. Its interval is
a bootstrap over patients within these trained models ({samples} samples, 95 %,
BCa): it does not tell what another training run would give. `folds` are the
indices of each fold, mean over seeds; `IPCW` is Uno's index, mean over the
folds, with the censoring of training patients. `detectable`: a smaller true
difference to the first row would be missed by so many patients more often than
one time in five.

The first rows are ridge Cox regressions: on {genes} principal components of all
genes, on the first component of every pathway, and on what the bag models are
given, {components} components of every pathway. Their penalty is chosen by the
cross-validated partial likelihood of the training patients. The bag models
share one width and optimizer, all fixed beforehand, and take their last step.
Components and scales are of training patients.
"""
_PICTURES = """
Pathways join where they share genes: that is the graph, not tissue. Regions and
concepts are learned from expression and survival; nobody has named them, and
their numbers mean nothing across folds.
"""


def write(config, study: runner.Study, workdir: Path) -> None:
  """Writes report/: table.md, table.csv, runs.csv and the pictures."""
  out = workdir / 'report'
  risks = linear_risks(config, study)
  losses = dict.fromkeys(risks, 'cox')
  for name in config.models:
    risks[name] = _read(workdir / name, study)
    losses[name] = runner.loss_of(name)
  rows = _rows(config, study, risks, losses)
  write_csv(out / 'table.csv', rows)
  write_csv(out / 'runs.csv', _runs(study, risks))
  (out / 'table.md').write_text(
    _markdown(rows) + _note(config, study, workdir) + _PICTURES
  )
  _curves(config, study, risks, out)
  plots.intervals(
    out / 'concordance.png',
    [(r['model'], r['c'], r['low'], r['high']) for r in rows],
    'C over pairs within tested folds, mean of the seeds\n'
    '95 % bootstrap over patients; dotted: the first line',
    "Harrell's C",
  )
  if 'tmevolve' in config.models:
    _pathways(config, study, train.load_params(workdir / 'tmevolve'), out)


def linear_risks(config, study: runner.Study) -> dict[str, np.ndarray]:
  """Log-risks [n, 1] of ridge Cox regressions, each patient out of fold."""
  cohort, options = study.cohort, config.linear
  every = np.ones((1, len(cohort.genes)), bool)

  def covariates(fold: int) -> dict[str, np.ndarray]:
    genes = pathway_components(
      cohort.expression, every, cohort.train[fold], options.genes
    )
    own = study.components[:, fold]
    return {
      f'linear Cox, {options.genes} components of all genes': genes[:, 0],
      'linear Cox, first component of pathways': own[:, :, 0],
      f'linear Cox, {own.shape[-1]} components of pathways': own.reshape(
        len(own), -1
      ),
    }

  found: dict[str, np.ndarray] = {}
  for fold, (rows, held) in enumerate(
    zip(cohort.train, cohort.test, strict=True)
  ):
    for name, x in covariates(fold).items():
      mine = (x[rows], cohort.time[rows], cohort.event[rows])
      fit = linear_cox(*mine, select_cox_penalty(*mine, options.penalties))
      if not fit.converged:
        raise RuntimeError(
          f'{name}, fold {fold}: Newton left a derivative of {fit.gradient:.2g}'
          '; raise linear.penalties'
        )
      risk = found.setdefault(name, np.full((len(x), 1), np.nan))
      risk[held, 0] = x[held] @ fit.coefficients
  return found


def _read(folder: Path, study: runner.Study) -> np.ndarray:
  """Out-of-fold risks [n, S]."""
  with (folder / 'predictions.csv').open() as file:
    found = [r for r in csv.DictReader(file) if r['evaluation'] == 'test']
  column = lambda key, kind: np.array([kind(row[key]) for row in found])
  run, ids = column('run', int), column('id', int)
  folds = len(study.cohort.test)
  table = np.full((len(study.cohort.cases), len(study.fold) // folds), np.nan)
  table[ids, run // folds] = column('risk', float)
  return table


def fold_concordance(targets: np.ndarray, risks: np.ndarray) -> float:
  """Harrell's C over pairs of one fold, mean over seeds.

  Args:
    targets: [n, 3], time, event and fold of each patient; fold -1 is no fold.
    risks: [n, S]; a seed with a risk that is not finite has no value.

  Returns:
    In [0, 1]; NaN where no pair can be compared.
  """
  order, total = np.zeros(risks.shape[1]), 0
  for fold in np.unique(targets[:, 2]):
    if fold < 0:
      continue
    at = targets[:, 2] == fold
    time, event, risk = targets[at, 0], targets[at, 1] > 0, risks[at]
    pair = (time[:, None] < time) | ((time[:, None] == time) & ~event)
    first, second = np.nonzero(pair & event[:, None])
    gap = risk[first] - risk[second]
    tied = np.abs(gap) <= 1e-8
    order += np.where(tied, 0.5, gap > 0).sum(0)
    order += np.where(np.isfinite(gap).all(0), 0, np.nan)
    total += len(first)
  return float(np.mean(order / total)) if total else float('nan')


def _targets(study: runner.Study) -> np.ndarray:
  cohort = study.cohort
  fold = np.where(cohort.test.any(0), cohort.test.argmax(0), -1)
  return np.stack([cohort.time, cohort.event, fold], 1).astype(float)


def _by_fold(study: runner.Study, risk: np.ndarray) -> list[float]:
  targets = _targets(study)
  return [fold_concordance(targets[at], risk[at]) for at in study.cohort.test]


def _ipcw(study: runner.Study, risk: np.ndarray) -> float:
  """Uno's C, mean over folds and seeds that have one."""
  cohort, found = study.cohort, []
  for rows, held in zip(cohort.train, cohort.test, strict=True):
    for seed in risk.T:
      try:
        # Weights are not defined beyond the last training time.
        found.append(concordance_index_ipcw(
          cohort.time[rows], cohort.event[rows],
          cohort.time[held], cohort.event[held], seed[held],
          tau=float(cohort.time[rows].max()) * (1 - 1e-9),
        ))  # fmt: skip
      except ValueError:
        continue
  return float(np.mean(found)) if found else float('nan')


def _rows(config, study, risks, losses) -> list[dict[str, Any]]:
  targets = _targets(study)
  options: Any = {'samples': config.report.bootstrap}
  reference, rows = next(iter(risks)), []
  wide = max(risk.shape[1] for risk in risks.values())
  # One number of seeds for all, so that two models can be paired.
  spread = lambda risk: np.resize(risk.T, (wide, len(risk))).T
  for name, risk in risks.items():
    folds = _by_fold(study, risk)
    one = bootstrap_interval(fold_concordance, targets, risk, **options)
    row: dict[str, Any] = {
      'model': name, 'loss': losses[name], 'c': one.value, 'low': one.low,
      'high': one.high, 'mean': float(np.nanmean(folds)),
      'std': float(np.nanstd(folds)), 'ipcw': _ipcw(study, risk),
    }  # fmt: skip
    row |= {f'fold_{k}': value for k, value in enumerate(folds)}
    if name != reference:
      gap = bootstrap_difference(
        fold_concordance, targets, spread(risk), spread(risks[reference]),
        **options,
      )  # fmt: skip
      row |= {
        'difference': gap.value,
        'difference_low': gap.low,
        'difference_high': gap.high,
        'detectable': detectable_difference(gap.standard_error),
      }
    rows.append(row)
  return rows


def _runs(study: runner.Study, risks) -> list[dict[str, Any]]:
  return [
    {'model': name, 'fold': fold, 'seed': seed, 'c': value}
    for name, risk in risks.items()
    for seed in range(risk.shape[1])
    for fold, value in enumerate(_by_fold(study, risk[:, [seed]]))
  ]


def _markdown(rows: list[dict[str, Any]]) -> str:
  head = (
    'model', 'loss', 'C [95 %]', 'folds', 'mean ± std', 'IPCW',
    'minus first row [95 %]', 'detectable',
  )  # fmt: skip
  body = []
  for r in rows:
    gap = detect = ''
    if 'difference' in r:
      gap = '{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]'
      gap, detect = gap.format(**r), f'{r["detectable"]:.3f}'
    folds = [v for k, v in r.items() if k.startswith('fold_')]
    body.append((
      r['model'], r['loss'], '{c:.3f} [{low:.3f}, {high:.3f}]'.format(**r),
      ' '.join(f'{v:.3f}' for v in folds), '{mean:.3f} ± {std:.3f}'.format(**r),
      r['ipcw'], gap, detect,
    ))  # fmt: skip
  return markdown(head, body)


def _note(config, study: runner.Study, workdir: Path) -> str:
  cohort = study.cohort
  bad = [
    f'{name}/{run}'
    for name in config.models
    for run in json.loads((workdir / name / 'result.json').read_text())[
      'diverged'
    ]
  ]
  missing = 'Every patient of the splits has expression.'
  if cohort.missing:
    missing = (
      f'Left out, for they have no follow-up or expression: '
      f'{", ".join(cohort.missing)}.'
    )
  text = _NOTE.format(
    patients=len(cohort.cases),
    events=int(cohort.event.sum()),
    endpoint=config.data.endpoint,
    folds=len(cohort.test),
    sizes=', '.join(str(x) for x in cohort.test.sum(1)),
    seeds=config.train.runs,
    missing=missing,
    samples=config.report.bootstrap,
    genes=config.linear.genes,
    components=study.components.shape[-1],
  )
  return text + f'\nRuns that diverged: {", ".join(bad) or "none"}.\n'


def _curves(config, study: runner.Study, risks, out: Path) -> None:
  """Kaplan-Meier curves of the halves by risk, a panel per model."""
  cohort = study.cohort
  names = [next(iter(risks)), *config.models][:6]
  columns = min(3, len(names))
  rows = -(-len(names) // columns)
  tests = []
  with plots.figure(out / 'survival.png', rows, columns, 3.8) as (fig, axes):
    for ax in axes.flat[len(names) :]:
      ax.axis('off')
    for ax, name in zip(axes.flat, names, strict=False):
      high = np.zeros(len(cohort.cases), bool)
      for held in cohort.test:
        # Risks of one fold and seed share a scale: their ranks are averaged.
        rank = risks[name][held].argsort(0).argsort(0).mean(1)
        high[held] = rank > np.median(rank)
      seen = cohort.test.any(0)
      pvalue = slides_plots.draw_survival(
        ax, cohort.time[seen], cohort.event[seen], high[seen],
        'months', f'{name}\n',
      )  # fmt: skip
      tests.append({'model': name, 'logrank_p': pvalue})
    fig.suptitle(
      'Kaplan-Meier, tested patients, split at the median risk of their fold',
      fontsize=9,
    )
  write_csv(out / 'logrank.csv', tests)


def _pathways(config, study: runner.Study, params: Any, out: Path) -> None:
  """What the models of the first seed look at, on their tested patients."""
  network: Any = runner.make_network(config, 'tmevolve')
  cohort, pathways = study.cohort, len(study.cohort.pathways)

  @jax.jit
  def look(params, components):
    def risk(components):
      bag = runner.fold_bags(components, study.graph)
      output = network.apply({'params': params}, bag, trace=True)
      return output.logits[:, 0].sum(), output

    (_, output), slope = jax.value_and_grad(risk, has_aux=True)(components)
    regions = output.extras['regions']
    return output.attention, slope[..., 0], regions

  attention = np.full((len(cohort.cases), pathways), np.nan)
  slope, regions = attention.copy(), np.zeros((pathways, 1))
  for fold, held in enumerate(cohort.test):
    one = jax.tree.map(lambda x, fold=fold: x[fold], params)
    # All patients, so that every fold has one shape; its own are kept.
    found = jax.device_get(look(one, study.components[:, fold]))
    attention[held], slope[held] = found[0][held], found[1][held]
    if fold == 0:
      regions = found[2][held].mean(0)
  by_fold = lambda x: np.stack([x[held].mean(0) for held in cohort.test])
  seen = {'attention': by_fold(attention) * pathways, 'slope': by_fold(slope)}
  write_csv(out / 'pathways.csv', [
    {'pathway': name, 'attention_share': seen['attention'][:, i].mean(),
     'slope': seen['slope'][:, i].mean(),
     'slope_min': seen['slope'][:, i].min(),
     'slope_max': seen['slope'][:, i].max(),
     'region_of_fold_0': int(regions[i].argmax())}
    for i, name in enumerate(cohort.pathways)
  ])  # fmt: skip
  _bars(config, study, seen, out / 'pathways.png')
  first = jax.tree.map(lambda x: x[0], params)
  _graph(study, regions, seen, first, out / 'pathway_graph.png')


def _short(name: str) -> str:
  return name.removeprefix('HALLMARK_').replace('_', ' ').lower()[:34]


def _bars(config, study: runner.Study, seen, path: Path) -> None:
  order = np.argsort(-np.abs(seen['slope'].mean(0)))[: config.report.pathways]
  place = np.arange(len(order))
  panels = (
    ('slope', 'd log-risk / d first component', 0.0),
    ('attention', 'attention x pathways', 1.0),
  )
  with plots.figure(path, 1, 2, 4.4) as (fig, axes):
    for ax, (key, label, zero) in zip(axes[0], panels, strict=True):
      values = seen[key][:, order]
      mean = values.mean(0)
      ax.barh(
        place, mean - zero, left=zero, alpha=0.6,
        color=['C3' if m > zero else 'C0' for m in mean],
      )  # fmt: skip
      for row in values:
        ax.plot(row, place, '.', color='0.2', ms=3)
      ax.axvline(zero, color='0.5', lw=0.8)
      ax.set(xlabel=label, ylim=(len(order) - 0.5, -0.5))
    names = [_short(study.cohort.pathways[i]) for i in order]
    axes[0, 0].set_yticks(place, names, fontsize=7)
    axes[0, 1].set_yticks([])
    fig.suptitle(
      'TMEvolve on tested patients: the pathways that move the risk most\n'
      'bars: mean over folds, dots: each fold', fontsize=9,
    )  # fmt: skip


def _graph(study: runner.Study, regions, seen, params, path: Path) -> None:
  nbr, edge = np.asarray(study.graph.nbr), np.asarray(study.graph.emask)
  count, region = len(nbr), regions.argmax(-1)
  dense = np.zeros((count, count))
  rows = np.repeat(np.arange(count), nbr.shape[1])[edge.ravel()]
  dense[rows, nbr[edge]] = 1
  # Eigenvectors of the graph, then spread by rank, so that names are legible.
  scale = 1 / np.sqrt(np.maximum(dense.sum(1), 1))
  smooth = np.linalg.eigh(scale[:, None] * dense * scale)[1][:, -3:-1]
  spot = smooth.argsort(0).argsort(0).astype(float)
  size = seen['attention'].mean(0)
  with plots.figure(path, 1, 2, 5.0) as (fig, axes):
    fig.set_size_inches(11, 5.6)
    ax = axes[0, 0]
    for i, j in np.argwhere(np.triu(dense)):
      ax.plot(*spot[[i, j]].T, color='0.85', lw=0.8, zorder=0)
    for r in np.unique(region):
      at = region == r
      ax.scatter(*spot[at].T, s=40 * size[at], color=f'C{r}',
                 label=f'region {r} ({at.sum()})')  # fmt: skip
    top = np.argsort(-np.abs(seen['slope'].mean(0)))[:10]
    for i in top:
      ax.annotate(_short(study.cohort.pathways[i]), spot[i], fontsize=6)
    ax.axis('off')
    ax.legend(fontsize=7, frameon=False, loc='lower right')
    ax.set_title(
      'largest region of each pathway, fold 0; area: attention\n'
      'edges: the most shared genes', fontsize=8,
    )  # fmt: skip
    ax = axes[0, 1]
    if 'theta' in params:
      table = identifiable_tables(
        params['theta'], params['gate_bias'], params['exchange']
      )
      image = ax.imshow(table['permeability'], cmap='viridis', vmin=0, vmax=1)
      fig.colorbar(image, ax=ax, shrink=0.7, label='sigmoid(Theta + b)')
      ax.set(xlabel='concept', ylabel='concept')
    ax.set_title('how open a boundary is between two concepts', fontsize=8)

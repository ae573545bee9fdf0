"""Report of `experiments/tmevolve_expression.py`: genes, regions, contact.

It reads predictions.npz and results from the working directory only.

Axes: s sections, n spots, G genes, P features, R regions.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import contact_report, plots, tissue_plots
from experiments import tmevolve_expression as runner
from experiments.contact_windows import concept_rows, signature_table
from experiments.planted_report import markdown, write_csv
from kernels_pallas.graph import PatchGraph
from tmlib.data import SpotSection
from tmlib.mil import expression_summary, pearson_per_gene
from tmlib.ops.statistics import adjusted_rand_index

__all__ = [
  'diffuse',
  'neighbour_mean',
  'ridge',
  'ridge_predictions',
  'write',
]

_PENALTIES = tuple(float(x) for x in 10.0 ** np.arange(-1, 6))
# Labels that tell no tissue.
_UNKNOWN = ('', 'undetermined')
_TITLE = '# Expression of spots from the stained image\n\n'
_NOTE = """
Pearson's correlation of each gene over the spots of a tested section, mean over
{genes} genes, and mean of the best {top}, which are chosen by that correlation;
then the mean over {count} sections, each predicted by models that saw the other
sections only. `minus ridge` is the mean and the range over the sections. Genes
and scales are of the training sections; the penalty of a ridge is chosen by
leaving out one training section at a time; the networks' settings were fixed
beforehand and they take their last step. Predictions of {seeds} seeds are
averaged; `one seed` is the mean of single seeds.

What it does not show: the sections are of one patient, so this is a
within-patient figure, and {count} of them give no interval for other patients.
Features are 17 numbers of colour and texture per spot, not of an encoder: they
have no text space, so that concepts are learned here.
Correlations of .304 and .453 (best 50) were measured elsewhere with a ridge on
17 such features of the same images.
"""
_REGIONS = """
# Regions beside a pathologist's

Adjusted Rand index with the labels (spots without a kind of tissue left out),
{clusters} clusters for every method, mean of {seeds} seeds. Every section is
taken alone and no label is read: k-means sees {components} components of
{genes} variable genes; `diffusion` sees them after {steps} steps of uniform
diffusion; TMEvolve is trained to predict genes of its own section from these
components, and gives its largest soft region, or k-means of its evolved field.

"""
_EVEN = """
Of {regions} soft regions, {used:.1f} are the largest one of some spot; they are
as even as {soft:.1f} regions of equal size, the pathologist's tissues as
{labels:.1f}. Nothing tells TMEvolve what a tissue is: its regions are learned
by what they do for the prediction of genes, from prototypes drawn at random,
and a term asks that all be used (`--config.balance=0` leaves it out).
"""
_CONCEPTS = """
Soft regions of TMEvolve with a concept matrix, over {seeds} seeds: spots are
embedded by {count} genes of {groups} kinds of cells and tissue. `given`: a row
per kind, of its genes; `shuffled`: the rows with their genes permuted;
`random`: as many genes, drawn for each row alone; `projected`: the given rows,
and a learned map of the components in place of the genes. `learned` is the row
of soft regions above. No label is read, but who listed the genes knew tissue.
{sections} sections with {seeds} seeds each give no interval: compare the
sections.

"""


def write(config, study: runner.Study, workdir: Path) -> None:
  """Writes report/: table.md, csv files and the pictures."""
  out = workdir / 'report'
  names = [one.name for one in study.sections]
  found: dict[str, list[list[np.ndarray]]] = {
    'ridge': _once(ridge_predictions(study, neighbours=False)),
    'ridge, with mean of neighbours': _once(
      ridge_predictions(study, neighbours=True)
    ),
  }
  for name in config.models:
    found[name] = _predictions(workdir / name, study)
  rows = _rows(config, study, found)
  write_csv(out / 'expression.csv', rows)
  text = _TITLE + _table(rows, names) + _NOTE.format(
    genes=config.data.genes, top=config.report.top, count=len(names),
    seeds=config.train.runs,
  )  # fmt: skip
  _gene_curves(study, found, out / 'genes.png')
  _maps(config, study, found, out)
  if study.labelled:
    text += _region_report(config, study, workdir)
    text += _concept_report(config, study, workdir)
    text += contact_report.section(config, study, workdir)
  diverged = [
    name
    for name in sorted(p.parent.name for p in workdir.glob('*/result.json'))
    if json.loads((workdir / name / 'result.json').read_text())['diverged']
  ]
  text += f'\nParts with runs that diverged: {", ".join(diverged) or "none"}.\n'
  (out / 'table.md').write_text(text)


def _once(tables: list[np.ndarray]) -> list[list[np.ndarray]]:
  return [[table] for table in tables]


def _archive(folder: Path, evaluation: str, name: str) -> list[np.ndarray]:
  """[N, ...] of each run, which has seen one section there."""
  with np.load(folder / 'predictions.npz') as file:
    runs = sorted(
      int(key.split('/')[1])
      for key in file.files
      if key.startswith(f'{evaluation}/') and key.endswith(f'/{name}')
    )
    return [file[f'{evaluation}/{run}/{name}'][0] for run in runs]


def _predictions(folder: Path, study: runner.Study) -> list[list[np.ndarray]]:
  """Per tested section the predictions [n, G] of all seeds."""
  runs = _archive(folder, 'test', 'prediction')
  count = len(study.sections)
  return [
    [run[: len(study.sections[t].grid)] for run in runs[t::count]]
    for t in range(count)
  ]


def ridge(x: np.ndarray, y: np.ndarray, penalty: float) -> np.ndarray:
  """argmin_B |y - [x, 1] B|^2 + penalty |B|^2, the last row unpenalised.

  Args:
    x: [n, P].
    y: [n, G].
    penalty: > 0.

  Returns:
    [P + 1, G].
  """
  wide = np.concatenate([x, np.ones((len(x), 1))], 1)
  weight = np.diag([*[penalty] * x.shape[1], 0.0])
  return np.linalg.solve(wide.T @ wide + weight, wide.T @ y)


def _applied(x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
  return x @ coefficients[:-1] + coefficients[-1]


def neighbour_mean(x: np.ndarray, graph: PatchGraph) -> np.ndarray:
  """Mean of the neighbours of each spot, itself where it has none."""
  nbr, edge = np.asarray(graph.nbr), np.asarray(graph.emask)
  count = edge.sum(1, keepdims=True)
  total = np.where(edge[..., None], x[nbr], 0).sum(1)
  return np.where(count > 0, total / np.maximum(count, 1), x)


def ridge_predictions(
  study: runner.Study, *, neighbours: bool
) -> list[np.ndarray]:
  """Predictions [n, G] of each section by a ridge on the others.

  The penalty has the smallest squared error where one training section at a
  time is left out.
  """
  found = []
  for test, fold in enumerate(study.folds):
    x = fold.features
    if neighbours:
      x = [
        np.concatenate([one, neighbour_mean(one, graph)], 1)
        for one, graph in zip(x, study.graphs, strict=True)
      ]
    rest = [i for i in range(len(x)) if i != test]
    stack = lambda tables, chosen: np.concatenate([tables[i] for i in chosen])

    def error(penalty, x=x, y=fold.targets, rest=rest, stack=stack):
      total = 0.0
      for held in rest:
        seen = [i for i in rest if i != held]
        fit = ridge(stack(x, seen), stack(y, seen), penalty)
        total += float(((_applied(x[held], fit) - y[held]) ** 2).sum())
      return total

    penalty = min(_PENALTIES, key=error)
    fit = ridge(stack(x, rest), stack(fold.targets, rest), penalty)
    found.append(_applied(x[test], fit))
  return found


def _rows(config, study, found) -> list[dict[str, Any]]:
  """A row per model: means over sections, and each section."""
  top, rows = config.report.top, []
  scores: dict[str, list[dict[str, float]]] = {}
  for name, sections in found.items():
    scores[name], single = [], []
    for test, seeds in enumerate(sections):
      truth = study.folds[test].targets[test]
      summary = lambda x, truth=truth: expression_summary(truth, x, top)
      scores[name].append(summary(np.mean(seeds, 0)))
      single.append(np.mean([summary(x)['pearson'] for x in seeds]))
    mean = lambda key, name=name: float(np.mean([s[key] for s in scores[name]]))
    row: dict[str, Any] = {
      'model': name,
      'pearson': mean('pearson'),
      'pearson_top': mean('pearson_top'),
      'one_seed': float(np.mean(single)),
      'spearman': mean('spearman'),
      'mse': mean('mse'),
      'constant_genes': mean('constant_genes'),
    }
    for key in ('pearson', 'pearson_top'):
      row |= {
        f'{key}/{study.sections[t].name}': one[key]
        for t, one in enumerate(scores[name])
      }
    for other in ('ridge', 'ridge, with mean of neighbours'):
      gap = [
        a['pearson'] - b['pearson']
        for a, b in zip(scores[name], scores[other], strict=True)
      ]
      row |= {
        f'minus {other}': float(np.mean(gap)),
        f'minus {other}, least': min(gap),
        f'minus {other}, most': max(gap),
      }
      if name == other:
        break
    rows.append(row)
  return rows


def _table(rows: list[dict[str, Any]], names: Sequence[str]) -> str:
  others = ('ridge', 'ridge, with mean of neighbours')

  def gap(row, other):
    key = f'minus {other}'
    if key not in row or row['model'] == other:
      return ''
    least, most = row[f'{key}, least'], row[f'{key}, most']
    return f'{row[key]:+.3f} [{least:+.3f}, {most:+.3f}]'

  head = (
    'model', 'PCC', 'best genes', 'one seed', *names, 'MSE',
    *(f'minus {x}' for x in others),
  )  # fmt: skip
  body = [
    (
      r['model'], r['pearson'], r['pearson_top'], r['one_seed'],
      *(r[f'pearson/{x}'] for x in names), r['mse'],
      *(gap(r, x) for x in others),
    )
    for r in rows
  ]  # fmt: skip
  return markdown(head, body)


def _gene_curves(study, found, path: Path) -> None:
  """Correlations of all genes and sections, sorted."""
  with plots.figure(path, size=4.4) as (_, axes):
    ax = axes[0, 0]
    for i, (name, sections) in enumerate(found.items()):
      each = [
        pearson_per_gene(study.folds[t].targets[t], np.mean(seeds, 0))
        for t, seeds in enumerate(sections)
      ]
      values = np.sort(np.concatenate(each))
      values = values[np.isfinite(values)][::-1]
      ax.plot(
        np.arange(len(values)) / len(values), values, f'C{i}', lw=1.2,
        label=f'{name} {values.mean():.3f}',
      )  # fmt: skip
    ax.axhline(0, color='0.6', ls=':', lw=1)
    ax.set(
      xlabel='share of genes x sections', ylabel='Pearson correlation',
      title='genes of tested sections, sorted; legend: mean',
    )  # fmt: skip
    ax.title.set_fontsize(9)
    ax.legend(fontsize=7, frameon=False)


def _maps(config, study, found, out: Path) -> None:
  """The most variable genes of the first tested section, as they lie."""
  model, fold, section = config.models[-1], study.folds[0], study.sections[0]
  rows = []
  for gene in range(min(config.report.maps, len(fold.genes))):
    row = [
      tissue_plots.Panel(
        f'{fold.genes[gene]}: measured', fold.targets[0][:, gene], None,
        'standard deviations', (-2.0, 2.0),
      )
    ]  # fmt: skip
    for name in (model, 'ridge'):
      values = np.mean(found[name][0], 0)[:, gene]
      score = pearson_per_gene(fold.targets[0][:, [gene]], values[:, None])[0]
      row.append(
        tissue_plots.Panel(
          f'{name}, r = {score:.2f}', values, None,
          'standard deviations', (-1.0, 1.0),
        )
      )  # fmt: skip
    rows.append(row)
  tissue_plots.tissue_maps(
    out / f'expression_{section.name.replace(" ", "_")}.png',
    section.grid[:, ::-1], rows,
    f'{section.name}, tested: its most variable genes in the other sections',
  )  # fmt: skip


def diffuse(x: np.ndarray, graph: PatchGraph, steps: int) -> np.ndarray:
  """x_i <- x_i + sum_j (x_j - x_i) / K, `steps` times; conserves the sum."""
  nbr, edge = np.asarray(graph.nbr), np.asarray(graph.emask)
  for _ in range(steps):
    flow = np.where(edge[..., None], x[nbr] - x[:, None], 0)
    x = x + flow.sum(1) / nbr.shape[1]
  return x


def _clusters(x: np.ndarray, count: int, seed: int) -> np.ndarray:
  from sklearn.cluster import KMeans

  options: Any = {'n_init': 10, 'random_state': seed}
  return KMeans(count, **options).fit_predict(x)


def _entropy(labels: np.ndarray) -> float:
  share = np.unique(labels, return_counts=True)[1] / len(labels)
  return float(-(share * np.log(share)).sum())


def _labels(section: SpotSection) -> np.ndarray:
  if section.labels is None:
    raise ValueError(f'section {section.name} has no labels')
  return section.labels


def _region_report(config, study: runner.Study, workdir: Path) -> str:
  wanted, seeds = config.regions, config.train.runs
  soft = _archive(workdir / 'regions', 'seen', 'regions')
  hidden = _archive(workdir / 'regions', 'seen', 'hidden')
  scores: dict[str, list[float]] = {}
  count, usage = len(study.labelled), []
  sizes = [
    x[: len(study.labelled[run % count].grid)] for run, x in enumerate(soft)
  ]
  for i, section in enumerate(study.labelled):
    x = runner.region_tables(config, section)[0]
    smooth = diffuse(x, study.labelled_graphs[i], wanted.diffusion)
    size, shown = len(x), {}
    for seed in range(seeds):
      run, k = seed * count + i, wanted.clusters
      usage.append(len(np.unique(soft[run][:size].argmax(-1))))
      one = {
        'k-means': _clusters(x, k, seed),
        'diffusion, k-means': _clusters(smooth, k, seed),
        'TMEvolve, soft regions': soft[run][:size].argmax(-1),
        'TMEvolve, k-means of the field': _clusters(
          hidden[run][:size], k, seed
        ),
      }
      labels = _labels(section)
      told = ~np.isin(labels, _UNKNOWN)
      for name, found in one.items():
        value = adjusted_rand_index(labels[told], found[told])
        scores.setdefault(f'{name}\t{section.name}', []).append(value)
      shown = shown or one
    _region_maps(section, shown, soft[i][:size], workdir / 'report')
  names = list(dict.fromkeys(key.split('\t')[0] for key in scores))
  places = [one.name for one in study.labelled]
  rows = []
  for name in names:
    each = [scores[f'{name}\t{place}'] for place in places]
    row: dict[str, Any] = {'method': name, 'mean': float(np.mean(each))}
    row |= {p: float(np.mean(v)) for p, v in zip(places, each, strict=True)}
    row['seeds'] = ' '.join(f'{v:.3f}' for v in np.mean(each, 0))
    rows.append(row)
  write_csv(workdir / 'report' / 'regions.csv', rows)
  head = _REGIONS.format(
    clusters=wanted.clusters, seeds=seeds, components=wanted.components,
    genes=wanted.genes, steps=wanted.diffusion,
  )  # fmt: skip
  table = markdown(list(rows[0]), [tuple(r.values()) for r in rows])
  return head + table + _EVEN.format(
    regions=config.tmevolve.regions, used=np.mean(usage),
    soft=np.exp(np.mean([_entropy(s.argmax(-1)) for s in sizes])),
    labels=np.exp(np.mean([_entropy(_labels(s)) for s in study.labelled])),
  )  # fmt: skip


def _concept_report(config, study: runner.Study, workdir: Path) -> str:
  """The same index for every concept matrix, or nothing without any."""
  controls = runner.concept_controls(config, study)
  if not controls:
    return ''
  rows = []
  for name in controls:
    soft = _archive(workdir / f'regions_{name}', 'seen', 'regions')
    row: dict[str, Any] = {'concept rows': name, 'mean': 0.0}
    for i, section in enumerate(study.labelled):
      labels = _labels(section)
      told = ~np.isin(labels, _UNKNOWN)
      each = [
        adjusted_rand_index(labels[told], x[: len(labels)].argmax(-1)[told])
        for x in soft[i :: len(study.labelled)]
      ]
      row[section.name] = float(np.mean(each))
    row['mean'] = float(np.mean([row[s.name] for s in study.labelled]))
    rows.append(row)
  write_csv(workdir / 'report' / 'region_concepts.csv', rows)
  genes, _ = signature_table(study.labelled, config.contact)
  return _CONCEPTS.format(
    seeds=config.train.runs, count=len(genes), sections=len(study.labelled),
    groups=len(concept_rows(genes, 'given', config.seed)),
  ) + markdown(list(rows[0]), [tuple(r.values()) for r in rows])  # fmt: skip


def _region_maps(
  section: SpotSection, shown: Mapping[str, np.ndarray], soft, out: Path
):
  kinds, labels = np.unique(_labels(section), return_inverse=True)
  panels = [
    tissue_plots.Panel(
      f'{section.name}: pathologist', labels, [k or 'none' for k in kinds]
    )
  ]
  for name, found in shown.items():
    numbers = [str(k) for k in range(found.max() + 1)]
    panels.append(tissue_plots.Panel(name, found, numbers))
  panels.append(
    tissue_plots.Panel(
      'certainty of S', soft.max(-1), None, 'largest share', (0, 1)
    )
  )
  tissue_plots.tissue_maps(
    out / f'regions_{section.name.replace(" ", "_")}.png',
    section.grid[:, ::-1], [panels[:3], panels[3:]],
    f'{section.name}: clusters have no order, colours mean nothing across maps',
  )  # fmt: skip

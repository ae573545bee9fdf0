"""Report of `experiments/slides.py`: figures of every fold, curves, heat maps.

It reads predictions.csv and checkpoints from the working directory only.

Axes: n tested bags of all folds, F folds.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots, slides_plots, slides_predict
from experiments.slides_cohort import Study
from experiments.slides_tasks import concordance, make_task
from tmlib.mil import (
  auroc,
  confusion_matrix,
  expression_summary,
  pearson_per_gene,
)
from tmlib.mil.survival import concordance_index_ipcw
from tmlib.ops.statistics import bootstrap_interval

__all__ = ['write']

_NOTE = """
Each row is one model on the bags that it never saw; `mean` and `std` are over
the folds. Nothing was chosen on them: every model takes its
last step, and feature scaling, class weights and bins of time are of training
bags. `pooled` puts the tested bags of all folds together; its interval is a
bootstrap over patients ({samples} samples, 95 %, BCa), for these models: it
does not tell what other training runs would give. {pooling}
{patients}
"""


def write(
  config, study: Study, graph: str, workdir: Path, text: Any = None
) -> None:
  """Writes report/: table.md, folds.csv, pictures; and study.json."""
  out = workdir / 'report'
  tasks = [make_task(config, study, fold) for fold in study.folds]
  metas = [task.meta for task in tasks]
  slides_predict.write_study(config, study, graph, metas, workdir, text)
  found = [_read(workdir / fold.name) for fold in study.folds]
  merged = [_by_patient(study.cohort, one) for one in found]
  rows = []
  for k, (fold, one, task) in enumerate(
    zip(study.folds, found, tasks, strict=True)
  ):
    row = {'fold': fold.name, 'train': len(fold.train), 'test': len(one['id'])}
    metrics = task.summarize(one, {})
    if config.task.startswith('survival'):
      metrics['c_index_ipcw'] = _ipcw(study, fold, one)
    if all(merged):
      of_patients = task.summarize(merged[k], {})
      metrics |= {f'patient_{k}': value for k, value in of_patients.items()}
    rows.append(row | metrics)
  _write_csv(out / 'folds.csv', rows)
  pooled = {
    name: np.concatenate([one[name] for one in found]) for name in found[0]
  }
  pooled['fold'] = np.repeat(
    np.arange(len(found)), [len(one['id']) for one in found]
  )
  twice = len(np.unique(pooled['id'])) < len(pooled['id'])
  headline = _pictures(config, study, metas[0], pooled, out, twice)
  (out / 'table.md').write_text(_markdown(config, study, rows, headline))
  _heatmaps(config, study, found, workdir)


def _read(folder: Path) -> dict[str, np.ndarray]:
  """What predictions.csv says of the tested bags; columns x_0, x_1 are x."""
  with (folder / 'predictions.csv').open() as file:
    rows = [r for r in csv.DictReader(file) if r['evaluation'] == 'test']
  wide: dict[str, list[Any]] = {}
  for name in rows[0]:
    if name in ('evaluation', 'name'):
      continue
    stem, _, number = name.rpartition('_')
    key = stem if stem and number.isdigit() else name
    wide.setdefault(key, []).append([float(row[name]) for row in rows])
  found = {
    key: np.array(columns[0] if len(columns) == 1 else columns).T
    for key, columns in wide.items()
  }
  # More than 64 outputs are kept in an archive instead.
  archive = folder / 'predictions.npz'
  if archive.is_file():
    with np.load(archive) as file:
      for name in file.files:
        evaluation, _, key = name.split('/')
        if evaluation == 'test' and key != 'id':
          found[key] = file[name]
  for key in ('id', 'label'):
    if key in found:
      found[key] = found[key].astype(np.int64)
  for key in ('target', 'prediction'):
    if key in found and found[key].ndim == 1:
      found[key] = found[key][:, None]
  return found


def _by_patient(
  cohort: Any, one: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
  """Outputs averaged over the slides of a patient (late fusion).

  Empty where nobody in the cohort has several bags, or slides of one patient
  are of different classes: then there is no class of the patient.
  """
  if len(set(cohort.cases)) == len(cohort.cases):
    return {}
  cases = np.array([cohort.cases[i] for i in one['id']])
  _, first, owner = np.unique(cases, return_index=True, return_inverse=True)
  truth = [k for k in ('label', 'time', 'event', 'target') if k in one]
  if any((one[k] != one[k][first][owner]).any() for k in truth):
    return {}
  found = {key: one[key][first] for key in (*truth, 'id')}
  count = np.bincount(owner)
  for key in ('probability', 'risk', 'prediction'):
    if key in one:
      values = one[key].reshape(len(owner), -1)
      total = np.zeros((len(first), values.shape[1]))
      np.add.at(total, owner, values)
      mean = total / count[:, None]
      found[key] = mean.reshape(len(first), *one[key].shape[1:])
  return found


def _ipcw(study: Study, fold: Any, one: dict[str, np.ndarray]) -> float:
  time, event = (study.cohort.values[k] for k in ('time', 'event'))
  try:
    # Weights are not defined beyond the last training time.
    return concordance_index_ipcw(
      time[fold.train], event[fold.train], one['time'], one['event'],
      one['risk'], tau=float(time[fold.train].max()) * (1 - 1e-9),
    )  # fmt: skip
  except ValueError:
    return float('nan')


def _pictures(config, study, meta, pooled, out, twice) -> list[str]:
  """Draws, and returns sentences with the pooled figures."""
  cases = np.array([study.cohort.cases[i] for i in pooled['id']])
  options: Any = dict(groups=cases, samples=config.report.bootstrap)
  if config.task == 'subtype':
    return _subtype(meta['classes'], pooled, out, options, twice)
  if config.task == 'expression':
    return _expression(meta['targets'], pooled, out)
  lines = []
  # A Cox risk has no zero: only risks of one model can be compared.
  high, centred = np.zeros(len(cases), bool), pooled['risk'].copy()
  for k in np.unique(pooled['fold']):
    at = pooled['fold'] == k
    high[at] = pooled['risk'][at] > np.median(pooled['risk'][at])
    centred[at] -= np.median(pooled['risk'][at])
  unit = config.data.time_column or 'time'
  pvalue = slides_plots.survival_curves(
    out / 'survival.png', pooled['time'], pooled['event'], high, unit
  )
  if not twice:
    interval = bootstrap_interval(
      concordance, pooled['time'], pooled['event'], centred, **options
    )
    lines.append(
      f'C-index, pooled (risks less the median of their fold): '
      f'{_interval(interval)}; below .5 is worse than chance.'
    )
  lines.append(
    f'Log-rank test of the higher against the lower half: p = {pvalue:.3g}.'
  )
  return lines


def _subtype(classes, pooled, out, options, twice) -> list[str]:
  label, probability = pooled['label'], pooled['probability']
  guess = probability.argmax(1)
  matrix = confusion_matrix(label, guess, len(classes))
  slides_plots.confusion(out / 'confusion.png', matrix, classes)
  scores = probability[:, 1] if len(classes) == 2 else probability
  if twice:
    return ['Bags are tested by several models, so nothing is pooled.']
  interval = bootstrap_interval(auroc, label, scores, **options)
  if len(classes) == 2:
    legend = {'model': f'AUROC {_interval(interval)}'}
    plots.roc(
      out / 'roc.png', label, {'model': scores[:, None]},
      f'{classes[1]} against {classes[0]}', legend,
    )  # fmt: skip
  kind = '' if len(classes) == 2 else ' (macro, one against the rest)'
  return [f'AUROC, pooled{kind}: {_interval(interval)}.']


def _expression(names, pooled, out) -> list[str]:
  gene = pearson_per_gene(pooled['target'], pooled['prediction'])
  _write_csv(
    out / 'targets.csv',
    [
      {'target': name, 'pearson': value}
      for name, value in zip(names, gene, strict=True)
    ],
  )
  slides_plots.scatter(
    out / 'targets.png',
    gene,
    f'{len(gene)} targets over {len(pooled["id"])} bags',
  )
  summary = expression_summary(pooled['target'], pooled['prediction'])
  return [
    'Pooled: '
    + ', '.join(f'{name} {value:.3g}' for name, value in summary.items())
    + '.'
  ]


def _interval(interval: Any) -> str:
  return f'{interval.value:.3f} [{interval.low:.3f}, {interval.high:.3f}]'


def _markdown(config, study: Study, rows, headline) -> str:
  lines = [f'# {config.model}, {config.task}', '']
  lines += [f'- {text}' for text in headline]
  lines += ['', '## Folds', '']
  names = [name for name in rows[0] if name not in ('fold', 'train', 'test')]
  lines.append('| fold | train | test | ' + ' | '.join(names) + ' |')
  lines.append('|---' * (len(names) + 3) + '|')
  for row in rows:
    cells = [_cell(row[name]) for name in names]
    lead = [row['fold'], str(row['train']), str(row['test'])]
    lines.append('| ' + ' | '.join(lead + cells) + ' |')
  values = {name: np.array([row[name] for row in rows]) for name in names}
  for label, reduce in (('mean', np.mean), ('std', np.std)):
    cells = [_cell(_over_folds(reduce, values[name])) for name in names]
    lines.append(f'| {label} | | | ' + ' | '.join(cells) + ' |')
  pooling = (
    'Scores of different models are compared there, which may cost a little.'
  )
  patients = ''
  if any(name.startswith('patient_') for name in names):
    patients = (
      'Figures of `patient_` are of the mean over the slides of a patient.'
    )
  lines.append(
    _NOTE.format(
      samples=config.report.bootstrap, pooling=pooling, patients=patients
    ).rstrip()
    + '\n'
  )
  lines += ['## Data', '']
  lines += [f'- {text}' for text in study.findings or ('nothing to report',)]
  return '\n'.join(lines) + '\n'


def _over_folds(reduce, values: np.ndarray) -> float:
  """Over the folds where the metric has a value."""
  values = values[np.isfinite(values)]
  return float(reduce(values)) if len(values) else float('nan')


def _cell(value: float) -> str:
  return 'undefined' if np.isnan(value) else f'{value:.3f}'


def _write_csv(path: Path, rows: list[dict]) -> None:
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)


def _heatmaps(config, study: Study, found, workdir: Path) -> None:
  """Tested bags of the first fold, by the model that did not see them."""
  count = config.report.heatmaps
  chosen = np.sort(found[0]['id'])[:count]
  if not len(chosen):
    return
  predictor = slides_predict.Predictor(workdir, [0])
  reader = predictor.reader([study.cohort.files[i] for i in chosen])
  for place, i in enumerate(chosen):
    result = predictor(reader.read(place))
    start = 0
    for path, slide in zip(
      study.cohort.files[i], reader.slides(place), strict=True
    ):
      stop = start + len(slide.features)
      own = {
        name: value[start:stop]
        for name, value in result.items()
        if name != 'outputs'
      }
      start = stop
      slides_predict.write_heatmaps(
        workdir / 'report' / 'heatmaps', path.stem, slide, own
      )

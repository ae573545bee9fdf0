"""Report of `experiments/tmevolve.py`: the table, ROC, instances, embedding.

It reads predictions.csv and checkpoints from the working directory only.

Axes: n bags, R runs = seeds x folds.
"""

import csv
import json
from collections.abc import Mapping
from pathlib import Path

import jax
import numpy as np

from experiments import plots, tmevolve
from tmlib import train
from tmlib.data import BagSet, batch_bags
from tmlib.mil import (
  auroc,
  balanced_accuracy,
  over_repeats,
  pool_out_of_fold,
  pooled_logistic,
  scale_features,
)
from tmlib.ops.statistics import (
  bootstrap_difference,
  bootstrap_interval,
  detectable_difference,
)

__all__ = ['write']

# More curves than this cannot be told apart.
_CURVES = 7

_NOTE = """
Figures: AUC of the scores pooled over the folds of a repeat, then the mean over
the repeats ({seeds}). Intervals: {samples} bootstrap samples over *bags*, all
repeats of a bag kept together (95 %, BCa). `detectable`: a smaller true
difference to {reference} would be missed by so many bags more often than one
time in five, at the 5 % level and for these trained models; whether a given
difference is beyond chance is told by its interval, for one comparison at a
time. Pooling favours nobody but lies a little low: folds whose test bags are
positive train with fewer positives. Standardisation uses training bags only, a
bag's graph that bag alone; hyper-parameters are the same for all sets, and no
step or seed was picked on test folds. The penalty of the logistic regression
is one of two that were tried, chosen in hindsight by the figures of these sets.

These bags come without positions and without a text encoder: the patch graph is
a mutual {k}-NN graph in feature space, and TMEvolve's concepts are learned.
"""


def write(config, bagsets: Mapping[str, BagSet], workdir: Path) -> None:
  """Writes report/: table.md, table.csv, runs.csv and pictures per set."""
  out = workdir / 'report'
  rows, runs = [], []
  for name, bagset in bagsets.items():
    folds = tmevolve.make_folds(config, bagset)
    seeds = range(config.seed, config.seed + config.train.runs)
    table = {
      f'pooled logistic, {pool}': pooled_logistic(
        bagset, pool, config.data.folds, tuple(seeds)
      )
      for pool in ('mean', 'max')
    }
    for model in config.models:
      folder = workdir / tmevolve.part_name(config, name, model)
      table[model], found = _read(folder, folds, len(bagset.bags))
      runs += [{'set': name, 'model': model} | row for row in found]
    rows += _rows(config, name, bagset, table)
    _pictures(config, name, bagset, folds, table, rows, workdir)
  _write_csv(out / 'table.csv', rows)
  _write_csv(out / 'runs.csv', runs)
  (out / 'table.md').write_text(_markdown(rows) + _note(config, runs))


def _note(config, runs) -> str:
  text = _NOTE.format(
    seeds=config.train.runs,
    samples=config.report.bootstrap,
    reference=config.models[0],
    k=config.data.neighbours,
  )
  bad = [f'{r["set"]}/{r["model"]}/{r["run"]}' for r in runs if r['diverged']]
  return text + f'\nRuns that diverged: {", ".join(bad) or "none"}.\n'


def _read(folder: Path, folds: tmevolve.Folds, n: int):
  """Out-of-fold log-odds [n, repeats] of class 1, and a row per run."""
  with (folder / 'predictions.csv').open() as file:
    found = list(csv.DictReader(file))
  column = lambda key, kind=float: np.array([kind(row[key]) for row in found])
  run, ids, label = (column(k, int) for k in ('run', 'id', 'label'))
  odds = column('logits_1') - column('logits_0')
  diverged = json.loads((folder / 'result.json').read_text())['diverged']
  rows = []
  for r in range(len(folds.repeat)):
    at = run == r
    both = len(np.unique(label[at])) > 1
    rows.append({
      'run': r,
      'repeat': int(folds.repeat[r]),
      'bags': int(at.sum()),
      'auroc': auroc(label[at], odds[at]) if both else float('nan'),
      'accuracy': float(np.mean((odds[at] > 0) == label[at])),
      'diverged': r in diverged,
    })  # fmt: skip
  return pool_out_of_fold(ids, folds.repeat[run], odds, n), rows


def _rows(config, name: str, bagset: BagSet, table) -> list[dict]:
  labels, options = bagset.labels, {'samples': config.report.bootstrap}
  reference = table[config.models[0]]
  area = over_repeats(auroc)
  balanced = over_repeats(lambda y, s: balanced_accuracy(y, s > 0))
  rows = []
  for model, scores in table.items():
    interval = bootstrap_interval(area, labels, scores, **options)
    row = {
      'set': f'{name} ({len(labels)} bags)',
      'model': model,
      'auc': interval.value,
      'low': interval.low,
      'high': interval.high,
      'repeats': ' '.join(f'{auroc(labels, s):.3f}' for s in scores.T),
      'balanced_accuracy': balanced(labels, scores),
    }
    if model != config.models[0]:
      gap = bootstrap_difference(area, labels, scores, reference, **options)
      row |= {
        'difference': gap.value,
        'difference_low': gap.low,
        'difference_high': gap.high,
        'detectable': detectable_difference(gap.standard_error),
      }
    rows.append(row)
  return rows


def _markdown(rows: list[dict]) -> str:
  head = (
    '| set | model | AUC [95 %] | repeats | balanced accuracy | minus'
    ' reference [95 %] | detectable |\n|---|---|---|---|---|---|---|\n'
  )
  lines = []
  for r in rows:
    gap = detect = ''
    if 'difference' in r:
      gap = '{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]'
      gap, detect = gap.format(**r), f'{r["detectable"]:.3f}'
    area = '{auc:.3f} [{low:.3f}, {high:.3f}]'.format(**r)
    lines.append(
      f'| {r["set"]} | {r["model"]} | {area} | {r["repeats"]} |'
      f' {r["balanced_accuracy"]:.3f} | {gap} | {detect} |'
    )
  return head + '\n'.join(lines) + '\n'


def _write_csv(path: Path, rows: list[dict]) -> None:
  fields = list(dict.fromkeys(key for row in rows for key in row))
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, fields)
    writer.writeheader()
    writer.writerows(rows)


def _pictures(config, name, bagset, folds, table, rows, workdir: Path) -> None:
  stem = f'{Path(name).stem}_' if len(config.data.sets) > 1 else ''
  out = workdir / 'report'
  legend = {
    r['model']: f'{r["model"]} {r["auc"]:.2f} [{r["low"]:.2f}, {r["high"]:.2f}]'
    for r in rows
    if r['set'].startswith(f'{name} (')
  }
  if len(table) <= _CURVES:
    plots.roc(
      out / f'{stem}roc.png', bagset.labels, table,
      f'{name}: pooled out-of-fold scores\nthin: each repeat',
      legend,
    )  # fmt: skip
  plots.intervals(
    out / f'{stem}auc.png',
    [
      (r['model'], r['auc'], r['low'], r['high'])
      for r in rows
      if r['set'].startswith(f'{name} (')
    ],
    f'{name}: AUC of pooled out-of-fold scores, mean of the repeats\n'
    '95 % bootstrap over bags; dotted: the first line',
    'AUC',
  )
  if 'tmevolve' not in config.models:
    return
  folder = workdir / tmevolve.part_name(config, name, 'tmevolve')
  bags, seen = _trace(config, bagset, folds, train.load_params(folder))
  order = np.argsort(-table['tmevolve'].mean(1), kind='stable')
  shown = [i for i in order if i in bags][: config.report.bags]
  picture = [
    (f'bag {bagset.names[i]}, label {bagset.labels[i]}', *bags[i])
    for i in shown
  ]
  plots.ranked_instances(
    out / f'{stem}ranked_instances.png', picture,
    f'{name}: bags by score, highest first (mean of all repeats);'
    ' attention and regions are those of the first repeat,\nfrom the'
    ' model whose fold held the bag out; region numbers mean nothing across'
    ' folds',
  )  # fmt: skip
  rank = lambda a: np.argsort(np.argsort(-a, kind='stable')) + 1
  _write_csv(out / f'{stem}instances.csv', [
    {'bag': bagset.names[i], 'instance': j, 'rank': int(k),
     'attention': float(a), 'region': int(r)}
    for i, (attention, region) in bags.items()
    for j, (k, a, r) in enumerate(
      zip(rank(attention), attention, region, strict=True))
  ])  # fmt: skip
  plots.embedding(
    out / f'{stem}embedding.png', seen['hidden'],
    [(key, seen[key]) for key in ('region', 'concept', 'label')],
    f'{name}: evolved features of held-out instances, one fold',
  )  # fmt: skip


def _trace(config, bagset: BagSet, folds: tmevolve.Folds, params):
  """Looks into the models of the first repeat, each on its held-out bags.

  Returns:
    {bag: (attention [N], region [N])} over all bags, and the instances of the
    first fold: hidden [n, D], region, concept, label [n]. Regions are numbered
    within a model: only one fold's may share a picture.
  """
  model = tmevolve.make_model(config, 'tmevolve', len(bagset.classes))

  @jax.jit
  def apply(params, bag):
    return model.apply({'params': params}, bag, trace=True)

  bags, seen = {}, {}
  for run in np.flatnonzero(folds.repeat == 0):
    test = np.flatnonzero(folds.test[run])
    batch = batch_bags([bagset.bags[i] for i in test])
    batch = scale_features(
      batch, jax.numpy.full(len(test), run), folds.statistics
    )
    one = jax.tree.map(lambda x, run=run: x[run], params)
    output = jax.device_get(apply(one, batch))
    region = output.extras['regions'].argmax(-1)
    for row, i in enumerate(test):
      real = np.asarray(bagset.bags[i].mask)
      size = len(real)
      bags[i] = output.attention[row, :size][real], region[row, :size][real]
    if not seen:
      mask = np.asarray(batch.mask)
      label = np.broadcast_to(bagset.labels[test][:, None], mask.shape)
      seen = {
        'hidden': output.extras['hidden'][mask],
        'region': region[mask],
        'concept': output.extras['concepts'].argmax(-1)[mask],
        'label': label[mask],
      }
  return dict(sorted(bags.items())), seen

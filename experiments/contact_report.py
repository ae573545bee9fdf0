"""Contact section of the report of `tmevolve_expression`.

Axes: W windows, R seeds, s sections.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import contact_windows as windows
from experiments import plots
from experiments.contact import Task, make_task
from experiments.planted_report import markdown, write_csv
from tmlib.mil import auroc
from tmlib.ops.statistics import Interval, detectable_difference

__all__ = ['composition_scores', 'read_scores', 'section', 'within_auroc']

_LABELS = """
# Contact of {a} and {b}

Windows of {size} x {size} spots that hold both of the pathologist's labels, by
whether they touch, and the windows that could be matched: both answers, one
section, equal numbers of spots of both kinds.

"""
_FEW = """
Leaving out one patient at a time needs matched windows of both answers in at
least two patients; these labels have them in {found}: on the pathologist's
labels the task cannot be run.
"""
_MARKERS = """
# Contact, told by marker genes

What can be run instead. A spot is immune if the mean of its standardised
markers ({immune}) is among the highest {immune_share:.0%} of its section, and
tumour if it is not and that of {tumour} is among the highest
{tumour_share:.0%}. Windows of {size} x {size} spots that hold both, matched as
above; they touch if two spots share a side. Shares, size and what counts as
touching were fixed by the counts below, before any model was trained.

"""
_NOTE = """
AUC among the windows of one section, mean over sections by their windows; of
scores averaged over {seeds} seeds, beside the mean of single seeds. Intervals
(95 %) and standard errors are of a bootstrap over squares of {size} x {size}
spots, since windows overlap; windows of adjoining squares still share spots, so
they are somewhat too narrow, and they speak of these sections, not of other
patients. `detectable`: a smaller true difference from the row that it is
compared with would be missed more often than one time in five. `composition`
is a logistic regression on the shares of both kinds and the number of spots,
and must be at chance. Settings are those of `configs/touching_blobs.py`; the
last step is taken.

`stain`: {stain}. `expression`: {components} components of {genes} genes, none
of them a marker, leaving out a patient. `kinds`: the two kinds themselves, as
they were told, leaving out a patient: what so many windows can teach at all.
"""
_STAIN = (
  '17 features of colour and texture of the image, leaving out a section of '
  'one patient (of others there is no image): a within-patient figure'
)
_CONCEPTS = """
Concept rows: patches are embedded by {count} genes of {groups} kinds of cells
and tissue, none of them a marker. `given`: a row per kind, of its genes;
`shuffled`: the rows with their genes permuted; `random`: as many genes, drawn
for each row alone; `projected`: the given rows, and a learned map of the
components in place of the genes. `learned` is tmevolve above, without rows.
Compared with `given`.

"""


def section(config, study: Any, workdir: Path) -> str:
  """The text; writes contact.csv, contact_windows.csv and contact.png."""
  contact, out = config.contact, workdir / 'report'
  text = _labelled(config, study)
  parts = [
    (name, task)
    for name in contact.inputs
    if (task := make_task(config, study, name)) is not None
  ]
  text += _MARKERS.format(
    immune=', '.join(contact.immune), tumour=', '.join(contact.tumour),
    immune_share=contact.immune_share, tumour_share=contact.tumour_share,
    size=contact.window,
  )  # fmt: skip
  text += _counts(config, study, out)
  if not parts:
    return text + '\nToo few windows match to leave any out.\n'
  rows, concepts = [], []
  for name, task in parts:
    rows += _rows(config, task, name, workdir)
    if name == 'expression' and task.genes and contact.concepts:
      concepts = _concept_rows(config, task, workdir)
  write_csv(out / 'contact.csv', rows + concepts)
  stain = _STAIN if any(r['input'] == 'stain' for r in rows) else 'not here'
  text += '\n' + _table(rows, 'uniform') + _NOTE.format(
    seeds=contact.seeds, size=contact.window, stain=stain,
    components=contact.components, genes=contact.genes,
  )  # fmt: skip
  if concepts:
    genes = next(t.genes for n, t in parts if n == 'expression')
    given = windows.concept_rows(genes, 'given', 0)
    text += _CONCEPTS.format(count=len(genes), groups=len(given))
    text += _table(concepts, 'given')
  plots.intervals(
    out / 'contact.png',
    [(f'{r["input"]}: {r["model"]}', r['auc'], r['low'], r['high'])
     for r in rows + concepts],
    'do tumour and immune tissue touch? matched windows', 'AUC within sections',
  )  # fmt: skip
  return text


def _labelled(config, study: Any) -> str:
  """Counts of windows by the pathologist's labels."""
  pair, size = tuple(config.regions.pair), config.regions.window
  rows, matched = [], 0
  for one in study.labelled:
    found = windows.find_windows(
      one.grid, one.labels, size, pair=pair, corners=True
    )
    pairs = len(windows.match_windows(found, 0)) // 2
    matched += pairs > 0
    spots = [int((one.labels == kind).sum()) for kind in pair]
    touch = sum(w.touch for w in found)
    rows.append((one.name, *spots, touch, len(found) - touch, pairs))
  text = _LABELS.format(a=pair[0], b=pair[1], size=size)
  text += markdown(('section', *pair, 'touch', 'apart', 'matched pairs'), rows)
  return text + _FEW.format(found=matched) if matched < 2 else text


def _counts(config, study: Any, out: Path) -> str:
  """Counts of windows by marker genes, all sections."""
  contact, rows = config.contact, []
  for one in (*study.labelled, *study.sections):
    kinds = windows.spot_kinds(one, contact)
    found = windows.find_windows(one.grid, kinds, contact.window)
    touch = sum(w.touch for w in found)
    rows.append({
      'section': one.name,
      'immune': int((kinds == windows.IMMUNE).sum()),
      'tumour': int((kinds == windows.TUMOUR).sum()),
      'touch': touch,
      'apart': len(found) - touch,
      'matched pairs': len(windows.match_windows(found, config.seed)) // 2,
    })  # fmt: skip
  write_csv(out / 'contact_windows.csv', rows)
  return markdown(list(rows[0]), [tuple(r.values()) for r in rows])


def read_scores(folder: Path, task: Task, seeds: int) -> np.ndarray:
  """Log-odds [W, R] of the windows, each from the run that left it out.

  A seed of which a run diverged is left out.
  """
  scores = np.full((len(task.windows), seeds), np.nan)
  with (folder / 'predictions.csv').open(newline='') as file:
    for row in csv.DictReader(file):
      seed = int(row['run']) // len(task.folds)
      odds = float(row['logits_1']) - float(row['logits_0'])
      scores[int(row['id']), seed] = odds
  scores = scores[:, np.isfinite(scores).all(0)]
  if not scores.shape[1]:
    raise ValueError(f'{folder}: no seed has a score for every window')
  return scores


def composition_scores(task: Task) -> np.ndarray:
  """Log-odds [W] of logistic regressions on what a window is made of."""
  from sklearn.linear_model import LogisticRegression

  total = np.array([len(w.spots) for w in task.windows], float)
  counts = np.array([w.counts for w in task.windows])
  table = np.column_stack([counts / total[:, None], total])
  table = (table - table.mean(0)) / np.maximum(table.std(0), 1e-9)
  touch = np.array([w.touch for w in task.windows])
  scores = np.zeros(len(touch))
  for fold in range(len(task.folds)):
    held = task.fold == fold
    fit = LogisticRegression().fit(table[~held], touch[~held])
    scores[held] = fit.decision_function(table[held])
  return scores


def within_auroc(
  places: np.ndarray, labels: np.ndarray, scores: np.ndarray
) -> float:
  """Mean of the AUCs within sections, by the windows of each.

  Args:
    places: [W], section of each window.
    labels: [W], 0 or 1.
    scores: [W].

  Returns:
    The mean over sections that have both labels, NaN where none has.
  """
  values, weights = [], []
  for place in np.unique(places):
    at = places == place
    if np.ptp(labels[at]):
      values.append(auroc(labels[at], scores[at]))
      weights.append(at.sum())
  return float(np.average(values, weights=weights)) if values else np.nan


class _Comparison:
  """AUCs of one set of windows, and their intervals."""

  def __init__(self, task: Task, size: int, samples: int):
    self.places = np.array([w.section for w in task.windows])
    self.labels = np.array([int(w.touch) for w in task.windows])
    corners = np.array([w.corner for w in task.windows]) // size
    blocks = np.column_stack([self.places, corners])
    groups = np.unique(blocks, axis=0, return_inverse=True)[1].reshape(-1)
    count = int(groups.max()) + 1
    drawn = np.random.default_rng(0).multinomial(
      count, [1 / count] * count, samples
    )
    # How often each window is there: once, and in each sample.
    self._times = np.concatenate([np.ones((1, count)), drawn])[:, groups]

  def auc(self, scores: np.ndarray) -> float:
    """`within_auroc` on these windows."""
    return within_auroc(self.places, self.labels, scores)

  def _aucs(self, scores: np.ndarray) -> np.ndarray:
    """`within_auroc` on the windows, then on each sample of squares."""
    total, weight = np.zeros((2, len(self._times)))
    for place in np.unique(self.places):
      first, second = (
        np.flatnonzero((self.places == place) & (self.labels == label))
        for label in (1, 0)
      )
      gap = np.sign(scores[first][:, None] - scores[second])
      one, two = self._times[:, first], self._times[:, second]
      wins = np.einsum('sa,ab,sb->s', one, (1 + gap) / 2, two, optimize=True)
      pairs = one.sum(1) * two.sum(1)
      size = (one.sum(1) + two.sum(1)) * (pairs > 0)
      total += size * wins / np.maximum(pairs, 1)
      weight += size
    return total / np.where(weight > 0, weight, np.nan)

  def interval(self, scores: np.ndarray, other: np.ndarray) -> Interval:
    """Of the AUC less that of the other scores; constant ones have 1/2."""
    gap = self._aucs(scores) - self._aucs(other)
    value, draws = float(gap[0]), gap[1:][np.isfinite(gap[1:])]
    low, high = np.quantile(draws, [0.025, 0.975])
    return Interval(
      value, float(low), float(high), float(draws.std(ddof=1)), 0.95,
      'percentile', len(gap) - 1, len(gap) - 1 - len(draws),
      float(draws.mean()) - value,
    )  # fmt: skip


def _compared(
  config, task: Task, name: str, scores: Mapping[str, np.ndarray], control: str
) -> list[dict[str, Any]]:
  """A row per model; `scores` are [W, R]."""
  judge = _Comparison(task, config.contact.window, config.contact.bootstrap)
  nothing, rows = np.zeros(len(task.windows)), []
  for model, table in scores.items():
    mean = table.mean(1)
    seen = judge.interval(mean, nothing)
    row: dict[str, Any] = {
      'input': name, 'model': model, 'windows': len(mean),
      'auc': 0.5 + seen.value, 'low': 0.5 + seen.low, 'high': 0.5 + seen.high,
      'one_seed': float(np.mean([judge.auc(x) for x in table.T])),
    }  # fmt: skip
    for i, place in enumerate(task.sections):
      at = judge.places == i
      if at.any():
        row[place] = auroc(judge.labels[at], mean[at])
    if control in scores and model != control:
      gap = judge.interval(mean, scores[control].mean(1))
      row |= {
        'difference': gap.value, 'gap_low': gap.low, 'gap_high': gap.high,
        'detectable': detectable_difference(gap.standard_error),
      }  # fmt: skip
    else:
      row['detectable'] = detectable_difference(seen.standard_error)
    rows.append(row)
  return rows


def _rows(config, task: Task, name: str, workdir: Path) -> list[dict[str, Any]]:
  scores = {'composition': composition_scores(task)[:, None]}
  for model in config.contact.models:
    folder = workdir / f'contact_{name}_{model}'
    scores[model] = read_scores(folder, task, config.contact.seeds)
  return _compared(config, task, name, scores, 'uniform')


def _concept_rows(config, task: Task, workdir: Path) -> list[dict[str, Any]]:
  scores = {
    rows: read_scores(
      workdir / f'contact_concepts_{rows}', task, config.contact.seeds
    )
    for rows in config.contact.concepts
  }
  return _compared(config, task, 'concepts', scores, 'given')


def _table(rows: Sequence[dict[str, Any]], control: str) -> str:
  body = []
  for r in rows:
    gap = ''
    if 'difference' in r:
      gap = '{difference:+.3f} [{gap_low:+.3f}, {gap_high:+.3f}]'.format(**r)
    body.append((
      r['input'], r['model'], r['windows'], r['auc'],
      '[{low:.3f}, {high:.3f}]'.format(**r), r['one_seed'], gap,
      r['detectable'],
    ))  # fmt: skip
  head = (
    'input', 'model', 'windows', 'AUC', '95 %', 'one seed',
    f'minus {control} [95 %]', 'detectable',
  )  # fmt: skip
  return markdown(head, body)

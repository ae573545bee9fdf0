"""What the reports of planted tasks share: scores, intervals, traces, tables.

Everything is read from the working directory: predictions.csv, result.json,
metrics.jsonl and the checkpoints.

Axes: R runs, n bags, N patches, T steps, K slots.
"""

import csv
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from experiments import planted, tissue_plots
from kernels_pallas.graph import PatchGraph
from tmlib.mil import auroc

__all__ = [
  'best_run',
  'examples',
  'field_pictures',
  'intervals',
  'markdown',
  'read_scores',
  'region_markdown',
  'region_table',
  'seconds',
  'trace',
  'write_csv',
]


def read_scores(
  folder: Path, evaluation: str, runs: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
  """Labels [n] and log-odds of class 1 [n, R] of some runs of a part.

  Args:
    folder: of the part.
    evaluation: 'validation' or 'test'.
    runs: which; they must have been evaluated on the same bags.

  Returns:
    labels, scores, in the order of the bags' ids.
  """
  rows = _predictions(folder)
  scores, labels = [], np.zeros(0)
  for run in runs:
    found = sorted(rows[evaluation, run])
    labels = np.array([label for _, label, _ in found])
    scores.append([odds for _, _, odds in found])
  return labels.astype(int), np.array(scores).T


@functools.lru_cache(maxsize=4)
def _predictions(folder: Path) -> dict[tuple[str, int], list]:
  """{(evaluation, run): [(id, label, log-odds)]}."""
  found: dict[tuple[str, int], list] = {}
  with (folder / 'predictions.csv').open(newline='') as file:
    for row in csv.DictReader(file):
      odds = float(row['logits_1']) - float(row['logits_0'])
      key = row['evaluation'], int(row['run'])
      found.setdefault(key, []).append(
        (int(row['id']), int(row['label']), odds)
      )
  return found


def intervals(
  labels: np.ndarray, scores: np.ndarray, samples: int
) -> dict[str, Any]:
  """AUC over runs, with an interval over runs and test bags together.

  Args:
    labels: [n], 0 or 1.
    scores: [n, R].
    samples: of the bootstrap.

  Returns:
    mean, median, min, low and high (see `crossed_interval`), each.
  """
  each = np.array([auroc(labels, s) for s in scores.T])
  low, high = crossed_interval(labels, scores, samples)
  return {
    'mean': float(each.mean()),
    'median': float(np.median(each)),
    'min': float(each.min()),
    'low': low,
    'high': high,
    'each': each,
  }


def difference(
  labels: np.ndarray, first: np.ndarray, second: np.ndarray, samples: int
) -> dict[str, Any]:
  """Mean AUC of the first minus that of the second, run by run.

  Args:
    labels: [n], 0 or 1.
    first: [n, R].
    second: [n, R], on the same bags.
    samples: of the bootstrap.

  Returns:
    difference, difference_low, difference_high (see `crossed_interval`), and
    seeds_ahead, the number of runs in which the first is ahead.
  """
  gaps = np.array([
    auroc(labels, a) - auroc(labels, b)
    for a, b in zip(first.T, second.T, strict=True)
  ])  # fmt: skip
  low, high = crossed_interval(labels, first, samples, second)
  return {
    'difference': float(gaps.mean()),
    'difference_low': low,
    'difference_high': high,
    'seeds_ahead': int((gaps > 0).sum()),
  }


def crossed_interval(
  labels: np.ndarray,
  scores: np.ndarray,
  samples: int,
  other: np.ndarray | None = None,
) -> tuple[float, float]:
  """95 % percentile bootstrap over runs *and* bags of a mean AUC.

  Every sample draws runs and bags anew: runs alone share their test bags, bags
  alone share their trained models, and either interval would be too short.

  Args:
    labels: [n], 0 or 1.
    scores: [n, R].
    samples: number of samples.
    other: [n, R], whose AUC is taken off, run by run, or None.

  Returns:
    low, high.
  """
  rng = np.random.default_rng(0)
  n, runs = scores.shape
  means = []
  while len(means) < samples:
    bags = rng.integers(n, size=n)
    if np.ptp(labels[bags]) == 0:
      continue
    value = 0.0
    for run in rng.integers(runs, size=runs):
      value += auroc(labels[bags], scores[bags, run])
      if other is not None:
        value -= auroc(labels[bags], other[bags, run])
    means.append(value / runs)
  low, high = np.quantile(means, [0.025, 0.975])
  return float(low), float(high)


def seconds(folder: Path) -> tuple[float, float]:
  """Seconds of stepping and of compiling the step, from what the loop wrote."""
  stepping, before = 0.0, 0
  for line in (folder / 'metrics.jsonl').read_text().splitlines():
    row = json.loads(line)
    rate = row.get('progress/steps_per_second')
    if rate:
      stepping += (row['step'] - before) / rate
      before = row['step']
  costs = json.loads((folder / 'result.json').read_text())['costs']
  return stepping, sum(cost['seconds'] for cost in costs)


def best_run(folder: Path, runs: Sequence[int]) -> int:
  """The run with the highest AUC on validation bags."""
  labels, scores = read_scores(folder, 'validation', runs)
  return runs[int(np.argmax([auroc(labels, s) for s in scores.T]))]


def examples(labels: np.ndarray, count: int) -> np.ndarray:
  """The first bags of label 1 and of label 0, `count` in all."""
  half = max(1, count // 2)
  return np.concatenate([np.flatnonzero(labels == y)[:half] for y in (1, 0)])


@functools.lru_cache(maxsize=4)
def _tracer(model: nn.Module) -> Callable[..., Any]:
  """The compiled look into a model, shared by all of its parameters."""

  @jax.jit
  def apply(params, bag):
    output: Any = model.apply({'params': params}, bag, trace=True)
    return output.logits, output.attention, output.extras

  return apply


def trace(
  model: nn.Module,
  params: Any,
  features: np.ndarray,
  graph: PatchGraph,
  concepts: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
  """Looks into one run of a TMEvolve on some bags of one grid.

  Args:
    model: TMEvolve.
    params: of one run.
    features: [n, N, P].
    graph: of the grid, leaves [N, K].
    concepts: [n, N, Q] or None.

  Returns:
    probability [n], attention [n, N], regions [n, N, R], concepts [n, N, M],
    hidden [n, N, D]; with steps, flux, energy_intra and energy_inter [n, T + 1,
    N] and, where there are regions in the dynamics, same_region [n, N, K].
  """
  bag = planted.grid_bag(features, graph, concepts)
  logits, attention, extras = jax.device_get(_tracer(model)(params, bag))
  odds = logits[:, 1] - logits[:, 0]
  probability = 1 / (1 + np.exp(-odds))
  return {'probability': probability, 'attention': attention} | extras


def region_table(
  model: nn.Module,
  stages: Mapping[str, Any],
  features: np.ndarray,
  kinds: np.ndarray,
  graph: PatchGraph,
) -> list[dict[str, Any]]:
  """Do regions respect the planted compartments, before and after training?

  Args:
    model: TMEvolve whose dynamics read regions.
    stages: {'start' or 'end': parameters [R, ...]}.
    features: [n, N, P].
    kinds: [n, N], true compartments.
    graph: of the grid.

  Returns:
    A row per stage: mean rho over edges inside a compartment and mean beta = 1
    - rho over edges across two, mean, min and max over runs.
  """
  nbr, edge = np.asarray(graph.nbr), np.asarray(graph.emask)
  equal = kinds[:, nbr] == kinds[:, :, None]
  inside, across = edge & equal, edge & ~equal
  rows = []
  for stage, params in stages.items():
    found: dict[str, list[float]] = {'rho_inside': [], 'beta_across': []}
    for run in range(len(jax.tree.leaves(params)[0])):
      one = planted.take_runs(params, run)
      rho = trace(model, one, features, graph)['same_region']
      found['rho_inside'].append(float(rho[inside].mean()))
      found['beta_across'].append(float(1 - rho[across].mean()))
    row: dict[str, Any] = {'stage': stage}
    for name, values in found.items():
      row |= {
        name: float(np.mean(values)),
        f'{name}_min': min(values),
        f'{name}_max': max(values),
      }
    rows.append(row)
  return rows


def region_markdown(
  rows: Sequence[Mapping[str, Any]], lead: Sequence[str]
) -> str:
  """The rows of `region_table`, with further columns `lead` before them."""
  cell = lambda r, key: '{:.2f} [{:.2f}, {:.2f}]'.format(
    *(r[key + end] for end in ('', '_min', '_max'))
  )
  return markdown(
    (*lead, 'when', 'rho inside', 'beta across'),
    [
      (
        *(r[name] for name in lead),
        r['stage'],
        cell(r, 'rho_inside'),
        cell(r, 'beta_across'),
      )
      for r in rows
    ],
  )


def field_pictures(
  out: Path,
  stem: str,
  title: str,
  positions: np.ndarray,
  kinds: np.ndarray,
  labels: np.ndarray,
  names: Sequence[str],
  seen: Mapping[str, np.ndarray],
  shown: np.ndarray,
  *,
  flux: bool,
) -> None:
  """Writes <stem>_fields.png and, where asked for, <stem>_flux.png.

  Args:
    out: folder.
    stem: of the file names.
    title: of both pictures.
    positions: [N, 2].
    kinds: [n, N], true compartments.
    labels: [n].
    names: of the compartments.
    seen: what `trace` returns for these bags.
    shown: [m] int, bags to show, a row each.
    flux: whether the model has boundaries.
  """
  fields = ('regions', 'concepts', 'attention')
  heading = lambda i: (
    f'label {labels[i]}, predicted {seen["probability"][i]:.2f}\n'
  )
  rows = [
    tissue_plots.field_panels(
      kinds[i], names, {key: seen[key][i] for key in fields}, heading(i)
    )
    for i in shown
  ]
  tissue_plots.tissue_maps(out / f'{stem}_fields.png', positions, rows, title)
  if flux:
    rows = [
      tissue_plots.flux_panels(seen['flux'][i], heading(i)) for i in shown
    ]
    tissue_plots.tissue_maps(out / f'{stem}_flux.png', positions, rows, title)


def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """A table; floats with three digits."""
  text = lambda x: f'{x:.3f}' if isinstance(x, float) else str(x)
  lines = [list(head), ['---'] * len(head), *rows]
  return ''.join('| ' + ' | '.join(map(text, row)) + ' |\n' for row in lines)


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
  """All rows, with the union of their columns."""
  fields = list(dict.fromkeys(key for row in rows for key in row))
  with path.open('w', newline='') as file:
    writer = csv.DictWriter(file, fields)
    writer.writeheader()
    writer.writerows(rows)

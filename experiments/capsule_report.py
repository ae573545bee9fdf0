"""Report of `capsule`: the whole curve, tables and fields on the tissue.

Axes: L points, R runs (L x seeds), n test bags of a point, N patches.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import capsule, planted, planted_report, tissue_plots
from tmlib import train
from tmlib.mil import auroc, over_repeats

__all__ = ['write']

_CONTROL, _OURS = 'uniform', 'tmevolve'

_NOTE = """
Test AUC, mean over {runs} seeds per point and model, [95 % bootstrap over seeds
and the {bags} test bags of the point together]; the last step is used. The
design was fixed in pilots on other simulation seeds. Every point has tissue and
noise of its own, for training as for testing, so points are independent; each
has one training set, of which no interval speaks. All models share width and
optimizer, the variants of TMEvolve also steps of diffusion and readout.
`uniform` is plain diffusion, `uniform_relax` adds a learned nonlinear reaction,
which makes it an ordinary graph network with shared weights; `static` and
`gated_abmil` see no neighbours. Compare models at one point, not points:
thickness also changes how many cells there are and how wide.
"""

_CLAIM = """
{ours} against {control}: its interval of the paired difference lies above
zero at {above} of {points} points, below at {below}. The mean difference
over points is {gap:+.3f}, the largest {most:+.3f}
({most_at}), the least {least:+.3f} ({least_at}).
One may conclude so much about this simulated task at this width and budget; not
that real slides are of its kind, nor that a wider or nonlinear control could
not close the gap (see the other columns).
"""

_REGION_NOTE = """
Mean over the edges of the test bags looked at, then over seeds [least, largest
seed]. rho inside: probability that two neighbours of one planted compartment
share a region; beta across: that neighbours of two compartments do not. Tumour
and immune cells count as two compartments, though at the higher noise levels a
single patch hardly tells them apart: what is left is the border of the capsule.
"""


def write(
  config,
  parts: Mapping[str, train.Experiment],
  test: capsule.Points,
  workdir: Path,
) -> None:
  """Writes report/: table.md, table.csv, regions.csv and pictures."""
  out = workdir / 'report'
  rows = [
    _row(config, name, point, workdir)
    for point in range(len(capsule.points(config)))
    for name in config.models
  ]
  planted_report.write_csv(out / 'table.csv', rows)
  text = f'# {_title(config)}\n\n' + _table(config, rows)
  text += _NOTE.format(runs=config.train.runs, bags=config.data.test_bags)
  text += _claims(config, rows) + _costs(config, workdir)
  regions = _regions(config, parts, test, workdir)
  if regions:
    planted_report.write_csv(out / 'regions.csv', regions)
    text += '\n# Regions and the truth\n\n'
    text += planted_report.region_markdown(
      regions, ('model', 'thickness', 'noise')
    )
    text += _REGION_NOTE
  (out / 'table.md').write_text(text)
  _curves(config, rows, out)
  _pictures(config, test, workdir)


def _title(config) -> str:
  if config.data.task == 'pairs':
    return 'Which pairs touch, over noise and thickness of the layers'
  return 'Excluded or infiltrated, over noise and thickness of the capsule'


def _runs(config, point: int) -> range:
  return range(point * config.train.runs, (point + 1) * config.train.runs)


def _row(config, name: str, point: int, workdir: Path) -> dict[str, Any]:
  samples, runs = config.report.bootstrap, _runs(config, point)
  thickness, noise = capsule.points(config)[point]
  labels, scores = planted_report.read_scores(workdir / name, 'test', runs)
  found = planted_report.intervals(labels, scores, samples)
  each = found.pop('each')
  check = planted_report.read_scores(workdir / name, 'validation', runs)
  row = {'thickness': thickness, 'noise': noise, 'model': name} | found
  row['validation'] = over_repeats(auroc)(*check)
  row['each_seed'] = ' '.join(f'{x:.3f}' for x in each)
  if name == _CONTROL or _CONTROL not in config.models:
    return row
  _, other = planted_report.read_scores(workdir / _CONTROL, 'test', runs)
  return row | planted_report.difference(labels, scores, other, samples)


def _table(config, rows: list[dict[str, Any]]) -> str:
  """A line per point, a column per model."""
  names = config.models
  cell = '{mean:.3f} [{low:.3f}, {high:.3f}] min {min:.3f}'
  head = ['thickness', 'noise', *names]
  paired = _OURS in names and _CONTROL in names
  if paired:
    head += [f'{_OURS} - {_CONTROL} [95 %]', 'seeds ahead']
  lines = []
  for thickness, noise in capsule.points(config):
    here = {
      r['model']: r
      for r in rows
      if (r['thickness'], r['noise']) == (thickness, noise)
    }
    line = [thickness, noise, *(cell.format(**here[name]) for name in names)]
    if paired:
      gap = '{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]'
      ahead = f'{here[_OURS]["seeds_ahead"]} of {config.train.runs}'
      line += [gap.format(**here[_OURS]), ahead]
    lines.append(line)
  return planted_report.markdown(head, lines)


def _claims(config, rows: list[dict[str, Any]]) -> str:
  """One sentence per comparison with the control."""
  text = ''
  for name in config.models:
    mine = [r for r in rows if r['model'] == name and 'difference' in r]
    if not mine or name not in (_OURS, 'uniform_relax', 'no_flux'):
      continue
    gaps = np.array([r['difference'] for r in mine])
    where = lambda k, mine=mine: 'thickness {thickness}, noise {noise}'.format(
      **mine[k]
    )
    text += _CLAIM.format(
      ours=name, control=_CONTROL, points=len(mine), gap=gaps.mean(),
      above=sum(r['difference_low'] > 0 for r in mine),
      below=sum(r['difference_high'] < 0 for r in mine),
      most=gaps.max(), most_at=where(int(gaps.argmax())),
      least=gaps.min(), least_at=where(int(gaps.argmin())),
    )  # fmt: skip
  return text


def _costs(config, workdir: Path) -> str:
  lines = []
  for name in config.models:
    stepping, compiling = planted_report.seconds(workdir / name)
    count = planted.count_parameters(train.load_params(workdir / name))
    lines.append((name, count, f'{stepping:.0f}', f'{compiling:.0f}'))
  head = ('model', 'parameters', 'seconds, all runs', 'seconds to compile')
  return '\n' + planted_report.markdown(head, lines)


def _regions(config, parts, test: capsule.Points, workdir: Path):
  """Rows of regions.csv: easiest and hardest point, start and end."""
  if _OURS not in config.models:
    return []
  model = planted.make_model(config, _OURS, 2)
  graph = planted.grid_graph(test.positions, config.data.connectivity)
  stages = {
    'start': planted.initial_params(
      parts[_OURS], config.seed, len(capsule.point_of(config))
    ),
    'end': train.load_params(workdir / _OURS),
  }
  few = slice(0, min(32, config.data.test_bags))
  rows = []
  for point, (thickness, noise) in enumerate(capsule.points(config)):
    here = {
      stage: planted.take_runs(params, list(_runs(config, point)))
      for stage, params in stages.items()
    }
    found = planted_report.region_table(
      model, here, test.features[point, few], test.kinds[point, few], graph
    )
    lead = {'model': _OURS, 'thickness': thickness, 'noise': noise}
    rows += [lead | row for row in found]
  return rows


def _curves(config, rows: list[dict[str, Any]], out: Path) -> None:
  layer = 'layers' if config.data.task == 'pairs' else 'capsule'
  panels = []
  for thickness in config.data.thickness:
    series = {}
    for name in config.models:
      mine = [
        r for r in rows if (r['model'], r['thickness']) == (name, thickness)
      ]
      column = lambda key, mine=mine: np.array([r[key] for r in mine])
      series[name] = column('mean'), column('low'), column('high')
    noise = np.array(config.data.noise)
    unit = 'patch' if thickness == 1 else 'patches'
    panels.append((f'{layer} {thickness} {unit} thick', noise, series))
  tissue_plots.interval_curves(
    out / 'curves.png', panels,
    f'{_title(config)}: mean of {config.train.runs} seeds, bars span the 95 % '
    'intervals over seeds and bags',
    'noise (sd of a feature; kinds differ by 1)',
  )  # fmt: skip


def _pictures(config, test: capsule.Points, workdir: Path) -> None:
  """Fields of the middle point, of the best seed on validation bags."""
  point, out = len(capsule.points(config)) // 2, workdir / 'report'
  thickness, noise = capsule.points(config)[point]
  where = f'thickness {thickness}, noise {noise}'
  label, kinds = test.label[point], test.kinds[point]
  graph = planted.grid_graph(test.positions, config.data.connectivity)
  shown = [planted_report.examples(label, config.report.bags)]
  energies = {}
  for name in (_OURS, _CONTROL):
    if name not in config.models:
      continue
    folder = workdir / name
    run = planted_report.best_run(folder, _runs(config, point))
    params = planted.take_runs(train.load_params(folder), run)
    model = planted.make_model(config, name, 2)
    seen = planted_report.trace(model, params, test.features[point], graph)
    energies[name] = tuple(
      seen[f'energy_{part}'].mean(-1) for part in ('intra', 'inter')
    )
    title = f'{name}, {where}, test bags, best seed on validation bags'
    planted_report.field_pictures(
      out, name, title, test.positions, kinds, label, test.names, seen,
      shown[0], flux=name == _OURS,
    )  # fmt: skip
  if energies:
    tissue_plots.energies(
      out / 'energy.png', energies, f'{where}, {len(label)} test bags'
    )

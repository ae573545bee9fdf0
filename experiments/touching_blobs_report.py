"""Report of `touching_blobs`: tables, fluxes and fields on the tissue.

Axes: R runs (seeds), n test bags, N patches, P features.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments import planted, planted_report, tissue_plots, touching_blobs
from tmlib import train
from tmlib.data import tissue
from tmlib.mil import auroc, over_repeats

__all__ = ['slide', 'write']

NAMES = ('stroma', 'tumour', 'immune')
_CONTROL = 'uniform'

_NOTE = """
Test AUC over {runs} seeds (initial weights and order of the bags differ, the
{bags} test bags are shared); the last step is used. Intervals: 95 % bootstrap
of the mean over seeds and test bags together. `minus control`: against uniform
diffusion with the same pooling, paired by seed and bag, then the number of
seeds that are ahead. One training set serves all seeds, and no interval speaks
of another. Seconds: stepping all {runs} seeds, and compiling the step once, on
this machine.

What one may conclude: position matters here, for models without it
(gated_abmil, static) cannot do better than chance. That `no_flux` falls behind
is no evidence that concept-guided flux beats ordinary diffusion: gating
without flux leaves only what soft regions let through. Only the comparisons
with uniform diffusion (same width, steps and readout) speak about gating and
flux, and only for this simulated task; where the interval holds zero, nothing
was shown.
"""

_CONCEPT_NOTE = """
Cords in a capsule with noisy features, and patch embeddings in a space of {dim}
dimensions, each near the row of its kind; of {rows} rows, three belong to kinds
that occur. `given`: the true rows; `shuffled`: their coordinates permuted
alike; `random`: other rows; all three read the embeddings by cosine.
`projected`, `learned` and `none` do not see the embeddings. `minus control`:
against `concepts_given`. One may conclude whether rows that fit the embeddings
are worth having, and only if `given` is itself above chance; not that language
helps on real slides. No test figure set the noise: at {noise} in features and
{spread} in embeddings the largest feature tells a single patch right
{feature:.0%} of the time (a guess: a third), the nearest given row
{embedding:.0%}. Bags and rows have a seed of their own, on which nothing was
tried before.
"""

_REGION_NOTE = """
Mean over the edges of {bags} test bags, then over seeds (least and largest seed
in brackets). rho inside: probability that two neighbours of one planted
compartment share a region; beta across: that neighbours of two compartments do
not. Uniform diffusion is the case rho = 1 everywhere, beta = 0.
"""


def write(config, parts: Mapping[str, train.Experiment], workdir: Path) -> None:
  """Writes report/: table.md, table.csv, regions.csv and pictures."""
  out = workdir / 'report'
  rows = [_row(config, name, workdir) for name in parts]
  planted_report.write_csv(out / 'table.csv', rows)
  concepts = [r for r in rows if r['variant'].startswith('concepts_')]
  variants = [r for r in rows if r not in concepts]
  note = dict(
    runs=config.train.runs, bags=config.data.test_bags, control=_CONTROL
  )
  text = '# Touching blobs\n\n' + _table(variants) + _NOTE.format(**note)
  if concepts:
    text += '\n# Concept rows\n\n' + _table(concepts)
    noise, spread = touching_blobs.concept_noise(config)
    text += _CONCEPT_NOTE.format(
      dim=config.concepts.dim, rows=config.concepts.rows, noise=noise,
      spread=spread, feature=config.concepts.feature_accuracy,
      embedding=config.concepts.embedding_accuracy,
    )  # fmt: skip
  regions = _regions(config, parts, workdir)
  if regions:
    planted_report.write_csv(out / 'regions.csv', regions)
    text += '\n# Regions and the truth\n\n' + planted_report.region_markdown(
      regions, ('variant',)
    )
    text += _REGION_NOTE.format(bags=_looked_at(config))
  (out / 'table.md').write_text(text)
  _pictures(config, workdir)


def _looked_at(config) -> int:
  return min(64, config.data.test_bags)


def _row(config, name: str, workdir: Path) -> dict[str, Any]:
  runs, samples = range(config.train.runs), config.report.bootstrap
  labels, scores = planted_report.read_scores(workdir / name, 'test', runs)
  found = planted_report.intervals(labels, scores, samples)
  check = planted_report.read_scores(workdir / name, 'validation', runs)
  each = found.pop('each')
  row = {'variant': name} | found
  row['validation'] = over_repeats(auroc)(*check)
  control = _control(config, name)
  if control is not None and control != name:
    _, other = planted_report.read_scores(workdir / control, 'test', runs)
    row |= planted_report.difference(labels, scores, other, samples)
  stepping, compiling = planted_report.seconds(workdir / name)
  params = train.load_params(workdir / name)
  return row | {
    'parameters': planted.count_parameters(params),
    'seconds': stepping,
    'compile_seconds': compiling,
    'each_seed': ' '.join(f'{x:.3f}' for x in each),
  }


def _control(config, name: str) -> str | None:
  """What a part is compared with."""
  if not name.startswith('concepts_'):
    # Pooling like with like.
    patch = name.endswith('_patch_pool')
    control = f'{_CONTROL}_patch_pool' if patch else _CONTROL
    return control if control in config.variants else None
  return 'concepts_given' if 'given' in config.concepts.variants else None


def _table(rows: list[dict[str, Any]]) -> str:
  head = (
    'variant', 'mean', 'median', 'min', '95 %',
    'minus control [95 %]', 'seeds ahead', 'validation', 'parameters',
    'seconds', 'compile',
  )  # fmt: skip
  lines = []
  for r in rows:
    gap = ahead = ''
    if 'difference' in r:
      gap = '{difference:+.3f} [{difference_low:+.3f}, {difference_high:+.3f}]'
      gap, ahead = gap.format(**r), r['seeds_ahead']
    lines.append((
      r['variant'], r['mean'], r['median'], r['min'],
      '[{low:.3f}, {high:.3f}]'.format(**r),
      gap, ahead, r['validation'], r['parameters'],
      f'{r["seconds"]:.0f}', f'{r["compile_seconds"]:.0f}',
    ))  # fmt: skip
  return planted_report.markdown(head, lines)


def _regions(config, parts, workdir: Path) -> list[dict[str, Any]]:
  """Rows of regions.csv, for variants whose dynamics read regions."""
  bags = touching_blobs.simulate(config, 'test')
  some = slice(0, _looked_at(config))
  graph = planted.grid_graph(bags['positions'], config.data.connectivity)
  rows = []
  for name in config.variants:
    options = planted.VARIANTS.get(name)
    if options is None or options.get('uniform') or options.get('steps') == 0:
      continue
    stages = {
      'start': planted.initial_params(
        parts[name], config.seed, config.train.runs
      ),
      'end': train.load_params(workdir / name),
    }
    found = planted_report.region_table(
      planted.make_model(config, name, 2), stages,
      bags['features'][some], bags['kinds'][some], graph,
    )  # fmt: skip
    rows += [{'variant': name} | row for row in found]
  return rows


def _pictures(config, workdir: Path) -> None:
  """Fields, fluxes and energies on test bags; the seed is chosen on others."""
  bags = touching_blobs.simulate(config, 'test')
  graph = planted.grid_graph(bags['positions'], config.data.connectivity)
  out, runs = workdir / 'report', range(config.train.runs)
  shown = planted_report.examples(bags['label'], config.report.bags)
  energies = {}
  for name in ('tmevolve', 'uniform'):
    if name not in config.variants:
      continue
    model = planted.make_model(config, name, 2)
    run = planted_report.best_run(workdir / name, runs)
    params = planted.take_runs(train.load_params(workdir / name), run)
    seen = planted_report.trace(model, params, bags['features'], graph)
    energies[name] = tuple(
      seen[f'energy_{part}'].mean(-1) for part in ('intra', 'inter')
    )
    planted_report.field_pictures(
      out, name, f'{name}, test bags, best seed on validation bags',
      bags['positions'], bags['kinds'], bags['label'], NAMES, seen, shown,
      flux=name == 'tmevolve',
    )  # fmt: skip
    if name == 'tmevolve' and config.data.positions:
      slide(config, model, params, out)
  if energies:
    count = len(bags['label'])
    tissue_plots.energies(
      out / 'energy.png', energies, f'touching blobs, {count} test bags'
    )


def slide(config, model, params: Any, out: Path) -> None:
  """The trained model on real patch positions with planted islands.

  Args:
    config: of the experiment, with data.positions.
    model: TMEvolve.
    params: of one run.
    out: folder for slide_fields.png and slide_flux.png.
  """
  positions = tissue.read_positions(config.data.positions)
  kinds = tissue.islands(positions, seed=config.seed)
  features = tissue.noisy_one_hot(
    kinds, dim=config.data.dim, noise=config.data.noise, seed=config.seed
  )
  graph = planted.grid_graph(positions, config.data.connectivity)
  seen = planted_report.trace(model, params, features[None], graph)
  one = {k: v[0] for k, v in seen.items() if np.ndim(v) > 1}
  title = (
    f'{len(positions)} patch positions of a real slide, simulated features: '
    'the model of the grid, not trained here'
  )
  tissue_plots.tissue_maps(
    out / 'slide_fields.png', positions,
    [tissue_plots.field_panels(kinds, NAMES, one)], title,
  )  # fmt: skip
  tissue_plots.tissue_maps(
    out / 'slide_flux.png', positions,
    [tissue_plots.flux_panels(one['flux'])], title,
  )  # fmt: skip

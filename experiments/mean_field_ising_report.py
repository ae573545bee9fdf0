"""Table and picture of configs/mean_field_ising.py.

Axes: R seeds, T temperatures.
"""

import csv
from pathlib import Path

import numpy as np

from experiments import plots
from tmlib import mean_field

__all__ = ['read_order', 'write']

LABELS = {'mf_q': 'MF-Q', 'mf_ac': 'MF-AC'}


def read_order(folder: Path) -> tuple[np.ndarray, np.ndarray]:
  """Temperatures [T] and order parameters [R, T] of one part."""
  with (folder / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  runs = sorted({row.get('run', '0') for row in rows}, key=int)
  heat, order = [], []
  for run in runs:
    own = [row for row in rows if row.get('run', '0') == run]
    own.sort(key=lambda row: int(row['id']))
    heat = [float(row['temperature']) for row in own]
    order.append([float(row['measure']) for row in own])
  return np.array(heat), np.array(order)


def _interval(order: np.ndarray) -> np.ndarray:
  """Half-width of a 95 % interval of the mean over seeds, [T]."""
  from scipy import stats

  seeds = len(order)
  if seeds < 2:
    return np.full(order.shape[1], np.nan)
  quantile = stats.t.ppf(0.975, seeds - 1)
  return quantile * order.std(0, ddof=1) / np.sqrt(seeds)


NOTE = """
Mean over {seeds} seeds with a 95 % t-interval of |magnetisation|, over the
second half of the last episode ({episode} steps of half the spins, from all
up), on a {side} x {side} torus; exact is Onsager's infinite lattice at twice
the temperature of the policy. What may be concluded: with the policy
softmax(Q / T) order rises at T = 1.1346 (2.269 in units of the model), as T
falls. What may not: on so few spins |magnetisation| is not zero above that
temperature, and the step is rounded there; that is the size of the lattice,
not the learner.
"""


def write(config, workdir: Path) -> None:
  """Writes report/: ising.md, ising.csv, ising.png.

  Args:
    config: of the experiment.
    workdir: with one folder per method.
  """
  out, c = workdir / 'report', config.ising
  found = {
    name: read_order(workdir / name)
    for name in c.methods
    if (workdir / name / 'predictions.csv').exists()
  }
  heat = np.asarray(c.temperatures)
  head = ['T of the policy', '2 T of the model', 'exact']
  rows = [head + [LABELS[name] for name in found]]
  for i, t in enumerate(heat):
    row = [f'{t:.4f}', f'{2 * t:.3f}', f'{mean_field.magnetisation(t):.3f}']
    for _, order in found.values():
      row.append(f'{order[:, i].mean():.3f} +- {_interval(order)[i]:.3f}')
    rows.append(row)
  lines = ['| ' + ' | '.join(row) + ' |' for row in rows]
  lines.insert(1, '|' + '---|' * len(rows[0]))
  seeds = max((len(order) for _, order in found.values()), default=0)
  note = NOTE.format(seeds=seeds, side=c.side, episode=c.episode)
  (out / 'ising.md').write_text('# Order\n\n' + '\n'.join(lines) + '\n' + note)
  with (out / 'ising.csv').open('w', newline='') as file:
    csv.writer(file).writerows(rows)
  _draw(out / 'ising.png', found, heat, c.side)


def _draw(path: Path, found, heat: np.ndarray, side: int) -> None:
  grid = np.linspace(heat.min(), heat.max(), 400)
  with plots.figure(path, 1, 1, 5.0) as (_, axes):
    ax = axes[0, 0]
    ax.plot(grid, mean_field.magnetisation(grid), 'k-', lw=1.2,
            label='exact, infinite lattice')  # fmt: skip
    ax.axvline(mean_field.CRITICAL_TEMPERATURE, color='0.6', ls=':', lw=1)
    for i, (name, (t, order)) in enumerate(found.items()):
      ax.errorbar(
        t + 0.006 * i, order.mean(0), _interval(order), fmt='o-', ms=4, lw=1,
        capsize=2, color=f'C{i}',
        label=f'{LABELS[name]}, {side} x {side}, {len(order)} seeds',
      )  # fmt: skip
    ax.set(xlabel='temperature of the policy T',
           ylabel='order parameter |m|', ylim=(0, 1.05))  # fmt: skip
    top = ax.secondary_xaxis(
      'top', functions=(lambda x: 2 * x, lambda x: x / 2)
    )
    top.set_xlabel('temperature of the Ising model 2 T (units of J)')
    ax.legend(fontsize=8, frameon=False)

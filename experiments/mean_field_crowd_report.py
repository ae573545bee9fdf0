"""Table and pictures of configs/mean_field_crowd.py.

Axes: H time steps, S cells, n players.
"""

import csv
import json
from pathlib import Path

import jax
import numpy as np

from experiments import plots
from tmlib import mean_field

__all__ = ['player_slopes', 'write']

LABELS = {
  'fixed_point': 'damped fixed point',
  'fictitious_play': 'fictitious play',
  'online_mirror_descent': 'mirror descent',
  'prior_descent': 'prior descent',
  'mf_omo': 'MF-OMO',
  'munchausen': 'Munchausen, network',
}


def _curve(folder: Path) -> tuple[np.ndarray, np.ndarray]:
  """Steps and exploitability of one part."""
  rows = []
  with (folder / 'metrics.jsonl').open() as file:
    for line in file:
      row = json.loads(line)
      if 'exploitability' in row:
        rows.append((row['step'], row['exploitability']))
  steps, gaps = np.array(rows, float).T
  return steps, gaps


def player_slopes(config) -> dict[str, dict]:
  """Exponents of the n-player exploitability, over random weights.

  Args:
    config: with `players`.

  Returns:
    {'smooth' or 'kinked': {'n': [X], 'gap': [draws, X], 'slope': [draws]}}.
  """
  c = config.players
  sizes = 2 ** np.arange(c.log2_low, c.log2_high + 1, 2)
  rng = np.random.default_rng(config.seed)
  found = {}
  for name in ('smooth', 'kinked'):
    gaps = []
    for _ in range(c.draws):
      left, right = rng.uniform(0.5, 2, 2)
      kink = name == 'kinked'
      if kink:
        # Near left / 2, where the terms in 1 / n cancel: the rate shows early.
        right = left * rng.uniform(0.3, 0.7)
      game = mean_field.envs.left_right((left, right), kink=kink)
      share = 0.5 if kink else right / (left + right)
      with jax.enable_x64(True):
        pi = mean_field.uniform_policy(game)
        pi = pi.at[0, 0].set(np.array([share, 1 - share]))
        gaps.append(
          [
            float(
              mean_field.n_player_exploitability(
                mean_field.to_n_player(game, int(n)), pi
              )
            )
            for n in sizes
          ]
        )
    gaps = np.array(gaps)
    slope = np.polyfit(np.log(sizes), np.log(gaps.T), 1)[0]
    found[name] = {'n': sizes, 'gap': gaps, 'slope': slope}
  return found


def _first_below(steps, gaps, level) -> str:
  below = np.flatnonzero(gaps <= level)
  return f'{steps[below[0]]:.0f}' if len(below) else '-'


def _rows(curves) -> list[list[str]]:
  rows = [['game', 'solver', 'iterations', 'exploitability at the end',
           'smallest', 'first <= 1e-2', 'first <= 1e-4']]  # fmt: skip
  for (game, name), (steps, gaps) in curves.items():
    rows.append(
      [game, LABELS[name], f'{steps[-1]:.0f}', f'{gaps[-1]:.2e}',
       f'{gaps.min():.2e}', _first_below(steps, gaps, 1e-2),
       _first_below(steps, gaps, 1e-4)]
    )  # fmt: skip
  return rows


def _markdown(rows: list[list[str]]) -> str:
  head, *body = rows
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  return '\n'.join(lines + ['| ' + ' | '.join(r) + ' |' for r in body]) + '\n'


def _players_table(slopes) -> str:
  rows = [['reward', 'slope in n', '95 % of draws', 'expected']]
  for name, found in slopes.items():
    low, high = np.quantile(found['slope'], (0.025, 0.975))
    expected = '-1' if name == 'smooth' else '-1/2'
    rows.append([name, f'{found["slope"].mean():.3f}',
                 f'[{low:.3f}, {high:.3f}]', expected])  # fmt: skip
  return _markdown(rows)


def _equilibria_table(config) -> str:
  c = config.report
  game = mean_field.envs.two_wells()
  found = mean_field.find_equilibria(
    game, jax.random.key(config.seed), c.starts, n=c.start_steps
  )
  rows = [['share left', 'exploitability', 'found by (starts)']]
  for one in found:
    hits = ', '.join(f'{LABELS[k]} {v}' for k, v in one.hits.items())
    rows.append([f'{one.mu[1, 1]:.3f}', f'{one.gap:.1e}', hits])
  return _markdown(rows)


def _draw_curves(path: Path, curves) -> None:
  with plots.figure(path, 1, 2, 4.6) as (_, axes):
    for ax, (game, title) in zip(
      axes[0],
      (('crowd', 'crowd from a corner (monotone)'),
       ('rock-paper-scissors', 'rock-paper-scissors (not monotone)')),
      strict=True,
    ):  # fmt: skip
      for name in LABELS:
        if (game, name) not in curves:
          continue
        steps, gaps = curves[game, name]
        colour = f'C{list(LABELS).index(name)}'
        style = '--' if name == 'prior_descent' else '-'
        ax.plot(steps, np.maximum(gaps, 1e-9), style, lw=1.4, color=colour,
                label=LABELS[name])  # fmt: skip
      ax.set(xscale='log', yscale='log', title=title, xlabel='iteration',
             ylabel='exploitability (units of reward)')  # fmt: skip
      ax.xaxis.set_minor_formatter('')
      ax.legend(fontsize=7, frameon=False)


def _draw_flow(path: Path, flow: np.ndarray, size: int) -> None:
  """Frames of the flow, first to last."""
  times = np.unique(np.linspace(0, len(flow) - 1, 5).round().astype(int))
  with plots.figure(path, 1, len(times), 2.6) as (fig, axes):
    for ax, t in zip(axes[0], times, strict=True):
      share = flow[t].reshape(size, size) * size**2
      # Cell (0, 0), where all start, in the middle of the torus.
      share = np.roll(share, (size // 2, size // 2), (0, 1))
      image = ax.imshow(share, vmin=0, vmax=4, cmap='viridis')
      ax.set(title=f't = {t}', xticks=[], yticks=[])
    fig.colorbar(image, ax=axes[0, -1], label='mass / uniform mass (cut at 4)')
    fig.suptitle('Crowd in equilibrium, by mirror descent', fontsize=9)


def _draw_players(path: Path, slopes) -> None:
  with plots.figure(path, 1, 1, 4.6) as (_, axes):
    ax = axes[0, 0]
    for i, (name, found) in enumerate(slopes.items()):
      gap, n = found['gap'], found['n']
      low, high = np.quantile(found['slope'], (0.025, 0.975))
      label = (
        f'{name}: slope {found["slope"].mean():.2f} [{low:.2f}, {high:.2f}]'
      )
      ax.plot(n, np.exp(np.log(gap).mean(0)), 'o-', color=f'C{i}', label=label)
      ax.fill_between(n, *np.quantile(gap, (0.025, 0.975), 0), alpha=0.2,
                      color=f'C{i}', lw=0)  # fmt: skip
      power = -1.0 if name == 'smooth' else -0.5
      guide = np.exp(np.log(gap[:, 0]).mean()) * (n / n[0]) ** power
      ax.plot(n, guide, 'k:', lw=1)
    ax.set(xscale='log', yscale='log', xlabel='n (players)',
           ylabel='exploitability of the mean-field policy')  # fmt: skip
    ax.set_title(
      f'{len(next(iter(slopes.values()))["slope"])} random games each; dotted: '
      'slopes -1 and -1/2',
      fontsize=9,
    )
    ax.legend(fontsize=7, frameon=False)


NOTE = """
What may be concluded: on the monotone crowd mirror descent and prior descent
(nearly the same iteration here) fall fastest, fictitious play follows at its
slower rate, MF-OMO is slower still, and best responses, however damped, do not
converge: they stop at the size of their step. On rock-paper-scissors, which is
not monotone, damped best responses go round; averages and small steps arrive.
The n-player exploitability is exact (sums over binomials), against deviations
that see the player's own state. What may not: one crowd, and one step size per
solver, chosen by hand; iterations of the solvers differ in cost (the benchmark
has seconds); the network is far behind the tables, which it needs not be on
games too large for a table; and the list of equilibria is what the starts
found, not a proof that there is no other.
"""


def write(config, workdir: Path) -> None:
  """Writes report/: solvers.md, solvers.csv, curves, flow, players (.png).

  Args:
    config: of the experiment.
    workdir: with one folder per part.
  """
  out = workdir / 'report'
  curves = {}
  for prefix, game in (('crowd', 'crowd'), ('rps', 'rock-paper-scissors')):
    for name in LABELS:
      folder = workdir / f'{prefix}_{name}'
      if (folder / 'metrics.jsonl').exists():
        curves[game, name] = _curve(folder)
  rows, slopes = _rows(curves), player_slopes(config)
  text = '# Solvers of mean-field games\n\n' + _markdown(rows)
  text += '\n## Finitely many players\n\n' + _players_table(slopes)
  text += '\n## All equilibria found where company is liked\n\n'
  text += _equilibria_table(config)
  (out / 'solvers.md').write_text(text + NOTE)
  with (out / 'solvers.csv').open('w', newline='') as file:
    csv.writer(file).writerows(rows)
  _draw_curves(out / 'curves.png', curves)
  _draw_players(out / 'players.png', slopes)
  flow = _flow(workdir / 'crowd_online_mirror_descent')
  if flow is not None:
    _draw_flow(out / 'flow.png', flow, config.game.size)


def _flow(folder: Path) -> np.ndarray | None:
  """[H, S] of a part, from its table or, where that is too wide, its npz."""
  wide, table = folder / 'predictions.npz', folder / 'predictions.csv'
  if wide.exists():
    with np.load(wide) as found:
      if 'times/0/flow' in found:
        return found['times/0/flow'][np.argsort(found['times/0/id'])]
  if not table.exists():
    return None
  with table.open() as file:
    lines = sorted(csv.DictReader(file), key=lambda row: int(row['id']))
  cells = sum(key.startswith('flow_') for key in lines[0])
  return np.array(
    [[float(r[f'flow_{i}']) for i in range(cells)] for r in lines]
  )

"""Tables and pictures of `provider_market`.

Axes: R ratios, G games, M = 2 providers.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots

__all__ = ['claim_rows', 'exception_rows', 'write']

CLAIMS = ('claim_i', 'claim_ii', 'claim_iii')
TITLES = ('i: small one keeps users', 'ii: big one serves more',
          'iii: users worse off')  # fmt: skip

NOTE = """
What may be concluded. The statements are about this model: two providers, one
budget each, payoff = share of the users. (iii) is a theorem here: the welfare
of users is an ordinal potential, and it grows with every budget
(`tmlib.market.envelope`); a draw with (iii) = no is a tie. (i) under logit
counts only the excess over the share that is left as gamma -> 0. (ii) is not a
theorem; it fails in the corners listed and wherever the table says "interior".
The baseline is (B1, B1): of what users lose, part is the compute that is gone.
Pure asymmetry alone, (Bm, Bm) -> (B1, B2) at equal total, usually *helps* them,
because training has scale. What may not: nothing here is estimated from a real
market; fractions depend on the ranges of the draws, which are in config.json.
Every equilibrium is certified: no provider can gain more than eps of the users
by another split (blind search), largest eps {eps:.1e}.
"""


def _markdown(rows: list[list[str]]) -> str:
  head, *body = rows
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  return '\n'.join(lines + ['| ' + ' | '.join(r) + ' |' for r in body]) + '\n'


def claim_rows(draws: dict) -> list[list[str]]:
  """Fractions of games in which each claim holds, with 95 % intervals.

  Args:
    draws: {(users, accuracy): (games, result of `compare_budgets`)}.

  Returns:
    A table; its first row is the head.
  """
  rows = [['users', 'accuracy', 'games', 'interior', *TITLES, 'largest eps']]
  for (kind, accuracy), (_, found) in draws.items():
    count = len(found['U'])
    inside = found['kind'] == 'interior'
    row = [kind, accuracy, str(count), f'{inside.mean():.1%}']
    for claim in CLAIMS:
      p = found[claim].mean()
      half = 1.96 * np.sqrt(p * (1 - p) / count)
      row.append(f'{p:.1%} ± {half:.1%} ({found[claim][inside].mean():.1%})')
    rows.append([*row, f'{found["eps_nash"].max():.0e}'])
  return rows


def exception_rows(draws: dict) -> list[list[str]]:
  """Every exception, counted by kind of game and by which claims fail.

  Args:
    draws: see `claim_rows`.

  Returns:
    A table; its first row is the head.
  """
  rows = [['users', 'accuracy', 'kind', 'claims that fail', 'games', 'example']]
  for (kind, accuracy), (games, found) in draws.items():
    holds = np.stack([found[c] for c in CLAIMS], 1)
    names = [
      ', '.join(t.split(':')[0] for t, ok in zip(TITLES, row, strict=True)
                if not ok)
      for row in holds
    ]  # fmt: skip
    groups = sorted({(k, n) for k, n in zip(found['kind'], names, strict=True)
                     if n})  # fmt: skip
    for group in groups:
      at = [
        g for g in range(len(names)) if (found['kind'][g], names[g]) == group
      ]
      one = games[at[0]]
      b = np.asarray(one.budgets)
      text = f'B=({b[0]:.3g}, {b[1]:.3g}), gamma={float(one.gamma):.3g}'
      rows.append([kind, accuracy, *group, str(len(at)), text])
  return rows


def _example_rows(found) -> list[list[str]]:
  rows = [['B2/B1', 'serving of big', 'x of small', 'U', 'eps']]
  for i, ratio in enumerate(found['ratio']):
    rows.append(
      [
        f'{ratio:g}',
        f'{found["serving"][i]:.3f}',
        f'{found["x"][i, 1]:.4f}',
        f'{found["U"][i]:.4f}',
        f'{found["eps_nash"][i]:.0e}',
      ]
    )
  return rows


def _network_rows(networks) -> list[list[str]]:
  rows = [['network', 'links', 'total time', 'relative gap', 'rounds']]
  for name, one in networks.items():
    if one is None:
      rows.append([name, 'open_spiel is not installed', '', '', ''])
      continue
    total = f'{float(one.flow @ one.time):.6g}'
    gap = f'{max(one.relative_gap, 0):.1e}'
    rows.append([name, str(len(one.flow)), total, gap, str(len(one.gaps))])
  return rows


def _draw_sweeps(path: Path, sweeps) -> None:
  with plots.figure(path, 2, 3, 3.8) as (_, axes):
    for (kind, gamma), found in sweeps.items():
      row = axes[0 if kind == 'wardrop' else 1]
      lines = (found['x'][:, 1], found['serving'], found['U'])
      for ax, line in zip(row, lines, strict=True):
        ax.plot(found['ratio'], line, 'o-', ms=3, label=f'gamma = {gamma:g}')
    labels = ('share of the small one, x2', 'serving fraction of the big one',
              'utility of users U')  # fmt: skip
    for row, kind in zip(axes, ('Wardrop users', 'logit users'), strict=True):
      for ax, label in zip(row, labels, strict=True):
        ax.set(xlabel='B2 / B1', ylabel=label, title=kind)
        ax.invert_xaxis()
    axes[0, 0].legend(fontsize=7, frameon=False)


def _draw_map(path: Path, draws) -> None:
  """Each draw as a point over (B2/B1, gamma), by which claims fail."""
  kinds = list(dict.fromkeys(kind for kind, _ in draws))
  with plots.figure(path, len(kinds), 3, 4.0) as (_, axes):
    for row, kind in zip(axes, kinds, strict=True):
      for ax, claim, title in zip(row, CLAIMS, TITLES, strict=True):
        for holds, colour in ((True, '#9db8cc'), (False, '#c8553d')):
          for corner, marker in ((False, '.'), (True, 'x')):
            x, y = [], []
            for (k, _), (games, found) in draws.items():
              if k != kind:
                continue
              at = found[claim] == holds
              at &= (found['kind'] != 'interior') == corner
              b = found['budgets'][at]
              x.extend(b[:, 1] / b[:, 0])
              gamma = np.array([float(g.gamma) for g in games])
              y.extend(gamma[at] / b[:, 0])
            text = ('holds' if holds else 'fails') + (
              ', corner' if corner else ''
            )
            size = 6 if holds else 18
            label = f'{text} ({len(x)})'
            ax.scatter(x, y, s=size, lw=0.8, marker=marker, color=colour,
                       label=label, rasterized=True)  # fmt: skip
        ax.set(yscale='log', xlabel='B2 / B1', ylabel='gamma / B1',
               title=f'{kind}, {title}')  # fmt: skip
        ax.legend(fontsize=6.5, loc='upper left')


def _draw_heat(path: Path, heat) -> None:
  from matplotlib import ticker

  grid, cells, rows = heat
  place = {cell: n for n, cell in enumerate(cells)}
  with plots.figure(path, 1, 3, 4.2) as (fig, axes):
    panels = {
      'lost compute\nU(B1, B1) - U(Bm, Bm)': rows['lost_compute'],
      'pure asymmetry\nU(Bm, Bm) - U(B1, B2)': rows['pure_asymmetry'],
      'users lose in all\nU(B1, B1) - U(B1, B2)': rows['base_U'] - rows['U'],
    }
    for ax, (title, values) in zip(axes[0], panels.items(), strict=True):
      table = np.full((len(grid), len(grid)), np.nan)
      for (a, b), n in place.items():
        table[np.searchsorted(grid, b), np.searchsorted(grid, a)] = values[n]
      most = max(np.nanmax(np.abs(table)), 1e-12)
      image = ax.pcolormesh(
        grid, grid, table, cmap='RdBu', vmin=-most, vmax=most, shading='nearest'
      )
      ax.set(xscale='log', yscale='log', xlabel='B1', ylabel='B2', title=title)
      ticks = [
        t for t in (0.5, 1, 2, 5, 10, 20, 50) if grid[0] <= t <= grid[-1]
      ]
      for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.FixedLocator(ticks))
        axis.set_major_formatter(ticker.FormatStrFormatter('%g'))
        axis.set_minor_formatter(ticker.NullFormatter())
      fig.colorbar(image, ax=ax, label='utility (red: users gain)')


def _draw_total(path: Path, total) -> None:
  with plots.figure(path, 1, 1, 4.2) as (_, axes):
    ax = axes[0, 0]
    for kind, (share, found) in total.items():
      ax.plot(share, found.U, 'o-', ms=3, label=kind)
    ax.set(
      xlabel='B1 / (B1 + B2), total fixed',
      ylabel='utility of users U',
      title='the same compute, shared unequally',
    )
    ax.legend(frameon=False)


def _largest_eps(found: dict[str, Any]) -> float:
  tables = [found['example'], *found['sweeps'].values(), found['heat'][2]]
  tables += [rows for _, rows in found['draws'].values()]
  most = [max(t['eps_nash'].max(), t['base_eps_nash'].max()) for t in tables]
  return float(
    max([*most, *(r.eps_nash.max() for _, r in found['total'].values())])
  )


def write(config, found: dict[str, Any], workdir: Path) -> None:
  """Writes report/: market.md, csv tables and five pictures.

  Args:
    config: of the experiment.
    found: from `provider_market.measure`.
    workdir: of the run.
  """
  out = workdir / 'report'
  g = config.game
  claims, exceptions = (
    claim_rows(found['draws']),
    exception_rows(found['draws']),
  )
  play = [['order of moves', 'how play ends (games)']]
  for order, counts in found['play'].items():
    play.append([order, ', '.join(f'{k} {n}' for k, n in counts.items())])
  parts = {
    f'Example: Wardrop users, {g.latency} latency, power law, beta {g.beta:g}, '
    f'a_max = 1, a_0 = 0, c0 = 1, gamma = {g.gamma:g}, B1 = {g.big:g}': (
      _example_rows(found['example'])
    ),
    'Claims over random games (in brackets: interior games only)': claims,
    'Every exception': exceptions,
    'Best responses from alpha = 1/2': play,
    'Wardrop equilibria of networks': _network_rows(found['networks']),
  }
  text = '# Provider market\n'
  for title, rows in parts.items():
    text += f'\n## {title}\n\n' + _markdown(rows)
  (out / 'market.md').write_text(text + NOTE.format(eps=_largest_eps(found)))
  for name, rows in (('claims', claims), ('exceptions', exceptions)):
    with (out / f'{name}.csv').open('w', newline='') as file:
      csv.writer(file).writerows(rows)
  _draw_sweeps(out / 'sweep.png', found['sweeps'])
  _draw_map(out / 'claims.png', found['draws'])
  _draw_heat(out / 'decomposition.png', found['heat'])
  _draw_total(out / 'fixed_total.png', found['total'])

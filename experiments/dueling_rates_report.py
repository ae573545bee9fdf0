"""Table and pictures of `dueling_rates`, from the working directory alone.

Axes: S seeds, T horizons, U tau, E eps, X sizes (horizons, users, arms, bits).
"""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import plots
from tmlib.dueling import theory

__all__ = ['Fit', 'best_tuned', 'fit_statistic', 'read_part', 'write']

COLOURS = ('#1b5e8c', '#c8553d', '#3d8c57', '#8a5fa8', '#7a7a7a')


class Fit(NamedTuple):
  """A statistic of the seeds at each size, and its slope.

  Attributes:
    sizes: [X].
    value: [X].
    low: [X], bootstrap band of the value.
    high: [X].
    exponent: `theory.Exponent`.
  """

  sizes: np.ndarray
  value: np.ndarray
  low: np.ndarray
  high: np.ndarray
  exponent: theory.Exponent


def read_part(folder: Path) -> dict[str, np.ndarray]:
  """{name: [S, ...]} from the predictions of a sweep, in the order of the ids.

  Args:
    folder: of the part; small outputs lie in predictions.csv, large ones in
      predictions.npz.

  Returns:
    The outputs; narrow ones are [S, columns].
  """
  found: dict[str, list] = {}
  with (folder / 'predictions.csv').open() as file:
    rows = list(csv.DictReader(file))
  for name in rows[0]:
    if name not in ('evaluation', 'name'):
      found[name] = [float(row[name]) for row in rows]
  # A pass keeps the order of its ids where they are not among the outputs.
  ids = np.argsort(np.array(found.get('id', np.arange(len(rows)))))
  outputs: dict[str, np.ndarray] = {}
  for name in found:
    stem, _, tail = name.rpartition('_')
    if tail.isdigit():
      columns = sum(n.rpartition('_')[0] == stem for n in found)
      stacked = [found[f'{stem}_{i}'] for i in range(columns)]
      outputs[stem] = np.array(stacked).T[ids]
    else:
      outputs[name] = np.array(found[name])[ids]
  wide = folder / 'predictions.npz'
  if wide.exists():
    with np.load(wide) as file:
      for name in file.files:
        if not name.endswith('/id'):
          outputs[name.rsplit('/', 1)[1]] = file[name][ids]
  return outputs


def best_tuned(
  explore: np.ndarray, commit: np.ndarray, taus: np.ndarray, horizon: float
) -> np.ndarray:
  """Least over tau of the mean regret at every eps, where tau <= T / 2.

  Args:
    explore: [U, E], mean over seeds.
    commit: [U, E], mean over seeds.
    taus: [U].
    horizon: T.

  Returns:
    [E].
  """
  keep = taus <= horizon / 2
  regret = explore + (horizon - taus[:, None]) * commit
  return regret[keep].min(0)


def fit_statistic(
  sizes: np.ndarray,
  statistic: Callable[[np.ndarray], np.ndarray],
  seeds: int,
  resamples: int,
) -> Fit:
  """Fits log(statistic) on log(size), with bands over resampled seeds.

  Args:
    sizes: [X].
    statistic: seed indices [S] -> [X] > 0.
    seeds: S.
    resamples: of the bootstrap.

  Returns:
    The fit.
  """
  sizes = np.asarray(sizes, float)
  value = statistic(np.arange(seeds))
  rng = np.random.default_rng(0)
  draws = np.array(
    [statistic(rng.integers(seeds, size=seeds)) for _ in range(resamples)]
  )
  one = theory.fit_exponent(sizes, value)
  slopes = [theory.fit_exponent(sizes, x).slope for x in draws if (x > 0).all()]
  low, high = np.quantile(slopes, [0.025, 0.975])
  band = np.quantile(draws, [0.025, 0.975], axis=0)
  exponent = theory.Exponent(one.slope, float(low), float(high), one.intercept)
  return Fit(sizes, value, band[0], band[1], exponent)


def _horizon_fits(config, folder, grid, resamples):
  found = read_part(folder)
  horizons = grid['horizons'].astype(float)
  eps, taus = grid['eps'], grid['taus'].astype(float)
  many, seeds = len(horizons), len(found['explore'])
  # The last column is the easy instance.
  shape = (seeds, -1, len(eps) + 1)
  paid, lost = found['explore'].reshape(shape), found['commit'].reshape(shape)
  own = np.array(
    [theory.etc_tau(config.sweep.arms, 1, int(t)) for t in horizons], float
  )
  theory_tuned = paid[:, :many] + (
    (horizons - own)[None, :, None] * lost[:, :many]
  )
  explore, commit = paid[:, many:], lost[:, many:]
  eliminated = found['elimination'].reshape(seeds, many, -1)
  fixed = found['fixed_loss'].reshape(seeds, -1)
  easy_explore, explore = explore[..., -1:], explore[..., :-1]
  easy_commit, commit = commit[..., -1:], commit[..., :-1]

  def tuned(rows):
    a, b = explore[rows].mean(0), commit[rows].mean(0)
    return np.array([best_tuned(a, b, taus, t) for t in horizons])

  policies = {
    'theory-tuned ETC': lambda rows: theory_tuned[rows].mean(0)[:, :-1],
    'elimination': lambda rows: eliminated[rows].mean(0)[:, :-1],
    'best-tuned ETC': tuned,
    'no exploration': lambda rows: horizons[:, None] * fixed[rows].mean(0)[:-1],
  }
  fits, worst = {}, {}
  for name, curve in policies.items():
    fits[name] = fit_statistic(
      horizons, lambda r, c=curve: c(r).max(1), seeds, resamples
    )
    worst[name] = fit_statistic(
      horizons, lambda r, c=curve: eps[c(r).argmax(1)], seeds, resamples
    )

  def easy(rows):
    a, b = easy_explore[rows].mean(0), easy_commit[rows].mean(0)
    return np.array([best_tuned(a, b, taus, t)[0] for t in horizons])

  easy_fits = {
    'best-tuned ETC': fit_statistic(horizons, easy, seeds, resamples),
    'elimination': fit_statistic(
      horizons, lambda r: eliminated[r].mean(0)[:, -1], seeds, resamples
    ),
  }
  return fits, worst, easy_fits


def _done(workdir: Path, name: str) -> bool:
  return (workdir / name / 'predictions.csv').exists()


def _size_fit(config, workdir, named, taus_of, resamples) -> Fit | None:
  """Best-tuned regret at one horizon against a size, sup over the grid.

  Args:
    config: of the experiment.
    workdir: of the run.
    named: {size: part}; parts that did not run are left out.
    taus_of: size -> [U].
    resamples: of the bootstrap.

  Returns:
    The fit; None with fewer than two sizes.
  """
  parts = {
    size: read_part(workdir / name)
    for size, name in named.items()
    if _done(workdir, name)
  }
  if len(parts) < 2:
    return None
  horizon = float(config.sweep.horizon)

  def statistic(rows):
    value = []
    for size, part in parts.items():
      taus = taus_of(size).astype(float)
      shape = (len(part['explore']), len(taus), -1)
      a = part['explore'].reshape(shape)[rows].mean(0)
      b = part['commit'].reshape(shape)[rows].mean(0)
      value.append(best_tuned(a, b, taus, horizon).max())
    return np.array(value)

  seeds = len(next(iter(parts.values()))['explore'])
  return fit_statistic(np.array(list(parts)), statistic, seeds, resamples)


def _slope(e: theory.Exponent, digits: int) -> str:
  """Slope and band as text, without negative zeros."""
  slope, low, high = (
    f'{round(x, digits) + 0.0:.{digits}f}' for x in (e.slope, e.low, e.high)
  )
  return f'{slope} [{low}, {high}]'


def _draw(ax, fits, theory_slope, title, xlabel, ylabel='regret'):
  for colour, (name, fit) in zip(COLOURS, fits.items(), strict=False):
    e = fit.exponent
    label = f'{name}: {_slope(e, 2)}'
    ax.plot(fit.sizes, fit.value, 'o-', ms=3.5, color=colour, label=label)
    ax.fill_between(fit.sizes, fit.low, fit.high, color=colour, alpha=0.2, lw=0)
  first = next(iter(fits.values()))
  if theory_slope is not None:
    x = first.sizes
    guide = first.value[0] * (x / x[0]) ** theory_slope
    ax.plot(x, guide, 'k:', lw=1, label=f'slope {theory_slope:.2f}')
  ax.set(xscale='log', yscale='log', title=title, xlabel=xlabel, ylabel=ylabel)
  ax.legend(fontsize=6.5, frameon=False)


def _sizes(config, workdir, grid, resamples) -> dict[str, Fit]:
  """The fits against N, K and d of the parts that ran."""
  from experiments.dueling_rates import cyclic_taus, tuned_taus

  c = config.sweep

  def fit(named, taus_of):
    return _size_fit(config, workdir, named, taus_of, resamples)

  found = {}
  for outcomes in ('independent', 'shared'):
    # One user is one user: both lines start at the same part.
    alone = {n: f'users_independent_{n}' for n in c.users[:1]}
    rest = {n: f'users_{outcomes}_{n}' for n in c.users[1:]}
    found[outcomes] = fit(alone | rest, lambda n: tuned_taus(config, c.arms))
  found['arms'] = fit(
    {k: f'arms_{k}' for k in c.arms_axis}, lambda k: tuned_taus(config, k)
  )
  found['hidden signs'] = fit(
    {d: f'glm_{d}' for d in c.bits}, lambda d: np.maximum(grid['taus'], 2**d)
  )
  found['cyclic'] = fit(
    {d: f'cyclic_{d}' for d in c.dims}, lambda d: cyclic_taus(config)
  )
  return {name: one for name, one in found.items() if one is not None}


def _curves(workdir, players):
  found = {}
  for name in players:
    if not _done(workdir, f'play_{name}'):
      continue
    rows = []
    with (workdir / f'play_{name}' / 'metrics.jsonl').open() as file:
      for line in file:
        row = json.loads(line)
        if 'pair_regret' in row:
          rows.append(row)
    found[name] = {
      key: np.array([row[key] for row in rows])
      for key in rows[0]
      if key == 'step' or '_regret' in key
    }
  return found


def _table(fits, worst, easy, sizes) -> list[list[str]]:
  rows = [['axis', 'quantity', 'policy', 'slope', '95 % band', 'theory']]

  def add(axis, quantity, policy, fit, expected):
    e = fit.exponent
    slope, band = _slope(e, 3).split(' ', 1)
    rows.append([axis, quantity, policy, slope, band, expected])

  for name, fit in fits.items():
    expected = '1' if name == 'no exploration' else '2/3'
    add('T', 'sup over eps of regret', name, fit, expected)
  for name, fit in worst.items():
    expected = '0 (top of the grid)' if name == 'no exploration' else '-1/3'
    add('T', 'worst eps', name, fit, expected)
  for name, fit in easy.items():
    add('T', 'regret, easy instance', name, fit, '0 (log T)')
  expected = {
    'independent': ('N', 'sup, independent answers', '-1/3'),
    'shared': ('N', 'sup, shared answers', '0'),
    'arms': ('K', 'sup over eps of regret', '1/3'),
    'hidden signs': ('d', 'sup over delta, hidden signs', '2/3'),
    'cyclic': ('d', 'sup over tastes, cyclic', '1/3 at most, for large T'),
  }
  for name, fit in sizes.items():
    axis, quantity, slope = expected[name]
    add(axis, quantity, 'best-tuned ETC', fit, slope)
  return rows


def _bound_rows(config, fits) -> list[list[str]]:
  rows = [['T', 'regret (sup)', 'bound', 'bound / regret', 'lower bound']]
  fit = fits['theory-tuned ETC']
  arms = config.sweep.arms
  for horizon, value in zip(fit.sizes, fit.value, strict=True):
    bound = theory.upper_bound(arms, 1, int(horizon))
    ratio = f'{bound.value / value:.2f}'
    if bound.value >= horizon / 4:
      ratio = 'vacuous (bound > T/4)'
    elif horizon < 4 * arms * np.log(2 * arms * horizon):
      ratio = 'T < 4 K L'
    low = theory.lower_bound(arms, 1, int(horizon))
    rows.append(
      [
        f'2^{np.log2(horizon):.0f}',
        f'{value:.0f}',
        f'{bound.value:.0f}',
        ratio,
        f'{low:.0f}',
      ]
    )
  return rows


def _markdown(rows: list[list[str]]) -> str:
  head, *body = rows
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  return '\n'.join(lines + ['| ' + ' | '.join(r) + ' |' for r in body]) + '\n'


def _claim_rows(fits, worst, easy, bounds) -> list[list[str]]:
  """What must be true of the rates, and whether it came out."""
  rows = [['claim', 'measured', 'holds']]

  def add(claim, values, holds):
    shown = ', '.join(f'{round(v, 3) + 0.0:.3f}' for v in values)
    rows.append([claim, shown, 'yes' if holds else 'NO'])

  learn = ('theory-tuned ETC', 'elimination', 'best-tuned ETC')
  slopes = [fits[name].exponent.slope for name in learn]
  add('slope of the sup in [0.60, 0.72]', slopes,
      all(0.6 <= s <= 0.72 for s in slopes))  # fmt: skip
  slopes = [worst[name].exponent.slope for name in learn]
  add('slope of the worst eps in [-0.42, -0.25]', slopes,
      all(-0.42 <= s <= -0.25 for s in slopes))  # fmt: skip
  slope = fits['no exploration'].exponent.slope
  add('no exploration is linear', [slope], abs(slope - 1) < 1e-3)
  slopes = [fit.exponent.slope for fit in easy.values()]
  add('easy instance below 0.3', slopes, all(s < 0.3 for s in slopes))
  ratios = [r for r in (_number(row[3]) for row in bounds[1:]) if r is not None]
  add('theory-tuned regret within its bound (bound / regret)', ratios,
      bool(ratios) and min(ratios) >= 1)  # fmt: skip
  ratios = [float(row[1]) / max(float(row[4]), 1) for row in bounds[1:]]
  add('and above the lower bound (regret / bound)', ratios, min(ratios) >= 1)
  return rows


def _number(text: str) -> float | None:
  try:
    return float(text)
  except ValueError:
    return None


NOTE = """
Where these hold: no tuning of tau, and no early stopping, beats a rate near
T^(2/3) on the hard family, although neither the grid of eps nor the policies
know it; the eps that hurts most shrinks like T^(-1/3); the policy that does not
explore is linear on the same instances. What may not be concluded: finite-T
slopes carry logarithms (theory-tuned and elimination through L, K through the
maximum over K/2 candidates), and the K and d slopes are pre-asymptotic where
tau is close to one round-robin or eps close to the end of its grid. The cyclic
slope is the most pre-asymptotic: its sup is over random tastes, which at d = 3
fill two features only and lose little, far below what the bound allows.
In the play all users hide different arms by the same lead; there the vote of
the users' own best arms happens to be the fair lottery.
The independent-answers slope mixes two effects: averaging over N users and,
once eps is small, a lottery that need not find one arm. The upper bound does
not use that averaging. Bands resample the seeds, {seeds} of them; they do not
cover the choice of grids. The lower bound holds for the worst instance and any
algorithm, with the small constants of its proof.
Regret is the pair pseudo-regret unless a name says weak or strong.
"""


def write(config, workdir: Path) -> None:
  """Writes report/: rates.md, rates.csv, horizon.png, sizes.png, play.png.

  Args:
    config: of the experiment.
    workdir: with one folder per part.
  """
  from experiments.dueling_rates import grids

  out = workdir / 'report'
  grid, resamples = grids(config), config.report.bootstrap
  fits, worst, easy = _horizon_fits(
    config, workdir / 'horizon', grid, resamples
  )
  sizes = _sizes(config, workdir, grid, resamples)
  seeds = config.train.steps * config.sweep.seeds_per_step
  rows = _table(fits, worst, easy, sizes)
  bounds = _bound_rows(config, fits)
  curves = _curves(workdir, config.play.players)
  text = '# Rates\n\n' + _markdown(rows)
  text += '\n## Bound against regret, theory-tuned ETC\n\n' + _markdown(bounds)
  claims = _claim_rows(fits, worst, easy, bounds)
  text += '\n## Claims\n\n' + _markdown(claims)
  (out / 'rates.md').write_text(text + NOTE.format(seeds=seeds))
  with (out / 'rates.csv').open('w', newline='') as file:
    csv.writer(file).writerows(rows)
  with plots.figure(out / 'horizon.png', 1, 3, 4.4) as (_, axes):
    _draw(axes[0, 0], fits, 2 / 3, 'hard family: sup over eps', 'T (rounds)')
    _draw(axes[0, 1], worst, -1 / 3, 'the eps that hurts most', 'T (rounds)',
          'eps')  # fmt: skip
    _draw(axes[0, 2], easy, None, 'easy instance', 'T (rounds)')
  at = f'at T = 2^{np.log2(config.sweep.horizon):.0f}'
  panels = (
    (('independent', 'shared'), -1 / 3, 'equal users', 'N (users)'),
    (('arms',), 1 / 3, 'arms', 'K (arms)'),
    (('hidden signs', 'cyclic'), 2 / 3, 'generalized-linear', 'd'),
  )
  with plots.figure(out / 'sizes.png', 1, 3, 4.4) as (_, axes):
    # Few sizes: name them, not the powers of ten.
    for ax, (names, slope, title, label) in zip(axes[0], panels, strict=True):
      shown = {name: sizes[name] for name in names if name in sizes}
      if shown:
        _draw(ax, shown, slope, f'{title} {at}', label)
        ticks = sorted({int(x) for fit in shown.values() for x in fit.sizes})
        ax.set_xticks(ticks, [str(x) for x in ticks])
        ax.set_xticks([], minor=True)
      else:
        ax.set_axis_off()
        ax.text(0.5, 0.5, f'{title}: fewer than two sizes', ha='center')
  with plots.figure(out / 'play.png', 1, 3, 4.4) as (fig, axes):
    for ax, key in zip(axes[0], ('pair', 'weak', 'strong'), strict=True):
      for i, (name, curve) in enumerate(curves.items()):
        mean, sd = curve[f'{key}_regret'], curve[f'{key}_regret_sd']
        error = 1.96 * sd / np.sqrt(config.play.simulations)
        ax.plot(curve['step'], mean, color=f'C{i}', label=name)
        ax.fill_between(
          curve['step'], mean - error, mean + error, color=f'C{i}', alpha=0.25,
          lw=0,
        )  # fmt: skip
      ax.set_title(f'{key} pseudo-regret', fontsize=10)
      ax.set(
        xlabel='round', ylabel='cumulative regret', xscale='log', yscale='log'
      )  # fmt: skip
    if curves:
      axes[0, 0].legend(fontsize=7, frameon=False)
    fig.suptitle(
      f'mean of {config.play.simulations} runs and its 95 % interval',
      fontsize=9,
    )

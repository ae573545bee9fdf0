"""Lotteries, utilities and held-out comparisons of `dueling_votes`.

Axes: N users, K arms, W welfare kinds, R resamples or splits.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from experiments import plots
from tmlib import dueling

__all__ = [
  'Holdout',
  'choose_strength',
  'estimate',
  'holdout',
  'lotteries',
  'write',
]

KINDS = ('geometric', 'utilitarian', 'egalitarian')
NAMES = {
  'geometric': 'Nash',
  'utilitarian': 'utilitarian',
  'egalitarian': 'egalitarian',
}
COLOURS = {
  'geometric': '#1b5e8c',
  'utilitarian': '#c8553d',
  'egalitarian': '#3d8c57',
}
# Lotteries often agree: lines must show through one another.
LINES = {
  'geometric': {'lw': 3.2, 'alpha': 0.6},
  'utilitarian': {'lw': 1.6, 'ls': '--'},
  'egalitarian': {'lw': 1.6, 'ls': ':'},
}


class Holdout(NamedTuple):
  """Held-out figures of each split and kind, [R, W] each.

  Attributes:
    worst: mean utility of the users in the lowest share under that same lottery
      on the first half; measured on the second half.
    failed: the same for the users whom the utilitarian lottery served worst.
    mean: mean utility of all users.
    nash: geometric mean utility of all users.
  """

  worst: np.ndarray
  failed: np.ndarray
  mean: np.ndarray
  nash: np.ndarray


def estimate(config, source, strength: float | None) -> np.ndarray:
  """Pooled Borda scores [N, K] of a source."""
  pooling = config.pooling
  return dueling.pool_users(
    source.tally(), pooling.name, strength, pooling.rank
  ).b


def choose_strength(config, source) -> float | None:
  """Strength of the pooling: the config's, or by marginal likelihood.

  Chosen once, on the real data: resamples, halves and the null use it too, so
  they differ by their judgements only.
  """
  pooling = config.pooling
  if pooling.strength or pooling.name == 'none':
    return pooling.strength or None
  return dueling.choose_strength(source.tally(), pooling.name)


def lotteries(b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Best lottery of each kind and its certified gap, [W, K] and [W]."""
  found = [dueling.solve_nsw(b, kind) for kind in KINDS]
  return (
    np.stack([np.asarray(x.pi) for x in found]),
    np.array([float(x.gap) for x in found]),
  )


def holdout(
  config,
  source,
  strength: float | None,
  rng: np.random.Generator,
  null: bool,
) -> Holdout:
  """Chooses lotteries on half of every user's judgements, tests on the rest.

  Args:
    config: of the experiment.
    source: judgements.
    strength: of the pooling.
    rng: decides splits and shuffles.
    null: deal the judgements to users at random first.

  Returns:
    The figures.
  """
  rows = []
  for _ in range(config.report.splits):
    first, second = (source.shuffle(rng) if null else source).split(rng)
    chosen = estimate(config, first, strength)
    pi, _ = lotteries(chosen)
    seen, tested = chosen @ pi.T, estimate(config, second, strength) @ pi.T
    tail = max(1, round(config.report.tail * len(seen)))
    order = np.argsort(seen, 0)[:tail]
    failed = order[:, KINDS.index('utilitarian')]
    rows.append(
      (
        np.take_along_axis(tested, order, 0).mean(0),
        tested[failed].mean(0),
        tested.mean(0),
        np.exp(np.log(tested).mean(0)),
      )
    )
  return Holdout(*(np.stack(column) for column in zip(*rows, strict=True)))


def _interval(x: np.ndarray) -> np.ndarray:
  return np.quantile(x, [0.025, 0.975], axis=0)


def _lottery_picture(path, source, pi, band, v, v_band):
  arms = np.argsort(-pi[0])
  shown = [
    k for k in arms if pi[:, k].max() > 1e-3 or band[1][:, k].max() > 0.05
  ]
  with plots.figure(path, 1, 2, 5) as (fig, axes):
    ax = axes[0, 0]
    for w, kind in enumerate(KINDS):
      x = np.arange(len(shown)) + 0.27 * (w - 1)
      error = np.abs(band[:, w][:, shown] - pi[w, shown])
      ax.bar(x, pi[w, shown], 0.25, color=COLOURS[kind], label=NAMES[kind])
      ax.errorbar(x, pi[w, shown], error, fmt='none', ecolor='k', lw=0.8)
    ax.set_xticks(range(len(shown)))
    ax.set_xticklabels(
      [source.arms[k] for k in shown], rotation=40, ha='right', fontsize=7
    )
    ax.set(title='lottery, 95 % bootstrap intervals', ylabel='probability')
    ax = axes[0, 1]
    for w, kind in enumerate(KINDS):
      rank = np.arange(len(v))
      ax.plot(
        rank, np.sort(v[:, w]), color=COLOURS[kind], label=NAMES[kind],
        **LINES[kind],
      )  # fmt: skip
      ax.fill_between(
        rank, v_band[0][:, w], v_band[1][:, w], color=COLOURS[kind], alpha=0.2,
        lw=0,
      )  # fmt: skip
    ax.axhline(0.5, color='k', lw=0.6, ls=':')
    ax.set(
      title='utility of every user, sorted (bootstrap bands)',
      xlabel='users, worst off first', ylabel='chance to beat another arm',
    )  # fmt: skip
    fig.legend(
      *ax.get_legend_handles_labels(), loc='outside lower center', ncols=3,
      fontsize=8, frameon=False,
    )  # fmt: skip


def _holdout_picture(path, real, null, tail):
  fields = {
    'worst': f'own worst {tail:.0%}',
    'failed': f"utilitarian's worst {tail:.0%}",
    'mean': 'all users, mean',
    'nash': 'all users, geometric mean',
  }
  base = KINDS.index('utilitarian')
  with plots.figure(path, 1, len(fields), 3.4) as (_, axes):
    for ax, (field, title) in zip(axes[0], fields.items(), strict=True):
      for x, kind in enumerate(('geometric', 'egalitarian')):
        for shift, found, colour in (
          (-0.15, real, COLOURS[kind]),
          (0.15, null, '#999999'),
        ):
          values = getattr(found, field)
          gain = values[:, KINDS.index(kind)] - values[:, base]
          low, high = _interval(gain)
          ax.errorbar(
            x + shift, gain.mean(), [[gain.mean() - low], [high - gain.mean()]],
            fmt='o', color=colour, capsize=3,
          )  # fmt: skip
      ax.axhline(0, color='k', lw=0.6, ls=':')
      ax.set_xticks([0, 1], ['Nash', 'egalitarian'])
      ax.set(title=title, xlim=(-0.5, 1.5))
    axes[0, 0].set_ylabel('held-out gain over utilitarian (grey: null)')


NOTE = """
Utility is a user's chance to prefer the drawn arm to a random other arm (1/2 is
indifference). Intervals of the lottery resample every user's judgements; sorted
utilities spread further in resamples than in the data, as they carry the noise
twice. Intervals of held-out gains are the spread over random halves, which
share data, so they are not confidence intervals for new users. The second half
is pooled on its own, which shrinks all users toward each other and every
difference toward zero. `null` deals the judgements to users at random: what is
left there is what noise alone produces, and only a gain beyond it speaks for
real differences between users. Where the strength is large, the votes show
little difference between users, and Nash and utilitarian welfare choose alike.
"""


def _held_out_rows(real: Holdout, null: Holdout) -> list[list[str]]:
  rows = [['held-out figure', 'data', *(NAMES[k] for k in KINDS),
           'Nash - utilitarian', 'spread', 'Nash - egalitarian',
           'spread']]  # fmt: skip
  for field in Holdout._fields:
    for name, found in (('real', real), ('null', null)):
      values = getattr(found, field)
      row = [field, name, *(f'{x:.4f}' for x in values.mean(0))]
      for other in (1, 2):
        gain = values[:, 0] - values[:, other]
        low, high = _interval(gain)
        row += [f'{gain.mean():+.4f}', f'[{low:+.4f}, {high:+.4f}]']
      rows.append(row)
  return rows


def _table(rows: list[list[str]]) -> str:
  head, *body = rows
  lines = ['| ' + ' | '.join(head) + ' |', '|' + '---|' * len(head)]
  return '\n'.join(lines + ['| ' + ' | '.join(r) + ' |' for r in body]) + '\n'


def write(config, source, workdir: Path) -> None:
  """Writes report/: votes.md, lottery.png, holdout.png, utilities.csv.

  Args:
    config: of the experiment.
    source: judgements.
    workdir: of the run.
  """
  out, report = workdir / 'report', config.report
  rng = np.random.default_rng(config.seed)
  strength = choose_strength(config, source)
  b = estimate(config, source, strength)
  pi, gap = lotteries(b)
  v = b @ pi.T
  draws, again_v = [], []
  for _ in range(report.bootstrap):
    again = estimate(config, source.resample(rng), strength)
    other, _ = lotteries(again)
    draws.append(other)
    again_v.append(again @ other.T)
  band = _interval(np.stack(draws))
  v_band = _interval(np.sort(np.stack(again_v), 1))
  own_band = _interval(np.stack(again_v))
  real = holdout(config, source, strength, rng, null=False)
  null = holdout(config, source, strength, rng, null=True)
  plan = dueling.plan(
    np.clip(b, 0, 1), report.plan_loss, runs=report.plan_runs, seed=config.seed
  )
  summary = [['welfare', 'lottery (arms above 1 %)', 'worst user', 'mean user',
              'certified gap']]  # fmt: skip
  for w, kind in enumerate(KINDS):
    arms = [k for k in np.argsort(-pi[w]) if pi[w, k] > 0.01]
    text = ', '.join(f'{source.arms[k]} {pi[w, k]:.2f}' for k in arms)
    summary.append(
      [NAMES[kind], text, f'{v[:, w].min():.3f}', f'{v[:, w].mean():.3f}',
       f'{gap[w]:.1e}']
    )  # fmt: skip
  enough = plan.simulated or f'more than {plan.taus[-1]}'
  text = f'# {source.num_users} users, {len(source.arms)} arms\n\n'
  text += f'Pooling: {config.pooling.name}, strength {strength or "none"}.\n\n'
  text += _table(summary) + '\n' + _table(_held_out_rows(real, null)) + NOTE
  text += (
    f'\nA new item set for such users: to lose at most {report.plan_loss} of '
    f'welfare by committing (19 times in 20), {enough} duels of all users in '
    f'simulation; {plan.certified} with a guarantee for every instance.\n'
  )
  (out / 'votes.md').write_text(text)
  _lottery_picture(out / 'lottery.png', source, pi, band, v, v_band)
  _holdout_picture(out / 'holdout.png', real, null, report.tail)
  with (out / 'utilities.csv').open('w', newline='') as file:
    writer = csv.writer(file)
    head = ['{}', '{} low', '{} high']
    names = [text.format(NAMES[k]) for k in KINDS for text in head]
    writer.writerow(['user', *names])
    table = np.stack([v, *own_band], -1).reshape(len(v), -1)
    for user, row in zip(source.users, table, strict=True):
      writer.writerow([user, *(f'{x:.6f}' for x in row)])

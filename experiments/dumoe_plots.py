"""Pictures of the recommender reports; they take arrays, not configs.

Axes: n users, E experts, K interests, H decay heads, R runs.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from experiments.plots import figure

__all__ = ['bars', 'curves', 'fusion', 'half_lives', 'load', 'routing']


def routing(
  path: Path, experts: np.ndarray, interest: np.ndarray, count: int, kinds: int
) -> None:
  """Share of each true interest's users that go to each expert first.

  Args:
    path: of the picture.
    experts: [n] int, first expert.
    interest: [n] int, true interest.
    count: E.
    kinds: K.
  """
  table = np.zeros((kinds, count))
  np.add.at(table, (interest, experts), 1)
  size = table.sum(1, keepdims=True)
  share = table / np.where(size > 0, size, 1)
  # Experts in the order of the interest that they serve most.
  order = np.lexsort((-share.max(0), share.argmax(0)))
  with figure(path, size=4.4) as (fig, axes):
    ax = axes[0, 0]
    image = ax.imshow(share[:, order], cmap='Blues', vmin=0, vmax=1)
    ax.set(
      xlabel='expert (first choice)',
      ylabel='true interest',
      title='Routing against true interests, seed 0',
      xticks=np.arange(count),
      yticks=np.arange(kinds),
    )
    ax.set_xticklabels([str(e) for e in order])
    fig.colorbar(image, ax=ax, label='share of the users of an interest',
                 shrink=0.8)  # fmt: skip


def fusion(path: Path, drift: np.ndarray, mix: np.ndarray) -> None:
  """Weights of the three paths over the drift, in tenths of the users.

  Args:
    path: of the picture.
    drift: [n].
    mix: [n, 3], static, short, long.
  """
  edges = np.quantile(drift, np.linspace(0, 1, 11))
  place = np.clip(np.searchsorted(edges, drift, 'right') - 1, 0, 9)
  used = [b for b in range(10) if (place == b).any()]
  middle = [drift[place == b].mean() for b in used]
  with figure(path, size=4.2) as (_, axes):
    ax = axes[0, 0]
    for j, name in enumerate(('profile', 'recent events', 'history')):
      rows = [mix[place == b, j] for b in used]
      mean = np.array([r.mean() for r in rows])
      sd = np.array([r.std() for r in rows])
      ax.plot(middle, mean, 'o-', ms=3, color=f'C{j}', label=name)
      ax.fill_between(middle, mean - sd, mean + sd, color=f'C{j}', alpha=0.15,
                      lw=0)  # fmt: skip
    ax.set(
      xlabel='drift 1 - cos(recent, all), means of tenths of the users',
      ylabel='weight of the path (band: sd over users)',
      title='Fusion weights over drift',
      ylim=(0, 1),
    )
    ax.legend(frameon=False, fontsize=8)


def load(path: Path, shares: Mapping[str, np.ndarray]) -> None:
  """Share of first choices per expert, sorted, a line per model.

  Args:
    path: of the picture.
    shares: {model: [S, E]}, of each seed; their mean by rank is drawn.
  """
  count = next(iter(shares.values())).shape[1]
  with figure(path, size=4.2) as (_, axes):
    ax = axes[0, 0]
    for i, (name, share) in enumerate(shares.items()):
      ranked = np.sort(share, 1)[:, ::-1].mean(0)
      ax.plot(np.arange(1, count + 1), ranked, 'o-', ms=3,
              color=f'C{i}', label=name)  # fmt: skip
    ax.axhline(1 / count, color='0.5', ls=':', lw=1)
    ax.set(
      xlabel='expert, by load within its seed',
      ylabel='share of first choices, mean over seeds',
      title='Load per expert (dotted: equal shares)',
      xticks=np.arange(1, count + 1),
      ylim=(0, None),
    )
    ax.legend(frameon=False, fontsize=7)


def half_lives(path: Path, start: np.ndarray, learned: np.ndarray) -> None:
  """Half-lives before and after training, on a log scale.

  Args:
    path: of the picture.
    start: [H], hours.
    learned: [R, H], hours.
  """
  with figure(path, size=4.2) as (_, axes):
    ax = axes[0, 0]
    for h, hours in enumerate(start):
      jitter = h + np.linspace(-0.15, 0.15, len(learned))
      ax.plot(jitter, learned[:, h], 'o', ms=4, color=f'C{h}')
      ax.plot([h - 0.3, h + 0.3], [hours, hours], color='0.3', lw=1)
    ax.set(
      yscale='log',
      xticks=np.arange(len(start)),
      xlabel='decay head',
      ylabel='half-life, hours (line: start)',
      title='Learned half-lives, a dot per run',
    )


def curves(
  path: Path,
  rates: Sequence[float],
  values: Mapping[str, Sequence[tuple[float, float, float]]],
) -> None:
  """HR@10 over the switching rate with intervals, a line per model.

  Args:
    path: of the picture.
    rates: x.
    values: {model: (value, low, high) per rate}.
  """
  with figure(path, size=4.6) as (_, axes):
    ax = axes[0, 0]
    for i, (name, rows) in enumerate(values.items()):
      mid, low, high = np.array(rows).T
      x = np.array(rates) * 1.03 ** (i - len(values) / 2)
      spread = np.maximum([mid - low, high - mid], 0)
      ax.errorbar(x, mid, spread, fmt='o-', ms=3, capsize=2,
                  lw=1.2, color=f'C{i}', label=name)  # fmt: skip
    ax.set(
      xscale='log',
      xlabel='switching rate per event',
      ylabel='HR@10 (95 %)',
      title='Next item over the switching rate',
    )
    ax.set_xticks(list(rates), [str(r) for r in rates])
    ax.minorticks_off()
    ax.legend(frameon=False, fontsize=8)


def bars(
  path: Path, values: Mapping[str, Mapping[str, np.ndarray]], ylabel: str
) -> None:
  """A panel per protocol, a dot per run or order and a bar for the mean.

  Args:
    path: of the picture.
    values: {protocol: {model: [R]}}.
    ylabel: of all panels.
  """
  with figure(path, 1, len(values), 3.2) as (_, axes):
    for ax, (title, models) in zip(axes[0], values.items(), strict=True):
      for i, (_, x) in enumerate(models.items()):
        ax.bar(i, np.mean(x), color=f'C{i}', alpha=0.35)
        jitter = i + np.linspace(-0.2, 0.2, len(x)) if len(x) > 1 else [i]
        ax.plot(jitter, x, 'o', ms=3, color=f'C{i}')
      ax.set_xticks(np.arange(len(models)), list(models), rotation=30,
                    ha='right', fontsize=8)  # fmt: skip
      ax.set_title(title, fontsize=9)
    axes[0, 0].set_ylabel(ylabel)

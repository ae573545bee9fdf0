"""Pictures of a user's cohort; they take arrays, not configs.

Axes: N patches, n bags, C classes.
"""

from pathlib import Path
from typing import Any

import numpy as np

from experiments.plots import figure
from tmlib.data.slides import heatmap_raster, percentile_ranks
from tmlib.mil.survival import kaplan_meier, logrank

__all__ = [
  'confusion', 'draw_survival', 'heatmap', 'scatter', 'survival_curves',
]  # fmt: skip


def heatmap(
  path: Path,
  name: str,
  coords: np.ndarray,
  scores: np.ndarray,
  pitch: float | None,
  regions: np.ndarray | None = None,
) -> None:
  """Percentiles of the scores on the tissue, and the regions beside them.

  Args:
    path: of the picture.
    name: of the slide.
    coords: [N, 2] level-0 pixels.
    scores: [N].
    pitch: of the grid, or None.
    regions: [N] int, or None.
  """
  step = pitch or 1.0
  corner = coords.min(0)
  count = 1 if regions is None else 2
  with figure(path, 1, count, 4.6) as (fig, axes):
    fig.suptitle(name, fontsize=9)
    raster = heatmap_raster(coords, percentile_ranks(scores), pitch)
    rows, columns = raster.shape
    extent = (
      corner[0], corner[0] + columns * step,
      corner[1] + rows * step, corner[1],
    )  # fmt: skip
    ax = axes[0, 0]
    image = ax.imshow(
      raster, cmap='RdYlBu_r', vmin=0, vmax=100, extent=extent,
      interpolation='nearest',
    )  # fmt: skip
    fig.colorbar(image, ax=ax, shrink=0.7, label='percentile within the slide')
    ax.set_title(f'attention, {len(scores)} patches', fontsize=8)
    if regions is not None:
      ax = axes[0, 1]
      table = heatmap_raster(coords, regions, pitch)
      image = ax.imshow(
        table, cmap='tab10', vmin=-0.5, vmax=9.5, extent=extent,
        interpolation='nearest',
      )  # fmt: skip
      present = np.unique(regions)
      bar = fig.colorbar(image, ax=ax, shrink=0.7, label='region')
      bar.set_ticks(present.tolist())
      ax.set_title(f'{len(present)} regions', fontsize=8)
    for ax in axes.flat:
      ax.set_xlabel('x, pixels of level 0', fontsize=8)
      ax.set_ylabel('y', fontsize=8)
      ax.tick_params(labelsize=6)


def confusion(path: Path, matrix: np.ndarray, names: list[str]) -> None:
  """Counts of (true, predicted), shaded by the share of the true class."""
  share = matrix / np.maximum(matrix.sum(1, keepdims=True), 1)
  with figure(path, size=max(3.6, 0.7 * len(names) + 2)) as (fig, axes):
    ax = axes[0, 0]
    image = ax.imshow(share, cmap='Blues', vmin=0, vmax=1)
    for (i, j), count in np.ndenumerate(matrix):
      dark = share[i, j] > 0.5
      ax.text(
        j, i, int(count), ha='center', va='center', fontsize=8,
        color='white' if dark else 'black',
      )  # fmt: skip
    places = range(len(names))
    ax.set_xticks(places, names, rotation=45, ha='right', fontsize=7)
    ax.set_yticks(places, names, fontsize=7)
    ax.set(xlabel='predicted', ylabel='true', title='tested bags of all folds')
    fig.colorbar(image, ax=ax, shrink=0.7, label='share of the true class')


def survival_curves(
  path: Path, time: Any, event: Any, high: np.ndarray, unit: str
) -> float:
  """Kaplan-Meier curves of two groups of risk; returns the log-rank p.

  Args:
    path: of the picture.
    time: [n].
    event: [n].
    high: [n] bool, the patients with the higher predicted risk.
    unit: of the time, for the axis.
  """
  with figure(path, size=4.4) as (_, axes):
    title = 'tested patients, split at the median risk of their fold\n'
    return draw_survival(axes[0, 0], time, event, high, unit, title)


def draw_survival(
  ax: Any, time: Any, event: Any, high: np.ndarray, unit: str, title: str
) -> float:
  """The curves of `survival_curves` in one panel; returns the log-rank p."""
  try:
    pvalue = logrank(time, event, high).pvalue
  except ValueError:
    pvalue = float('nan')  # one group, or no event
  for group, colour, label in (
    (False, 'C0', 'lower'),
    (True, 'C3', 'higher'),
  ):
    chosen = high == group
    if not chosen.any():
      continue
    curve = kaplan_meier(time[chosen], event[chosen])
    x = np.concatenate([[0], curve.time])
    y = np.concatenate([[1], curve.survival])
    error = np.concatenate([[0], curve.std])
    low, top = (
      np.clip(y - 1.96 * error, 0, 1),
      np.clip(y + 1.96 * error, 0, 1),
    )
    ax.step(x, y, where='post', color=colour,
            label=f'{label} risk, {chosen.sum()} patients')  # fmt: skip
    ax.fill_between(x, low, top, step='post', color=colour, alpha=0.15, lw=0)
  ax.set(
    xlabel=unit, ylabel='share without the event', ylim=(0, 1.02),
    title=f'{title}log-rank p = {pvalue:.2g}; band: 95 %',
  )  # fmt: skip
  ax.title.set_fontsize(8)
  ax.legend(fontsize=7, frameon=False)
  return pvalue


def scatter(path: Path, values: np.ndarray, title: str) -> None:
  """Correlations of all targets, sorted."""
  with figure(path, size=4.4) as (_, axes):
    ax = axes[0, 0]
    ax.plot(np.sort(values)[::-1], '.', ms=4)
    ax.axhline(0, color='0.6', ls=':', lw=1)
    ax.set(xlabel='target, sorted', ylabel='Pearson correlation', title=title)

"""Pictures of fields on tissue; they take arrays, not configs.

Axes: N patches, R regions, M concepts, T steps, n bags, L points of a curve.
"""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.plots import figure

__all__ = [
  'Panel',
  'energies',
  'field_panels',
  'flux_panels',
  'interval_curves',
  'tissue_maps',
  'to_image',
]

_CLASSES = 'tab10'


class Panel(NamedTuple):
  """One map.

  Attributes:
    title: of the map.
    values: [N]; int classes where `names` is given, else numbers.
    names: of the classes, for the legend.
    unit: label of the colour bar.
    limits: of the colours, or None for those of the values.
  """

  title: str
  values: np.ndarray
  names: Sequence[str] | None = None
  unit: str = ''
  limits: tuple[float, float] | None = None


def to_image(positions: np.ndarray, values: np.ndarray) -> np.ndarray:
  """Rasters patches: [N, 2] row and column, [N] -> [H, W], NaN in gaps."""
  place = np.asarray(positions) - np.min(positions, 0)
  image = np.full(place.max(0) + 1, np.nan)
  image[place[:, 0], place[:, 1]] = values
  return image


def tissue_maps(
  path: Path,
  positions: np.ndarray,
  rows: Sequence[Sequence[Panel]],
  title: str,
) -> None:
  """Maps on the tissue, a row of panels per bag.

  Args:
    path: of the picture.
    positions: [N, 2], row and column of each patch.
    rows: of panels; short rows leave a gap.
    title: of the picture.
  """
  extent = np.ptp(np.asarray(positions), axis=0) + 1
  columns = max(len(row) for row in rows)
  # Wide tissue gets wide panels, within reason.
  shape = np.clip(extent[0] / extent[1], 0.6, 1.8)
  with figure(path, len(rows), columns, 2.9) as (fig, axes):
    legends = any(panel.names is not None for row in rows for panel in row)
    height = 2.9 * shape + (0.8 if legends else 0.4)
    fig.set_size_inches(2.9 * columns, height * len(rows) + 0.5)
    for ax in axes.flat:
      ax.axis('off')
    for line, row in zip(axes, rows, strict=True):
      for ax, panel in zip(line, row, strict=False):
        _draw(fig, ax, positions, panel)
    fig.suptitle(textwrap.fill(title, 30 * columns), fontsize=10)


def _draw(fig, ax, positions, panel: Panel) -> None:
  import matplotlib.patches as patches
  import matplotlib.pyplot as plt

  image = to_image(positions, panel.values)
  ax.set_title(panel.title, fontsize=9)
  if panel.names is None:
    low, high = panel.limits or (None, None)
    drawn = ax.imshow(image, cmap='viridis', vmin=low, vmax=high)
    bar = fig.colorbar(drawn, ax=ax, fraction=0.046, pad=0.02)
    bar.ax.tick_params(labelsize=6)
    bar.ax.locator_params(nbins=4)
    bar.set_label(panel.unit, fontsize=7)
    return
  colours = plt.get_cmap(_CLASSES)
  ax.imshow(image, cmap=colours, vmin=-0.5, vmax=9.5, interpolation='nearest')
  seen = np.unique(np.asarray(panel.values).astype(int))
  ax.legend(
    handles=[
      patches.Patch(color=colours(int(k) % 10), label=panel.names[k])
      for k in seen
    ],
    loc='upper center',
    bbox_to_anchor=(0.5, -0.01),
    ncols=2,
    fontsize=6,
    frameon=False,
    handlelength=1,
  )


def field_panels(
  truth: np.ndarray,
  names: Sequence[str],
  seen: Mapping[str, np.ndarray],
  heading: str = '',
) -> list[Panel]:
  """Truth, regions, concept field and heat map of one bag, side by side.

  Args:
    truth: [N], true compartment of each patch.
    names: of the compartments.
    seen: regions [N, R], concepts [N, M] and attention [N].
    heading: before the first title, such as the label.

  Returns:
    Panels for `tissue_maps`.
  """
  regions, concepts = seen['regions'], seen['concepts']
  number = lambda word, size: [f'{word} {k}' for k in range(size)]
  panels = [
    Panel(f'{heading}true regions', truth, names),
    Panel(
      'learned regions S (largest)',
      regions.argmax(-1),
      number('region', regions.shape[-1]),
    ),
    Panel('certainty of S', regions.max(-1), None, 'largest share', (0, 1)),
  ]
  if concepts.shape[-1] > 1:
    panels.append(
      Panel(
        'concept field Z, after T steps',
        concepts.argmax(-1),
        number('concept', concepts.shape[-1]),
      )
    )
  share = seen['attention'] * len(truth)
  return [*panels, Panel('heat map', share, None, 'attention x N')]


def flux_panels(flux: np.ndarray, heading: str = '') -> list[Panel]:
  """Flux across boundaries at the start, in between and at the end.

  Args:
    flux: [T + 1, N].
    heading: before the first title.

  Returns:
    At most four panels on one scale of colours.
  """
  last = len(flux) - 1
  steps = np.unique(np.linspace(0, last, min(4, last + 1)).round().astype(int))
  limits = (0.0, max(float(flux.max()), 1e-12))
  title = lambda k, t: f'{heading if k == 0 else ""}boundary flux, step {t}'
  return [
    Panel(title(k, t), flux[t], None, 'L1 norm', limits)
    for k, t in enumerate(steps)
  ]


def energies(
  path: Path, series: Mapping[str, tuple[np.ndarray, np.ndarray]], title: str
) -> None:
  """Dirichlet energy per step, inside regions and across boundaries.

  Args:
    path: of the picture.
    series: {name: (intra, inter)}, [n, T + 1] each: mean over the patches of
      a bag. Lines are means over bags, bands their central 80 %.
    title: of the picture.
  """
  with figure(path, 1, 2, 3.6) as (fig, axes):
    for ax, part, word in zip(
      axes[0], (0, 1), ('inside regions', 'across boundaries'), strict=True
    ):
      for i, (name, pair) in enumerate(series.items()):
        values = np.asarray(pair[part])
        if not values.any():
          continue
        steps = np.arange(values.shape[1])
        low, high = np.quantile(values, [0.1, 0.9], axis=0)
        # A model without boundaries has one kind of edge.
        label = name if np.any(pair[1]) else f'{name} (all edges)'
        ax.plot(steps, values.mean(0), f'C{i}', marker='.', label=label)
        ax.fill_between(steps, low, high, color=f'C{i}', alpha=0.15, lw=0)
      ax.set(xlabel='pseudo-time step', title=word, ylim=(0, None))
      ax.xaxis.get_major_locator().set_params(integer=True)
      if ax.lines:
        ax.legend(fontsize=7, frameon=False)
      else:
        ax.text(0.5, 0.5, 'none', ha='center', transform=ax.transAxes)
    axes[0, 0].set_ylabel(
      'weighted Dirichlet energy\nof H, mean per patch', fontsize=9
    )
    fig.suptitle(f'{title}; mean and central 80 % over bags', fontsize=9)


def interval_curves(
  path: Path,
  panels: Sequence[tuple[str, np.ndarray, Mapping[str, Any]]],
  title: str,
  x_label: str,
  y_label: str = 'test AUC',
) -> None:
  """Curves with intervals, one panel per setting.

  Args:
    path: of the picture.
    panels: (name, x [L], {model: (mean, low, high), each [L]}) each.
    title: of the picture.
    x_label: of the horizontal axis.
    y_label: of the vertical axis.
  """
  with figure(path, 1, len(panels), 3.4) as (fig, axes):
    for ax, (name, x, series) in zip(axes[0], panels, strict=True):
      x = np.asarray(x, float)
      gap = np.ptp(x) / 60 if len(x) > 1 else 0
      for i, (model, (mean, low, high)) in enumerate(series.items()):
        # Side by side, so that intervals do not cover one another.
        place = x + gap * (i - (len(series) - 1) / 2)
        bars = np.abs(np.stack([low, high]) - mean)
        ax.errorbar(
          place, mean, bars, fmt=f'C{i}o-', ms=3, lw=1.2, capsize=2, label=model
        )
      ax.axhline(0.5, color='0.6', ls=':', lw=1)
      ax.set(xlabel=x_label, ylim=(0.3, 1.02))
      ax.set_title(name, fontsize=9)
      ax.set_xticks(x)
    axes[0, 0].set_ylabel(y_label)
    fig.legend(
      *axes[0, 0].get_legend_handles_labels(),
      loc='outside lower center',
      ncols=4,
      fontsize=7,
      frameon=False,
    )
    fig.suptitle(textwrap.fill(title, 55 * len(panels)), fontsize=9)

"""Pictures that several reports share; they take arrays, not configs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

__all__ = [
  'embedding',
  'figure',
  'intervals',
  'pca',
  'ranked_instances',
  'roc',
]


@contextmanager
def figure(path: Path, rows: int = 1, columns: int = 1, size: float = 3.6):
  """Yields (figure, axes [rows, columns]) and saves the picture."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  fig, axes = plt.subplots(
    rows,
    columns,
    figsize=(size * columns, size * rows),
    squeeze=False,
    layout='constrained',
  )
  for ax in axes.flat:
    ax.spines[['top', 'right']].set_visible(False)
  try:
    yield fig, axes
    fig.savefig(path, dpi=130)
  finally:
    plt.close(fig)


def roc(
  path: Path,
  labels: np.ndarray,
  scores: Mapping[str, np.ndarray],
  title: str,
  legend: Mapping[str, str],
) -> None:
  """ROC curves from pooled out-of-fold scores: a thin line per repeat.

  Args:
    path: of the picture.
    labels: [n], 0 or 1.
    scores: {model: [n, repeats]}.
    title: of the picture.
    legend: {model: text}, such as its AUC and interval.
  """
  from tmlib.mil import roc_curve

  grid = np.linspace(0, 1, 201)
  with figure(path, size=4.6) as (_, axes):
    ax = axes[0, 0]
    for i, (model, table) in enumerate(scores.items()):
      curves = []
      for repeat in table.T:
        fpr, tpr = roc_curve(labels, repeat)[:2]
        ax.step(fpr, tpr, where='post', color=f'C{i}', alpha=0.2, lw=0.7)
        curves.append(np.interp(grid, fpr, tpr))
      ax.plot(grid, np.mean(curves, 0), f'C{i}', lw=2, label=legend[model])
    ax.plot([0, 1], [0, 1], ':', color='0.6', lw=1)
    ax.set(
      xlabel='false positive rate',
      ylabel='true positive rate',
      title=title,
      aspect='equal',
    )
    ax.legend(loc='lower right', fontsize=7, frameon=False)


def intervals(
  path: Path,
  rows: Sequence[tuple[str, float, float, float]],
  title: str,
  label: str,
) -> None:
  """Values with their intervals, one line each, for more than a legend holds.

  Args:
    path: of the picture.
    rows: (name, value, low, high), the first on top.
    title: of the picture.
    label: of the axis.
  """
  with figure(path, size=4.6) as (fig, axes):
    fig.set_size_inches(6, 1.2 + 0.24 * len(rows))
    ax = axes[0, 0]
    for y, (_, value, low, high) in enumerate(rows):
      ax.plot([low, high], [y, y], color='0.55', lw=1.5)
      ax.plot(value, y, 'o', color='C0', ms=5)
    ax.axvline(rows[0][1], ls=':', color='0.6', lw=1)
    ax.set_yticks(range(len(rows)), [name for name, *_ in rows], fontsize=8)
    ax.set(xlabel=label, ylim=(len(rows) - 0.5, -0.5))
    ax.set_title(title, fontsize=9)


def ranked_instances(
  path: Path,
  bags: Sequence[tuple[str, np.ndarray, np.ndarray]],
  title: str,
  top: int = 12,
) -> None:
  """The most attended instances of some bags, coloured by region.

  Args:
    path: of the picture.
    bags: (name, attention [N], region [N] int) each.
    title: of the picture.
    top: instances shown per bag.
  """
  columns = min(3, len(bags))
  rows = -(-len(bags) // columns)
  most = max(len(attention) for _, attention, _ in bags)
  with figure(path, rows, columns, 3.0) as (fig, axes):
    for ax in axes.flat[len(bags) :]:
      ax.axis('off')
    for ax, (name, attention, region) in zip(axes.flat, bags, strict=False):
      order = np.argsort(-attention, kind='stable')[:top]
      place = np.arange(len(order))
      colours = [f'C{r}' for r in region[order]]
      ax.barh(place, attention[order], color=colours)
      ax.axvline(1 / len(attention), color='0.4', ls=':', lw=1)
      ax.set_yticks(place, [f'#{i}' for i in order], fontsize=6)
      # Bars of one thickness, however small the bag.
      ax.set_ylim(min(top, most) - 0.5, -0.5)
      ax.set_title(name, fontsize=8)
      ax.set_xlabel('attention', fontsize=8)
      ax.set_ylabel('instance', fontsize=8)
      ax.tick_params(axis='x', labelsize=7)
    _region_legend(fig, np.concatenate([region for _, _, region in bags]))
    fig.suptitle(title + '\ndotted: equal shares', fontsize=9)


def pca(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """First two principal components [n, 2] and their shares of variance [2]."""
  centred = values - values.mean(0)
  u, s, _ = np.linalg.svd(centred, full_matrices=False)
  return u[:, :2] * s[:2], (s**2 / max(np.sum(s**2), 1e-30))[:2]


def embedding(
  path: Path,
  hidden: np.ndarray,
  groups: Sequence[tuple[str, np.ndarray]],
  title: str,
) -> None:
  """Instances in the plane of their first two principal components.

  Args:
    path: of the picture.
    hidden: [n, D], such as the evolved field.
    groups: (name, [n] int) each; one panel per grouping.
    title: of the picture.
  """
  points, share = pca(hidden)
  with figure(path, 1, len(groups), 3.8) as (fig, axes):
    for ax, (name, group) in zip(axes[0], groups, strict=True):
      for value in np.unique(group):
        at = group == value
        label = f'{value} ({at.sum()})'
        ax.scatter(*points[at].T, s=5, lw=0, color=f'C{value}', label=label)
      ax.set(
        xlabel=f'PC 1 ({share[0]:.0%} of variance)',
        ylabel=f'PC 2 ({share[1]:.0%})',
      )
      ax.set_title(f'by {name}', fontsize=9)
      ax.legend(fontsize=6, markerscale=2, frameon=False)
    fig.suptitle(title, fontsize=9)


def _region_legend(fig, regions: np.ndarray) -> None:
  import matplotlib.patches as patches

  handles: Iterator = (
    patches.Patch(color=f'C{r}', label=f'region {r}')
    for r in np.unique(regions)
  )
  fig.legend(
    handles=list(handles), loc='outside lower center', ncols=8, fontsize=7,
    frameon=False,
  )  # fmt: skip

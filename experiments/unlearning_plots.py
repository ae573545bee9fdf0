"""Pictures of the unlearning reports; they take arrays and reports."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from experiments.plots import figure
from tmlib.unlearning import LeverageReport

__all__ = ['audit_picture', 'gap_points', 'lines', 'scatter']


def _quiet(ax) -> None:
  """Ticks of a logarithmic axis that do not run into each other."""
  from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

  for axis, (low, high) in (
    (ax.xaxis, ax.get_xlim()),
    (ax.yaxis, ax.get_ylim()),
  ):
    if axis.get_scale() != 'log':
      continue
    axis.set_minor_formatter(NullFormatter())
    if high < 30 * low:
      axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
      axis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))


def audit_picture(path: Path, report: LeverageReport, title: str) -> None:
  """Spectrum, predicted gap per method, most harmed retain examples."""
  with figure(path, 1, 3, 3.9) as (fig, axes):
    ax = axes[0, 0]
    eigs = np.maximum(report.eigenvalues, 1e-8)
    ax.plot(1 + np.arange(len(eigs)), eigs, '.-')
    ax.axhline(1, color='0.6', lw=1, ls=':')
    name = 'local critical weight' if report.local else 'critical weight'
    ax.set(
      yscale='log',
      xlabel='index',
      ylabel='eigenvalue of $H_{FF}$',
      title=f'{name} {report.rho_c:.3g}, dof {report.dof:.1f}',
    )
    ax = axes[0, 1]
    names = list(report.predicted)
    place = np.arange(len(names))
    for shift, column, label in ((-0.2, 0, 'forget'), (0.2, 1, 'retain')):
      value = [max(report.predicted[n][column], 1e-4) for n in names]
      ax.plot(value, place + shift, 'os'[column], ms=5, label=label)
    ax.axvline(1, color='0.4', lw=1, ls=':')
    ax.set_yticks(place, names, fontsize=7)
    ax.invert_yaxis()
    ax.grid(axis='y', color='0.93')
    ax.set(xscale='log', xlabel='predicted gap / doing nothing')
    ax.set_title(f'recommended: {report.recommendation}', fontsize=9)
    fig.legend(
      *ax.get_legend_handles_labels(), loc='outside lower center', ncols=2,
      fontsize=7, frameon=False,
    )  # fmt: skip
    ax = axes[0, 2]
    ax.bar(np.arange(len(report.harm)), report.harm, color='C3')
    labels = [str(i) for i in report.harmed]
    ax.set_xticks(np.arange(len(labels)), labels, rotation=90, fontsize=7)
    ax.set(
      xlabel='retain example or row',
      ylabel='gap when nothing is done',
      title='most harmed',
    )
    fig.suptitle(title, fontsize=10)


def gap_points(
  path: Path,
  gaps: Mapping[str, Mapping[str, tuple[float, float, float]]],
  unit: str,
  title: str,
) -> None:
  """Points with intervals: {group: {method: (value, low, high)}}.

  All groups hold the same methods, and 1 (doing nothing) is marked.
  """
  with figure(path, 1, len(gaps), 3.2) as (fig, axes):
    for ax, (group, rows) in zip(axes[0], gaps.items(), strict=True):
      place = np.arange(len(rows))
      value, low, high = np.array(list(rows.values())).T
      error = [np.maximum(value - low, 0), np.maximum(high - value, 0)]
      ax.errorbar(value, place, xerr=error, fmt='o', ms=4, ecolor='0.5')
      ax.axvline(1, color='0.4', lw=1, ls=':')
      ax.set_yticks(place, list(rows) if ax is axes[0, 0] else [], fontsize=7)
      ax.invert_yaxis()
      ax.grid(axis='y', color='0.93')
      ax.set(xscale='log', xlabel=unit)
      ax.set_title(group, fontsize=9)
      _quiet(ax)
    fig.suptitle(title, fontsize=10)


def scatter(
  path: Path,
  panels: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]],
  labels: tuple[str, str],
  title: str,
) -> None:
  """Log-log scatter with the diagonal: {panel: (x, y, group)}."""
  with figure(path, 1, len(panels), 3.7) as (fig, axes):
    for ax, (name, (x, y, group)) in zip(axes[0], panels.items(), strict=True):
      for i, g in enumerate(np.unique(group)):
        at = group == g
        ax.scatter(x[at], y[at], s=10, lw=0, color=f'C{i}', label=str(g))
      both = np.concatenate([x, y])
      both = both[both > 0]
      ends = [both.min(), both.max()]
      ax.plot(ends, ends, color='0.6', lw=1, ls=':')
      ax.set(xscale='log', yscale='log', xlabel=labels[0], ylabel=labels[1])
      _quiet(ax)
      ax.set_title(name, fontsize=9)
      ax.legend(fontsize=6, frameon=False)
    fig.suptitle(title, fontsize=10)


def lines(
  path: Path,
  curves: Mapping[str, tuple[Any, Any]],
  labels: tuple[str, str],
  title: str,
  mark: float | None = None,
  log_x: bool = True,
) -> None:
  """Curves {name: (x, y)} on logarithmic axes, with a vertical mark."""
  with figure(path, size=4.6) as (_, axes):
    ax = axes[0, 0]
    for name, (x, y) in curves.items():
      ax.plot(x, y, '.-', label=name)
    if mark is not None:
      ax.axvline(mark, color='0.5', lw=1, ls=':')
    ax.set(yscale='log', xlabel=labels[0], ylabel=labels[1])
    if log_x:
      ax.set_xscale('log')
    _quiet(ax)
    ax.set_title(title, fontsize=9)
    ax.legend(fontsize=7, frameon=False)

"""Every unlearner in closed form on real ridge regression, float64.

Axes: n points, d features, R requests.
"""

import warnings
from pathlib import Path
from typing import Any

import jax
import numpy as np

from experiments import unlearning_plots as plots
from experiments import unlearning_stats as stats
from tmlib import train
from tmlib import unlearning as ul

__all__ = ['KINDS', 'forget_set', 'load_diabetes', 'make', 'split']

KINDS = ('random', 'leverage', 'cluster', 'largest targets', 'noisy targets')


def load_diabetes() -> tuple[np.ndarray, np.ndarray]:
  """X [442, 65] standardised quadratic features with a constant, Y [442, 1]."""
  from sklearn.datasets import load_diabetes as load

  data: Any = load(return_X_y=True)
  x, y = map(np.asarray, data)
  first, second = np.triu_indices(x.shape[1])
  x = np.concatenate([x, x[:, first] * x[:, second]], 1)
  x = (x - x.mean(0)) / x.std(0)
  # Sex squared is constant up to sign after centring; keep distinct columns.
  _, kept = np.unique(np.round(x, 9), axis=1, return_index=True)
  x = np.concatenate([x[:, np.sort(kept)], np.ones((len(x), 1))], 1)
  return x, ((y - y.mean()) / y.std())[:, None]


def forget_set(
  kind: str, x: np.ndarray, y: np.ndarray, size: int, rng
) -> np.ndarray:
  """Indices of a forget set of one kind."""
  n = len(x)
  if kind == 'leverage':
    hat = np.sum(x * np.linalg.solve(x.T @ x + np.eye(x.shape[1]), x.T).T, 1)
    members = np.argsort(-hat)[: 2 * size]
  elif kind == 'cluster':
    members = np.argsort(np.sum((x - x[rng.integers(n)]) ** 2, 1))[:size]
  elif kind == 'largest targets':
    members = np.argsort(-y[:, 0])[: 2 * size]
  else:
    members = np.arange(n)
  return rng.choice(members, size, replace=False)


def split(x, y, index, ridge: float) -> ul.RidgeProblem:
  """The problem that forgets `index`."""
  kept, index = ul.split_indices(len(x), index)
  return ul.RidgeProblem(x[kept], y[kept], x[index], y[index], ridge)


def make(config) -> train.Experiment:
  """No training: a report only."""
  return train.Experiment(report=lambda workdir: _write(config, workdir))


def _specs(p: ul.RidgeProblem, steps: int, lmax: float, targets):
  """{name: spec}: the rows of the table."""
  top = np.linalg.norm(p.X_R, 2) ** 2 + np.linalg.norm(p.X_F, 2) ** 2
  lr = float(1 / (top + p.ridge))
  ascent = ul.gradient_ascent(1.0)
  best = ul.optimal_scalar_step(p, ascent)
  rho_c = 1 / lmax
  named = lambda name, spec: spec._replace(name=name)
  return [
    named('ascent, best step', ul.gradient_ascent(best)),
    ul.influence(),
    ul.woodbury_influence(),
    ul.retain_newton(),
    named('graddiff 0.1 rho_c', ul.graddiff(0.1 * rho_c, reduction='sum')),
    named('graddiff 0.5 rho_c', ul.graddiff(0.5 * rho_c, reduction='sum')),
    named('neggrad+ 0.1 rho_c', ul.neggrad_plus(
      1 / (1 + 0.1 * rho_c), reduction='sum')),
    named(f'retain GD, {steps}', ul.retain_finetune(lr, steps)),
    named(f'retain CG, {steps // 10}',
          ul.retain_finetune(steps=steps // 10, solver='cg')),
    named('relabel, permuted', ul.relabel(targets)),
    ul.corrected_relabel(),
    named('scrub', ul.scrub(0.1 * rho_c, 1.0, 1.0, lr / 2, steps)),
    named('projected ascent', ul.projected(ul.gradient_ascent(best))),
  ]  # fmt: skip


def _write(config, workdir: Path) -> None:
  x, y = load_diabetes()
  rng = np.random.default_rng(config.seed)
  out = workdir / 'report'
  with jax.enable_x64(True), warnings.catch_warnings():
    # Scrub beyond its critical weight is part of the comparison.
    warnings.simplefilter('ignore')
    tables, ascent, lmax = {}, {}, {}
    for kind in KINDS:
      tables[kind], ascent[kind], lmax[kind] = _kind(config, kind, x, y, rng)
    p = split(
      x, y, forget_set('leverage', x, y, config.forget, rng), config.ridge
    )
    plots.audit_picture(
      out / 'audit.png', ul.audit(p), 'diabetes: 22 high-leverage points'
    )
    sweep = _sweep(p)
    npo = _npo(p)
  _pictures(tables, sweep, out)
  text = _text(config, x, tables, ascent, lmax, sweep, npo)
  (out / 'summary.md').write_text('\n'.join(text) + '\n')


def _kind(config, kind, x, y, rng):
  """{method: [R, 2]} relative gaps, [R, 2] of ascent at the loss, [R] lmax."""
  rows, ascent, tops = {}, [], []
  for _ in range(config.draws):
    index = forget_set(kind, x, y, config.forget, rng)
    targets = y.copy()
    if kind == 'noisy targets':
      targets[index] += 3 * rng.normal(size=(len(index), 1))
    p = split(x, targets, index, config.ridge)
    lev = ul.leverage(p)
    top = float(lev.eigenvalues[0])
    r = np.asarray(p.Y_F - p.X_F @ ul.fit_full(p))
    idle = (
      np.linalg.norm(lev.forget_self @ r),
      np.linalg.norm(lev.retain_cross @ r),
    )
    relative = lambda gap, idle=idle: (
      np.linalg.norm(gap.forget) / idle[0],
      np.linalg.norm(gap.retain) / idle[1],
    )
    for spec in _specs(p, config.steps, top, rng.permutation(p.Y_F)):
      gap = ul.closed_form_gap(p, spec)
      rows.setdefault(spec.name, []).append(relative(gap))
    spec = ul.gradient_ascent(
      0.02 / np.linalg.norm(p.X_F, 2) ** 2, config.report.ascent_steps
    )
    stop = ul.stopping_time(p, spec, 'loss')
    gap = ul.closed_form_gap(p, spec._replace(steps=stop))
    ascent.append(relative(gap))
    tops.append(top)
  return (
    {k: np.array(v) for k, v in rows.items()},
    np.array(ascent),
    np.array(tops),
  )


def _sweep(p: ul.RidgeProblem) -> dict:
  """Norm of the GradDiff gap after k steps on both sides of rho_c."""
  rho_c = float(1 / ul.leverage(p).eigenvalues[0])
  lr = 1 / (np.linalg.norm(p.X_R, 2) ** 2 + float(p.ridge))
  idle = np.linalg.norm(p.X_F @ (ul.fit_full(p) - ul.fit_retain(p)))
  steps = np.unique(np.logspace(1, 7, 25).astype(int))
  curves = {}
  for ratio in (0.5, 0.9, 0.99, 1.01, 1.1):
    spec = ul.graddiff(ratio * rho_c, reduction='sum', lr=lr)
    size = []
    for k in steps:
      gap = ul.closed_form_gap(p, spec._replace(steps=int(k))).forget
      size.append(np.linalg.norm(gap) / idle)
      if size[-1] > 1e6:  # it would overflow soon
        break
    curves[f'{ratio:g} rho_c'] = (steps[: len(size)], np.array(size))
  return {'rho_c': rho_c, 'curves': curves}


def _npo(p: ul.RidgeProblem) -> dict[int, float]:
  """Live NPO against its frozen weights: relative distance after k steps."""
  lr = float(0.02 / np.linalg.norm(p.X_F, 2) ** 2)
  live = np.asarray(ul.simulate_npo(p, 0.5, lr, 100))
  frozen = np.asarray(ul.simulate(p, ul.npo_weights(0.5, lr, 100)))
  away = lambda k: np.linalg.norm(live[k] - frozen[k]) / np.linalg.norm(
    frozen[k] - frozen[0])  # fmt: skip
  return {k: float(away(k)) for k in (1, 10, 100)}


def _interval(config, values):
  return stats.bootstrap(
    lambda i: float(np.median(values[i])), len(values), config.report.bootstrap
  )


def _pictures(tables, sweep, out: Path) -> None:
  bars = {
    kind: {
      name: tuple(
        np.percentile(np.linalg.norm(v, axis=1) / 2**0.5, [50, 2.5, 97.5]).clip(
          1e-3
        )
      )
      for name, v in rows.items()
    }
    for kind, rows in tables.items()
  }
  plots.gap_points(
    out / 'gaps.png', bars, 'gap / doing nothing',
    'diabetes, ridge regression: root mean square of F and R, median and 95 % '
    f'of {len(next(iter(tables[KINDS[0]].values())))} requests; exact methods '
    'clipped at 1e-3',
  )  # fmt: skip
  plots.lines(
    out / 'threshold.png', sweep['curves'],
    ('steps', 'forget gap / doing nothing'),
    'GradDiff converges below rho_c only',
  )  # fmt: skip


def _text(config, x, tables, ascent, lmax, sweep, npo) -> list[str]:
  cell = lambda v: '{:.2g} [{:.2g}, {:.2g}]'.format(*_interval(config, v))
  text = [
    '# Unlearning in ridge regression, exactly', '',
    f'Diabetes, {x.shape[0]} points, {x.shape[1]} features, ridge '
    f'{config.ridge:g}, {config.draws} requests of {config.forget} points per '
    'kind, float64. Gaps to the retrained model relative to doing nothing, '
    'forget / retain; medians with 95 % bootstrap intervals.', '',
    '| method | ' + ' | '.join(
      f'{k} (lmax {np.median(lmax[k]):.2g})' for k in KINDS) + ' |',
    '| --- ' * (1 + len(KINDS)) + '|',
    '| doing nothing | ' + ' | '.join(['1 / 1'] * len(KINDS)) + ' |',
  ]  # fmt: skip
  for name in tables[KINDS[0]]:
    cells = [
      f'{cell(tables[k][name][:, 0])} / {cell(tables[k][name][:, 1])}'
      for k in KINDS
    ]
    text.append(f'| {name} | ' + ' | '.join(cells) + ' |')
  cells = [f'{cell(ascent[k][:, 0])} / {cell(ascent[k][:, 1])}' for k in KINDS]
  text.append('| ascent to the right forget loss | ' + ' | '.join(cells) + ' |')
  every = np.concatenate(list(ascent.values()))
  text += [
    '', f'Gradient ascent stopped at the forget loss of the retrained model: '
    f'forget gap {cell(every[:, 0])}, retain gap {cell(every[:, 1])} of doing '
    f'nothing over all {len(every)} requests; the retain gap is larger than '
    f'when nothing is done in {np.mean(every[:, 1] > 1):.0%} of them. The '
    'right forget loss does not certify the model.', '',
    f'`threshold.png`: rho_c = {sweep["rho_c"]:.4g}; 0.99 rho_c converges, '
    '1.01 rho_c diverges.', '',
    'NPO with live weights against weights frozen at the start (gradient '
    'ascent), relative distance of the moves: ' + ', '.join(
      f'{v:.2g} after {k}' for k, v in npo.items()) + ' steps.', '',
    'These are closed forms; that they equal simulation to 1e-9 is a test. '
    'They say nothing about networks: see the softmax and MLP reports.',
  ]  # fmt: skip
  return text

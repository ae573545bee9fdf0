"""Sections of the unlearning report that measure something of their own.

Each takes a `Stack` (or the config) and returns lines of Markdown.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np

from experiments import unlearning_extra as extra
from experiments import unlearning_measure as measure_lib
from experiments import unlearning_plots as plots
from experiments import unlearning_sets as sets
from experiments.unlearning_cells import Stack, cell, markdown, median, total
from tmlib.unlearning.data import FORGET

__all__ = [
  'ascent_table',
  'audit_lines',
  'lazy_lines',
  'local_lines',
  'rho_picture',
  'sequential_lines',
]


def ascent_table(net: Stack, config, draws: int) -> list[str]:
  """Ascent stopped at the right forget loss."""
  gaps, idle, share = [], [], []
  for key, s in net.studies.items():
    m, forget = net.measured[key], s.requests.roles == FORGET
    losses = measure_lib.losses_of(m.truth, s.table.y)
    target = np.array(
      [row[f].mean() for row, f in zip(losses, forget, strict=True)]
    )
    logits, count = extra.ascent_to_loss(
      s, target, s.plan.ascent_lr, config.report.ascent_steps
    )
    full = np.asarray(s.network.apply(s.params, s.table.x))
    size = np.linalg.norm(measure_lib.weighted(full, logits - m.truth), axis=-1)
    gaps.append(measure_lib.split(size, forget))
    idle.append(m.gaps['nothing'])
    share.append(count < config.report.ascent_steps)
  ratio, share = (
    np.concatenate(gaps) / np.concatenate(idle),
    np.concatenate(share),
  )
  rows = []
  for b in np.unique(net.band):
    at = (net.band == b) & share
    if at.any():
      worse = np.mean(
        total(np.concatenate(gaps)[at]) > total(np.concatenate(idle)[at])
      )
      rows.append(
        [
          net.band_name(b),
          int(at.sum()),
          *(cell(median(ratio[at, j], draws)) for j in (0, 1)),
          f'{worse:.0%}',
        ]
      )
  header = [
    'band',
    'reached',
    'F / nothing',
    'R / nothing',
    'worse than nothing',
  ]
  note = (
    'Gradient ascent stopped as soon as the forget loss equals that of the '
    'retrained model. A gap near or above one says that the right forget loss '
    'does not make the right model.'
  )
  return [
    '### Gradient ascent at the right forget loss',
    '',
    *markdown(header, rows),
    note,
    '',
  ]


def rho_picture(net: Stack, out: Path) -> list[str]:
  """GradDiff through its local critical weight."""
  key = next(iter(net.studies))
  s, m = net.studies[key], net.measured[key]
  ratios = np.array([0.1, 0.3, 0.6, 0.9, 1.1, 1.5, 2.0, 4.0])
  order = np.argsort(s.requests.lmax)
  chosen = order[np.linspace(0, len(order) - 1, 4).astype(int)]
  gaps = extra.rho_sweep(s, chosen, ratios, m.truth[chosen], 400)
  curves = {
    f'lmax {s.requests.lmax[c]:.2g} ({s.requests.kind[c]})': (ratios, g)
    for c, g in zip(chosen, gaps, strict=True)
  }
  plots.lines(
    out / f'{net.name}_rho.png', curves,
    (r'$\rho\,/\,\rho_c$ (local)', 'gap / doing nothing (centred logits)'),
    f'{key}: GradDiff after 400 full steps', 1.0,
  )  # fmt: skip
  return [
    '### GradDiff against its local critical weight', '',
    f'`{net.name}_rho.png`: under cross-entropy and a ridge GradDiff has a '
    'minimum at every weight, so that rho_c is a local threshold: near it the '
    'minimum close to the retrained model may be lost and the gap jump, by '
    'decades where leverage is small (rho is then large), but it stays finite.',
    '',
  ]  # fmt: skip


def sequential_lines(net: Stack, config) -> list[str]:
  """Two deletion requests in a row."""
  key = next(iter(net.studies))
  s = net.studies[key]
  rng = np.random.default_rng(config.seed)
  flipped = np.flatnonzero(s.table.flipped)
  others = np.flatnonzero(~s.table.flipped)
  second = rng.choice(others, min(8, len(others) // 4), replace=False)
  found = extra.sequential(s, flipped[:8], second, _retrainer(s, config))
  gap = ', '.join(f'{g:.3g}' for g in found['gap'])
  lmax = ', '.join(f'{v:.3g}' for v in found['lmax'])
  return [
    '### Two requests, one after the other', '',
    f'{key}: eight mislabelled points, then eight others, one Newton step each.'
    f' Gap to the retrain without both, relative to the start: {gap}. lmax of '
    f'the audits: {lmax}; flags of the second: {list(found["flags"])}.', '',
  ]  # fmt: skip


def _retrainer(s, config) -> Callable[[np.ndarray], np.ndarray]:
  """Kept [n] -> logits of a minimiser on the kept examples."""

  def retrain(kept):
    data = {'x': s.table.x[kept], 'y': s.table.y[kept]}
    params = extra._minimise(s.network, s.params, data, 'softmax', 20)
    return np.asarray(s.network.apply(params, s.table.x))

  return retrain


def audit_lines(net: Stack, out: Path) -> list[str]:
  """The matrix-free audit of one request, with its picture."""
  key = next(iter(net.studies))
  s = net.studies[key]
  index = int(np.argsort(s.requests.lmax)[len(s.requests.lmax) // 2])
  report = extra.request_audit(s, index)
  kind, lmax = s.requests.kind[index], s.requests.lmax[index]
  plots.audit_picture(
    out / f'{net.name}_audit.png', report,
    f'{key}: audit of a forget set ({kind}, lmax {lmax:.2g})',
  )  # fmt: skip
  return ['### One audit', '', f'`{net.name}_audit.png`. {report.reason}', '']


def lazy_lines(config, out: Path) -> list[str]:
  """Error of the theory against alpha."""
  alphas, table = (1.0, 10.0, 100.0), sets.load_table(
    config.data.sets[0], 60, config.data.features, 0.0, config.seed
  )  # fmt: skip
  curves, rows = {}, []
  for loss in ('square', 'softmax'):
    found = extra.lazy_curve(
      table, config.model.hidden, config.model.ridge, loss, alphas, 6
    )
    for name, errors in found.items():
      curves[f'{loss}, {name}'] = (alphas, errors)
      rows.append([loss, name, *(f'{e:.3g}' for e in errors)])
  plots.lines(
    out / 'lazy_scaling.png', curves,
    (r'$\alpha$', 'relative error of the predicted gap'),
    'Lazy scaling: square loss falls like 1 / alpha',
  )  # fmt: skip
  header = ['loss', 'on', *(f'alpha {a:g}' for a in alphas)]
  note = (
    'Relative error of the predicted gap, float64, warm retrain. Square loss '
    'must fall like 1 / alpha; cross-entropy keeps the curvature of the loss '
    'itself. alpha = 1 with square loss is the case in which the theory fails.'
  )
  return ['## Lazy scaling', '', *markdown(header, rows), note, '']


def local_lines(config) -> list[str]:
  """Where the theory holds and fails: networks x losses on digits."""
  rng, rows = np.random.default_rng(config.seed), []
  for network in ('softmax', 'mlp', 'cnn'):
    features, hidden = (64, 3) if network == 'cnn' else (16, 12)
    table = sets.load_table('digits', 150, features, 0.06, config.seed)
    flipped = np.flatnonzero(table.flipped)
    members = np.flatnonzero(table.y == np.bincount(table.y).argmax())
    forget = {
      'random 8': rng.choice(150, 8, replace=False),
      f'mislabelled {len(flipped)}': flipped,
      f'whole class {len(members)}': members,
    }
    for loss in ('softmax', 'square'):
      found = extra.far_from_local(
        table, network, hidden, config.model.ridge, loss, forget
      )
      for kind, (error, cosine) in found.items():
        pair = lambda v: ' / '.join(f'{x:.2f}' for x in v)
        label = {'softmax': 'cross-entropy', 'square': 'square'}[loss]
        fails = 'yes' if max(error) > 0.5 else 'no'
        rows.append([network, label, kind, pair(cosine), pair(error), fails])
  header = [
    'network', 'loss', 'forget set', 'cosine F / R', 'rel. error F / R',
    'fails (error > 0.5)',
  ]  # fmt: skip
  note = (
    '150 digits, one request each; full and warm retrained models by 30 and '
    '15 damped Gauss-Newton steps in float64, so that what is left is mainly '
    'the error of the theory. Softmax regression with square loss is linear, '
    'its error is rounding. Where it fails the move is far from local, and the '
    'prediction is at best a direction: retrain, or take small steps and audit '
    'again.'
  )
  return ['## Where the theory fails', '', *markdown(header, rows), note, '']

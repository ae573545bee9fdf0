"""Tables and pictures of the unlearning experiments.

Axes: R requests, n examples, C classes. Gaps are norms of curvature-weighted
outputs B'(f - f_R), B at the full model: half the square is the Kullback-
Leibler divergence to second order.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from experiments import unlearning_extra as extra
from experiments import unlearning_measure as measure_lib
from experiments import unlearning_plots as plots
from experiments import unlearning_sets as sets
from experiments import unlearning_stats as stats
from tmlib.unlearning.data import FORGET

__all__ = ['write']

BASE = ('r', 'gradient', 'n_F', 'K_FF r', 'influence')
LEVERAGE = ('H_FF r', 'H_RF r')


def _total(gaps: np.ndarray) -> np.ndarray:
  return np.linalg.norm(gaps, axis=-1)


def _median(values: np.ndarray, draws: int) -> tuple[float, float, float]:
  return stats.bootstrap(
    lambda i: float(np.median(values[i])), len(values), draws
  )


def _cell(value: tuple[float, float, float]) -> str:
  return '{:.3g} [{:.3g}, {:.3g}]'.format(*value)


def _markdown(header, rows) -> list[str]:
  line = lambda cells: '| ' + ' | '.join(map(str, cells)) + ' |'
  return [line(header), line(['---'] * len(header)), *map(line, rows), '']


class _Network:
  """The requests of one network over all data sets, stacked."""

  def __init__(self, name: str, studies, measured, methods):
    self.name, self.methods = name, list(methods)
    self.studies, self.measured = studies, measured
    stack = lambda get: np.concatenate(
      [get(studies[k], measured[k]) for k in studies]
    )
    self.group = stack(
      lambda s, m: np.full(
        len(m.unit), s.table.x.shape[0] * 100 + s.table.classes
      )
    )
    self.lmax = stack(lambda s, m: s.requests.lmax)
    self.kind = stack(lambda s, m: s.requests.kind)
    self.unit = stack(lambda s, m: m.unit)
    self.cosine = stack(lambda s, m: m.cosine)
    self.error = stack(lambda s, m: m.error)
    names = ['nothing', *methods]
    self.gaps = {k: stack(lambda s, m, k=k: m.gaps[k]) for k in names}
    self.quality = {k: stack(lambda s, m, k=k: m.quality[k]) for k in names}
    self.predicted = {
      k: stack(lambda s, m, k=k: s.prediction.gaps[k]) for k in names
    }
    self.predictors = {
      k: stack(lambda s, m, k=k: s.prediction.predictors[k])
      for k in (*BASE, *LEVERAGE, 'predicted gap')
    }
    self.band = np.digitize(self.lmax, [b for _, b in sets.BANDS[:-1]])

  def band_name(self, b: int) -> str:
    """Lmax range of a band with its number of requests."""
    low, high = sets.BANDS[b]
    return f'lmax {low:g}-{high:g} (n={int((self.band == b).sum())})'


def _gap_tables(net: _Network, out: Path, draws: int) -> list[str]:
  rows, bars = [], {}
  for b in np.unique(net.band):
    at = net.band == b
    idle = _total(net.gaps['nothing'])[at]
    bars[net.band_name(b)] = {}
    for name in net.gaps:
      total = _total(net.gaps[name])[at]
      relative = _median(total / idle, draws)
      bars[net.band_name(b)][name] = relative
      parts = [
        _cell(
          _median(net.gaps[name][at, j] / net.gaps['nothing'][at, j], draws)
        )
        for j in (0, 1)
      ]
      unit = _median(total / net.unit[at], draws)
      rows.append(
        [net.band_name(b), name, *parts, _cell(relative), _cell(unit)]
      )
  plots.gap_bars(
    out / f'{net.name}_gaps.png', bars, 'gap / doing nothing',
    f'{net.name}: gap to the retrained model at equal cost, median, 95 %',
  )  # fmt: skip
  header = [
    'band',
    'method',
    'F / nothing',
    'R / nothing',
    'both / nothing',
    'both / retrain noise',
  ]
  note = (
    'Medians over requests, 95 % bootstrap intervals. "Retrain noise" is the '
    'gap between two retrains from scratch with other seeds: a gap well below '
    'one is not visible in practice; for a convex loss that noise is small.'
  )
  return ['### Gaps by method', '', *_markdown(header, rows), note, '']


def _theory_table(net: _Network, out: Path, draws: int) -> list[str]:
  rows = []
  for kind in ('all', *sets.KINDS):
    at = np.ones(len(net.kind), bool) if kind == 'all' else net.kind == kind
    if not at.any():
      continue
    cells = [
      _cell(_median(x[at, j], draws))
      for x in (net.cosine, net.error)
      for j in (0, 1)
    ]
    rows.append([kind, int(at.sum()), *cells])
  panels = {}
  for j, name in ((0, 'forget set'), (1, 'retain set')):
    x, y = net.predicted['nothing'][:, j], net.gaps['nothing'][:, j]
    panels[name] = (x, y, net.kind)
  for name in ('newton_cg', 'graddiff'):
    if name in net.predicted:
      panels[f'{name}, both sets'] = (
        _total(net.predicted[name]),
        _total(net.gaps[name]),
        net.kind,
      )
  plots.scatter(
    out / f'{net.name}_theory.png', panels, ('predicted gap', 'realised gap'),
    f'{net.name}: gaps in curvature-weighted outputs, one dot per request',
  )  # fmt: skip
  header = [
    'forget sets',
    'n',
    'cosine F',
    'cosine R',
    'rel. error F',
    'rel. error R',
  ]
  bad = float(np.mean(net.error[:, 0] > 0.5))
  note = (
    f'Predicted against true gap of doing nothing. On {bad:.0%} of the '
    'requests the relative error on F exceeds one half: there the model is '
    'far from local and the prediction is a direction at best.'
  )
  return [
    '### Does the theory predict the gap?',
    '',
    *_markdown(header, rows),
    note,
    '',
  ]


def _regression_table(net: _Network, draws: int) -> list[str]:
  y = np.log(_total(net.gaps['nothing']))
  log = lambda names: np.stack(
    [np.log(np.maximum(net.predictors[k], 1e-12)) for k in names], 1
  )
  if len(np.unique(net.group)) < 2:
    return []
  rows = []
  for label, names in (
    ('leverage: H_FF r, H_RF r', LEVERAGE),
    ('predicted gap (total gradient included)', ('predicted gap',)),
  ):
    found = stats.incremental_r2(log(BASE), log(names), y, net.group, draws)
    rows.append(
      [label, *(_cell(found[k]) for k in ('base', 'extra', 'both', 'gain'))]
    )
  header = ['predictors', 'R2 of the others', 'R2 alone', 'R2 together', 'gain']
  note = (
    'Log gap of doing nothing, least squares, one data set left out at a time '
    f'(n={len(y)}). The others: {", ".join(BASE)}. An interval of the gain '
    'that holds zero means that leverage adds nothing.'
  )
  return ['### Incremental R2', '', *_markdown(header, rows), note, '']


def _ranking_table(net: _Network, draws: int) -> list[str]:
  methods = net.methods
  predicted = {k: _total(net.predicted[k]) for k in methods}
  realised = {k: _total(net.gaps[k]) for k in methods}
  p = np.stack([predicted[k] for k in methods], 1)
  q = np.stack([realised[k] for k in methods], 1)
  tau = np.array([stats.kendall_tau(a, b) for a, b in zip(p, q, strict=True)])
  mean = lambda v: stats.bootstrap(lambda i: float(v[i].mean()), len(v), draws)
  rows = [['Kendall tau, predicted and realised', _cell(mean(tau))]]
  regret = stats.top1_regret(predicted, realised, net.group, methods)
  for name, value in regret.items():
    rows.append([f'top-1 regret, {name}', _cell(mean(value))])
  gain = mean(regret['constant'] - regret['audit'])
  rows.append(['constant less audit', _cell(gain)])
  best = [methods[i] for i in q.argmin(1)]
  counts = ', '.join(
    f'{k} {best.count(k)}' for k in sorted(set(best), key=best.count)[::-1]
  )
  verdict = (
    'The audit beats the best constant choice.'
    if gain[1] > 0
    else 'The audit does NOT beat always taking the best constant method.'
  )
  note = (
    'Regret: log2 of the realised gap of the choice over that of the best '
    'method; "constant" is the method that was best on the other data sets, '
    f'"oracle constant" knows the answer. {verdict} Best method: {counts}.'
  )
  return [
    '### Does the audit pick the right method?',
    '',
    *_markdown(['quantity', 'mean [95 %]'], rows),
    note,
    '',
  ]


def _quality_table(net: _Network) -> list[str]:
  rows = []
  for name, value in net.quality.items():
    kl, p_value, auc = np.median(value, 0)
    passed = float(np.mean(value[:, 1] > 0.05))
    rows.append(
      [name, f'{kl:.3g}', f'{p_value:.3g}', f'{passed:.0%}', f'{auc:.3f}']
    )
  header = ['method', 'KL on F (nats)', 'KS p-value', 'p > 0.05', 'MIA AUC']
  note = (
    'Medians. The KS test compares forget losses with those of the retrained '
    'model and is weak for small sets; a membership AUC below 0.5 means '
    'over-forgotten. Neither certifies a small gap.'
  )
  return ['### Forget quality', '', *_markdown(header, rows), note, '']


def _ascent_table(net: _Network, config, draws: int) -> list[str]:
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
        _total(np.concatenate(gaps)[at]) > _total(np.concatenate(idle)[at])
      )
      rows.append(
        [
          net.band_name(b),
          int(at.sum()),
          *(_cell(_median(ratio[at, j], draws)) for j in (0, 1)),
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
    *_markdown(header, rows),
    note,
    '',
  ]


def _rho_picture(net: _Network, out: Path) -> list[str]:
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
    f'{key}: GradDiff after 400 full steps; no blow-up at 1', 1.0,
  )  # fmt: skip
  return [
    '### GradDiff against its local critical weight', '',
    f'`{net.name}_rho.png`: under cross-entropy and a ridge GradDiff has a '
    'minimum at every weight, so that rho_c is a local threshold: the gap '
    'grows through it and nothing diverges.', '',
  ]  # fmt: skip


def _sequential_lines(net: _Network, config) -> list[str]:
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


def _audit_lines(net: _Network, out: Path) -> list[str]:
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


def _lazy_lines(config, out: Path) -> list[str]:
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
  return ['## Lazy scaling', '', *_markdown(header, rows), note, '']


def write(config, studies: dict[str, Any], workdir: Path) -> None:
  """Writes `report/summary.md`, `summary.json` and the pictures."""
  out, draws = workdir / 'report', config.report.bootstrap
  text = ['# Unlearning judged by the gap to retraining', '']
  summary = {}
  for name in config.networks:
    own = {k: s for k, s in studies.items() if k.split('/')[0] == name}
    measured = {
      k: measure_lib.measure(s, workdir / k, config.methods)
      for k, s in own.items()
    }
    net = _Network(name, own, measured, config.methods)
    sizes = ', '.join(
      f'{k} ({sets.count_parameters(s.params)} parameters)'
      for k, s in own.items()
    )
    text += [
      f'## {name}',
      '',
      f'{len(net.lmax)} requests on {sizes}. '
      f'Bands: {", ".join(map(net.band_name, np.unique(net.band)))}.',
      '',
    ]
    summary[name] = {
      'requests': len(net.lmax),
      'cosine': np.median(net.cosine, 0).tolist(),
      'error': np.median(net.error, 0).tolist(),
    }
    text += _gap_tables(net, out, draws)
    text += _theory_table(net, out, draws)
    text += _regression_table(net, draws)
    text += _ranking_table(net, draws)
    text += _quality_table(net)
    if not config.report.extras:
      continue
    text += _ascent_table(net, config, draws)
    text += _audit_lines(net, out)
    if name == 'softmax':
      text += _rho_picture(net, out)
      text += _sequential_lines(net, config)
  if 'lazy' in config.networks and config.report.extras:
    text += _lazy_lines(config, out)
  (out / 'summary.md').write_text('\n'.join(text) + '\n')
  (out / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')

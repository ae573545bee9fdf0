"""Tables and pictures of the unlearning experiments.

Axes: R requests, n examples, C classes. Gaps are norms of curvature-weighted
outputs B'(f - f_R), B at the full model: half the square is the Kullback-
Leibler divergence to second order.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from experiments import unlearning_measure as measure_lib
from experiments import unlearning_plots as plots
from experiments import unlearning_sections as sections
from experiments import unlearning_sets as sets
from experiments import unlearning_stats as stats
from experiments.unlearning_cells import (
  BASE,
  LEVERAGE,
  Stack,
  cell,
  markdown,
  median,
  total,
)

__all__ = ['write']

# Kinds of forget sets whose gap softmax regression is claimed to predict.
_CLAIMED = ('random', 'mislabelled')


def _gap_tables(net: Stack, out: Path, draws: int) -> list[str]:
  rows, bars = [], {}
  for b in np.unique(net.band):
    at = net.band == b
    idle = total(net.gaps['nothing'])[at]
    bars[net.band_name(b)] = {}
    for name in net.gaps:
      both = total(net.gaps[name])[at]
      relative = median(both / idle, draws)
      bars[net.band_name(b)][name] = relative
      parts = [
        cell(median(net.gaps[name][at, j] / net.gaps['nothing'][at, j], draws))
        for j in (0, 1)
      ]
      unit = median(both / net.unit[at], draws)
      rows.append([net.band_name(b), name, *parts, cell(relative), cell(unit)])
  plots.gap_points(
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
  return ['### Gaps by method', '', *markdown(header, rows), note, '']


def _theory_table(net: Stack, out: Path, draws: int) -> list[str]:
  rows, chosen = [], {'all': np.ones(len(net.kind), bool)}
  chosen |= {kind: net.kind == kind for kind in sets.KINDS}
  for kind in _CLAIMED:
    chosen[f'digits, {kind}'] = (net.group == 'digits') & (net.kind == kind)
  for kind, at in chosen.items():
    if not at.any():
      continue
    cells = [
      cell(median(x[at, j], draws))
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
        total(net.predicted[name]),
        total(net.gaps[name]),
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
    *markdown(header, rows),
    note,
    *_claim(net),
    '',
  ]


def _claim(net: Stack) -> list[str]:
  """Whether the direction is right on digits, as is claimed for softmax."""
  at = (net.group == 'digits') & np.isin(net.kind, _CLAIMED)
  if net.name != 'softmax' or not at.any():
    return []
  medians = {
    k: np.median(net.cosine[at & (net.kind == k)], 0)
    for k in _CLAIMED
    if (at & (net.kind == k)).any()
  }
  low = min(m.min() for m in medians.values())
  cells = ', '.join(f'{k} {m[0]:.3f} / {m[1]:.3f}' for k, m in medians.items())
  return [
    f'Median cosine on digits, F / R: {cells}; '
    + ('all above 0.95.' if low > 0.95 else 'NOT all above 0.95.')
    + f' Lowest single request: {net.cosine[at].min():.3f}.'
  ]


def _regression_table(net: Stack, draws: int) -> list[str]:
  y = np.log(total(net.gaps['nothing']))
  log = lambda names: np.stack(
    [np.log(np.maximum(net.predictors[k], 1e-12)) for k in names], 1
  )
  if len(np.unique(net.group)) < 2:
    return []
  # A level of its own for each network, where several are pooled.
  level = net.network[:, None] == np.unique(net.network)[None, 1:]
  rows = []
  for label, names in (
    ('leverage: H_FF r, H_RF r', LEVERAGE),
    ('predicted gap (total gradient included)', ('predicted gap',)),
  ):
    base, extra_ = (np.concatenate([level, log(k)], 1) for k in (BASE, names))
    found = stats.incremental_r2(base, extra_, y, net.group, draws)
    rows.append(
      [label, *(cell(found[k]) for k in ('base', 'extra', 'both', 'gain'))]
    )
  header = ['predictors', 'R2 of the others', 'R2 alone', 'R2 together', 'gain']
  note = (
    'Log gap of doing nothing, least squares, one data set left out at a time '
    f'(n={len(y)}), intervals over requests. The others: {", ".join(BASE)}. '
    'An interval of the gain that holds zero means that leverage adds nothing.'
  )
  return ['### Incremental R2', '', *markdown(header, rows), note, '']


def _counts(methods, chosen) -> str:
  names = [methods[i] for i in chosen]
  order = sorted(set(names), key=names.count)[::-1]
  return ', '.join(f'{k} {names.count(k)}' for k in order)


def _verdict(gain, oracle) -> str:
  """What the two differences in regret say, in words."""
  if gain[1] > 0 and oracle[1] > 0:
    return 'The audit beats every constant choice, even the one in hindsight.'
  if gain[1] > 0:
    return (
      'The audit beats the constant choice that other data sets suggest, but '
      'NOT the best constant choice in hindsight.'
    )
  return 'The audit does NOT beat always taking the best constant method.'


def _ranking_table(net: Stack, draws: int) -> list[str]:
  methods = net.methods
  predicted = {k: total(net.predicted[k]) for k in methods}
  realised = {k: total(net.gaps[k]) for k in methods}
  p = np.stack([predicted[k] for k in methods], 1)
  q = np.stack([realised[k] for k in methods], 1)
  tau = np.array([stats.kendall_tau(a, b) for a, b in zip(p, q, strict=True)])
  mean = lambda v: stats.bootstrap(lambda i: float(v[i].mean()), len(v), draws)
  rows = [['Kendall tau, predicted and realised', cell(mean(tau))]]
  regret = stats.top1_regret(
    predicted, realised, net.group, methods, net.network
  )
  for name, value in regret.items():
    rows.append([f'top-1 regret, {name}', cell(mean(value))])
  gain = mean(regret['constant'] - regret['audit'])
  oracle = mean(regret['oracle constant'] - regret['audit'])
  rows.append(['constant less audit', cell(gain)])
  rows.append(['oracle constant less audit', cell(oracle)])
  counts, picks = (_counts(methods, x.argmin(1)) for x in (q, p))
  verdict = _verdict(gain, oracle)
  note = (
    'Regret: log2 of the realised gap of the choice over that of the best '
    'method; "constant" is the method that was best on the other data sets '
    '(per network), "oracle constant" is the best one in hindsight, also per '
    f'network. {verdict} Best method: {counts}. The audit chose: {picks}.'
  )
  return [
    '### Does the audit pick the right method?',
    '',
    *markdown(['quantity', 'mean [95 %]'], rows),
    note,
    '',
  ]


def _quality_table(net: Stack) -> list[str]:
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
  return ['### Forget quality', '', *markdown(header, rows), note, '']


def _pooled(config, studies, measured) -> list[str]:
  """The questions about all requests at once, networks pooled."""
  net = Stack('all networks', studies, measured, config.methods)
  bands = ', '.join(map(net.band_name, np.unique(net.band)))
  draws = config.report.bootstrap
  return [
    '## All networks together', '',
    f'{len(net.lmax)} requests on {len(np.unique(net.group))} data sets and '
    f'{len(np.unique(net.network))} networks. Bands: {bands}.', '',
    *_regression_table(net, draws), *_ranking_table(net, draws),
  ]  # fmt: skip


def write(config, studies: dict[str, Any], workdir: Path) -> None:
  """Writes `report/summary.md`, `summary.json` and the pictures."""
  out, draws = workdir / 'report', config.report.bootstrap
  text = ['# Unlearning judged by the gap to retraining', '']
  summary, every = {}, {}
  for name in config.networks:
    own = {k: s for k, s in studies.items() if k.split('/')[0] == name}
    measured = {
      k: measure_lib.measure(s, workdir / k, config.methods)
      for k, s in own.items()
    }
    every |= measured
    net = Stack(name, own, measured, config.methods)
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
    text += sections.ascent_table(net, config, draws)
    text += sections.audit_lines(net, out)
    if name == 'softmax':
      text += sections.rho_picture(net, out)
      text += sections.sequential_lines(net, config)
  if len(config.networks) > 1:
    text += _pooled(config, studies, every)
  if 'lazy' in config.networks and config.report.extras:
    text += sections.lazy_lines(config, out)
  if set(config.networks) & {'mlp', 'cnn'} and config.report.extras:
    text += sections.local_lines(config)
  (out / 'summary.md').write_text('\n'.join(text) + '\n')
  (out / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')

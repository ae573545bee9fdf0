"""Report of `dumoe_planted`: routing against true interests, drift, decay.

Axes: S seeds, n users of a data set, K interests, E experts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from experiments import dumoe_parts as parts_lib
from experiments import dumoe_planted as runner
from experiments import dumoe_plots as plots
from tmlib.ops.statistics import bootstrap_interval
from tmlib.recsys import dumoe, planted
from tmlib.recsys.adapter import kmeans
from tmlib.train import load_params

__all__ = ['write']

_kmeans = jax.jit(kmeans, static_argnames='clusters')

_NOTE = """
{users} users of {length} events per seed, {seeds} seeds, {items} items in
{interests} interests, last event held out, full ranking of all items. Intervals
are 95 % bootstrap over users within these trainings, seeds pooled; differences
are paired by user and seed. They speak neither of other catalogues nor of other
trainings. `oracle` ranks by the true state and law of the next item; `filter`
by the law and the user's true mixture, but it sees only the events: no model
can be better on average.
"""

_HR_NOTE = """
An item belongs to one interest here, so by the law its log probability is that
of its interest plus a constant: linear in a user vector that holds the beliefs,
and one readout could serve all interests. What experts add can only come from
beliefs that the backbone did not learn: {shortfall} of HR@10 is between
`{backbone}` and `filter`.
"""

_NMI_NOTE = """
NMI of the first expert with the true interest at the last event seen, mean over
seeds. Repeated rows raise it in a resample, so points and intervals are
corrected by as much (approximate: about nine in ten such intervals cover).
Stage 3 distils k-means, so NMI alone shows nothing about the training of the
gate: compare with k-means on z itself, on the raw means of the recent features,
and with the interest of the last item seen, which no model is told. Load CV and
unused experts are means over seeds.
"""


class Row(NamedTuple):
  """Predictions of one run and its truth.

  Attributes:
    found: outputs, see `tmlib.recsys.method.Outputs`.
    now: [n] true interest at the last event seen.
    recent: [n] bool, whether it changed within the last three events.
    target: [n] item held out, from 0.
    seed: of the users.
    rate: of switching.
    world: the data set.
  """

  found: dict[str, np.ndarray]
  now: np.ndarray
  recent: np.ndarray
  target: np.ndarray
  seed: int
  rate: float | str
  world: runner.World


def _rows(config, workdir: Path, variant: str) -> list[Row]:
  found = parts_lib.read_predictions(workdir / variant / 'predictions.csv')
  rows = []
  for (rate, seed), one in zip(
    runner.runs_of(config, variant), found, strict=True
  ):
    world = runner.world_of(config, rate, seed)
    split, truth = world.split, world.truth
    last = np.array([split.history[u][-1] for u in split.users])
    changed = np.stack(
      [truth.switched[np.maximum(last - back, 0)] for back in range(3)]
    )
    # The first event of a user counts as no switch, so nothing leaks over.
    rows.append(
      Row(
        one,
        truth.interest[last],
        np.asarray(changed.any(0)),
        split.target_items,
        seed,
        rate,
        world,
      )
    )
  return rows


def _interval(
  metric: Callable[..., float],
  *arrays: Any,
  draws: int,
  method: str = 'percentile',
) -> tuple[float, float, float]:
  one = bootstrap_interval(metric, *arrays, samples=draws, method=method)
  return one.value, one.low, one.high


def _cell(value: tuple[float, float, float], digits: int = 3) -> str:
  return '{:.{d}f} [{:.{d}f}, {:.{d}f}]'.format(*value, d=digits)


def _pool(rows: list[Row], get: Callable[[Row], np.ndarray]) -> np.ndarray:
  return np.concatenate([np.asarray(get(row)) for row in rows])


def _hit(row: Row) -> np.ndarray:
  return (row.found['rank'] <= 10).astype(float)


def _mean_nmi(first, truth, seed) -> float:
  from sklearn.metrics import normalized_mutual_info_score as nmi

  return float(
    np.mean([nmi(truth[seed == s], first[seed == s]) for s in np.unique(seed)])
  )


def _nmi_interval(metric, draws, *arrays) -> tuple[float, float, float]:
  """Repeated rows raise the information: point and quantiles are corrected."""
  one = bootstrap_interval(metric, *arrays, samples=draws, method='basic')
  return one.value - one.bias, one.low, one.high


def _shares(config, rows: list[Row]) -> np.ndarray:
  """[S, E], share of the first choices that each expert has in each seed."""
  count = config.model.experts
  firsts = [row.found['experts'][:, 0].astype(int) for row in rows]
  return np.stack([np.bincount(x, minlength=count) / len(x) for x in firsts])


def _clusters(points: np.ndarray, count: int, seed: int) -> np.ndarray:
  points = points.astype(np.float32)
  return np.asarray(_kmeans(jax.random.key(seed), points, clusters=count)[1])


def _raw_means(config, row: Row) -> np.ndarray:
  """Mean of the recent features of each user, missing ones left out."""
  table, split = row.world.truth.table, row.world.split
  parts = []
  for name in sorted(table.features):
    means = []
    for user in split.users:
      rows = split.history[user][-config.model.short :]
      have = rows[table.present[name][rows]]
      width = table.features[name].shape[1]
      means.append(
        table.features[name][have].mean(0) if len(have) else np.zeros(width)
      )
    parts.append(np.stack(means))
  return np.concatenate(parts, 1)


def _main(config, rows: list[Row]) -> list[Row]:
  return [row for row in rows if row.rate == config.data.main_rate]


def _auprc(config, rows: list[Row]) -> float:
  from sklearn.metrics import average_precision_score

  tags = runner.catalogue_of(config).tags
  return float(
    np.mean([
      average_precision_score(
        tags[row.target].ravel(), row.found['tags'].ravel()
      )
      for row in rows
    ])
  )  # fmt: skip


def _known_hits(config, rows: list[Row], scores_of) -> np.ndarray:
  """Hits of a ranking by the planted law, rows pooled."""
  hits = []
  for row in rows:
    split = row.world.split
    last = np.array([split.history[u][-1] for u in split.users])
    scores = scores_of(row.world.truth, runner.catalogue_of(config), last)
    own = scores[np.arange(len(last)), row.target][:, None]
    hits.append(((scores >= own).sum(1) <= 10).astype(float))
  return np.concatenate(hits)


def _model_table(config, found) -> list[str]:
  draws, table, first = config.report.bootstrap, [], {}
  for name, rows in found.items():
    rows = _main(config, rows)
    if not rows:
      continue
    hits = _pool(rows, _hit)
    cells = [name, _cell(_interval(np.mean, hits, draws=draws))]
    seed = _pool(rows, lambda r: np.full(len(r.now), r.seed))
    truth = _pool(rows, lambda r: r.now)
    if 'experts' in rows[0].found:
      first[name] = _pool(rows, lambda r: r.found['experts'][:, 0])
      value = _nmi_interval(_mean_nmi, draws, first[name], truth, seed)
      share = _shares(config, rows)
      spread = np.mean(share.std(1) / share.mean(1))
      unused = np.mean(np.sum(share == 0, 1))
      cells += [_cell(value), f'{spread:.2f}', f'{unused:.1f}']
    else:
      cells += ['', '', '']
    cells.append(f'{_auprc(config, rows):.3f}')
    table.append(cells)
  best = {
    name: _known_hits(config, _main(config, found['three_stage']), scores_of)
    for name, scores_of in (
      ('filter', planted.filter_scores),
      ('oracle', planted.oracle_scores),
    )
  }
  for name, hits in best.items():
    table.append(
      [name, _cell(_interval(np.mean, hits, draws=draws)), *[''] * 4]
    )
  backbone = 'no_moe' if 'no_moe' in found else 'three_stage'
  ours = _pool(_main(config, found[backbone]), _hit)
  shortfall = _interval(np.mean, best['filter'] - ours, draws=draws)
  head = [
    'model', 'HR@10', 'NMI(expert, interest)', 'load CV', 'unused experts',
    'tag AUPRC',
  ]  # fmt: skip
  lines = [
    f'## Models at a switching rate of {config.data.main_rate}', '',
    parts_lib.markdown(head, table),
    _HR_NOTE.format(shortfall=_cell(shortfall), backbone=backbone),
    _NMI_NOTE, '',
  ]  # fmt: skip
  return lines + _nmi_lines(config, found, first, draws)


def _last_items(row: Row) -> np.ndarray:
  split = row.world.split
  last = [split.history[u][-1] for u in split.users]
  return row.world.truth.table.item[last]


def _nmi_lines(config, found, first, draws) -> list[str]:
  rows = _main(config, found['three_stage'])
  seed = _pool(rows, lambda r: np.full(len(r.now), r.seed))
  truth = _pool(rows, lambda r: r.now)
  count = config.model.experts
  items = runner.catalogue_of(config).interest
  beside = {
    'interest of the last item': _pool(rows, lambda r: items[_last_items(r)]),
    'k-means on z': _pool(
      rows, lambda r: _clusters(r.found['z'], count, r.seed)
    ),
    'k-means on raw means': _pool(
      rows, lambda r: _clusters(_raw_means(config, r), count, r.seed)
    ),
  }
  table = [
    [name, _cell(_nmi_interval(_mean_nmi, draws, value, truth, seed))]
    for name, value in beside.items()
  ]
  gap = lambda a, b, t, s: _mean_nmi(a, t, s) - _mean_nmi(b, t, s)
  ours = first['three_stage']
  for name, other in {**first, **beside}.items():
    if name not in ('three_stage', *runner.CURVE):
      value = _nmi_interval(gap, draws, ours, other, truth, seed)
      word = 'ahead' if value[1] > 0 else 'behind' if value[2] < 0 else 'alike'
      table.append([f'three_stage - {name}', f'{_cell(value)}: {word}'])
  return [parts_lib.markdown(['NMI', 'value'], table), '']


def _mean_auc(recent, drift, seed) -> float:
  """Mean over seeds: the drift of two trained models has no common scale."""
  from sklearn.metrics import roc_auc_score

  pairs = [(recent[seed == s], drift[seed == s]) for s in np.unique(seed)]
  found = [roc_auc_score(*p) for p in pairs if 0 < p[0].sum() < len(p[0])]
  return float(np.mean(found)) if found else float('nan')


def _drift_lines(config, found) -> list[str]:
  table = []
  for rate in config.data.rates:
    rows = [r for r in found['three_stage'] if r.rate == rate]
    recent, drift = (
      _pool(rows, lambda r: r.recent),
      _pool(rows, lambda r: r.found['drift']),
    )
    seed = _pool(rows, lambda r: np.full(len(r.now), r.seed))
    area = _cell(_interval(
      _mean_auc, recent, drift, seed, draws=config.report.bootstrap
    ))  # fmt: skip
    table.append([rate, f'{recent.mean():.2f}', area])
  head = ['switching rate', 'share with a switch', 'AUROC of the drift']
  return [
    '## Drift', '',
    'Drift of the three-stage model against a true switch within the last '
    'three events seen, mean over seeds.', '',
    parts_lib.markdown(head, table), '',
  ]  # fmt: skip


def _curve_lines(config, found, out: Path) -> list[str]:
  draws, table, curves = config.report.bootstrap, [], {}
  for name in runner.CURVE:
    if name not in found:
      continue
    cells, values = [name], []
    for rate in config.data.rates:
      pick = lambda rows, rate=rate: [r for r in rows if r.rate == rate]
      hits = _pool(pick(found[name]), _hit)
      values.append(_interval(np.mean, hits, draws=draws))
      text = _cell(values[-1])
      if name != 'three_stage':
        ours = _pool(pick(found['three_stage']), _hit)
        gap = _interval(np.mean, ours - hits, draws=draws)
        text += f'; three_stage ahead by {_cell(gap)}'
      cells.append(text)
    curves[name] = values
    table.append(cells)
  plots.curves(out / 'switching.png', config.data.rates, curves)
  head = ['HR@10 at rate', *config.data.rates]
  return [
    '## Hit rate over the switching rate', '',
    parts_lib.markdown(head, table), '![](switching.png)', '',
  ]  # fmt: skip


def _drop_lines(config, found) -> list[str]:
  """What users of an interest lose when its expert is left out."""
  cases: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {
    'its interest': [], 'other interests': [],
  }  # fmt: skip
  for row in _main(config, found['three_stage']):
    first = row.found['experts'][:, 0].astype(int)
    user = row.seed * len(row.now) + np.arange(len(row.now))
    for e in range(config.model.experts):
      users = first == e
      if users.sum() < 5:
        continue
      mine = row.now == np.bincount(row.now[users]).argmax()
      loss = _hit(row) - (row.found['dropped'][:, e] <= 10)
      cases['its interest'].append((loss[mine], user[mine]))
      cases['other interests'].append((loss[~mine], user[~mine]))
  head = ['## Leaving an expert out', '']
  if not cases['its interest']:
    return [*head, 'No expert has five users.', '']
  table, values = [], {}
  for name, parts in cases.items():
    loss, user = (np.concatenate(x) for x in zip(*parts, strict=True))
    one = bootstrap_interval(
      np.mean, loss, groups=user, samples=config.report.bootstrap,
      method='percentile',
    )  # fmt: skip
    values[name] = one
    cell = _cell((one.value, one.low, one.high), 4)
    table.append([name, len(loss), len(np.unique(user)), cell])
  own, other = values.values()
  if own.low > max(other.high, 0):
    verdict = 'Users of its interest lose, more than others.'
  else:
    verdict = (
      'No loss is shown: see above what experts can add here. Where interests '
      'need maps of their own, leaving an expert out hurts its users '
      '(tests/recsys/adapter_test.py).'
    )
  return [
    *head,
    'Loss of HR@10 when one expert is left out, over experts with at least '
    'five users; the interest of an expert is the commonest of its users. A '
    'user is a case per expert; users are resampled.', '',
    parts_lib.markdown(['users of', 'cases', 'users', 'loss of HR@10'], table),
    verdict, '',
  ]  # fmt: skip


def _half_life_lines(config, workdir: Path) -> list[str]:
  table = []
  for name, kind in runner.DECAYS.items():
    if name not in config.variants:
      continue
    params = load_params(workdir / name)
    model = runner.model_of(config, name)[0]
    days = dumoe.half_lives(params, model)[: config.train.runs, 0] / 86400
    table.append([
      kind, ', '.join(f'{d:.2f}' for d in days), f'{days.mean():.2f}',
      f'{(days.mean() / 3 - 1) * 100:+.0f} %',
      f'{np.abs(days / 3 - 1).max() * 100:.0f} %',
    ])  # fmt: skip
  if not table:
    return []
  head = ['features', 'learned, days, per seed', 'mean', 'off', 'worst seed']
  return [
    '## Half-life of a planted decay', '',
    'Interests are taken up again with a half-life of 3 days; the model has '
    'one decay head that starts at 1 day. With noisy features it comes out '
    'longer than with `clean` ones, all else equal: a longer memory averages '
    'noise out.', '',
    parts_lib.markdown(head, table), '',
  ]  # fmt: skip


def write(config, workdir: Path) -> None:
  """Writes report/: summary.md and pictures."""
  out = workdir / 'report'
  names = [v for v in config.variants if v not in runner.DECAYS]
  if 'three_stage' not in names:
    raise ValueError('variants: the report needs three_stage')
  found = {name: _rows(config, workdir, name) for name in names}
  d = config.data
  lines = ['# DUMoE on planted drift', _NOTE.format(
    users=d.users, length=d.length, seeds=config.train.runs, items=d.num_items,
    interests=d.interests,
  )]  # fmt: skip
  lines += _model_table(config, found)
  lines += _curve_lines(config, found, out)
  lines += _drift_lines(config, found)
  lines += _drop_lines(config, found)
  lines += _half_life_lines(config, workdir)
  rows = _main(config, found['three_stage'])
  plots.routing(
    out / 'routing.png', rows[0].found['experts'][:, 0].astype(int),
    rows[0].now, config.model.experts, d.interests,
  )  # fmt: skip
  pooled = lambda key: _pool(rows, lambda r: r.found[key])
  plots.fusion(out / 'fusion.png', pooled('drift'), pooled('mix'))
  plots.load(
    out / 'load.png',
    {
      name: _shares(config, _main(config, r))
      for name, r in found.items()
      if r and 'experts' in r[0].found
    },
  )
  learned = dumoe.half_lives(
    load_params(workdir / 'three_stage'),
    runner.model_of(config, 'three_stage')[0],
  )[: len(runner.runs_of(config, 'three_stage'))]
  plots.half_lives(
    out / 'half_lives.png', np.array(config.model.half_life_hours),
    learned / 3600,
  )  # fmt: skip
  for name in ('routing', 'fusion', 'load', 'half_lives'):
    lines += [f'![]({name}.png)', '']
  (out / 'summary.md').write_text('\n'.join(lines))

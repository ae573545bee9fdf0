"""Report of `dumoe_movielens`: every model under every order of ties.

Axes: n users of a group.
"""

import csv
import itertools
from pathlib import Path

import numpy as np

from experiments import dumoe_movielens as runner
from experiments import dumoe_parts as parts_lib
from experiments import dumoe_plots as plots
from tmlib import recsys
from tmlib.ops.statistics import bootstrap_interval
from tmlib.recsys import dumoe, splits
from tmlib.train import load_params

__all__ = ['write']

_GRID = [
  (lags, decay, smoothing)
  for lags in (1, 3)
  for decay in (0.5, 0.8)
  for smoothing in (1.0, 10.0, 100.0)
]

_NOTE = """
Full ranking of all items that the user has not seen; ties of scores count
against the model. The event to foretell is the last one whose item is new to
the user; repeats are skipped. {users} users, {events} events. `item`: equal
times by item id, `file`: in the order of the file, `random`: {orders} random
orders (one training each), `time`: train before the {quantile:.0%} quantile of
all times, foretell each user's first new item after it. The moment of the query
is `{now}` (`last`: of the last event seen; `target`: of the event to foretell).
Days of history are counted without the event to foretell.

Chosen on the validation split (second last event, random ties): the Markov
chain alone, lags={lags}, decay={decay}, smoothing={smoothing}, by NDCG@10 among
{grid} settings. Learned models: the last step of the one setting of the config,
for all groups; this run searches nothing (how that setting was found stands in
the docstring of the config). SASRec has DUMoE's width, depth,
dropout, items ahead, steps and learning rate and was not tuned on its own.
Intervals: 95 %, by the bootstrap over users within the trained models, whose
runs are averaged per user; they do not cover another training.
"""


def _hit(rank: np.ndarray) -> np.ndarray:
  return (rank <= 10).astype(float)


def _gain(rank: np.ndarray) -> np.ndarray:
  return np.where(rank <= 10, 1 / np.log2(1 + rank), 0.0)


_MEASURES = {'HR@10': _hit, 'NDCG@10': _gain}


def _rank(scores: np.ndarray, split: splits.Split) -> np.ndarray:
  scores = np.asarray(scores, np.float64)
  target, seen = split.target_items, split.seen()
  own = scores[np.arange(len(target)), target][:, None]
  above = (scores >= own) & ~seen
  above[np.arange(len(target)), target] = False
  return 1 + above.sum(1)


def _choose_markov(config) -> tuple[int, float, float]:
  """The setting with the best NDCG@10 on the validation split."""
  table = runner.log_of(config).table
  ordered = recsys.order_events(table, 'random', 1000)
  split = recsys.leave_last_out(ordered, 1, unseen_only=True)
  quality = [
    np.mean(recsys.ndcg(_rank(recsys.markov_scores(split, *each), split)))
    for each in _GRID
  ]
  return _GRID[int(np.argmax(quality))]


def _ranks(config, workdir: Path, markov) -> dict[str, list[np.ndarray]]:
  """{model: per run [n] ranks}; a baseline has equal ranks in all runs."""
  found: dict[str, list[np.ndarray]] = {'popularity': [], 'markov': []}
  groups = runner.groups_of(config)
  for group in groups:
    split = runner.split_of(config, group)
    popular = recsys.popularity_scores(split)
    popular = np.broadcast_to(popular, (len(split.users), len(popular)))
    chain = recsys.markov_scores(split, *markov)
    found['popularity'] += [_rank(popular, split)] * group.runs
    found['markov'] += [_rank(chain, split)] * group.runs
  for name in config.models:
    runs = parts_lib.read_predictions(workdir / name / 'predictions.csv')
    found[name] = [run['rank'].astype(int) for run in runs]
  return found


def _by_protocol(config) -> dict[str, list[int]]:
  """{protocol: its runs}."""
  out: dict[str, list[int]] = {}
  run = 0
  for group in runner.groups_of(config):
    out.setdefault(group.protocol, []).extend(range(run, run + group.runs))
    run += group.runs
  return out


def _group_of_run(config) -> list[runner.Group]:
  return [g for g in runner.groups_of(config) for _ in range(g.runs)]


def _long(config, run: int) -> np.ndarray:
  """[n] bool, users of a run with more than 30 days of history."""
  group = _group_of_run(config)[run]
  split = runner.split_of(config, group)
  return recsys.history_span(split)[split.users] > 30


def _rows(config, ranks, long: bool) -> list[list[str]]:
  rows = []
  masks = [
    _long(config, r) if long else slice(None)
    for r in range(len(_group_of_run(config)))
  ]
  for name, runs in ranks.items():
    cells = [name]
    for members in _by_protocol(config).values():
      hit = [_hit(runs[r])[masks[r]].mean() for r in members]
      gain = [_gain(runs[r])[masks[r]].mean() for r in members]
      spread = f' ± {np.std(hit, ddof=1):.4f}' if len(set(hit)) > 1 else ''
      cells.append(f'{np.mean(hit):.4f}{spread} / {np.mean(gain):.4f}')
    rows.append(cells)
  return rows


def _gap(config, ranks, model, base, members, measure, long: bool):
  """Paired by user, the runs of a protocol averaged per user: the interval."""
  gaps = np.mean(
    [measure(ranks[model][r]) - measure(ranks[base][r]) for r in members], 0
  )
  if long:
    gaps = gaps[_long(config, members[0])]
  return bootstrap_interval(
    np.mean, gaps, samples=config.report.bootstrap, method='percentile'
  )


def _differences(config, ranks, measure, long: bool) -> list[list[str]]:
  rows = []
  pairs = [(m, b) for m in config.models for b in ('markov', 'sasrec')]
  for model, base in pairs:
    if model == base or base not in ranks:
      continue
    cells = [f'{model} - {base}']
    for members in _by_protocol(config).values():
      one = _gap(config, ranks, model, base, members, measure, long)
      cells.append(f'{one.value:+.4f} [{one.low:+.4f}, {one.high:+.4f}]')
    rows.append(cells)
  return rows


def _counts(config, long: bool) -> list[int]:
  """Users of each protocol."""
  return [
    int(np.sum(_long(config, r[0]) | (not long)))
    for r in _by_protocol(config).values()
  ]


def _verdict(config, ranks) -> list[str]:
  """A line for each model, measure and population, under random ties."""
  members = _by_protocol(config).get('random', [])
  if not members:
    return ['No random orders were run, so nothing can be said of Markov.']
  lines = ['Under random ties:', '']
  for name, long in itertools.product(config.models, (False, True)):
    mask = _long(config, members[0]) | (not long)
    if mask.sum() < 2:
      continue
    who = 'users with more than 30 days' if long else 'all users'
    for title, measure in _MEASURES.items():
      one = _gap(config, ranks, name, 'markov', members, measure, long)
      word = (
        'beats' if one.low > 0 else 'loses to' if one.high < 0
        else 'does not differ from'
      )  # fmt: skip
      better = sum(
        measure(ranks[name][r])[mask].mean()
        > measure(ranks['markov'][r])[mask].mean()
        for r in members
      )
      lines.append(
        f'- {who}: `{name}` {word} Markov in {title} ({one.value:+.4f} '
        f'[{one.low:+.4f}, {one.high:+.4f}]; ahead in {better} of '
        f'{len(members)} orders).'
      )
  return lines


def write(config, workdir: Path) -> None:
  """Writes report/: summary.md, ranks.csv and pictures."""
  out = workdir / 'report'
  log = runner.log_of(config)
  markov = _choose_markov(config)
  ranks = _ranks(config, workdir, markov)
  d = config.data
  head = list(_by_protocol(config))
  which = ' (validation split)' if d.validation else ''
  lines = [
    f'# Next item on a real log{which}', '', *_verdict(config, ranks),
    _NOTE.format(
      users=len(log.table.users), events=len(log.table.user),
      orders=d.random_orders, quantile=d.time_quantile, now=d.now,
      lags=markov[0], decay=markov[1], smoothing=markov[2], grid=len(_GRID),
    ),
  ]  # fmt: skip
  for title, long in (
    ('All users', False), ('More than 30 days of history', True),
  ):  # fmt: skip
    count = _counts(config, long)
    if min(count) < 2:
      continue
    columns = [f'{h} (n={n})' for h, n in zip(head, count, strict=True)]
    lines += [
      f'## {title}: HR@10 ± sd over runs / NDCG@10', '',
      parts_lib.markdown(['model', *columns], _rows(config, ranks, long)), '',
    ]  # fmt: skip
    for measure, function in _MEASURES.items():
      rows = _differences(config, ranks, function, long)
      lines += [
        parts_lib.markdown([f'difference of {measure}', *columns], rows), '',
      ]  # fmt: skip
  values = {
    protocol: {
      name: np.array([_hit(runs[r]).mean() for r in members])
      for name, runs in ranks.items()
    }
    for protocol, members in _by_protocol(config).items()
  }
  plots.bars(out / 'hit_rate.png', values, 'HR@10, a dot per run')
  lines += ['![](hit_rate.png)', '']
  lines += _half_lives(config, log, workdir, out)
  (out / 'summary.md').write_text('\n'.join(lines))
  _write_ranks(config, ranks, out)


def _half_lives(config, log, workdir: Path, out: Path) -> list[str]:
  if 'dumoe' not in config.models:
    return []
  params = load_params(workdir / 'dumoe')
  runs = len(_group_of_run(config))
  learned = dumoe.half_lives(params, runner.model_of(config, 'dumoe', log)[0])
  plots.half_lives(
    out / 'half_lives.png', np.array(config.model.half_life_hours),
    learned[:runs] / 3600,
  )  # fmt: skip
  return ['![](half_lives.png)', '']


def _write_ranks(config, ranks, out: Path) -> None:
  """All ranks, for whoever wants another metric."""
  with (out / 'ranks.csv').open('w', newline='') as file:
    writer = csv.writer(file)
    writer.writerow(['protocol', 'order', 'run', 'user', *ranks])
    for run, group in enumerate(_group_of_run(config)):
      users = runner.split_of(config, group).users
      for i, user in enumerate(users):
        row = [runs[run][i] for runs in ranks.values()]
        writer.writerow([group.protocol, group.order, run, user, *row])

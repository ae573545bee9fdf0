"""SASRec and DUMoE on a real log, under several orders of its ties.

Ties in time decide figures on MovieLens, so each protocol is a group of its
own: leave-last-out with ties by item id, in file order and in random orders,
and one cut in time for everybody. A part is one model, a run is a pair (group,
seed of the training).
"""

import functools
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import dumoe_parts as parts_lib
from tmlib import recsys, train
from tmlib.config import config_field
from tmlib.recsys import events, splits, windows
from tmlib.recsys.method import Outputs
from tmlib.recsys.options import DUMoEConfig

__all__ = [
  'MODELS',
  'Group',
  'Log',
  'groups_of',
  'load',
  'make',
  'model_of',
  'predict',
  'split_of',
]

# model -> (scheme, fields that differ); 'sasrec' is the backbone alone
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
  'dumoe': ('three', {}),
  'two_stage': ('two', {}),
  'joint': ('joint', {}),
  'no_moe': ('none', {'experts': 0}),
  'no_short_path': ('three', {'short_path': False}),
  'no_drift_gate': ('three', {'fusion': 'plain'}),
}

# What a trained model may be asked anew, without being another experiment.
_ASKED = ('predict', 'recommend')


class Log(NamedTuple):
  """A log with what is known of items and users.

  Attributes:
    table: the log.
    tags: [I, tags], genres; width 0 where there are none.
    profile: [U, P]; width 0 where there is none.
  """

  table: events.EventTable
  tags: np.ndarray
  profile: np.ndarray


class Group(NamedTuple):
  """A protocol, the seed of its order of ties, and of its runs."""

  protocol: str
  order: int
  runs: int


@functools.cache
def load(path: str) -> Log:
  """Reads ML-100k, a folder of RecBole or MovieLens, or a csv of events."""
  place = recsys.find_ml100k() if path == 'ml-100k' else Path(path)
  folder = place if place.is_dir() else place.parent
  atomic = place.is_dir() and any(place.glob('*.inter'))
  if atomic or place.suffix == '.inter':
    table = recsys.load_recbole_inter(place)
  elif place.is_dir() or place.name == 'ratings.csv':
    table = recsys.load_movielens_csv(place)
  else:
    table = recsys.read_events(place)
  tags = np.zeros((table.num_items, 0), np.float32)
  profile = np.zeros((len(table.users), 0), np.float32)
  if place in (folder, folder / 'ml-100k.inter'):
    if (folder / 'ml-100k.item').is_file():
      tags = recsys.read_tags(folder / 'ml-100k.item', table.items)[0]
    if (folder / 'ml-100k.user').is_file():
      profile = recsys.read_tags(
        folder / 'ml-100k.user', table.users, key='user_id',
        columns=('gender', 'occupation'), numbers=('age',),
      )[0]  # fmt: skip
  return Log(table, tags, profile)


def _subset(log: Log, users: int) -> Log:
  """The first users, for a tiny run; 0 for all."""
  if not users or users >= len(log.table.users):
    return log
  table, keep = log.table, log.table.user < users
  fewer = recsys.make_events(
    np.array(table.users)[table.user[keep]],
    np.array(table.items)[table.item[keep]], table.time[keep],
  )  # fmt: skip
  place = {name: i for i, name in enumerate(table.items)}
  tags = log.tags[[place[name] for name in fewer.items]]
  who = {name: i for i, name in enumerate(table.users)}
  profile = log.profile[[who[name] for name in fewer.users]]
  return Log(fewer, tags, profile)


def log_of(config) -> Log:
  """The log of a config."""
  return _subset(load(config.data.path), config.data.users)


def groups_of(config) -> list[Group]:
  """The groups that a config asks for, each with its number of runs."""
  d, found = config.data, []
  for name in d.protocols:
    if name == 'random':
      orders = range(d.first_order, d.first_order + d.random_orders)
      found += [Group(name, order, 1) for order in orders]
    elif name in ('item', 'file', 'time'):
      runs = d.time_runs if name == 'time' else config.train.runs
      runs = d.file_runs if name == 'file' else runs
      found.append(Group(name, 0, runs))
    else:
      raise ValueError(
        f'data.protocols: {name!r} is not one of item, file, random, time'
      )
  if not found:
    raise ValueError('data.protocols is empty; name item, file, random or time')
  return found


def _check(config) -> None:
  """Refuses, by the name of its field, what a library function would blame."""
  unknown = set(config.models) - {*MODELS, 'sasrec'}
  if unknown or not config.models:
    raise ValueError(
      f'models: {", ".join(sorted(map(repr, unknown))) or "nothing"} is not '
      f'one of {sorted([*MODELS, "sasrec"])}'
    )
  least = dict(
    users=0, random_orders=1, first_order=0, file_runs=1, time_runs=1,
    window=1, augment=1, recommend=0,
  )  # fmt: skip
  values = {f'data.{name}': (config.data[name], n) for name, n in least.items()}
  values['train.runs'] = config.train.runs, 1
  for name, (value, low) in values.items():
    if value < low:
      raise ValueError(f'{name}={value} must be at least {low}')
  if config.data.now not in windows.NOW:
    raise ValueError(
      f'data.now={config.data.now!r} is not one of {windows.NOW}'
    )


def _check_asked(group: Group, split: splits.Split) -> None:
  count = len(split.users)
  if count < 2:
    raise ValueError(
      f'data.protocols: {group.protocol!r} has {count} users with an event to '
      'foretell; the intervals of the report need two, so the log needs more '
      'users with an item that is new to them after their first'
    )


def split_of(config, group: Group) -> splits.Split:
  """What a group may see and must foretell."""
  table, validation = log_of(config).table, config.data.validation
  if group.protocol != 'time':
    ordered = recsys.order_events(table, group.protocol, group.order)
    return recsys.leave_last_out(ordered, int(validation), unseen_only=True)
  # Random ties: no order that a user interface or an id made.
  ordered = recsys.order_events(table, 'random', group.order)
  quantile = config.data.time_quantile
  with config_field('data.time_quantile'):
    split = recsys.time_split(ordered, quantile)
    if not validation:
      return split
    # Once more, of what lies before the cut.
    old = table.time[np.concatenate(split.history)]
    ordered = ordered._replace(rows=split.history)
    return recsys.time_split(ordered, cut=int(np.quantile(old, quantile)))


def _learning_windows(config, group: Group, split, profile) -> dict[str, Any]:
  """Windows of the histories; ties that are random anyway in several orders."""
  d = config.data
  options: dict[str, Any] = dict(now=d.now, profile=profile)
  found = [windows.training_windows(split, d.window, **options)]
  if group.protocol in ('random', 'time'):
    rng = np.random.default_rng((config.seed, group.order, 3))
    for _ in range(d.augment - 1):
      shuffled = tuple(
        rows[np.lexsort((rng.random(len(rows)), split.table.time[rows]))]
        for rows in split.history
      )
      again = split._replace(history=shuffled)
      found.append(windows.training_windows(again, d.window, **options))
  return parts_lib.stack_groups(found)[0]


def make(config) -> train.Experiment:
  """One part per model, then the report."""
  _check(config)
  log, groups, d = log_of(config), groups_of(config), config.data
  if d.recommend > log.table.num_items:
    raise ValueError(
      f'data.recommend={d.recommend} is more than the {log.table.num_items} '
      'items of the log'
    )
  learn, ask = [], []
  for group in groups:
    split = split_of(config, group)
    _check_asked(group, split)
    learn.append(_learning_windows(config, group, split, log.profile))
    options: dict[str, Any] = dict(now=d.now, profile=log.profile)
    ask.append(windows.query_windows(split, d.window, **options))
  served, names = _served(config, log)
  member = np.repeat(np.arange(len(groups)), [g.runs for g in groups])
  batch = config.train.batch_size
  data = parts_lib.group_stream(
    *parts_lib.stack_groups(learn), member, batch, config.seed
  )
  held = parts_lib.group_pass(*parts_lib.stack_groups(ask), member, 4 * batch)
  everyone = parts_lib.group_pass(
    served, np.zeros(len(served['user']), int), np.zeros(len(member), int),
    batch, first_id=sum(len(group['user']) for group in ask),
  )  # fmt: skip
  users = log.table.users
  names = [users[u] for group in ask for u in group['user']] + names
  parts = {}
  for name in config.models:
    model, scheme = model_of(config, name, log)
    parts[name] = parts_lib.part_of(
      config, model, scheme, data, {'test': held}, len(member), tags=log.tags,
      outputs=Outputs(top=d.recommend), predict=everyone, names=names,
      labels={'top': ('', *log.table.items)},
    )  # fmt: skip

  def report(workdir: Path) -> None:
    from experiments import dumoe_movielens_report

    dumoe_movielens_report.write(config, workdir)

  return train.Experiment(parts=parts, report=report)


def predict(config, workdir: Path) -> int:
  """Recommends with the models of a workdir: MODEL/predict.csv of each.

  Args:
    config: as in training, but for `data.predict` and `data.recommend`.
    workdir: of the training.

  Returns:
    Exit code, 0.
  """
  trained, path = config.copy_and_resolve_references(), workdir / 'config.json'
  if path.is_file():
    data = json.loads(path.read_text())['data']
    trained.data.update({name: data[name] for name in _ASKED})
  return train.run(
    lambda _: make(config), trained, workdir=workdir, mode='predict'
  )


def _served(config, log: Log) -> tuple[dict[str, Any], list[str]]:
  """Whole histories to recommend from, no targets, and their users' names."""
  table, profile = log.table, log.profile
  if config.data.predict:
    other = recsys.read_events(config.data.predict)
    place = {name: i for i, name in enumerate(table.items)}
    unknown = [name for name in other.items if name not in place]
    if unknown:
      raise ValueError(
        f'{config.data.predict}: item {unknown[0]!r} is not in the log that the'
        ' model was trained on; leave it out'
      )
    index = np.array([place[name] for name in other.items], np.int32)
    table = other._replace(item=index[other.item], items=table.items)
    profile = np.zeros((len(table.users), profile.shape[1]), np.float32)
  rows = recsys.order_events(table, 'file').rows
  # Nobody knows when the next event will be: at the earliest with the last.
  whole = splits.Split(table, rows, np.array([r[-1] for r in rows]))
  found = windows.query_windows(
    whole, config.data.window, now=config.data.now, profile=profile,
    mask_seen=False,
  )  # fmt: skip
  del found['target']
  for row, events_of in enumerate(rows):
    found['seen'][row, table.item[events_of] + 1] = True
  return found, list(table.users)


def model_of(config, name: str, log: Log) -> tuple[DUMoEConfig, str]:
  """The network of a model and the scheme that trains it."""
  m, items = config.model, log.table.num_items
  if name == 'sasrec':
    return DUMoEConfig.sasrec(
      items, dim=m.dim, heads=m.heads, blocks=m.blocks, hidden=m.hidden,
      dropout=m.dropout, ahead=m.ahead, ahead_decay=m.ahead_decay,
    ), 'none'  # fmt: skip
  scheme, changes = MODELS[name]
  sizes = dict(
    num_items=items, num_tags=log.tags.shape[1],
    profile_dim=log.profile.shape[1],
  )  # fmt: skip
  return parts_lib.model_of(config, **(sizes | changes)), scheme

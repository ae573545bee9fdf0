"""DUMoE on users whose interests drift in a way that is known.

Every data set is a group (switching rate, or decay, and seed); a part is one
model, its runs are groups. Truth is simulated again by the report and never
enters a batch.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments import dumoe_parts as parts_lib
from tmlib import train
from tmlib.recsys import events, planted, splits, windows
from tmlib.recsys.method import Outputs
from tmlib.recsys.options import DUMoEConfig

__all__ = [
  'CURVE',
  'DECAYS',
  'VARIANTS',
  'World',
  'catalogue_of',
  'make',
  'model_of',
  'runs_of',
  'world_of',
]

# variant -> (scheme, fields of the model that differ)
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
  'three_stage': ('three', {}),
  'joint': ('joint', {}),
  'two_stage': ('two', {}),
  'random_gate': ('random', {}),
  'no_moe': ('none', {'experts': 0}),
  'no_short_path': ('three', {'short_path': False}),
  'no_drift_gate': ('three', {'fusion': 'plain'}),
  'static_fusion': ('three', {'fusion': 'static'}),
}
# variant -> features of the users with a planted decay
DECAYS = {'half_life': 'clean', 'half_life_noisy': 'noisy'}
# Those that are run at every switching rate, the others at `data.main_rate`.
CURVE = ('three_stage', 'no_short_path', 'no_drift_gate', 'sasrec')


class World(NamedTuple):
  """One simulated data set."""

  truth: planted.Planted
  split: splits.Split


def catalogue_of(config) -> planted.Catalogue:
  """The items that all data sets share."""
  d = config.data
  return planted.make_catalogue(d.num_items, d.interests, d.widths, config.seed)


@functools.lru_cache(maxsize=64)
def _world(catalogue_key, users, length, law, noise, seed) -> World:
  catalogue = planted.make_catalogue(*catalogue_key)
  if isinstance(law, str):
    truth = planted.decaying_users(
      catalogue, users, length, noise=noise * (law == 'noisy'), seed=seed
    )
  else:
    truth = planted.switching_users(
      catalogue, users, length, law, noise=noise, seed=seed
    )
  sequences = events.order_events(truth.table, 'file')
  return World(truth, splits.leave_last_out(sequences))


def world_of(config, law: float | str, seed: int) -> World:
  """The data set of a switching rate, or a decay, and a seed."""
  d = config.data
  key = (d.num_items, d.interests, tuple(d.widths), config.seed)
  return _world(key, d.users, d.length, law, d.noise, seed)


def runs_of(config, variant: str) -> list[tuple[float | str, int]]:
  """(switching rate or features of a decay, seed) of each run."""
  d = config.data
  laws: Sequence[float | str] = (d.main_rate,)
  if variant in CURVE:
    laws = d.rates
  elif variant in DECAYS:
    laws = (DECAYS[variant],)
  return [(law, seed) for law in laws for seed in range(config.train.runs)]


def make(config) -> train.Experiment:
  """One part per variant, then the report."""
  d = config.data
  known = {*VARIANTS, 'sasrec', *DECAYS}
  unknown = set(config.variants) - known
  if unknown:
    raise ValueError(
      f'variants: {sorted(unknown)[0]!r} is not one of {sorted(known)}'
    )
  if config.train.runs < 1:
    raise ValueError('train.runs=0: the planted data need at least one seed')
  if d.main_rate not in d.rates:
    raise ValueError(f'main_rate={d.main_rate} is not among rates={d.rates}')
  parts = {name: _part(config, name) for name in config.variants}

  def report(workdir: Path) -> None:
    from experiments import dumoe_planted_report

    dumoe_planted_report.write(config, workdir)

  return train.Experiment(parts=parts, report=report)


def model_of(config, variant: str) -> tuple[DUMoEConfig, str]:
  """The network of a variant and the scheme that trains it."""
  d, m = config.data, config.model
  sizes = dict(
    num_items=d.num_items, num_tags=2 * d.interests, profile_dim=d.interests,
    modalities=tuple((f'm{i}', w) for i, w in enumerate(d.widths)),
  )  # fmt: skip
  if variant == 'sasrec':
    return DUMoEConfig.sasrec(
      d.num_items, num_tags=2 * d.interests, interest=m.interest, dim=m.dim,
      heads=m.heads, blocks=m.blocks, hidden=m.hidden, dropout=m.dropout,
    ), 'none'  # fmt: skip
  if variant in DECAYS:
    # The decay alone: no transformer, no profile, one head from one day.
    alone = dict(
      blocks=0, buckets=0, profile_dim=0, experts=0, half_lives=(86400.0,),
      short=config.data.window, fusion='static',
    )  # fmt: skip
    return parts_lib.model_of(config, **(sizes | alone)), 'none'
  scheme, changes = VARIANTS[variant]
  return parts_lib.model_of(config, **(sizes | changes)), scheme


def _part(config, variant: str) -> train.Experiment:
  d = config.data
  runs = runs_of(config, variant)
  worlds = [world_of(config, law, seed) for law, seed in runs]
  options: dict[str, Any] = dict(now=d.now)
  learn, ask = [], []
  for world in worlds:
    options['profile'] = world.truth.profile
    learn.append(windows.training_windows(world.split, d.window, **options))
    ask.append(
      windows.query_windows(world.split, d.window, mask_seen=False, **options)
    )
  groups = np.arange(len(runs))
  batch = config.train.batch_size
  data = parts_lib.group_stream(
    *parts_lib.stack_groups(learn), groups, batch, config.seed
  )
  held = parts_lib.group_pass(*parts_lib.stack_groups(ask), groups, batch)
  model, scheme = model_of(config, variant)
  outputs = Outputs(details=True, drop=variant == 'three_stage')
  served = parts_lib.group_pass(*parts_lib.stack_groups(ask), groups, batch)
  return parts_lib.part_of(
    config, model, scheme, data, {'test': held}, len(runs),
    tags=catalogue_of(config).tags, outputs=outputs, predict=served,
  )  # fmt: skip

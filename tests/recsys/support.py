"""A small planted log and a small model that several tests share."""

import functools

import numpy as np

from tmlib.recsys import events, options, planted, splits, windows


@functools.cache
def world(users=24, length=12):
  """(catalogue, planted, split)."""
  catalogue = planted.make_catalogue(30, 3, (4, 3))
  found = planted.switching_users(catalogue, users, length, 0.2)
  sequences = events.order_events(found.table, 'file')
  return catalogue, found, splits.leave_last_out(sequences)


@functools.cache
def arrays(length=6, now='last'):
  """(training windows, query windows)."""
  _, found, split = world()
  kw = dict(now=now, profile=found.profile)
  return (
    windows.training_windows(split, length, **kw),
    windows.query_windows(split, length, mask_seen=False, **kw),
  )


def config(**changes):
  fields = dict(
    num_tags=6, profile_dim=3, modalities=(('m0', 4), ('m1', 3)), dim=8,
    heads=2, blocks=1, hidden=8, dropout=0.0, short=4, experts=4,
    expert_hidden=4, half_lives=(3600.0, 86400.0),
  )  # fmt: skip
  return options.DUMoEConfig(30, **(fields | changes))


def take(batch, rows):
  import jax

  batch = jax.tree.map(lambda x: np.asarray(x)[rows], batch)
  count = len(batch['user'])
  extra = {'id': np.arange(count), 'weight': np.ones(count, np.float32)}
  return batch | extra

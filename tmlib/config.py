"""The fields that every config has.

Here, above `tmlib.train`, so that a config loads without loading jax: a typo in
one is answered at once.
"""

import dataclasses
from typing import Any

from ml_collections import ConfigDict

from tmlib.options import Options

__all__ = ['default_config', 'identity']

# Fields of `config.train` that change the mathematics; the rest is free.
_FIXED = ('batch_size', 'runs')


def default_config() -> Any:
  """A ConfigDict with the loop's and the optimizer's fields, to be filled.

  `config.experiment` names a module of `experiments/`; `config.train` holds
  steps, batch_size, runs, microbatches, max_skips and every field of `Options`;
  `config.optimizer` is read by `make_optimizer`, but for `ema_decay` (0 for no
  average).
  """
  config = ConfigDict()
  config.experiment = ''
  config.seed = 0
  config.train = ConfigDict(dataclasses.asdict(Options()))
  # A command-line matter, not a property of the experiment.
  del config.train.allow_config_change
  config.train.update(
    steps=1000, batch_size=16, runs=0, microbatches=1, max_skips=10
  )
  config.optimizer = ConfigDict(
    dict(
      name='adamw',
      learning_rate=1e-3,
      schedule='cosine',
      warmup=0.05,
      weight_decay=1e-4,
      clip=1.0,
      ema_decay=0.0,
    )
  )
  return config


def identity(config: ConfigDict) -> dict:
  """The part of a config that must not change when a run is resumed."""
  found = config.to_dict()
  train = found.pop('train', {})
  found.pop('report', None)
  found['train'] = {name: train[name] for name in _FIXED if name in train}
  return found

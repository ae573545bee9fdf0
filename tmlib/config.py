"""The fields that every config has.

Here, above `tmlib.train`, so that a config loads without loading jax: a typo in
one is answered at once.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from ml_collections import ConfigDict

from tmlib.options import Options

__all__ = ['config_field', 'default_config', 'identity']

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


@contextlib.contextmanager
def config_field(name: str) -> Iterator[None]:
  """What is raised inside is said of this field of the config.

  Functions of the library name their arguments; a user of the command line
  knows the field that went into them.

  Args:
    name: dotted path, such as 'data.folds'.

  Yields:
    Nothing.
  """
  try:
    yield
  except TypeError as error:
    raise TypeError(f'{name}: {error}') from error
  except ValueError as error:
    raise ValueError(f'{name}: {error}') from error
  except OSError as error:
    raise type(error)(f'{name}: {error}') from error


def identity(config: ConfigDict) -> dict:
  """The part of a config that must not change when a run is resumed."""
  found = config.to_dict()
  train = found.pop('train', {})
  found.pop('report', None)
  found.pop('predict', None)
  found['train'] = {name: train[name] for name in _FIXED if name in train}
  return found

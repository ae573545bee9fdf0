"""Every bag model on real bags, cross-validated.

  python experiments/main.py --config=configs/mil.py:abmil --workdir=runs/abmil
  python experiments/main.py --config=configs/mil.py:compare --workdir=runs/mil

The sets of `configs/tmevolve.py` and its protocol: 10 folds x 5 seeds, every
fold and seed of a model in one program, one width and one optimizer for all
models, the last step is taken. Default: gated ABMIL on UCSB breast cancer.

Args after the colon: a model (`:clam_sb`, `:dsmil`, ...), `:compare` (all
models on ucsb, musk1, musk2 and elephant, one table beside the pooled logistic
regression), `:tiny` (seconds, to see that it runs). Another set:
`--config.data.sets="('musk1',)"`. Models led by text are not here: these bags
come without a text encoder.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import tmevolve

# The first is the reference that the others are compared with.
MODELS = (
  'gated_abmil',
  'abmil',
  'mean_pool',
  'max_pool',
  'log_sum_exp_pool',
  'noisy_or_instance',
  'top_k_instance',
  'clam_sb',
  'clam_mb',
  'dsmil',
  'dtfd',
  'transmil',
  'patch_gcn',
  'wikg',
  'tmevolve',
)


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` names the model."""
  config: Any = tmevolve.get_config()
  config.models = ('gated_abmil',)
  # One width and scorer for all models.
  config.model.attention = 64
  if arg == 'compare':
    config.models = MODELS
    config.data.sets = ('ucsb', 'musk1', 'musk2', 'elephant')
  elif arg == 'tiny':
    config.models = ('gated_abmil', 'clam_sb')
    config.data.update(sets=('musk1',), folds=3)
    config.train.update(steps=4, runs=1, log_every=2, save_every=2)
    config.model.update(hidden=8, attention=4)
    config.report.bootstrap = 100
  elif arg in MODELS:
    config.models = (arg,)
  elif arg is not None:
    raise ValueError(
      f'config argument {arg!r}: allowed are tiny, compare, {", ".join(MODELS)}'
    )
  return config

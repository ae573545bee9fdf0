"""Unlearning by softmax regression on digits, wine and breast cancer.

  python experiments/main.py --config=configs/unlearning_softmax.py \
    --workdir=runs/unlearning_softmax

24 deletion requests per data set, 8 in each band of the largest
self-leverage; nine unlearners at equal cost, judged against a retrained
model. `report/` then holds tables and pictures; a first look: `summary.md`.
Args: `tiny`, or a data set (`digits`).
"""

from typing import Any

from ml_collections import ConfigDict

from tmlib.config import default_config

SETS = ('digits', 'wine', 'breast_cancer')


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None, 'tiny' or a data set."""
  config: Any = default_config()
  config.experiment = 'unlearning'
  config.networks = ('softmax',)
  config.methods = (
    'gradient_ascent',
    'graddiff',
    'finetune',
    'scrub',
    'npo',
    'random_label',
    'corrected_relabel',
    'newton_cg',
    'influence',
  )
  config.requests = 8  # per band and data set
  config.data = ConfigDict(
    dict(
      sets=SETS,
      examples=360,
      features=16,
      flip=0.06,
    )
  )
  config.model = ConfigDict(dict(hidden=12, ridge=0.3, alpha=10.0))
  # Of the full and the retrained models.
  config.train.update(steps=800, batch_size=128, log_every=400)
  config.optimizer.learning_rate = 0.02
  # Step sizes in units of 1 / largest curvature; `passes` over the data are
  # what every method may spend.
  config.unlearn = ConfigDict(
    dict(
      passes=10,
      batch_size=60,
      lr=0.5,
      ascent_lr=0.02,
      ascent_steps=5,
      forget_weight=0.1,
      beta=0.95,
      temperature=0.1,
    )
  )
  config.report = ConfigDict(
    dict(bootstrap=1000, ascent_steps=200, extras=True)
  )
  if arg == 'tiny':
    config.data.update(sets=('wine',), examples=60, features=6)
    config.methods = ('graddiff', 'newton_cg')
    config.requests = 1
    config.train.update(steps=20, batch_size=32, log_every=20)
    config.unlearn.update(passes=4, batch_size=40)
    config.report.update(bootstrap=20, ascent_steps=10, extras=False)
  elif arg in SETS:
    config.data.sets = (arg,)
  elif arg is not None:
    allowed = ', '.join(map(repr, ('tiny', *SETS)))
    raise ValueError(f'config arg {arg!r}; allowed: {allowed}')
  return config

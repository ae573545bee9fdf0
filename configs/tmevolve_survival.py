r"""Survival from pathways: patients are bags, pathways instances, folds runs.

  python experiments/main.py --config=configs/tmevolve_survival.py \
    --config.data.dir=../shared/data/tcga --workdir=runs/survival

The folder holds the public SurvPath tables of a study: tcga_stad.csv,
stad_rna_clean.csv, hallmarks_signatures.csv and splits_stad/. A patient is a
bag of 50 hallmark pathways, each with the first principal components of its
genes; two pathways are joined if they share genes. Every model is trained on
the published folds, all folds and seeds in one program, by Cox's partial
likelihood of a batch (DSMIL and DTFD, whose losses are of one bag, by the
discrete-time likelihood), beside ridge Cox regressions. The last step is taken
and nothing is chosen on a tested patient.

Args after the colon: `:compare` (every bag model), `:tiny` (a simulated cohort,
seconds).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config

# The first is the reference that the others are compared with.
MODELS = (
  'mean_pool',
  'gated_abmil',
  'static',
  'uniform',
  'tmevolve',
)
OTHERS = (
  'abmil',
  'max_pool',
  'log_sum_exp_pool',
  'top_k_pool',
  'clam_sb',
  'clam_mb',
  'dsmil',
  'dtfd',
  'transmil',
  'patch_gcn',
  'wikg',
)


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None, 'compare' or 'tiny'."""
  if arg not in (None, 'compare', 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed are compare, tiny')
  config = default_config()
  config.experiment = 'tmevolve_survival'
  config.models = MODELS
  config.data = ConfigDict(
    dict(
      dir='',
      study='stad',
      # hallmarks, xena (Reactome) or combine.
      signatures='hallmarks',
      # os, dss or pfi.
      endpoint='os',
      components=3,
      neighbours=8,
      # Simulated patients, where no folder is given.
      synthetic=0,
    )
  )
  # Runs are seeds; the partial likelihood is that of a batch.
  config.train.update(
    steps=60, batch_size=96, runs=2, log_every=20, save_every=20, keep=1
  )
  config.optimizer.update(learning_rate=1e-3, weight_decay=1e-2)
  # One width, dropout and optimizer for all models.
  config.model = ConfigDict(dict(hidden=16, attention=16, dropout=0.25))
  config.tmevolve = ConfigDict(
    dict(regions=4, num_concepts=8, steps=4, reaction='none', balance=0.01)
  )
  config.loss = ConfigDict(dict(ties='efron', bins=4, alpha=0.0))
  config.linear = ConfigDict(
    dict(
      genes=20,
      penalties=(1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0),
    )
  )
  config.report = ConfigDict(dict(bootstrap=1000, pathways=15))
  if arg == 'compare':
    config.models = (*MODELS, *OTHERS)
  elif arg == 'tiny':
    config.train.quick_compile = True
    config.models = ('tmevolve',)
    config.data.synthetic = 48
    config.train.update(steps=4, runs=1, log_every=2, save_every=2)
    config.model.update(hidden=8, attention=4)
    config.tmevolve.update(regions=2, num_concepts=2, steps=2)
    config.linear.update(genes=4, penalties=(1.0, 10.0))
    config.report.update(bootstrap=100, pathways=8)
  return config

r"""Your slides: train, test and apply any bag model on a folder of features.

  python experiments/main.py --config=configs/slides.py \
    --config.data.features=FEATURES --config.data.labels=labels.csv \
    --workdir=runs/mine

FEATURES is a folder that CLAM or TRIDENT wrote (.h5), or one of .pt, .npz or
.npy files, a slide each. The table has a column slide_id or case_id, and label
(`--config.task=subtype`, the default), survival_months and censorship
(`survival_nll`, `survival_cox`), or numbers (`expression`). With nothing else
given, patients are spread over 5 folds with equal shares of every class, each
fold is tested by a model that never saw it, and nothing is chosen on it: every
model takes its last step. `--config.data.splits=` takes a split table or a
folder of them instead. Look into `report/` first.

Models led by text (vila_mil, concep_path, zero_shot; tmevolve if wished) take
`--config.data.text=FILE`, embeddings by the text encoder that belongs to the
features: `.npz` with an array per class under its name, or one array.

New slides without labels, once training has ended:

  python experiments/main.py --config=configs/slides.py --mode=predict \
    --config.predict.features=NEW --workdir=runs/mine

writes `predict/predictions.csv` and heat maps, also for QuPath.

Args after the colon: `:tiny` (twelve synthetic slides, seconds).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed is tiny')
  config = default_config()
  config.experiment = 'slides'
  # subtype, survival_nll, survival_cox or expression.
  config.task = 'subtype'
  # Any name that tmlib.mil.create_model knows.
  config.model = 'tmevolve'
  config.data = ConfigDict(
    dict(
      features='',
      labels='',
      splits='',
      # '' takes the first column with a usual name.
      label_column='',
      slide_column='',
      case_column='',
      time_column='',
      event_column='',
      targets=(),
      # slide, patient (all slides of one together), or auto: a slide for
      # subtype, a patient otherwise.
      unit='auto',
      folds=5,
      # Test each site whole, so that no model has seen its scanner.
      preserve_sites=False,
      encoder='',
      # Embeddings by a text encoder (.npy, .npz, .pt), of classes or concepts.
      text='',
      # error, or skip what is broken or has no label.
      incomplete='error',
      # grid, knn (patches that look alike), none, or auto: a grid where the
      # model needs one.
      graph='auto',
      neighbours=8,
      # Patches drawn from a bag at each step; 0 takes all.
      max_patches=4096,
      standardize=True,
      # shuffle, balanced (classes in turn), events (in every batch).
      sampler='shuffle',
      # Synthetic slides, where no folder is given.
      synthetic=0,
    )
  )
  # Steps are epochs times batches, and at least min_steps, unless train.steps
  # says otherwise.
  config.epochs = 20
  config.min_steps = 300
  config.train.update(steps=0, batch_size=8, log_every=10, keep=1)
  # Reading threads, and bags in a batch of the evaluation.
  config.train.workers = 2
  config.train.eval_batch_size = 1
  config.optimizer.update(learning_rate=2e-4, weight_decay=1e-5)
  # What all models share; `options` names more, as ('attention=128',).
  config.network = ConfigDict(dict(hidden=128, dropout=0.25, options=()))
  config.tmevolve = ConfigDict(
    dict(
      regions=4,
      num_concepts=8,
      steps=4,
      reaction='none',
      pooling='region',
      integrator='euler',
    )
  )
  config.loss = ConfigDict(
    dict(class_weights=True, label_smoothing=0.0, bins=4, alpha=0.0)
  )
  config.predict = ConfigDict(dict(features='', heatmaps=True))
  config.report = ConfigDict(dict(bootstrap=1000, heatmaps=4))
  if arg == 'tiny':
    # TMEvolve takes longer to compile than the rest to run.
    config.model = 'gated_abmil'
    config.data.update(synthetic=12, folds=2, max_patches=0)
    config.train.update(steps=4, batch_size=4, log_every=2)
    config.network.hidden = 8
    config.tmevolve.update(regions=2, num_concepts=2, steps=2)
    config.report.update(bootstrap=100, heatmaps=1)
  return config

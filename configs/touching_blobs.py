"""Do a tumour and an immune disc touch? Planted truth, every ablation.

  python experiments/main.py --config=configs/touching_blobs.py \
    --workdir=runs/touching_blobs

Composition does not tell the label, so ABMIL is at chance; message passing
solves it. The table holds TMEvolve, its ablations and plain (uniform) diffusion
at equal width, 10 seeds each, and TMEvolve with given, shuffled and random
concept rows. Pictures show regions, concepts, flux and energy on the tissue;
`--config.data.positions=FILE` (a CSV with columns X and Y) draws them on the
patches of a real slide as well.

Args after the colon: `:tiny` (seconds, to see that it runs).
"""

from typing import Any

from ml_collections import ConfigDict

from tmlib.config import default_config

VARIANTS = (
  'gated_abmil',
  'static',
  'no_flux',
  'uniform',
  'uniform_patch_pool',
  'tmevolve',
  'tmevolve_patch_pool',
  'no_concept_flux',
  'no_diffusion',
)


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: tiny')
  config: Any = default_config()
  config.experiment = 'touching_blobs'
  config.variants = VARIANTS
  config.data = ConfigDict(
    dict(
      train_bags=300,
      validation_bags=200,
      test_bags=300,
      size=14,
      radius=3,
      connectivity=4,
      dim=6,
      noise=0.2,
      positions='',
    )
  )
  config.train.update(
    steps=300, batch_size=16, runs=10, log_every=50, steps_per_call=10
  )
  config.optimizer.update(learning_rate=1e-2, warmup=0.1)
  config.tmevolve = ConfigDict(
    dict(
      hidden=16,
      regions=4,
      num_concepts=4,
      steps=4,
      pooling='region',
      same_region='inner',
      remat=False,
    )
  )
  config.concepts = ConfigDict(
    dict(
      variants=('given', 'shuffled', 'random', 'projected', 'learned', 'none'),
      rows=6,
      dim=64,
      cone=1.0,
      # How often one patch is told right by its features, by its embedding:
      # the noise follows from it.
      feature_accuracy=0.5,
      embedding_accuracy=0.9,
      seed=2718,
      size=12,
      thickness=1,
      model=ConfigDict(
        dict(pooling='patch', steps=6, refine_iters=0, smooth_iters=0)
      ),
    )
  )
  config.report = ConfigDict(dict(bootstrap=1000, bags=4))
  if arg == 'tiny':
    config.train.quick_compile = True
    # The control is TMEvolve to the compiler; ABMIL costs it little.
    config.variants = ('gated_abmil', 'tmevolve')
    config.concepts.variants = ()
    config.data.update(
      train_bags=24, validation_bags=12, test_bags=12, size=10, radius=2
    )
    config.train.update(steps=4, runs=2, log_every=2, steps_per_call=2)
    config.tmevolve.update(hidden=8, steps=2)
    config.report.bootstrap = 100
  return config

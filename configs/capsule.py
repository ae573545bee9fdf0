"""Excluded or infiltrated: where gating must beat plain diffusion.

  python experiments/main.py --config=configs/capsule.py --workdir=runs/capsule

Cords of cells in a thin capsule, at low signal-to-noise: either the capsule
parts tumour from immune cells, or both meet inside the cords. Composition and
each pattern by itself are matched. Diffusion along a cord would average the
noise away, but plain diffusion leaks through the capsule. The report has the
whole curve over noise and thickness of the capsule, 10 seeds per point, all
points and seeds of a model in one program.

Args after the colon: `:pairs` (which of four tissues touch), `:full` (more
bags, noise levels, ablations and steps), `:tiny` (seconds, to see that it
runs).
"""

from typing import Any

from ml_collections import ConfigDict

from tmlib.config import default_config

ARGS = ('full', 'pairs', 'tiny')


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or one of `ARGS`."""
  if arg is not None and arg not in ARGS:
    raise ValueError(f'unknown argument {arg!r}; allowed: {", ".join(ARGS)}')
  config: Any = default_config()
  config.experiment = 'capsule'
  config.models = (
    'gated_abmil', 'static', 'uniform', 'uniform_relax', 'tmevolve', 'no_flux'
  )  # fmt: skip
  config.data = ConfigDict(
    dict(
      task='capsule',
      train_bags=500,
      validation_bags=96,
      test_bags=240,
      size=12,
      cord=2,
      thickness=(1, 2, 4),
      noise=(0.4, 0.7, 1.0),
      contrast=4.0,
      dim=5,
      connectivity=4,
    )
  )
  # Runs are seeds per point.
  config.train.update(
    steps=250, batch_size=12, runs=10, log_every=50, steps_per_call=10
  )
  config.optimizer.update(learning_rate=1e-2, warmup=0.1)
  config.tmevolve = ConfigDict(
    dict(
      hidden=12,
      regions=4,
      num_concepts=4,
      steps=6,
      pooling='patch',
      same_region='inner',
      refine_iters=0,
      smooth_iters=0,
      remat=False,
    )
  )
  config.report = ConfigDict(dict(bootstrap=500, bags=4))
  if arg == 'pairs':
    config.data.update(task='pairs', thickness=(1, 2), noise=(0.3, 0.5, 0.7))
  elif arg == 'full':
    config.models = (*config.models, 'no_concept_flux')
    config.data.update(noise=(0.4, 0.6, 0.8, 1.0), train_bags=1000)
    config.train.update(steps=600, batch_size=16)
    config.tmevolve.steps = 8
  elif arg == 'tiny':
    config.train.quick_compile = True
    # The control is TMEvolve to the compiler; ABMIL costs it little.
    config.models = ('gated_abmil', 'tmevolve')
    config.data.update(
      train_bags=16, validation_bags=8, test_bags=8, size=6, thickness=(1,),
      noise=(0.5,),
    )  # fmt: skip
    config.train.update(steps=4, runs=2, log_every=2, steps_per_call=2)
    config.tmevolve.update(hidden=8, steps=2)
    config.report.bootstrap = 100
  return config

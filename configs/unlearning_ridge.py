"""The exact theory on ridge regression: diabetes, quadratic features.

  python experiments/main.py --config=configs/unlearning_ridge.py \
    --workdir=runs/unlearning_ridge

442 patients, 10 measurements and their products (64 distinct features and a
constant), float64. Every method by its closed form on five kinds of forget
sets, gradient ascent stopped at the retrained model's forget loss, GradDiff
through its critical weight. Args: `tiny`.
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  config = default_config()
  config.experiment = 'unlearning_ridge'
  config.ridge = 1.0
  config.forget = 22  # points per request, 5 %
  config.draws = 20  # requests per kind of forget set
  config.steps = 100  # of the gradient methods; CG makes a tenth of them
  config.report = ConfigDict(dict(bootstrap=1000, ascent_steps=400))
  if arg == 'tiny':
    config.draws = 1
    config.report.update(bootstrap=50, ascent_steps=50)
  elif arg is not None:
    raise ValueError(f"config arg {arg!r}; allowed: 'tiny'")
  return config

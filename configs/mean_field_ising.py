"""Spins that learn: order appears at the critical temperature.

  python experiments/main.py --config=configs/mean_field_ising.py \
    --workdir=runs/mean_field_ising

Mean-field Q-learning and mean-field actor-critic on the Ising model, one
network for all temperatures and a seed per run. `report/` holds ising.md,
ising.csv and ising.png: the order parameter against the temperature of the
policy (and twice it, the temperature of the model), beside Onsager's curve of
the infinite lattice. Some minutes on two cores.

Args after the colon: `:tiny` (seconds, to see that it runs).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: tiny')
  config = default_config()
  config.experiment = 'mean_field_ising'
  config.train.update(steps=3000, log_every=100, steps_per_call=100, runs=5)
  config.ising = ConfigDict(
    dict(
      methods=('mf_q', 'mf_ac'),
      side=16,
      episode=1000,
      temperatures=(
        0.7, 0.85, 0.95, 1.05, 1.1, 1.1346, 1.17, 1.25, 1.4, 1.6, 1.9, 2.3,
      ),
      hidden=32,
      learning_rate=3e-3,
    )
  )  # fmt: skip
  if arg == 'tiny':
    config.train.update(steps=40, log_every=20, steps_per_call=20, runs=2)
    config.ising.update(side=4, episode=20, temperatures=(0.7, 1.1346, 2.3))
  return config

"""DUMoE on planted drift: does the routing find true interests?

  python experiments/main.py --config=configs/dumoe_planted.py \
    --workdir=runs/dumoe_planted

Users follow a Markov chain over six interests; events carry two noisy
modalities. Three-stage training against joint, two-stage, a random gate and no
experts; the short-term path and the drift gate over the switching rate; a
planted half-life of three days. Five seeds in one program per model.
Args: `tiny`.
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'config argument {arg!r}: allowed is tiny')
  config = default_config()
  config.experiment = 'dumoe_planted'
  config.variants = (
    'three_stage', 'joint', 'two_stage', 'random_gate', 'no_moe',
    'no_short_path', 'no_drift_gate', 'sasrec', 'half_life', 'half_life_noisy',
  )  # fmt: skip
  config.data = ConfigDict(
    dict(
      users=300,
      length=32,
      num_items=180,
      interests=6,
      widths=(8, 6),
      noise=1.0,
      rates=(0.02, 0.1, 0.4),
      main_rate=0.1,
      window=24,
      now='last',
    )
  )
  config.train.update(
    steps=240, batch_size=32, runs=5, log_every=60, save_every=120
  )
  config.optimizer.update(learning_rate=5e-3, weight_decay=1e-3)
  config.model = ConfigDict(
    dict(
      dim=32,
      heads=2,
      blocks=1,
      hidden=32,
      dropout=0.0,
      short=8,
      half_life_hours=(1.0, 6.0, 24.0, 168.0),
      experts=8,
      k=2,
      expert_hidden=16,
      interest=1.0,
      importance=0.02,
      routing='event',
    )
  )
  config.report = ConfigDict(dict(bootstrap=500))
  if arg == 'tiny':
    config.train.quick_compile = True
    config.variants = ('three_stage', 'sasrec')
    config.data.update(
      users=24, length=10, num_items=24, interests=3, widths=(3,), rates=(0.2,),
      main_rate=0.2, window=6,
    )  # fmt: skip
    config.train.update(
      steps=20, batch_size=8, runs=1, log_every=10, save_every=10
    )
    config.model.update(
      dim=8, hidden=8, short=4, half_life_hours=(6.0, 24.0),
      experts=4, expert_hidden=4,
    )  # fmt: skip
    config.report.bootstrap = 100
  return config

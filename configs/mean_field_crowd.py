"""A crowd on a torus: exploitability curves of all solvers, and the flow.

  python experiments/main.py --config=configs/mean_field_crowd.py \
    --workdir=runs/mean_field_crowd

Five solvers and deep Munchausen mirror descent on a monotone crowd that starts
in a corner; the same solvers on rock-paper-scissors, where best responses go
round; the rate at which finitely many players come to gain less, smooth and
kinked; and the list of all equilibria that many starts find where there are
three. `report/` holds solvers.md, solvers.csv, curves.png, flow.png and
players.png. Minutes on two cores; JAX_ENABLE_X64=1 before the command computes
in float64.

Args after the colon: `:tiny` (seconds, to see that it runs).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: tiny')
  config = default_config()
  config.experiment = 'mean_field_crowd'
  config.train.update(steps=4000, log_every=20, steps_per_call=20, runs=0)
  config.game = ConfigDict(dict(size=10, horizon=10, noise=1.0))
  config.solvers = ConfigDict(
    dict(
      names=(
        'fixed_point',
        'fictitious_play',
        'online_mirror_descent',
        'prior_descent',
        'mf_omo',
      ),
      damping=0.9,
      lr=0.1,
      temperature=10.0,
      inner=1,
      adam_lr=0.05,
      rps_steps=400,
    )
  )
  config.deep = ConfigDict(
    dict(
      steps=60, temperature=5.0, fits=300, batch_size=512, width=64,
      learning_rate=2e-3, target_rate=0.02,
    )
  )  # fmt: skip
  config.players = ConfigDict(dict(draws=20, log2_low=6, log2_high=14))
  config.report = ConfigDict(dict(starts=24, start_steps=500))
  if arg == 'tiny':
    config.train.update(steps=40, log_every=10, steps_per_call=10)
    config.game.update(size=4, horizon=4)
    config.solvers.rps_steps = 20
    config.deep.update(steps=10, fits=5, batch_size=32, width=8)
    config.players.update(draws=3, log2_high=9)
    config.report.update(starts=6, start_steps=100)
  return config

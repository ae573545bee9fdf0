"""Two providers of a language model split compute between training and serving.

  python experiments/main.py --config=configs/provider_market.py \
    --workdir=runs/provider_market

  pip install --no-deps open_spiel==2.0.2   # for its Sioux Falls network only

`report/` shows shares, serving fraction and user utility against B2/B1; where
each of the three claims holds and fails over thousands of random games, every
exception by kind; the loss of users as lost compute plus pure asymmetry, with
heat maps; the reversal under fixed total compute; how best responses play; and
Wardrop equilibria of the Braess and Sioux Falls networks. A few minutes on two
cores.

Args after the colon: `:tiny` (seconds, to see that it runs).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: tiny')
  config = default_config()
  config.experiment = 'provider_market'
  # The example of the sweep; the library's default users are logit, tau = .05.
  config.game = ConfigDict(
    dict(big=10.0, gamma=1.0, beta=0.3, latency='linear', tau=0.05)
  )
  config.users = ('wardrop', 'logit')
  config.sweep = ConfigDict(dict(points=21, low=0.05, gammas=(0.3, 1.0, 3.0)))
  config.draws = ConfigDict(
    dict(
      games=2000,
      accuracies=('power_law', 'log1p', 'michaelis'),
      gamma=(0.1, 10.0),
      big=(1.0, 100.0),
      ratio=(0.02, 0.98),
      beta=(0.1, 1.5),
    )
  )
  config.heat = ConfigDict(dict(points=16, low=0.5, high=20.0))
  config.total = ConfigDict(dict(total=4.0, points=12))
  config.play = ConfigDict(
    dict(games=64, rounds=60, orders=('alternating', 'simultaneous'))
  )
  config.networks = ('braess', 'sioux_falls')
  if arg == 'tiny':
    config.users = ('wardrop',)
    config.sweep.update(points=4, gammas=(1.0,))
    config.draws.update(games=10, accuracies=('power_law',))
    config.heat.points = 3
    config.total.points = 3
    config.play.update(games=4, rounds=10, orders=('simultaneous',))
    config.networks = ('braess',)
  return config

"""Regret rates of fair dueling bandits: slopes beside the theory.

  python experiments/main.py --config=configs/dueling_rates.py \
    --workdir=runs/dueling_rates

Hard family with an eps grid that does not know T; sup over eps of theory-tuned
explore-then-commit, elimination and best-tuned explore-then-commit; N for
shared and independent answers, K, d; and every algorithm round by round.
`report/` holds rates.md (slopes with bands, bounds, claims and whether they
held), three pictures and rates.csv. A quarter of an hour on two idle cores.
Expect slopes near 2/3 in T, and worst eps near -1/3.

Args after the colon: `:tiny` (seconds, to see that it runs).
"""

from ml_collections import ConfigDict

from tmlib.config import default_config


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None or 'tiny'."""
  if arg not in (None, 'tiny'):
    raise ValueError(f'unknown argument {arg!r}; allowed: tiny')
  config = default_config()
  config.experiment = 'dueling_rates'
  config.train.update(steps=32, log_every=256, steps_per_call=32, runs=0)
  config.sweep = ConfigDict(
    dict(
      seeds_per_step=8,
      log2_low=12,
      log2_high=24,
      log2_step=2,
      eps_low=2.0**-11,
      eps_high=0.3,
      eps_points=64,
      few_points=20,
      tau_high=2**21,
      tau_points=24,
      arms=8,
      users=(1, 4, 16),
      arms_axis=(16, 32, 64, 128),
      # From, to, points; and fewer seeds: K = 128 has 8,128 pairs.
      arms_eps=(0.005, 0.1, 9),
      arms_seeds_per_step=4,
      bits=(3, 5, 7, 9),
      dims=(3, 6, 9),
      cyclic_arms=15,
      cyclic_points=10,
      horizon=2**22,
      easy_gap=0.3,
    )
  )
  config.play = ConfigDict(
    dict(
      players=(
        'etc',
        'eps_greedy',
        'elimination',
        'vote',
        'utilitarian',
        'borda_ucb',
        'uniform',
        'fixed',
      ),
      arms=8,
      users=3,
      eps=0.2,
      rounds=2**14,
      simulations=64,
      tau=2**10,
    )
  )
  config.report = ConfigDict(dict(bootstrap=500))
  if arg == 'tiny':
    config.train.update(steps=8, log_every=256, steps_per_call=8)
    config.sweep.update(
      seeds_per_step=2, log2_high=16, eps_points=6, few_points=4, tau_points=6,
      users=(), arms_axis=(), bits=(3, 4), dims=(), cyclic_arms=5,
      cyclic_points=3, horizon=2**16, arms_eps=(0.02, 0.2, 3),
      arms_seeds_per_step=2,
    )  # fmt: skip
    config.play.update(
      players=('etc', 'fixed'), rounds=512, simulations=4, tau=128
    )
    config.report.bootstrap = 50
  return config

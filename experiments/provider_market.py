"""The provider market: equilibria over budgets, and where the claims hold.

Nothing here is trained, so there is no loop to run: the report holds it all.

Axes: R ratios, G games, M = 2 providers.
"""

from typing import Any

import numpy as np

from experiments import provider_market_report, provider_networks
from tmlib import market, train

__all__ = ['draw_games', 'make', 'measure']

KINDS = ('wardrop', 'logit')


def _game(config, budgets, tau=None, **changes) -> market.ProviderGame:
  g = config.game
  fields: dict[str, Any] = dict(
    budgets=np.asarray(budgets, float),
    accuracy=market.PowerLaw(beta=g.beta),
    latency=g.latency,
    gamma=g.gamma,
    tau=g.tau if tau is None else tau,
  )
  return market.ProviderGame(**(fields | changes))


def _tau(config, kind: str) -> float:
  return 0.0 if kind == 'wardrop' else config.game.tau


def draw_games(config, kind: str, accuracy: str) -> list[market.ProviderGame]:
  """Random games, log-uniform in gamma and B1, uniform in B2 / B1.

  Args:
    config: see configs/provider_market.py.
    kind: 'wardrop' or 'logit'.
    accuracy: name of the accuracy; a power law draws its exponent too.

  Returns:
    `config.draws.games` games.
  """
  d = config.draws
  rng = np.random.default_rng([config.seed, len(kind), len(accuracy)])
  log = lambda low, high: np.exp(rng.uniform(np.log(low), np.log(high)))
  games = []
  for _ in range(d.games):
    curve: Any = market.ACCURACIES[accuracy]()
    if accuracy == 'power_law':
      curve = curve._replace(beta=rng.uniform(*d.beta))
    big, gamma, ratio = log(*d.big), log(*d.gamma), rng.uniform(*d.ratio)
    games.append(
      _game(
        config,
        [big, big * ratio],
        _tau(config, kind),
        gamma=gamma,
        accuracy=curve,
      )
    )
  return games


def _play(config) -> dict[str, dict[str, int]]:
  """How best responses end, by the order of moves and the rule for ties."""
  games = []
  for game in draw_games(config, 'wardrop', 'power_law')[: config.play.games]:
    games.append(game)
  stacked = market.stack_games(games)
  found = {}
  for order in config.play.orders:
    result = market.solve_games(
      stacked,
      max_iters=config.play.rounds,
      method='best_response',
      order=order,
    )
    names, counts = np.unique(result.status, return_counts=True)
    found[order] = dict(zip(names.tolist(), counts.tolist(), strict=True))
  return found


def measure(config) -> dict[str, Any]:
  """Everything that the report shows.

  Args:
    config: see configs/provider_market.py.

  Returns:
    example, sweeps, draws, heat, total, play and networks; arrays and numbers.

  Raises:
    ValueError: an unknown kind of users or network.
  """
  c = config
  for kind in c.users:
    if kind not in KINDS:
      raise ValueError(f'users={kind!r} is unknown; choose of {KINDS}')
  for name in c.networks:
    if name not in provider_networks.NETWORKS:
      known = tuple(provider_networks.NETWORKS)
      raise ValueError(f'networks={name!r} is unknown; choose of {known}')
  big = c.game.big
  pair = (big, big / 2)
  ratios = np.linspace(1, c.sweep.low, c.sweep.points)
  found: dict[str, Any] = {}
  found['example'] = market.asymmetry_sweep(
    _game(c, pair, 0.0), [1, 0.8, 0.6, 0.4, 0.2]
  )
  found['sweeps'] = {
    (kind, gamma): market.asymmetry_sweep(
      _game(c, pair, _tau(c, kind), gamma=gamma), ratios
    )
    for kind in c.users
    for gamma in c.sweep.gammas
  }
  found['draws'] = {
    (kind, accuracy): (
      games := draw_games(c, kind, accuracy),
      market.compare_budgets(games),
    )
    for kind in c.users
    for accuracy in c.draws.accuracies
  }
  grid = np.geomspace(c.heat.low, c.heat.high, c.heat.points)
  cells = [(a, b) for a in grid for b in grid if b <= a]
  rows = market.compare_budgets([_game(c, cell, 0.0) for cell in cells])
  found['heat'] = (grid, cells, rows)
  shares = np.linspace(0.5, 0.95, c.total.points)
  found['total'] = {
    kind: (
      shares,
      market.solve_games(
        market.stack_games(
          [
            _game(c, c.total.total * np.array([q, 1 - q]), _tau(c, kind))
            for q in shares
          ]
        )
      ),
    )
    for kind in c.users
  }
  found['play'] = _play(c)
  found['networks'] = {}
  for name in c.networks:
    if name == 'sioux_falls' and not provider_networks.has_sioux_falls():
      found['networks'][name] = None
      continue
    found['networks'][name] = provider_networks.NETWORKS[name]().solve()
  return found


def make(config) -> train.Experiment:
  """The report; there is nothing to train.

  Args:
    config: see configs/provider_market.py.

  Returns:
    The experiment.
  """
  return train.Experiment(
    report=lambda workdir: provider_market_report.write(
      config, measure(config), workdir
    )
  )

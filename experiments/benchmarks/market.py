"""Equilibria of provider games per second, against SciPy game by game.

  python experiments/benchmarks/market.py [--games=1024] [--peers=4]

Random two-provider games with logit users. tmlib solves all of them in blocks,
once with and once without the certificate. The peer plays best responses with
`scipy.optimize`: brentq for the users' shares, bounded minimisation for each
provider, until nobody moves; it is checked to find the same alphas.
"""

import argparse
import json
import platform
import time

import jax
import jax.numpy as jnp
import numpy as np
from scipy import optimize

from tmlib import market

TAU = 0.05


def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
  """Budgets [G, 2] and gammas [G]."""
  rng = np.random.default_rng(0)
  big = np.exp(rng.uniform(np.log(2), np.log(30), count))
  budgets = np.stack([big, big * rng.uniform(0.2, 1, count)], 1)
  return budgets, np.exp(rng.uniform(np.log(0.3), np.log(3), count))


def peer(budgets: np.ndarray, gamma: float) -> np.ndarray:
  """One game by SciPy; alpha [2]."""

  def share(alpha):
    a, s = 1 - (1 + alpha * budgets) ** -0.3, (1 - alpha) * budgets

    def gap(x):
      u = a - gamma * np.array([x, 1 - x]) / s
      return np.log(x / (1 - x)) - (u[0] - u[1]) / TAU

    return optimize.brentq(gap, 1e-12, 1 - 1e-12, xtol=1e-13)

  alpha = np.full(2, 0.5)
  for _ in range(100):
    before = alpha.copy()
    for i in range(2):
      sign = 1 if i else -1

      def cost(a, i=i, sign=sign):
        moved = alpha.copy()
        moved[i] = a
        return sign * share(moved)

      alpha[i] = optimize.minimize_scalar(
        cost, bounds=(0, 0.9999), method='bounded', options={'xatol': 1e-9}
      ).x
    if np.abs(alpha - before).max() < 1e-7:
      break
  return alpha


def seconds(call) -> float:
  """Of the second call; the first one compiles."""
  jax.block_until_ready(call())
  begin = time.perf_counter()
  jax.block_until_ready(call())
  return time.perf_counter() - begin


def main() -> None:
  """Prints one JSON line."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--games', type=int, default=1024)
  parser.add_argument('--peers', type=int, default=4)
  flags = parser.parse_args()
  budgets, gammas = draw(flags.games)
  games = market.stack_games(
    [
      market.ProviderGame(budgets=b, gamma=g, tau=TAU)
      for b, g in zip(budgets, gammas, strict=True)
    ]
  )
  certified = seconds(lambda: market.solve_games(games).eps_nash)
  with jax.enable_x64(True):
    batch = jax.tree.map(lambda x: jnp.asarray(x, float), games)
    solve = jax.jit(jax.vmap(market.envelope_equilibrium))
    bare = seconds(lambda: solve(batch))
    alphas = np.asarray(solve(batch)[0])
  begin = time.perf_counter()
  found = [peer(budgets[n], gammas[n]) for n in range(flags.peers)]
  loop = time.perf_counter() - begin
  rates = {
    'tmlib': flags.games / bare,
    'tmlib, certified': flags.games / certified,
    'scipy': flags.peers / loop,
  }
  print(
    json.dumps(
      {
        'games_per_second': {k: round(v, 1) for k, v in rates.items()},
        'over_scipy': round(rates['tmlib'] / rates['scipy'], 1),
        'largest difference of alpha': float(
          np.abs(np.array(found) - alphas[: flags.peers]).max()
        ),
        'games': flags.games,
        'jax': jax.__version__,
        'machine': platform.machine(),
      }
    )
  )


if __name__ == '__main__':
  main()

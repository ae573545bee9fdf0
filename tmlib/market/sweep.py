"""What a competitor with less compute does to providers and users.

Three claims about budgets (B1, B2 < B1) against the baseline (B1, B1):
  i    the small provider keeps users, for the big one is congested: x_2 > 0
       under Wardrop; under logit, where any provider keeps some, x_2 above its
       share if nobody minded waiting (gamma -> 0), softmax(A(B) / tau);
  ii   the big provider serves with a larger part of its budget;
  iii  users are worse off.

Part of iii is the compute that is lost. The rest is the asymmetry itself:
  U(B1, B1) - U(B1, B2) = [U(B1, B1) - U(Bm, Bm)] + [U(Bm, Bm) - U(B1, B2)]
with Bm = (B1 + B2) / 2. The second term can be negative: training has scale, so
unequal providers may serve users better than equal ones of the same total.

Axes: R ratios or G games, M providers.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market.game import ProviderGame, stack_games
from tmlib.market.nash import NashResult, solve_games

__all__ = ['asymmetry_sweep', 'compare_budgets', 'uncongested_share']

# Smaller changes count as none: equilibria are known to about 1e-9.
MARGIN = 1e-7


def uncongested_share(game: ProviderGame) -> np.ndarray:
  """The shares that remain as gamma -> 0: everybody trains with everything.

  Args:
    game: the game; logit users.

  Returns:
    [M], softmax(A(B) / tau), the outside option included.
  """
  with jax.enable_x64(True):
    trained = game.accuracy(jnp.asarray(np.asarray(game.budgets, np.float64)))
    value = np.asarray(trained) - np.asarray(game.prices)
  if game.outside is not None:
    value = np.append(value, game.outside)
  odds = np.exp((value - value.max()) / float(game.tau))
  return (odds / odds.sum())[: game.num_providers]


def _kinds(found: NashResult, base: NashResult) -> np.ndarray:
  """[G], 'interior' or which corner the game is in."""
  kinds = np.full(len(found.x), 'interior', dtype='<U16')
  serves = (found.alpha[:, 0] < MARGIN) | (base.alpha[:, 0] < MARGIN)
  kinds[serves] = 'all serve'
  kinds[(found.x <= 1e-12).any(1)] = 'monopoly'
  bad = (found.status != 'converged') | (base.status != 'converged')
  kinds[bad] = 'not solved'
  return kinds


def compare_budgets(
  games: list[ProviderGame], **options: Any
) -> dict[str, np.ndarray]:
  """The claims, game by game, each against its own baseline (B1, B1).

  Args:
    games: G games of one kind with M = 2; the first provider is the big one.
    **options: of `solve_games`.

  Returns:
    {name: [G, ...]}: budgets, alpha, x, U, accuracy, latency, eps_nash,
    status, serving (1 - alpha_1), the same of the baseline as base_*, kind
    ('interior', 'monopoly', 'all serve', 'not solved'), claim_i, claim_ii,
    claim_iii (bool), excess (x_2 less its uncongested share, NaN under
    Wardrop), lost_compute and pure_asymmetry, whose sum is the loss of users.

  Raises:
    ValueError: a game with M != 2, or a first provider that is not the larger.
  """
  for game in games:
    b = np.asarray(game.budgets)
    if b.shape != (2,) or b[0] < b[1]:
      raise ValueError(
        f'budgets={b} must be (B1, B2) with B1 >= B2: the baseline (B1, B1) '
        'keeps the larger provider'
      )
  pairs = [np.asarray(g.budgets, np.float64) for g in games]
  equal = [
    g.replace(budgets=b[[0, 0]]) for g, b in zip(games, pairs, strict=True)
  ]
  middle = [
    g.replace(budgets=np.full(2, b.mean()))
    for g, b in zip(games, pairs, strict=True)
  ]
  everything = solve_games(stack_games([*games, *equal, *middle]), **options)
  count = len(games)
  part = lambda k: jax.tree.map(
    lambda x: x[k * count : (k + 1) * count], everything
  )
  found, base, mean = part(0), part(1), part(2)
  if games[0].wardrop:
    excess = np.full(count, np.nan)
    keeps = found.x[:, 1] > 1e-12
  else:
    excess = found.x[:, 1] - [uncongested_share(g)[1] for g in games]
    keeps = excess > MARGIN
  fields = ('alpha', 'x', 'U', 'accuracy', 'latency', 'eps_nash', 'status')
  out = {name: getattr(found, name) for name in fields}
  out |= {f'base_{name}': getattr(base, name) for name in fields}
  return out | {
    'budgets': np.stack(pairs),
    'serving': 1 - found.alpha[:, 0],
    'base_serving': 1 - base.alpha[:, 0],
    'kind': _kinds(found, base),
    'claim_i': keeps,
    'claim_ii': base.alpha[:, 0] - found.alpha[:, 0] > MARGIN,
    'claim_iii': base.U - found.U > MARGIN,
    'excess': excess,
    'lost_compute': base.U - mean.U,
    'pure_asymmetry': mean.U - found.U,
  }


def asymmetry_sweep(
  game: ProviderGame, ratios: Any, **options: Any
) -> dict[str, np.ndarray]:
  """Equilibria as the second provider's budget falls to B2 = ratio B1.

  Args:
    game: M = 2; its first budget is B1, the second is replaced.
    ratios: [R], in (0, 1].
    **options: of `solve_games`.

  Returns:
    See `compare_budgets`, and ratio [R].

  Raises:
    ValueError: no ratio, or one outside (0, 1].
  """
  ratios = np.atleast_1d(np.asarray(ratios, np.float64))
  if ratios.size == 0 or not ((ratios > 0) & (ratios <= 1)).all():
    raise ValueError(
      f'ratios={ratios} must be numbers in (0, 1]: budgets of the small '
      'provider in units of the big one'
    )
  if game.num_providers != 2:
    raise ValueError(
      f'the sweep compares two providers, the game has {game.num_providers}'
    )
  big = float(np.asarray(game.budgets)[0])
  games = [game.replace(budgets=np.array([big, big * r])) for r in ratios]
  return {'ratio': ratios} | compare_budgets(games, **options)

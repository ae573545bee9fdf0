r"""All equilibria that many starts find.

A mean-field game may have several equilibria; a solver shows the one that its
start leads to. Here random policies start several solvers at once, and what
they find is sorted into distinct flows. A list of finds, not a proof that there
is no other: equilibria that repel every solver stay unseen, but MF-OMO is drawn
to unstable ones too.

Axes: H time steps, S states, A actions.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame
from tmlib.mean_field.solvers import run_rule

__all__ = ['Equilibrium', 'find_equilibria', 'random_policies']

# Options of each solver where none are given.
_OPTIONS = {
  'fixed_point': {'damping': 0.5},
  'fictitious_play': {'lr': None},
  'online_mirror_descent': {'lr': 0.1},
  'prior_descent': {'temperature': 1.0, 'inner': 1},
  'mf_omo': {'lr': 0.05},
}


class Equilibrium(NamedTuple):
  """One of the equilibria found.

  Attributes:
    pi: [H, S, A], or [S, A], the policy with the smallest gap.
    mu: [H, S], or [S], its flow.
    gap: its exploitability.
    hits: {solver: number of starts that led here}.
  """

  pi: np.ndarray
  mu: np.ndarray
  gap: float
  hits: dict[str, int]


def random_policies(key: jax.Array, game: MFGame, count: int) -> jax.Array:
  """Random legal policies, from nearly deterministic to nearly uniform.

  Args:
    key: PRNG key; consumed.
    game: the game.
    count: how many.

  Returns:
    [count, H, S, A], or [count, S, A].
  """
  scale_key, key = jax.random.split(key)
  shape = (count, *game.policy_shape)
  lead = (count,) + (1,) * (len(shape) - 1)
  scale = 10 ** jax.random.uniform(scale_key, lead, minval=-1.0, maxval=1.0)
  logits = scale * jax.random.normal(key, shape)
  return operators.softmax_policy(game, logits)


def find_equilibria(
  game: MFGame,
  key: jax.Array,
  starts: int = 32,
  *,
  solvers: Sequence[str] = ('online_mirror_descent', 'mf_omo'),
  n: int = 2000,
  tol: float = 1e-2,
  distance: float = 0.05,
  options: Mapping[str, Mapping[str, Any]] | None = None,
) -> list[Equilibrium]:
  """Distinct equilibria that the solvers find from random starts.

  Args:
    game: the game.
    key: PRNG key; consumed.
    starts: random policies, the same for every solver.
    solvers: names of `rules.RULES`.
    n: iterations of each.
    tol: gap below which an end counts as an equilibrium.
    distance: flows whose largest total-variation distance over time is smaller
      are the same.
    options: {solver: options of its rule}, in place of defaults.

  Returns:
    The equilibria, the most often found first; empty if no start converged.

  Raises:
    ValueError: a count, tolerance or solver out of range.
  """
  checks.check_count('starts', starts)
  checks.check_between('tol', tol, 0, np.inf, closed='')
  checks.check_between('distance', distance, 0, np.inf, closed='')
  initial = random_policies(key, game, starts)
  found: list[Equilibrium] = []
  for solver in solvers:
    if solver not in _OPTIONS:
      raise ValueError(f'{solver!r} is no solver; choose of {tuple(_OPTIONS)}')
    chosen: dict[str, Any] = dict(_OPTIONS[solver])
    chosen.update((options or {}).get(solver, {}))
    result = jax.vmap(
      lambda pi, solver=solver, chosen=chosen: run_rule(
        game, solver, n, chosen, initial=pi, log_every=n
      )
    )(initial)
    pi, mu, gap = (np.asarray(x) for x in (result.pi, result.mu, result.gap))
    for i in np.flatnonzero(gap <= tol):
      _sort_in(found, solver, pi[i], mu[i], float(gap[i]), distance)
  return sorted(found, key=lambda e: -sum(e.hits.values()))


def _sort_in(found, solver, pi, mu, gap, distance):
  for k, known in enumerate(found):
    if np.abs(known.mu - mu).sum(-1).max() / 2 < distance:
      known.hits[solver] = known.hits.get(solver, 0) + 1
      if gap < known.gap:
        found[k] = Equilibrium(pi, mu, gap, known.hits)
      return
  found.append(Equilibrium(pi, mu, gap, {solver: 1}))

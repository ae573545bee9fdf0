"""Solvers as Methods of the shared loop: one update is one iteration.

The public solvers scan the same rules; here the loop logs, checkpoints and
resumes them, and stops by `stop=lambda m: m['exploitability'] < tol`.

Axes: H time steps, S states, A actions.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame
from tmlib.mean_field.rules import RULES
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics

__all__ = ['SolverState', 'on_device', 'solver_method', 'table_outputs']


class SolverState(NamedTuple):
  """State of a solver.

  Attributes:
    key: PRNG key, of the random start.
    step: [] int32, iterations done.
    memory: what the rule remembers.
  """

  key: jax.Array
  step: jax.Array
  memory: Any


def on_device(game: MFGame) -> MFGame:
  """The game with device arrays, in the precision that is on now.

  A Method closes over its game; a NumPy constant met by two traces in
  different precision would be stuck to the first.
  """
  return jax.tree.map(jnp.asarray, game)


def table_outputs(
  game: MFGame, pi: jax.Array, mu: jax.Array, batch: Batch
) -> Evaluation:
  """Rows of flow and policy by time, for `evaluate`; id t is time step t.

  Args:
    game: the game.
    pi: [H, S, A], or [S, A].
    mu: [H, S], or [S].
    batch: with 'id' and 'weight'.

  Returns:
    outputs flow [B, S] and policy [B, S, A], sums of the exploitability.
  """
  if game.horizon is None:
    pi, mu = pi[None], mu[None]
  chosen, weight = batch['id'], batch['weight']
  gap = operators.gap(game, pi if game.horizon is not None else pi[0])
  total = weight.sum()
  return {
    'sums': {'exploitability': (gap * total, total)},
    'outputs': {'id': chosen, 'flow': mu[chosen], 'policy': pi[chosen]},
  }


def solver_method(
  game: MFGame,
  solver: str,
  *,
  noise: float = 0.0,
  **options: Any,
) -> Build:
  """A solver for the loop; steps = iterations.

  `evaluate` returns by `batch['id']` = time step: flow [B, S] and policy
  [B, S, A].

  Args:
    game: the game.
    solver: one of `rules.RULES`.
    noise: standard deviation of random logits at the start, so that runs
      differ; 0 for the uniform policy.
    **options: of the rule, as in the solver of that name; all must be given.

  Returns:
    Build; there is no batch, so the axis name is ignored.

  Raises:
    ValueError: an unknown solver.
  """
  if solver not in RULES:
    raise ValueError(f'{solver!r} is no solver; choose one of {tuple(RULES)}')
  checks.check_between('noise', noise, 0, float('inf'), closed='[')
  rule = RULES[solver]

  def build(axis_name: str | None) -> Method:
    del axis_name
    own = on_device(game)

    def init(key: jax.Array, batch: Batch | None = None) -> SolverState:
      del batch
      logits = noise * jax.random.normal(key, own.policy_shape)
      pi = operators.softmax_policy(own, logits)
      return SolverState(key, jnp.int32(0), rule.start(own, options, pi))

    def update(
      state: SolverState, batch: Batch | None = None
    ) -> tuple[SolverState, Metrics]:
      del batch
      step = state.step + 1
      memory = rule.step(own, options, state.memory, step)
      gap = operators.gap(own, rule.policy(own, options, memory))
      return SolverState(state.key, step, memory), {'exploitability': gap}

    def evaluate(state: SolverState, batch: Batch | None) -> Evaluation:
      if batch is None:
        raise ValueError('evaluate needs a batch with the ids of time steps')
      pi = rule.policy(own, options, state.memory)
      return table_outputs(own, pi, operators.flow(own, pi), batch)

    return Method(init, update, evaluate)

  return build

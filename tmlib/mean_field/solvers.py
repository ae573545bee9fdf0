r"""Solvers: from a game to a policy, its flow and a certificate.

Each runs a rule of `rules.py` and reports, at regular intervals, the
exploitability of its current policy: what an outsider needs to judge the
result, whichever solver found it. Options may be traced, so that `jax.vmap`
sweeps step sizes, and games may be batched (see `MFGame`).

Axes: H time steps, S states, A actions, L log steps.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame
from tmlib.mean_field.rules import RULES

__all__ = [
  'SolveResult',
  'fictitious_play',
  'fixed_point',
  'mf_omo',
  'online_mirror_descent',
  'prior_descent',
  'run_rule',
]


class SolveResult(NamedTuple):
  """What a solver found.

  Attributes:
    pi: [H, S, A], or [S, A], the policy.
    mu: [H, S], or [S], its flow.
    exploitability: [L], after every `log_every` iterations. Once a solver has
      stopped, the value at which it stopped.
    gap: [], exploitability of `pi`, the last entry.
    converged: [] bool, gap <= tol.
    steps: [] int32, iterations done.
  """

  pi: jax.Array
  mu: jax.Array
  exploitability: jax.Array
  gap: jax.Array
  converged: jax.Array
  steps: jax.Array


@functools.partial(jax.jit, static_argnames=('name', 'logs', 'every'))
def run_compiled(game, options, initial, tol, *, name, logs, every):
  """Up to `logs` times `every` steps of the rule `name`, one program.

  It ends early where the exploitability, looked at once in `every` steps, has
  fallen to `tol`.
  """
  rule = RULES[name]
  dtype = jnp.result_type(float)
  tol = jnp.asarray(tol, dtype)

  def gap_of(memory):
    pi = rule.policy(game, options, memory)
    return operators.gap(game, pi)

  def one(memory, k):
    return rule.step(game, options, memory, k), None

  def some(carry):
    memory, trace, gap, log = carry
    ks = log * every + 1 + jnp.arange(every, dtype=jnp.int32)
    memory = jax.lax.scan(one, memory, ks)[0]
    gap = gap_of(memory)
    return memory, trace.at[log].set(gap), gap, log + 1

  def going(carry):
    _, _, gap, log = carry
    # A gap that is not finite ends it too: nothing good can follow.
    return (log < logs) & ~(gap <= tol) & ~jnp.isnan(gap)

  memory = rule.start(game, options, initial)
  begin = jnp.asarray(jnp.inf, dtype)
  memory, trace, gap, log = jax.lax.while_loop(
    going, some, (memory, jnp.zeros(logs, dtype), begin, jnp.int32(0))
  )
  trace = jnp.where(jnp.arange(logs) < log, trace, gap)
  pi = rule.policy(game, options, memory)
  mu = operators.flow(game, pi)
  return SolveResult(pi, mu, trace, gap, gap <= tol, log * every)


def run_rule(
  game: MFGame,
  name: str,
  n: int,
  options: dict[str, Any],
  *,
  initial: jax.Array | None = None,
  log_every: int = 1,
  tol: Any = 0.0,
) -> SolveResult:
  """Runs a rule for n iterations, or until the gap is at most `tol`.

  Args:
    game: the game.
    name: one of `RULES`.
    n: most iterations.
    options: of the rule.
    initial: [H, S, A], or [S, A], first policy; None for uniform.
    log_every: iterations between two looks at the exploitability; divides n.
    tol: gap at which to stop, in units of reward.

  Returns:
    The result.

  Raises:
    ValueError: an unknown rule, n < 1, log_every that does not divide n, tol <
      0, or an initial policy that does not fit.
  """
  if name not in RULES:
    raise ValueError(f'{name!r} is no solver; choose one of {tuple(RULES)}')
  checks.check_count('n', n)
  checks.check_count('log_every', log_every)
  if n % log_every:
    raise ValueError(f'log_every={log_every} must divide n={n}')
  checks.check_between('tol', tol, 0, np.inf, closed='[')
  if initial is None:
    initial = operators.uniform_policy(game)
  checks.check_policy(initial, game.policy_shape, game.mask)
  initial = jnp.asarray(initial, jnp.result_type(float))
  return run_compiled(
    game, options, initial, tol, name=name, logs=n // log_every,
    every=log_every,
  )  # fmt: skip


def fixed_point(
  game: MFGame, n: int = 100, damping: Any = 0.0, **keywords: Any
) -> SolveResult:
  """Damped best-response iteration; without monotonicity it may cycle.

  Args:
    game: the game.
    n: most iterations.
    damping: weight of the old policy, in [0, 1).
    **keywords: initial, log_every, tol; see `run_rule`.

  Returns:
    The result; in a cycle, `converged` is False and the trace shows it.

  Raises:
    ValueError: damping out of range; see `run_rule`.
  """
  checks.check_between('damping', damping, 0, 1, closed='[')
  return run_rule(game, 'fixed_point', n, {'damping': damping}, **keywords)


def fictitious_play(
  game: MFGame, n: int = 100, lr: Any = None, **keywords: Any
) -> SolveResult:
  """Best responses to the average of the past, averaged by state.

  Args:
    game: the game.
    n: most iterations.
    lr: weight of a best response, in (0, 1]; None for 1 / (k + 1) in
      iteration k.
    **keywords: initial, log_every, tol; see `run_rule`.

  Returns:
    The result.

  Raises:
    ValueError: lr out of range; see `run_rule`.
  """
  if lr is not None:
    checks.check_between('lr', lr, 0, 1)
  return run_rule(game, 'fictitious_play', n, {'lr': lr}, **keywords)


def online_mirror_descent(
  game: MFGame, n: int = 100, lr: Any = 0.1, **keywords: Any
) -> SolveResult:
  """Softmax of summed action values.

  Args:
    game: the game.
    n: most iterations.
    lr: step size, positive.
    **keywords: initial, log_every, tol; see `run_rule`.

  Returns:
    The result.

  Raises:
    ValueError: lr out of range; see `run_rule`.
  """
  checks.check_between('lr', lr, 0, np.inf, closed='')
  return run_rule(game, 'online_mirror_descent', n, {'lr': lr}, **keywords)


def prior_descent(
  game: MFGame,
  n: int = 100,
  temperature: Any = 1.0,
  inner: int = 1,
  **keywords: Any,
) -> SolveResult:
  """Boltzmann policies against a prior that follows.

  Args:
    game: the game.
    n: most iterations.
    temperature: of the Boltzmann policy, positive.
    inner: iterations with the same prior; n + 1 keeps it for good, and the
      result is then the Boltzmann equilibrium, not Nash.
    **keywords: initial, log_every, tol; see `run_rule`.

  Returns:
    The result.

  Raises:
    ValueError: temperature or inner out of range; see `run_rule`.
  """
  checks.check_between('temperature', temperature, 0, np.inf, closed='')
  checks.check_count('inner', inner)
  options = {'temperature': temperature, 'inner': inner}
  return run_rule(game, 'prior_descent', n, options, **keywords)


def mf_omo(
  game: MFGame, n: int = 1000, lr: Any = 0.05, **keywords: Any
) -> SolveResult:
  """Occupation-measure optimisation: a zero of one smooth function.

  Args:
    game: the game.
    n: most iterations.
    lr: step size of Adam, positive.
    **keywords: initial, log_every, tol; see `run_rule`.

  Returns:
    The result.

  Raises:
    ValueError: lr out of range; see `run_rule`.
  """
  checks.check_between('lr', lr, 0, np.inf, closed='')
  return run_rule(game, 'mf_omo', n, {'lr': lr}, **keywords)

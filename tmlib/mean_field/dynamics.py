r"""Populations forwards, values backwards, and how far a policy is from Nash.

  push:           mu_{t+1}(s') = sum_{s,a,e} mu_t(s) pi_t(a|s) p_e [idx_e = s']
  q_values:       Q_t(s, a) = r_t(s, a) + gamma sum_e p_e V_{t+1}(idx_e)
  exploitability: E(pi) = max_pi' J(pi', mu^pi) - J(pi, mu^pi)
                        = sum_t gamma^t E_{s ~ mu_t} sum_a pi_t(a|s)
                          (max_b Q*_t(s, b) - Q*_t(s, a)),

the last line by the performance difference lemma: one backward pass, and a sum
of terms that are never negative. A difference of two returns can be, in
float32. A stationary game has one mu and one Q, and its sum over t is the
factor 1 / (1 - gamma), for mu is stationary under pi.

Axes: S states, A actions, E noise outcomes, H time steps, P populations.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame

__all__ = [
  'best_response',
  'expected_return',
  'exploitability',
  'optimal_q_values',
  'population_exploitability',
  'push',
  'q_values',
  'stationary_flow',
]


_push = jax.jit(operators.flow)
_find_stationary = jax.jit(operators.find_stationary)
_find_q = jax.jit(operators.policy_q)
_find_optimal_q = jax.jit(operators.optimal_q)
_find_response = jax.jit(
  lambda game, mu: operators.greedy(game, operators.optimal_q(game, mu))
)
_find_gaps = jax.jit(
  lambda game, pi: operators.by_population(
    game, operators.advantages(game, pi, operators.flow(game, pi))
  )
)


@jax.jit
def _find_return(game, pi, mu):
  q = operators.policy_q(game, mu, pi)
  first, pi = (q, pi) if game.horizon is None else (q[0], pi[0])
  start = mu if game.horizon is None else jnp.asarray(game.mu0, q.dtype)
  return (start[:, None] * pi * first).sum()


def _check_flow(game: MFGame, mu: Any) -> None:
  shape = game.policy_shape[:-1]
  if jnp.shape(mu) != shape:
    raise ValueError(
      f'mu has shape {jnp.shape(mu)}; this game needs {shape} ([H, S], or [S] '
      'for a stationary game)'
    )


def push(game: MFGame, pi: jax.Array) -> jax.Array:
  """The population's flow where everybody plays `pi`.

  Args:
    game: the game.
    pi: [H, S, A], or [S, A] for a stationary game.

  Returns:
    [H, S] populations before each decision, the first is mu0; for a stationary
    game [S], the stationary population that lazy sweeps reach from mu0
    (`stationary_flow` also tells how well).

  Raises:
    ValueError: see `checks.check_policy`.
  """
  checks.check_policy(pi, game.policy_shape, game.mask)
  return _push(game, pi)


def stationary_flow(game: MFGame, pi: jax.Array) -> operators.StationaryFlow:
  """The stationary population mu = mu P^{pi, mu} of a stationary game.

  Args:
    game: a stationary game.
    pi: [S, A].

  Returns:
    The population, its residual and whether it converged.

  Raises:
    ValueError: a finite-horizon game; see `checks.check_policy`.
  """
  if game.horizon is not None:
    raise ValueError(
      f'the game has horizon={game.horizon}; a stationary game has None'
    )
  checks.check_policy(pi, game.policy_shape, game.mask)
  return _find_stationary(game, pi)


def q_values(game: MFGame, mu: jax.Array, pi: jax.Array) -> jax.Array:
  """Action values of policy `pi` where the population flows as `mu`.

  Args:
    game: the game.
    mu: [H, S], or [S].
    pi: [H, S, A], or [S, A].

  Returns:
    [H, S, A], or [S, A]; for illegal actions meaningless.

  Raises:
    ValueError: shapes; see `checks.check_policy`.
  """
  _check_flow(game, mu)
  checks.check_policy(pi, game.policy_shape, game.mask)
  return _find_q(game, mu, pi)


def optimal_q_values(game: MFGame, mu: jax.Array) -> jax.Array:
  """Action values of the best response to a flow, [H, S, A] or [S, A]."""
  _check_flow(game, mu)
  return _find_optimal_q(game, mu)


def best_response(game: MFGame, mu: jax.Array) -> jax.Array:
  """A deterministic best response to a flow.

  Args:
    game: the game.
    mu: [H, S], or [S].

  Returns:
    [H, S, A], or [S, A], one-hot; the first of equally good actions.

  Raises:
    ValueError: wrong shape of mu.
  """
  _check_flow(game, mu)
  return _find_response(game, mu)


def expected_return(
  game: MFGame, pi: jax.Array, mu: jax.Array | None = None
) -> jax.Array:
  """J(pi, mu): discounted return of one player, summed over populations.

  Args:
    game: the game.
    pi: [H, S, A], or [S, A], the player's policy.
    mu: [H, S], or [S]; None for the flow of `pi` itself.

  Returns:
    [], the return from mu0; from mu in a stationary game.

  Raises:
    ValueError: shapes; see `checks.check_policy`.
  """
  checks.check_policy(pi, game.policy_shape, game.mask)
  mu = _push(game, pi) if mu is None else mu
  _check_flow(game, mu)
  return _find_return(game, pi, mu)


def exploitability(
  game: MFGame, pi: jax.Array, *, dtype: Any = None
) -> jax.Array:
  """What one player can gain by deviating while everybody plays `pi`.

  Zero in a Nash equilibrium. With several populations, the sum over them.

  Args:
    game: the game.
    pi: [H, S, A], or [S, A].
    dtype: float64 to insist on it: raises outside `jax.enable_x64(True)`. None
      takes what is on.

  Returns:
    [], at least zero in any precision.

  Raises:
    ValueError: see `checks.check_policy` and `checks.float_type`.
  """
  return population_exploitability(game, pi, dtype=dtype).sum()


def population_exploitability(
  game: MFGame, pi: jax.Array, *, dtype: Any = None
) -> jax.Array:
  """Exploitability of each population, [P]; arguments of `exploitability`."""
  dtype = checks.float_type(dtype)
  checks.check_policy(pi, game.policy_shape, game.mask)
  return _find_gaps(game, pi).astype(dtype)

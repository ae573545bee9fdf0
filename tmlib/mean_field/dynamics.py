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

Both directions are gathers: the push through the list of ways into each state
where the game has one, else a scatter-add.

Axes: S states, A actions, E noise outcomes, H time steps, P populations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.mean_field import checks
from tmlib.mean_field.game import MFGame

__all__ = [
  'StationaryFlow',
  'best_response',
  'expected_return',
  'exploitability',
  'greedy',
  'optimal_q_values',
  'population_exploitability',
  'push',
  'q_values',
  'stationary_flow',
  'uniform_policy',
]

# Sweeps of the fixed points of a stationary game, at most.
_SWEEPS = 100_000


class StationaryFlow(NamedTuple):
  """The stationary population of a policy.

  Attributes:
    mu: [S].
    residual: [], sum of |mu - mu P|.
    sweeps: [] int32, how many were made.
    converged: [] bool, the residual is at rounding.
  """

  mu: jax.Array
  residual: jax.Array
  sweeps: jax.Array
  converged: jax.Array


def _dtype() -> Any:
  return jnp.result_type(float)


def _tables(game: MFGame, mu: jax.Array, t: jax.Array):
  """Rewards [S, A] and probabilities [S, A, E] at one time."""
  dtype = _dtype()
  prob = game.prob(mu, t) if callable(game.prob) else game.prob
  reward = game.reward_fn(mu, t)
  return jnp.asarray(reward, dtype), jnp.asarray(prob, dtype)


def _advance(game: MFGame, flow: jax.Array) -> jax.Array:
  """Masses [S, A, E] on their way -> population [S]."""
  if game.inflow is None:
    new = jnp.zeros(game.num_states, flow.dtype)
    return new.at[jnp.asarray(game.idx)].add(flow)
  padded = jnp.append(flow.ravel(), jnp.zeros((), flow.dtype))
  return padded.at[jnp.asarray(game.inflow)].get(mode='clip').sum(-1)


def _step(game: MFGame, mu: jax.Array, pi: jax.Array, t: Any) -> jax.Array:
  """One step of the population: [S], [S, A] -> [S]."""
  _, prob = _tables(game, mu, t)
  return _advance(game, (mu[:, None] * pi)[..., None] * prob)


def _start(game: MFGame) -> jax.Array:
  return jnp.asarray(game.mu0, _dtype())


def uniform_policy(game: MFGame) -> jax.Array:
  """Equal probability on all legal actions, [H, S, A] or [S, A]."""
  shape = game.policy_shape
  legal = jnp.ones(shape, _dtype())
  if game.mask is not None:
    legal = jnp.broadcast_to(jnp.asarray(game.mask, _dtype()), shape)
  return legal / legal.sum(-1, keepdims=True)


def _flow(game: MFGame, pi: jax.Array) -> jax.Array:
  pi = jnp.asarray(pi, _dtype())
  if game.horizon is None:
    return _stationary_flow(game, pi).mu

  def body(mu, now):
    pi_t, t = now
    return _step(game, mu, pi_t, t), mu

  times = jnp.arange(game.horizon - 1, dtype=jnp.int32)
  last, flow = jax.lax.scan(body, _start(game), (pi[:-1], times))
  return jnp.concatenate([flow, last[None]])


def _stationary_flow(game: MFGame, pi: jax.Array) -> StationaryFlow:
  tol = 16 * jnp.finfo(_dtype()).eps
  pi = jnp.asarray(pi, _dtype())

  def body(carry):
    mu, _, sweep = carry
    new = _step(game, mu, pi, jnp.int32(0))
    # The lazy chain has the same fixed points and no period.
    return (mu + new) / 2, jnp.abs(new - mu).sum(), sweep + 1

  def going(carry):
    _, residual, sweep = carry
    return (residual > tol) & (sweep < _SWEEPS)

  start = (_start(game), jnp.asarray(jnp.inf, _dtype()), jnp.int32(0))
  mu, residual, sweeps = jax.lax.while_loop(going, body, start)
  return StationaryFlow(mu, residual, sweeps, residual <= tol)


def _legal_max(game: MFGame, q: jax.Array) -> jax.Array:
  if game.mask is not None:
    q = jnp.where(jnp.asarray(game.mask), q, -jnp.inf)
  return q.max(-1)


def greedy(game: MFGame, q: jax.Array) -> jax.Array:
  """The best legal action of each state, the first of equals.

  Args:
    game: the game.
    q: [..., S, A].

  Returns:
    [..., S, A], one-hot in the dtype of q.
  """
  if game.mask is not None:
    mask = jnp.broadcast_to(jnp.asarray(game.mask), q.shape)
    q = jnp.where(mask, q, -jnp.inf)
  return jax.nn.one_hot(q.argmax(-1), q.shape[-1], dtype=q.dtype)


def _backward(
  game: MFGame, mu: jax.Array, extra: Any, value: Callable[..., jax.Array]
) -> jax.Array:
  """Bellman's recursion; value(q [S, A], extra_t) -> [S] closes it."""
  mu = jnp.asarray(mu, _dtype())
  discount = jnp.asarray(game.discount, _dtype())
  idx = jnp.asarray(game.idx)
  if game.horizon is None:
    return _stationary_q(game, mu, lambda q: value(q, extra))

  def body(v, now):
    mu_t, extra_t, t = now
    reward, prob = _tables(game, mu_t, t)
    q = reward + discount * (prob * v[idx]).sum(-1)
    return value(q, extra_t), q

  times = jnp.arange(game.horizon, dtype=jnp.int32)
  end = jnp.zeros(game.num_states, _dtype())
  return jax.lax.scan(body, end, (mu, extra, times), reverse=True)[1]


def _stationary_q(game, mu, value):
  """Value iteration to rounding; a contraction with modulus gamma."""
  discount = jnp.asarray(game.discount, _dtype())
  reward, prob = _tables(game, mu, jnp.int32(0))
  idx = jnp.asarray(game.idx)
  eps = jnp.finfo(_dtype()).eps

  def backup(v):
    return reward + discount * (prob * v[idx]).sum(-1)

  def body(carry):
    v, _, sweep = carry
    new = value(backup(v))
    return new, jnp.abs(new - v).max(), sweep + 1

  def going(carry):
    v, change, sweep = carry
    # Rounding alone keeps changes near eps |v|.
    return (change > 4 * eps * (1 + jnp.abs(v).max())) & (sweep < _SWEEPS)

  start = value(reward)
  v = jax.lax.while_loop(
    going, body, (start, jnp.asarray(jnp.inf, _dtype()), jnp.int32(0))
  )[0]
  return backup(v)


def _policy_q(game: MFGame, mu: jax.Array, pi: jax.Array) -> jax.Array:
  pi = jnp.asarray(pi, _dtype())
  return _backward(game, mu, pi, lambda q, pi_t: (pi_t * q).sum(-1))


def _optimal_q(game: MFGame, mu: jax.Array) -> jax.Array:
  return _backward(game, mu, None, lambda q, _: _legal_max(game, q))


def _gaps(game: MFGame, pi: jax.Array, mu: jax.Array) -> jax.Array:
  """What each state's mass adds to the exploitability, [S]."""
  pi, mu = jnp.asarray(pi, _dtype()), jnp.asarray(mu, _dtype())
  q = _optimal_q(game, mu)
  lost = (pi * (_legal_max(game, q)[..., None] - q)).sum(-1) * mu
  discount = jnp.asarray(game.discount, _dtype())
  if game.horizon is None:
    return lost / (1 - discount)
  weight = discount ** jnp.arange(game.horizon, dtype=_dtype())
  return (weight[:, None] * lost).sum(0)


def _by_population(game: MFGame, x: jax.Array) -> jax.Array:
  """[S] -> sums over the states of each population, [P]."""
  sums, start = [], 0
  for size in game.populations:
    sums.append(x[start : start + size].sum())
    start += size
  return jnp.stack(sums)


_push = jax.jit(_flow)
_find_stationary = jax.jit(_stationary_flow)
_find_q = jax.jit(_policy_q)
_find_optimal_q = jax.jit(_optimal_q)
_find_response = jax.jit(lambda game, mu: greedy(game, _optimal_q(game, mu)))
_find_gaps = jax.jit(
  lambda game, pi: _by_population(game, _gaps(game, pi, _flow(game, pi)))
)


@jax.jit
def _find_return(game, pi, mu):
  q = _policy_q(game, mu, pi)
  first, pi = (q, pi) if game.horizon is None else (q[0], pi[0])
  start = mu if game.horizon is None else _start(game)
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


def stationary_flow(game: MFGame, pi: jax.Array) -> StationaryFlow:
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

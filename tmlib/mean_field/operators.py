r"""The operators of a game, unchecked, for use inside compiled programs.

`dynamics` holds their checked forms and the formulas. Both directions are
gathers: the push through the list of ways into each state where the game has
one, else a scatter-add.

Axes: S states, A actions, E noise outcomes, H time steps, P populations.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.mean_field.checks import float_type
from tmlib.mean_field.game import MFGame
from tmlib.ops.softmax import masked_softmax

__all__ = [
  'StationaryFlow',
  'advantages',
  'by_population',
  'exchange',
  'find_stationary',
  'flow',
  'gap',
  'greedy',
  'legal_max',
  'log_policy',
  'optimal_q',
  'policy_q',
  'softmax_policy',
  'start',
  'tables',
  'tables_over_time',
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


def tables(
  game: MFGame, mu: jax.Array, t: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Rewards [S, A] and probabilities [S, A, E] at one time."""
  dtype = float_type()
  prob = game.prob(mu, t) if callable(game.prob) else game.prob
  reward = game.reward_fn(mu, t)
  return jnp.asarray(reward, dtype), jnp.asarray(prob, dtype)


def tables_over_time(
  game: MFGame, mu: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Rewards [H, S, A] and probabilities [H, S, A, E] along a flow [H, S]."""
  times = jnp.arange(mu.shape[0], dtype=jnp.int32)
  return jax.vmap(lambda m, t: tables(game, m, t))(mu, times)


def _stepper(game: MFGame) -> Callable[..., jax.Array]:
  """One step of a population: (mu [S], pi [S, A], t, seen [S]) -> [S].

  Transitions depend on the population `seen`, not on the `mu` that is moved.
  """
  states, actions, outcomes = jnp.shape(game.idx)
  if game.inflow is None:

    def scatter(mu, pi, t, seen):
      _, prob = tables(game, seen, t)
      new = jnp.zeros(states, prob.dtype)
      flow = (mu[:, None] * pi)[..., None] * prob
      return new.at[jnp.asarray(game.idx)].add(flow)

    return scatter
  inflow = jnp.asarray(game.inflow)
  source = jnp.minimum(inflow // outcomes, states * actions - 1)

  def ways_in(prob):
    prob = jnp.asarray(prob, float_type()).ravel()
    return jnp.append(prob, jnp.zeros((), prob.dtype))[inflow]

  ready = None if callable(game.prob) else ways_in(game.prob)

  def gather(mu, pi, t, seen):
    prob = ways_in(game.prob(seen, t)) if ready is None else ready
    return (prob * (mu[:, None] * pi).ravel()[source]).sum(-1)

  return gather


def softmax_policy(game: MFGame, y: jax.Array) -> jax.Array:
  """Softmax over legal actions: [..., S, A] -> [..., S, A]."""
  if game.mask is None:
    return jax.nn.softmax(y)
  return masked_softmax(y, jnp.broadcast_to(jnp.asarray(game.mask), y.shape))


def log_policy(pi: jax.Array) -> jax.Array:
  """Log pi, finite: a start of probability zero can be left again."""
  return jnp.log(jnp.maximum(pi, jnp.finfo(pi.dtype).tiny))


def start(game: MFGame) -> jax.Array:
  """The initial population, [S], in the precision that is on."""
  return jnp.asarray(game.mu0, float_type())


def uniform_policy(game: MFGame) -> jax.Array:
  """Equal probability on all legal actions, [H, S, A] or [S, A]."""
  shape = game.policy_shape
  legal = jnp.ones(shape, float_type())
  if game.mask is not None:
    legal = jnp.broadcast_to(jnp.asarray(game.mask, float_type()), shape)
  return legal / legal.sum(-1, keepdims=True)


def flow(game: MFGame, pi: jax.Array, seen: Any = None) -> jax.Array:
  """Flow of `pi` among a population `seen`; None for among themselves."""
  pi = jnp.asarray(pi, float_type())
  if game.horizon is None:
    return find_stationary(game, pi, seen).mu
  step = _stepper(game)

  def body(mu, now):
    pi_t, seen_t, t = now
    return step(mu, pi_t, t, mu if seen_t is None else seen_t), mu

  times = jnp.arange(game.horizon - 1, dtype=jnp.int32)
  seen = None if seen is None else seen[:-1]
  last, flow = jax.lax.scan(body, start(game), (pi[:-1], seen, times))
  return jnp.concatenate([flow, last[None]])


def find_stationary(
  game: MFGame, pi: jax.Array, seen: Any = None
) -> StationaryFlow:
  """The stationary population of `pi` among `seen`; None for themselves."""
  tol = 16 * jnp.finfo(float_type()).eps
  pi, step = jnp.asarray(pi, float_type()), _stepper(game)

  def body(carry):
    mu, _, sweep = carry
    new = step(mu, pi, jnp.int32(0), mu if seen is None else seen)
    # The lazy chain has the same fixed points and no period.
    return (mu + new) / 2, jnp.abs(new - mu).sum(), sweep + 1

  def going(carry):
    _, residual, sweep = carry
    return (residual > tol) & (sweep < _SWEEPS)

  begin = (start(game), jnp.asarray(jnp.inf, float_type()), jnp.int32(0))
  mu, residual, sweeps = jax.lax.while_loop(going, body, begin)
  return StationaryFlow(mu, residual, sweeps, residual <= tol)


def legal_max(game: MFGame, q: jax.Array) -> jax.Array:
  """Value of the best legal action: [..., S, A] -> [..., S]."""
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
  mu = jnp.asarray(mu, float_type())
  discount = jnp.asarray(game.discount, float_type())
  idx = jnp.asarray(game.idx)
  if game.horizon is None:
    return _stationary_q(game, mu, lambda q: value(q, extra))

  def body(v, now):
    mu_t, extra_t, t = now
    reward, prob = tables(game, mu_t, t)
    q = reward + discount * (prob * v[idx]).sum(-1)
    return value(q, extra_t), q

  times = jnp.arange(game.horizon, dtype=jnp.int32)
  end = jnp.zeros(game.num_states, float_type())
  return jax.lax.scan(body, end, (mu, extra, times), reverse=True)[1]


def _stationary_q(game, mu, value):
  """Value iteration to rounding; a contraction with modulus gamma."""
  discount = jnp.asarray(game.discount, float_type())
  reward, prob = tables(game, mu, jnp.int32(0))
  idx = jnp.asarray(game.idx)
  eps = jnp.finfo(float_type()).eps

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
    going, body, (start, jnp.asarray(jnp.inf, float_type()), jnp.int32(0))
  )[0]
  return backup(v)


def policy_q(game: MFGame, mu: jax.Array, pi: jax.Array) -> jax.Array:
  """Action values of `pi` against a flow, [H, S, A] or [S, A]."""
  pi = jnp.asarray(pi, float_type())
  return _backward(game, mu, pi, lambda q, pi_t: (pi_t * q).sum(-1))


def optimal_q(game: MFGame, mu: jax.Array) -> jax.Array:
  """Action values of the best response, [H, S, A] or [S, A]."""
  return _backward(game, mu, None, lambda q, _: legal_max(game, q))


def advantages(game: MFGame, pi: jax.Array, mu: jax.Array) -> jax.Array:
  """What each state's mass adds to the exploitability of `pi`, [S]."""
  pi, mu = jnp.asarray(pi, float_type()), jnp.asarray(mu, float_type())
  q = optimal_q(game, mu)
  lost = (pi * (legal_max(game, q)[..., None] - q)).sum(-1) * mu
  discount = jnp.asarray(game.discount, float_type())
  if game.horizon is None:
    return lost / (1 - discount)
  weight = discount ** jnp.arange(game.horizon, dtype=float_type())
  return (weight[:, None] * lost).sum(0)


def by_population(game: MFGame, x: jax.Array) -> jax.Array:
  """[S] -> sums over the states of each population, [P]."""
  sums, start = [], 0
  for size in game.populations:
    sums.append(x[start : start + size].sum())
    start += size
  return jnp.stack(sums)


def gap(game: MFGame, pi: jax.Array) -> jax.Array:
  """Exploitability of `pi`, []."""
  return advantages(game, pi, flow(game, pi)).sum()


def exchange(
  game: MFGame, d: jax.Array, mu: jax.Array, t: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """One time step both ways, for an occupation measure.

  Args:
    game: the game.
    d: [S, A], mass on each state and action.
    mu: [S], the population that rewards and transitions see.
    t: [] int.
    value: [S], of the next states.

  Returns:
    reward [S, A], arrivals [S] of d, and expected next value [S, A].
  """
  reward, prob = tables(game, mu, t)
  idx = jnp.asarray(game.idx)
  ones = jnp.ones(mu.shape, d.dtype)
  arrivals = _stepper(game)(ones, d, t, mu)
  return reward, arrivals, (prob * value[idx]).sum(-1)

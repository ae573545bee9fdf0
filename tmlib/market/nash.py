"""Equilibria of the providers, each with a certificate.

`solve_nash` finds the equilibrium by `envelope`, or plays best responses. What
it returns is checked by a blind search for a better reply: no provider can gain
more than `eps_nash` of the users by changing its own split.

Axes: M providers, G games, R rounds.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market import checks
from tmlib.market.envelope import envelope_equilibrium
from tmlib.market.game import ProviderGame
from tmlib.market.response import certify, respond

__all__ = ['STATUSES', 'NashResult', 'equilibria', 'solve_games', 'solve_nash']

STATUSES = ('converged', 'cycle', 'max_iters', 'infeasible')
METHODS = ('envelope', 'best_response')
ORDERS = ('alternating', 'simultaneous')
TIES = ('users', 'stay')
# Games that are solved together.
_BLOCK = 128


class NashResult(NamedTuple):
  """An equilibrium, or how far play came.

  Attributes:
    alpha: [M], share of each budget that trains.
    x: [M], share of the users.
    U: [], welfare of the users, see `UserEq`.
    accuracy: [M].
    latency: [M].
    eps_nash: [], largest share that a provider could gain alone.
    status: 'converged' (eps_nash within tol), 'cycle', 'max_iters' or
      'infeasible' (queues that grow for ever); under a trace the index of it
      in `STATUSES`.
    rounds: [], rounds of best responses; 0 by the envelope.
    orbit: [R, M], the alphas of a cycle, else of no row; under a trace all
      rounds, NaN where not played.
  """

  alpha: Any
  x: Any
  U: Any
  accuracy: Any
  latency: Any
  eps_nash: Any
  status: Any
  rounds: Any
  orbit: Any


class _Options(NamedTuple):
  method: str
  max_iters: int
  damping: float
  order: str
  ties: str
  tol: float | None


def _play(game: ProviderGame, alpha, options: _Options):
  """Rounds of best responses: alpha, history [R + 1, M], rounds, status."""
  providers, dtype = game.num_providers, alpha.dtype
  fine = 1e-6 if dtype == jnp.float64 else 2e-3
  history = jnp.full((options.max_iters + 1, providers), jnp.nan, dtype)
  history = history.at[0].set(alpha)

  def respond_in(alpha, before, i):
    old = alpha if options.order == 'alternating' else before
    reply = respond(game, i, old)
    target = reply.alpha
    if options.ties == 'stay':
      target = jnp.where(reply.gain > fine**2, target, old[i])
    step = (1 - options.damping) * (target - old[i])
    return alpha.at[i].set(old[i] + step)

  def unfinished(carry):
    _, _, step, settled, cycled = carry
    return ~settled & ~cycled & (step < options.max_iters)

  def body(carry):
    alpha, history, step, _, _ = carry
    new = jax.lax.fori_loop(
      0, providers, lambda i, a: respond_in(a, alpha, i), alpha
    )
    moved = jnp.abs(new - alpha).max()
    near = jnp.abs(history - new[None]).max(1) <= fine
    # Back where it was, and not because it hardly moves.
    cycled = (near & (jnp.arange(len(near)) < step)).any() & (moved > 9 * fine)
    history = history.at[step + 1].set(new)
    return new, history, step + 1, moved <= fine / 9, cycled

  no = jnp.bool_(False)
  carry = (alpha, history, jnp.int32(0), no, no)
  alpha, history, rounds, _, cycled = jax.lax.while_loop(
    unfinished, body, carry
  )
  return alpha, history, rounds, cycled


def _solve(game: ProviderGame, alpha0: Any, options: _Options) -> NashResult:
  """The core of `solve_nash`; status is an index."""
  dtype = jnp.result_type(game.budgets, float)
  if options.method == 'envelope':
    alpha = envelope_equilibrium(game)[0].astype(dtype)
    history = jnp.full((1, game.num_providers), jnp.nan, dtype)
    rounds, cycled = jnp.int32(0), jnp.bool_(False)
  else:
    start = jax.lax.stop_gradient(jnp.asarray(alpha0, dtype))
    alpha, history, rounds, cycled = _play(game, start, options)
  eps, users = certify(game, alpha)
  tol = options.tol
  if tol is None:
    tol = 1e-8 if dtype == jnp.float64 else 1e-4
  status = jnp.where(eps <= tol, 0, jnp.where(cycled, 1, 2))
  status = jnp.where(jnp.isfinite(users.U), status, 3)
  accuracy = game.accuracy(alpha * game.budgets)
  return NashResult(
    alpha,
    users.x,
    users.U,
    accuracy,
    users.latency,
    eps,
    status.astype(jnp.int32),
    rounds,
    history,
  )


@functools.partial(jax.jit, static_argnums=2)
def _solve_one(game, alpha0, options):
  return _solve(game, alpha0, options)


@functools.partial(jax.jit, static_argnums=2)
def _solve_many(games, alpha0, options):
  return jax.vmap(lambda g, a: _solve(g, a, options))(games, alpha0)


def _make_options(
  game: ProviderGame, method: str | None, max_iters: int, damping: float,
  order: str, ties: str, tol: float | None,
) -> _Options:  # fmt: skip
  method = method or ('envelope' if game.weights is None else 'best_response')
  checks.check_choice('method', method, METHODS)
  checks.check_choice('order', order, ORDERS)
  checks.check_choice('ties', ties, TIES)
  if method == 'envelope' and game.weights is not None:
    raise ValueError(
      'method="envelope" holds for one type of users, but weights has '
      f'{game.num_types}; pass method="best_response"'
    )
  if max_iters < 1:
    raise ValueError(f'max_iters={max_iters} must be at least 1')
  if not 0 <= damping < 1:
    raise ValueError(
      f'damping={damping} must lie in [0, 1): the part of the old alpha that '
      'is kept'
    )
  return _Options(method, int(max_iters), float(damping), order, ties, tol)


def _orbit(history: np.ndarray, rounds: int) -> np.ndarray:
  """The rounds since the last point was seen before."""
  last = history[rounds]
  near = np.abs(history[:rounds] - last).max(1)
  return history[int(near.argmin()) + 1 : rounds + 1]


def solve_nash(
  game: ProviderGame,
  alpha0: Any = None,
  max_iters: int = 100,
  damping: float = 0.0,
  *,
  method: str | None = None,
  order: str = 'alternating',
  ties: str = 'users',
  tol: float | None = None,
) -> NashResult:
  """An equilibrium of the providers, with its certificate.

  Args:
    game: the game.
    alpha0: [M], where best responses start; None: one half each.
    max_iters: most rounds of best responses.
    damping: part of the old alpha that a round keeps, in [0, 1).
    method: 'envelope' (one type of users, concave accuracy: the equilibrium,
      which is unique but for monopolies) or 'best_response'; None chooses.
    order: of best responses, 'alternating' or 'simultaneous'.
    ties: where a provider's share is flat, 'users' moves on towards what users
      like, 'stay' moves only for a gain in share.
    tol: eps_nash of status 'converged'; None: 1e-8 in float64, 1e-4 in float32.

  Returns:
    The result; NumPy in float64 unless the game holds jax arrays. It can be
    mapped over and, by the envelope, differentiated: under a trace `status` is
    an index into `STATUSES`.

  Raises:
    ValueError: an option out of range or an alpha0 that does not fit.
  """
  options = _make_options(game, method, max_iters, damping, order, ties, tol)
  if alpha0 is None:
    alpha0 = np.full(game.num_providers, 0.5)
  alpha0 = checks.check_alpha(alpha0, game.num_providers)
  if checks.traced(game, alpha0):
    return _solve(game, alpha0, options)
  found = checks.precise(lambda g, a: _solve_one(g, a, options), game, alpha0)
  code, rounds = int(found.status), int(found.rounds)
  history = np.asarray(found.orbit)
  orbit = _orbit(history, rounds) if STATUSES[code] == 'cycle' else history[:0]
  return found._replace(status=STATUSES[code], orbit=orbit)


def solve_games(
  games: ProviderGame,
  alpha0: Any = None,
  max_iters: int = 100,
  damping: float = 0.0,
  *,
  method: str | None = None,
  order: str = 'alternating',
  ties: str = 'users',
  tol: float | None = None,
) -> NashResult:
  """`solve_nash` of many games in one program.

  Args:
    games: leaves with a leading axis G, from `stack_games`.
    alpha0: [G, M] or None.
    max_iters: see `solve_nash`.
    damping: see `solve_nash`.
    method: see `solve_nash`.
    order: see `solve_nash`.
    ties: see `solve_nash`.
    tol: see `solve_nash`.

  Returns:
    The results with a leading axis G, as NumPy arrays; status holds strings,
    orbit all rounds.

  Raises:
    ValueError: games without a leading axis.
  """
  shape = np.shape(games.budgets)
  if len(shape) != 2:
    raise ValueError(
      f'budgets has shape {shape}; expected [G, M] from stack_games (one game: '
      'solve_nash)'
    )
  options = _make_options(games, method, max_iters, damping, order, ties, tol)
  if alpha0 is None:
    alpha0 = np.full(shape, 0.5)
  if checks.traced(games, alpha0):
    return _solve_many(games, alpha0, options)
  count, size = shape[0], _BLOCK
  parts = []
  for first in range(0, count, size):
    # The last block is filled up, so that every size compiles once.
    rows = np.minimum(np.arange(first, first + size), count - 1)
    block = jax.tree.map(lambda x, r=rows: x[r], (games, alpha0))
    found = checks.precise(lambda g, a: _solve_many(g, a, options), *block)
    keep = min(size, count - first)
    parts.append(jax.tree.map(lambda x, k=keep: x[:k], found))
  found = jax.tree.map(lambda *x: np.concatenate(x), *parts)
  names = np.array(STATUSES)[np.asarray(found.status)]
  return found._replace(status=names)


def equilibria(
  game: ProviderGame,
  starts: int = 16,
  seed: int = 0,
  max_iters: int = 100,
  apart: float = 1e-4,
) -> list[NashResult]:
  """All equilibria that best responses reach from many starts.

  Providers move only for a gain, so where a monopolist's equilibria form a set
  several of its points are found. A list is no proof that there are no others;
  by `envelope`, shares differ only with several types of users or an accuracy
  that is not concave.

  Args:
    game: the game.
    starts: number of starts, corners first, then random ones.
    seed: of the random starts.
    max_iters: most rounds from each.
    apart: equilibria closer than this in every alpha are one.

  Returns:
    Those with status 'converged', best for users first.

  Raises:
    ValueError: no start.
  """
  if starts < 1:
    raise ValueError(f'starts={starts} must be at least 1')
  providers = game.num_providers
  corners = np.array(
    [[0.02 + 0.96 * ((n >> i) & 1) for i in range(providers)]
     for n in range(min(2**providers, starts))]
  )  # fmt: skip
  rng = np.random.default_rng(seed)
  alpha0 = np.concatenate(
    [corners, rng.uniform(0, 1, (starts - len(corners), providers))]
  )
  many = jax.tree.map(lambda x: np.stack([np.asarray(x)] * starts), game)
  found = solve_games(
    many, alpha0, max_iters, method='best_response', ties='stay'
  )
  kept: list[NashResult] = []
  for n in np.argsort(-np.asarray(found.U), kind='stable'):
    one = NashResult(*(np.asarray(x)[n] for x in found))
    new = all(np.abs(one.alpha - k.alpha).max() > apart for k in kept)
    if one.status == 'converged' and new:
      kept.append(one._replace(status=str(one.status), orbit=one.orbit[:0]))
  return kept

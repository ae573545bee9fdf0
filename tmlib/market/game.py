"""The game of providers who split a budget between training and serving.

Provider i of M spends c_i = alpha_i B_i on training, which buys accuracy
a_i = A(c_i), and serves with s_i = (1 - alpha_i) B_i, at latency L(x_i, s_i)
when a share x_i of the users comes to it. A user of type k values

  u_ik = a_i - p_i - gamma_k L(x_i, s_i)

and picks the best provider (Wardrop, tau = 0) or one with probability
proportional to exp(u_ik / tau) (logit). The mass of users is one. A provider
is paid by its share x_i (a constant margin per user changes nothing).

Axes: M providers, K types of users.
"""

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market import accuracy as accuracies
from tmlib.market import checks
from tmlib.market.latency import LATENCIES, Latency

__all__ = ['ProviderGame', 'quality', 'stack_games']


@dataclasses.dataclass(frozen=True)
class ProviderGame:
  """A game of providers; a pytree, so it can be mapped over.

  Lists and NumPy arrays are solved in float64 whatever the caller's precision;
  a game that holds jax arrays is solved in their dtype.

  Attributes:
    budgets: [M], compute B > 0.
    accuracy: 'power_law', 'log1p', 'michaelis', one of these with parameters,
      or any elementwise function of [M].
    latency: 'linear', 'mm1', 'processor_sharing', 'bpr' or a `Latency`.
    gamma: weight of latency, >= 0; [] or, for K types, [K].
    tau: temperature of the users' choice, in units of utility; 0: Wardrop.
    outside: utility of staying away; None: every user is served.
    prices: [] or [M], subtracted from the utility.
    weights: [K], share of each type of users; None: one type.
    wardrop: set from tau; needed only where tau is traced.

  With gamma = 0 and tau = 0 the best provider takes all, ties split equally. A
  provider with s = 0 has no users.

  Raises:
    ValueError: see `_check`; also where no split of the budgets can serve all.
  """

  budgets: Any
  accuracy: Any = 'power_law'
  latency: Any = 'linear'
  gamma: Any = 1.0
  tau: Any = 0.05
  outside: Any = None
  prices: Any = 0.0
  weights: Any = None
  wardrop: bool | None = None

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    for name in ('budgets', 'prices', 'gamma', 'weights'):
      value = getattr(self, name)
      if isinstance(value, list | tuple):
        held = any(isinstance(x, jax.Array) for x in value)
        put(name, jnp.stack(value) if held else np.asarray(value, np.float64))
    if isinstance(self.accuracy, str):
      checks.check_choice(
        'accuracy', self.accuracy, tuple(accuracies.ACCURACIES)
      )
      put('accuracy', accuracies.ACCURACIES[self.accuracy]())
    elif _is_function(self.accuracy):
      put('accuracy', jax.tree_util.Partial(self.accuracy))
    if isinstance(self.latency, str):
      checks.check_choice('latency', self.latency, tuple(LATENCIES))
      put('latency', LATENCIES[self.latency])
    if self.wardrop is None:
      known = checks.concrete(self.tau) and np.ndim(self.tau) == 0
      put('wardrop', bool(known and self.tau == 0))
    _check(self)

  @property
  def num_providers(self) -> int:
    """M."""
    return self.budgets.shape[-1]

  @property
  def num_types(self) -> int:
    """K."""
    return 1 if self.weights is None else np.shape(self.weights)[-1]

  def replace(self, **changes) -> 'ProviderGame':
    """The same game with some fields changed, checked again."""
    if 'tau' in changes and 'wardrop' not in changes:
      changes['wardrop'] = None
    return dataclasses.replace(self, **changes)


_LEAVES = (
  'budgets', 'accuracy', 'gamma', 'tau', 'outside', 'prices', 'weights',
)  # fmt: skip
_STATIC = ('latency', 'wardrop')


def _flatten(game: ProviderGame):
  get = lambda names: tuple(getattr(game, name) for name in names)
  return get(_LEAVES), get(_STATIC)


def _unflatten(static, leaves) -> ProviderGame:
  """Past the checks: a leaf may be a placeholder or hold many games."""
  game = object.__new__(ProviderGame)
  for name, value in zip((*_LEAVES, *_STATIC), (*leaves, *static), strict=True):
    object.__setattr__(game, name, value)
  return game


jax.tree_util.register_pytree_node(ProviderGame, _flatten, _unflatten)


def _is_function(accuracy: Any) -> bool:
  known = (*accuracies.ACCURACIES.values(), jax.tree_util.Partial)
  return isinstance(accuracy, Callable) and not isinstance(accuracy, known)


def _number(name: str, value: Any, low: float, fix: str) -> None:
  """Checks that concrete numbers are finite and at least `low`."""
  if value is None or not checks.concrete(value):
    return
  values = np.asarray(value, np.float64)
  if not np.isfinite(values).all() or (values < low).any():
    raise ValueError(f'{name}={value} must be finite and >= {low:g}; {fix}')


def _check(game: ProviderGame) -> None:
  """Raises ValueError for a game that cannot be.

  One provider, a budget that is not positive, negative gamma or tau, types
  that do not fit their weights, and queues that cannot hold all users.
  """
  shape = np.shape(game.budgets)
  if len(shape) != 1:
    raise ValueError(
      f'budgets has shape {shape}; expected [M], one number per provider '
      '(many games: stack_games, or jax.vmap over a function that makes one)'
    )
  if shape[0] < 2:
    raise ValueError(
      f'budgets has M = {shape[0]} provider; competition needs at least two. A '
      'monopolist against staying away: add a provider of a tiny budget'
    )
  if not isinstance(game.latency, Latency):
    raise TypeError(
      f'latency={game.latency!r} must be a name or a Latency; see LATENCIES'
    )
  if np.shape(game.prices) not in ((), shape):
    raise ValueError(
      f'prices has shape {np.shape(game.prices)}; expected () or {shape}'
    )
  types = np.shape(game.gamma)
  if types != (() if game.weights is None else np.shape(game.weights)):
    raise ValueError(
      f'gamma has shape {types} and weights '
      f'{None if game.weights is None else np.shape(game.weights)}; a gamma '
      'per type of user needs as many weights'
    )
  _number('gamma', game.gamma, 0, 'users do not like to wait')
  _number('tau', game.tau, 0, 'tau = 0 are Wardrop users, who never err')
  _number('prices', game.prices, -np.inf, 'a price is a finite number')
  _number('outside', game.outside, -np.inf, 'None: nobody stays away')
  if checks.concrete(game.budgets):
    _check_budgets(game)
  if game.weights is not None and checks.concrete(game.weights):
    weights = np.asarray(game.weights, np.float64)
    if (weights <= 0).any() or abs(weights.sum() - 1) > 1e-6:
      raise ValueError(
        f'weights={weights} must be positive and sum to one (they are shares '
        'of the users); divide by their sum'
      )


def _check_budgets(game: ProviderGame) -> None:
  budgets = np.asarray(game.budgets, np.float64)
  bad = ~(np.isfinite(budgets) & (budgets > 0))
  if bad.any():
    i = int(bad.argmax())
    raise ValueError(
      f'budgets[{i}] = {budgets[i]} must be finite and positive; leave out a '
      'provider that has no compute'
    )
  full = game.outside is None
  if full and game.latency.capacitated and budgets.sum() <= 1:
    raise ValueError(
      f'budgets sum to {budgets.sum():g}, but {game.latency.name} queues need '
      'more than the mass of users, 1, to serve all of them; raise budgets or '
      'set outside'
    )
  if checks.traced(game.accuracy):
    return
  if not accuracies.is_concave(game.accuracy, budgets):
    warnings.warn(
      'accuracy is not increasing and concave on [0, budget]: a provider may '
      'have several best responses and the game several equilibria; use '
      "solve_nash(method='best_response') and `equilibria`",
      stacklevel=4,
    )


def quality(
  game: ProviderGame, alpha: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Accuracy less price, and serving capacity.

  Args:
    game: the game.
    alpha: [M], in [0, 1].

  Returns:
    v [M] = A(alpha B) - p, s [M] = (1 - alpha) B.
  """
  value = game.accuracy(alpha * game.budgets) - game.prices
  return value, (1 - alpha) * game.budgets


def stack_games(games: Sequence[ProviderGame]) -> ProviderGame:
  """One pytree of games of one kind, to be solved together.

  Args:
    games: G games with equal M, K, latency, kind of users and of accuracy.

  Returns:
    A game whose leaves have a leading axis G; for `solve_games`.

  Raises:
    ValueError: no game, or games of different kinds.
  """
  if not games:
    raise ValueError('games is empty; give at least one')
  kinds = {
    str(jax.tree.structure(g)) + str([np.shape(x) for x in jax.tree.leaves(g)])
    for g in games
  }
  if len(kinds) > 1:
    raise ValueError(
      'games differ in kind (number of providers or types, latency, wardrop or '
      'logit users, outside option or accuracy); stack games of one kind'
    )
  leaves = [jax.tree.leaves(g) for g in games]
  stacked = [np.stack(x) for x in zip(*leaves, strict=True)]
  return jax.tree.unflatten(jax.tree.structure(games[0]), stacked)

r"""Mean-field games on padded sparse successors.

A state s and an action a lead to state idx[s, a, e] with probability
prob[s, a, e], e = 1..E; unused outcomes have probability zero. Rewards, and
transition probabilities where asked, depend on the population mu and the time.

  finite horizon:  J(pi, mu) = sum_{t<H} gamma^t E r(s_t, a_t, mu_t, t)
  stationary:      J(pi, mu) = sum_t gamma^t E r(s_t, a_t, mu), s_0 ~ mu

Several populations are one game on the disjoint union of their states: each
block of mu has mass one, and every formula of one population holds as it
stands. Exploitability is then the sum over populations.

Arrays are kept in NumPy float64 and take the precision of the place where they
are used: a game made anywhere can be solved inside `jax.enable_x64(True)`.

Axes: S states (of all populations), A actions, E noise outcomes, H time steps,
D largest number of ways into a state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tmlib.mean_field import checks

__all__ = ['MFGame', 'make_game', 'stack_games', 'union']

# Ways into a state are listed where the padded list is at most so much longer.
_PADDING = 4


def _constant(array: Any) -> Any:
  """Host arrays in float64; tracers and device arrays as they are."""
  if isinstance(array, jax.Array):
    return array
  return np.asarray(array, np.float64)


def _partial(function: Any) -> Any:
  """A callable as a pytree: what it is bound to are leaves."""
  if not callable(function):
    raise TypeError(
      f'{function!r} is not callable; reward_fn(mu, t) returns [S, A]'
    )
  if isinstance(function, jax.tree_util.Partial):
    return function
  return jax.tree_util.Partial(function)


def _inflow(idx: np.ndarray) -> np.ndarray | None:
  """[S, D] positions of idx's flat entries that lead to each state.

  Padding holds S A E; D is a half multiple of A E. None where some state has
  far more ways in than the average: the list would be mostly padding.
  """
  states, size = idx.shape[0], idx.size
  count = np.bincount(idx.ravel(), minlength=states)
  # In halves of the average, so that random games of one size share programs.
  halves = -(-2 * states * int(count.max()) // size)
  width = -(-halves * size // (2 * states))
  if states * width > _PADDING * size:
    return None
  order = np.argsort(idx.ravel(), kind='stable')
  start = np.concatenate([[0], np.cumsum(count)[:-1]])
  place = np.arange(size) - np.repeat(start, count)
  found = np.full((states, width), size, np.int32)
  found[np.repeat(np.arange(states), count), place] = order
  return found


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True, eq=False)
class MFGame:
  """A mean-field game; checked when it is built.

  A pytree: a batch of games is a game whose leaves have a leading axis, for
  `jax.vmap`. Callables become `jax.tree_util.Partial`; bind what differs
  between games as arguments of a Partial, then it is batched too.

  Attributes:
    idx: [S, A, E] int32, successors.
    prob: [S, A, E], their probabilities; or (mu [S], t) -> [S, A, E].
    reward_fn: (mu [S], t []) -> [S, A].
    mu0: [S], initial population; each block sums to one. A stationary game
      starts its search for the stationary population here.
    horizon: H, number of decisions; None for a stationary discounted game
      (static).
    discount: gamma in (0, 1], below one for a stationary game.
    mask: [S, A] bool, legal actions; None where all are.
    populations: number of states of each population (static); () for one.
    inflow: [S, D] int32, derived: the flat entries of idx that lead to each
      state, padded by S A E; None to scatter instead.
  """

  idx: Any
  prob: Any
  reward_fn: Callable[[jax.Array, jax.Array], jax.Array]
  mu0: Any
  horizon: int | None = None
  discount: Any = 1.0
  mask: Any = None
  populations: tuple[int, ...] = ()
  inflow: Any = None

  def __post_init__(self):
    put = lambda name, value: object.__setattr__(self, name, value)
    if not isinstance(self.idx, jax.core.Tracer):
      put('idx', np.asarray(self.idx))
    if self.idx.ndim != 3 or min(self.idx.shape) < 1:
      raise ValueError(
        f'idx has shape {self.idx.shape}; expected [S, A, E], none empty'
      )
    if not np.issubdtype(self.idx.dtype, np.integer):
      raise TypeError(f'idx holds {self.idx.dtype}; successors are integers')
    put('mu0', _constant(self.mu0))
    put('reward_fn', _partial(self.reward_fn))
    put('prob', _partial(self.prob) if callable(self.prob)
        else _constant(self.prob))  # fmt: skip
    put('populations', tuple(self.populations) or (self.num_states,))
    if self.mask is not None and checks.concrete(self.mask):
      put('mask', np.asarray(self.mask, bool))
    self._check()
    if isinstance(self.idx, np.ndarray):
      put('idx', self.idx.astype(np.int32))
      if self.inflow is None:
        put('inflow', _inflow(self.idx))

  def _check(self):
    states, actions, _ = self.idx.shape
    if self.horizon is None:
      if checks.concrete(self.discount) and not 0 < self.discount < 1:
        raise ValueError(
          f'discount={self.discount} must be in (0, 1) for a stationary game; '
          'give horizon for a finite one'
        )
    else:
      checks.check_count('horizon', self.horizon)
      checks.check_between('discount', self.discount, 0, 1)
    if np.shape(self.mu0) != (states,):
      raise ValueError(
        f'mu0 has shape {np.shape(self.mu0)}; idx has {states} states'
      )
    if self.mask is not None:
      if np.shape(self.mask) != (states, actions):
        raise ValueError(
          f'mask has shape {np.shape(self.mask)}; expected [S, A] = '
          f'{(states, actions)}'
        )
      if checks.concrete(self.mask) and not self.mask.any(-1).all():
        state = int(np.argmin(self.mask.any(-1)))
        raise ValueError(
          f'mask leaves no legal action in state {state}; allow at least one'
        )
    if not callable(self.prob):
      checks.check_transitions(self.idx, self.prob, self.mask)
    self._check_populations()
    self._check_callables()

  def _check_populations(self):
    if min(self.populations) < 1 or sum(self.populations) != self.num_states:
      raise ValueError(
        f'populations={self.populations} must be positive and add up to the '
        f'{self.num_states} states of idx'
      )
    ends = np.cumsum(self.populations)
    for i, (low, high) in enumerate(zip(ends - self.populations, ends,
                                        strict=True)):  # fmt: skip
      name = 'mu0' if len(ends) == 1 else f'mu0 of population {i}'
      checks.check_distribution(name, self.mu0[low:high])
      if not checks.concrete(self.idx):
        continue
      block = self.idx[low:high]
      # Padding may point anywhere that has probability zero; states may not.
      if not callable(self.prob) and checks.concrete(self.prob):
        block = np.where(np.asarray(self.prob)[low:high] > 0, block, low)
      outside = (block < low) | (block >= high)
      if outside.any():
        s, a, e = np.argwhere(outside)[0]
        raise ValueError(
          f'idx[{s + low}, {a}, {e}] = {block[s, a, e]} is outside states '
          f'{low}..{high - 1} of population {i}; successors of a population '
          'are its own states'
        )

  def _check_callables(self):
    """Shapes of the reward and values of prob, at mu0 and time 0.

    Called, not traced: a NumPy constant that a trace meets in float32 is stuck
    to that precision in jax, and this game may be solved in float64 later.
    """
    if not checks.concrete(*jax.tree.leaves(self)):
      return
    mu, t = jnp.asarray(self.mu0), jnp.int32(0)
    shape = jnp.shape(self.reward_fn(mu, t))
    if shape != self.idx.shape[:2]:
      raise ValueError(
        f'reward_fn(mu, t) has shape {shape}; expected [S, A] = '
        f'{self.idx.shape[:2]}'
      )
    if callable(self.prob):
      checks.check_transitions(self.idx, self.prob(mu, t), self.mask)

  @property
  def num_states(self) -> int:
    """S."""
    return self.idx.shape[-3]

  @property
  def num_actions(self) -> int:
    """A."""
    return self.idx.shape[-2]

  @property
  def stationary(self) -> bool:
    """Whether this is a stationary discounted game."""
    return self.horizon is None

  @property
  def policy_shape(self) -> tuple[int, ...]:
    """[H, S, A], or [S, A] for a stationary game."""
    lead = () if self.horizon is None else (self.horizon,)
    return (*lead, self.num_states, self.num_actions)

  def replace(self, **changes: Any) -> 'MFGame':
    """A checked copy with other fields."""
    if 'idx' in changes:
      changes.setdefault('inflow', None)
    return dataclasses.replace(self, **changes)

  def tree_flatten(self):
    """Leaves and static fields, for jax."""
    leaves = (self.idx, self.prob, self.reward_fn, self.mu0, self.discount,
              self.mask, self.inflow)  # fmt: skip
    return leaves, (self.horizon, self.populations)

  @classmethod
  def tree_unflatten(cls, static, leaves):
    """Rebuilds without checks: leaves may be tracers, or batched."""
    game = object.__new__(cls)
    names = ('idx', 'prob', 'reward_fn', 'mu0', 'discount', 'mask', 'inflow')
    values = dict(zip(names, leaves, strict=True))
    values |= {'horizon': static[0], 'populations': static[1]}
    for name, value in values.items():
      object.__setattr__(game, name, value)
    return game


def make_game(
  idx: Any,
  prob: Any,
  reward_fn: Callable[[jax.Array, jax.Array], jax.Array],
  mu0: Any,
  horizon: int | None = None,
  *,
  discount: float = 1.0,
  mask: Any = None,
  populations: Sequence[int] = (),
  renormalize: bool = False,
) -> MFGame:
  """Builds a game, dividing by sums where that is asked for.

  Args:
    idx: [S, A, E] int, successors.
    prob: [S, A, E] probabilities or (mu [S], t) -> [S, A, E].
    reward_fn: (mu [S], t []) -> [S, A].
    mu0: [S], initial population.
    horizon: H; None for a stationary game.
    discount: gamma.
    mask: [S, A] bool, legal actions.
    populations: number of states of each population.
    renormalize: divide `mu0` (each block) and the rows of an array `prob` by
      their sums before the check. Off, a wrong sum is an error.

  Returns:
    The game.

  Raises:
    ValueError: see `MFGame`; also where a sum is zero.
  """
  if renormalize:
    mu0 = np.asarray(mu0, np.float64)
    blocks = np.split(mu0, np.cumsum(populations)[:-1].astype(int))
    if not all(block.sum() > 0 for block in blocks):
      raise ValueError(
        'mu0 has no mass in a population; nothing to renormalize'
      )
    mu0 = np.concatenate([block / block.sum() for block in blocks])
    if not callable(prob):
      prob = np.asarray(prob, np.float64)
      total = prob.sum(-1, keepdims=True)
      prob = prob / np.where(total > 0, total, 1)
  return MFGame(
    idx, prob, reward_fn, mu0, horizon, discount, mask, tuple(populations)
  )


def union(
  idx: Sequence[Any], prob: Sequence[Any], mask: Sequence[Any] | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, tuple[int, ...]]:
  """Successor tables of several populations as one, padded to equal A and E.

  Args:
    idx: [S_p, A_p, E_p] int for each population p, successors within it.
    prob: [S_p, A_p, E_p] each.
    mask: [S_p, A_p] bool each; None where all actions are legal.

  Returns:
    idx [S, A, E], prob [S, A, E], mask [S, A] and the populations' sizes, S =
    sum of S_p, A and E the largest.

  Raises:
    ValueError: the sequences differ in length, or the tables of a population
      in shape.
  """
  masks = [None] * len(idx) if mask is None else list(mask)
  if not len(idx) == len(prob) == len(masks) or not len(idx):
    raise ValueError(
      f'idx, prob and mask list {len(idx)}, {len(prob)} and {len(masks)} '
      'populations; give one table each'
    )
  tables = [(np.asarray(i), np.asarray(p, np.float64))
            for i, p in zip(idx, prob, strict=True)]  # fmt: skip
  for n, (i, p) in enumerate(tables):
    if i.ndim != 3 or i.shape != p.shape:
      raise ValueError(
        f'population {n}: idx has shape {i.shape}, prob {p.shape}; both are '
        '[S, A, E]'
      )
  sizes = tuple(i.shape[0] for i, _ in tables)
  actions, outcomes = (max(i.shape[d] for i, _ in tables) for d in (1, 2))
  all_idx, all_prob, all_mask, start = [], [], [], 0
  for (i, p), legal in zip(tables, masks, strict=True):
    pad = [(0, 0), (0, actions - i.shape[1]), (0, outcomes - i.shape[2])]
    # Padding leads to a state of the same population, with no probability.
    all_idx.append(np.pad(i, pad) + start)
    all_prob.append(np.pad(p, pad))
    here = np.ones(i.shape[:2], bool) if legal is None else np.asarray(legal)
    all_mask.append(np.pad(here, pad[:2]))
    start += i.shape[0]
  return (np.concatenate(all_idx), np.concatenate(all_prob),
          np.concatenate(all_mask), sizes)  # fmt: skip


def stack_games(games: Sequence[MFGame]) -> MFGame:
  """A batch of games of one shape and reward function, for `jax.vmap`.

  Args:
    games: games that differ in numbers only.

  Returns:
    A game whose leaves have a leading axis; `jax.vmap(solver)(batch)` solves
    all.

  Raises:
    ValueError: no game; games of other shapes, functions, horizons or
      populations.
  """
  if not games:
    raise ValueError('games is empty; give at least one')
  inflows = [game.inflow for game in games]
  if all(table is not None for table in inflows):
    width = max(table.shape[1] for table in inflows)
    size = games[0].idx.size
    inflows = [
      np.pad(table, ((0, 0), (0, width - table.shape[1])), constant_values=size)
      for table in inflows
    ]
  else:
    inflows = [None] * len(games)
  same = []
  for game, table in zip(games, inflows, strict=True):
    leaves, static = game.tree_flatten()
    same.append(MFGame.tree_unflatten(static, (*leaves[:-1], table)))
  kinds = {jax.tree.structure(game) for game in same}
  shapes = {tuple(map(np.shape, jax.tree.leaves(game))) for game in same}
  if len(kinds) > 1 or len(shapes) > 1:
    raise ValueError(
      'games differ in shape, horizon, populations, mask or functions; only '
      'numbers may differ (bind them by jax.tree_util.Partial)'
    )
  return jax.tree.map(lambda *x: np.stack(x), *same)

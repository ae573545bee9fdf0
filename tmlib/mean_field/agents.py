r"""Environments of many agents, for mean-field Q-learning and actor-critic.

An agent j sees features and the mean action of its neighbours, a_mean_j =
mean over k of one-hot(a_k). Two environments: the Ising model, and the players
of a mean-field game.

Ising: spins on an L x L torus, action up or down, reward of up {2, 1, 0, -1,
-2} for 4 to 0 neighbours up, and the opposite for down. An agent that plays
softmax(Q / T) with Q = reward goes up with probability 1 / (1 + exp(-2 r / T)):
heat bath of the Ising model (J = 1) at temperature 2 T. Magnetisation appears
below T_c / 2 = 1.1346, with T_c = 2 / log(1 + sqrt 2) by Onsager. The halves of
a checkerboard act in turn: all at once they would sample another law.

Axes: N agents, F features, A actions, L side of the lattice.

References:
  Yang et al. Mean field multi-agent reinforcement learning, 2018. Onsager.
  Crystal statistics, 1944; Yang. The spontaneous magnetization of a
  two-dimensional Ising model, 1952.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np

from tmlib.mean_field import checks, operators
from tmlib.mean_field.method import on_device
from tmlib.mean_field.n_player import NPlayerGame

__all__ = [
  'CRITICAL_TEMPERATURE',
  'AgentEnv',
  'ising_env',
  'magnetisation',
  'player_env',
]

# Policy temperature: half of Onsager's critical temperature.
CRITICAL_TEMPERATURE = 1 / np.log(1 + np.sqrt(2))


class AgentEnv(NamedTuple):
  """An environment of N agents; pure functions of its state.

  Attributes:
    num_agents: N.
    num_features: F.
    num_actions: A.
    episode: steps between resets.
    discount: gamma.
    reset: key -> state.
    observe: state -> [N, F].
    mean_action: (state, action [N]) -> [N, A], of each agent's neighbours.
    acting: state -> [N] bool, who acts in this step.
    step: (key, state, action [N]) -> (state, reward [N]).
    measure: state -> [], what is averaged over the second half of episodes.
  """

  num_agents: int
  num_features: int
  num_actions: int
  episode: int
  discount: float
  reset: Callable[[jax.Array], Any]
  observe: Callable[[Any], jax.Array]
  mean_action: Callable[[Any, jax.Array], jax.Array]
  acting: Callable[[Any], jax.Array]
  step: Callable[[jax.Array, Any, jax.Array], tuple[Any, jax.Array]]
  measure: Callable[[Any], jax.Array]


def magnetisation(temperature: Any) -> np.ndarray:
  """Order parameter of the infinite lattice at policy temperature T.

  m = (1 - sinh(2 / (2 T))^-4)^(1/8) below T_c / 2, zero above.

  Args:
    temperature: [...], positive; half of the Ising temperature.

  Returns:
    [...].
  """
  t = np.asarray(temperature, np.float64)
  inside = 1 - np.sinh(1 / t) ** -4.0
  return np.where(t < CRITICAL_TEMPERATURE, np.maximum(inside, 0) ** 0.125, 0.0)


class _Lattice(NamedTuple):
  up: jax.Array  # [L, L] bool
  time: jax.Array  # [] int32


def _neighbours(x: jax.Array) -> jax.Array:
  rolled = [jnp.roll(x, s, d) for s in (1, -1) for d in (0, 1)]
  return jnp.stack(rolled).sum(0)


def ising_env(side: int = 16, episode: int = 1000) -> AgentEnv:
  """Spins that learn to agree; see the module docstring.

  An episode starts with all spins up. The one feature is constant: all that an
  agent goes by is its neighbours' mean action. The measure is |magnetisation|.

  Args:
    side: L, even.
    episode: steps between resets; a step moves half of the spins.

  Returns:
    The environment, N = L^2, A = 2 (up, down), gamma = 0: one-shot rewards.

  Raises:
    ValueError: an odd side; an episode below two steps.
  """
  checks.check_count('side', side, 2)
  checks.check_count('episode', episode, 2)
  if side % 2:
    raise ValueError(f'side={side} must be even for a checkerboard')
  parity = np.indices((side, side)).sum(0) % 2
  agents = side * side

  def reset(key):
    del key
    return _Lattice(jnp.ones((side, side), bool), jnp.int32(0))

  def mean_action(state, action):
    del action  # neighbours do not act in this step: their spins stand
    up = _neighbours(state.up.astype(jnp.float32)) / 4
    return jnp.stack([up, 1 - up], -1).reshape(agents, 2)

  def acting(state):
    return (jnp.asarray(parity) == state.time % 2).ravel()

  def step(key, state, action):
    del key
    up = jnp.where(
      acting(state).reshape(side, side), action.reshape(side, side) == 0,
      state.up,
    )  # fmt: skip
    field = _neighbours(2 * state.up.astype(jnp.float32) - 1) / 2
    reward = jnp.where(action.reshape(side, side) == 0, field, -field)
    return _Lattice(up, state.time + 1), reward.ravel()

  return AgentEnv(
    num_agents=agents,
    num_features=1,
    num_actions=2,
    episode=episode,
    discount=0.0,
    reset=reset,
    observe=lambda state: jnp.ones((agents, 1)),
    mean_action=mean_action,
    acting=acting,
    step=step,
    measure=lambda state: jnp.abs(2 * state.up.mean() - 1),
  )


class _Players(NamedTuple):
  place: jax.Array  # [n] int32
  time: jax.Array  # [] int32


def player_env(players: NPlayerGame) -> AgentEnv:
  """The players of a mean-field game; each sees its state and the time.

  Features are one-hot(state) and t / H. The neighbours of a player are all
  others in the same state; alone, the mean action is uniform. The measure is
  the entropy of the law of the players over log S: 1 where they are spread
  evenly.

  Args:
    players: from `to_n_player`, one population.

  Returns:
    The environment, N = n; an episode has H steps.

  Raises:
    ValueError: several populations, or masked actions.
  """
  game, n = players.game, players.players
  if len(game.populations) > 1 or game.mask is not None:
    raise ValueError(
      'player_env needs one population without masked actions; let illegal '
      'actions stay in place instead'
    )
  horizon: Any = game.horizon
  own = on_device(game)
  states, actions = own.num_states, own.num_actions

  def law(state):
    return jnp.zeros(states).at[state.place].add(1 / n)

  def reset(key):
    place = jax.random.categorical(
      key, jnp.log(operators.start(own)), shape=(n,)
    )
    return _Players(place.astype(jnp.int32), jnp.int32(0))

  def observe(state):
    late = jnp.full((n, 1), state.time / horizon)
    return jnp.concatenate([jax.nn.one_hot(state.place, states), late], -1)

  def mean_action(state, action):
    chosen = jax.nn.one_hot(action, actions)
    there = jnp.zeros((states, actions)).at[state.place].add(chosen)
    others = there[state.place] - chosen
    count = others.sum(-1, keepdims=True)
    return jnp.where(count > 0, others / jnp.maximum(count, 1), 1 / actions)

  def step(key, state, action):
    reward, prob = operators.tables(own, law(state), state.time)
    logits = jnp.log(prob[state.place, action])
    e = jax.random.categorical(key, logits)
    place = own.idx[state.place, action, e]
    new = _Players(place.astype(jnp.int32), state.time + 1)
    return new, reward[state.place, action]

  def measure(state):
    p = law(state)
    return -jax.scipy.special.xlogy(p, p).sum() / np.log(max(states, 2))

  return AgentEnv(
    num_agents=n,
    num_features=states + 1,
    num_actions=actions,
    episode=horizon,
    discount=float(game.discount),
    reset=reset,
    observe=observe,
    mean_action=mean_action,
    acting=lambda state: jnp.ones(n, bool),
    step=step,
    measure=measure,
  )

r"""Munchausen online mirror descent: mirror descent without a sum of networks.

With temperature tau and the last policy pi_k = softmax(Q_k / tau), fit

  Q_{k+1}(s, a, t) = tau log pi_k(a|s, t) + r(s, a, mu_k, t)
     + gamma E_{s'} sum_a' pi_k(a'|s') (Q_{k+1}(s', a') - tau log pi_k(a'|s')):

then Q_{k+1} = tau log pi_k + Q^{pi_k}, and pi_{k+1} is proportional to pi_k
exp(Q^{pi_k} / tau): mirror descent with step 1 / tau. One update is one such
iteration: the flow mu_k of the current policy, then `fits` steps of Adam on
sampled transitions, with a slow copy of the network as target. The next policy
is that of the slow copy too: it averages out the noise of Adam's steps, which
would else be what is left of the exploitability.

A sample is a time, uniform; a state, from the flow mixed with a little of the
uniform law; an action, uniform over legal ones; a successor. Finite horizons.

Axes: H time steps, S states, A actions, B samples.

References:
  Lauriere et al. Scalable deep reinforcement learning algorithms for mean field
  games, 2022. Evaluating pi_k in the target and the law of the samples are our
  choice, as is reading the policy off the slow copy; the first makes the exact
  fit equal to mirror descent.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame
from tmlib.mean_field.method import on_device, table_outputs
from tmlib.mean_field.networks import TableNet
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics
from tmlib.train.update import TrainState, gradient_method

__all__ = ['MunchausenState', 'munchausen_method']


class MunchausenState(NamedTuple):
  """State of the method.

  Attributes:
    key: PRNG key; iteration k uses fold_in(key, k).
    step: [] int32, iterations done.
    learner: `TrainState` of the network.
    target: parameters of the slow copy.
    policy: [H, S, A], pi_k.
  """

  key: jax.Array
  step: jax.Array
  learner: TrainState
  target: Any
  policy: jax.Array


def _sample(key, game, law, tables, batch_size):
  """Transitions (t, s, a, r, s'), [B] each, from states by law [H, S]."""
  where_key, action_key, next_key = jax.random.split(key, 3)
  reward, prob = tables
  # By inverse distribution functions: Gumbel noise costs [B, S] numbers.
  t, s = jnp.divmod(_draw(where_key, law.ravel(), batch_size), law.shape[1])
  legal = operators.uniform_policy(game)[0]
  a = jax.random.categorical(action_key, jnp.log(legal)[s])
  e = jax.random.categorical(next_key, jnp.log(prob[t, s, a]))
  return {'t': t, 's': s, 'a': a, 'reward': reward[t, s, a],
          'next': jnp.asarray(game.idx)[s, a, e]}  # fmt: skip


def _draw(key: jax.Array, law: jax.Array, count: int) -> jax.Array:
  """Indices [count] by a law [n] that need not sum to one."""
  cumulative = jnp.cumsum(law)
  at = jax.random.uniform(key, (count,), law.dtype) * cumulative[-1]
  found = jnp.searchsorted(cumulative, at, side='right')
  return jnp.minimum(found, law.size - 1)


def munchausen_method(
  game: MFGame,
  *,
  temperature: float = 5.0,
  fits: int = 100,
  batch_size: int = 512,
  hidden: Sequence[int] = (64, 64),
  learning_rate: float = 1e-3,
  target_rate: float = 0.05,
  explore: float = 0.1,
) -> Build:
  """Munchausen mirror descent for the loop; steps = iterations.

  `evaluate` returns by `batch['id']` = time step: flow [B, S] and policy
  [B, S, A].

  Args:
    game: a finite-horizon game of one population.
    temperature: tau, positive; 1 / tau is the step of mirror descent.
    fits: steps of Adam per iteration.
    batch_size: B.
    hidden: widths of the network; () for a free table.
    learning_rate: of Adam.
    target_rate: share of the network that enters its slow copy per fit.
    explore: share of the sampled states that are uniform, in (0, 1].

  Returns:
    Build; there is no batch, so the axis name is ignored.

  Raises:
    ValueError: a stationary game, several populations, a number out of range.
  """
  if game.horizon is None or len(game.populations) > 1:
    raise ValueError(
      'munchausen_method needs a finite horizon and one population; use '
      'online_mirror_descent for others'
    )
  for name, value in (('temperature', temperature),
                      ('learning_rate', learning_rate)):  # fmt: skip
    checks.check_between(name, value, 0, float('inf'), closed='')
  checks.check_between('target_rate', target_rate, 0, 1)
  checks.check_between('explore', explore, 0, 1)
  checks.check_count('fits', fits)
  checks.check_count('batch_size', batch_size)
  network = TableNet(game.num_states, game.horizon, game.num_actions, hidden)

  def build(axis_name: str | None) -> Method:
    del axis_name
    return _method(
      on_device(game), network, temperature, fits, batch_size,
      optax.adam(learning_rate), target_rate, explore,
    )  # fmt: skip

  return build


def _learner(network: TableNet, optimizer: Any) -> Method:
  """The regression of the network on targets."""

  def init_params(key, batch):
    return network.init(key, batch['s'], batch['t'])

  def loss(params, batch, key, step):
    del key, step
    q: Any = network.apply(params, batch['s'], batch['t'])
    taken = jnp.take_along_axis(q, batch['a'][:, None], 1)[:, 0]
    error = optax.huber_loss(taken, batch['target'])
    return error.sum(), jnp.asarray(error.size, error.dtype), {}

  unused = lambda params, batch: {'sums': {}, 'outputs': {}}
  return gradient_method(init_params, loss, unused, optimizer)(None)


def _method(
  game, network, tau, fits, batch_size, optimizer, rate, explore
) -> Method:
  learner = _learner(network, optimizer)
  times, states = jnp.meshgrid(
    jnp.arange(game.horizon), jnp.arange(game.num_states), indexing='ij'
  )

  def policy_of(params):
    q = network.apply(params, states, times)
    return operators.softmax_policy(game, q / tau)

  def init(key: jax.Array, batch: Batch | None = None) -> MunchausenState:
    del batch
    zero = jnp.zeros(batch_size, jnp.int32)
    example = {'s': zero, 't': zero, 'a': zero,
               'target': jnp.zeros(batch_size)}  # fmt: skip
    state = learner.init(jax.random.fold_in(key, 0), example)
    target = jax.tree.map(jnp.copy, state.params)
    return MunchausenState(
      key, jnp.int32(0), state, target, policy_of(state.params)
    )

  def fit(carry, key, law, tables, pi):
    state, target = carry
    batch = _sample(key, game, law, tables, batch_size)
    bonus = tau * operators.log_policy(pi)
    t, s, a = batch['t'], batch['s'], batch['a']
    later = jnp.minimum(t + 1, game.horizon - 1)
    after = batch['next']
    q: Any = network.apply(target, after, later)
    value = (pi[later, after] * (q - bonus[later, after])).sum(-1)
    value = jnp.where(t + 1 < game.horizon, value, 0)
    discount = jnp.asarray(game.discount, value.dtype)
    aim = batch['reward'] + bonus[t, s, a] + discount * value
    state, metrics = learner.update(
      state, {'s': s, 't': t, 'a': a, 'target': aim}
    )
    target = jax.tree.map(
      lambda old, new: old + rate * (new - old), target, state.params
    )
    return (state, target), metrics['loss']

  def update(
    state: MunchausenState, batch: Batch | None = None
  ) -> tuple[MunchausenState, Metrics]:
    del batch
    flow = operators.flow(game, state.policy)
    tables = operators.tables_over_time(game, flow)
    law = (1 - explore) * flow + explore / game.num_states
    keys = jax.random.split(jax.random.fold_in(state.key, state.step), fits)
    (learned, target), losses = jax.lax.scan(
      lambda carry, key: fit(carry, key, law, tables, state.policy),
      (state.learner, state.target),
      keys,
    )
    pi = policy_of(target)
    metrics = {'exploitability': operators.gap(game, pi), 'loss': losses[-1]}
    return (
      MunchausenState(state.key, state.step + 1, learned, target, pi), metrics,
    )  # fmt: skip

  def evaluate(state: MunchausenState, batch: Batch | None) -> Evaluation:
    if batch is None:
      raise ValueError('evaluate needs a batch with the ids of time steps')
    flow = operators.flow(game, state.policy)
    return table_outputs(game, state.policy, flow, batch)

  return Method(init, update, evaluate)

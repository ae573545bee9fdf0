r"""Mean-field Q-learning and mean-field actor-critic.

Agents meet their neighbours through the neighbours' mean action m. MF-Q learns
Q(s, a, m) towards

  r + gamma sum_a' pi(a'|s', m') Q_slow(s', a', m'), pi = softmax(Q / T),

and acts by pi. MF-AC has an actor pi(a|s, m) beside the critic, and follows

  grad log pi(a|s, m) (Q(s, a, m) - sum_b pi(b|s, m) Q(s, b, m)) + T grad H(pi).

All agents share the networks. One update is one step of M copies of the
environment, then one step of the optimizer on the M N transitions seen: no
replay, because so many agents make a batch. m is the mean action that an agent
saw last, so that policy and mean action approach their joint fixed point.

Axes: M environments, N agents, F features, A actions.

References:
  Yang et al. Mean field multi-agent reinforcement learning, 2018. On-policy
  batches, the slow copy and the entropy term are our choice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tmlib.mean_field import checks
from tmlib.mean_field.agents import AgentEnv
from tmlib.mean_field.networks import MLP
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics
from tmlib.train.update import TrainState, gradient_method

__all__ = ['AgentsState', 'mf_ac_method', 'mf_q_method']


class _World(NamedTuple):
  """Leading axis M everywhere."""

  state: Any
  mean: jax.Array  # [M, N, A], mean action seen last
  total: jax.Array  # [M], measure summed over this episode's second half
  last: jax.Array  # [M], its mean over the last finished episode
  reward: jax.Array  # [M], mean reward per step, likewise summed
  last_reward: jax.Array  # [M]


class AgentsState(NamedTuple):
  """State of MF-Q and MF-AC.

  Attributes:
    key: PRNG key; step t of environment m folds in t, then m.
    step: [] int32.
    world: the environments, leading axis M: the rule ('world',
      'shard_dim:data:0') spreads them over devices.
    learner: `TrainState` of the networks.
    target: slow copy of their parameters.
  """

  key: jax.Array
  step: jax.Array
  world: _World
  learner: TrainState
  target: Any


def _inputs(observed, mean):
  return jnp.concatenate([observed, mean], -1)


def _values(network, params, x):
  out: Any = network.apply(params, x)
  return out


def mf_q_method(
  env: AgentEnv,
  temperature: Any,
  *,
  hidden: Sequence[int] = (32,),
  learning_rate: float = 3e-3,
  target_rate: float = 0.01,
) -> Build:
  """Mean-field Q-learning for the loop; steps = environment steps.

  `evaluate` returns by `batch['id']` = environment: its temperature, and
  measure and reward, averaged over the second half of its last finished
  episode.

  Args:
    env: the environment.
    temperature: [M], positive, of the policy in each copy of it.
    hidden: widths of the hidden layers.
    learning_rate: of Adam.
    target_rate: share of the network that enters its slow copy per step.

  Returns:
    Build; there is no batch, so the axis name is ignored.

  Raises:
    ValueError: a temperature or rate that is not positive.
  """

  def loss(network, params, batch):
    q = _values(network, params, batch['x'])
    taken = jnp.take_along_axis(q, batch['action'][..., None], -1)[..., 0]
    error = (taken - batch['target']) ** 2 * batch['weight']
    return error.sum(), batch['weight'].sum(), {}

  policy = lambda out, heat: out / heat
  value = lambda out, heat: (jax.nn.softmax(out / heat) * out).sum(-1)
  return _build(env, temperature, hidden, learning_rate, target_rate,
                env.num_actions, loss, policy, value)  # fmt: skip


def mf_ac_method(
  env: AgentEnv,
  temperature: Any,
  *,
  hidden: Sequence[int] = (32,),
  learning_rate: float = 3e-3,
  target_rate: float = 0.01,
) -> Build:
  """Mean-field actor-critic for the loop; arguments of `mf_q_method`.

  The temperature weighs the entropy of the actor: its optimum is the same
  softmax(Q / T).

  Args:
    env: the environment.
    temperature: [M], positive; the output of the actor is divided by it, so
      that one network can serve all copies.
    hidden: widths of the hidden layers, of actor and critic each.
    learning_rate: of Adam.
    target_rate: see `mf_q_method`.

  Returns:
    Build.

  Raises:
    ValueError: a temperature or rate that is not positive.
  """
  actions = env.num_actions

  def loss(network, params, batch):
    out = _values(network, params, batch['x'])
    q, logits = out[..., :actions], out[..., actions:] / batch['heat']
    taken = jnp.take_along_axis(q, batch['action'][..., None], -1)[..., 0]
    critic = (taken - batch['target']) ** 2
    log_pi, fixed = jax.nn.log_softmax(logits), jax.lax.stop_gradient(q)
    pi = jnp.exp(log_pi)
    # All actions' advantages are known, so their mean needs no sample.
    gain = (pi * (fixed - batch['heat'] * log_pi)).sum(-1)
    weight = batch['weight']
    aux = {'critic': ((critic * weight).sum(), weight.sum())}
    return ((critic - gain) * weight).sum(), weight.sum(), aux

  policy = lambda out, heat: out[..., actions:] / heat
  value = lambda out, heat: (
    jax.nn.softmax(out[..., actions:] / heat) * out[..., :actions]
  ).sum(-1)
  return _build(env, temperature, hidden, learning_rate, target_rate,
                2 * actions, loss, policy, value)  # fmt: skip


def _build(env, temperature, hidden, learning_rate, target_rate, outputs, loss,
           policy, value) -> Build:  # fmt: skip
  heat = jnp.atleast_1d(jnp.asarray(temperature, jnp.float32))
  if heat.ndim != 1 or not bool((heat > 0).all()):
    raise ValueError(
      f'temperature={temperature} must be positive, one number per environment'
    )
  checks.check_between('learning_rate', learning_rate, 0, float('inf'),
                       closed='')  # fmt: skip
  checks.check_between('target_rate', target_rate, 0, 1)
  network = MLP(outputs, hidden)
  learner = gradient_method(
    lambda key, batch: network.init(key, batch['x']),
    lambda params, batch, key, step: loss(network, params, batch),
    lambda params, batch: {'sums': {}, 'outputs': {}},
    optax.adam(learning_rate),
  )(None)
  return lambda axis_name: _method(
    env, heat, network, learner, target_rate, policy, value
  )


def _advance_world(env, world, state, mean, reward, keys):
  """Adds to the averages; resets the environments whose episode is over."""
  age = jax.vmap(lambda s: s.time)(state)
  late = age > env.episode // 2
  count = env.episode - env.episode // 2
  total = world.total + late * jax.vmap(env.measure)(state)
  earned = world.reward + late * reward.mean(-1)
  over = age >= env.episode
  fresh = jax.vmap(env.reset)(keys)

  def pick(new, old):
    return jnp.where(over.reshape(over.shape + (1,) * (new.ndim - 1)), new, old)

  return _World(
    state=jax.tree.map(pick, fresh, state),
    mean=pick(jnp.full_like(mean, 1 / env.num_actions), mean),
    total=jnp.where(over, 0, total),
    last=jnp.where(over, total / count, world.last),
    reward=jnp.where(over, 0, earned),
    last_reward=jnp.where(over, earned / count, world.last_reward),
  )


def _method(env, heat, network, learner, rate, policy, value) -> Method:
  copies, actions = heat.shape[0], env.num_actions
  heats = heat[:, None, None]
  over_copies = lambda key: jax.vmap(lambda m: jax.random.fold_in(key, m))(
    jnp.arange(copies)
  )

  def init(key: jax.Array, batch: Batch | None = None) -> AgentsState:
    del batch
    reset_key, net_key = jax.random.split(key)
    state = jax.vmap(env.reset)(over_copies(reset_key))
    mean = jnp.full((copies, env.num_agents, actions), 1 / actions)
    zero = lambda: jnp.zeros(copies)
    x = _inputs(jax.vmap(env.observe)(state), mean)
    example = {
      'x': x, 'action': jnp.zeros(x.shape[:2], jnp.int32), 'heat': heats,
      'target': jnp.zeros(x.shape[:2]), 'weight': jnp.ones(x.shape[:2]),
    }  # fmt: skip
    learned = learner.init(net_key, example)
    world = _World(state, mean, zero(), zero(), zero(), zero())
    target = jax.tree.map(jnp.copy, learned.params)
    return AgentsState(key, jnp.int32(0), world, learned, target)

  def play(key, world, params):
    """One environment step; the transition and the world after it."""
    keys = over_copies(key)
    act_key, step_key, reset_key = jnp.moveaxis(
      jax.vmap(lambda k: jax.random.split(k, 3))(keys), 1, 0
    )
    observed = jax.vmap(env.observe)(world.state)
    # Neighbours that stand still are seen as they are.
    standing = ~jax.vmap(env.acting)(world.state)
    blank = jnp.zeros((copies, env.num_agents), jnp.int32)
    seen = jax.vmap(env.mean_action)(world.state, blank)
    mean = jnp.where(standing.any(-1)[:, None, None], seen, world.mean)
    x = _inputs(observed, mean)
    logits = policy(_values(network, params, x), heats)
    action = jax.vmap(jax.random.categorical)(act_key, logits)
    made = jax.vmap(env.mean_action)(world.state, action)
    state, reward = jax.vmap(env.step)(step_key, world.state, action)
    batch = {'x': _inputs(observed, made), 'action': action, 'heat': heats,
             'weight': (~standing).astype(reward.dtype)}  # fmt: skip
    after = _advance_world(env, world, state, made, reward, reset_key)
    ended = jax.vmap(lambda s: s.time)(state) >= env.episode
    return batch, state, made, reward, ended, after

  def update(
    state: AgentsState, batch: Batch | None = None
  ) -> tuple[AgentsState, Metrics]:
    del batch
    key = jax.random.fold_in(state.key, state.step)
    seen, new, made, reward, ended, world = play(
      key, state.world, state.learner.params
    )
    target = reward
    if env.discount:
      x = _inputs(jax.vmap(env.observe)(new), made)
      ahead = value(_values(network, state.target, x), heats)
      target = reward + env.discount * jnp.where(ended[:, None], 0, ahead)
    learned, metrics = learner.update(state.learner, seen | {'target': target})
    slow = jax.tree.map(
      lambda old, now: old + rate * (now - old), state.target, learned.params
    )
    metrics = {
      'loss': metrics['loss'], 'grad_norm': metrics['grad_norm'],
      'reward': reward.mean(), 'measure': world.last.mean(),
    }  # fmt: skip
    return AgentsState(state.key, state.step + 1, world, learned, slow), metrics

  def evaluate(state: AgentsState, batch: Batch | None) -> Evaluation:
    if batch is None:
      raise ValueError('evaluate needs a batch with the ids of environments')
    chosen, weight = batch['id'], batch['weight']
    outputs = {
      'id': chosen, 'temperature': heat[chosen],
      'measure': state.world.last[chosen],
      'reward': state.world.last_reward[chosen],
    }  # fmt: skip
    total = weight.sum()
    sums = {'measure': ((outputs['measure'] * weight).sum(), total)}
    return {'sums': sums, 'outputs': outputs}

  return Method(init, update, evaluate)

r"""Sequential dueling bandits as a Method: one update is one round.

The state holds M independent simulations on its leading axes, so a sharding
rule ('.*', 'shard_dim:data:0') spreads them over devices, and the loop's `runs`
may add an axis in front. A step's random words are one block [W, M] of a
counter-based generator: column m depends on the step's key and on m alone, so
neither the layout nor the number of simulations changes a simulation.

A round costs O(M (N + K)): draw a pair, let the users answer, add to the tally.
The lottery is solved for only in rounds in which some simulation is due; a
while loop of at most one turn keeps that lazy even under vmap, where a `cond`
would compute both branches in every round. Regret sums are compensated: 2^24
float32 increments would lose the last digits.

Axes: M simulations, N users, K arms, P pairs.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.dueling import envs, glm, policies, regret, welfare
from tmlib.dueling.regret import Regret
from tmlib.ops.words import random_words
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics

__all__ = ['SimulationState', 'bandit_method', 'play']


class SimulationState(NamedTuple):
  """State of M simulations.

  Attributes:
    key: PRNG key; a step's key is fold_in(key, step).
    step: [] int32, rounds played.
    view: `policies.View`, leading axis M.
    commitment: `Commitment`, what follows from each lottery.
    regret: `regret.Regret`, cumulative, [M] each.
    carry: `regret.Regret`, compensation of the sums, [M] each.
  """

  key: jax.Array
  step: jax.Array
  view: policies.View
  commitment: 'Commitment'
  regret: Regret
  carry: Regret


class Commitment(NamedTuple):
  """Derived from the lotteries, once per decision and not per round.

  Attributes:
    cumulative: [M, K], running sums of the lottery.
    loss: [M], regret per round of playing it on both sides.
  """

  cumulative: jax.Array
  loss: jax.Array


def _add(total, carry, x):
  """One compensated addition; returns the new total and carry."""
  y = x - carry
  new = total + y
  return new, (new - total) - y


def _lazily(due, decide, commit, view, commitment):
  """Decisions where due, the old ones elsewhere; free if nobody is due."""
  old = (view.lottery, view.active, view.memory, commitment)

  def body(carry):
    pending, current = carry
    # Tied to the carry, or the compiler may hoist the whole decision out of the
    # loop, as invariant, and compute it in every round.
    tied = jax.tree.map(
      lambda x: jnp.where(pending, x, jnp.zeros_like(x)), view
    )
    lottery, active, memory = jax.vmap(decide)(tied)
    new = (lottery, active, memory, commit(lottery))

    def pick(a, b):
      return jnp.where(due.reshape(due.shape + (1,) * (a.ndim - 1)), a, b)

    return jnp.bool_(False), jax.tree.map(pick, new, current)

  start = (due.any(), old)
  _, decided = jax.lax.while_loop(lambda carry: carry[0], body, start)
  lottery, active, memory, commitment = decided
  view = view._replace(lottery=lottery, active=active, memory=memory)
  return view, commitment


def _draw_arm(uniform: jax.Array, cumulative: jax.Array) -> jax.Array:
  """Inverse transform: the arm whose share of the lottery holds `uniform`."""
  return (uniform * cumulative[-1] >= cumulative[:-1]).sum()


def _num_words(game: '_Game') -> int:
  """Random words of a round: answers, both lottery draws, coin, user."""
  env = game.env
  answers = env.num_users if env.outcomes == 'independent' else 1
  return answers + 1 + game.policy.tosses + (env.feedback == 'one')


def _unit(words: jax.Array, bits: int = 32) -> jax.Array:
  """Uniform in [0, 1) from the low `bits` bits; at most 24 are kept."""
  kept = min(bits, 24)
  x = (words >> (bits - kept)) & (2**kept - 1)
  return x.astype(jnp.result_type(float)) * 2.0**-kept


def _round(game, words, step, view, commitment):
  """One round of one simulation: its counts and the losses of both sides."""
  env, policy, users = game.env, game.policy, game.env.num_users
  # Two lottery draws share a word: 16 bits each, for arms that teach nothing.
  draws, words = words[0], words[1:]
  coin = user = jnp.int32(0)
  if policy.tosses:
    coin, words = _unit(words[0]), words[1:]
  if env.feedback == 'one':
    user = (_unit(words[0]) * users).astype(jnp.int32)
    words = words[1:]
  choice = policy.choose(coin, step, user, view)
  drawn = lambda x: _draw_arm(_unit(x, 16), commitment.cumulative)
  left = jnp.where(choice.left_explores, choice.left, drawn(draws))
  right = jnp.where(choice.right_explores, choice.right, drawn(draws >> 16))
  won = (_unit(words) < game.p[left, right]).astype(jnp.int32)
  # Only rounds with a free opponent teach Borda scores.
  learns = choice.right_explores & (left != right)
  first = jnp.where(left < right, won, 1 - won)
  weight = learns.astype(jnp.int32)
  if env.feedback == 'one':
    weight = weight * (jnp.arange(users) == user)
  else:
    weight = weight[None]
  pair = game.index[left, right]
  view = view._replace(
    wins=view.wins.at[pair].add(weight * first),
    counts=view.counts.at[pair].add(weight),
    answers=view.answers + weight,
  )
  committed = commitment.loss
  charge = game.losses.arm
  left_loss = jnp.where(choice.left_explores, charge[left], committed)
  right_loss = jnp.where(choice.right_explores, charge[right], committed)
  return view, regret.round_regret(left_loss, right_loss)


def bandit_method(
  env: Any,
  policy: str,
  horizon: int,
  simulations: int,
  *,
  kind: str = 'geometric',
  tau: int | None = None,
  delta: float | None = None,
  regret_kind: str | None = None,
) -> Build:
  """A dueling bandit algorithm for the loop; steps = rounds.

  The metrics are means of the cumulative regret and the loss per round of the
  lottery, with standard deviations over the simulations (`_sd`). `evaluate`
  returns per simulation, by `batch['id']`: pair_regret, weak_regret,
  strong_regret, final_loss and the lottery.

  Args:
    env: `envs.DuelingEnv` or `glm.GlmEnv`.
    policy: one of `policies.POLICIES`.
    horizon: T that the algorithm prepares for.
    simulations: M.
    kind: welfare that the algorithm maximises.
    tau: (most) exploration rounds; None: `theory.etc_tau`.
    delta: failure probability; None: 1/T.
    regret_kind: welfare that regret is counted in; None: `kind`.

  Returns:
    Build; the axis name is ignored, as there is no batch to reduce over.

  Raises:
    ValueError: an unknown policy, no simulation, see `policies.make_policy`.
  """
  if simulations < 1:
    raise ValueError(f'simulations={simulations} must be at least 1')
  chosen = policies.make_policy(
    policy, env, horizon, tau=tau, kind=kind, delta=delta
  )
  if isinstance(env, glm.GlmEnv):
    env = glm.as_tabular(env)
  regret_kind = kind if regret_kind is None else regret_kind

  def build(axis_name: str | None) -> Method:
    del axis_name
    game = _game(env, chosen, regret_kind)
    return Method(
      lambda key, batch=None: _start(game, simulations, key),
      lambda state, batch=None: _advance(game, state),
      _look_up,
    )

  return build


class _Game(NamedTuple):
  """Everything about an instance and a policy that no round changes.

  Attributes:
    env: tabular environment.
    policy: what is played.
    kind: welfare that regret is counted in.
    losses: of the instance.
    index: [K, K] int32, see `policies.pair_index`.
    p: [K, K, N], preferences, users last.
  """

  env: envs.DuelingEnv
  policy: policies.Policy
  kind: str
  losses: regret.Losses
  index: jax.Array
  p: jax.Array


def _game(env: envs.DuelingEnv, policy: policies.Policy, kind: str) -> _Game:
  arms = env.num_arms
  b = (env.preference.sum(-1) - 0.5) / (arms - 1)
  losses = regret.instance_losses(b, kind)
  p = env.preference.transpose(1, 2, 0)
  return _Game(env, policy, kind, losses, policies.pair_index(arms), p)


def _commit(game: _Game, lottery: jax.Array) -> Commitment:
  """What follows from the lotteries [M, K]."""
  arms = game.env.num_arms
  b = (game.env.preference.sum(-1) - 0.5) / (arms - 1)
  value = welfare.nash_welfare(lottery, b[None], game.kind)
  # A triangular product: a cumulative sum of short rows is slow on a CPU.
  running = lottery @ jnp.triu(jnp.ones((arms, arms), lottery.dtype))
  return Commitment(running, game.losses.best - value)


def _start(game: _Game, simulations: int, key: jax.Array) -> SimulationState:
  """The state before the first round."""
  users, arms = game.env.num_users, game.env.num_arms
  pairs = arms * (arms - 1) // 2
  fold = jax.vmap(lambda m: jax.random.fold_in(key, m))
  lottery, memory = jax.vmap(game.policy.start)(fold(jnp.arange(simulations)))
  columns = users if game.env.feedback == 'one' else 1
  whole = lambda *shape: jnp.zeros((simulations, *shape), jnp.int32)
  nothing = lambda: Regret(*(jnp.zeros(simulations) for _ in Regret._fields))
  view = policies.View(
    whole(pairs, users),
    whole(pairs, columns),
    whole(columns),
    lottery,
    jnp.ones((simulations, arms), bool),
    memory,
  )
  commitment = _commit(game, lottery)
  return SimulationState(
    key, jnp.int32(0), view, commitment, nothing(), nothing()
  )


def _advance(
  game: _Game, state: SimulationState
) -> tuple[SimulationState, Metrics]:
  """One round of every simulation."""
  key = jax.random.fold_in(state.key, state.step)
  simulations = state.view.lottery.shape[0]
  words = random_words(key, _num_words(game), simulations)
  play = lambda w, v, c: _round(game, w, state.step, v, c)
  view, lost = jax.vmap(play, (1, 0, 0))(words, state.view, state.commitment)
  step = state.step + 1
  due = jax.vmap(lambda v: game.policy.due(step, v))(view)
  view, commitment = _lazily(
    due,
    game.policy.decide,
    lambda lottery: _commit(game, lottery),
    view,
    state.commitment,
  )
  added = jax.tree.map(_add, state.regret, state.carry, lost)
  total = Regret(*(x[0] for x in added))
  carry = Regret(*(x[1] for x in added))
  metrics = {'lottery_loss': commitment.loss.mean()}
  for name, sums in total._asdict().items():
    metrics[f'{name}_regret'] = sums.mean()
    metrics[f'{name}_regret_sd'] = sums.std()
  new = SimulationState(state.key, step, view, commitment, total, carry)
  return new, metrics


def _look_up(state: SimulationState, batch: Batch | None) -> Evaluation:
  """Results of the simulations that a batch names."""
  if batch is None:
    raise ValueError('evaluate needs a batch with the ids of simulations')
  chosen, weight = batch['id'], batch['weight']
  outputs = {
    f'{name}_regret': getattr(state.regret, name)[chosen]
    for name in state.regret._fields
  }
  outputs['final_loss'] = state.commitment.loss[chosen]
  sums = {
    name: (jnp.where(weight > 0, x, 0).sum(), weight.sum())
    for name, x in outputs.items()
  }
  outputs |= {'lottery': state.view.lottery[chosen], 'id': chosen}
  return {'sums': sums, 'outputs': outputs}


def play(
  key: jax.Array, build: Build, rounds: int
) -> tuple[SimulationState, Metrics]:
  """Plays a method for some rounds in one scan, without the loop.

  Args:
    key: PRNG key; consumed.
    build: from `bandit_method`.
    rounds: number of updates.

  Returns:
    The final state and the metrics after every round, [rounds] each.
  """
  method = build(None)
  scan = lambda state: jax.lax.scan(
    lambda s, _: method.update(s, None), state, length=rounds
  )
  return jax.jit(scan)(method.init(key, None))

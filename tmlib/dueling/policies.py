r"""What a sequential algorithm does in a round, and when it thinks.

A policy is four pure functions of one simulation's `View`; `method` vmaps them:
  start(key) -> (lottery [K], memory)
  choose(coin, step, user, view) -> Choice, coin uniform in [0, 1)
  due(step, view) -> [] bool, after `step` rounds
  decide(view) -> (lottery [K], active [K] bool, memory)
`decide` may be dear: it runs only at rounds in which some simulation is due.

Axes: N users, K arms, P = K (K - 1) / 2 pairs in the order of
`regret.pair_order`.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import (
  borda,
  checks,
  elimination,
  etc,
  glm,
  glm_etc,
  greedy,
  nsw,
  regret,
  sampling,
  theory,
)

__all__ = ['POLICIES', 'Choice', 'Policy', 'View', 'make_policy', 'pair_index']

POLICIES = (
  'etc', 'vote', 'eps_greedy', 'elimination', 'borda_ucb', 'glm_etc', 'uniform',
  'fixed',
)  # fmt: skip
# Borda-UCB and epsilon-greedy think again when time has grown by this much.
UCB_GROWTH = 1.1


class View(NamedTuple):
  """What one simulation knows.

  Attributes:
    wins: [P, N] int32, wins of the first arm of each pair. Whole numbers: a
      float32 sum of ones stops at 2^24.
    counts: [P, N or 1] int32, duels of each pair (one column if all users
      answer).
    answers: [N or 1], sums of `counts` over pairs.
    lottery: [K], current commitment.
    active: [K] bool.
    memory: pytree of the policy's own.
  """

  wins: jax.Array
  counts: jax.Array
  answers: jax.Array
  lottery: jax.Array
  active: jax.Array
  memory: Any


class Choice(NamedTuple):
  """A round's decision.

  Attributes:
    left: [] int, the left arm if it explores.
    right: [] int, the right arm if it explores.
    left_explores: [] bool; False draws the arm from the lottery.
    right_explores: [] bool.
  """

  left: jax.Array
  right: jax.Array
  left_explores: jax.Array
  right_explores: jax.Array


class Policy(NamedTuple):
  """See the module docstring; `tosses`: `choose` uses its coin."""

  start: Callable[[jax.Array], tuple[jax.Array, Any]]
  choose: Callable[[jax.Array, jax.Array, jax.Array, View], Choice]
  due: Callable[[jax.Array, View], jax.Array]
  decide: Callable[[View], tuple[jax.Array, jax.Array, Any]]
  tosses: bool = False


def pair_index(arms: int) -> jax.Array:
  """[K, K] int32: position of each unordered pair in `regret.pair_order`."""
  i, j = regret.pair_order(arms)
  table = jnp.zeros((arms, arms), jnp.int32)
  rank = jnp.arange(len(i), dtype=jnp.int32)
  return table.at[i, j].set(rank).at[j, i].set(rank)


def _estimate(view: View, arms: int) -> jax.Array:
  """Balanced estimate; a pair that was never met counts as a coin."""
  met = jnp.broadcast_to(view.counts, view.wins.shape)
  rate = jnp.where(met > 0, view.wins / jnp.maximum(met, 1), 0.5)
  tally = sampling.tally_of_pairs(rate.T, jnp.ones_like(rate.T), arms)
  return tally.wins.sum(-1) / (arms - 1)


def _as_float(x: jax.Array) -> jax.Array:
  return x.astype(jnp.result_type(float))


def _uniform_start(arms):
  return lambda key: (_uniform(arms), ())


def _uniform(arms):
  return jnp.full(arms, 1 / arms, jnp.result_type(float))


def _never(step, view):
  del step, view
  return jnp.bool_(False)


def _growing_times(first: int, horizon: int, growth: float) -> jax.Array:
  times, t = [], first
  while t < horizon:
    times.append(t)
    t = max(t + 1, math.ceil(growth * t))
  return jnp.asarray(times or [horizon], jnp.int32)


def _round_robin(arms, explores):
  """Explores the next pair of the answering user while `explores` says so."""
  i, j = regret.pair_order(arms)

  def choose(coin, step, user, view):
    column = user if view.answers.shape[0] > 1 else 0
    pair = view.answers[column] % len(i)
    explore = explores(coin, step)
    return Choice(i[pair], j[pair], explore, explore)

  return choose


def _keep(view):
  return view.lottery, view.active, view.memory


def _etc(env, horizon, tau, kind, delta, rule):
  del horizon, delta
  arms = env.num_arms
  return Policy(
    _uniform_start(arms),
    _round_robin(arms, lambda coin, step: step < tau),
    lambda step, view: step == tau,
    lambda view: (
      etc.choose_lottery(_estimate(view, arms), kind, rule).pi,
      view.active,
      view.memory,
    ),
  )


def _eps_greedy(env, horizon, tau, kind, delta, rule):
  del tau, delta, rule
  arms = env.num_arms
  epochs = greedy.greedy_epochs(
    arms, env.num_users, horizon, kind, feedback=env.feedback
  )
  starts, epsilon = jnp.asarray(epochs.start), jnp.asarray(epochs.epsilon)

  def explores(coin, step):
    return coin < epsilon[(starts <= step).sum() - 1]

  return Policy(
    _uniform_start(arms),
    _round_robin(arms, explores),
    lambda step, view: (starts == step).any(),
    lambda view: (
      nsw.maximize_welfare(_estimate(view, arms), kind).pi,
      view.active,
      view.memory,
    ),
    tosses=True,
  )


def _elimination(env, horizon, tau, kind, delta, rule):
  del horizon, rule
  arms = env.num_arms
  i, j = regret.pair_order(arms)
  phases = elimination.num_phases(tau, len(i)) + 2

  def start(key):
    del key
    return _uniform(arms), {'goal': jnp.int32(1), 'phase': jnp.int32(0)}

  def playing(view):
    return view.active[i] | view.active[j]

  def lowest(view):
    return jnp.where(playing(view), view.counts[:, 0], checks.MOST_ROUNDS)

  def unfinished(view):
    wanted = lowest(view).min() < view.memory['goal']
    return wanted & (view.active.sum() > 1)

  def choose(coin, step, user, view):
    del coin, step, user
    pair = lowest(view).argmin()
    explore = unfinished(view)
    return Choice(i[pair], j[pair], explore, explore)

  def due(step, view):
    del step
    # A phase that was planned is complete: goal > 0 marks it as planned.
    return (view.memory['goal'] > 0) & ~unfinished(view)

  def decide(view):
    met = jnp.broadcast_to(view.counts, view.wins.shape)
    tally = sampling.tally_of_pairs(_as_float(view.wins.T), met.T, arms)
    b_hat, radius = borda.estimate_from_tally(tally, 'balanced', delta / phases)
    active, _ = elimination.eliminate(b_hat, radius, view.active, kind)
    pi = nsw.maximize_welfare(
      jnp.where(active[None], b_hat, nsw.FLOOR), kind
    ).pi
    phase = view.memory['phase'] + 1
    share = (tau - view.answers[0]) // (active[i] | active[j]).sum()
    most = view.counts.max()
    goal = jnp.round(elimination.GROWTH ** _as_float(phase)).astype(jnp.int32)
    extra = jnp.minimum(jnp.maximum(goal - most, 1), share)
    go = (extra > 0) & (active.sum() > 1) & (phase < phases)
    memory = {'goal': jnp.where(go, most + extra, 0), 'phase': phase}
    return pi, active, memory

  return Policy(start, choose, due, decide)


def _borda_ucb(env, horizon, tau, kind, delta, rule):
  """Left arm from the optimistic lottery, right arm uniform, for ever.

  Uniform opponents keep the scores unbiased, but each costs constant regret:
  the weak regret is small, the pair regret linear.
  """
  del tau, rule
  arms, users = env.num_arms, env.num_users
  times = _growing_times(arms, horizon, UCB_GROWTH)
  index = pair_index(arms)
  level = math.log(2 * users * arms * len(times) / delta)

  def choose(coin, step, user, view):
    del step, user, view
    right = (coin * arms).astype(jnp.int32)
    return Choice(jnp.int32(0), right, jnp.bool_(False), jnp.bool_(True))

  def decide(view):
    met = jnp.broadcast_to(view.counts, view.wins.shape).T
    of_arm = jnp.where(jnp.eye(arms, dtype=bool)[None], 0, met[:, index]).sum(
      -1
    )
    radius = jnp.sqrt(level / (2 * jnp.maximum(of_arm, 1)))
    optimistic = jnp.minimum(_estimate(view, arms) + radius, 1)
    return nsw.maximize_welfare(optimistic, kind).pi, view.active, view.memory

  return Policy(
    _uniform_start(arms),
    choose,
    lambda step, view: (times == step).any(),
    decide,
    tosses=True,
  )


def _glm_etc(env, horizon, tau, kind, delta, rule):
  del horizon, delta, rule
  if not isinstance(env, glm.GlmEnv):
    raise ValueError(
      "policy 'glm_etc' needs a GlmEnv (features), got a tabular environment; "
      "use 'etc' or build one with glm_env"
    )
  plan = glm_etc.plan_design(env.phi, tau)
  # Spread each pair's duels evenly over the tau rounds.
  position = np.concatenate([(np.arange(n) + 0.5) / n for n in plan.counts])
  order = np.argsort(position, kind='stable')
  sequence = np.repeat(np.arange(len(plan.counts)), plan.counts)[order]
  x, y = jnp.asarray(plan.pairs[sequence]).T
  i, j = regret.pair_order(env.num_arms)

  def choose(coin, step, user, view):
    del coin, user, view
    now = jnp.minimum(step, tau - 1)
    return Choice(x[now], y[now], step < tau, step < tau)

  def decide(view):
    met = jnp.broadcast_to(view.counts, view.wins.shape)
    wins, met = _as_float(view.wins.T), _as_float(met.T)
    theta = glm.glm_mle(env.phi[i, j], wins, met, env.link, 1e-3).theta
    p_hat = env.replace(theta=theta).preference
    b_hat = (p_hat.sum(-1) - 0.5) / (env.num_arms - 1)
    return nsw.maximize_welfare(b_hat, kind).pi, view.active, view.memory

  return Policy(
    _uniform_start(env.num_arms),
    choose,
    lambda step, view: step == tau,
    decide,
  )


def _static(start, arms):
  zero, false = jnp.int32(0), jnp.bool_(False)
  choose = lambda coin, step, user, view: Choice(zero, zero, false, false)
  return Policy(start, choose, _never, _keep)


def make_policy(
  name: str,
  env: Any,
  horizon: int,
  *,
  tau: int | None = None,
  kind: str = 'geometric',
  delta: float | None = None,
) -> Policy:
  """Builds a policy by name.

  Args:
    name: one of `POLICIES`: 'etc' (kind='utilitarian' for the utilitarian
      baseline), 'vote' (per-user commitment, averaged), 'eps_greedy',
      'elimination', 'borda_ucb', 'glm_etc', 'uniform' (the uniform lottery) and
      'fixed' (a random arm for ever, no exploration).
    env: `envs.DuelingEnv`, or `glm.GlmEnv` for 'glm_etc'.
    horizon: T, below 2^31.
    tau: (most) exploration rounds; None: `theory.etc_tau`.
    kind: welfare of the lottery.
    delta: failure probability; None: 1/T.

  Returns:
    The policy.

  Raises:
    ValueError: an unknown name, or an environment that the policy cannot use.
  """
  checks.check_choice('policy', name, POLICIES)
  checks.check_rounds('horizon', horizon)
  arms = env.num_arms
  delta = 1 / horizon if delta is None else delta
  if name == 'elimination':
    elimination.check_elimination(env, kind)
  if name == 'uniform':
    return _static(_uniform_start(arms), arms)
  if name == 'fixed':
    one = lambda key: jax.nn.one_hot(jax.random.randint(key, (), 0, arms), arms)
    return _static(lambda key: (one(key), ()), arms)
  if tau is None:
    is_glm = name == 'glm_etc' and isinstance(env, glm.GlmEnv)
    tau = theory.etc_tau(
      arms,
      env.num_users,
      horizon,
      delta,
      kind,
      feedback=env.feedback,
      dim=env.theta.shape[1] if is_glm else None,
      kappa=max(float(glm.curvature(env)), 1e-3) if is_glm else 1.0,
    )
  least = 1
  if name in ('etc', 'vote', 'elimination'):
    least = sampling.meeting_rounds(arms, env.num_users, env.feedback)
  tau = etc.settle_tau(tau, horizon, least, f'policy {name!r}')
  builders = {
    'etc': _etc, 'vote': _etc, 'eps_greedy': _eps_greedy,
    'elimination': _elimination, 'borda_ucb': _borda_ucb, 'glm_etc': _glm_etc,
  }  # fmt: skip
  rule = 'vote' if name == 'vote' else 'welfare'
  return builders[name](env, horizon, tau, kind, delta, rule)

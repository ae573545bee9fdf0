"""Regret rates of fair dueling bandits, measured and not built in.

Every part is a sweep: one update simulates a few seeds on a whole grid, in
closed form, and the state collects them. Parts:
  horizon  K = 8, one user: theory-tuned explore-then-commit, elimination and
           explore-then-commit for a grid of tau, on the hard family with a grid
           of eps that does not know T; and the same on an easy instance.
  users    equal users, independent and shared answers, tau and eps grids.
  arms     K = 16..128, tau and eps grids.
  glm      d = 3..9 hidden signs, tau and delta grids.
  cyclic   generalized-linear users without a Condorcet winner, d = 3..9, tau
           and taste grids.
  play_*   the algorithms round by round on one multi-user instance.

Axes: S seeds, X grid points, E eps, T horizons, U tau, D dimensions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import dueling_rates_report
from tmlib import dueling, train
from tmlib.dueling import design, elimination, etc, glm, glm_etc, theory

__all__ = [
  'SweepState',
  'cyclic_taus',
  'glm_sign_run',
  'grids',
  'make',
  'sweep_method',
  'tuned_taus',
]

PLAYERS = (
  'etc', 'eps_greedy', 'elimination', 'vote', 'utilitarian', 'borda_ucb',
  'uniform', 'fixed',
)  # fmt: skip


class SweepState(NamedTuple):
  """Results of all seeds so far.

  Attributes:
    key: PRNG key; seed s uses fold_in(key, s).
    step: [] int32.
    found: {name: [S, ...]}, zero where a seed was not simulated yet.
  """

  key: jax.Array
  step: jax.Array
  found: dict[str, jax.Array]


def sweep_method(
  simulate: Callable[[jax.Array], dict[str, jax.Array]],
  steps: int,
  seeds_per_step: int,
) -> train.Build:
  """A Method whose update simulates some seeds and stores the results.

  Args:
    simulate: key -> {name: array}.
    steps: updates that the state has room for.
    seeds_per_step: seeds of one update.

  Returns:
    Build; `evaluate` looks results up by `batch['id']`.
  """
  seeds = steps * seeds_per_step

  def init(key, batch=None):
    del batch
    shapes = jax.eval_shape(simulate, key)
    found = {
      k: jnp.zeros((seeds, *v.shape), v.dtype) for k, v in shapes.items()
    }
    return SweepState(key, jnp.int32(0), found)

  def update(state, batch=None):
    del batch
    first = state.step * seeds_per_step
    ids = first + jnp.arange(seeds_per_step)
    keys = jax.vmap(lambda s: jax.random.fold_in(state.key, s))(ids)
    new = jax.vmap(simulate)(keys)
    found = jax.tree.map(
      lambda old, x: jax.lax.dynamic_update_slice_in_dim(old, x, first, 0),
      state.found,
      new,
    )
    mean = {name: x.mean() for name, x in new.items()}
    return SweepState(state.key, state.step + 1, found), mean

  def evaluate(state, batch):
    outputs = {k: v[batch['id']] for k, v in state.found.items()}
    outputs['id'] = batch['id']
    weight = batch['weight']
    return {'sums': {'seeds': (weight.sum(), weight.sum())}, 'outputs': outputs}

  return lambda axis_name: train.Method(init, update, evaluate)


def grids(config) -> dict[str, np.ndarray]:
  """The grids of a config: horizons [T], eps [E], taus [U], deltas [E]."""
  c = config.sweep
  space = lambda low, high, n: np.exp(np.linspace(np.log(low), np.log(high), n))
  return {
    'horizons': 2 ** np.arange(c.log2_low, c.log2_high + 1, c.log2_step),
    'eps': space(c.eps_low, c.eps_high, c.eps_points),
    'few_eps': space(c.eps_low, c.eps_high, c.few_points),
    'arms_eps': space(*c.arms_eps),
    'taus': np.unique(space(28, c.tau_high, c.tau_points).astype(int)),
  }


def _flat(*axes):
  """Flattened cartesian product of one-dimensional arrays."""
  mesh = np.meshgrid(*axes, indexing='ij')
  return [jnp.asarray(m.reshape(-1)) for m in mesh]


def _horizon(config):
  grid, arms = grids(config), config.sweep.arms
  horizons, eps, taus = grid['horizons'], grid['eps'], grid['taus']
  own = np.array([theory.etc_tau(arms, 1, int(t)) for t in horizons])
  pairs = arms * (arms - 1) // 2
  phases = elimination.num_phases(int(own.max()), pairs) + 2
  tau_all = np.concatenate([own, taus])
  # One more column than eps: the easy instance.
  columns = np.arange(len(eps) + 1)
  tau_axis, tau_column = _flat(tau_all, columns)
  t_index, t_column = _flat(np.arange(len(horizons)), columns)
  easy = dueling.easy_instance(arms, 1, config.sweep.easy_gap)

  def commit(key, tau, preference):
    env = dueling.DuelingEnv(preference)
    found = etc.simulate_etc(key, env, tau, tau, 0.05)
    return found.explore.pair, found.commit

  def eliminated(key, index, preference):
    horizon = jnp.asarray(horizons)[index]
    delta = 1 / horizon.astype(jnp.float32)
    return elimination.simulate_elimination(
      key,
      dueling.DuelingEnv(preference),
      jnp.asarray(own)[index],
      horizon,
      delta,
      phases,
    ).total.pair

  def simulate(key):
    env_key, etc_key, elimination_key, arm_key = jax.random.split(key, 4)
    hard = jax.vmap(
      lambda e: dueling.hard_instance(env_key, arms, 1, e).preference
    )(jnp.asarray(eps))
    preference = jnp.concatenate([hard, easy.preference[None]])
    split = lambda k, axis: jax.random.split(k, len(axis))
    explore, loss = jax.vmap(commit)(
      split(etc_key, tau_axis), tau_axis, preference[tau_column]
    )
    lost = jax.vmap(eliminated)(
      split(elimination_key, t_index), t_index, preference[t_column]
    )
    # No exploration: one of the good arms for ever.
    good = jax.random.randint(arm_key, (), 0, arms // 2)
    b = (preference[:, 0].sum(-1) - 0.5) / (arms - 1)
    shape = (len(tau_all), len(columns))
    return {
      'explore': explore.reshape(shape),
      'commit': loss.reshape(shape),
      'elimination': lost.reshape(len(horizons), len(columns)),
      'fixed_loss': b.max(1) - b[:, good],
    }

  return simulate


def tuned_taus(config, arms: int) -> np.ndarray:
  """Exploration lengths of the parts on K arms, [U]; none beyond T / 2."""
  least = arms * (arms - 1) // 2
  taus = np.maximum(grids(config)['taus'] * least // 28, least)
  return taus[taus <= config.sweep.horizon // 2]


def _tuned(config, arms, users, outcomes, eps):
  """Grid of tau x eps on equal users of the hard family."""
  taus = tuned_taus(config, arms)
  tau_axis, eps_axis = _flat(taus, eps)

  def one(key, env_key, tau, e):
    env = dueling.hard_instance(env_key, arms, users, e, outcomes=outcomes)
    found = etc.simulate_etc(key, env, tau, tau, 0.05)
    return found.explore.pair, found.commit

  def simulate(key):
    env_key, key = jax.random.split(key)
    keys = jax.random.split(key, len(tau_axis))
    explore, loss = jax.vmap(one, (0, None, 0, 0))(
      keys, env_key, tau_axis, eps_axis
    )
    shape = (len(taus), len(eps))
    return {'explore': explore.reshape(shape), 'commit': loss.reshape(shape)}

  return simulate


def glm_sign_run(
  key: jax.Array, bits: int, delta: jax.Array, tau: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Explore-then-commit on `glm_hard_instance`, by its sufficient statistics.

  The 2^d sign vectors against bad arms, equally often, are the D-optimal
  design; the committed arm carries the signs of the least-squares estimate.
  Equal in law to `fair_glm_etc` without the K x K matrices.

  Args:
    key: PRNG key; consumed.
    bits: d (static).
    delta: [], size of the coordinates.
    tau: [] int, exploration rounds, at least 2^d.

  Returns:
    Regret of the exploration and per committed round, [] each.
  """
  half = 2**bits
  share = half / (2 * half - 1)
  signs = 2 * ((jnp.arange(half)[:, None] >> jnp.arange(bits)[None]) & 1) - 1
  rows = jnp.concatenate([signs, jnp.ones((half, 1))], 1).astype(jnp.float32)
  theta_key, win_key = jax.random.split(key)
  flips = jnp.where(jax.random.bernoulli(theta_key, 0.5, (bits,)), 1.0, -1.0)
  theta = jnp.append(flips * delta, 0.25)
  counts = tau // half + (jnp.arange(half) < tau % half)
  counts = counts.astype(jnp.float32)
  wins = jax.random.binomial(win_key, counts, 0.5 + rows @ theta)
  fit = glm.glm_mle(rows, wins[None], counts[None], 'linear', 1e-3, steps=1)
  found = fit.theta[0]
  wrong = (found[:bits] * flips < 0).sum()
  explore = tau * share * (0.25 + bits * delta)
  return explore, share * 2 * delta * wrong


def _glm(config, bits):
  grid = grids(config)
  deltas = np.exp(
    np.linspace(np.log(1e-3), np.log(1 / (4 * bits)), config.sweep.few_points)
  )
  taus = np.maximum(grid['taus'], 2**bits)
  tau_axis, delta_axis = _flat(taus, deltas)

  def simulate(key):
    keys = jax.random.split(key, len(tau_axis))
    explore, loss = jax.vmap(lambda k, t, d: glm_sign_run(k, bits, d, t))(
      keys, tau_axis, delta_axis
    )
    shape = (len(taus), len(deltas))
    return {'explore': explore.reshape(shape), 'commit': loss.reshape(shape)}

  return simulate


def cyclic_taus(config) -> np.ndarray:
  """Exploration lengths of the cyclic parts, [U]."""
  taus = grids(config)['taus']
  return taus[taus >= 2 * config.sweep.cyclic_arms][::2]


def _cyclic(config, dim):
  """Grid of tau x size of the users' tastes beside a fixed cycle."""
  c = config.sweep
  env = dueling.glm_cyclic_instance(
    jax.random.key(config.seed), c.cyclic_arms, dim, 2, strength=0.5
  )
  # Kappa-free: the plan and the policy know the features only.
  pairs, weights, _ = glm_etc.design_pairs(env.phi)
  taus = cyclic_taus(config)
  counts = np.stack([design.round_design(weights, int(t)) for t in taus])
  scales = np.exp(np.linspace(np.log(0.02), np.log(2), c.cyclic_points))
  tau_axis, scale_axis = _flat(np.arange(len(taus)), scales)

  def one(key, taste, index, scale):
    cycle = env.theta[:, -1:]
    theta = jnp.concatenate([scale * taste, cycle], 1)
    found = glm_etc.simulate_glm_etc(
      key, env.replace(theta=theta), jnp.asarray(pairs),
      jnp.asarray(counts)[index], taus[-1], 1e-3,
    )  # fmt: skip
    lost = found.total.pair - (taus[-1] - found.tau) * found.commit
    return lost, found.commit

  def simulate(key):
    taste_key, key = jax.random.split(key)
    taste = 0.3 * jax.random.normal(taste_key, (2, dim - 1))
    keys = jax.random.split(key, len(tau_axis))
    explore, loss = jax.vmap(one, (0, None, 0, 0))(
      keys, taste, tau_axis, scale_axis
    )
    shape = (len(taus), len(scales))
    return {'explore': explore.reshape(shape), 'commit': loss.reshape(shape)}

  return simulate


def _players(config) -> dict[str, train.Experiment]:
  c = config.play
  env = dueling.hard_instance(
    jax.random.key(config.seed), c.arms, c.users, c.eps, groups=c.users
  )
  ids = {'id': np.arange(c.simulations, dtype=np.int32)}

  def part(name):
    utilitarian = name == 'utilitarian'
    return train.Experiment(
      build=dueling.bandit_method(
        env,
        'etc' if utilitarian else name,
        c.rounds,
        c.simulations,
        kind='utilitarian' if utilitarian else 'geometric',
        tau=None if name in ('eps_greedy', 'borda_ucb') else c.tau,
        regret_kind='geometric',
      ),
      steps=c.rounds,
      evaluations={'simulations': train.pass_data(ids, c.simulations)},
    )

  return {f'play_{name}': part(name) for name in c.players}


def make(config) -> train.Experiment:
  """The sweeps and plays of a config, and their report.

  Args:
    config: see configs/dueling_rates.py.

  Returns:
    The experiment.
  """
  c, grid = config.sweep, grids(config)

  def part(simulate, seeds_per_step=c.seeds_per_step):
    seeds = config.train.steps * seeds_per_step
    ids = {'id': np.arange(seeds, dtype=np.int32)}
    return train.Experiment(
      build=sweep_method(simulate, config.train.steps, seeds_per_step),
      evaluations={'seeds': train.pass_data(ids, seeds)},
    )

  parts: dict[str, Any] = {'horizon': part(_horizon(config))}
  for outcomes in ('independent', 'shared'):
    for users in c.users if outcomes == 'independent' else c.users[1:]:
      name = f'users_{outcomes}_{users}'
      simulate = _tuned(config, c.arms, users, outcomes, grid['few_eps'])
      parts[name] = part(simulate)
  for arms in c.arms_axis:
    simulate = _tuned(config, arms, 1, 'independent', grid['arms_eps'])
    parts[f'arms_{arms}'] = part(simulate, c.arms_seeds_per_step)
  for bits in c.bits:
    parts[f'glm_{bits}'] = part(_glm(config, bits))
  for dim in c.dims:
    parts[f'cyclic_{dim}'] = part(_cyclic(config, dim))
  parts |= _players(config)
  return train.Experiment(
    parts=parts,
    report=lambda workdir: dueling_rates_report.write(config, workdir),
  )

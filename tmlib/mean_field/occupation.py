r"""MF-OMO: an equilibrium as the zero of one function.

Of an occupation measure d_t(s, a) (a distribution per time and population),
values V_t(s) and slacks z_t(s, a) >= 0, with mu_t(s) = sum_a d_t(s, a),

  f = sum (mu_t - arrivals_t)^2                        the flow is consistent
    + sum (V_t - r_t(mu_t) - gamma P V_{t+1} - z_t)^2  V is at least optimal
    + sum z_t d_t                                      d takes best actions.

f >= 0, and f = 0 exactly at equilibria; no monotonicity is needed. `objective`
evaluates f anywhere. The solver moves where the two squares vanish: d is the
flow of a policy, V its optimal value and z the slack of that, so that f is the
exploitability. It descends on the logits of the policy by Adam, with steps
lr / sqrt(1 + k / 100), for the maximum in V has kinks. f is not convex: a
descent may end at a local minimum, and the gap then says so.

Axes: H time steps, S states, A actions.

References:
  Guo, Hu, Zhang. MF-OMO: an optimization formulation of mean-field games,
  2022. Descending within the constraints, and Adam, are our choice: with both
  squares as penalties, Adam did not solve games with rewards -log mu.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from tmlib.mean_field import checks, operators
from tmlib.mean_field.game import MFGame

__all__ = ['Variables', 'objective', 'variables_of']


class Variables(NamedTuple):
  """Where f is evaluated.

  Attributes:
    occupation: [H, S, A], d.
    value: [H, S], V.
    slack: [H, S, A], z, at least zero.
  """

  occupation: jax.Array
  value: jax.Array
  slack: jax.Array


class _Memory(NamedTuple):
  logits: jax.Array
  optimizer: Any


def variables_of(game: MFGame, pi: jax.Array) -> Variables:
  """The occupation of a policy, its optimal value and the slack of that.

  Args:
    game: a finite-horizon game.
    pi: [H, S, A].

  Returns:
    Variables at which both squares of f vanish.

  Raises:
    ValueError: a stationary game; a policy that does not fit.
  """
  _check_finite(game)
  checks.check_policy(pi, game.policy_shape, game.mask)
  mu = operators.flow(game, pi)
  q = operators.optimal_q(game, mu)
  value = operators.legal_max(game, q)
  slack = jnp.maximum(value[..., None] - q, 0)
  return Variables(mu[..., None] * pi, value, slack)


def _check_finite(game: MFGame) -> None:
  if game.horizon is None:
    raise ValueError(
      'MF-OMO is for finite horizons; give the game a horizon, or use '
      'online_mirror_descent'
    )


def objective(game: MFGame, variables: Variables) -> jax.Array:
  """F of the module docstring.

  Args:
    game: a finite-horizon game.
    variables: occupation measure, values and slacks.

  Returns:
    [], at least zero; zero exactly at an equilibrium.

  Raises:
    ValueError: a stationary game.
  """
  _check_finite(game)
  d, value, slack = variables
  mu = d.sum(-1)
  times = jnp.arange(game.horizon, dtype=jnp.int32)
  ahead = jnp.concatenate([value[1:], jnp.zeros_like(value[:1])])
  reward, arrivals, future = jax.vmap(
    lambda *now: operators.exchange(game, *now)
  )(d, mu, times, ahead)
  first = jnp.asarray(game.mu0, d.dtype)[None]
  flow = mu - jnp.concatenate([first, arrivals[:-1]])
  discount = jnp.asarray(game.discount, d.dtype)
  bellman = value[..., None] - reward - discount * future - slack
  if game.mask is not None:
    mask = jnp.broadcast_to(jnp.asarray(game.mask), bellman.shape)
    bellman = jnp.where(mask, bellman, 0)
  return (flow**2).sum() + (bellman**2).sum() + (slack * d).sum()


def start(game: MFGame, options: dict[str, Any], pi: jax.Array) -> _Memory:
  """Memory of the rule: logits of a policy, and of Adam."""
  _check_finite(game)
  logits = operators.log_policy(pi)
  return _Memory(logits, _adam(options).init(logits))


def _adam(options):
  return optax.adam(options['lr'])


def step(
  game: MFGame, options: dict[str, Any], memory: _Memory, k: jax.Array
) -> _Memory:
  """One step of Adam on the logits."""
  logits = memory.logits
  gap = lambda y: operators.gap(game, operators.softmax_policy(game, y))
  move, state = _adam(options).update(jax.grad(gap)(logits), memory.optimizer)
  slower = 1 / jnp.sqrt(1 + k.astype(logits.dtype) / 100)
  return _Memory(logits + slower * jnp.asarray(move, logits.dtype), state)


def policy(game: MFGame, options: dict[str, Any], memory: _Memory) -> jax.Array:
  """Softmax of the logits."""
  del options
  return operators.softmax_policy(game, memory.logits)

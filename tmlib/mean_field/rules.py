r"""How a policy is improved: one iteration of each solver.

  fixed point      pi <- damping pi + (1 - damping) BR(mu^pi)
  fictitious play  mu pi <- (1 - w) mu pi + w mu_br br, br = BR(mu^pi), w =
                   1 / (k + 1): an average of flows, not of policies; uniform
                   where neither flow arrives
  mirror descent   y <- y + lr Q^pi, pi = softmax(y)
  prior descent    pi <- prior exp(Q*(mu^pi) / temperature), normalised; the
                   prior becomes pi every `inner` iterations

A rule is three functions of arrays; solvers, the loop and the multi-start all
fold the same `step`.

References:
  Perrin et al. Fictitious play for mean field games, 2020. Perolat et al.
  Scaling up mean field games with online mirror descent, 2021. Cui, Koeppl.
  Approximately solving mean field games via entropy-regularized deep
  reinforcement learning, 2021.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.mean_field import occupation, operators
from tmlib.mean_field.game import MFGame

__all__ = ['RULES', 'Rule', 'average_policy']

# {name: number, array or None}; numbers may be traced.
Options = dict[str, Any]


class Rule(NamedTuple):
  """One solver.

  Attributes:
    start: (game, options, pi) -> memory, from an initial policy.
    step: (game, options, memory, k) -> memory, iteration k = 1, 2, ...
    policy: (game, options, memory) -> pi.
  """

  start: Callable[[MFGame, Options, jax.Array], Any]
  step: Callable[[MFGame, Options, Any, jax.Array], Any]
  policy: Callable[[MFGame, Options, Any], jax.Array]


def _itself(game, options, pi):
  del game, options
  return pi


def _fixed_point_step(game, options, pi, k):
  del k
  q = operators.optimal_q(game, operators.flow(game, pi))
  damping = jnp.asarray(options['damping'], pi.dtype)
  return damping * pi + (1 - damping) * operators.greedy(game, q)


def average_policy(
  game: MFGame, pi: jax.Array, mu: jax.Array, br: jax.Array,
  mu_br: jax.Array, w: jax.Array,
) -> jax.Array:  # fmt: skip
  """The policy whose flow is (1 - w) mu + w mu_br.

  Args:
    game: the game.
    pi: [..., S, A], first policy.
    mu: [..., S], its flow.
    br: [..., S, A], second policy.
    mu_br: [..., S], its flow.
    w: [], weight of the second.

  Returns:
    [..., S, A]; uniform over legal actions where neither flow arrives.
  """
  old, new = (1 - w) * mu[..., None], w * mu_br[..., None]
  total = old + new
  mixed = (old * pi + new * br) / jnp.where(total > 0, total, 1)
  return jnp.where(total > 0, mixed, operators.uniform_policy(game))


def _fictitious_step(game, options, pi, k):
  mu = operators.flow(game, pi)
  br = operators.greedy(game, operators.optimal_q(game, mu))
  mu_br = operators.flow(game, br, mu)
  w = options['lr']
  w = 1 / (k + 1).astype(pi.dtype) if w is None else jnp.asarray(w, pi.dtype)
  return average_policy(game, pi, mu, br, mu_br, w)


def _mirror_start(game, options, pi):
  del game, options
  return operators.log_policy(pi)


def _mirror_policy(game, options, y):
  del options
  return operators.softmax_policy(game, y)


def _mirror_step(game, options, y, k):
  del k
  pi = operators.softmax_policy(game, y)
  q = operators.policy_q(game, operators.flow(game, pi), pi)
  y = y + jnp.asarray(options['lr'], y.dtype) * q
  # Softmax does not see a shift; without it y would outgrow its precision.
  return y - y.max(-1, keepdims=True)


class _Prior(NamedTuple):
  log_prior: jax.Array
  log_pi: jax.Array


def _prior_start(game, options, pi):
  del game, options
  # Two arrays, for both may be donated.
  return _Prior(operators.log_policy(pi), jnp.copy(operators.log_policy(pi)))


def _prior_policy(game, options, memory):
  del options
  return operators.softmax_policy(game, memory.log_pi)


def _prior_step(game, options, memory, k):
  pi = operators.softmax_policy(game, memory.log_pi)
  q = operators.optimal_q(game, operators.flow(game, pi))
  log_pi = memory.log_prior + q / jnp.asarray(options['temperature'], q.dtype)
  log_pi = log_pi - log_pi.max(-1, keepdims=True)
  renew = k % options['inner'] == 0
  return _Prior(jnp.where(renew, log_pi, memory.log_prior), log_pi)


RULES = {
  'fixed_point': Rule(_itself, _fixed_point_step, _itself),
  'fictitious_play': Rule(_itself, _fictitious_step, _itself),
  'online_mirror_descent': Rule(_mirror_start, _mirror_step, _mirror_policy),
  'prior_descent': Rule(_prior_start, _prior_step, _prior_policy),
  'mf_omo': Rule(occupation.start, occupation.step, occupation.policy),
}

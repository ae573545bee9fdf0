"""How evenly a router uses its experts, and losses that ask for it.

Axes: T tokens, E experts, K experts per token.

All losses are functions of sums over tokens (`BalanceSums`), so a batch that
is split over devices gives the same number after one sum over the axis.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from tmlib.moe.routing import Routing, check_noise

__all__ = ['BalanceSums', 'balance_losses', 'balance_sums', 'losses_of_sums']


class BalanceSums(NamedTuple):
  """Sums over tokens that all balance losses are made of.

  Attributes:
    tokens: [] float, routed tokens.
    counts: [E], assignments per expert.
    firsts: [E], first choices per expert.
    probs: [E], sum of router probabilities.
    wins: [E], sum of the probability of being chosen under fresh noise; None
      without noise.
    squared_logsumexp: [], sum of log-partition squares.
  """

  tokens: jax.Array
  counts: jax.Array
  firsts: jax.Array
  probs: jax.Array
  wins: jax.Array | None
  squared_logsumexp: jax.Array


def _win_probability(
  routing: Routing, logits: jax.Array, noise_std: float
) -> jax.Array:
  """[T, E], Pr(e is chosen | the noise of the other experts)."""
  k, num_experts = routing.experts.shape[1], routing.num_experts
  if k == num_experts:
    return jnp.ones_like(routing.probs)
  top, _ = jax.lax.top_k(routing.scores, k + 1)
  # The k-th largest among the others: one further down for a chosen expert.
  chosen = routing.scores >= top[:, k - 1 : k]
  threshold = jnp.where(chosen, top[:, k:], top[:, k - 1 : k])
  scale = noise_std / num_experts
  return jax.scipy.stats.norm.cdf((logits - threshold) / scale)


def balance_sums(
  routing: Routing, logits: jax.Array, *, noise_std: float = 0.0
) -> BalanceSums:
  """Sums over the tokens of one device.

  Args:
    routing: of `topk_route`.
    logits: [T, E], float, those that were routed.
    noise_std: that of `topk_route`; 0 leaves out `wins`. A bias in the
      selection is not part of the probability to win.

  Returns:
    The sums; masked tokens count nowhere.

  Raises:
    ValueError: if noise_std is negative or not finite.
  """
  check_noise(noise_std)
  mask = routing.mask[:, None]
  logits = logits.astype(jnp.float32)
  chosen = jax.nn.one_hot(routing.experts, routing.num_experts)
  # where before the square: padding may hold anything.
  safe = jnp.where(mask, logits, 0)
  partition = jax.nn.logsumexp(safe, axis=1)
  wins = None
  if noise_std > 0:
    wins = _win_probability(routing, safe, noise_std)
    wins = jnp.where(mask, wins, 0).sum(0)
  return BalanceSums(
    tokens=mask.sum().astype(jnp.float32),
    counts=chosen.sum((0, 1)),
    firsts=chosen[:, 0].sum(0),
    probs=routing.probs.sum(0),
    wins=wins,
    squared_logsumexp=jnp.where(mask[:, 0], partition**2, 0).sum(),
  )


def _squared_variation(x: jax.Array) -> jax.Array:
  """(std / mean)^2 over experts; zero where the mean is zero."""
  mean = x.mean()
  safe = jnp.where(mean > 0, mean, 1)
  return jnp.where(mean > 0, x.var() / safe**2, 0)


def losses_of_sums(sums: BalanceSums, k: int) -> dict[str, jax.Array]:
  """The losses and figures of `balance_losses` from sums over all tokens.

  Args:
    sums: over the whole batch, all devices included.
    k: experts per token.

  Returns:
    See `balance_losses`.
  """
  num_experts = sums.counts.shape[0]
  tokens = jnp.maximum(sums.tokens, 1)
  fraction = sums.counts / (tokens * k)
  out = {
    'importance': _squared_variation(sums.probs),
    'gshard': num_experts * (sums.firsts * sums.probs).sum() / tokens**2,
    'z': sums.squared_logsumexp / tokens,
    'load_frac': fraction,
    'load_cv': jnp.sqrt(_squared_variation(sums.counts)),
    'dead_frac': (sums.counts == 0).mean(),
  }
  if sums.wins is not None:
    out['load'] = _squared_variation(sums.wins)
  return out


def balance_losses(
  routing: Routing,
  logits: jax.Array,
  *,
  noise_std: float = 0.0,
  axis_name: str | None = None,
) -> dict[str, jax.Array]:
  r"""Balance losses under their standard names, and two figures.

  Args:
    routing: of `topk_route`.
    logits: [T, E], float, those that were routed.
    noise_std: that of `topk_route`.
    axis_name: data axis to sum over, inside `shard_map`.

  Returns:
    - importance: CV^2 over experts of sum_t p_te, CV = std / mean.
    - load: CV^2 over experts of sum_t Pr(e among the top k | noise of the
      others); only with noise, without which it has no gradient.
    - gshard: E sum_e f_e mean_t p_te, with f_e the fraction of tokens whose
      first choice is e, whatever k; 1 where those are spread evenly.
    - z: mean_t logsumexp(r_t)^2.
    - load_frac: [E], n_e / (T K), with n_e the tokens that chose e at all.
    - load_cv: std / mean of n_e.
    - dead_frac: fraction of experts without a token.

  References:
    Shazeer et al. Outrageously large neural networks, 2017 (importance, load).
    Lepikhin et al. GShard, 2021, algorithm 1; Fedus et al. Switch transformers,
    2022, for k = 1 (gshard). Zoph et al. ST-MoE, 2022 (z).
  """
  sums = balance_sums(routing, logits, noise_std=noise_std)
  if axis_name is not None:
    sums = jax.lax.psum(sums, axis_name)
  return losses_of_sums(sums, routing.experts.shape[1])

r"""Regret, with its name.

Round t duels a left and a right arm, drawn from the laws p_t and q_t (point
masses while exploring). With W the welfare and W* its maximum, every figure is
a pseudo-regret: welfare of the laws, not of the realised outcomes.
  pair    W* - (W(p_t) + W(q_t)) / 2    (the one that the bounds are about)
  weak    W* - max(W(p_t), W(q_t))      (the better side counts)
  strong  W* - min(W(p_t), W(q_t))      (the worse side counts)
weak <= pair <= strong, with equality where both sides follow one law.

Axes: N users, K arms.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.dueling import nsw, welfare

__all__ = ['Losses', 'Regret', 'instance_losses', 'pair_losses', 'round_regret']


class Regret(NamedTuple):
  """Pseudo-regret under its three names."""

  pair: Any
  weak: Any
  strong: Any


class Losses(NamedTuple):
  """What an instance charges.

  Attributes:
    best: [], W*.
    lottery: [K], an optimal lottery.
    arm: [K], W* - W(single arm).
  """

  best: jax.Array
  lottery: jax.Array
  arm: jax.Array


def round_regret(left: jax.Array, right: jax.Array) -> Regret:
  """Regret of a round from the losses W* - W of its two laws.

  Args:
    left: [...], loss of the left law.
    right: [...], loss of the right law.

  Returns:
    [...] each.
  """
  return Regret(
    (left + right) / 2, jnp.minimum(left, right), jnp.maximum(left, right)
  )


def instance_losses(b: jax.Array, kind: str) -> Losses:
  """Best welfare and the loss of every single arm.

  Args:
    b: [N, K], true scores.
    kind: one of `welfare.KINDS`.

  Returns:
    The losses.
  """
  solution = nsw.maximize_welfare(b, kind)
  arms = welfare.welfare_of_utility(b.T, kind)
  return Losses(solution.value, solution.pi, solution.value - arms)


def pair_losses(losses: Losses) -> Regret:
  """Regret of exploring each unordered pair, in the order of `pair_order`.

  Args:
    losses: of the instance.

  Returns:
    [P] each, P = K (K - 1) / 2.
  """
  i, j = pair_order(losses.arm.shape[0])
  return round_regret(losses.arm[i], losses.arm[j])


def pair_order(arms: int) -> tuple[jax.Array, jax.Array]:
  """Round-robin order of the pairs i < j: by distance, then by i.

  Every run of duels with one distance meets each arm about equally often, so a
  schedule that stops early is still nearly balanced.

  Args:
    arms: K.

  Returns:
    i and j, [K (K - 1) / 2] int32 each.
  """
  pairs = sorted(
    ((i, j) for i in range(arms) for j in range(i + 1, arms)),
    key=lambda p: (p[1] - p[0], p[0]),
  )
  i, j = zip(*pairs, strict=True)
  return jnp.asarray(i, jnp.int32), jnp.asarray(j, jnp.int32)

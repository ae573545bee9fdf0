"""What every multiple-instance model returns, and what its losses add up to.

Axes: B rows, S bags packed into a row (the axis is absent where bags are not
packed), N instances, C classes, D features, G other sets of logits.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

__all__ = ['MILOutput', 'auxiliary_losses']


class MILOutput(struct.PyTreeNode):
  """Output of a bag model; one bag never depends on another.

  No field depends on labels, so the same call serves training and prediction.

  Attributes:
    logits: [B, (S,) C].
    attention: [B, N], importance of each instance; sums to one over each bag,
      zero in padding.
    slide_features: [B, (S,) D], the pooled representation of each bag.
    aux: name -> [B, (S,)], auxiliary losses of each bag, without their weight.
    extras: whatever else a model exposes, for reports; not trained on.
    aux_logits: name -> (logits [B, (S,) G, C], weight [B, (S,) G]), for losses
      that apply the task's own loss to other logits: sum_g w_g l(logits_g). The
      weights of a bag sum to one, or to zero for an empty one.
    aux_by_class: name -> [B, (S,) C], what an auxiliary loss would be if the
      label of the bag were each of the classes.
  """

  logits: jax.Array
  attention: jax.Array
  slide_features: jax.Array
  aux: dict[str, jax.Array] = struct.field(default_factory=dict)
  extras: dict[str, Any] = struct.field(default_factory=dict)
  aux_logits: dict[str, tuple[jax.Array, jax.Array]] = struct.field(
    default_factory=dict
  )
  aux_by_class: dict[str, jax.Array] = struct.field(default_factory=dict)


def auxiliary_losses(
  output: MILOutput,
  loss: Callable[[jax.Array], jax.Array],
  label: jax.Array | None = None,
) -> dict[str, jax.Array]:
  """The auxiliary losses of each bag, of all three kinds.

  Args:
    output: of a model.
    loss: logits [B, (S,) C] -> [B, (S,)], the task's loss with its targets
      bound; it is applied to each set of `aux_logits`.
    label: [B, (S,)], int in [0, C), picks from `aux_by_class`; another integer
      gives zero. None leaves these losses out: a task without classes.

  Returns:
    name -> [B, (S,)], without weights.
  """
  losses = dict(output.aux)
  for name, (logits, weight) in output.aux_logits.items():
    each = jax.vmap(loss, -2, -1)(logits.astype(jnp.float32))
    # where, not multiply: a set that does not exist may hold anything.
    losses[name] = jnp.sum(jnp.where(weight > 0, weight * each, 0), -1)
  if label is not None:
    for name, table in output.aux_by_class.items():
      target = jax.nn.one_hot(label, table.shape[-1], dtype=bool)
      losses[name] = jnp.sum(jnp.where(target, table, 0), -1)
  return losses

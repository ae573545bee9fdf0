r"""Models led by text: zero-shot scores and ConcepPath.

Axes: B rows, S bags of a row, N instances, Q dimensions of the text space, C
classes, M concepts of a class.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import row_keys
from tmlib.mil.output import MILOutput
from tmlib.mil.pooling import weighted_pool
from tmlib.mil.rows import (
  branch_pool,
  membership,
  normalise_in_bag,
  only_bag,
)
from tmlib.mil.soft_pooling import top_k_pool
from tmlib.mil.text import check_text, in_text_space, unit

__all__ = ['ConcepPath', 'ZeroShot', 'orthogonality']

# CLIP's initial logit scale, 1 / 0.07.
_LOG_SCALE = float(np.log(1 / 0.07))


class ZeroShot(nn.Module):
  r"""Mean of the k largest cosines between instances and the text of a class.

  logit_c = exp(s) / k sum over the top k of x^_i . t^_c. Its only parameter
  is the scale s, so that an untrained model ranks bags already.

  Attributes:
    num_classes: C.
    text: [C, Q], embeddings of the classes by a text encoder.
    in_dim: P, or None for any.
    k: instances, >= 1; a smaller bag gives all it has.
    dropout: unused; zero-shot scores have no layer to drop from.
    dtype: computation dtype of a map into the text space, where one is needed.

  References:
    Lu, Chen, Zhang et al. Visual language pretrained multiple instance
    zero-shot transfer for histopathology images (MI-Zero), 2023.
  """

  num_classes: int
  text: Any = None
  in_dim: int | None = None
  k: int = 50
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  def __post_init__(self):
    self.text = check_text(self.text, (self.num_classes, None))
    super().__post_init__()

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    text = unit(jnp.asarray(self.text, jnp.float32))
    x = unit(in_text_space(self, bag, text.shape[-1]))
    scale = self.param('log_scale', nn.initializers.constant(_LOG_SCALE), ())
    packing = (bag.mask, bag.segment_ids, bag.num_segments)
    cosine = jnp.einsum('bnq,cq->bnc', x, text)
    pooled, share = top_k_pool(cosine, *packing, k=self.k)
    return MILOutput(
      jnp.exp(scale) * pooled, share, weighted_pool(x, share, *packing)
    )


def orthogonality(concepts: jax.Array, gamma: float = 0.5) -> jax.Array:
  r"""Concepts of a class apart: sum_k (1 + gamma mean_{c != d} <t^_kc, t^_kd>).

  Args:
    concepts: [C, M, Q].
    gamma: weight of the cosines.

  Returns:
    [], float.
  """
  t = unit(concepts)
  count = t.shape[1]
  gram = jnp.einsum('kmq,knq->kmn', t, t)
  apart = jnp.sum(gram, (1, 2)) - jnp.trace(gram, axis1=1, axis2=2)
  return jnp.sum(1 + gamma * apart / max(count * (count - 1), 1))


class ConcepPath(nn.Module):
  r"""A slide as the mean of what it holds of each concept of a class.

  s_ic = softmax over all concepts of exp(s) x^_i . t^_c; f_c = unit(sum_i s_ic
  x^_i); w_kc = <T^_k, t^_kc> / sum_c <T^_k, t^_kc>; f_k = unit(mean_c (1 +
  w_kc) f_c); logit_k = exp(s) f_k . T^_k. Text embeddings are given and moved
  by a learned shift that starts at zero, in place of learned prompts of a
  text encoder. `aux['orthogonality']` keeps the concepts of a class apart; its
  authors add it with weight 2. (Their public code normalises (1 + w_kc) f_c
  once more before the mean, which takes w away again.)

  Attributes:
    num_classes: C.
    text: [C, 1 + M, Q]: of each class its own text T, then its concepts t.
    in_dim: P, or None for any.
    gamma: weight of the cosines in the auxiliary loss.
    dropout: rate on the instances, in [0, 1).
    dtype: computation dtype of a map into the text space, where one is needed.

  References:
    Zhao, Lin, Zhang et al. Aligning knowledge concepts to whole slide images
    for precise histopathology image analysis, 2024.
  """

  num_classes: int
  text: Any = None
  in_dim: int | None = None
  gamma: float = 0.5
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  def __post_init__(self):
    self.text = check_text(self.text, (self.num_classes, None, None))
    if len(self.text[0]) < 2:
      raise ValueError(
        'text must hold the text of each class and at least one concept, '
        f'[C, 1 + M, Q]; got {len(self.text[0])} per class'
      )
    super().__post_init__()

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    given = unit(jnp.asarray(self.text, jnp.float32))
    shift = self.param('text_shift', nn.initializers.zeros, given.shape)
    text = unit(given + shift)
    slide_text, concepts = text[:, 0], text[:, 1:]
    classes, count, size = concepts.shape
    scale = self.param('log_scale', nn.initializers.constant(_LOG_SCALE), ())
    scale = jnp.exp(scale)
    keys = row_keys(self, bag, train, dropout_keys)
    x = in_text_space(self, bag, size)
    x = unit(bag_dropout(x, self.dropout, keys))

    cosine = jnp.einsum('bnq,mq->bnm', x, concepts.reshape(-1, size))
    share = jax.nn.softmax(scale * cosine)
    share = jnp.where(bag.mask[..., None], share, 0)
    found = unit(branch_pool(x, share, bag))  # [B, S, C M, Q]
    found = found.reshape(*found.shape[:2], classes, count, size)
    weight = jnp.einsum('kq,kmq->km', slide_text, concepts)
    weight = weight / jnp.sum(weight, -1, keepdims=True)
    mixed = jnp.einsum('bskmq,km->bskq', found, 1 + weight) / count
    feature = unit(mixed)
    logits = scale * jnp.einsum('bskq,kq->bsk', feature, slide_text)
    loss = orthogonality(concepts, self.gamma)

    # How strongly an instance speaks for the concept that it is nearest to.
    strength = jnp.where(bag.mask, jnp.max(share, -1), 0)
    return MILOutput(
      only_bag(bag, logits),
      normalise_in_bag(strength, membership(bag)),
      only_bag(bag, jnp.mean(feature, 2)),
      aux={
        'orthogonality': jnp.broadcast_to(
          loss, only_bag(bag, logits).shape[:-1]
        )
      },
      extras={'concepts': share},
    )

r"""CLAM: attention pooling whose extremes are clustered as instances.

Axes: B rows, S bags of a row, N instances, D features, C classes, K instances
at either end of the attention.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag
from tmlib.mil.embedding import embed, row_keys
from tmlib.mil.layers import wide
from tmlib.mil.output import MILOutput
from tmlib.mil.rows import (
  branch_attention,
  branch_pool,
  gather_rows,
  membership,
  only_bag,
  top_instances,
)

__all__ = ['CLAM', 'cluster_loss', 'smooth_top1_svm']


def smooth_top1_svm(
  logits: jax.Array,
  labels: jax.Array,
  *,
  temperature: float = 1.0,
  margin: float = 1.0,
) -> jax.Array:
  r"""Smooth multi-class hinge: t log sum_j exp((x_j - x_y + m [j != y]) / t).

  Args:
    logits: [..., C].
    labels: [...], int in [0, C).
    temperature: t > 0; t -> 0 gives max_j (x_j - x_y + m [j != y]).
    margin: m >= 0.

  Returns:
    [...], >= 0.

  References:
    Berrada, Zisserman, Kumar. Smooth loss functions for deep top-k
    classification, 2018 (k = 1). A log-sum-exp of differences is stable for
    scores of any size, so no switch to the hard loss is needed.
  """
  own = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  target = jnp.sum(jnp.where(own, logits, 0), -1, keepdims=True)
  gap = logits - target + jnp.where(own, 0.0, margin)
  return temperature * jax.nn.logsumexp(gap / temperature, -1)


def _cross_entropy(logits, labels):
  own = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
  return -jnp.sum(jnp.where(own, jax.nn.log_softmax(logits), 0), -1)


_LOSSES = {'cross_entropy': _cross_entropy, 'svm': smooth_top1_svm}


def cluster_loss(
  top: jax.Array,
  bottom: jax.Array,
  valid: jax.Array,
  *,
  loss: str = 'cross_entropy',
  subtyping: bool = False,
) -> jax.Array:
  r"""Loss of the instance classifiers, were the label of the bag each class.

  For label c: classifier c should call the K most attended instances positive
  and the K least attended ones negative; with `subtyping` every other
  classifier should call its K most attended ones negative, and the sum is
  divided by C.

  Args:
    top: [..., C, K, 2], logits (negative, positive) of classifier c on the K
      most attended instances.
    bottom: [..., C, K, 2], on the K least attended ones.
    valid: [..., C, K], bool; False where the bag has fewer instances.
    loss: 'cross_entropy' or 'svm'.
    subtyping: classes exclude one another.

  Returns:
    [..., C]; zero for an empty bag.
  """
  each = _LOSSES[loss]

  def mean(logits, target):
    losses = each(logits, jnp.full(logits.shape[:-1], target))
    total = jnp.sum(jnp.where(valid, losses, 0), -1)
    return total / jnp.maximum(jnp.sum(valid, -1), 1)

  inside = (mean(top, 1) + mean(bottom, 0)) / 2
  if not subtyping:
    return inside
  outside = mean(top, 0)
  others = jnp.sum(outside, -1, keepdims=True) - outside
  return (inside + others) / inside.shape[-1]


class CLAM(nn.Module):
  r"""Clustering-constrained attention, with one branch or one per class.

  Single branch: a = softmax(e), z = sum_i a_i h_i, logits = W z + b. Multi:
  a_c, z_c per class, logit_c = w_c . z_c + b_c. `aux_by_class['instance']` is
  the clustering loss, see `cluster_loss`; its authors' total is 0.7 times the
  bag's loss plus 0.3 times this one.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    attention: units of the scorer.
    multi_branch: one branch per class (CLAM-MB), else one (CLAM-SB).
    gated: gated scores.
    instances: K; a bag with fewer gives all it has.
    instance_loss: 'cross_entropy' or 'svm' (`smooth_top1_svm`).
    subtyping: classes exclude one another.
    dropout: rate after the embedding and in the scorer, in [0, 1).
    dtype: computation dtype of embedding and scorer.

  References:
    Lu, Williamson, Chen et al. Data-efficient and weakly supervised
    computational pathology on whole-slide images, 2021. That a small bag gives
    what it has is our choice (the public code fails).
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 512
  attention: int = 256
  multi_branch: bool = False
  gated: bool = True
  instances: int = 8
  instance_loss: str = 'cross_entropy'
  subtyping: bool = False
  dropout: float = 0.25
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    if self.instance_loss not in _LOSSES:
      raise ValueError(
        f'instance_loss must be one of {", ".join(sorted(_LOSSES))}, got '
        f'{self.instance_loss!r}'
      )
    keys = row_keys(self, bag, train, dropout_keys)
    hidden = wide(embed(self, bag, keys))
    scores = AttentionScores(
      self.attention,
      self.gated,
      self.dtype,
      self.num_classes if self.multi_branch else 1,
      self.dropout,
      name='attention',
    )(hidden, keys)
    attention = branch_attention(scores, bag)
    pooled = branch_pool(hidden, attention, bag)
    if self.multi_branch:
      size = (self.hidden, self.num_classes)
      head = self.param('head', nn.initializers.lecun_normal(), size)
      bias = self.param('head_bias', nn.initializers.zeros, (self.num_classes,))
      logits = jnp.einsum('bscd,dc->bsc', pooled, head) + bias[None, None]
    else:
      logits = nn.Dense(self.num_classes, name='head')(pooled[:, :, 0])
    loss = self._instances(scores, hidden, membership(bag))
    return MILOutput(
      only_bag(bag, logits),
      jnp.mean(attention, -1),
      only_bag(bag, jnp.mean(pooled, 2)),
      aux_by_class={'instance': only_bag(bag, loss)},
      extras={'class_attention': attention} if self.multi_branch else {},
    )

  def _instances(self, scores, hidden, member):
    """Clustering loss of each bag for each class, [B, S, C]."""
    size = (self.num_classes, hidden.shape[-1], 2)
    kernel = self.param(
      'instance', nn.initializers.lecun_normal(batch_axis=(0,)), size
    )
    bias = self.param(
      'instance_bias', nn.initializers.zeros, (self.num_classes, 2)
    )

    def classify(scores):
      index, valid = top_instances(scores, member, self.instances)
      rows = gather_rows(hidden, index)
      rows = jnp.broadcast_to(
        rows, (*rows.shape[:2], self.num_classes, *rows.shape[3:])
      )
      logits = jnp.einsum('bsckd,cde->bscke', rows, kernel)
      return logits + bias[:, None][None, None], valid

    top, valid = classify(scores)
    bottom, _ = classify(-scores)
    return cluster_loss(
      top,
      bottom,
      jnp.broadcast_to(valid, top.shape[:-1]),
      loss=self.instance_loss,
      subtyping=self.subtyping,
    )

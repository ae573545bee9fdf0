r"""DTFD: pseudo-bags give a slide several bags to learn from.

Axes: B rows, S bags of a row, N instances, D features, C classes, G pseudo-bags
of a bag, M distilled features of a bag.
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
  gather_rows,
  membership,
  only_bag,
  own_bag,
  place_in_bag,
)
from tmlib.ops.softmax import (
  masked_softmax,
  one_hot_segments,
  segment_softmax,
)

__all__ = ['DTFD', 'pseudo_bags']


def pseudo_bags(keys: jax.Array, member: jax.Array, groups: int) -> jax.Array:
  """Splits each bag at random into pseudo-bags of equal size (up to one).

  The draw of an instance depends on the key of its row and on its position
  within its bag only.

  Args:
    keys: [B].
    member: [B, N, S], bool.
    groups: G, >= 1.

  Returns:
    [B, N], int32 in [0, G); G in padding.
  """
  size, slots = member.shape[1:]
  draw = jax.vmap(lambda key: jax.random.uniform(key, (size,)))(keys)
  draw = jnp.take_along_axis(draw, place_in_bag(member), 1)
  some = jnp.any(member, -1)
  slot = jnp.where(some, jnp.argmax(member, -1), slots)
  # Instances of one bag stand together, in the order of their draws.
  order = jnp.lexsort((draw, slot), axis=1)
  rank = jnp.argsort(order, axis=1)
  count = jnp.sum(member, 1)
  start = own_bag(member, (jnp.cumsum(count, 1) - count)[:, None])
  return jnp.where(some, (rank - start) % groups, groups).astype(jnp.int32)


class DTFD(nn.Module):
  r"""Double-tier feature distillation.

  Tier one: gated attention within each of G random pseudo-bags, one shared
  classifier; `aux_logits['tier1']` are its logits, to be trained on the label
  of the bag. Each pseudo-bag is distilled to its pooled feature ('afs'), to
  the instance that its classifier calls most positive ('max'), or to that and
  the least positive one ('max_min'), by softmax_c(a_i h_i . W_c) of the last
  class. Tier two: gated attention over what was distilled.

  The split is random. In training it follows the keys of the rows; otherwise
  it is that of `seed`, and `num_splits` splits are averaged (the authors draw
  anew at every evaluation and average probabilities, not logits). The output
  depends on the order of the instances through the split only.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    attention: units of either scorer.
    groups: G.
    distil: 'afs', 'max' or 'max_min'.
    joint: let tier two train the embedding too; the authors do not.
    num_splits: splits averaged outside of training, >= 1.
    seed: of the splits outside of training.
    dropout: rate after the embedding, in [0, 1).
    dtype: computation dtype of embedding and scorers.

  References:
    Zhang, Meng, Zhao et al. DTFD-MIL: Double-tier feature distillation multiple
    instance learning for histopathology whole slide image classification, 2022.
    One optimizer serves both tiers here.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 512
  attention: int = 128
  groups: int = 4
  distil: str = 'afs'
  joint: bool = False
  num_splits: int = 1
  seed: int = 0
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`.

    `dropout_keys` draw the split, outside of training too where given.
    """
    self._check()
    hidden = wide(embed(self, bag, row_keys(self, bag, train, dropout_keys)))
    member = membership(bag)
    scores = AttentionScores(
      self.attention, dtype=self.dtype, name='attention'
    )(hidden)
    first = nn.Dense(self.num_classes, name='tier1')
    scorer = AttentionScores(
      self.attention, dtype=self.dtype, name='tier2_attention'
    )
    head = nn.Dense(self.num_classes, name='head')
    found = [
      self._split(keys, hidden, scores, member, first, scorer, head)
      for keys in self._split_keys(len(hidden), train, dropout_keys)
    ]
    tier1, weight, logits, attention, pooled = (
      jnp.mean(jnp.stack(part), 0) for part in zip(*found, strict=True)
    )
    return MILOutput(
      only_bag(bag, logits),
      attention,
      only_bag(bag, pooled),
      aux_logits={'tier1': (only_bag(bag, tier1), only_bag(bag, weight))},
    )

  def _split_keys(self, rows: int, train: bool, keys):
    """Keys [B] of each split."""
    if not train:
      if keys is None:
        keys = jnp.broadcast_to(jax.random.key(self.seed), (rows,))
      fold = jax.vmap(jax.random.fold_in, (0, None))
      return [fold(keys, i) for i in range(self.num_splits)]
    if keys is None:
      keys = jax.random.split(self.make_rng('dropout'), rows)
    # Not the noise of any dropout layer.
    return [jax.vmap(lambda key: jax.random.fold_in(key, 1000))(keys)]

  def _split(self, keys, hidden, scores, member, first, scorer, head):
    """One split: tier-one logits and weights, logits, attention, feature."""
    rows, slots = len(hidden), member.shape[-1]
    group = pseudo_bags(keys, member, self.groups)
    mask = jnp.any(member, -1)
    ids = jnp.argmax(member, -1).astype(jnp.int32) * self.groups + group
    total = slots * self.groups
    local = segment_softmax(scores, mask, ids, total)
    within = one_hot_segments(ids, mask, total)
    table = jnp.where(within, local[..., None], 0)
    pooled = jnp.einsum('bng,bnd->bgd', table, hidden)
    tier1 = first(pooled)
    some = jnp.any(within, 1)

    features, index = pooled[:, :, None], None
    if self.distil != 'afs':
      index = self._extremes(first, hidden, local, within)
      features = gather_rows(hidden, index)
    kept = jnp.broadcast_to(some[..., None], features.shape[:3])
    if not self.joint:
      features = jax.lax.stop_gradient(features)
    shape = (rows, slots, -1)
    features = features.reshape(*shape, features.shape[-1])
    share = masked_softmax(scorer(features), kept.reshape(shape))
    slide = jnp.einsum('bsm,bsmd->bsd', share, features)
    share = share.reshape(kept.shape)
    if index is None:
      attention = jnp.sum(table * share[:, None, :, 0], -1)
    else:
      place = jnp.arange(mask.shape[1])[None, :, None, None]
      chosen = index[:, None] == place
      attention = jnp.sum(jnp.where(chosen, share[:, None], 0), (2, 3))

    count = jnp.sum(some.reshape(shape), -1, keepdims=True)
    weight = some.reshape(shape) / jnp.maximum(count, 1)
    tier1 = tier1.reshape(*shape, self.num_classes)
    return tier1, weight.astype(tier1.dtype), head(slide), attention, slide

  def _extremes(self, first, hidden, local, within):
    """Most (and least) positive instance of each pseudo-bag, [B, S G, 1 or 2].

    The class activation has no bias: that of the classifier is taken off.
    """
    zero = jnp.zeros_like(hidden[:1, :1])
    activation = first(local[..., None] * hidden) - first(zero)
    positive = jax.nn.softmax(activation)[..., -1:]
    most = jnp.argmax(jnp.where(within, positive, -1), 1)
    if self.distil == 'max':
      return most[..., None]
    least = jnp.argmin(jnp.where(within, positive, 2), 1)
    return jnp.stack([most, least], -1)

  def _check(self):
    if self.distil not in ('afs', 'max', 'max_min'):
      raise ValueError(
        f"distil must be 'afs', 'max' or 'max_min', got {self.distil!r}"
      )
    if self.groups < 1 or self.num_splits < 1:
      raise ValueError(
        f'groups and num_splits must be >= 1, got {self.groups} and '
        f'{self.num_splits}'
      )

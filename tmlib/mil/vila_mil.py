r"""ViLa-MIL: prototypes of a slide meet the texts of its classes.

Axes: B rows, S bags of a row, N and M instances of two scales, Q dimensions of
the text space, C classes, K prototypes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import row_keys
from tmlib.mil.output import MILOutput
from tmlib.mil.rows import (
  branch_attention,
  branch_pool,
  membership,
  only_bag,
)
from tmlib.mil.text import check_text, in_text_space, unit

__all__ = ['ViLaMIL']


class ViLaMIL(nn.Module):
  r"""Vision-language model of one scale or two, over embeddings of text.

  Prototypes p_k attend to the patches: c_k = LN(p_k + A_1(p_k; x)); gated
  attention over c gives the image vector z. Each class text attends to
  prototypes and patches together: t_c += A_2(t_c; [c | x]). logit_c = z . t_c.
  Two scales, each with a decoder and texts of its own, add their logits. Text
  embeddings are given and moved by a learned shift that starts at zero, in
  place of learned prompts of a text encoder.

  Attributes:
    num_classes: C.
    text: [C, Q], embeddings of the classes by a text encoder, as they look at
      the scale of the bag.
    low_text: [C, Q], as they look at the second, coarser scale; None where
      there is one scale.
    in_dim: P, or None for any.
    prototypes: K of each scale.
    attention: units of the gated attention over prototypes.
    dropout: rate on the instances, in [0, 1).
    dtype: computation dtype of a map into the text space, where one is needed.

  References:
    Shi, Li, Gong et al. ViLa-MIL: Dual-scale vision-language multiple instance
    learning for whole slide image classification, 2024. The public code sends
    both scales through one prototype decoder; here each has its own.
  """

  num_classes: int
  text: Any = None
  low_text: Any = None
  in_dim: int | None = None
  prototypes: int = 16
  attention: int = 192
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  def __post_init__(self):
    self.text = check_text(self.text, (self.num_classes, None))
    if self.low_text is not None:
      # One space: logits of both scales are added up.
      size = len(self.text[0])
      self.low_text = check_text(self.low_text, (self.num_classes, size))
    super().__post_init__()

  @nn.compact
  def __call__(
    self,
    bag: Bag,
    train: bool = False,
    dropout_keys: jax.Array | None = None,
    low: Bag | None = None,
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`.

    Args:
      bag: leaves [B, N, ...].
      train: whether instances are dropped.
      dropout_keys: [B] keys.
      low: the same bags at a coarser scale, leaves [B, M, ...], with
        `low_text`.

    Returns:
      MILOutput; attention is that of `bag`. With `low`, slide_features are
      those of both scales, [..., 2 Q], and extras hold 'low_attention' [B, M].

    Raises:
      ValueError: `low` without `low_text` or the reverse, or other rows.
    """
    if (low is None) != (self.low_text is None):
      raise ValueError(
        'two scales need both low_text= of the model and low= of the call, '
        f'got low_text {"absent" if self.low_text is None else "given"} and '
        f'low {"absent" if low is None else "given"}'
      )
    keys = row_keys(self, bag, train, dropout_keys)
    logits, attention, image = self._scale(bag, self.text, keys, '')
    if low is None:
      return MILOutput(only_bag(bag, logits), attention, only_bag(bag, image))
    rows = lambda x: (x.mask.shape[0], x.num_segments, x.segment_ids is None)
    if rows(bag) != rows(low):
      raise ValueError(
        f'bag and low must hold the same bags: (rows, bags per row, unpacked) '
        f'are {rows(bag)} and {rows(low)}'
      )
    coarse, extra, second = self._scale(low, self.low_text, keys, '_low')
    images = jnp.concatenate([image, second], -1)
    return MILOutput(
      only_bag(bag, logits + coarse), attention, only_bag(bag, images),
      extras={'low_attention': extra},
    )  # fmt: skip

  def _scale(self, bag: Bag, given: Any, keys: Any, name: str):
    """Logits [B, S, C], attention [B, N] and image vectors [B, S, Q]."""
    given = unit(jnp.asarray(given, jnp.float32))
    zeros = nn.initializers.zeros
    text = given + self.param(f'text_shift{name}', zeros, given.shape)
    size = given.shape[-1]
    x = in_text_space(self, bag, size, f'to_text{name}')
    x = bag_dropout(x, self.dropout, keys, layer=int(bool(name)))
    centres = self.param(
      f'prototypes{name}', nn.initializers.normal(0.02),
      (self.prototypes, size),
    )  # fmt: skip

    # Scores of instances do not depend on the bag: queries are parameters.
    query, key, value, out = self._projections(f'1{name}', size)
    scores = jnp.einsum('kq,bnq->bnk', query(centres), key(x)) * size**-0.5
    looks = branch_attention(scores, bag)
    some = jnp.any(membership(bag), 1)[..., None, None]
    seen = out(value(branch_pool(x, looks, bag)))
    seen = jnp.where(some, seen, 0)
    norm = nn.LayerNorm(epsilon=1e-6, name=f'norm{name}')
    proto = norm(seen + centres[None, None])

    score = AttentionScores(self.attention, name=f'attention{name}')
    share = jax.nn.softmax(score(proto))
    image = jnp.einsum('bsk,bskq->bsq', share, proto)

    texts = self._texts(text, proto, x, bag, name)
    logits = jnp.einsum('bsq,bscq->bsc', image, texts)
    # An instance counts as much as the prototypes that look at it.
    own = jnp.where(membership(bag)[..., None], share[:, None], 0)
    return logits, jnp.sum(looks * jnp.sum(own, 2), -1), image

  def _texts(self, text, proto, x, bag, name):
    """t_c + A_2(t_c; [prototypes | patches]), [B, S, C, Q]."""
    size = text.shape[-1]
    query, key, value, out = self._projections(f'2{name}', size)
    q = query(text) * size**-0.5
    of_proto = jnp.einsum('cq,bskq->bsck', q, key(proto))
    of_patch = jnp.einsum('cq,bnq->bnc', q, key(x))
    # One softmax over both: each part's own, mixed by their sums.
    member = membership(bag)[..., None]
    lowest = jnp.finfo(of_patch.dtype).min
    some = jnp.any(member, 1)
    inside = jnp.where(member, of_patch[:, :, None], lowest)
    inside = jnp.where(some[:, None], inside, 0)
    gap = jax.nn.logsumexp(inside, 1) - jax.nn.logsumexp(of_proto, -1)
    patch_share = jnp.where(some, nn.sigmoid(gap), 0)[..., None]
    patches = branch_pool(x, branch_attention(of_patch, bag), bag)
    protos = jnp.einsum('bsck,bskq->bscq', jax.nn.softmax(of_proto), proto)
    mixed = patch_share * patches + (1 - patch_share) * protos
    return text[None, None] + out(value(mixed))

  def _projections(self, number: str, size: int):
    """Query, key, value and output layers of one attention head."""
    names = ('query', 'key', 'value', 'out')
    return tuple(nn.Dense(size, name=f'{n}_{number}') for n in names)

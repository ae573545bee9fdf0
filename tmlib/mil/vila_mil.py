r"""ViLa-MIL: prototypes of a slide meet the texts of its classes.

Axes: B rows, S bags of a row, N instances, Q dimensions of the text space, C
classes, K prototypes.
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
  r"""Vision-language model of one scale, over embeddings of text.

  Prototypes p_k attend to the patches: c_k = LN(p_k + A_1(p_k; x)); gated
  attention over c gives the image vector z. Each class text attends to
  prototypes and patches together: t_c += A_2(t_c; [c | x]). logit_c = z . t_c.
  Text embeddings are given and moved by a learned shift that starts at zero,
  in place of learned prompts of a text encoder. The paper adds the logits of
  two scales: train one model on each, or give both in one bag.

  Attributes:
    num_classes: C.
    text: [C, Q], embeddings of the classes by a text encoder.
    in_dim: P, or None for any.
    prototypes: K.
    attention: units of the gated attention over prototypes.
    dropout: rate on the instances, in [0, 1).
    dtype: computation dtype of a map into the text space, where one is needed.

  References:
    Shi, Li, Gong et al. ViLa-MIL: Dual-scale vision-language multiple instance
    learning for whole slide image classification, 2024.
  """

  num_classes: int
  text: Any = None
  in_dim: int | None = None
  prototypes: int = 16
  attention: int = 192
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
    given = unit(jnp.asarray(self.text, jnp.float32))
    shift = self.param('text_shift', nn.initializers.zeros, given.shape)
    text, size = given + shift, given.shape[-1]
    keys = row_keys(self, bag, train, dropout_keys)
    x = bag_dropout(in_text_space(self, bag, size), self.dropout, keys)
    centres = self.param(
      'prototypes', nn.initializers.normal(0.02), (self.prototypes, size)
    )

    # Scores of instances do not depend on the bag: queries are parameters.
    query, key, value, out = self._projections(1, size)
    scores = jnp.einsum('kq,bnq->bnk', query(centres), key(x)) * size**-0.5
    looks = branch_attention(scores, bag)
    some = jnp.any(membership(bag), 1)[..., None, None]
    seen = out(value(branch_pool(x, looks, bag)))
    seen = jnp.where(some, seen, 0)
    proto = nn.LayerNorm(epsilon=1e-6, name='norm')(seen + centres[None, None])

    share = AttentionScores(self.attention, name='attention')(proto)
    share = jax.nn.softmax(share)
    image = jnp.einsum('bsk,bskq->bsq', share, proto)

    texts = self._texts(text, proto, x, bag)
    logits = jnp.einsum('bsq,bscq->bsc', image, texts)
    # An instance counts as much as the prototypes that look at it.
    own = jnp.where(membership(bag)[..., None], share[:, None], 0)
    attention = jnp.sum(looks * jnp.sum(own, 2), -1)
    return MILOutput(only_bag(bag, logits), attention, only_bag(bag, image))

  def _texts(self, text, proto, x, bag):
    """t_c + A_2(t_c; [prototypes | patches]), [B, S, C, Q]."""
    size = text.shape[-1]
    query, key, value, out = self._projections(2, size)
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

  def _projections(self, number: int, size: int):
    """Query, key, value and output layers of one attention head."""
    names = ('query', 'key', 'value', 'out')
    return tuple(nn.Dense(size, name=f'{n}_{number}') for n in names)

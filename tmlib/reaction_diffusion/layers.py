r"""The learned ends of TMEvolve: concepts going in, a prediction coming out.

Axes: ... leading axes, N patches (padded), P features, Q dimensions of a text
space, S bags packed in a row, D hidden, M concepts, R regions, C outputs.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn

# The family is built on bags and on their attention.
from tmlib.mil import AttentionScores, Bag, MILOutput
from tmlib.ops.softmax import masked_softmax
from tmlib.reaction_diffusion import readout
from tmlib.reaction_diffusion.concepts import (
  check_concept_matrix,
  concept_field,
  similarity_logits,
)
from tmlib.reaction_diffusion.dynamics import Fields
from tmlib.reaction_diffusion.regions import region_usage

__all__ = ['ConceptLayer', 'Readout', 'wide_dtype']


def wide_dtype(dtype: Any) -> jnp.dtype:
  """The dtype of fields and sums: float32, or wider if parameters are."""
  return jnp.promote_types(dtype, jnp.float32)


class ConceptLayer(nn.Module):
  """Concept field of a bag before the evolution.

  Attributes:
    mode: 'similarity', 'projected', 'learned' or 'none', see `TMEvolve`.
    matrix: [M, Q], unit rows, of 'similarity' and 'projected'; tuples keep the
      module hashable.
    activation: 'softmax' or 'sigmoid'.
    param_dtype: of the parameters.
  """

  mode: str
  matrix: Any = None
  activation: str = 'softmax'
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(self, bag: Bag, mapped: jax.Array, mask: jax.Array):
    """Returns Z [..., N, M], zeros in padding.

    Args:
      bag: for its concept embeddings.
      mapped: [..., N, J], a linear map of the features, without a bias, which
        on a softmax scorer would drift: the logits of 'learned' (J = M), the
        embeddings of 'projected' (J = Q); not read in other modes.
      mask: [..., N], bool.
    """
    wide = wide_dtype(self.param_dtype)
    if self.mode == 'none':
      return jnp.where(mask[..., None], jnp.ones((), wide), 0)
    if self.mode == 'learned':
      logits = mapped
    else:
      logits = self._similarity(bag, mapped, mask)
    bias = None
    if self.activation == 'sigmoid':
      zeros = nn.initializers.zeros
      bias = self.param('bias', zeros, logits.shape[-1:], self.param_dtype)
    logits = logits.astype(wide)
    return concept_field(logits, mask, activation=self.activation, bias=bias)

  def _similarity(self, bag, mapped, mask):
    if self.mode == 'projected':
      embeddings = mapped
    else:
      embeddings = bag.features if bag.concepts is None else bag.concepts
      # Raises on a text space of another size.
      check_concept_matrix(self.matrix, embeddings.shape[-1])
      embeddings = jnp.where(mask[..., None], jnp.asarray(embeddings), 0)
    start = nn.initializers.constant(float(np.log(1 / 0.07)))
    log_scale = self.param('log_scale', start, (), self.param_dtype)
    wide = wide_dtype(self.param_dtype)
    return similarity_logits(
      embeddings.astype(wide), jnp.asarray(self.matrix, wide), log_scale
    )


class Readout(nn.Module):
  """Pools evolved patches by regions, attends, predicts.

  Attributes:
    hidden: D.
    num_outputs: C.
    pooling: 'region' or 'patch'.
    dtype: of the products.
    param_dtype: of the parameters.
  """

  hidden: int
  num_outputs: int
  pooling: str = 'region'
  dtype: Any = None
  param_dtype: Any = jnp.float32

  @nn.compact
  def __call__(
    self,
    fields: Fields,
    regions: jax.Array,
    member: jax.Array,
    axis_name: str | None,
  ) -> MILOutput:
    """Returns an output whose every per-bag entry has the axis S.

    Args:
      fields: H [..., N, D] and Z [..., N, M].
      regions: [..., N, R], zeros in padding.
      member: [..., N, S], bool.
      axis_name: mesh axis that splits the patches, if any.
    """
    wide = wide_dtype(self.param_dtype)
    options = {'dtype': self.dtype, 'param_dtype': self.param_dtype}
    dense = nn.Dense(self.hidden, name='unit', **options)
    unit = lambda x: nn.gelu(dense(x).astype(wide))
    scorer = AttentionScores(self.hidden, dtype=self.dtype, name='attention')
    score = lambda units: scorer(units).astype(wide)
    values = jnp.concatenate(fields, -1)
    usage = region_usage(regions, member, axis_name)
    extras = {'region_usage': usage}
    if self.pooling == 'region':
      summary = readout.aggregate_regions(
        values, regions, member, axis_name=axis_name
      )
      units = unit(summary.mean)
      p = masked_softmax(score(units), summary.alive)
      pooled = jnp.einsum('...sr,...srd->...sd', p, units)
      attention = readout.patch_heatmap(p, summary, regions, member)
      extras['region_attention'] = p
    else:
      units = unit(values)
      attention = readout.patch_softmax(score(units), member, axis_name)
      share = attention[..., None] * member
      pooled = jnp.einsum('...ns,...nd->...sd', share, units)
      pooled = readout.patch_sum(pooled, axis_name)
    logits = nn.Dense(self.num_outputs, name='head', **options)(pooled)
    entropy = readout.assignment_entropy(regions, member, axis_name)
    aux = {
      'region_balance': readout.region_balance(usage),
      'assignment_entropy': entropy,
    }
    return MILOutput(logits.astype(wide), attention, pooled, aux, extras)

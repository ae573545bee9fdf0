r"""Patch-GCN: graph convolutions on the patch graph, then gated attention.

Axes: B rows, S bags of a row, N patches, K slots of the neighbour table, D
hidden features, C outputs, L convolutions.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from kernels_pallas.graph import PatchGraph, ell_spmm
from tmlib.mil.attention import AttentionScores
from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import embed, row_keys
from tmlib.mil.layers import Dense, LayerNorm, wide
from tmlib.mil.output import MILOutput
from tmlib.mil.pooling import attention_pool

__all__ = ['GENConv', 'PatchGCN', 'softmax_aggregate']

# Messages exp(-_SPAN) below the largest of their row count alike: the softmax
# never divides zero by zero.
_SPAN = 80.0


def softmax_aggregate(
  graph: PatchGraph, messages: jax.Array, temperature: jax.Array
) -> jax.Array:
  r"""Softmax mean over neighbours, per feature.

  y_id = sum_j exp(t m_jd) m_jd / sum_j exp(t m_jd), j over the neighbours of
  i; zero for a node without any. No array [N, K, D] is made. Exponents are
  taken relative to the largest of the row; where t m lies more than 80 below
  it, neighbours weigh alike.

  Args:
    graph: leaves [B, N, K].
    messages: [B, N, D], float32; finite.
    temperature: [], t.

  Returns:
    [B, N, D].

  References:
    Li, Xiong, Thabet, Ghanem. DeeperGCN: All you need to train deeper GCNs,
    2020.
  """
  ends = [f(messages, 1, keepdims=True) for f in (jnp.max, jnp.min)]
  peak = jnp.maximum(*(temperature * end for end in ends))
  peak = jax.lax.stop_gradient(peak)
  weight = jnp.exp(jnp.maximum(temperature * messages - peak, -_SPAN))
  ones = jnp.ones(graph.nbr.shape, messages.dtype)
  above = ell_spmm(graph, ones, weight * messages)
  below = ell_spmm(graph, ones, weight)
  some = below > 0
  return jnp.where(some, above / jnp.where(some, below, 1), 0)


class GENConv(nn.Module):
  r"""x_i <- MLP(x_i + softmax mean of relu(x_j) + 1e-7), j near i.

  The MLP is linear (2 D), layer norm, relu, linear (D).

  Attributes:
    features: D.
    dtype: computation dtype of the MLP.
  """

  features: int
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(self, x: jax.Array, graph: PatchGraph) -> jax.Array:
    """[B, N, D] and a graph with leaves [B, N, K] to [B, N, D]."""
    t = self.param('temperature', nn.initializers.ones, ())
    near = softmax_aggregate(graph, nn.relu(x) + 1e-7, t)
    h = Dense(2 * self.features, dtype=self.dtype, name='in')(x + near)
    h = LayerNorm(name='norm')(wide(h))
    h = Dense(self.features, dtype=self.dtype, name='out')(nn.relu(h))
    return wide(h)


class PatchGCN(nn.Module):
  r"""Context-aware pooling of a patch graph.

  x_0 = relu(W x); x_1 = GENConv(x_0); x_l = x_{l-1} + relu(LN(GENConv(x_{l-1}
  ))); h = relu(W_h [x_0 | ... | x_L]); gated attention over h; relu; head.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    layers: L >= 1.
    width: of the mixed features h; 0 takes that of their concatenation, as the
      authors do.
    attention: units of the scorer; 0 takes the width of h.
    dropout: rate after embedding, mixing and pooling, in [0, 1).
    layer_dropout: rate after each residual layer, in [0, 1).
    dtype: computation dtype of the dense layers.

  References:
    Chen, Lu, Shaban et al. Whole slide images are 2D point clouds:
    context-aware survival prediction using patch-based graph convolutional
    networks, 2021.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 128
  layers: int = 3
  width: int = 0
  attention: int = 0
  dropout: float = 0.25
  layer_dropout: float = 0.1
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`.

    Raises:
      ValueError: bags without a graph.
    """
    keys = row_keys(self, bag, train, dropout_keys)
    x = wide(embed(self, bag, keys))
    if bag.graph is None:
      raise ValueError(
        'PatchGCN needs a patch graph but bag.graph is None; build one with '
        'tmlib.ops.graph (ell_from_grid, knn_graph)'
      )
    # Dropout keys of padded rows may be anything; their features are zero.
    real = bag.mask[..., None]
    parts = [x]
    for layer in range(self.layers):
      h = GENConv(self.hidden, self.dtype, name=f'conv_{layer}')(x, bag.graph)
      if layer:
        h = nn.relu(LayerNorm(name=f'norm_{layer}')(h))
        h = bag_dropout(x + h, self.layer_dropout, keys, layer)
      x = jnp.where(real, h, 0)
      parts.append(x)
    h = jnp.concatenate(parts, -1)
    width = self.width or h.shape[-1]
    dense = lambda name: Dense(width, dtype=self.dtype, name=name)
    h = bag_dropout(nn.relu(dense('mix')(h)), self.dropout, keys, 100)
    h = wide(h)
    scores = AttentionScores(
      self.attention or width,
      dtype=self.dtype,
      dropout=self.dropout,
      name='attention',
    )(h, keys)
    pooled, attention = attention_pool(
      h, scores, bag.mask, bag.segment_ids, bag.num_segments
    )
    slide = nn.relu(dense('slide')(pooled))
    slide = wide(bag_dropout(slide, self.dropout, keys, 101))
    logits = nn.Dense(self.num_classes, name='head')(slide)
    return MILOutput(logits, attention, slide)

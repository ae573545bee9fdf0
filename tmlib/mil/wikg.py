r"""WiKG: every patch draws knowledge from the few that it asks for.

Axes: B rows, S bags of a row, N patches, D features, K neighbours, R rows of a
chunk, C classes.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import clean_features, row_keys
from tmlib.mil.layers import Dense, wide
from tmlib.mil.output import MILOutput
from tmlib.mil.pooling import attention_pool, mean_pool
from tmlib.mil.rows import gather_rows, membership, own_bag
from tmlib.ops.softmax import masked_softmax

__all__ = ['WiKG', 'top_neighbours']


def top_neighbours(
  heads: jax.Array, tails: jax.Array, bag: Bag, k: int, chunk: int
) -> tuple[jax.Array, jax.Array]:
  """The K patches of the same bag with the largest <head_i, tail_j>.

  Only `chunk` rows of the N x N products exist at once, and none of them is
  kept for the gradient: weights are computed again from what was chosen.

  Args:
    heads: [B, N, D].
    tails: [B, N, D].
    bag: leaves [B, N, ...].
    k: >= 1.
    chunk: R >= 1.

  Returns:
    index: [B, N, K], int32, K = min(k, N).
    valid: [B, N, K], bool; False where the bag has fewer patches.
  """
  heads, tails = jax.lax.stop_gradient((heads, tails))
  rows, n, _ = heads.shape
  slot = jnp.zeros((rows, n), jnp.int32)
  if bag.segment_ids is not None:
    slot = bag.segment_ids
  slot = jnp.where(bag.mask, slot, -1)
  size, chunk = min(k, n), min(chunk, n)
  blocks = -(-n // chunk)
  pad = blocks * chunk - n
  split = lambda x: jnp.moveaxis(
    jnp.pad(x, ((0, 0), (0, pad)) + ((0, 0),) * (x.ndim - 2)).reshape(
      rows, blocks, chunk, *x.shape[2:]
    ),
    1,
    0,
  )

  def block(part):
    heads, own = part
    score = jnp.einsum('brd,bnd->brn', heads, tails)
    same = (own[..., None] == slot[:, None]) & bag.mask[:, None]
    score = jnp.where(same, score, jnp.finfo(score.dtype).min)
    index = jax.lax.top_k(score, size)[1]
    count = jnp.sum(same, -1, keepdims=True)
    return index, jnp.arange(size)[None, None] < count

  index, valid = jax.lax.map(block, (split(heads), split(slot)))
  join = lambda x: jnp.moveaxis(x, 0, 1).reshape(rows, -1, size)[:, :n]
  return join(index), join(valid)


class WiKG(nn.Module):
  r"""Dynamic graph of knowledge between the patches of a slide.

  x <- (x + mean x) / 2 after a leaky-relu layer; head h_i, tail t_i; j over the
  K largest <h_i, t_j> / sqrt(D), p their softmax; r_ij = p_ij t_j + (1 - p_ij)
  h_i; u_ij = <t_j, tanh(h_i + r_ij)>; n_i = sum_j softmax(u)_ij t_j; patch
  lrelu(W_1 (h + n)) + lrelu(W_2 (h * n)); attention or mean pooling; LN; head.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D.
    neighbours: K; a bag with fewer patches gives all it has.
    pool: 'attention' or 'mean'.
    chunk: rows of the N x N products held at once.
    paper_code_compat: u_ij = (sum_d t_jd)(sum_d tanh_ijd), which is what the
      public code computes, instead of the dot product of the paper.
    dropout: rate of the patches before pooling, in [0, 1).
    dtype: computation dtype of the dense layers.

  References:
    Li, Chen, Chu et al. Dynamic graph representation with knowledge-aware
    attention for histopathology whole slide image analysis, 2024.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 512
  neighbours: int = 6
  pool: str = 'attention'
  chunk: int = 1024
  paper_code_compat: bool = False
  dropout: float = 0.3
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    if self.pool not in ('attention', 'mean'):
      raise ValueError(f"pool must be 'attention' or 'mean', got {self.pool!r}")
    if self.neighbours < 1 or self.chunk < 1:
      raise ValueError(
        f'neighbours and chunk must be >= 1, got {self.neighbours} and '
        f'{self.chunk}'
      )
    keys = row_keys(self, bag, train, dropout_keys)
    dense = lambda size, name: Dense(size, dtype=self.dtype, name=name)
    x = clean_features(self, bag)
    packing = (bag.mask, bag.segment_ids, bag.num_segments)
    x = wide(nn.leaky_relu(dense(self.hidden, 'embed')(x)))
    mean = mean_pool(x, *packing)[0]
    mean = mean[:, None] if bag.segment_ids is None else mean
    x = (x + own_bag(membership(bag), mean[:, None])) / 2
    heads = wide(dense(self.hidden, 'head_map')(x))
    tails = wide(dense(self.hidden, 'tail_map')(x))
    near = self._neighbourhood(heads, tails, bag)
    h = nn.leaky_relu(dense(self.hidden, 'sum')(heads + near))
    h += nn.leaky_relu(dense(self.hidden, 'product')(heads * near))
    h = wide(bag_dropout(h, self.dropout, keys))
    h = jnp.where(bag.mask[..., None], h, 0)
    if self.pool == 'mean':
      pooled, attention = mean_pool(h, *packing)
    else:
      units = nn.leaky_relu(dense(self.hidden // 2, 'attention')(h))
      # No bias: softmax ignores it.
      scores = nn.Dense(1, use_bias=False, name='attention_out')(wide(units))
      pooled, attention = attention_pool(h, scores[..., 0], *packing)
    slide = nn.LayerNorm(epsilon=1e-5, name='norm')(pooled)
    return MILOutput(
      nn.Dense(self.num_classes, name='head')(slide), attention, slide
    )

  def _neighbourhood(self, heads, tails, bag):
    """n_i, [B, N, D]."""
    index, valid = top_neighbours(
      heads, tails, bag, self.neighbours, self.chunk
    )
    near = gather_rows(tails, index)  # [B, N, K, D]
    scale = self.hidden**-0.5
    p = masked_softmax(jnp.einsum('bnd,bnkd->bnk', heads, near) * scale, valid)
    p = p[..., None]
    own = heads[:, :, None]
    gate = jnp.tanh(own + p * near + (1 - p) * own)
    if self.paper_code_compat:
      score = jnp.sum(near, -1) * jnp.sum(gate, -1)
    else:
      score = jnp.sum(near * gate, -1)
    weight = masked_softmax(score, valid)
    return jnp.einsum('bnk,bnkd->bnd', weight, near)

r"""DSMIL: a stream of instances finds the one that a stream of bags looks from.

Axes: B rows, S bags of a row, N instances, D features, C classes, Q units of a
query.
"""

import math

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.linen.dtypes import promote_dtype

from tmlib.mil.bag import Bag
from tmlib.mil.dropout import bag_dropout
from tmlib.mil.embedding import clean_features, embed, row_keys
from tmlib.mil.layers import Dense, wide
from tmlib.mil.output import MILOutput
from tmlib.mil.rows import (
  branch_attention,
  branch_pool,
  gather_rows,
  membership,
  only_bag,
  own_bag,
)

__all__ = ['DSMIL']


class DSMIL(nn.Module):
  r"""Dual-stream multiple-instance learning.

  c_i = W_c h_i + b_c; m_c = argmax_i c_ic; a_ic = softmax_i(q_i . q_{m_c} /
  sqrt(Q)); z_c = sum_i a_ic v_i; logits_o = sum_{c,d} K_ocd z_cd + b_o.
  `aux_logits['instance']` are max_i c_ic; the authors weigh both losses alike,
  and use a sigmoid per class where we use the loss of the task.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: D of an embedding before, or 0 for the features themselves, as the
      authors have it.
    query: Q.
    query_layers: 'mlp' (linear, relu, linear, tanh) or 'linear', as in early
      checkpoints.
    values: v_i: 'identity', 'linear', or 'relu' of a linear map.
    dropout: rate after the embedding (of the values where there is none), in
      [0, 1).
    dtype: computation dtype of embedding, query and values.

  References:
    Li, Li, Eliceiri. Dual-stream multiple instance learning network for whole
    slide image classification with self-supervised contrastive learning, 2021.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 0
  query: int = 128
  query_layers: str = 'mlp'
  values: str = 'identity'
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`."""
    self._check()
    keys = row_keys(self, bag, train, dropout_keys)
    if self.hidden:
      hidden = embed(self, bag, keys)
    else:
      hidden = clean_features(self, bag)
    member = membership(bag)
    stream = Dense(self.num_classes, name='instance')
    instance = wide(stream(hidden))
    lowest = jnp.finfo(instance.dtype).min
    inside = jnp.where(member[..., None], instance[:, :, None], lowest)
    critical = jnp.argmax(inside, 1)  # [B, S, C]
    # Of the critical instances again: cheaper than to gather by the gradient.
    rows = gather_rows(hidden, critical)  # [B, S, C, D]
    best = wide(jnp.diagonal(stream(rows), axis1=2, axis2=3))
    some = jnp.any(member, 1)
    best = jnp.where(some[..., None], best, 0)
    scores = self._look(hidden, rows)
    scores /= jnp.sqrt(jnp.float32(self.query))
    attention = branch_attention(wide(own_bag(member, scores)), bag)
    pooled = branch_pool(wide(self._value(hidden, keys)), attention, bag)
    head = nn.DenseGeneral(self.num_classes, axis=(-2, -1), name='head')
    return MILOutput(
      only_bag(bag, head(pooled)),
      jnp.mean(attention, -1),
      only_bag(bag, jnp.mean(pooled, 2)),
      aux_logits={
        'instance': (
          only_bag(bag, best[:, :, None]),
          only_bag(bag, some[..., None].astype(best.dtype)),
        )
      },
      extras={
        'class_attention': attention,
        'instance_logits': jnp.where(bag.mask[..., None], instance, 0),
      },
    )

  def _look(self, hidden, critical):
    """q(h) . q(h') of all instances [B, N, D], critical ones [B, S, C, D]."""
    first = Dense(self.query, dtype=self.dtype, name='query')
    wanted = first(critical)
    if self.query_layers == 'linear':
      count, size = math.prod(wanted.shape[1:3]), hidden.shape[-1]
      if count * size < self.query * (size + count):
        # (W h + b) . q = h . (W^T q) + b . q: no query of an instance is made.
        kernel, bias = (
          first.variables['params'][k] for k in ('kernel', 'bias')
        )
        hidden, kernel, bias, wanted = promote_dtype(
          hidden, kernel, bias, wanted, dtype=self.dtype
        )
        looks = jnp.einsum('bscq,dq->bscd', wanted, kernel)
        offset = jnp.einsum('bscq,q->bsc', wanted, bias)
        return jnp.einsum('bnd,bscd->bnsc', hidden, looks) + offset[:, None]
      queries = first(hidden)
    else:
      second = Dense(self.query, dtype=self.dtype, name='query_out')
      rest = lambda h: jnp.tanh(second(nn.relu(h)))
      wanted, queries = rest(wanted), rest(first(hidden))
    return jnp.einsum('bnq,bscq->bnsc', queries, wanted)

  def _value(self, hidden, keys):
    if not self.hidden:
      hidden = bag_dropout(hidden, self.dropout, keys)
    if self.values == 'identity':
      return hidden
    size = hidden.shape[-1]
    value = Dense(size, dtype=self.dtype, name='value')(hidden)
    return nn.relu(value) if self.values == 'relu' else value

  def _check(self):
    if self.query_layers not in ('mlp', 'linear'):
      raise ValueError(
        f"query_layers must be 'mlp' or 'linear', got {self.query_layers!r}"
      )
    if self.values not in ('identity', 'linear', 'relu'):
      raise ValueError(
        f"values must be 'identity', 'linear' or 'relu', got {self.values!r}"
      )

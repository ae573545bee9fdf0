"""XOR attention in plain jnp: the truth, and any order of derivative.

Axes: B sequences, L links, N items, H heads, D and V features. It is the
softmax or silu attention of links to items, and that of items to links.
"""

import jax
import jax.numpy as jnp

from kernels_pallas.rectangle_attention.options import Config, Rows, Tokens
from kernels_pallas.softmax_attention import options, reference

__all__ = ['forward']


def forward(
  config: Config, links: Tokens, history: Tokens, rows: Rows
) -> tuple[jax.Array, jax.Array]:
  """sum_n w(<q_l, k_n>) v_n of each link, sum_l w(<q_n, k_l>) v_l of each item.

  Args:
    config: scale, and how weights come from logits.
    links: [B, L, H, D], [B, L, H, D], [B, L, H, V].
    history: [B, N, H, D], [B, N, H, D], [B, N, H, V].
    rows: integers of the mask.

  Returns:
    [B, L, H, V] and [B, N, H, V].
  """
  both = options.Config(config.scale, weights=config.weights)
  exists = None
  if rows.lengths is not None:
    exists = jnp.arange(history.q.shape[1])[None] < rows.lengths[:, None]
    exists = exists[:, :, None, None]
    # where, not multiply: 0 * NaN beyond the end is NaN.
    history = Tokens(*(jnp.where(exists, x, 0) for x in history))
  of_links, _ = reference.forward(
    both,
    links.q,
    history.k,
    history.v,
    None,
    None,
    options.Rows(None, rows.lengths, rows.links, rows.items),
  )
  of_items, _ = reference.forward(
    both,
    history.q,
    links.k,
    links.v,
    None,
    None,
    options.Rows(None, None, rows.items, rows.links),
  )
  if exists is not None:
    of_items = jnp.where(exists, of_items, 0)
  return of_links, of_items

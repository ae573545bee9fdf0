"""One graph split over devices along its nodes, with borrowed border rows.

Nodes in row-major order of a grid have neighbours that are near in the order
too: one row of patches away. A shard therefore needs only a few rows of each
adjoining shard (its halo), which travel by a collective permute; the whole bag
is never gathered.

Axes: N nodes, S shards, L = N / S rows per shard, K slots, W halo width.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = ['halo_exchange', 'shard_graph']


def shard_graph(
  graph: PatchGraph, shards: int, axis_name: str = 'data'
) -> PatchGraph:
  """Rewrites the neighbours of each shard to its own extended index space.

  Shard s holds the rows [s L, (s + 1) L). Its neighbours are counted in
  [left halo | own rows | right halo], i.e. j becomes j - s L + W, where W is
  the smallest width that reaches every neighbour of every shard. Split the
  result, and every array over nodes, along N over `axis_name`.

  Args:
    graph: concrete graph on the host, leaves [..., N, K].
    shards: number of devices along `axis_name`; divides N.
    axis_name: mesh axis that splits the nodes.

  Returns:
    The graph with rewritten `nbr` and the fields `axis_name` and `halo` set.

  Raises:
    ValueError: if the shards do not divide N, if the graph is already split,
      or if a neighbour lies farther than one shard away.
  """
  nodes = graph.num_nodes
  if graph.axis_name is not None:
    raise ValueError(
      f'the graph is already split over axis {graph.axis_name!r}; pass the '
      'whole graph'
    )
  if shards < 1 or nodes % shards:
    raise ValueError(
      f'shards={shards} must be positive and divide the number of nodes '
      f'{nodes}; pad the graph to a multiple of {max(shards, 1)} first'
    )
  rows = nodes // shards
  nbr, emask = np.asarray(graph.nbr), np.asarray(graph.emask)
  start = (np.arange(nodes, dtype=np.int32) // rows * rows)[:, None]
  local = nbr - start
  reach = np.where(emask, np.maximum(-local, local - rows + 1), 0)
  width = int(max(reach.max(initial=0), 0))
  if width > rows:
    *_, node, slot = np.unravel_index(reach.argmax(), reach.shape)
    raise ValueError(
      f'node {node} has a neighbour {width} rows beyond its shard of {rows} '
      'rows, but a halo reaches the adjoining shard only; use fewer shards or '
      'order the nodes so that neighbours are near (row_major_order)'
    )
  return dataclasses.replace(
    graph,
    nbr=(local + width).astype(np.int32),
    axis_name=axis_name,
    halo=width,
  )


def halo_exchange(x: jax.Array, axis_name: str, width: int) -> jax.Array:
  """Rows of a shard between the border rows of the two adjoining shards.

  Differentiable, and its transpose is again a pair of permutes.

  Args:
    x: [..., L, D], the rows of this shard; call inside `shard_map`.
    axis_name: mesh axis that splits the rows.
    width: W, rows to borrow from each side, 0 <= W <= L.

  Returns:
    [..., W + L + W, D]; zeros beyond the first and the last shard.

  Raises:
    ValueError: if the width is negative or exceeds the rows of a shard.
  """
  rows = x.shape[-2]
  if not 0 <= width <= rows:
    raise ValueError(
      f'halo width={width} must lie in [0, {rows}], the rows of one shard; '
      'use fewer shards'
    )
  if width == 0:
    return x
  shards = jax.lax.axis_size(axis_name)
  up = [(i, i + 1) for i in range(shards - 1)]
  down = [(i + 1, i) for i in range(shards - 1)]
  left = jax.lax.ppermute(x[..., rows - width :, :], axis_name, up)
  right = jax.lax.ppermute(x[..., :width, :], axis_name, down)
  return jnp.concatenate([left, x, right], axis=-2)

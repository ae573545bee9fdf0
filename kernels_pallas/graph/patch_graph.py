"""The patch graph: a symmetric graph as a table of neighbours (ELL).

Axes: N nodes (patches), K slots per node (the largest degree).
"""

import dataclasses

import jax

__all__ = ['PatchGraph']


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PatchGraph:
  """A symmetric graph whose row i lists the neighbours of node i.

  Slot k of row i is the directed edge i -> nbr[i, k]. The graph is symmetric,
  so the opposite edge sits somewhere in row nbr[i, k]; `rev` names its slot:

    nbr[nbr[i, k], rev[i, k]] = i.

  With it a transposed edge weight is a gather, and no operation on the graph
  or derivative of one needs a scatter. Leaves may carry leading batch axes.

  Attributes:
    nbr: [..., N, K] int32, index of the neighbour; the own index in an empty
      slot.
    emask: [..., N, K] bool, True where the slot holds an edge.
    rev: [..., N, K] int32, slot of the opposite edge; 0 in an empty slot.
    axis_name: mesh axis over which the nodes of one graph are split, or None.
      `shard_graph` sets it; the operations then work inside `shard_map` only.
    halo: rows that each shard borrows from either side. With `axis_name`, `nbr`
      counts in [left halo | own rows | right halo], so its values lie in
      [0, N + 2 halo).
  """

  nbr: jax.Array
  emask: jax.Array
  rev: jax.Array
  axis_name: str | None = dataclasses.field(
    default=None, metadata={'static': True}
  )
  halo: int = dataclasses.field(default=0, metadata={'static': True})

  @property
  def num_nodes(self) -> int:
    """N, padding included."""
    return self.nbr.shape[-2]

  @property
  def num_slots(self) -> int:
    """K, the width of the table."""
    return self.nbr.shape[-1]

"""From a list of edges to a table of neighbours, where every builder ends.

Axes: N nodes, K slots per node, E directed edges.
"""

from typing import Any

import numpy as np

from kernels_pallas.graph import PatchGraph

__all__ = ['list_nodes', 'node_mask', 'row_slots', 'table', 'table_width']


def list_nodes(nodes: np.ndarray, limit: int = 5) -> str:
  """The first few nodes, for a message: '3, 17, 21, ...'."""
  names = ', '.join(str(int(node)) for node in nodes[:limit])
  return names + (', ...' if len(nodes) > limit else '')


def node_mask(mask: np.ndarray | None, n: int) -> np.ndarray:
  """[N] bool; all True for None.

  Raises:
    ValueError: on another shape.
  """
  if mask is None:
    return np.ones(n, bool)
  mask = np.asarray(mask, bool)
  if mask.shape != (n,):
    raise ValueError(
      f'mask has shape {mask.shape}, expected ({n},): one flag per patch'
    )
  return mask


def row_slots(tail: np.ndarray, n: int) -> np.ndarray:
  """Position of each edge within its row, for edges sorted by tail."""
  degree = np.bincount(tail, minlength=n)
  first = np.cumsum(degree) - degree
  return np.arange(len(tail)) - first[tail]


def table_width(tail: np.ndarray, n: int, k: int | None) -> int:
  """Slots per node: k, or the largest degree (at least one) for None.

  Args:
    tail: [E] integer, the tails of all directed edges.
    n: number of nodes.
    k: wanted width.

  Raises:
    ValueError: if k is below 1 or a node has more than k neighbours.
  """
  degree = np.bincount(tail, minlength=n)
  largest = int(degree.max(initial=0))
  if k is None:
    return max(largest, 1)
  if k < 1:
    raise ValueError(f'k={k} must be at least 1, the slots per node')
  if largest > k:
    crowded = np.flatnonzero(degree > k)
    raise ValueError(
      f'node {int(degree.argmax())} has degree {largest}, more than the k={k} '
      f'slots of the table ({len(crowded)} nodes exceed it: '
      f'{list_nodes(crowded)}); raise k, or drop edges with truncate=True '
      '(ell_from_edges, radius_graph)'
    )
  return k


def table(
  tail: np.ndarray, head: np.ndarray, n: int, k: int | None
) -> PatchGraph:
  """The table of a symmetric set of edges without loops or repeats.

  Args:
    tail: [E] integer.
    head: [E] integer.
    n: number of nodes.
    k: width of the table; the largest degree for None.

  Returns:
    The graph of NumPy arrays; neighbours of a node ascend.

  Raises:
    ValueError: if a node has more than k neighbours.
  """
  k = table_width(tail, n, k)
  order = np.lexsort((head, tail))
  tail, head = tail[order], head[order]
  slot = row_slots(tail, n)
  # The e-th edge by (head, tail) is the opposite of the e-th by (tail, head).
  opposite = np.lexsort((tail, head))
  nbr = np.repeat(np.arange(n, dtype=np.int32)[:, None], k, 1)
  emask = np.zeros((n, k), bool)
  rev = np.zeros((n, k), np.int32)
  nbr[tail, slot] = head
  emask[tail, slot] = True
  rev[tail, slot] = slot[opposite]
  # NumPy leaves: a builder runs on the host and touches no device.
  leaves: Any = (nbr, emask, rev)
  return PatchGraph(*leaves)

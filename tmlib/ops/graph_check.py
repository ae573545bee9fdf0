"""Checks of a patch graph, and its dense form for small ones.

Axes: N nodes, K slots per node.
"""

import numpy as np

from kernels_pallas.graph import PatchGraph

__all__ = ['to_dense', 'validate_graph']


def validate_graph(graph: PatchGraph, mask: np.ndarray | None = None) -> None:
  """Checks every promise of a `PatchGraph`, on the host.

  Args:
    graph: leaves [..., N, K]; not split over devices.
    mask: [..., N] bool, True where a node is real.

  Raises:
    ValueError: naming the first node that breaks a promise: shapes and dtypes,
      neighbours in range, no self loop, no repeated neighbour, the own index
      and slot 0 in empty slots, `rev` pointing back, and no edge to padding.
  """
  if graph.axis_name is not None:
    raise ValueError(
      f'the graph is split over axis {graph.axis_name!r}; validate the whole '
      'graph before shard_graph'
    )
  leaves = {'nbr': 'integer', 'emask': 'bool', 'rev': 'integer'}
  kinds = {'integer': np.integer, 'bool': np.bool_}
  shape = np.shape(graph.nbr)
  for name, kind in leaves.items():
    leaf = np.asarray(getattr(graph, name))
    right = leaf.shape == shape and np.issubdtype(leaf.dtype, kinds[kind])
    if leaf.ndim < 2 or not right:
      raise ValueError(
        f'graph.{name} is {leaf.dtype}{list(leaf.shape)}, expected {kind} '
        f'[..., N, K] like graph.nbr {list(shape)}'
      )
  *lead, n, k = shape
  batches = int(np.prod(lead))
  nbr, emask, rev = (
    np.asarray(getattr(graph, name)).reshape(batches, n, k) for name in leaves
  )
  own = np.arange(n)[None, :, None]
  _first_break((nbr < 0) | (nbr >= n), f'has a neighbour outside [0, {n})')
  _first_break((rev < 0) | (rev >= k), f'has a slot in rev outside [0, {k})')
  empty = ~emask & ((nbr != own) | (rev != 0))
  _first_break(empty, 'has an empty slot without its own index and rev 0')
  _first_break(emask & (nbr == own), 'is its own neighbour')
  batch = np.arange(len(nbr))[:, None, None]
  back = emask[batch, nbr, rev] & (nbr[batch, nbr, rev] == own)
  _first_break(
    emask & ~back, 'has an edge whose opposite is not where rev says'
  )
  order = np.sort(np.where(emask, nbr, -1 - np.arange(k)), -1)
  _first_break(order[..., 1:] == order[..., :-1], 'has a neighbour twice')
  if mask is not None:
    mask = np.broadcast_to(np.asarray(mask, bool), shape[:-1])
    mask = mask.reshape(batches, n)
    padding = emask & ~(mask[..., None] & mask[batch, nbr])
    _first_break(padding, 'has an edge from or to padding')


def _first_break(broken: np.ndarray, what: str) -> None:
  """Raises on the first True of [B, N, slots]."""
  if broken.any():
    batch, node, slot = np.unravel_index(broken.argmax(), broken.shape)
    where = f' of graph {batch}' if len(broken) > 1 else ''
    raise ValueError(
      f'node {node}{where} {what} (slot {slot}); build the graph with '
      'ell_from_grid, ell_from_edges or knn_graph'
    )


def to_dense(graph: PatchGraph, w: np.ndarray | None = None) -> np.ndarray:
  """The matrix of a small graph: W[i, nbr_ik] = w_ik.

  Args:
    graph: leaves [N, K].
    w: [N, K], a weight per directed edge; ones for None.

  Returns:
    [N, N], dtype of w, float64 for ones.
  """
  nbr, emask = np.asarray(graph.nbr), np.asarray(graph.emask)
  w = np.ones(nbr.shape) if w is None else np.asarray(w)
  dense = np.zeros((len(nbr), len(nbr)), w.dtype)
  row, slot = np.nonzero(emask)
  dense[row, nbr[row, slot]] = w[row, slot]
  return dense

"""Graphs of near neighbours in feature space, exact and deterministic.

Axes: N nodes, P features, E directed edges.
"""

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.ops.ell_table import list_nodes, row_slots, table

__all__ = ['knn_graph']


def _nearest(
  features: np.ndarray, k: int, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
  """Each node and its k nearest others, exactly; ties go to the lower index.

  Matrix products find candidates with a margin for their rounding; distances
  of candidates are then computed directly, so that neither the chunk nor the
  order of summation decides a tie.
  """
  n = len(features)
  # Centred for the products only: it would round differences that are exact.
  centred = features - features.mean(0)
  norms = np.einsum('np,np->n', centred, centred)
  tails, heads = [], []
  for start in range(0, n, chunk):
    rows = np.arange(start, min(start + chunk, n))
    squared = norms[rows, None] + norms - 2 * centred[rows] @ centred.T
    squared[np.arange(len(rows)), rows] = np.inf
    limit = np.partition(squared, k - 1, axis=1)[:, k - 1]
    margin = 1e-12 * (norms[rows] + norms.max() + limit)
    row, head = np.nonzero(squared <= (limit + margin)[:, None])
    tail = rows[row]
    exact = np.empty(len(tail))
    step = max(1, 2**22 // max(features.shape[1], 1))
    for at in range(0, len(tail), step):
      part = slice(at, at + step)
      delta = features[tail[part]] - features[head[part]]
      exact[part] = np.einsum('ep,ep->e', delta, delta)
    order = np.lexsort((head, exact, tail))
    tail, head = tail[order], head[order]
    kept = row_slots(tail, n) < k
    tails.append(tail[kept])
    heads.append(head[kept])
  return np.concatenate(tails), np.concatenate(heads)


def knn_graph(
  features: np.ndarray,
  k: int,
  mutual: bool = True,
  chunk: int = 4096,
) -> PatchGraph:
  """Joins nodes that are near in feature space (Euclidean, exact).

  A k-nearest-neighbour relation is not symmetric. The *mutual* graph keeps the
  edge i - j where each is among the k nearest of the other: every degree is at
  most k, and outliers may stay isolated. The *union* keeps it where either is:
  no node is isolated, but hubs may have any degree, so the table is as wide as
  the largest one. Among equal distances the lower index counts as nearer.

  Takes O(N^2 P) time and 8 chunk N bytes.

  Args:
    features: [N, P], float, finite; real nodes only, no padding.
    k: neighbours per node, at least 1; more than N - 1 means all others.
    mutual: mutual graph or union.
    chunk: rows of the distance matrix held at once.

  Returns:
    The graph; width k where mutual, else the largest degree.

  Raises:
    ValueError: on a wrong shape, k or chunk below 1, or features that are not
      finite.
  """
  features = np.asarray(features)
  if features.ndim != 2:
    raise ValueError(f'features have shape {features.shape}, expected [N, P]')
  if k < 1 or chunk < 1:
    raise ValueError(f'k={k} and chunk={chunk} must be at least 1')
  features = features.astype(np.float64)
  broken = np.flatnonzero(~np.isfinite(features).all(1))
  if len(broken):
    raise ValueError(
      f'features of {len(broken)} nodes are not finite: {list_nodes(broken)}; '
      'drop them before building the graph'
    )
  n = len(features)
  near = min(k, n - 1)
  if near < 1:
    empty = np.zeros(0, np.int64)
    return table(empty, empty, n, k if mutual else 1)
  tail, head = _nearest(features, near, chunk)
  keys, count = np.unique(
    np.concatenate([tail * n + head, head * n + tail]), return_counts=True
  )
  if mutual:
    keys = keys[count == 2]
  tail, head = keys // n, keys % n
  return table(tail, head, n, k if mutual else None)

"""Builds patch graphs on the host: NumPy in, a `PatchGraph` of NumPy out.

Everything is vectorised over nodes and edges, deterministic, and symmetric by
construction, so the table of opposite slots always exists.

Axes: N nodes, K slots per node, E directed edges, P features.
"""

import warnings
from typing import Literal

import numpy as np

from kernels_pallas.graph import PatchGraph

__all__ = [
  'ell_from_edges',
  'ell_from_grid',
  'knn_graph',
]


def _name_nodes(nodes: np.ndarray, limit: int = 5) -> str:
  names = ', '.join(str(int(node)) for node in nodes[:limit])
  return names + (', ...' if len(nodes) > limit else '')


def _degrees(tail: np.ndarray, n: int) -> np.ndarray:
  return np.bincount(tail, minlength=n)


def _slots(tail: np.ndarray, n: int) -> np.ndarray:
  """Position of each edge within its row, for edges sorted by tail."""
  degree = _degrees(tail, n)
  first = np.cumsum(degree) - degree
  return np.arange(len(tail)) - first[tail]


def _table(tail: np.ndarray, head: np.ndarray, n: int, k: int) -> PatchGraph:
  """The table of a symmetric edge set without loops or repeats, degree <= k.

  Args:
    tail: [E] int64.
    head: [E] int64.
    n: number of nodes.
    k: width of the table.
  """
  order = np.lexsort((head, tail))
  tail, head = tail[order], head[order]
  slot = _slots(tail, n)
  # Edges sorted by (head, tail) are the opposites of those by (tail, head).
  opposite = np.lexsort((tail, head))
  nbr = np.repeat(np.arange(n, dtype=np.int32)[:, None], k, 1)
  emask = np.zeros((n, k), bool)
  rev = np.zeros((n, k), np.int32)
  nbr[tail, slot] = head
  emask[tail, slot] = True
  rev[tail, slot] = slot[opposite]
  return PatchGraph(nbr, emask, rev)


def _width(tail: np.ndarray, n: int, k: int | None) -> int:
  """Table width: k, or the largest degree; error where a node exceeds k."""
  degree = _degrees(tail, n)
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
      f'{_name_nodes(crowded)}); raise k, or drop edges (ell_from_edges has '
      'truncate=True)'
    )
  return k


def _node_mask(mask: np.ndarray | None, n: int) -> np.ndarray:
  if mask is None:
    return np.ones(n, bool)
  mask = np.asarray(mask, bool)
  if mask.shape != (n,):
    raise ValueError(f'mask has shape {mask.shape}, expected ({n},)')
  return mask


def ell_from_grid(
  ij: np.ndarray,
  mask: np.ndarray | None = None,
  connectivity: Literal[4, 8] = 8,
  k: int | None = None,
  slide: np.ndarray | None = None,
  duplicates: Literal['error', 'first'] = 'error',
) -> PatchGraph:
  """Joins patches that touch on a grid.

  Args:
    ij: [N, 2] integer, row and column of each patch (see `grid_index`); any
      order, negative values allowed.
    mask: [N] bool, True where a patch is real; padding gets no edges.
    connectivity: 8 (edges and corners) or 4 (edges).
    k: slots per node; `connectivity` by default. Fewer are possible where the
      degrees allow it.
    slide: [N], any label per patch; no edge crosses from one slide to another,
      so slides in one bag may share coordinates.
    duplicates: what to do with two patches on one position: "error", or
      "first" to leave all but the first without edges, with a warning.

  Returns:
    The graph; neighbours of a node appear in ascending order.

  Raises:
    ValueError: on wrong shapes, positions that repeat, an unknown connectivity
      or a node with more than k neighbours.
    TypeError: if the positions are not integers.
  """
  ij = np.asarray(ij)
  if ij.ndim != 2 or ij.shape[1] != 2:
    raise ValueError(f'ij has shape {ij.shape}, expected [N, 2]')
  if not np.issubdtype(ij.dtype, np.integer):
    raise TypeError(
      f'ij has dtype {ij.dtype}, expected integers; convert coordinates with '
      'grid_index(coords, pitch)'
    )
  if connectivity not in (4, 8):
    raise ValueError(f'connectivity={connectivity!r} must be 4 or 8')
  if duplicates not in ('error', 'first'):
    raise ValueError(f'duplicates={duplicates!r} must be "error" or "first"')
  n = len(ij)
  nodes = np.flatnonzero(_node_mask(mask, n))
  labels = None
  if slide is not None:
    slide = np.asarray(slide)
    if slide.shape != (n,):
      raise ValueError(
        f'slide has shape {slide.shape}, expected ({n},): one slide per patch'
      )
    labels = np.unique(slide, return_inverse=True)[1][nodes]
  key, width = _grid_keys(ij[nodes], labels)
  order = np.argsort(key, kind='stable')
  nodes, key = nodes[order], key[order]
  repeated = np.flatnonzero(key[1:] == key[:-1]) + 1
  if len(repeated):
    first, second = nodes[repeated[0] - 1], nodes[repeated[0]]
    message = (
      f'{len(repeated)} patches repeat a position; nodes {first} and {second} '
      f'are both at {ij[second].tolist()}'
    )
    if duplicates == 'error':
      raise ValueError(
        f'{message}; drop the repeats, pass slide=, or duplicates="first"'
      )
    warnings.warn(f'{message}; they get no edges', stacklevel=2)
    nodes, key = np.delete(nodes, repeated), np.delete(key, repeated)
  tail, head = _grid_edges(nodes, key, width, connectivity)
  return _table(
    tail, head, n, _width(tail, n, connectivity if k is None else k)
  )


def _grid_keys(
  ij: np.ndarray, slide: np.ndarray | None
) -> tuple[np.ndarray, int]:
  """One integer per position, and the difference between two grid rows.

  A free border around each slide keeps its neighbours from wrapping around.
  """
  if not len(ij):
    return np.zeros(0, np.int64), 3
  ij = ij.astype(np.int64)
  ij = ij - ij.min(0) + 1
  height, width = (ij.max(0) + 2).tolist()
  key = ij[:, 0] * width + ij[:, 1]
  return (key if slide is None else key + slide * height * width), width


def _grid_edges(
  nodes: np.ndarray, key: np.ndarray, width: int, connectivity: int
) -> tuple[np.ndarray, np.ndarray]:
  """Directed edges between nodes whose sorted keys differ by an offset."""
  offsets = [1, width] + ([width - 1, width + 1] if connectivity == 8 else [])
  pairs = []
  for offset in offsets:
    place = np.searchsorted(key, key + offset)
    found = place < len(key)
    found[found] = key[place[found]] == key[found] + offset
    pairs.append((nodes[found], nodes[place[found]]))
  tail, head = (np.concatenate(part) for part in zip(*pairs, strict=True))
  return np.concatenate([tail, head]), np.concatenate([head, tail])


def ell_from_edges(
  edges: np.ndarray,
  n: int,
  k: int | None = None,
  symmetrise: Literal['warn', 'error'] = 'warn',
  truncate: bool = False,
) -> PatchGraph:
  """A patch graph from a list of edges.

  Repeated edges count once; self loops are dropped.

  Args:
    edges: [E, 2] integer, directed edges (tail, head) with ends in [0, n).
    n: number of nodes.
    k: slots per node; the largest degree by default.
    symmetrise: what to do about an edge without its opposite: "warn" adds the
      opposite with a warning, "error" raises.
    truncate: where a node has more than k edges keep, in the order of the
      list, those which are among the first k of *both* their ends; the result
      stays symmetric. Without it such a node is an error.

  Returns:
    The graph; neighbours of a node appear in ascending order.

  Raises:
    ValueError: on wrong shapes, ends out of range, one-way edges with
      "error", or a node with more than k neighbours.
    TypeError: if the edges are not integers.
  """
  edges = np.asarray(edges)
  if edges.size == 0:
    edges = np.zeros((0, 2), np.int64)
  if edges.ndim != 2 or edges.shape[1] != 2:
    raise ValueError(f'edges have shape {edges.shape}, expected [E, 2]')
  if not np.issubdtype(edges.dtype, np.integer):
    raise TypeError(f'edges have dtype {edges.dtype}, expected integers')
  if symmetrise not in ('warn', 'error'):
    raise ValueError(f'symmetrise={symmetrise!r} must be "warn" or "error"')
  outside = np.flatnonzero(((edges < 0) | (edges >= n)).any(1))
  if len(outside):
    raise ValueError(
      f'edge {int(outside[0])} is {edges[outside[0]].tolist()}, but its ends '
      f'must lie in [0, {n})'
    )
  tail, head = edges.astype(np.int64)[edges[:, 0] != edges[:, 1]].T
  both = np.concatenate([tail * n + head, head * n + tail])
  keys, first = np.unique(both, return_index=True)
  given = np.unique(tail * n + head)
  if len(keys) != len(given):
    lone = np.setdiff1d(keys, given)[0]
    message = (
      f'{len(keys) - len(given)} edges have no opposite, the first is '
      f'{int(lone % n)} -> {int(lone // n)}'
    )
    if symmetrise == 'error':
      raise ValueError(
        f'{message}; patch graphs are symmetric: add the opposites or pass '
        'symmetrise="warn"'
      )
    warnings.warn(f'{message}; their opposites were added', stacklevel=2)
  tail, head = keys // n, keys % n
  if truncate and k is not None:
    # Both directions of an edge share the rank of its first mention.
    rank = first % max(len(both) // 2, 1)
    kept = _keep_first(tail, head, rank, n, k)
    tail, head = tail[kept], head[kept]
  return _table(tail, head, n, _width(tail, n, k))


def _keep_first(
  tail: np.ndarray, head: np.ndarray, rank: np.ndarray, n: int, k: int
) -> np.ndarray:
  """True for edges whose rank is among the k lowest at both of their ends."""
  order = np.lexsort((head, rank, tail))
  kept = np.empty(len(tail), bool)
  kept[order] = _slots(tail[order], n) < k
  opposite = np.empty(len(tail), np.int64)
  opposite[np.lexsort((head, tail))] = np.lexsort((tail, head))
  return kept & kept[opposite]


def _nearest(
  features: np.ndarray, k: int, chunk: int
) -> tuple[np.ndarray, np.ndarray]:
  """Each node and its k nearest others, exactly; ties go to the lower index.

  Matrix products find candidates with a margin for their rounding; distances
  of candidates are then computed directly, so that neither the chunk nor the
  order of summation decides a tie.
  """
  n = len(features)
  norms = np.einsum('np,np->n', features, features)
  tails, heads = [], []
  for start in range(0, n, chunk):
    rows = np.arange(start, min(start + chunk, n))
    squared = norms[rows, None] + norms - 2 * features[rows] @ features.T
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
    kept = _slots(tail, n) < k
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
      f'features of {len(broken)} nodes are not finite: {_name_nodes(broken)}; '
      'drop them before building the graph'
    )
  n = len(features)
  near = min(k, n - 1)
  if near < 1:
    empty = np.zeros(0, np.int64)
    return _table(empty, empty, n, k if mutual else 1)
  tail, head = _nearest(features - features.mean(0), near, chunk)
  keys, count = np.unique(
    np.concatenate([tail * n + head, head * n + tail]), return_counts=True
  )
  if mutual:
    keys = keys[count == 2]
  tail, head = keys // n, keys % n
  return _table(tail, head, n, k if mutual else _width(tail, n, None))

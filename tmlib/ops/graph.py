"""Builds patch graphs on the host: NumPy in, a `PatchGraph` of NumPy out.

Everything is vectorised over nodes and edges, deterministic, and symmetric by
construction, so the table of opposite slots always exists.

Axes: N nodes, K slots per node, E directed edges.
"""

import warnings
from typing import Literal

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.ops.ell_table import node_mask, row_slots, table
from tmlib.ops.graph_check import to_dense, validate_graph
from tmlib.ops.grid import (
  GRID_TOLERANCE,
  check_coords,
  fit_grid,
  grid_index,
  grid_pairs,
  morton_order,
  radius_pairs,
  row_major_order,
)
from tmlib.ops.knn import knn_graph

__all__ = [
  'ell_from_edges',
  'ell_from_grid',
  'graph_from_coords',
  'grid_index',
  'knn_graph',
  'morton_order',
  'radius_graph',
  'row_major_order',
  'to_dense',
  'validate_graph',
]


def _slide_index(slide: np.ndarray | None, n: int) -> np.ndarray | None:
  """Slide labels as [N] int64 from 0."""
  if slide is None:
    return None
  slide = np.asarray(slide)
  if slide.shape != (n,):
    raise ValueError(
      f'slide has shape {slide.shape}, expected ({n},): one slide per patch'
    )
  return np.unique(slide, return_inverse=True)[1].astype(np.int64)


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
    raise ValueError(
      f'ij has shape {ij.shape}, expected [N, 2]: row and column per patch'
    )
  if not np.issubdtype(ij.dtype, np.integer):
    raise TypeError(
      f'ij has dtype {ij.dtype}, expected integers; convert coordinates with '
      'tmlib.ops.graph.grid_index(coords, pitch)'
    )
  if connectivity not in (4, 8):
    raise ValueError(f'connectivity={connectivity!r} must be 4 or 8')
  if duplicates not in ('error', 'first'):
    raise ValueError(f'duplicates={duplicates!r} must be "error" or "first"')
  n = len(ij)
  nodes = np.flatnonzero(node_mask(mask, n))
  slides = _slide_index(slide, n)
  slides = None if slides is None else slides[nodes]
  a, b, first, again = grid_pairs(ij[nodes], slides, connectivity)
  if len(again):
    one, two = nodes[first[0]], nodes[again[0]]
    message = (
      f'{len(again)} patches repeat a position; patches {one} and {two} are '
      f'both at {ij[two].tolist()}'
    )
    if duplicates == 'error':
      raise ValueError(
        f'{message}; drop the repeats, pass slide= if they are on different '
        'slides, or pass duplicates="first"'
      )
    warnings.warn(f'{message}; the later ones get no edges', stacklevel=2)
  if len(nodes) > 1 and not len(a):
    warnings.warn(
      f'{len(nodes)} patches and no two of them touch, so nothing will flow;'
      ' if the positions are pixels, convert them with '
      'tmlib.ops.graph.grid_index(coords, pitch)',
      stacklevel=2,
    )
  tail = nodes[np.concatenate([a, b])]
  head = nodes[np.concatenate([b, a])]
  return table(tail, head, n, connectivity if k is None else k)


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
  edges = _check_edges(edges, n)
  if symmetrise not in ('warn', 'error'):
    raise ValueError(f'symmetrise={symmetrise!r} must be "warn" or "error"')
  tail, head = edges[edges[:, 0] != edges[:, 1]].T
  # Both directions side by side, so that they share the place of an edge's
  # first mention.
  given = np.stack([tail * n + head, head * n + tail], 1).ravel()
  keys, mention = np.unique(given, return_index=True)
  lonely = np.setdiff1d(keys, given[::2])
  if len(lonely):
    message = (
      f'{len(lonely)} edges have no opposite, for example '
      f'{lonely[0] % n} -> {lonely[0] // n}'
    )
    if symmetrise == 'error':
      raise ValueError(
        f'{message}; patch graphs are symmetric: add the opposites, or pass '
        'symmetrise="warn"'
      )
    warnings.warn(f'{message}; their opposites were added', stacklevel=2)
  ends = keys // n, keys % n
  if truncate and k is not None:
    ends = _keep_first(*ends, mention // 2, n, k)
  return table(*ends, n, k)


def _check_edges(edges: np.ndarray, n: int) -> np.ndarray:
  edges = np.asarray(edges)
  if edges.size == 0:
    return np.zeros((0, 2), np.int64)
  if edges.ndim != 2 or edges.shape[1] != 2:
    raise ValueError(
      f'edges have shape {edges.shape}, expected [E, 2]: tail and head per '
      'edge (transpose an array [2, E])'
    )
  if not np.issubdtype(edges.dtype, np.integer):
    raise TypeError(f'edges have dtype {edges.dtype}, expected integers')
  outside = np.flatnonzero(((edges < 0) | (edges >= n)).any(1))
  if len(outside):
    raise ValueError(
      f'edge {outside[0]} is {edges[outside[0]].tolist()}, but its ends must '
      f'lie in [0, {n})'
    )
  return edges.astype(np.int64)


def _keep_first(
  tail: np.ndarray, head: np.ndarray, place: np.ndarray, n: int, k: int
) -> tuple[np.ndarray, np.ndarray]:
  """Edges (sorted, symmetric) among the k of lowest place at both ends."""
  order = np.lexsort((head, place, tail))
  kept = np.empty(len(tail), bool)
  kept[order] = row_slots(tail[order], n) < k
  kept &= kept[np.lexsort((tail, head))]
  return tail[kept], head[kept]


def radius_graph(
  coords: np.ndarray,
  radius: float,
  k: int | None = None,
  mask: np.ndarray | None = None,
  slide: np.ndarray | None = None,
  truncate: bool = False,
) -> PatchGraph:
  """Joins patches at most `radius` apart, for positions on no grid.

  Args:
    coords: [N, 2], positions in the unit of `radius`.
    radius: largest distance of two neighbours, positive.
    k: slots per node; the largest degree by default.
    mask: [N] bool, True where a patch is real; padding gets no edges.
    slide: [N], any label per patch; no edge crosses between slides.
    truncate: where a node has more than k neighbours keep the edges that are
      among the k shortest of both their ends, instead of raising.

  Returns:
    The graph; neighbours of a node appear in ascending order.

  Raises:
    ValueError: on wrong shapes, a radius that is not positive, or a node with
      more than k neighbours.
  """
  if not (np.isfinite(radius) and radius > 0):
    raise ValueError(f'radius={radius} must be positive and finite')
  n = len(coords)
  nodes = np.flatnonzero(node_mask(mask, n))
  points = check_coords(np.asarray(coords)[nodes])
  slides = _slide_index(slide, n)
  slides = None if slides is None else slides[nodes]
  a, b, distance = radius_pairs(points, radius, slides)
  a, b = nodes[a], nodes[b]
  order = np.lexsort((np.maximum(a, b), np.minimum(a, b), distance))
  one_way = np.stack([a, b], 1)[order]
  both = np.concatenate([one_way, one_way[:, ::-1]], 1).reshape(-1, 2)
  return ell_from_edges(both, n, k, truncate=truncate)


def graph_from_coords(
  coords: np.ndarray,
  num_nodes: int | None = None,
  pitch: float | tuple[float, float] | None = None,
  mask: np.ndarray | None = None,
  connectivity: Literal[4, 8] = 8,
  k: int | None = None,
  slide: np.ndarray | None = None,
  duplicates: Literal['error', 'first'] = 'error',
) -> PatchGraph:
  """A graph from raw coordinates: grid neighbours where there is a grid.

  Positions on no grid fall back, with a warning, to `radius_graph` with 1.5
  times the median distance to the nearest patch and the k shortest edges.

  Args:
    coords: [N, 2], pixels or any unit.
    num_nodes: number of patches (rows of the features) to check against.
    pitch: see `grid_index`.
    mask: [N] bool, True where a patch is real.
    connectivity: see `ell_from_grid`.
    k: slots per node; `connectivity` by default.
    slide: [N], any label per patch.
    duplicates: see `ell_from_grid`.

  Returns:
    The graph.

  Raises:
    ValueError: on lengths that disagree, and as `ell_from_grid` does.
  """
  n = len(coords)
  valid = node_mask(mask, n)
  filled = np.where(valid[:, None], np.asarray(coords, float), 0)
  check_coords(filled if n else coords, num_nodes)
  slides = _slide_index(slide, n)
  ij = np.zeros((n, 2), np.int32)
  off = np.zeros(n)
  for label in [0] if slides is None else np.unique(slides):
    part = valid if slides is None else valid & (slides == label)
    ij[part], off[part] = fit_grid(filled[part], pitch)
  if off.max(initial=0) <= GRID_TOLERANCE:
    return ell_from_grid(ij, valid, connectivity, k, slides, duplicates)
  worst = int(off.argmax())
  radius = 1.5 * _spacing(
    filled[valid], None if slides is None else slides[valid]
  )
  warnings.warn(
    f'coords lie on no grid (patch {worst} at {filled[worst].tolist()} is '
    f'{off[worst]:.2f} pitches off); joining patches within {radius:.6g} '
    'instead. Pass pitch= if there is a grid',
    stacklevel=2,
  )
  k = connectivity if k is None else k
  return radius_graph(filled, radius, k, valid, slides, truncate=True)


def _spacing(coords: np.ndarray, slide: np.ndarray | None) -> float:
  """Median distance to the nearest other patch."""
  area = np.prod(np.maximum(np.ptp(coords, 0), np.ptp(coords) / len(coords)))
  radius = 2 * float(np.sqrt(area / len(coords)))
  nearest = np.full(len(coords), np.inf)
  a, b, distance = radius_pairs(coords, radius, slide)
  apart = distance > 0
  for end in (a[apart], b[apart]):
    np.minimum.at(nearest, end, distance[apart])
  found = nearest[np.isfinite(nearest)]
  return float(np.median(found)) if len(found) else radius

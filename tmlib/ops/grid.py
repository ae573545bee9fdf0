"""Positions of patches: grid indices, orders along a grid, and near pairs.

Host functions, vectorised NumPy.

Axes: N patches, E undirected pairs.
"""

import numpy as np

__all__ = [
  'GRID_TOLERANCE',
  'check_coords',
  'fit_grid',
  'grid_index',
  'grid_pairs',
  'infer_pitch',
  'morton_order',
  'radius_pairs',
  'row_major_order',
]

# How far from its cell's centre, in pitches, a patch may lie.
GRID_TOLERANCE = 0.25


def check_coords(
  coords: np.ndarray, num_nodes: int | None = None
) -> np.ndarray:
  """[N, 2] float64 coordinates, checked.

  Args:
    coords: [N, 2].
    num_nodes: number of patches that they must describe.

  Raises:
    ValueError: on another shape or length, or where a coordinate is not
      finite.
  """
  coords = np.asarray(coords)
  if coords.ndim != 2 or coords.shape[1] != 2:
    raise ValueError(
      f'coords have shape {coords.shape}, expected [N, 2]: one position per '
      'patch'
    )
  if num_nodes is not None and len(coords) != num_nodes:
    raise ValueError(
      f'coords have {len(coords)} rows but there are {num_nodes} patches; both '
      'must come from the same file, in the same order'
    )
  coords = coords.astype(np.float64)
  broken = np.flatnonzero(~np.isfinite(coords).all(1))
  if len(broken):
    raise ValueError(
      f'coords of patch {broken[0]} are {coords[broken[0]].tolist()}, expected '
      'finite numbers'
    )
  return coords


def infer_pitch(coords: np.ndarray) -> float:
  """The most common positive step to the next patch of a row or column.

  Args:
    coords: [N, 2], finite.

  Returns:
    The pitch, in the unit of the coordinates; 1 where no two patches differ.
  """
  steps = []
  for axis in (0, 1):
    line = coords[np.lexsort((coords[:, axis], coords[:, 1 - axis]))]
    delta = np.diff(line, axis=0)
    steps.append(delta[delta[:, 1 - axis] == 0, axis])
  steps = np.concatenate(steps)
  steps = steps[steps > 0]
  if not len(steps):
    # No two patches share a row or a column: steps between rows and columns.
    steps = np.concatenate([np.diff(np.unique(c)) for c in coords.T])
  if not len(steps):
    return 1.0
  unit = max(steps.max() * 1e-6, np.finfo(np.float64).tiny)
  values, first, count = np.unique(
    np.round(steps / unit), return_index=True, return_counts=True
  )
  return float(steps[first[count.argmax()]])


def fit_grid(
  coords: np.ndarray, pitch: float | tuple[float, float] | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """The grid index of each patch, and how far the patch is off its cell.

  Args:
    coords: [N, 2] float64, finite.
    pitch: see `grid_index`.

  Returns:
    index: [N, 2] int32, smallest value 0 on each axis.
    residual: [N] float64, largest distance from the centre in pitches.

  Raises:
    ValueError: if the pitch is not positive.
  """
  if not len(coords):
    return np.zeros((0, 2), np.int32), np.zeros(0)
  step = np.asarray(infer_pitch(coords) if pitch is None else pitch, float)
  if step.shape not in ((), (2,)) or not (np.isfinite(step) & (step > 0)).all():
    raise ValueError(
      f'pitch={pitch!r} must be a positive number, or one per axis'
    )
  # From the median patch, so that large coordinates lose no digits; the mean
  # phase on the circle centres cells that jitter.
  scaled = (coords - np.median(coords, 0)) / step
  phase = np.angle(np.exp(2j * np.pi * scaled).mean(0)) / (2 * np.pi)
  index = np.rint(scaled - phase)
  residual = np.abs(scaled - phase - index).max(1)
  return (index - index.min(0)).astype(np.int32), residual


def grid_index(
  coords: np.ndarray, pitch: float | tuple[float, float] | None = None
) -> np.ndarray:
  """Grid index of each patch: round((coords - origin) / pitch).

  Rounds, never truncates, around an origin fitted to all patches; negative
  coordinates and jitter below a quarter pitch are fine. The result counts from
  the smallest row and column.

  Args:
    coords: [N, 2], pixels or any unit.
    pitch: distance between neighbouring patches, one number or one per axis;
      None takes the most common positive step between patches that follow each
      other in a row or column.

  Returns:
    [N, 2] int32, non-negative.

  Raises:
    ValueError: on a wrong shape, values that are not finite, a pitch that is
      not positive, or coordinates that lie on no grid of that pitch.
  """
  coords = check_coords(coords)
  index, residual = fit_grid(coords, pitch)
  if len(coords) and residual.max() > GRID_TOLERANCE:
    worst = int(residual.argmax())
    raise ValueError(
      f'coords lie on no grid: patch {worst} at {coords[worst].tolist()} is '
      f'{residual[worst]:.2f} pitches off its cell (at most {GRID_TOLERANCE}); '
      'pass the right pitch, or use radius_graph or graph_from_coords'
    )
  return index


def row_major_order(
  ij: np.ndarray, slide: np.ndarray | None = None
) -> np.ndarray:
  """The permutation that sorts patches by slide, row and column.

  In this order neighbours are at most about one row apart, which keeps the
  halo of a graph that is split over devices small.

  Args:
    ij: [N, 2], row and column of each patch.
    slide: [N], any label per patch.

  Returns:
    [N] int64; apply it to features and positions *before* building the graph.
  """
  ij = np.asarray(ij)
  keys = (ij[:, 1], ij[:, 0])
  return np.lexsort(keys if slide is None else (*keys, np.asarray(slide)))


def _spread(value: np.ndarray) -> np.ndarray:
  """Puts a zero bit between the lower 32 bits of uint64 values."""
  for shift, keep in (
    (16, 0x0000FFFF0000FFFF),
    (8, 0x00FF00FF00FF00FF),
    (4, 0x0F0F0F0F0F0F0F0F),
    (2, 0x3333333333333333),
    (1, 0x5555555555555555),
  ):
    value = (value | value << np.uint64(shift)) & np.uint64(keep)
  return value


def morton_order(ij: np.ndarray) -> np.ndarray:
  """The permutation that sorts patches along a Z-order curve.

  Near patches stay near in the order on average, which helps caches and tiles;
  single neighbours may be far apart, so a split graph wants `row_major_order`.

  Args:
    ij: [N, 2] integer, row and column of each patch; negative values allowed.

  Returns:
    [N] int64.
  """
  ij = np.asarray(ij)
  if not len(ij):
    return np.zeros(0, np.int64)
  row, column = (ij.astype(np.int64) - ij.min(0)).astype(np.uint64).T
  return np.argsort(
    _spread(row) << np.uint64(1) | _spread(column), kind='stable'
  )


def _keys(cell: np.ndarray, slide: np.ndarray | None) -> tuple[np.ndarray, int]:
  """One integer per cell, and the difference between two rows of cells.

  A free border around each slide keeps its neighbours from wrapping around.
  """
  if not len(cell):
    return np.zeros(0, np.int64), 3
  cell = cell.astype(np.int64)
  cell = cell - cell.min(0) + 1
  height, width = (int(size) + 2 for size in cell.max(0))
  slides = 1 if slide is None else int(slide.max()) + 1
  if slides * height * width > np.iinfo(np.int64).max:
    raise ValueError(
      f'a grid of {slides} x {height} x {width} cells has too many to number; '
      'check the pitch or radius'
    )
  key = cell[:, 0] * width + cell[:, 1]
  return (key if slide is None else key + slide * height * width), width


def grid_pairs(
  ij: np.ndarray, slide: np.ndarray | None, connectivity: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
  """Pairs of patches that touch, and patches that repeat a position.

  Args:
    ij: [N, 2] integer, row and column.
    slide: [N] int64, counted from 0, or None.
    connectivity: 4 or 8.

  Returns:
    a: [E] int64, one end of each pair.
    b: [E] int64, the other end.
    first: [F] int64, the patch whose position a later one repeats.
    again: [F] int64, the later one; it takes part in no pair.
  """
  key, width = _keys(ij, slide)
  nodes = np.argsort(key, kind='stable')
  key = key[nodes]
  repeats = np.flatnonzero(key[1:] == key[:-1]) + 1
  first, again = nodes[np.searchsorted(key, key[repeats])], nodes[repeats]
  nodes, key = np.delete(nodes, repeats), np.delete(key, repeats)
  offsets = [1, width] + ([width - 1, width + 1] if connectivity == 8 else [])
  ends = []
  for offset in offsets:
    place = np.searchsorted(key, key + offset)
    found = place < len(key)
    found[found] = key[place[found]] == key[found] + offset
    ends.append((nodes[found], nodes[place[found]]))
  a, b = (np.concatenate(end) for end in zip(*ends, strict=True))
  return a, b, first, again


def radius_pairs(
  coords: np.ndarray, radius: float, slide: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """All pairs at most `radius` apart, by hashing into cells of that size.

  Args:
    coords: [N, 2] float64.
    radius: positive.
    slide: [N] int64, counted from 0; pairs stay within a slide.

  Returns:
    a: [E] int64, one end of each pair.
    b: [E] int64, the other end.
    distance: [E] float64.
  """
  cell = np.floor((coords - coords.min(0, initial=np.inf)) / radius)
  key, width = _keys(cell, slide)
  nodes = np.argsort(key, kind='stable')
  key = key[nodes]
  ends = []
  for offset in (0, 1, width - 1, width, width + 1):
    start = np.searchsorted(key, key + offset)
    stop = np.searchsorted(key, key + offset, side='right')
    if offset == 0:
      # Within a cell each pair once: only patches further down the order.
      start = np.arange(1, len(key) + 1)
    count = stop - start
    before = np.cumsum(count) - count
    place = np.arange(count.sum()) + np.repeat(start - before, count)
    a, b = np.repeat(nodes, count), nodes[place]
    distance = np.hypot(*(coords[a] - coords[b]).T)
    near = distance <= radius
    ends.append((a[near], b[near], distance[near]))
  a, b, distance = (np.concatenate(end) for end in zip(*ends, strict=True))
  return a, b, distance

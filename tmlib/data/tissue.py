"""Simulated tissue: compartments on a grid, with the truth kept beside.

Every task is matched in composition: the number of patches of each kind has one
distribution, whatever the label, so a model that ignores positions is at
chance. Patches touch where they share an edge (four neighbours).

Axes: n bags, N patches, H rows and W columns of the grid (N = H W), P features,
Q dimensions of a text space, M kinds of tissue.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = [
  'PAIRINGS',
  'Tissue',
  'capsule',
  'concept_rows',
  'contacts',
  'grid_positions',
  'islands',
  'noisy_one_hot',
  'read_positions',
  'text_like',
  'touching_blobs',
  'touching_pairs',
]

STROMA, TUMOUR, IMMUNE, CAPSULE = range(4)


class Tissue(NamedTuple):
  """Bags on one grid.

  Attributes:
    kinds: [n, N], int32, true compartment of each patch.
    labels: [n], int32.
    positions: [N, 2], int32, row and column.
    names: M names of the kinds.
  """

  kinds: np.ndarray
  labels: np.ndarray
  positions: np.ndarray
  names: tuple[str, ...]


def grid_positions(height: int, width: int) -> np.ndarray:
  """Positions of a full grid, row by row: [H W, 2] int32."""
  rows, columns = np.mgrid[:height, :width]
  return np.stack([rows.ravel(), columns.ravel()], 1).astype(np.int32)


def contacts(
  kinds: np.ndarray, height: int, width: int, size: int
) -> np.ndarray:
  """Counts edges between kinds.

  Args:
    kinds: [n, H W], int in [0, M).
    height: H.
    width: W.
    size: M.

  Returns:
    [n, M, M], int64, symmetric; the diagonal counts edges within a kind once.
  """
  grid = np.asarray(kinds).reshape(-1, height, width)
  table = np.zeros((len(grid), size, size), np.int64)
  bag = np.arange(len(grid))[:, None, None]
  for a, b in (
    (grid[:, 1:], grid[:, :-1]),
    (grid[:, :, 1:], grid[:, :, :-1]),
  ):
    low, high = np.minimum(a, b), np.maximum(a, b)
    np.add.at(table, (np.broadcast_to(bag, a.shape), low, high), 1)
  upper = np.triu(table, 1)
  return table + np.swapaxes(upper, 1, 2)


def _balanced(n: int, classes: int, rng: np.random.Generator) -> np.ndarray:
  return rng.permutation(np.arange(n) % classes).astype(np.int32)


def touching_blobs(
  n: int, *, seed: int, size: int = 14, radius: int = 3
) -> Tissue:
  """One tumour and one immune disc in stroma; the label is whether they touch.

  Args:
    n: bags; labels are balanced to within one.
    seed: of everything.
    size: H = W.
    radius: of both discs, patches; they have equal, fixed sizes.

  Returns:
    Tissue with kinds stroma, tumour, immune.

  Raises:
    ValueError: a grid too small for two discs that do not touch.
  """
  span = size - 2 * radius
  if radius < 1 or span <= 2 * radius:
    raise ValueError(
      f'size={size} is too small for two discs of radius={radius} apart; it '
      f'must exceed {4 * radius}'
    )
  rng = np.random.default_rng(seed)
  positions = grid_positions(size, size)
  centres = grid_positions(span, span) + radius
  square = np.sum((positions[None] - centres[:, None]) ** 2, -1)
  disc = square <= radius**2 + radius / 2
  grid = disc.reshape(-1, size, size)
  wide = grid.copy()
  wide[:, 1:] |= grid[:, :-1]
  wide[:, :-1] |= grid[:, 1:]
  wide[:, :, 1:] |= grid[:, :, :-1]
  wide[:, :, :-1] |= grid[:, :, 1:]
  share = disc.astype(np.int32)
  overlap = share @ share.T > 0
  near = wide.reshape(len(disc), -1).astype(np.int32) @ share.T > 0
  labels = _balanced(n, 2, rng)
  pairs = [np.argwhere(~near), np.argwhere(near & ~overlap)]
  chosen = np.stack([pairs[y][rng.integers(len(pairs[y]))] for y in labels])
  kinds = np.zeros((n, size * size), np.int32)
  kinds[disc[chosen[:, 0]]] = TUMOUR
  kinds[disc[chosen[:, 1]]] = IMMUNE
  return Tissue(kinds, labels, positions, ('stroma', 'tumour', 'immune'))


def _heights(n, width, low, high, rng):
  """Wavy boundaries [n, W]: neighbours differ by at most one."""
  h = np.empty((n, width), np.int64)
  h[:, 0] = rng.integers(low, high + 1, n)
  for j in range(1, width):
    step = rng.integers(-1, 2, n)
    h[:, j] = np.clip(h[:, j - 1] + step, low, high)
  return h


def _stack(heights, widths, order, size):
  """Kinds [H, W] of one bag: `heights` rows of order[0], then layers.

  Args:
    heights: [W].
    widths: of the layers order[1], order[2], ...; the last one has no end.
    order: kinds from the top row down.
    size: H.
  """
  row, edge = np.arange(size)[:, None], heights[None]
  grid = np.full((size, len(heights)), order[0], np.int32)
  for kind, width in zip(order[1:], widths, strict=True):
    grid[row >= edge] = kind
    edge = edge + width
  return grid


def _flip(grid, rng):
  """One of the four symmetries of a rectangle."""
  up, left = 1 - 2 * rng.integers(0, 2, 2)
  return grid[::up, ::left]


def capsule(
  n: int, *, seed: int, size: int = 12, thickness: int = 1, cord: int = 2
) -> Tissue:
  r"""Immune-excluded or infiltrated: does the capsule part the two tissues?

  Cords of cells, `cord` patches thick, lie in a capsule of `thickness` patches.
  Cells are tumour or immune in stripes as wide as a cord with its capsule.
  Label 0, excluded: the stripes run along the cords, so a capsule lies on every
  border between tumour and immune cells. Label 1, infiltrated: they run across,
  so that both meet inside every cord and touch.

  Cells alone look the same in both, up to a turn, and so does the capsule
  alone; the counts of all kinds have one distribution. Only how the one lies to
  the other tells the label.

  Args:
    n: bags; labels are balanced to within one.
    seed: of everything.
    size: H = W, a multiple of cord + thickness.
    thickness: of the capsule, patches.
    cord: thickness of a cord, patches.

  Returns:
    Tissue with kinds stroma (absent), tumour, immune, capsule.

  Raises:
    ValueError: a size that the layers do not divide, or fewer than two cords.
  """
  period = cord + thickness
  if thickness < 1 or cord < 1 or size % period or size < 2 * period:
    raise ValueError(
      f'size={size} must be a multiple of cord + thickness = {cord} + '
      f'{thickness}, at least twice that, and both at least 1'
    )
  rng = np.random.default_rng(seed)
  labels = _balanced(n, 2, rng)
  count, place = size // period, np.arange(size)
  kinds = np.empty((n, size, size), np.int32)
  for b in range(n):
    # As many stripes of either kind as can be.
    stripes = (np.arange(count) + rng.integers(2)) % 2
    cells = np.where(rng.permutation(stripes), IMMUNE, TUMOUR)
    along, across = place + rng.integers(0, period, 2)[:, None]
    cells = cells[(across if labels[b] else along) // period % count]
    cells = cells[None] if labels[b] else cells[:, None]
    sheath = (along % period >= cord)[:, None]
    grid = np.where(sheath, CAPSULE, np.broadcast_to(cells, (size, size)))
    kinds[b] = grid.T if rng.integers(2) else grid
  names = ('stroma', 'tumour', 'immune', 'capsule')
  return Tissue(kinds.reshape(n, -1), labels, grid_positions(size, size), names)


# The three ways to pair the kinds 1, 2, 3, 4.
PAIRINGS = (((1, 2), (3, 4)), ((1, 3), (2, 4)), ((1, 4), (2, 3)))


def touching_pairs(
  n: int,
  *,
  seed: int,
  height: int = 16,
  width: int = 8,
  thickness: int = 2,
  gap: int = 2,
  classes: int = 3,
) -> Tissue:
  """Four kinds in stroma, each touching one other: the label is which pairs.

  Two bands, each of two layers, run through the tissue. Label 0: a | b and
  c | d touch; label 1: a | c and b | d; label 2: a | d and b | c. All kinds
  have the same number of patches in every bag.

  Args:
    n: bags; labels are balanced to within one.
    seed: of everything.
    height: H, across the bands.
    width: W, along them.
    thickness: of every layer, patches.
    gap: of stroma between the bands, patches.
    classes: labels to draw from, 2 or 3.

  Returns:
    Tissue with kinds stroma, a, b, c, d.

  Raises:
    ValueError: a grid too small for the layers, or other classes.
  """
  if classes not in (2, 3):
    raise ValueError(f'classes={classes} must be 2 or 3')
  total = 4 * thickness + gap
  if thickness < 1 or gap < 1 or height < total + 2:
    raise ValueError(
      f'height={height} is too small for four layers of thickness={thickness} '
      f'and a gap={gap}; it must be at least {total + 2}'
    )
  rng = np.random.default_rng(seed)
  labels = _balanced(n, classes, rng)
  heights = _heights(n, width, 1, height - total - 1, rng)
  kinds = np.empty((n, height * width), np.int32)
  for b in range(n):
    bands = [rng.permutation(pair) for pair in PAIRINGS[labels[b]]]
    first, second = (bands[k] for k in rng.permutation(2))
    order = (0, *first, 0, *second, 0)
    w = thickness
    grid = _stack(heights[b], (w, w, gap, w, w, 0), order, height)
    kinds[b] = _flip(grid, rng).ravel()
  names = ('stroma', 'a', 'b', 'c', 'd')
  return Tissue(kinds, labels, grid_positions(height, width), names)


def noisy_one_hot(
  kinds: np.ndarray,
  *,
  dim: int,
  noise: float,
  seed: int,
  contrast: Mapping[int, float] | None = None,
) -> np.ndarray:
  """Features c_kind e_kind + noise * N(0, I).

  Args:
    kinds: [..., N], int in [0, P).
    dim: P; dimensions beyond the kinds hold noise only.
    noise: standard deviation; the distance between kinds is sqrt(2).
    seed: of the noise.
    contrast: {kind: c}; one where absent.

  Returns:
    [..., N, P], float32.

  Raises:
    ValueError: fewer dimensions than kinds, or negative noise.
  """
  kinds = np.asarray(kinds)
  if dim <= kinds.max(initial=0):
    raise ValueError(
      f'dim={dim} cannot tell {kinds.max() + 1} kinds apart; raise it'
    )
  if noise < 0:
    raise ValueError(f'noise={noise} must be at least 0')
  rng = np.random.default_rng(seed)
  x = noise * rng.standard_normal((*kinds.shape, dim), np.float32)
  means = np.eye(dim, dtype=np.float32)
  for kind, scale in (contrast or {}).items():
    means[kind] *= scale
  return x + means[kinds]


def concept_rows(
  size: int, *, dim: int, seed: int, cone: float = 1.0
) -> np.ndarray:
  """A concept matrix as a text encoder gives it: unit rows in a narrow cone.

  Args:
    size: M.
    dim: Q.
    seed: of the rows.
    cone: length of the direction that all rows share, against one for their
      own; larger rows are more alike, as texts of one topic are.

  Returns:
    [M, Q], float32, unit rows.
  """
  rng = np.random.default_rng(seed)
  own = _unit(rng.standard_normal((size, dim)))
  shared = _unit(rng.standard_normal(dim))
  return _unit(own + cone * shared).astype(np.float32)


def text_like(
  kinds: np.ndarray, rows: np.ndarray, *, noise: float, seed: int
) -> np.ndarray:
  """Patch embeddings in a text space, near the row of their kind.

  c = unit(T_kind + noise * g / sqrt(Q)), g ~ N(0, I): noise is the length of
  the disturbance against one for the row.

  Args:
    kinds: [..., N], int in [0, M).
    rows: [M, Q], unit rows T.
    noise: at least 0.
    seed: of the noise.

  Returns:
    [..., N, Q], float32, unit rows.

  Raises:
    ValueError: a kind without a row, or negative noise.
  """
  kinds, size = np.asarray(kinds), len(rows)
  if kinds.max(initial=0) >= size:
    raise ValueError(
      f'kinds go up to {kinds.max()} but rows has {size}; give a row per kind'
    )
  if noise < 0:
    raise ValueError(f'noise={noise} must be at least 0')
  rng = np.random.default_rng(seed)
  shape = (*kinds.shape, rows.shape[1])
  g = rng.standard_normal(shape, np.float32) / np.sqrt(shape[-1])
  return _unit(rows[kinds] + noise * g).astype(np.float32)


def islands(
  positions: np.ndarray,
  *,
  seed: int,
  count: int = 12,
  radius: float = 8.0,
  rim: float = 4.0,
) -> np.ndarray:
  """Plants tumour islands with immune rims on any positions.

  Args:
    positions: [N, 2], grid positions of a slide.
    seed: of the centres.
    count: of islands.
    radius: of an island, patches.
    rim: width of the rim; every second island has none.

  Returns:
    [N], int32: stroma, tumour or immune.

  Raises:
    ValueError: fewer positions than islands.
  """
  positions = np.asarray(positions, np.float64)
  if len(positions) < count:
    raise ValueError(
      f'{len(positions)} positions cannot hold count={count} islands'
    )
  rng = np.random.default_rng(seed)
  kinds = np.zeros(len(positions), np.int32)
  centres = rng.choice(len(positions), count, replace=False)
  for number, centre in enumerate(centres):
    gap = np.linalg.norm(positions - positions[centre], axis=1)
    if number % 2:
      ring = (gap > radius) & (gap <= radius + rim)
      kinds[ring & (kinds == STROMA)] = IMMUNE
    kinds[gap <= radius] = TUMOUR
  return kinds


def read_positions(path: str | Path) -> np.ndarray:
  """Patch positions from a CSV with columns X and Y.

  Args:
    path: of the file, such as a node list of a published slide graph.

  Returns:
    [N, 2], int32, row (Y) and column (X).

  Raises:
    FileNotFoundError: no such file.
    ValueError: no such columns, no row, or positions that are not integers.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(
      f'no file of patch positions at {path}; it is a CSV with the columns X '
      'and Y, one patch per row'
    )
  with path.open(newline='') as file:
    rows = list(csv.DictReader(file))
  if not rows or not {'X', 'Y'} <= set(rows[0]):
    found = sorted(str(name) for name in (rows[0] if rows else ()))
    raise ValueError(
      f'{path} must have rows and the columns X and Y; it has {len(rows)} rows '
      f'and the columns {found}'
    )
  try:
    return np.array([[int(row['Y']), int(row['X'])] for row in rows], np.int32)
  except (TypeError, ValueError) as error:
    raise ValueError(
      f'{path}: X and Y must be integers (patch numbers, not pixels): {error}'
    ) from error


def _unit(x: np.ndarray) -> np.ndarray:
  return x / np.linalg.norm(x, axis=-1, keepdims=True)

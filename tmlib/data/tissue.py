"""Simulated tissue: compartments on a grid, with the truth kept beside.

Every task is matched in composition: the number of patches of each kind has one
distribution, whatever the label, so a model that ignores positions is at
chance. Patches touch where they share an edge (four neighbours).

Axes: n bags, N patches, H rows and W columns of the grid (N = H W), P features,
Q dimensions of a text space, M kinds of tissue.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

__all__ = [
  'Tissue',
  'capsule',
  'contacts',
  'grid_positions',
  'layers_on_positions',
  'noisy_one_hot',
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


def contacts(kinds: np.ndarray, height: int, width: int, size: int):
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
  """Kinds [H, W] of one bag: from `heights` upwards, layers in `order`."""
  row = np.arange(size)[:, None]
  edge = heights[None]
  grid = np.full((size, len(heights)), order[0], np.int32)
  for kind, width in zip(order[1:], widths, strict=True):
    grid[row >= edge] = kind
    edge = edge + width
  return grid


def _turn(grid, rng):
  """One of the eight symmetries of the square."""
  grid = np.rot90(grid, rng.integers(4))
  return grid.T if rng.integers(2) else grid


def capsule(
  n: int, *, seed: int, size: int = 14, thickness: int = 1
) -> Tissue:
  r"""Immune-excluded or infiltrated: does a capsule still part them?

  Tumour lies on one side of a wavy border and immune cells on the other. With
  label 0 a capsule parts them, T^h C^w I^*. With label 1 it has been breached
  from one side, and has as many patches as before: a layer as thick as the
  capsule lies between it and the other compartment, T^h I^w C^w I^* or T^(h -
  w) C^w T^w I^*. A column with border h has h patches of tumour and w of
  capsule in all three, and the capsule sits, on average, in one place: only the
  order of thin layers tells the label.

  Args:
    n: bags; labels are balanced to within one.
    seed: of everything.
    size: H = W.
    thickness: w, patches.

  Returns:
    Tissue with kinds stroma (absent), tumour, immune, capsule.

  Raises:
    ValueError: a grid too small for the layers.
  """
  w = thickness
  low, high = 2 * w + 1, size - 2 * w - 1
  if w < 1 or high - low < 1:
    raise ValueError(
      f'size={size} is too small for layers of thickness={w}; it must exceed '
      f'{4 * w + 2}'
    )
  rng = np.random.default_rng(seed)
  labels = _balanced(n, 2, rng)
  side = rng.integers(0, 2, n)
  heights = _heights(n, size, low, high, rng)
  kinds = np.empty((n, size * size), np.int32)
  t, i, c = TUMOUR, IMMUNE, CAPSULE
  for b in range(n):
    h = heights[b]
    if not labels[b]:
      grid = _stack(h, (w, 0), (t, c, i), size)
    elif side[b]:
      grid = _stack(h, (w, w, 0), (t, i, c, i), size)
    else:
      grid = _stack(h - w, (w, w, 0), (t, c, t, i), size)
    kinds[b] = _turn(grid, rng).ravel()
  names = ('stroma', 'tumour', 'immune', 'capsule')
  return Tissue(kinds, labels, grid_positions(size, size), names)


PAIRINGS = (((1, 2), (3, 4)), ((1, 3), (2, 4)), ((1, 4), (2, 3)))


def touching_pairs(
  n: int, *, seed: int, size: int = 14, thickness: int = 2, gap: int = 2
) -> Tissue:
  """Four kinds in stroma, each touching one other: the label is which pairs.

  Two bands, each of two layers, run through the tissue. Label 0: 1 | 2 and
  3 | 4 touch; label 1: 1 | 3 and 2 | 4; label 2: 1 | 4 and 2 | 3. All kinds
  have the same number of patches in every bag.

  Args:
    n: bags; labels are balanced to within one.
    seed: of everything.
    size: H = W.
    thickness: of every layer, patches.
    gap: of stroma between the bands, patches.

  Returns:
    Tissue with kinds stroma, a, b, c, d.

  Raises:
    ValueError: a grid too small for the layers.
  """
  total = 4 * thickness + gap
  if thickness < 1 or gap < 1 or size < total + 3:
    raise ValueError(
      f'size={size} is too small for four layers of thickness={thickness} and '
      f'a gap={gap}; it must be at least {total + 3}'
    )
  rng = np.random.default_rng(seed)
  labels = _balanced(n, 3, rng)
  heights = _heights(n, size, 1, size - total - 1, rng)
  kinds = np.empty((n, size * size), np.int32)
  for b in range(n):
    bands = [rng.permutation(pair) for pair in PAIRINGS[labels[b]]]
    first, second = (bands[k] for k in rng.permutation(2))
    order = (0, *first, 0, *second, 0)
    w = thickness
    grid = _stack(heights[b], (w, w, gap, w, w, 0), order, size)
    kinds[b] = _turn(grid, rng).ravel()
  names = ('stroma', 'a', 'b', 'c', 'd')
  return Tissue(kinds, labels, grid_positions(size, size), names)


def noisy_one_hot(
  kinds: np.ndarray, *, dim: int, noise: float, seed: int
) -> np.ndarray:
  """Features e_kind + noise * N(0, I).

  Args:
    kinds: [..., N], int in [0, P).
    dim: P; dimensions beyond the kinds hold noise only.
    noise: standard deviation; the distance between kinds is sqrt(2).
    seed: of the noise.

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
  return x + np.eye(dim, dtype=np.float32)[kinds]


def text_like(*a, **k): ...
def layers_on_positions(*a, **k): ...

"""Realistic shapes of patch graphs, shared by tests and benchmarks.

Axes: N patches, D features per patch, on a grid of rows x columns.
"""

from typing import NamedTuple

import numpy as np

__all__ = ['SHAPES', 'GraphShape', 'tissue_mask']


class GraphShape(NamedTuple):
  """A grid, the patches on it that hold tissue, and features per patch."""

  rows: int
  columns: int
  patches: int
  features: int


SHAPES = {
  # A kidney resection cut into patches of 256 pixels: 40 % of its grid.
  'resection': GraphShape(188, 178, 13_472, 128),
  # Four of them as one bag.
  'four_resections': GraphShape(376, 356, 53_888, 128),
  # The largest bag that a single device should train on.
  'giant': GraphShape(512, 490, 100_000, 128),
  # A biopsy core.
  'biopsy': GraphShape(96, 24, 1_200, 128),
  # Soft regions instead of features.
  'regions': GraphShape(188, 178, 13_472, 8),
  # For tests.
  'tiny': GraphShape(12, 10, 70, 5),
}


def tissue_mask(
  rows: int, columns: int, patches: int, seed: int = 0
) -> np.ndarray:
  """A tissue-like set of grid cells: a few blobs with ragged borders.

  Args:
    rows: height of the grid.
    columns: width of the grid.
    patches: number of cells to choose.
    seed: of the random field.

  Returns:
    [patches, 2] int32, row and column, in row-major order.

  Raises:
    ValueError: if the grid has fewer cells than patches.
  """
  if not 0 <= patches <= rows * columns:
    raise ValueError(
      f'patches={patches} must lie in [0, {rows * columns}], the cells of a '
      f'grid of {rows} x {columns}'
    )
  rng = np.random.default_rng(seed)
  # Low frequencies make the blobs, a little white noise the ragged borders.
  frequency = np.hypot(
    np.fft.fftfreq(rows)[:, None] * rows, np.fft.rfftfreq(columns) * columns
  )
  noise = np.fft.rfft2(rng.normal(size=(rows, columns)))
  field = np.fft.irfft2(noise / (1 + frequency) ** 2, (rows, columns))
  field = field / field.std() + rng.normal(size=field.shape) * 0.08
  chosen = np.sort(np.argsort(field.ravel(), kind='stable')[::-1][:patches])
  return np.stack(np.divmod(chosen, columns), 1).astype(np.int32)

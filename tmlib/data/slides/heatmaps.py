"""Scores of patches, in the formats that viewers read.

Axes: N patches, R regions.

Attention weights of a slide of thousands of patches are all near zero with a
few large ones, so a picture of them shows nothing. What is shown is the rank: a
patch at percentile 99 is looked at more than 99 % of its slide.
"""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tmlib.ops.grid import fit_grid
from tmlib.ops.statistics import midranks

__all__ = [
  'heatmap_raster',
  'percentile_ranks',
  'region_polygons',
  'write_heatmap_csv',
  'write_heatmap_npz',
  'write_patches_geojson',
  'write_regions_geojson',
]

# From low to high, a sequence that reads as cold to hot.
_COLOURS = np.array(
  [(49, 54, 149), (116, 173, 209), (254, 224, 144), (244, 109, 67),
   (165, 0, 38)]
)  # fmt: skip
_REGIONS = (
  (31, 119, 180), (255, 127, 14), (44, 160, 44), (214, 39, 40),
  (148, 103, 189), (140, 86, 75), (227, 119, 194), (127, 127, 127),
  (188, 189, 34), (23, 190, 207),
)  # fmt: skip


def percentile_ranks(scores: Any) -> np.ndarray:
  """Percentile of each score within its slide, ties at their mean rank.

  Args:
    scores: [N], finite.

  Returns:
    [N] float64 in (0, 100]; the highest of distinct scores has 100.
  """
  scores = np.asarray(scores, np.float64)
  return 100 * midranks(scores) / max(len(scores), 1)


def write_heatmap_csv(path: str | Path, coords: Any, scores: Any) -> None:
  """Writes x, y (level-0 pixels), score and percentile of every patch.

  Args:
    path: of the table.
    coords: [N, 2], or None to number the patches instead.
    scores: [N].
  """
  scores = np.asarray(scores, np.float64)
  ranks = percentile_ranks(scores)
  with Path(path).open('w', newline='') as file:
    writer = csv.writer(file)
    lead = ['patch'] if coords is None else ['x', 'y']
    writer.writerow([*lead, 'score', 'percentile'])
    places: Any = range(len(scores)) if coords is None else np.asarray(coords)
    for place, score, rank in zip(places, scores, ranks, strict=True):
      first = [place] if coords is None else [int(x) for x in place]
      writer.writerow([*first, f'{score:.6g}', f'{rank:.3f}'])


def write_heatmap_npz(
  path: str | Path, coords: Any, scores: Any, **more: Any
) -> None:
  """Writes the same as arrays, with whatever else belongs to the patches.

  Args:
    path: of the archive.
    coords: [N, 2], or None.
    scores: [N].
    **more: further arrays [N, ...].
  """
  arrays = {'score': np.asarray(scores), 'percentile': percentile_ranks(scores)}
  if coords is not None:
    arrays['coords'] = np.asarray(coords)
  np.savez_compressed(path, allow_pickle=False, **arrays, **more)


def heatmap_raster(
  coords: Any, values: Any, pitch: float | None = None
) -> np.ndarray:
  """Values on the grid of the patches, NaN where there is no tissue.

  Args:
    coords: [N, 2] pixels (x, y).
    values: [N].
    pitch: of the grid, or None.

  Returns:
    [rows, columns] float64; the first row is the top of the slide.
  """
  points = np.asarray(coords, np.float64)[:, ::-1]
  index = fit_grid(points, pitch)[0]
  if not len(index):
    return np.zeros((0, 0))
  raster = np.full(index.max(0) + 1, np.nan)
  raster[index[:, 0], index[:, 1]] = values
  return raster


def write_patches_geojson(
  path: str | Path,
  coords: Any,
  scores: Any,
  patch_size: float,
  name: str = 'attention',
) -> None:
  """A square per patch, coloured by percentile, for QuPath.

  Args:
    path: of the file; drag it onto the slide, or File > Import objects.
    coords: [N, 2] level-0 pixels (x, y) of the upper left corners.
    scores: [N].
    patch_size: edge of a patch, level-0 pixels.
    name: of the measurement.
  """
  ranks = percentile_ranks(scores)
  places = np.linspace(0, 100, len(_COLOURS))
  colours = np.stack(
    [np.interp(ranks, places, channel) for channel in _COLOURS.T], 1
  )
  features = []
  for (x, y), score, rank, colour in zip(
    np.asarray(coords).tolist(), np.asarray(scores), ranks, colours, strict=True
  ):
    ring = _square(x, y, patch_size)
    features.append(
      {
        'type': 'Feature',
        'geometry': {'type': 'Polygon', 'coordinates': [ring]},
        'properties': {
          'objectType': 'tile',
          'color': [int(round(c)) for c in colour],
          'measurements': {
            name: float(score), f'{name} percentile': round(float(rank), 3),
          },
        },
      }
    )  # fmt: skip
  _write(path, features)


def write_regions_geojson(
  path: str | Path,
  coords: Any,
  regions: Any,
  pitch: float | None,
  names: Sequence[str] | None = None,
) -> None:
  """An outlined annotation per region, for QuPath.

  Args:
    path: of the file.
    coords: [N, 2] level-0 pixels (x, y) of the upper left corners.
    regions: [N] int in [0, R), the region of each patch.
    pitch: of the grid, level-0 pixels, or None.
    names: R names, or None for numbers.
  """
  coords, regions = np.asarray(coords, np.float64), np.asarray(regions)
  index = fit_grid(coords[:, ::-1], pitch)[0]
  step, origin = _frame(coords, index, pitch)
  features = []
  for region in np.unique(regions):
    polygons = [
      [(ring[:, ::-1] * step + origin).tolist() for ring in polygon]
      for polygon in region_polygons(index[regions == region])
    ]
    name = names[region] if names else f'region {region}'
    colour = _REGIONS[int(region) % len(_REGIONS)]
    features.append(
      {
        'type': 'Feature',
        'geometry': {'type': 'MultiPolygon', 'coordinates': polygons},
        'properties': {
          'objectType': 'annotation',
          'name': name,
          'classification': {'name': name, 'color': list(colour)},
        },
      }
    )
  _write(path, features)


def region_polygons(cells: Any) -> list[list[np.ndarray]]:
  """Outlines of grid cells: one polygon per piece, with its holes.

  A piece is connected by edges; pieces that touch at a corner are two polygons,
  as GeoJSON asks for.

  Args:
    cells: [N, 2] int, row and column.

  Returns:
    For each piece its outer ring and then its holes, [k, 2] corners (row,
    column), closed; corners in a straight line are left out.
  """
  from scipy import ndimage

  cells = np.asarray(cells)
  if not len(cells):
    return []
  origin = cells.min(0) - 1
  grid = np.zeros(cells.max(0) - origin + 2, bool)
  grid[tuple((cells - origin).T)] = True
  labelled: Any = ndimage.label(grid)
  labels, count = labelled
  pieces = ndimage.find_objects(labels)
  found = []
  for piece in range(count):
    box = tuple(slice(s.start - 1, s.stop + 1) for s in pieces[piece])
    corner = np.array([s.start for s in box])
    rings = _rings(labels[box] == piece + 1)
    # The outer ring encloses the largest area.
    rings.sort(key=lambda ring: -abs(_area(ring)))
    found.append([ring + corner + origin for ring in rings])
  return found


def _rings(inside: np.ndarray) -> list[np.ndarray]:
  """Closed chains of edges that have `inside` on their right."""
  edges: dict[Any, list[Any]] = {}

  def add(cells: np.ndarray, start: tuple, stop: tuple) -> None:
    for row, column in np.argwhere(cells).tolist():
      a = (row + start[0], column + start[1])
      edges.setdefault(a, []).append((row + stop[0], column + stop[1]))

  shifted = lambda axis, by: np.roll(inside, by, axis)
  add(inside & ~shifted(0, 1), (0, 0), (0, 1))  # top, to the right
  add(inside & ~shifted(1, -1), (0, 1), (1, 1))  # right, down
  add(inside & ~shifted(0, -1), (1, 1), (1, 0))  # bottom, to the left
  add(inside & ~shifted(1, 1), (1, 0), (0, 0))  # left, up
  rings = []
  while edges:
    start = next(iter(edges))
    first: Any = (start, edges[start][0])
    edge = first
    ring = [edge]
    while (edge := (edge[1], _next(edge, edges[edge[1]]))) != first:
      ring.append(edge)
    for tail, head in ring:
      edges[tail].remove(head)
      if not edges[tail]:
        del edges[tail]
    rings.append(_corners(np.array([tail for tail, _ in ring])))
  return rings


def _next(edge: Any, options: list[Any]) -> Any:
  """Where two corners meet: to the left, so that no ring meets itself."""
  (r, c), here = edge
  came = (here[0] - r, here[1] - c)
  turn = lambda to: came[0] * (to[1] - here[1]) - came[1] * (to[0] - here[0])
  return max(options, key=turn)


def _corners(points: np.ndarray) -> np.ndarray:
  """The ring without points on straight lines, closed."""
  before = points - np.roll(points, 1, 0)
  after = np.roll(points, -1, 0) - points
  kept = points[(before != after).any(1)]
  return np.concatenate([kept, kept[:1]])


def _area(ring: np.ndarray) -> float:
  a, b = ring[:-1].astype(float), ring[1:].astype(float)
  return float((a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum() / 2)


def _frame(
  coords: np.ndarray, index: np.ndarray, pitch: float | None
) -> tuple[float, np.ndarray]:
  """Pixels per cell, and the pixel (x, y) of cell (0, 0)."""
  from tmlib.ops.grid import infer_pitch

  step = float(pitch or infer_pitch(coords))
  return step, np.median(coords - index[:, ::-1] * step, 0)


def _square(x: float, y: float, size: float) -> list[list[float]]:
  corners = [(0, 0), (size, 0), (size, size), (0, size), (0, 0)]
  return [[x + dx, y + dy] for dx, dy in corners]


def _write(path: str | Path, features: list[dict[str, Any]]) -> None:
  collection = {'type': 'FeatureCollection', 'features': features}
  Path(path).write_text(json.dumps(collection))

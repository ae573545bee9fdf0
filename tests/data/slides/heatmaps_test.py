import csv
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from tests.data.slides.support import grid_coords
from tmlib.data.slides import (
  heatmap_raster,
  percentile_ranks,
  region_polygons,
  write_heatmap_csv,
  write_heatmap_npz,
  write_patches_geojson,
  write_regions_geojson,
)


def test_percentiles_are_those_of_scipy():
  scores = np.array([0.2, 0.1, 0.1, 5, -3, 0.2])
  want = [stats.percentileofscore(scores, x) for x in scores]
  np.testing.assert_allclose(percentile_ranks(scores), want)
  assert percentile_ranks([]).shape == (0,)


def test_tables(tmp_path):
  coords, scores = grid_coords(2, 2, 256), np.array([0.1, 0.4, 0.2, 0.3])
  write_heatmap_csv(tmp_path / 'a.csv', coords, scores)
  with (tmp_path / 'a.csv').open() as file:
    rows = list(csv.DictReader(file))
  assert [(r['x'], r['y']) for r in rows][1] == ('768', '1024')
  assert [float(r['percentile']) for r in rows] == [25, 100, 50, 75]
  write_heatmap_npz(tmp_path / 'a.npz', coords, scores, regions=[0, 1, 1, 0])
  with np.load(tmp_path / 'a.npz') as file:
    np.testing.assert_array_equal(file['coords'], coords)
    np.testing.assert_array_equal(file['regions'], [0, 1, 1, 0])
  write_heatmap_csv(tmp_path / 'b.csv', None, scores)
  assert (tmp_path / 'b.csv').read_text().startswith('patch,score,percentile')


def test_the_raster_has_the_slide_the_right_way_up():
  coords = [[512, 0], [0, 256], [256, 256]]
  raster = heatmap_raster(coords, [1, 2, 3], 256)
  nan = np.nan
  np.testing.assert_array_equal(raster, [[nan, nan, 1], [2, 3, nan]])


def test_patches_for_qupath(tmp_path):
  coords = grid_coords(1, 2, 256)
  write_patches_geojson(tmp_path / 'a.geojson', coords, [0.9, 0.1], 224)
  found = json.loads((tmp_path / 'a.geojson').read_text())
  assert found['type'] == 'FeatureCollection'
  first, second = found['features']
  assert first['geometry'] == {
    'type': 'Polygon',
    'coordinates': [
      [[512, 1024], [736, 1024], [736, 1248], [512, 1248], [512, 1024]]
    ],
  }
  assert first['properties']['measurements'] == {
    'attention': 0.9, 'attention percentile': 100,
  }  # fmt: skip
  # Hot against cold.
  assert first['properties']['color'][0] > first['properties']['color'][2]
  assert second['properties']['measurements']['attention percentile'] == 50


def test_regions_for_qupath(tmp_path):
  coords = grid_coords(2, 3, 256)
  write_regions_geojson(
    tmp_path / 'a.geojson', coords, [0, 0, 1, 0, 1, 1], 256, ['x', 'y']
  )
  first, second = json.loads((tmp_path / 'a.geojson').read_text())['features']
  assert first['properties']['objectType'] == 'annotation'
  assert second['properties']['classification']['name'] == 'y'
  ((ring,),) = first['geometry']['coordinates']
  corners = {tuple(point) for point in ring}
  assert corners == {
    (512, 1024), (1024, 1024), (1024, 1280), (768, 1280), (768, 1536),
    (512, 1536),
  }  # fmt: skip


def area(ring):
  a, b = ring[:-1].astype(float), ring[1:].astype(float)
  return (a[:, 0] * b[:, 1] - a[:, 1] * b[:, 0]).sum() / 2


def inside(ring, point):
  """Even-odd rule along a ray."""
  y, x = point
  a, b = ring[:-1], ring[1:]
  crosses = (a[:, 0] > y) != (b[:, 0] > y)
  with np.errstate(divide='ignore', invalid='ignore'):
    at = a[:, 1] + (y - a[:, 0]) * (b[:, 1] - a[:, 1]) / (b[:, 0] - a[:, 0])
  return (crosses & (at > x)).sum() % 2 == 1


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6),
                min_size=5, max_size=5))  # fmt: skip
@settings(deadline=None, max_examples=150)
def test_outlines_cover_the_cells_and_nothing_else(table):
  grid = np.array(table)
  cells = np.argwhere(grid) - 2  # negative cells too
  polygons = region_polygons(cells)
  for polygon in polygons:
    outer, holes = polygon[0], polygon[1:]
    # Holes run the other way round.
    assert area(outer) * np.sign(area(outer)) > 0
    assert all(area(h) * area(outer) < 0 for h in holes)
    for ring in polygon:
      assert (ring[0] == ring[-1]).all()
      # A simple ring meets every corner once.
      assert len(np.unique(ring[:-1], axis=0)) == len(ring) - 1
  total = sum(abs(area(p[0])) - sum(abs(area(h)) for h in p[1:])
              for p in polygons)  # fmt: skip
  assert total == grid.sum()
  for (row, column), value in np.ndenumerate(grid):
    point = (row - 2 + 0.5, column - 2 + 0.5)
    covered = sum(
      inside(p[0], point) and not any(inside(h, point) for h in p[1:])
      for p in polygons
    )
    assert covered == value


def test_pieces_that_touch_at_a_corner():
  (a,), (b,) = region_polygons([[0, 0], [1, 1]])
  assert len(a) == len(b) == 5
  # A ring whose tips meet at a corner encloses a hole.
  cells = [(0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 1), (1, 2)]
  ((outer, hole),) = region_polygons(cells)
  assert abs(area(outer)) == 8
  assert abs(area(hole)) == 1
  assert region_polygons(np.zeros((0, 2))) == []


def test_scores_of_other_lengths(tmp_path):
  with pytest.raises(ValueError, match='argument'):
    write_heatmap_csv(tmp_path / 'a.csv', grid_coords(1, 2), [1.0])

"""Spatial transcriptomics: files by hand, features of painted patches."""

import gzip

import numpy as np
import pytest

from tmlib.data import (
  PATCH_FEATURES,
  planted_spots,
  read_spots,
  stain_features,
)
from tmlib.data.slides import TableError

COUNTS = '\tA\tB\n1x2\t3\t0\n2x2\t1\t5\n9x9\t1\t1\n'
PLACES = (
  'x\ty\tnew_x\tnew_y\tpixel_x\tpixel_y\tselected\n'
  '2\t2\t2.1\t2.0\t60\t20\t1\n1\t2\t1.0\t2.1\t20\t20\t1\n'
)
LABELS = 'Row.names\tx\ty\tlabel\na\t1.04\t1.98\ttumour\nb\t7\t7\tfat\n'


def write(folder, counts=COUNTS, places=PLACES, labels=LABELS):
  with gzip.open(folder / 'S.tsv.gz', 'wt') as file:
    file.write(counts)
  (folder / 'S_selection.tsv').write_text(places)
  (folder / 'S_labeled_coordinates.tsv').write_text(labels)
  return folder


def test_reads_what_all_files_have(tmp_path):
  found = read_spots(write(tmp_path), 'S', labels=True)
  np.testing.assert_array_equal(found.grid, [[1, 2], [2, 2]])
  np.testing.assert_array_equal(found.counts, [[3, 0], [1, 5]])
  assert found.genes == ('A', 'B')
  # Fractional coordinates are rounded; a spot without label has none.
  assert found.labels.tolist() == ['tumour', '']
  assert found.dropped == ('9x9',)
  assert found.features is None


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'counts': '\tA\n1x2\t-1\n'}, 'line 2: a count is negative'),
    ({'counts': '\tA\n1x2\tx\n'}, 'line 2'),
    ({'counts': '\tA\n1x2\t1\t2\n'}, '2 counts for 1 genes'),
    ({'counts': '\tA\n'}, 'holds no spot'),
    ({'counts': '\tA\n5x5\t1\n'}, 'no spot is in both S.tsv.gz'),
    ({'places': 'x\ty\n1\t2\n'}, 'no column pixel_x'),
    ({'places': PLACES.replace('60', 'far')}, 'pixel_x.*no finite number'),
    ({'places': PLACES.replace('1\t2\t1.0', '2\t2\t1.0')}, 'twice'),
    ({'labels': 'x\ty\n1\t2\n'}, 'no column label'),
  ],
)
def test_a_file_that_cannot_be_used_is_named(tmp_path, changes, match):
  with pytest.raises(TableError, match=match):
    read_spots(write(tmp_path, **changes), 'S', labels=True)


def test_missing_files_and_broken_archives(tmp_path):
  with pytest.raises(FileNotFoundError, match='no folder.*X.tsv.gz'):
    read_spots(tmp_path / 'none', 'X')
  with pytest.raises(FileNotFoundError, match='has no S.jpg'):
    read_spots(write(tmp_path), 'S', image=True)
  (tmp_path / 'S.tsv.gz').write_bytes(b'no archive')
  with pytest.raises(TableError, match='no gzipped table'):
    read_spots(tmp_path, 'S')


def paint(path, tile):
  """An image whose left half is plain and whose right half is `tile`."""
  image = pytest.importorskip('PIL.Image')
  pixels = np.full((128, 256, 3), (200, 100, 50), np.uint8)
  pixels[:, 128:] = tile
  image.fromarray(pixels).save(path)  # PNG: exact


def test_features_of_patches_by_hand(tmp_path):
  stripes = np.zeros((128, 128, 3), np.uint8)
  stripes[:, ::2] = 255
  paint(tmp_path / 'a.png', stripes)
  plain, striped = stain_features(
    tmp_path / 'a.png', np.array([[50, 64], [200, 64]]), 64
  )
  value = lambda row, name: row[PATCH_FEATURES.index(name)]
  for name, want in (
    ('red mean', 200 / 255), ('green mean', 100 / 255), ('blue std', 0),
    ('saturation', 0.75), ('gradient mean', 0), ('roughness', 0),
    ('luminance 5 %', (0.299 * 200 + 0.587 * 100 + 0.114 * 50) / 255),
  ):  # fmt: skip
    np.testing.assert_allclose(value(plain, name), want, atol=1e-6)
  # Density of (200, 100, 50) as a mixture of the two stain vectors.
  density = -np.log10(np.array([200, 100, 50]) / 255)
  stains = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105]])
  want = np.linalg.lstsq(stains.T, density, rcond=None)[0]
  np.testing.assert_allclose(value(plain, 'haematoxylin mean'), want[0], 1e-5)
  np.testing.assert_allclose(value(plain, 'eosin mean'), want[1], 1e-5)
  # Stripes of one pixel: every step is 1, every second difference 2.
  np.testing.assert_allclose(value(striped, 'gradient mean'), 1, rtol=1e-5)
  np.testing.assert_allclose(value(striped, 'roughness'), 2, rtol=1e-5)
  np.testing.assert_allclose(value(striped, 'red mean'), 0.5, atol=0.02)


def test_an_image_that_does_not_fit_is_named(tmp_path):
  paint(tmp_path / 'a.png', 0)
  with pytest.raises(TableError, match=r'\(300, 10\) lies outside'):
    stain_features(tmp_path / 'a.png', np.array([[300, 10]]))
  (tmp_path / 'b.png').write_bytes(b'no image')
  with pytest.raises(TableError, match='no image'):
    stain_features(tmp_path / 'b.png', np.array([[1, 1]]))
  with pytest.raises(ValueError, match='patch=4'):
    stain_features(tmp_path / 'a.png', np.array([[1, 1]]), 4)


def test_planted_tissue_shows_in_counts_and_features():
  one = planted_spots(1, size=16, seed=3)[0]
  assert one.counts.shape == (256, 24)
  kinds, kind = np.unique(one.labels, return_inverse=True)
  assert len(kinds) == 3
  for table in (np.log1p(one.counts), one.features):
    between = np.stack([table[kind == k].mean(0) for k in range(3)]).var(0)
    assert between.max() > 0.05

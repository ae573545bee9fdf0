"""Simulated tissue: labels against brute force, composition, truth maps."""

import collections

import numpy as np
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import cross_val_predict

from tmlib.data import tissue
from tmlib.mil import auroc

TUMOUR, IMMUNE, CAPSULE = 1, 2, 3


def touch(kinds, height, width, a, b):
  """Whether a patch of kind a shares an edge with one of kind b, by loops."""
  grid = kinds.reshape(height, width)
  for i in range(height):
    for j in range(width):
      for k, m in ((i + 1, j), (i, j + 1)):
        if k < height and m < width and {grid[i, j], grid[k, m]} == {a, b}:
          return True
  return False


def counts(bags, size):
  return np.stack([np.bincount(k, minlength=size) for k in bags.kinds])


def probe(bags, size):
  """Out-of-fold AUC of a linear model that sees the composition only."""
  table = counts(bags, size).astype(float)
  table = (table - table.mean(0)) / np.maximum(table.std(0), 1e-9)
  scores = cross_val_predict(
    LogisticRegression(), table, bags.labels, cv=5, method='decision_function'
  )
  return auroc(bags.labels, scores)


@pytest.mark.parametrize(('size', 'radius'), [(14, 3), (12, 2)])
def test_blobs_touch_where_the_label_says_so(size, radius):
  bags = tissue.touching_blobs(40, seed=0, size=size, radius=radius)
  found = [touch(k, size, size, TUMOUR, IMMUNE) for k in bags.kinds]
  np.testing.assert_array_equal(found, bags.labels == 1)
  assert len(np.unique(counts(bags, 3), axis=0)) == 1
  assert sum(bags.labels) == 20


def test_a_blob_is_one_disc():
  bags = tissue.touching_blobs(6, seed=1)
  for kinds in bags.kinds:
    for kind in (TUMOUR, IMMUNE):
      own = bags.positions[kinds == kind]
      gap = np.linalg.norm(own - own.mean(0), axis=1)
      assert gap.max() <= 3.3
      outside = bags.positions[kinds != kind]
      assert np.linalg.norm(outside - own.mean(0), axis=1).min() > 3


@pytest.mark.parametrize('thickness', [1, 2, 4])
def test_capsule_parts_tumour_from_immune_where_the_label_is_zero(thickness):
  bags = tissue.capsule(40, seed=0, thickness=thickness)
  found = [touch(k, 12, 12, TUMOUR, IMMUNE) for k in bags.kinds]
  np.testing.assert_array_equal(found, bags.labels == 1)
  assert sum(bags.labels) == 20


@pytest.mark.parametrize('thickness', [1, 2, 4])
def test_capsule_is_as_thick_as_it_says(thickness):
  bags = tissue.capsule(12, seed=3, thickness=thickness)
  for kinds in bags.kinds:
    sheath = kinds.reshape(12, 12) == CAPSULE
    lines = sheath.all(1) if sheath.all(1).any() else sheath.all(0)
    # Cyclically, whole lines come in runs of the thickness, cords in twos.
    start = int(np.flatnonzero(lines & ~np.roll(lines, 1))[0])
    lines = np.roll(lines, -start)
    edges = np.flatnonzero(np.diff(lines.astype(int), append=1)) + 1
    runs = np.diff(np.concatenate([[0], edges]))
    assert set(runs[::2]) == {thickness}
    assert set(runs[1::2]) == {2}
    assert lines.mean() == sheath.mean()


def patterns(grids):
  """How often each pattern occurs, patterns equal up to a transpose."""
  found = collections.Counter()
  for grid in grids:
    found[min(grid.tobytes(), grid.T.copy().tobytes())] += 1
  total = sum(found.values())
  return {key: value / total for key, value in found.items()}


def test_the_capsule_alone_does_not_tell_the_label():
  bags = tissue.capsule(6000, seed=0, thickness=4)
  sheath = (bags.kinds == CAPSULE).reshape(-1, 12, 12)
  seen = [patterns(sheath[bags.labels == y]) for y in (0, 1)]
  assert set(seen[0]) == set(seen[1])
  gap = [abs(seen[0][k] - seen[1][k]) for k in seen[0]]
  # 6 offsets, each with probability 1/6: three standard errors are 0.03.
  assert len(gap) == 6
  assert max(gap) < 0.04


@pytest.mark.parametrize(
  ('make', 'kinds'),
  [
    (lambda n: tissue.touching_blobs(n, seed=0), 3),
    (lambda n: tissue.capsule(n, seed=0, thickness=1), 4),
    (lambda n: tissue.capsule(n, seed=0, thickness=2), 4),
    (lambda n: tissue.touching_pairs(n, seed=0, classes=2), 5),
  ],
)
def test_composition_does_not_tell_the_label(make, kinds):
  bags = make(400)
  # Chance is 0.5 with a standard error of 0.03; a constant column gives less
  # than that by ties.
  assert 0.38 < probe(bags, kinds) < 0.62
  by_label = [counts(bags, kinds)[bags.labels == y].mean(0) for y in (0, 1)]
  np.testing.assert_allclose(*by_label, atol=3)


def test_pairs_touch_as_the_label_says():
  bags = tissue.touching_pairs(30, seed=0)
  assert set(bags.labels) == {0, 1, 2}
  for kinds, label in zip(bags.kinds, bags.labels, strict=True):
    pairs = {
      (a, b)
      for a in range(1, 5)
      for b in range(a + 1, 5)
      if touch(kinds, 16, 8, a, b)
    }
    assert pairs == set(tissue.PAIRINGS[label])
  assert len(np.unique(counts(bags, 5), axis=0)) == 1


def test_contacts_counts_every_edge_once():
  kinds = np.array([[0, 1, 1, 2, 0, 0]])
  # 0 1 1 / 2 0 0: edges 01 11 | 20 00 | 02 10 10.
  want = [[1, 3, 2], [3, 1, 0], [2, 0, 0]]
  np.testing.assert_array_equal(tissue.contacts(kinds, 2, 3, 3)[0], want)


def test_seeds_decide_everything():
  for make in (tissue.touching_blobs, tissue.capsule, tissue.touching_pairs):
    a, b, c = make(8, seed=0), make(8, seed=0), make(8, seed=1)
    np.testing.assert_array_equal(a.kinds, b.kinds)
    assert (a.kinds != c.kinds).any()


def test_noise_and_contrast_of_features():
  kinds = np.repeat(np.arange(3), 4000)
  x = tissue.noisy_one_hot(kinds, dim=4, noise=0.5, seed=0, contrast={2: 3.0})
  for kind, mean in ((0, [1, 0, 0, 0]), (2, [0, 0, 3, 0])):
    own = x[kinds == kind]
    np.testing.assert_allclose(own.mean(0), mean, atol=0.04)
    np.testing.assert_allclose(own.std(0), 0.5, atol=0.03)


def test_embeddings_lie_near_the_row_of_their_kind():
  rows = tissue.concept_rows(5, dim=64, seed=0)
  np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-6)
  # The cone: texts are more alike than random directions are.
  assert (rows @ rows.T).min() > 0.2
  kinds = np.random.default_rng(0).integers(0, 5, 500)
  c = tissue.text_like(kinds, rows, noise=0.5, seed=0)
  np.testing.assert_allclose(np.linalg.norm(c, axis=1), 1, rtol=1e-5)
  assert np.mean((c @ rows.T).argmax(1) == kinds) > 0.99
  noisy = tissue.text_like(kinds, rows, noise=8.0, seed=0)
  assert np.mean((noisy @ rows.T).argmax(1) == kinds) < 0.7


def test_islands_have_rims_by_turns():
  positions = tissue.grid_positions(60, 60)
  kinds = tissue.islands(positions, seed=0, count=2, radius=5, rim=3)
  grid = kinds.reshape(60, 60)
  assert set(np.unique(kinds)) == {0, 1, 2}
  assert touch(kinds, 60, 60, TUMOUR, IMMUNE)
  assert (grid == IMMUNE).sum() < (grid == TUMOUR).sum() * 2


def test_positions_are_read_as_row_and_column(tmp_path):
  path = tmp_path / 'nodes.csv'
  path.write_text(',X,Y\n0,182,6\n1,39,9\n')
  np.testing.assert_array_equal(
    tissue.read_positions(path), [[6, 182], [9, 39]]
  )


@pytest.mark.parametrize(
  ('text', 'match'),
  [(',x,y\n0,1,2\n', 'columns X and Y'), ('X,Y\n0.5,1\n', 'integers')],
)
def test_bad_positions_are_refused(tmp_path, text, match):
  path = tmp_path / 'nodes.csv'
  path.write_text(text)
  with pytest.raises(ValueError, match=match):
    tissue.read_positions(path)


def test_missing_positions_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'absent\.csv'):
    tissue.read_positions(tmp_path / 'absent.csv')


@pytest.mark.parametrize(
  ('call', 'match'),
  [
    (lambda: tissue.touching_blobs(2, seed=0, size=8, radius=3), 'too small'),
    (lambda: tissue.capsule(2, seed=0, size=13), 'multiple of'),
    (lambda: tissue.capsule(2, seed=0, size=12, thickness=10), 'twice'),
    (lambda: tissue.touching_pairs(2, seed=0, thickness=4), 'too small'),
    (lambda: tissue.touching_pairs(2, seed=0, classes=4), 'classes=4'),
    (
      lambda: tissue.noisy_one_hot(np.array([3]), dim=3, noise=0.1, seed=0),
      'dim=3',
    ),
    (
      lambda: tissue.noisy_one_hot(np.array([0]), dim=3, noise=-1, seed=0),
      'noise=-1',
    ),
    (
      lambda: tissue.text_like(np.array([2]), np.eye(2), noise=0, seed=0),
      'a row per kind',
    ),
    (lambda: tissue.islands(np.zeros((3, 2)), seed=0), 'count=12'),
  ],
)
def test_errors_name_the_value(call, match):
  with pytest.raises(ValueError, match=match):
    call()

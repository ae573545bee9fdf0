import numpy as np
import pytest

from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_clam,
  write_trident,
)
from tmlib.data import batch_bags
from tmlib.data.slides import (
  BagReader,
  SlideFileError,
  sample_patches,
  stack_bags,
)
from tmlib.ops.graph import validate_graph


def edges(graph):
  nbr, emask = np.asarray(graph.nbr), np.asarray(graph.emask)
  return {(i, int(j)) for i in range(len(nbr)) for j in nbr[i][emask[i]]}


@pytest.fixture(name='files')
def files_fixture(tmp_path):
  write_trident(
    tmp_path / 'a.h5', features_of(6), grid_coords(2, 3, 512),
    patch_size=256, patch_size_level0=512, overlap=0,
  )  # fmt: skip
  write_clam(tmp_path / 'b.h5', features_of(4, seed=1), grid_coords(2, 2, 128))
  write_clam(tmp_path / 'e.h5', np.zeros((0, 4), np.float32), np.zeros((0, 2)))
  return [(tmp_path / 'a.h5',), (tmp_path / 'b.h5',),
          (tmp_path / 'a.h5', tmp_path / 'b.h5')]  # fmt: skip


def test_neighbours_touch_whatever_the_magnification(files):
  reader = BagReader(files, dim=4, graph='grid', coords=True)
  a, b = reader.read(0), reader.read(1)
  # 0 1 2
  # 3 4 5
  want = {(0, 1), (0, 3), (0, 4), (1, 2), (1, 3), (1, 4), (1, 5), (2, 4),
          (2, 5), (3, 4), (4, 5)}  # fmt: skip
  assert edges(a.graph) == want | {(j, i) for i, j in want}
  np.testing.assert_array_equal(
    a.coords, [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
  )
  # In the other slide each patch touches the three others.
  assert len(edges(b.graph)) == 12


def test_slides_of_a_patient_share_no_edge(files):
  reader = BagReader(files, dim=4, graph='grid', coords=True)
  a, b, both = (reader.read(i) for i in range(3))
  shifted = {(i + 6, j + 6) for i, j in edges(b.graph)}
  assert edges(both.graph) == edges(a.graph) | shifted
  validate_graph(both.graph)
  np.testing.assert_array_equal(
    both.features, np.concatenate([a.features, b.features])
  )
  assert len(np.unique(both.coords, axis=0)) == 10
  # Not even next to one another on the grid.
  gap = np.abs(both.coords[:6, None] - both.coords[None, 6:]).max(-1)
  assert gap.min() > 1


@pytest.mark.parametrize('graph', ['none', 'grid', 'knn'])
def test_stacking_equals_the_common_way(files, graph):
  reader = BagReader(files, dim=4, graph=graph, coords=graph == 'grid')
  bags = [reader.read(i) for i in range(3)] + [reader.empty()]
  got, want = stack_bags(bags, 16), batch_bags(bags, 16)
  assert (got.graph is None) == (graph == 'none')
  import jax

  jax.tree.map(np.testing.assert_array_equal, got, want)
  with pytest.raises(ValueError, match='does not fit into n=8'):
    stack_bags(bags, 8)


def test_an_empty_slide_of_a_patient_adds_nothing(files, tmp_path):
  both = [(files[0][0], tmp_path / 'e.h5', files[1][0])]
  reader = BagReader(both, dim=4, graph='grid', coords=True)
  bag = reader.read(0)
  assert len(bag.mask) == 10
  validate_graph(bag.graph)


def test_half_precision_stays_half(tmp_path):
  write_clam(tmp_path / 'a.h5', features_of(6).astype(np.float16))
  bag = BagReader([(tmp_path / 'a.h5',)], dim=4, dtype=np.float16).read(0)
  assert bag.features.dtype == np.float16


def test_a_file_that_changed_is_named(files, tmp_path):
  reader = BagReader(files, dim=8)
  with pytest.raises(SlideFileError, match=r'a\.h5: features have dim 4 but'):
    reader.read(0)
  broken = features_of(3)
  broken[1] = np.nan
  write_clam(tmp_path / 'n.h5', broken)
  with pytest.raises(SlideFileError, match=r'n\.h5: NaN .* 1 of 3'):
    BagReader([(tmp_path / 'n.h5',)], dim=4).read(0)


def test_a_draw_is_a_function_of_its_number(tmp_path):
  paths = []
  for name, (rows, columns) in {'a': (20, 20), 'b': (10, 10)}.items():
    n = rows * columns
    features = np.arange(n, dtype=np.float32)[:, None] + np.zeros((1, 4))
    write_clam(tmp_path / f'{name}.h5', features, grid_coords(rows, columns))
    paths.append(tmp_path / f'{name}.h5')
  reader = BagReader(
    [tuple(paths)], dim=4, graph='grid', max_patches=250, seed=3
  )
  one, same, other = reader.read(0, 7), reader.read(0, 7), reader.read(0, 8)
  assert len(one.mask) == 250
  np.testing.assert_array_equal(one.features, same.features)
  assert not np.array_equal(one.features, other.features)
  # Each slide by its share of 4 : 1.
  order = one.features[:, 0]
  assert (np.diff(order) < 0).sum() == 1
  assert np.argmax(np.diff(order) < 0) + 1 == 200
  validate_graph(one.graph)
  assert len(reader.read(0).mask) == 500


def test_drawn_blocks_keep_their_neighbours_and_reach_all():
  coords = grid_coords(40, 50)
  rng = np.random.default_rng(0)
  index = sample_patches(rng, 2000, 512, coords, 256.0)
  assert len(np.unique(index)) == 512
  assert (np.diff(index) > 0).all()
  chosen = np.zeros((40, 50), bool)
  chosen.flat[index] = True
  # Of the inner edges to the right of a drawn patch, how many stay.
  kept = (chosen[:, :-1] & chosen[:, 1:]).sum() / chosen[:, :-1].sum()
  single = 512 / 2000
  assert kept > 3 * single
  seen = np.zeros(2000, int)
  for _ in range(200):
    seen[sample_patches(rng, 2000, 512, coords, 256.0)] += 1
  # Binomial(200, .256): mean 51, four standard deviations 25.
  assert seen.min() > 51 - 27
  assert seen.max() < 51 + 27


def test_bad_options(files):
  with pytest.raises(ValueError, match="graph='gird'"):
    BagReader(files, dim=4, graph='gird')
  with pytest.raises(ValueError, match='max_patches=-1'):
    BagReader(files, dim=4, max_patches=-1)

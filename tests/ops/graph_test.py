import csv
import os
import pathlib
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse
from scipy.spatial import cKDTree, distance

from kernels_pallas.graph import shard_graph
from tmlib.ops import graph as G

SHARED = pathlib.Path(
  os.environ.get(
    'TMLIB_SHARED', pathlib.Path(__file__).resolve().parents[3] / 'shared'
  )
)
KIRC = SHARED / (
  'data/kirc_graph/TCGA-A3-3324-01Z-00-DX1_node_location_list.csv'
)


def adjacency(graph):
  return G.to_dense(graph).astype(bool)


def touching(ij, connectivity=8):
  """Brute force over all pairs."""
  delta = np.abs(ij[:, None] - ij[None])
  reach = delta.max(-1) if connectivity == 8 else delta.sum(-1)
  return reach == 1


def random_grid(rng, n, low=-6, high=6):
  cells = np.stack(np.meshgrid(*[np.arange(low, high)] * 2), -1).reshape(-1, 2)
  return rng.permutation(cells)[:n]


# --- grid graphs


@pytest.mark.parametrize('connectivity', [4, 8])
@given(seed=st.integers(0, 10**6), n=st.integers(0, 60))
@settings(max_examples=30, deadline=None)
def test_grid_graph_joins_exactly_the_patches_that_touch(connectivity, seed, n):
  rng = np.random.default_rng(seed)
  ij = random_grid(rng, n)
  mask = rng.random(n) < 0.8
  graph = G.ell_from_grid(ij, mask, connectivity)
  want = touching(ij, connectivity) & mask[:, None] & mask[None]
  np.testing.assert_array_equal(adjacency(graph), want)
  assert graph.nbr.shape == (n, connectivity)
  assert graph.nbr.dtype == graph.rev.dtype == np.int32
  G.validate_graph(graph, mask)


def test_three_by_two_grid_by_hand():
  # 0 1
  # 2 3
  # 4 5
  ij = np.array([[0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1]])
  graph = G.ell_from_grid(ij, connectivity=4, k=3)
  np.testing.assert_array_equal(
    graph.nbr,
    [[1, 2, 0], [0, 3, 1], [0, 3, 4], [1, 2, 5], [2, 5, 4], [3, 4, 5]],
  )
  np.testing.assert_array_equal(
    graph.rev,
    [[0, 0, 0], [0, 0, 0], [1, 1, 0], [1, 1, 0], [2, 1, 0], [2, 1, 0]],
  )


def test_no_edge_crosses_between_slides():
  ij = np.array([[0, 0], [0, 1], [0, 0], [0, 1], [0, 2]])
  graph = G.ell_from_grid(ij, slide=['b', 'b', 'a', 'a', 'a'])
  want = np.zeros((5, 5), bool)
  for i, j in ((0, 1), (2, 3), (3, 4)):
    want[i, j] = want[j, i] = True
  np.testing.assert_array_equal(adjacency(graph), want)


def test_grid_rows_do_not_wrap_around():
  ij = np.array([[0, 9], [1, 0], [1, 9], [2, 0]])
  assert adjacency(G.ell_from_grid(ij))[:, 1].sum() == 1
  assert not adjacency(G.ell_from_grid(ij))[0, 1]


def test_duplicates_are_an_error_or_lose_their_edges():
  ij = np.array([[3, 4], [3, 5], [3, 4], [3, 4]])
  with pytest.raises(ValueError, match=r'patches 0 and 2 are both at \[3, 4\]'):
    G.ell_from_grid(ij)
  with pytest.warns(UserWarning, match='2 patches repeat'):
    graph = G.ell_from_grid(ij, duplicates='first')
  assert adjacency(graph).sum() == 2
  assert adjacency(graph)[0, 1]


def test_degree_beyond_k_names_the_node_and_its_degree():
  ij = np.stack(np.meshgrid(range(3), range(3)), -1).reshape(-1, 2)
  with pytest.raises(
    ValueError, match='node 4 has degree 8, more than the k=5'
  ):
    G.ell_from_grid(ij, k=5)


@pytest.mark.parametrize(
  ('call', 'error', 'match'),
  [
    (lambda: G.ell_from_grid(np.zeros((3, 3), int)), ValueError, r'\(3, 3\)'),
    (lambda: G.ell_from_grid(np.zeros((3, 2))), TypeError, 'grid_index'),
    (
      lambda: G.ell_from_grid(np.zeros((1, 2), int), connectivity=6),
      ValueError,
      'connectivity=6 must be 4 or 8',
    ),
    (
      lambda: G.ell_from_grid(np.eye(2, dtype=int), mask=[True]),
      ValueError,
      'mask has shape',
    ),
    (
      lambda: G.ell_from_grid(np.eye(2, dtype=int), slide=[1]),
      ValueError,
      'slide has shape',
    ),
    (
      lambda: G.ell_from_grid(np.eye(2, dtype=int), k=0),
      ValueError,
      'k=0 must be at least 1',
    ),
  ],
)
def test_grid_graph_rejects(call, error, match):
  with pytest.raises(error, match=match):
    call()


# --- coordinates


@pytest.mark.parametrize('pitch', [1, 37.5, 256])
@pytest.mark.parametrize('given_pitch', [True, False])
def test_grid_index_recovers_the_grid(pitch, given_pitch):
  rng = np.random.default_rng(0)
  ij = random_grid(rng, 80)
  coords = ij * pitch - 1234.5
  got = G.grid_index(coords, pitch if given_pitch else None)
  np.testing.assert_array_equal(got, ij - ij.min(0))
  assert got.dtype == np.int32


def test_grid_index_rounds_and_tolerates_jitter():
  rng = np.random.default_rng(1)
  ij = random_grid(rng, 80)
  # Just below a multiple of the pitch: truncation would be one off.
  np.testing.assert_array_equal(
    G.grid_index(ij * 10.0 - 1e-9, 10), ij - ij.min(0)
  )
  jitter = rng.uniform(-0.15, 0.15, ij.shape)
  np.testing.assert_array_equal(
    G.grid_index((ij + jitter) * 224 + 7, 224), ij - ij.min(0)
  )


def test_grid_index_takes_a_pitch_per_axis():
  ij = np.array([[0, 0], [1, 2], [3, 1]])
  got = G.grid_index(ij * [10.0, 3.0], (10, 3))
  np.testing.assert_array_equal(got, ij)


def test_grid_index_of_one_patch_and_of_none():
  np.testing.assert_array_equal(G.grid_index([[-7.5, 3.0]]), [[0, 0]])
  assert G.grid_index(np.zeros((0, 2))).shape == (0, 2)


def test_grid_index_without_two_patches_in_a_row():
  got = G.grid_index([[0, 0], [20, 20], [40, 40], [100, 100]])
  np.testing.assert_array_equal(got[:, 0], [0, 1, 2, 5])


@pytest.mark.parametrize(
  ('coords', 'pitch', 'match'),
  [
    ([[0, 0], [1, np.nan]], None, 'coords of patch 1'),
    ([[0, 0, 0]], None, r'expected \[N, 2\]'),
    ([[0, 0], [4, 0]], -1, 'pitch=-1 must be a positive'),
    ([[0, 0], [4, 0]], (1, 2, 3), 'pitch'),
    ([[0, 0], [10, 0], [20, 0], [35, 0]], 10, 'on no grid: patch 3 at'),
  ],
)
def test_grid_index_rejects(coords, pitch, match):
  with pytest.raises(ValueError, match=match):
    G.grid_index(coords, pitch)


def test_lengths_that_disagree():
  with pytest.raises(ValueError, match='coords have 3 rows but there are 4'):
    G.graph_from_coords(np.zeros((3, 2)), num_nodes=4)


def test_graph_from_coords_uses_the_grid_and_ignores_padding():
  rng = np.random.default_rng(2)
  ij = random_grid(rng, 50)
  coords = np.concatenate([ij * 256.0 - 99, np.full((6, 2), np.nan)])
  mask = np.arange(56) < 50
  graph = G.graph_from_coords(coords, 56, mask=mask)
  np.testing.assert_array_equal(adjacency(graph)[:50, :50], touching(ij))
  assert not graph.emask[50:].any()


def test_slides_may_have_different_origins():
  ij = random_grid(np.random.default_rng(3), 40)
  coords = np.concatenate([ij * 100.0, ij * 100.0 + 37])
  slide = np.repeat([4, 2], 40)
  got = adjacency(G.graph_from_coords(coords, slide=slide))
  np.testing.assert_array_equal(got, np.kron(np.eye(2), touching(ij)))


def test_coords_on_no_grid_fall_back_to_a_radius():
  # A hexagonal lattice, turned: six neighbours each.
  row, column = np.meshgrid(np.arange(8), np.arange(8), indexing='ij')
  hexagon = np.stack([row * 3**0.5 / 2, column + row % 2 / 2], -1)
  turn = np.array([[np.cos(0.3), -np.sin(0.3)], [np.sin(0.3), np.cos(0.3)]])
  coords = hexagon.reshape(-1, 2) @ turn * 55
  with pytest.warns(UserWarning, match='lie on no grid'):
    graph = G.graph_from_coords(coords)
  np.testing.assert_array_equal(
    adjacency(graph), np.abs(distance.cdist(coords, coords) - 55) < 1
  )
  G.validate_graph(graph)


# --- radius graphs


@given(seed=st.integers(0, 10**6), n=st.integers(0, 80))
@settings(max_examples=30, deadline=None)
def test_radius_graph_equals_brute_force(seed, n):
  rng = np.random.default_rng(seed)
  coords = rng.normal(size=(n, 2)) * 3 - 5
  mask, slide = rng.random(n) < 0.9, rng.integers(0, 2, n)
  graph = G.radius_graph(coords, 0.9, mask=mask, slide=slide)
  want = distance.cdist(coords, coords) <= 0.9
  want &= mask[:, None] & mask[None] & (slide[:, None] == slide[None])
  np.fill_diagonal(want, False)
  np.testing.assert_array_equal(adjacency(graph), want)
  G.validate_graph(graph, mask)


def test_radius_graph_truncates_to_the_shortest_edges():
  # Node 0 sees three others; k = 2 drops its longest edge at both ends.
  coords = np.array([[0, 0], [1, 0], [0, 2], [-3, 0.0]])
  with pytest.raises(ValueError, match='node 0 has degree 3'):
    G.radius_graph(coords, 3, k=2)
  got = adjacency(G.radius_graph(coords, 3, k=2, truncate=True))
  want = np.zeros((4, 4), bool)
  for i, j in ((0, 1), (0, 2), (1, 2)):
    want[i, j] = want[j, i] = True
  np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize('radius', [0, -1, np.nan, np.inf])
def test_radius_must_be_positive(radius):
  with pytest.raises(ValueError, match='radius'):
    G.radius_graph(np.zeros((2, 2)), radius)


# --- edges given by the user


def test_edges_repeat_and_loop_harmlessly():
  edges = [[0, 1], [1, 0], [0, 1], [2, 2], [1, 2], [2, 1]]
  graph = G.ell_from_edges(edges, 4)
  want = np.zeros((4, 4), bool)
  want[0, 1] = want[1, 0] = want[1, 2] = want[2, 1] = True
  np.testing.assert_array_equal(adjacency(graph), want)
  G.validate_graph(graph)


def test_one_way_edges_are_completed_with_a_warning_or_an_error():
  with pytest.warns(UserWarning, match='2 edges have no opposite'):
    graph = G.ell_from_edges([[0, 1], [2, 1]], 3)
  assert adjacency(graph).sum() == 4
  with pytest.raises(ValueError, match='0 -> 1|2 -> 1'):
    G.ell_from_edges([[0, 1], [2, 1]], 3, symmetrise='error')


def test_too_many_edges_name_the_node():
  star = [(0, j) for j in range(1, 6)] + [(j, 0) for j in range(1, 6)]
  with pytest.raises(ValueError, match='node 0 has degree 5.*k=3'):
    G.ell_from_edges(star, 6, 3)


@given(seed=st.integers(0, 10**6), k=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_truncation_stays_symmetric_and_keeps_what_both_ends_rank_first(
  seed, k
):
  rng = np.random.default_rng(seed)
  n = 12
  pairs = np.argwhere(np.triu(rng.random((n, n)) < 0.6, 1))
  pairs = rng.permutation(pairs)
  listed = np.concatenate([pairs, pairs[:, ::-1]], 1).reshape(-1, 2)
  graph = G.ell_from_edges(listed, n, k, truncate=True)
  G.validate_graph(graph)
  first = {i: [] for i in range(n)}
  for i, j in pairs:
    first[i].append(j)
    first[j].append(i)
  want = np.zeros((n, n), bool)
  for i, j in pairs:
    want[i, j] = want[j, i] = j in first[i][:k] and i in first[j][:k]
  np.testing.assert_array_equal(adjacency(graph), want)


def test_truncation_ranks_an_edge_by_its_first_mention_in_either_direction():
  listed = [[1, 0], [2, 0], [0, 2], [0, 1]]
  got = adjacency(G.ell_from_edges(listed, 3, 1, truncate=True))
  assert got[0, 1]
  assert got.sum() == 2


@pytest.mark.parametrize(
  ('edges', 'error', 'match'),
  [
    ([[0, 3]], ValueError, r'edge 0 is \[0, 3\].*\[0, 3\)'),
    ([[0, 1], [-1, 0]], ValueError, 'edge 1'),
    ([[0.0, 1.0]], TypeError, 'float64'),
    ([[0, 1, 2]], ValueError, r'\[E, 2\]'),
  ],
)
def test_edges_reject(edges, error, match):
  with pytest.raises(error, match=match):
    G.ell_from_edges(edges, 3)


def test_no_edges_at_all():
  graph = G.ell_from_edges([], 3)
  assert graph.nbr.tolist() == [[0], [1], [2]]
  assert not graph.emask.any()


# --- checks and orders


def broken(**changes):
  ij = np.stack(np.meshgrid(range(3), range(3)), -1).reshape(-1, 2)
  graph = G.ell_from_grid(ij)
  leaves = {n: getattr(graph, n).copy() for n in ('nbr', 'emask', 'rev')}
  for name, (index, value) in changes.items():
    leaves[name][index] = value
  return type(graph)(**leaves)


@pytest.mark.parametrize(
  ('changes', 'match'),
  [
    ({'nbr': ((4, 0), 99)}, r'node 4 has a neighbour outside \[0, 9\)'),
    ({'nbr': ((4, 0), 4)}, 'node 4 is its own neighbour'),
    ({'nbr': ((4, 1), 0)}, 'node 1 has an edge whose opposite'),
    ({'rev': ((4, 1), 2)}, 'node 4 has an edge whose opposite'),
    ({'rev': ((4, 1), 8)}, r'slot in rev outside'),
    ({'emask': ((4, 1), False)}, 'empty slot without its own index'),
    ({'nbr': ((0, 7), 1)}, 'node 0 has an empty slot'),
  ],
)
def test_validate_graph_names_the_node(changes, match):
  with pytest.raises(ValueError, match=match):
    G.validate_graph(broken(**changes))


def test_validate_graph_sees_edges_to_padding_and_wrong_dtypes():
  graph = broken()
  G.validate_graph(graph, np.ones(9))
  with pytest.raises(ValueError, match='edge from or to padding'):
    G.validate_graph(graph, np.arange(9) < 8)
  with pytest.raises(ValueError, match='graph.emask is'):
    G.validate_graph(type(graph)(graph.nbr, graph.rev, graph.rev))
  with pytest.raises(ValueError, match='split over axis'):
    G.validate_graph(shard_graph(graph, 3))


def test_validate_graph_reads_batches():
  graph = broken()
  stack = lambda a, b: type(a)(
    *(
      np.stack(p)
      for p in zip(
        (a.nbr, a.emask, a.rev), (b.nbr, b.emask, b.rev), strict=True
      )
    )
  )
  G.validate_graph(stack(graph, graph))
  with pytest.raises(ValueError, match='node 4 of graph 1'):
    G.validate_graph(stack(graph, broken(rev=((4, 1), 2))))


def test_row_major_order_sorts_by_slide_row_column():
  rng = np.random.default_rng(5)
  ij, slide = random_grid(rng, 60), rng.integers(0, 3, 60)
  order = G.row_major_order(ij, slide)
  want = sorted(range(60), key=lambda i: (slide[i], *ij[i]))
  np.testing.assert_array_equal(order, want)


def test_morton_order_interleaves_the_bits():
  ij = random_grid(np.random.default_rng(6), 100)
  low = ij - ij.min(0)
  code = lambda i, j: int(
    ''.join(a + b for a, b in zip(f'{i:012b}', f'{j:012b}', strict=True)), 2
  )
  want = sorted(range(100), key=lambda p: code(*low[p]))
  np.testing.assert_array_equal(G.morton_order(ij), want)
  assert G.morton_order(np.zeros((0, 2), int)).shape == (0,)


# --- a real slide


@pytest.mark.skipif(not KIRC.exists(), reason='no kirc_graph in TMLIB_SHARED')
def test_real_slide_has_its_published_graph():
  with KIRC.open() as file:
    ij = np.array([row[1:] for row in list(csv.reader(file))[1:]]).astype(int)
  graph = G.ell_from_grid(ij)
  G.validate_graph(graph)
  assert graph.emask.sum() == 103_486
  assert (~graph.emask.any(1)).sum() == 8
  row, slot = np.nonzero(graph.emask)
  edges = np.stack([row, graph.nbr[row, slot]], 1)
  matrix = sparse.coo_matrix((np.ones(len(row)), edges.T), (len(ij),) * 2)
  assert sparse.csgraph.connected_components(matrix)[0] == 16
  pairs = cKDTree(ij).query_pairs(1.5, output_type='ndarray')
  both = np.concatenate([pairs, pairs[:, ::-1]])
  np.testing.assert_array_equal(both[np.lexsort(both.T[::-1])], edges)
  # Pixel coordinates, in any order of the patches, give the same graph.
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    pixels = G.graph_from_coords(ij * 256 - 30_000, len(ij))
  np.testing.assert_array_equal(pixels.nbr, graph.nbr)


def test_a_grid_on_which_nothing_touches_is_pointed_out():
  # Pixels taken for grid positions: every patch would be alone.
  ij = 256 * np.stack(np.divmod(np.arange(6), 3), -1)
  with pytest.warns(UserWarning, match='no two of them touch.*grid_index'):
    graph = G.ell_from_grid(ij)
  assert not graph.emask.any()

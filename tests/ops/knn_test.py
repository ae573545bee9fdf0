import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial import distance

from tmlib.ops import graph as G


def adjacency(graph):
  return G.to_dense(graph).astype(bool)


def ranked(features, k):
  """The k nearest by (distance, index), by sorting everything."""
  squared = distance.cdist(features, features, 'sqeuclidean')
  near = np.zeros(squared.shape, bool)
  for i, row in enumerate(squared):
    others = sorted((d, j) for j, d in enumerate(row) if j != i)
    near[i, [j for _, j in others[:k]]] = True
  return near


@given(
  seed=st.integers(0, 10**6),
  n=st.integers(1, 40),
  k=st.integers(1, 8),
  levels=st.sampled_from([2, 4, 1000]),
)
@settings(max_examples=100, deadline=None)
def test_knn_is_exact_with_ties_to_the_lower_index(seed, n, k, levels):
  # Few integer levels make many exact ties.
  features = np.random.default_rng(seed).integers(0, levels, (n, 3)) * 1.0
  near = ranked(features, k)
  graph = G.knn_graph(features, k, chunk=7)
  np.testing.assert_array_equal(adjacency(graph), near & near.T)
  assert graph.num_slots == k
  G.validate_graph(graph)
  union = G.knn_graph(features, k, mutual=False)
  np.testing.assert_array_equal(adjacency(union), near | near.T)
  G.validate_graph(union)


def test_knn_does_not_depend_on_the_chunk_or_on_an_offset():
  rng = np.random.default_rng(4)
  # Integers keep distances exact under the offset; rows 50 to 99 are repeats.
  features = rng.integers(-9, 10, (300, 64)) * 1.0
  features[50:100] = features[:50]
  want = G.knn_graph(features, 6)
  for chunk in (1, 64, 299):
    got = G.knn_graph(features, 6, chunk=chunk)
    np.testing.assert_array_equal(got.nbr, want.nbr)
  moved = G.knn_graph(features.astype(np.float32) + np.float32(1000), 6)
  np.testing.assert_array_equal(moved.nbr, want.nbr)


def test_knn_of_identical_nodes():
  graph = G.knn_graph(np.ones((9, 4)), 2)
  near = ranked(np.ones((9, 4)), 2)
  np.testing.assert_array_equal(adjacency(graph), near & near.T)


@pytest.mark.parametrize(
  ('features', 'k', 'match'),
  [
    (np.ones(3), 1, r'\[N, P\]'),
    (np.ones((3, 2)), 0, 'k=0'),
    (np.array([[1.0], [np.nan], [2.0]]), 1, 'not finite: 1'),
  ],
)
def test_knn_rejects(features, k, match):
  with pytest.raises(ValueError, match=match):
    G.knn_graph(features, k)

import numpy as np
import pytest

from tmlib.data.bag import Bag
from tmlib.data.graphs import with_knn_graphs
from tmlib.data.mil_csv import BagSet


def _set(sizes=(12, 1, 2)):
  rng = np.random.default_rng(0)
  # The second unit would drown the first.
  scale = np.array([1.0, 1000.0])
  bags = [
    Bag((rng.normal(size=(n, 2)) * scale).astype(np.float32), np.ones(n, bool))
    for n in sizes
  ]
  return BagSet(bags, np.arange(len(bags)) % 2, list('abc'))


def _edges(graph):
  nbr, emask, rev = map(np.asarray, (graph.nbr, graph.emask, graph.rev))
  for i, k in np.argwhere(emask):
    assert nbr[nbr[i, k], rev[i, k]] == i
  return {(i, nbr[i, k]) for i, k in np.argwhere(emask)}


def _brute(x, k):
  d = np.square(x[:, None] - x[None]).sum(-1)
  np.fill_diagonal(d, np.inf)
  near = np.argsort(d, 1)[:, : min(k, len(x) - 1)]
  chosen = {(i, j) for i, row in enumerate(near) for j in row}
  return {(i, j) for i, j in chosen if (j, i) in chosen}


@pytest.mark.parametrize('scale', ['bag', 'none'])
def test_mutual_neighbours_equal_brute_force(scale):
  bags = _set()
  found = with_knn_graphs(bags, 3, scale=scale).bags
  for bag in found:
    x = np.asarray(bag.features, np.float64)
    if scale == 'bag' and len(x) > 1:
      x = (x - x.mean(0)) / x.std(0)
    assert _edges(bag.graph) == _brute(x, 3)
  assert not _edges(found[1].graph)  # a single instance stays isolated


def test_scaling_matters_and_other_bags_do_not():
  bags = _set()
  with_scale = with_knn_graphs(bags, 3).bags[0].graph
  without = with_knn_graphs(bags, 3, scale='none').bags[0].graph
  assert _edges(with_scale) != _edges(without)
  alone = with_knn_graphs(bags._replace(bags=bags.bags[:1]), 3).bags[0].graph
  assert _edges(alone) == _edges(with_scale)


def test_errors():
  with pytest.raises(ValueError, match='k must be'):
    with_knn_graphs(_set(), 0)
  with pytest.raises(ValueError, match="'bag' or 'none'"):
    with_knn_graphs(_set(), 2, scale='all')

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.graph import PatchGraph
from tmlib.data.bag import Bag, batch_bags, bucket_size, pad_bag, subsample_bag
from tmlib.ops.graph import ell_from_edges, knn_graph


def _bag(n, p=3, graph=False, seed=0, k=4):
  x = np.random.default_rng(seed).normal(size=(n, p)).astype(np.float32)
  table = knn_graph(x, k) if graph else None
  return Bag(x, np.ones(n, bool), table)


def _dense(graph):
  """Adjacency [N, N] by loops; also checks that `rev` names the way back."""
  nbr, emask, rev = map(np.asarray, (graph.nbr, graph.emask, graph.rev))
  out = np.zeros((len(nbr), len(nbr)), int)
  for i, k in np.argwhere(emask):
    j = nbr[i, k]
    out[i, j] += 1
    assert emask[j, rev[i, k]]
    assert nbr[j, rev[i, k]] == i
  own = np.broadcast_to(np.arange(len(nbr))[:, None], nbr.shape)
  np.testing.assert_array_equal(nbr[~emask], own[~emask])
  assert (rev[~emask] == 0).all()
  return out


def test_bucket_sizes_by_hand():
  sizes = [0, 16, 17, 24, 25, 32, 33, 48, 49, 64, 65, 97, 1000]
  want = [16, 16, 24, 24, 32, 32, 48, 48, 64, 64, 96, 128, 1024]
  assert [bucket_size(n) for n in sizes] == want


def test_buckets_are_few_and_waste_at_most_a_third():
  n = np.arange(16, 100_001)
  sizes = np.array([bucket_size(int(i)) for i in n])
  assert (sizes >= n).all()
  assert ((sizes - n) / sizes).max() <= 1 / 3
  assert len(np.unique(sizes)) <= 27


@pytest.mark.parametrize(('n', 'smallest'), [(-1, 16), (3, 12), (3, 1)])
def test_bucket_errors(n, smallest):
  with pytest.raises(ValueError, match='must be'):
    bucket_size(n, smallest)


def test_padding_keeps_the_bag_and_isolates_the_rest():
  bag = _bag(7, graph=True)
  padded = pad_bag(bag, 12)
  np.testing.assert_array_equal(padded.features[:7], bag.features)
  np.testing.assert_array_equal(padded.mask, np.arange(12) < 7)
  dense = _dense(padded.graph)
  np.testing.assert_array_equal(dense[:7, :7], _dense(bag.graph))
  assert dense.sum() == dense[:7, :7].sum() > 0
  assert padded.graph.nbr.dtype == np.int32


def test_padding_below_the_size_is_an_error():
  with pytest.raises(ValueError, match='cannot pad a bag of 7'):
    pad_bag(_bag(7), 6)


def test_an_empty_bag_can_be_padded():
  padded = pad_bag(_bag(0), 4)
  assert padded.features.shape == (4, 3)
  assert not padded.mask.any()


def test_batch_widens_tables_and_takes_the_bucket():
  bags = [_bag(20, graph=True, k=2), _bag(5, graph=True, k=4)]
  batch = batch_bags(bags)
  assert batch.features.shape == (2, 24, 3)
  assert batch.graph.nbr.shape == (2, 24, 4)
  for b, bag in enumerate(bags):
    n = len(bag.mask)
    one = jax.tree.map(lambda x, b=b: x[b], batch.graph)
    np.testing.assert_array_equal(_dense(one)[:n, :n], _dense(bag.graph))


@pytest.mark.parametrize(
  ('other', 'words'),
  [
    (_bag(3, p=5), 'dim 5 but bag 0 has 3'),
    (_bag(3, graph=True), 'bag 1 has graph but bag 0 has none'),
    (_bag(3).replace(num_segments=2), 'num_segments=2'),
    (_bag(30), 'cannot pad'),
  ],
)
def test_batch_errors(other, words):
  with pytest.raises(ValueError, match=words):
    batch_bags([_bag(4), other], n=16)
  with pytest.raises(ValueError, match='at least one bag'):
    batch_bags([])


def test_a_bag_is_a_pytree_with_a_static_number_of_segments():
  bag = _bag(4, graph=True).replace(num_segments=3)
  assert len(jax.tree.leaves(bag)) == 5
  out = jax.jit(lambda b: b.replace(features=2 * b.features))(bag)
  assert out.num_segments == 3
  np.testing.assert_allclose(out.features, 2 * bag.features)


def test_subsample_is_the_induced_subgraph_in_file_order():
  n, kept = 12, 7
  rng = np.random.default_rng(0)
  upper = np.triu(rng.random((n, n)) < 0.4, 1)
  edges = np.argwhere(upper | upper.T)
  graph = ell_from_edges(edges, n, n)
  # The first feature names the instance.
  features = np.stack([np.arange(n), rng.normal(size=n)], 1)
  bag = pad_bag(Bag(features.astype(np.float32), np.ones(n, bool), graph), 16)
  sample = jax.jit(subsample_bag, static_argnums=2)(
    jax.random.key(1), bag, kept
  )
  names = np.asarray(sample.features[:, 0]).astype(int)
  assert np.asarray(sample.mask).all()  # padding is never drawn
  assert (np.diff(names) > 0).all()
  dense = _dense(pad_bag(bag, 16).graph)
  np.testing.assert_array_equal(
    _dense(sample.graph), dense[np.ix_(names, names)]
  )


def test_subsample_is_uniform_and_keeps_small_bags():
  bag = pad_bag(_bag(5), 10)
  draw = jax.jit(jax.vmap(lambda k: subsample_bag(k, bag, 2).features[:, 0]))
  drawn = np.asarray(draw(jax.random.split(jax.random.key(0), 2000)))
  share = [np.mean(drawn == x) for x in bag.features[:5, 0]]
  # 4000 draws over 5 instances: a standard deviation of .0063.
  np.testing.assert_allclose(share, 0.2, atol=0.025)
  few = subsample_bag(jax.random.key(0), bag, 8)
  assert np.asarray(few.mask).sum() == 5
  assert subsample_bag(jax.random.key(0), bag, 10) is bag
  with pytest.raises(ValueError, match='n must be >= 1'):
    subsample_bag(jax.random.key(0), bag, 0)


def test_graphs_of_jax_arrays_are_accepted():
  bag = _bag(6, graph=True)
  graph = PatchGraph(
    *(jnp.asarray(x) for x in (bag.graph.nbr, bag.graph.emask, bag.graph.rev))
  )
  same = pad_bag(bag.replace(graph=graph), 8)
  np.testing.assert_array_equal(same.graph.nbr, pad_bag(bag, 8).graph.nbr)

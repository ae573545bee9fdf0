import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib.data.bag import Bag
from tmlib.data.packing import (
  pack_bags,
  pack_values,
  unpack_instances,
  unpack_values,
)
from tmlib.ops.graph import knn_graph
from tmlib.ops.packing import plan_packing


def _bags(lengths, seed=0, graph=True):
  rng = np.random.default_rng(seed)
  bags = []
  for n in lengths:
    x = rng.normal(size=(n, 3)).astype(np.float32)
    table = knn_graph(x, 2 + n % 3) if graph and n else None
    bags.append(
      Bag(x, np.ones(n, bool), table, coords=rng.integers(0, 9, (n, 2)))
    )
  return bags


def _edges(graph, start=0, stop=None):
  nbr, emask, rev = map(np.asarray, (graph.nbr, graph.emask, graph.rev))
  for i, k in np.argwhere(emask):
    assert emask[nbr[i, k], rev[i, k]]
    assert nbr[nbr[i, k], rev[i, k]] == i
  stop = len(nbr) if stop is None else stop
  return {
    (i - start, nbr[i, k] - start)
    for i, k in np.argwhere(emask)
    if start <= i < stop
  }


@settings(max_examples=40, deadline=None)
@given(
  lengths=st.lists(st.integers(1, 20), min_size=1, max_size=15),
  segments=st.integers(1, 4),
  seed=st.none() | st.integers(0, 9),
)
def test_packing_and_back(lengths, segments, seed):
  bags = _bags(lengths)
  plan = plan_packing(lengths, 24, segments, seed=seed)
  packed = pack_bags(bags, plan)
  assert packed.num_segments == segments
  assert packed.features.shape == (plan.num_rows, 24, 3)
  for name in ('features', 'coords'):
    back = unpack_instances(getattr(packed, name), plan)
    for bag, x in zip(bags, back, strict=True):
      np.testing.assert_array_equal(x, getattr(bag, name))
  assert packed.mask.sum() == sum(lengths)
  for b, bag in enumerate(bags):
    row, start = plan.row[b], plan.offset[b]
    stop = start + lengths[b]
    assert (packed.segment_ids[row, start:stop] == plan.slot[b]).all()
    graph = type(packed.graph)(
      packed.graph.nbr[row], packed.graph.emask[row], packed.graph.rev[row]
    )
    # The bag's own edges, shifted; every neighbour is one of its instances.
    assert _edges(graph, start, stop) == _edges(bag.graph)


def test_values_and_back():
  plan = plan_packing([5, 3, 4, 6], 10, 3)
  labels = np.array([7, 8, 9, 10])
  packed = pack_values(labels, plan, fill=-1)
  assert packed.shape == (plan.num_rows, 3)
  assert sorted(packed[packed >= 0]) == [7, 8, 9, 10]
  np.testing.assert_array_equal(unpack_values(packed, plan), labels)
  logits = np.random.default_rng(0).normal(size=(4, 2))
  np.testing.assert_array_equal(
    unpack_values(pack_values(logits, plan), plan), logits
  )


def test_an_empty_bag_takes_a_slot_and_no_room():
  bags = _bags([4, 0, 3], graph=False)
  plan = plan_packing([4, 0, 3], 8, 4)
  assert plan.num_rows == 1
  back = unpack_instances(pack_bags(bags, plan).features, plan)
  assert [len(x) for x in back] == [4, 0, 3]


def test_errors():
  bags = _bags([4, 3])
  with pytest.raises(ValueError, match='plan was made for 2 bags of other'):
    pack_bags(bags, plan_packing([4, 4], 8, 2))
  plan = plan_packing([4, 3], 8, 2)
  packed = [bags[0].replace(segment_ids=np.zeros(4, int)), bags[1]]
  with pytest.raises(ValueError, match='bag 0 is packed already'):
    pack_bags(packed, plan)
  with pytest.raises(ValueError, match='bag 0 has graph but bag 1 has none'):
    pack_bags([bags[0], bags[1].replace(graph=None)], plan)

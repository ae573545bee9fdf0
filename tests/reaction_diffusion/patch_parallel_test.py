"""A bag split over devices trains as the whole bag does."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import AxisType

from tmlib import train
from tmlib.mil import Bag, batch_bags, classification_method
from tmlib.ops.graph import ell_from_grid
from tmlib.reaction_diffusion import TMEvolve
from tmlib.reaction_diffusion.patch_parallel import PatchParallel, patch_data
from tmlib.train import aot

P = 12
MODEL = TMEvolve(2, hidden=16, regions=3, num_concepts=3, steps=2, dropout=0.2)


def slide(rows, columns, seed):
  rng = np.random.default_rng(seed)
  ij = np.stack(np.divmod(np.arange(rows * columns), columns), -1)
  # A ragged tissue: some patches are missing.
  ij = ij[rng.uniform(size=len(ij)) < 0.9].astype(np.int32)
  features = rng.normal(size=(len(ij), P)).astype(np.float32)
  mask = np.ones(len(ij), bool)
  return Bag(features, mask, graph=ell_from_grid(ij))


BAGS = [slide(20, 5, 0), slide(16, 6, 1)]
LABELS = np.array([0, 1])


def whole_data():
  arrays = {'bag': batch_bags(BAGS, 100), 'label': LABELS}
  return train.array_data(arrays, 1, shuffle=False)


def method(model):
  return classification_method(model, optax.sgd(0.1), num_classes=2)


def losses(model, data, mesh):
  rows = []

  class Keep:
    def write(self, step, row):
      rows.append(row['loss'])

    def close(self):
      pass

  options = train.Options(log_every=1, mesh=mesh)
  result = train.fit(
    method(model), data, steps=3, options=options, writers=[Keep()]
  )
  return np.array(rows), result.state.params


def test_equals_the_whole_bag_on_one_device():
  one = jax.devices()[:1]
  mesh = jax.make_mesh(
    (1, 1), ('run', 'data'), axis_types=(AxisType.Auto,) * 2, devices=one
  )
  build = method(MODEL)(None)
  data = whole_data()
  wanted = []
  with jax.set_mesh(mesh):
    update = jax.jit(build.update)
    load = lambda step: data.load(step, slice(0, 1))
    state = build.init(jax.random.key(0), load(0))
    for step in range(3):
      state, metrics = update(state, load(step))
      wanted.append(float(metrics['loss']))
  found, params = losses(
    PatchParallel(MODEL), patch_data(BAGS, LABELS, 4), (1, 4, 1)
  )
  np.testing.assert_allclose(found, wanted, atol=2e-6)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=5e-6),
    params,
    state.params,
  )


def test_bad_bags_are_named():
  with pytest.raises(ValueError, match='one label per bag'):
    patch_data(BAGS, LABELS[:1], 2)
  with pytest.raises(ValueError, match=r'\[1\] have no graph'):
    patch_data([BAGS[0], BAGS[1].replace(graph=None)], LABELS, 2)
  with pytest.raises(ValueError, match='use fewer shards'):
    patch_data(BAGS, LABELS, 50)


@pytest.mark.aot
def test_compiles_with_a_halo_and_without_a_gather():
  pytest.importorskip('libtpu', reason='libtpu is not installed')
  data = patch_data([slide(64, 10, 0)], LABELS[:1], 16)
  (found,) = aot.compile_for(
    method(PatchParallel(MODEL)), data, 'v5e:4x4'
  ).values()
  assert 'collective-permute' in found.collectives
  assert 'all-to-all' not in found.collectives
  gathered = found.collectives.get('all-gather', (0, 0, 0))
  rows = data.batch_size // 16
  # Nothing as large as a hundred-and-twenty-eighth of one field of the bag.
  assert gathered[1] < data.batch_size * 4
  # Two halos, forward and backward, are less than what a chip holds.
  largest = found.collectives['collective-permute'].largest
  assert largest <= rows * (16 + 3) * 4

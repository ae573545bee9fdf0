"""How the bags of a cross-validation are laid out."""

import jax
import pytest

from configs import mil
from experiments import tmevolve


@pytest.mark.parametrize(
  ('batch', 'instances'),
  [(16, 10**3), (16, 835_200), (3, 700_000), (16, 10**8), (1, 10**9)],
)
def test_parts_of_a_batch(batch, instances, monkeypatch):
  monkeypatch.setattr(jax, 'device_count', lambda: 1)
  fits = lambda parts: instances <= parts * tmevolve._INSTANCES
  parts = tmevolve._microbatches(batch, instances)
  assert batch % parts == 0
  assert fits(parts) or parts == batch
  smaller = [m for m in range(1, parts) if batch % m == 0]
  assert not any(fits(m) for m in smaller)


def test_parts_divide_what_a_device_has(monkeypatch):
  monkeypatch.setattr(jax, 'device_count', lambda: 4)
  assert tmevolve._microbatches(16, 10**8) == 4


@pytest.mark.parametrize(
  ('model', 'packed'), [('abmil', True), ('transmil', False)]
)
def test_models_that_unpack_get_padded_bags(model, packed):
  config = mil.get_config('tiny')
  bagset = tmevolve.load_set(config, 'musk1')
  arrays, lay = tmevolve._arrays(
    bagset, may_pack=not tmevolve.MODELS[model].unpacks
  )
  assert (arrays['bag'].segment_ids is not None) == packed
  # Every instance is there once, whatever the layout.
  total = sum(len(bag.mask) for bag in bagset.bags)
  assert arrays['bag'].mask.sum() == total
  assert lay(tmevolve.make_folds(config, bagset).train).shape[1:] == (
    arrays['label'].shape
  )

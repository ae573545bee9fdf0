import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib.data.bag import Bag
from tmlib.data.folds import (
  fold_statistics,
  instance_statistics,
  standardize,
  stratified_folds,
)


@settings(max_examples=100, deadline=None)
@given(
  labels=st.lists(st.integers(0, 3), min_size=2, max_size=80),
  folds=st.integers(2, 10),
  seed=st.integers(0, 1000),
)
def test_classes_and_sizes_differ_by_one_at_most(labels, folds, seed):
  if folds > len(labels):
    with pytest.raises(ValueError, match='num_folds must be in'):
      stratified_folds(labels, folds, seed)
    return
  labels = np.array(labels)
  found = stratified_folds(labels, folds, seed)
  np.testing.assert_array_equal(found, stratified_folds(labels, folds, seed))
  for members in [found, *(found[labels == c] for c in np.unique(labels))]:
    counts = np.bincount(members, minlength=folds)
    assert np.ptp(counts) <= 1


def test_seeds_give_other_folds_and_every_fold_is_hit_alike():
  labels = np.arange(58) < 26
  folds = np.stack([stratified_folds(labels, 10, s) for s in range(400)])
  share = np.mean(folds[0] == folds[1])
  assert share < 0.4
  # Bag 0 lands in each fold with probability 1/10: sd .015 over 400 seeds.
  np.testing.assert_allclose(
    np.bincount(folds[:, 0], minlength=10) / 400, 0.1, atol=0.06
  )
  # No two bags are tied to one fold: Pr = 1/10 or less.
  assert np.mean(folds[:, 0] == folds[:, 40]) < 0.2


def _bags(seed=0):
  rng = np.random.default_rng(seed)
  make = lambda n: Bag(
    (3 + 2 * rng.normal(size=(n, 4))).astype(np.float32), np.ones(n, bool)
  )
  return [make(n) for n in (3, 5, 1, 8, 0, 2)]


def test_statistics_count_instances_and_ignore_padding():
  bags = _bags()
  junk = np.concatenate([bags[0].features, np.full((2, 4), np.nan)])
  bags[0] = Bag(junk.astype(np.float32), np.arange(5) < 3)
  mean, std = instance_statistics(bags, [0, 1])
  rows = np.concatenate([junk[:3], bags[1].features]).astype(np.float64)
  np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-6)
  np.testing.assert_allclose(std, rows.std(0), rtol=1e-6)


def test_constant_features_are_left_at_zero():
  bag = Bag(np.full((9, 1), 0.1, np.float32), np.ones(9, bool))
  (out,) = standardize([bag], [0])
  np.testing.assert_allclose(out.features, 0, atol=1e-6)
  with pytest.raises(ValueError, match='no instance'):
    instance_statistics([bag], [])


def test_test_bags_never_touch_the_statistics_of_their_fold():
  bags, folds = _bags(), np.array([0, 1, 2, 0, 1, 2])
  before = fold_statistics(bags, folds)
  bags[0] = bags[0].replace(features=bags[0].features + 1e6)
  after = fold_statistics(bags, folds)
  np.testing.assert_array_equal(before[0][0], after[0][0])
  np.testing.assert_array_equal(before[1][0], after[1][0])
  assert np.abs(after[0][1] - before[0][1]).max() > 1
  scaled = standardize(bags, np.flatnonzero(folds != 0))
  np.testing.assert_allclose(
    scaled[1].features,
    (bags[1].features - after[0][0]) / after[1][0],
    rtol=1e-5,
  )


def test_standardised_training_bags_have_mean_zero_and_unit_spread():
  scaled = standardize(_bags(), np.array([0, 1, 3]))
  rows = np.concatenate([scaled[i].features for i in (0, 1, 3)])
  np.testing.assert_allclose(rows.mean(0), 0, atol=1e-6)
  np.testing.assert_allclose(rows.std(0), 1, rtol=1e-5)

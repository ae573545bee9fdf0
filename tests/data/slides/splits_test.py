import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.slides.support import write_csv
from tmlib.data.slides import (
  TableError,
  balanced_order,
  epoch_order,
  event_balanced_order,
  patient_folds,
  read_splits,
  site_folds,
)


def test_clam_splits_and_their_bool_twins(tmp_path):
  write_csv(
    tmp_path / 'splits_0.csv',
    ',train,val,test',
    [(0, 'a.svs', 'c', 'd'), (1, 'b', '', 'e')],
  )
  write_csv(
    tmp_path / 'splits_0_bool.csv',
    ',train,val,test',
    [(x, x in 'ab', x in 'c', x in 'de') for x in ('a', 'b', 'c', 'd', 'e')],
  )
  write_csv(tmp_path / 'splits_0_descriptor.csv', ',train', [('LUAD', 3)])
  write_csv(tmp_path / 'splits_10.csv', ',train,val', [(0, 'x', 'y')])
  write_csv(tmp_path / 'splits_2.csv', ',train,val', [(0, 'x', 'y')])
  splits = read_splits(tmp_path)
  assert [s.name for s in splits] == ['splits_0', 'splits_2', 'splits_10']
  assert splits[0][1:] == (('a', 'b'), ('c',), ('d', 'e'))
  (twin,) = read_splits(tmp_path / 'splits_0_bool.csv')
  assert twin[1:] == splits[0][1:]


@pytest.mark.parametrize(
  ('header', 'rows', 'match'),
  [
    (',train,val', [(0, 'a', 'a')], 'a is in train and in val'),
    (',train,val', [(0, '', 'a')], 'nothing to train on'),
    ('slide_id,label', [('a', 'x')], 'columns train and val or test; it has'),
    ('train,val', [('True', 'False')], 'no column of ids'),
  ],
)
def test_bad_splits(tmp_path, header, rows, match):
  path = write_csv(tmp_path / 's.csv', header, rows)
  with pytest.raises(TableError, match=match):
    read_splits(path)


def test_names_ids_and_marks_as_others_write_them(tmp_path):
  path = write_csv(
    tmp_path / 'a.csv',
    'Train,valid,Test',
    [('1.0', '3.0', '7.0'), ('2', '', '')],
  )
  (split,) = read_splits(path)
  assert split[1:] == (('1', '2'), ('3',), ('7',))
  path = write_csv(
    tmp_path / 'b.csv',
    'row,slide_id,train,test',
    [(0, 'a', 1, 0), (1, 'b', 0, 1)],
  )
  (split,) = read_splits(path)
  assert split[1:] == (('a',), (), ('b',))


def test_a_folder_without_splits(tmp_path):
  with pytest.raises(FileNotFoundError, match='no split table'):
    read_splits(tmp_path)


@given(
  st.lists(st.integers(0, 11), min_size=8, max_size=60),
  st.integers(2, 4),
  st.integers(0, 9),
)
@settings(deadline=None, max_examples=60)
def test_a_patient_is_in_one_fold(owners, folds, seed):
  cases = [f'p{x}' for x in owners]
  if len(set(cases)) < folds:
    return
  labels = [x % 2 for x in owners]
  fold = patient_folds(cases, labels, folds, seed)
  for case in set(cases):
    assert len({f for f, c in zip(fold, cases, strict=True) if c == case}) == 1
  # Patients of each label are spread to within one.
  patients = {
    c: (f, c_l) for f, c, c_l in zip(fold, cases, labels, strict=True)
  }
  for label in set(labels):
    count = np.bincount(
      [f for f, kind in patients.values() if kind == label], minlength=folds
    )
    assert np.ptp(count) <= 1
  assert set(fold) == set(range(folds))


def test_sites_stay_whole_and_labels_even():
  rng = np.random.default_rng(0)
  sites = [f'{s:02d}' for s in rng.choice(20, 400)]
  labels = rng.integers(0, 2, 400)
  fold = site_folds(sites, labels, 4, seed=1)
  for site in set(sites):
    assert len(set(fold[np.array(sites) == site])) == 1
  for label in (0, 1):
    count = np.bincount(fold[labels == label], minlength=4)
    # Twenty sites of about ten bags of a label: within one site.
    assert np.ptp(count) <= 12
  assert (site_folds(sites, labels, 4, seed=1) == fold).all()


def test_folds_that_cannot_be():
  with pytest.raises(ValueError, match='number of patients; got 3'):
    patient_folds(['a', 'a', 'b'], [0, 0, 1], 3)
  with pytest.raises(ValueError, match='number of sites; got 3'):
    site_folds(['a', 'a', 'b'], [0, 0, 1], 3)
  with pytest.raises(ValueError, match='1 of 2 bags have no site'):
    site_folds(['a', ''], [0, 1], 2)


def test_orders_go_through_all_and_start_with_shorter_ones():
  members = np.array([3, 5, 8])
  order = epoch_order(members, 9, seed=1)
  for epoch in order.reshape(3, 3):
    assert sorted(epoch) == [3, 5, 8]
  np.testing.assert_array_equal(epoch_order(members, 5, seed=1), order[:5])
  with pytest.raises(ValueError, match='no bag'):
    epoch_order([], 3)


def test_balanced_order():
  labels = np.array([0] * 6 + [1] * 2 + [2])
  order = balanced_order(np.arange(9), labels, 36, seed=0)
  drawn = labels[order].reshape(-1, 3)
  assert (np.sort(drawn, 1) == [0, 1, 2]).all()
  # Within a class every bag is drawn before any is drawn again.
  count = collections.Counter(order.tolist())
  assert [count[i] for i in range(6)] == [2] * 6
  assert [count[6], count[7], count[8]] == [6, 6, 12]
  np.testing.assert_array_equal(
    balanced_order(np.arange(9), labels, 17, seed=0), order[:17]
  )


@pytest.mark.parametrize(
  ('events', 'least', 'want'), [(2, 1, 1), (2, 3, 3), (10, 1, 4), (20, 1, 8)]
)
def test_every_batch_has_its_events(events, least, want):
  event = np.arange(20) < events
  order = event_balanced_order(np.arange(20), event, 8, 50, min_events=least)
  batches = order.reshape(50, 8)
  assert (event[batches].sum(1) == want).all()
  # Nobody is forgotten.
  assert set(order) == set(range(20))
  shorter = event_balanced_order(np.arange(20), event, 8, 7, min_events=least)
  np.testing.assert_array_equal(shorter, order[:56])


def test_no_event_cannot_be_balanced():
  with pytest.raises(ValueError, match='all patients are censored'):
    event_balanced_order(np.arange(3), np.zeros(3), 2, 1)
  with pytest.raises(ValueError, match=r'min_events=3 must be in \[1, 2\]'):
    event_balanced_order(np.arange(3), np.ones(3), 2, 1, min_events=3)

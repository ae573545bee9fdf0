"""Deletion requests as users write them: indices, masks, mistakes."""

import numpy as np
import pytest
from absl.testing import absltest

from tmlib import unlearning as ul
from tmlib.unlearning import data as data_lib


class SplitTest(absltest.TestCase):
  def test_indices_and_masks(self):
    for forget in ([4, 1], np.array([4, 1]), (4, 1)):
      retain, gone = ul.split_indices(6, forget)
      np.testing.assert_array_equal(retain, [0, 2, 3, 5])
      np.testing.assert_array_equal(gone, [4, 1])
    mask = np.isin(np.arange(6), [1, 4])
    np.testing.assert_array_equal(ul.split_indices(6, mask)[1], [1, 4])

  def test_a_repeated_index_counts_once(self):
    with pytest.warns(UserWarning, match='repeats 2 indices'):
      retain, gone = ul.split_indices(6, [4, 1, 4, 4])
    np.testing.assert_array_equal(gone, [4, 1])
    np.testing.assert_array_equal(retain, [0, 2, 3, 5])

  def test_mistakes(self):
    for match, forget in (
      ('nothing to delete', []),
      ('nothing to delete', np.zeros(6, bool)),
      ('nothing is retained', np.arange(6)),
      ('indices 1 to 6', [1, 6]),
      ('indices -1 to 2', [2, -1]),
      ('mask of 5', np.ones(5, bool)),
      ('one axis', [[1, 2]]),
    ):
      with pytest.raises(ValueError, match=match):
        ul.split_indices(6, forget)
    for forget in ([1.0, 2.0], ['1', '2']):
      with pytest.raises(TypeError, match='integer indices'):
        ul.split_indices(6, forget)

  def test_roles(self):
    roles = ul.assign_roles(4, [[0], [2, 3]])
    np.testing.assert_array_equal(roles, [[2, 1, 1, 1], [1, 1, 2, 2]])


class RequestDataTest(absltest.TestCase):
  def test_mistakes(self):
    x, y = np.ones((4, 2), np.float32), np.array([0, 1, 2, 2])
    roles = ul.assign_roles(4, [[0], [2, 3]])
    make = lambda arrays, **k: data_lib.request_data(arrays, roles, 2, **k)
    make({'x': x, 'y': y, 'teacher': np.zeros((4, 3))})
    for match, call in (
      ('x holds NaN', lambda: make({'x': x * np.nan, 'y': y})),
      ('y has leading shape', lambda: make({'x': x, 'y': y[:3]})),
      ('label -1', lambda: make({'x': x, 'y': y - 1})),
      (
        'pass y - 1',
        lambda: make({'x': x, 'y': y + 1, 'teacher': np.zeros((4, 3))}),
      ),
      (
        'target has leading shape',
        lambda: make({'x': x, 'y': y}, per_run={'target': np.zeros((4, 3))}),
      ),
      ('assign_roles', lambda: data_lib.request_data({'x': x}, [0, 2], 2)),
    ):
      with pytest.raises(ValueError, match=match):
        call()


if __name__ == '__main__':
  absltest.main()

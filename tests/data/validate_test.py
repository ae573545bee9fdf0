import ml_dtypes
import numpy as np
import pytest

from tmlib.data.bag import Bag, batch_bags, pad_bag
from tmlib.data.validate import make_bag, select_nonempty, validate_bag
from tmlib.ops.graph import knn_graph

_X = np.random.default_rng(0).normal(size=(5, 4))


@pytest.mark.parametrize(
  'dtype', [np.float16, ml_dtypes.bfloat16, np.float64, np.int64, np.uint8]
)
def test_real_dtypes_become_float32(dtype):
  bag = make_bag((10 * np.abs(_X)).astype(dtype))
  assert bag.features.dtype == np.float32
  np.testing.assert_array_equal(
    bag.features, (10 * np.abs(_X)).astype(dtype).astype(np.float32)
  )


@pytest.mark.parametrize('dtype', [complex, object, 'U3'])
def test_other_dtypes_are_refused(dtype):
  with pytest.raises(TypeError, match='expected real numbers'):
    make_bag(np.ones((2, 2)).astype(dtype))


def test_a_leading_one_is_squeezed():
  bag = make_bag(_X[None], coords=np.arange(10).reshape(5, 2), dim=4)
  assert bag.features.shape == (5, 4)
  assert bag.coords.dtype == np.int32
  batch = Bag(_X[None], np.ones((1, 5), bool))
  assert validate_bag(batch).mask.shape == (5,)


@pytest.mark.parametrize('shape', [(0,), (0, 4), (1, 0, 4)])
def test_empty_files_make_empty_bags(shape):
  bag = make_bag(np.zeros(shape), dim=4)
  assert bag.features.shape == (0, 4)
  assert bag.mask.shape == (0,)


def test_wrong_dimension_names_the_encoder_and_the_file():
  words = (
    r'features of a/slide_17\.h5 have dim 4 but the model expects 1024 '
    r'\(encoder "uni"\); re-extract'
  )
  with pytest.raises(ValueError, match=words):
    make_bag(_X, dim=1024, encoder='uni', source='a/slide_17.h5')


@pytest.mark.parametrize('junk', [np.nan, np.inf, -np.inf])
def test_non_finite_rows_are_named(junk):
  x = _X.copy()
  x[[1, 3], 2] = junk
  with pytest.raises(ValueError, match=r's\.h5 .* 2 of 5 rows \(rows 1, 3\)'):
    make_bag(x, source='s.h5')


def test_many_bad_rows_are_counted_not_listed():
  x = np.full((100, 2), np.nan)
  with pytest.raises(ValueError, match=r'100 of 100 .*0, 1, 2, 3, 4, \.\.\.'):
    make_bag(x)


def test_overflow_in_the_cast_is_found():
  with pytest.raises(ValueError, match='infinite in 1 of 2 rows'):
    make_bag(np.array([[1.0], [1e300]]))


def test_padding_may_hold_anything():
  x = np.array([[1.0], [np.nan]])
  assert validate_bag(Bag(x, np.array([True, False]))).mask.sum() == 1


def test_bad_concepts_are_found_like_bad_features():
  c = np.ones((5, 2))
  c[4, 0] = np.nan
  with pytest.raises(ValueError, match=r'concepts of .* \(rows 4\)'):
    make_bag(_X, concepts=c)


@pytest.mark.parametrize(
  'fields',
  [
    {'coords': np.zeros((4, 2), int)},
    {'concepts': np.zeros((6, 2))},
    {'graph': knn_graph(_X[:3], 2)},
  ],
)
def test_lengths_must_agree(fields):
  (name,) = fields
  with pytest.raises(
    ValueError, match=f'{name} of s has . rows but there are 5'
  ):
    make_bag(_X, source='s', **fields)


@pytest.mark.parametrize(
  'coords',
  [np.full((5, 2), 0.5), np.zeros((5, 3), int), np.full((5, 2), np.nan)],
)
def test_coordinates_must_be_whole(coords):
  with pytest.raises(ValueError, match='coords of bag must be whole'):
    make_bag(_X, coords=coords)


def test_wrong_rank():
  with pytest.raises(ValueError, match=r'shape \(2, 5, 4\); expected'):
    make_bag(np.stack([_X, _X]))


def test_empty_bags_by_policy():
  bags = [make_bag(_X), make_bag(np.zeros((0, 4))), make_bag(_X[:1])]
  with pytest.warns(UserWarning, match='1 of 3 bags are empty: b; skipped'):
    kept = select_nonempty(bags, ['a', 'b', 'c'])
  np.testing.assert_array_equal(kept, [0, 2])
  with pytest.raises(
    ValueError, match='1 of 3 bags are empty: 1; use on_empty'
  ):
    select_nonempty(bags, on_empty='error')
  with pytest.raises(ValueError, match='nothing is left'):
    select_nonempty(bags[1:2])
  with pytest.raises(ValueError, match="'skip' or 'error'"):
    select_nonempty(bags, on_empty='drop')
  np.testing.assert_array_equal(select_nonempty(bags[:1]), [0])


def test_an_edge_list_is_no_graph():
  edges = np.array([[0, 1, 2], [1, 2, 3]])
  words = (
    r'graph of s must be a PatchGraph, got a ndarray of shape \(2, 3\); .*'
  )
  with pytest.raises(TypeError, match=words + r'ell_from_edges\(edges, n\)'):
    make_bag(_X, graph=edges, source='s')
  with pytest.raises(TypeError, match=r'graph of bags\[0\] must be a PatchGr'):
    batch_bags([Bag(_X, np.ones(5, bool), graph=edges)])


def test_arrays_are_no_bags():
  words = (
    r'must be a Bag, got a ndarray of shape \(5, 4\); make_bag\(features\)'
  )
  with pytest.raises(TypeError, match=r'bags\[1\] ' + words):
    batch_bags([make_bag(_X), _X])
  with pytest.raises(TypeError, match='bag ' + words):
    pad_bag(_X, 8)
  with pytest.raises(TypeError, match='s.h5 ' + words):
    validate_bag(_X, source='s.h5')
  with pytest.raises(TypeError, match=r'bags must be a list, .* pass \[bag\]'):
    batch_bags(make_bag(_X))


def test_a_batch_is_not_batched_again():
  batch = batch_bags([make_bag(_X)])
  with pytest.raises(
    ValueError, match=r'shape \(1, 16, 4\), expected \[N, P\]'
  ):
    batch_bags([batch])

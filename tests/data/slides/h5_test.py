import subprocess
import sys
import warnings

import h5py
import numpy as np
import pytest

from tests.data.slides.support import (
  features_of,
  grid_coords,
  write_clam,
  write_trident,
)
from tmlib.data import read_h5
from tmlib.data.slides import SlideFileError, read_h5_header


@pytest.fixture(name='path')
def path_fixture(tmp_path):
  return tmp_path / 'a.h5'


def test_clam_infers_the_pitch_and_says_so(path):
  features, coords = features_of(12), grid_coords(3, 4, 512)
  write_clam(path, features, coords)
  with pytest.warns(UserWarning, match='a.h5: pitch of 512 px inferred'):
    slide = read_h5(path)
  np.testing.assert_array_equal(slide.features, features)
  np.testing.assert_array_equal(slide.coords, coords)
  assert slide.coords.dtype == np.int64
  assert slide.pitch == 512


def test_attributes_of_the_whole_file_count(path):
  write_clam(path, features_of(1), grid_coords(1, 1))
  with h5py.File(path, 'a') as file:
    file.attrs.update(patch_size=256, patch_size_level0=512)
  assert read_h5(path).pitch == 512


@pytest.mark.parametrize('told', [300, 448, 512])
def test_a_pitch_that_a_small_slide_lies_on_roughly_is_not_taken(path, told):
  attrs = dict(patch_size=told, patch_size_level0=told)
  write_trident(path, features_of(12), grid_coords(3, 4, 256), **attrs)
  with pytest.warns(UserWarning, match='pitch of 256 px inferred'):
    assert read_h5(path).pitch == 256


def test_jitter_leaves_the_pitch_that_is_told(path):
  coords = grid_coords(9, 9) + np.random.default_rng(0).integers(
    -30, 30, (81, 2)
  )
  attrs = dict(patch_size=256, patch_size_level0=256)
  write_trident(path, features_of(81), coords, **attrs)
  assert read_h5(path).pitch == 256


@pytest.mark.parametrize('downsample', [2.0, (2.0, 2.0)])
def test_clam_attributes_give_the_pitch(path, downsample):
  attrs = dict(patch_size=256, patch_level=1, downsample=downsample, name='a')
  write_clam(path, features_of(6), grid_coords(2, 3, 512), attrs)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    slide = read_h5(path)
  assert (slide.pitch, slide.patch_size) == (512, 512)
  assert slide.attrs['name'] == 'a'


@pytest.mark.parametrize(
  ('attrs', 'pitch'),
  [
    # 40x slide patched at 20x: 256 px of 20x are 512 of level 0.
    (dict(patch_size=256, patch_size_level0=512, overlap=0), 512),
    (dict(patch_size=256, patch_size_level0=512, overlap=64), 384),
    (dict(patch_size=256, patch_size_level0=512, overlap='None'), 512),
    (dict(patch_size='256', patch_size_level0=b'512'), 512),
    (dict(patch_size='None', patch_size_level0=np.array([512])), 512),
  ],
)
def test_trident_pitch_is_of_level_0_less_the_overlap(path, attrs, pitch):
  write_trident(path, features_of(6), grid_coords(2, 3, pitch), **attrs)
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    slide = read_h5(path)
  assert (slide.pitch, slide.patch_size) == (pitch, 512)
  assert slide.attrs['savetodir'] is None
  assert slide.attrs['encoder'] == 'uni_v1'


def test_positions_overrule_wrong_attributes(path):
  # CLAM stores no step: patches of 256 px, 100 px apart.
  attrs = dict(patch_size=256, downsample=1.0)
  write_clam(path, features_of(6), grid_coords(2, 3, 100), attrs)
  with pytest.warns(UserWarning, match='attributes say 256'):
    slide = read_h5(path)
  assert (slide.pitch, slide.patch_size) == (100, 256)


@pytest.mark.parametrize('shape', [(0, 4), (0,), (1, 0, 4)])
def test_empty_slides(path, shape):
  dim = 4 if len(shape) > 1 else 0
  write_trident(path, np.zeros(shape, np.float32), np.zeros((0, 2)))
  slide = read_h5(path)
  assert slide.features.shape == (0, dim)
  assert slide.coords.shape == (0, 2)
  assert read_h5_header(path) == (0, dim, 'float32', True)


def test_one_patch(path):
  write_clam(path, features_of(1), [[5, 7]])
  slide = read_h5(path)
  assert slide.features.shape == (1, 4)
  assert slide.pitch is None


def test_a_leading_one_goes(path):
  features = features_of(6).astype(np.float16)
  write_clam(path, features[None], grid_coords(2, 3)[None])
  with pytest.warns(UserWarning, match='inferred'):
    slide = read_h5(path)
  np.testing.assert_array_equal(slide.features, features)
  assert slide.features.dtype == np.float16
  assert slide.coords.shape == (6, 2)
  assert read_h5_header(path) == (6, 4, 'float16', True)


def test_no_positions(path):
  write_clam(path, features_of(3))
  slide = read_h5(path)
  assert slide.coords is None
  assert slide.pitch is None


@pytest.mark.parametrize(
  ('content', 'match'),
  [
    ({'coords': np.zeros((3, 2), int)}, 'coords but no features'),
    ({'other': np.zeros(3)}, r"no dataset \"features\"; it holds \['other'\]"),
    ({'features': np.zeros((2, 3, 4))}, r'shape \(2, 3, 4\), expected'),
    ({'features': np.zeros(4)}, r'shape \(4,\).*slide embedding'),
    (
      {'features': np.zeros((3, 2)), 'coords': np.zeros((2, 2), int)},
      'coords have 2 rows but there are 3',
    ),
    (
      {'features': np.zeros((2, 2)), 'coords': np.full((2, 2), np.nan)},
      'finite',
    ),
    ({'features': np.array([[b'a', b'b']])}, 'dtype'),
  ],
)
def test_what_is_no_slide_is_named(path, content, match):
  with h5py.File(path, 'w') as file:
    for name, value in content.items():
      file[name] = value
  with pytest.raises(SlideFileError, match=match) as error:
    read_h5(path)
  assert 'a.h5' in str(error.value)


def test_no_file_and_no_hdf5(tmp_path):
  with pytest.raises(FileNotFoundError, match=r'x\.h5'):
    read_h5(tmp_path / 'x.h5')
  (tmp_path / 'y.h5').write_bytes(b'not HDF5')
  with pytest.raises(SlideFileError, match=r'y\.h5: no readable HDF5'):
    read_h5(tmp_path / 'y.h5')


def test_a_header_that_asks_for_terabytes_is_refused(path):
  with h5py.File(path, 'w') as file:
    file.create_dataset('features', (2**31, 1024), 'f4', chunks=(64, 1024))
  with pytest.raises(SlideFileError, match='damaged'):
    read_h5(path)


def test_without_h5py_one_is_told_how_to_get_it(path):
  code = (
    'import sys; sys.modules["h5py"] = None\n'
    'from tmlib.data import read_h5\n'
    f'try: read_h5({str(path)!r})\n'
    'except ModuleNotFoundError as error: print(error)\n'
  )
  result = subprocess.run(
    [sys.executable, '-c', code], capture_output=True, text=True, check=True
  )
  assert 'pip install "tmlib[h5]"' in result.stdout

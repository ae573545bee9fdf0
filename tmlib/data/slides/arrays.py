"""Patch features in .npz, .npy and .pt, and one reader for all formats.

Axes: N patches, P features.
"""

import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tmlib.data.slides.h5 import load_h5, read_h5_header
from tmlib.data.slides.pt import read_pt
from tmlib.data.slides.slide import (
  Header,
  Slide,
  SlideFileError,
  make_slide,
  squeeze_features,
)

__all__ = ['HDF5', 'SUFFIXES', 'load_slide', 'read_header', 'read_slide']

# Richest first: what is taken where a slide has several files.
HDF5 = ('.h5', '.hdf5')
SUFFIXES = (*HDF5, '.npz', '.pt', '.pth', '.npy')

_FEATURES = ('features', 'feats', 'embeddings', 'x')
_COORDS = ('coords', 'coordinates')


def read_slide(path: str | Path) -> Slide:
  """Reads one slide by the suffix of its file.

  A .pt file or .npz archive may hold one array [N, P], or a mapping with
  'features' and perhaps 'coords', 'pitch' and 'patch_size'.

  Args:
    path: of a file with one of `SUFFIXES`.

  Returns:
    Slide.

  Raises:
    ModuleNotFoundError: h5py is needed and missing.
    FileNotFoundError: no such file.
    SlideFileError: another suffix, or a file that is damaged or unsafe.
  """
  slide = load_slide(path)
  if slide.note:
    warnings.warn(f'{path}: {slide.note}', stacklevel=2)
  return slide


def load_slide(path: str | Path) -> Slide:
  """`read_slide` without its warning; `Slide.note` holds it."""
  suffix = _suffix(path)
  if suffix in HDF5:
    return load_h5(path)
  if suffix in ('.pt', '.pth'):
    return _from_mapping(read_pt(path), path)
  return _from_mapping(_load_numpy(path, suffix), path)


def read_header(path: str | Path) -> Header:
  """Sizes of a slide, reading as little of its file as the format allows.

  Args:
    path: of a file with one of `SUFFIXES`.

  Returns:
    Header.

  Raises:
    ModuleNotFoundError, FileNotFoundError, SlideFileError: as `read_slide`.
  """
  suffix = _suffix(path)
  if suffix in HDF5:
    return read_h5_header(path)
  if suffix == '.npz':
    return _npz_header(path)
  found = (
    read_pt(path, mmap=True)
    if suffix in ('.pt', '.pth')
    else _load_numpy(path, suffix)
  )
  features, coords = _parts(found, path)
  n, dim = squeeze_features(features.shape, path)
  return Header(n, dim, str(features.dtype), coords is not None)


def _suffix(path: str | Path) -> str:
  suffix = Path(path).suffix.lower()
  if suffix not in SUFFIXES:
    raise SlideFileError(
      f'{path}: suffix {suffix!r} is none of {", ".join(SUFFIXES)}'
    )
  return suffix


def _parts(found: Any, path: str | Path) -> tuple[np.ndarray, Any]:
  """Features, and coords or None, of what a file held."""
  if isinstance(found, np.ndarray):
    return found, None
  if not isinstance(found, Mapping):
    raise SlideFileError(
      f'{path}: holds a {type(found).__name__}, expected features [patches, '
      'dim] or a mapping with "features"'
    )
  arrays = {k: v for k, v in found.items() if isinstance(v, np.ndarray)}
  for name in _FEATURES:
    if name in arrays:
      coords = next((arrays[k] for k in _COORDS if k in arrays), None)
      return arrays[name], coords
  if len(arrays) == 1:
    return next(iter(arrays.values())), None
  names = [str(k) for k in found][:6]
  raise SlideFileError(
    f'{path}: no entry "features"; it holds {names or "nothing"} (a model '
    'checkpoint is no slide)'
  )


def _from_mapping(found: Any, path: str | Path) -> Slide:
  features, coords = _parts(found, path)
  numbers = {}
  if isinstance(found, Mapping):
    for name in ('pitch', 'patch_size'):
      value = np.asarray(found.get(name, ''))
      if value.size == 1 and value.dtype.kind in 'iuf':
        numbers[name] = float(value.reshape(()))
  return make_slide(features, coords, path, **numbers)


def _load_numpy(path: str | Path, suffix: str) -> Any:
  if not Path(path).is_file():
    raise FileNotFoundError(f'no feature file at {path}')
  try:
    if suffix == '.npy':
      return np.load(path, allow_pickle=False, mmap_mode='r')
    with np.load(path, allow_pickle=False) as archive:
      return {name: archive[name] for name in archive.files}
  except Exception as error:  # a damaged header may raise anything
    raise _unreadable(path, error) from error


def _npz_header(path: str | Path) -> Header:
  """From the headers of the members alone."""
  if not Path(path).is_file():
    raise FileNotFoundError(f'no feature file at {path}')
  try:
    with zipfile.ZipFile(path) as archive:
      members = {
        name.removesuffix('.npy'): _npy_header(archive, name)
        for name in archive.namelist()
        if name.endswith('.npy')
      }
  except Exception as error:
    raise _unreadable(path, error) from error
  # Arrays of no memory that have the shapes.
  found = {
    name: np.broadcast_to(np.zeros((), dtype), shape)
    for name, (shape, dtype) in members.items()
  }
  features, coords = _parts(found, path)
  n, dim = squeeze_features(features.shape, path)
  return Header(n, dim, str(features.dtype), coords is not None)


def _npy_header(archive: zipfile.ZipFile, name: str) -> tuple[Any, np.dtype]:
  with archive.open(name) as file:
    version = np.lib.format.read_magic(file)
    read = (
      np.lib.format.read_array_header_1_0
      if version == (1, 0)
      else np.lib.format.read_array_header_2_0
    )
    shape, _, dtype = read(file)
  if dtype.hasobject:
    raise ValueError('it holds Python objects')
  return shape, dtype


def _unreadable(path: str | Path, error: Exception) -> SlideFileError:
  text = ' '.join(str(error).split())[:120]
  return SlideFileError(
    f'{path}: no readable NumPy file ({type(error).__name__}: {text}); it may '
    'be truncated, or hold Python objects: save numbers alone'
  )

"""Patch features in HDF5, as CLAM and TRIDENT write them.

Axes: N patches, P features.

CLAM stores `features` and `coords` without attributes; its coordinate files
have `patch_size` and `downsample`. TRIDENT adds `patch_size_level0` and
`overlap`. Slides without tissue come as (0, P) or (0,).

Rare damage crashes libhdf5 itself, and with it the process that reads, which is
this one: `scan_slides` has a child process read first, see `h5_guard`.
"""

import contextlib
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tmlib.data.slides.h5_guard import COORDS, FEATURES, MOST_PER_BYTE
from tmlib.data.slides.slide import (
  Header,
  Slide,
  SlideFileError,
  make_slide,
  squeeze_features,
)

__all__ = ['load_h5', 'read_h5', 'read_h5_header']


def read_h5(path: str | Path) -> Slide:
  """Reads one slide from a CLAM or TRIDENT feature file.

  Args:
    path: of the file.

  Returns:
    Slide; a leading axis of one is dropped, an empty slide is [0, P].

  Raises:
    ModuleNotFoundError: h5py is missing; the message says how to get it.
    FileNotFoundError: no such file.
    SlideFileError: no HDF5 file, a broken one, or no features in it.
  """
  slide = load_h5(path)
  if slide.note:
    warnings.warn(f'{path}: {slide.note}', stacklevel=2)
  return slide


def load_h5(path: str | Path) -> Slide:
  """`read_h5` without its warning; `Slide.note` holds it."""
  with _opened(path) as file:
    features = _features(file, path)
    coords = _dataset(file, COORDS)
    if coords is not None:
      _check_size(coords, 'coords', path)
    attrs = _attributes(file) | _attributes(features)
    position_attrs = {} if coords is None else _attributes(coords)
    arrays = features[()], None if coords is None else coords[()]
  merged = attrs | position_attrs
  patch_size, pitch = _patch_and_pitch(merged)
  return make_slide(
    *arrays, path, pitch=pitch, patch_size=patch_size, attrs=merged
  )


def read_h5_header(path: str | Path) -> Header:
  """Sizes of a feature file, without reading the features.

  Args:
    path: of the file.

  Returns:
    Header.

  Raises:
    ModuleNotFoundError, FileNotFoundError, SlideFileError: as `read_h5`.
  """
  with _opened(path) as file:
    features = _features(file, path)
    n, dim = squeeze_features(features.shape, path)
    has_coords = _dataset(file, COORDS) is not None
    return Header(n, dim, str(features.dtype), has_coords)


@contextlib.contextmanager
def _opened(path: str | Path) -> Iterator[Any]:
  """The open file; whatever HDF5 says becomes a SlideFileError."""
  try:
    import h5py
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      f'{path}: reading HDF5 needs h5py: pip install "tmlib[h5]"'
    ) from error
  if not Path(path).is_file():
    raise FileNotFoundError(f'no feature file at {path}')
  try:
    with h5py.File(path, 'r') as file:
      yield file
  except (SlideFileError, ModuleNotFoundError):
    raise
  except Exception as error:  # HDF5 reports damage by many types
    raise SlideFileError(
      f'{path}: no readable HDF5 file ({_short(error)}); it may be truncated: '
      'copy or extract it again'
    ) from error


def _short(error: Exception) -> str:
  text = ' '.join(str(error).split())
  return f'{type(error).__name__}: {text[:120]}'


def _dataset(file: Any, names: tuple[str, ...]) -> Any:
  for name in names:
    if name in file and hasattr(file[name], 'shape'):
      return file[name]
  return None


def _features(file: Any, path: str | Path) -> Any:
  found = _dataset(file, FEATURES)
  if found is None:
    names = sorted(map(str, file))
    if _dataset(file, COORDS) is not None:
      raise SlideFileError(
        f'{path}: holds coords but no features, so it is the output of '
        'patching; pass the folder of features that was extracted from it'
      )
    raise SlideFileError(
      f'{path}: no dataset "features"; it holds {names or "nothing"}'
    )
  _check_size(found, 'features', path)
  return found


def _check_size(dataset: Any, name: str, path: str | Path) -> None:
  """A damaged header may ask for terabytes."""
  size = math.prod(dataset.shape) * dataset.dtype.itemsize
  stored = Path(path).stat().st_size
  if size > MOST_PER_BYTE * stored:
    raise SlideFileError(
      f'{path}: {name} of shape {dataset.shape} cannot come from a file of '
      f'{stored} bytes; it is damaged: extract it again'
    )


def _attributes(owner: Any) -> dict[str, Any]:
  return {name: _plain(value) for name, value in owner.attrs.items()}


def _plain(value: Any) -> Any:
  """As Python: bytes and 'None' decoded, arrays of one number unpacked."""
  if isinstance(value, bytes):
    value = value.decode('utf-8', 'replace')
  if isinstance(value, np.ndarray):
    value = value.reshape(-1).tolist()
    value = value[0] if len(value) == 1 else value
  elif isinstance(value, np.generic):
    value = value.item()
  return None if isinstance(value, str) and value == 'None' else value


def _number(value: Any) -> float | None:
  """A positive or zero number of an attribute; of a pair the first."""
  if isinstance(value, list):
    value = value[0] if value else None
  try:
    number = float(value)
  except (TypeError, ValueError):
    return None
  return number if math.isfinite(number) and number >= 0 else None


def _patch_and_pitch(
  attrs: dict[str, Any],
) -> tuple[float | None, float | None]:
  """Level-0 edge of a patch, and level-0 distance to the next one."""
  size = _number(attrs.get('patch_size'))
  level0 = _number(attrs.get('patch_size_level0'))
  if level0 is None and size:
    scale = _number(attrs.get('downsample'))
    if scale:
      # An old CLAM resized patches after reading them.
      custom = _number(attrs.get('custom_downsample')) or 1.0
      level0 = size * scale * custom
  if not level0:
    return None, None
  overlap = _number(attrs.get('overlap')) or 0.0
  if size:
    overlap *= level0 / size
  pitch = level0 - overlap
  return level0, pitch if pitch > 0 else None

"""What a file of patch features holds, whatever its format.

Axes: N patches, P features.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib.ops.grid import (
  GRID_TOLERANCE,
  check_coords,
  fit_grid,
  infer_pitch,
)

__all__ = [
  'ENCODERS',
  'Header',
  'Slide',
  'SlideFileError',
  'UnsafeFileError',
  'encoders_of',
  'make_slide',
  'squeeze_features',
]

# Feature size of the patch encoders that users name most.
ENCODERS = {
  'conch': 512, 'conch_v1.5': 768, 'ctranspath': 768, 'gigapath': 1536,
  'h-optimus': 1536, 'keep': 768, 'musk': 1024, 'phikon': 768,
  'phikon_v2': 1024, 'resnet50': 1024, 'uni': 1024, 'uni2': 1536,
  'virchow': 2560, 'virchow2': 2560,
}  # fmt: skip


# In pitches, how far off its cell a patch of an exact grid may lie.
_EXACT = 0.05


class SlideFileError(ValueError):
  """A file that is not what it should be; the message names it and the fix."""


class UnsafeFileError(SlideFileError):
  """A pickle that asks for code to be run; nothing of it was executed."""


class Slide(NamedTuple):
  """Patch features of one slide.

  Attributes:
    features: [N, P], the dtype of the file.
    coords: [N, 2], int64 level-0 pixels (x, y) of the upper left corners, or
      None.
    pitch: level-0 pixels between neighbouring patches, or None where unknown.
    patch_size: level-0 pixels along an edge of a patch, or None.
    attrs: what else the file says of itself.
    note: what had to be guessed, or ''.
  """

  features: np.ndarray
  coords: np.ndarray | None = None
  pitch: float | None = None
  patch_size: float | None = None
  attrs: dict[str, Any] = {}
  note: str = ''


class Header(NamedTuple):
  """What can be known of a file without reading its features.

  Attributes:
    num_patches: N.
    dim: P; 0 for an empty slide that does not tell.
    dtype: name of the dtype of the features.
    has_coords: whether positions are stored beside them.
  """

  num_patches: int
  dim: int
  dtype: str
  has_coords: bool


def encoders_of(dim: int) -> str:
  """Names of the encoders with this feature size, for messages."""
  names = [name for name, size in ENCODERS.items() if size == dim]
  return f'{dim} (as of {", ".join(names)})' if names else str(dim)


def squeeze_features(
  shape: tuple[int, ...], path: Path | str
) -> tuple[int, int]:
  """[N, P] of features stored as [N, P], [1, N, P] or, if empty, [0].

  Args:
    shape: as stored.
    path: for the message.

  Returns:
    N and P; P = 0 where an empty file does not tell.

  Raises:
    SlideFileError: any other shape.
  """
  if len(shape) == 3 and shape[0] == 1:
    shape = shape[1:]
  if shape == (0,):
    shape = (0, 0)
  if len(shape) != 2:
    raise SlideFileError(
      f'{path}: features have shape {tuple(shape)}, expected [patches, dim]; '
      'a slide embedding of one row per slide is no bag of patches'
    )
  return int(shape[0]), int(shape[1])


def make_slide(
  features: Any,
  coords: Any,
  path: Path | str,
  *,
  pitch: float | None = None,
  patch_size: float | None = None,
  attrs: dict[str, Any] | None = None,
) -> Slide:
  """Checks arrays read from a file and puts them into one form.

  Args:
    features: as stored.
    coords: [N, 2] or [1, N, 2], or None.
    path: for messages.
    pitch: as the file says. Where it says nothing, or the positions contradict
      it (patches that overlap, say), it is inferred and `note` tells.
    patch_size: as the file says, or None.
    attrs: what else it says.

  Returns:
    Slide.

  Raises:
    SlideFileError: features that are not numbers, or shapes that do not fit.
  """
  features = np.asarray(features)
  if features.dtype.kind not in 'fiub' and features.dtype.name != 'bfloat16':
    raise SlideFileError(
      f'{path}: features have dtype {features.dtype}, expected numbers'
    )
  n, dim = squeeze_features(features.shape, path)
  features = features.reshape(n, dim)
  if coords is not None:
    coords = _positions(coords, n, path)
  note = ''
  if coords is not None and n > 1:
    pitch, note = _checked_pitch(coords, pitch)
  return Slide(features, coords, pitch, patch_size or pitch, attrs or {}, note)


def _positions(coords: Any, n: int, path: Path | str) -> np.ndarray:
  coords = np.asarray(coords)
  if coords.ndim == 3 and coords.shape[0] == 1:
    coords = coords[0]
  if coords.size == 0 and n == 0:
    return np.zeros((0, 2), np.int64)
  if coords.dtype.kind not in 'fiu':
    raise SlideFileError(
      f'{path}: coords have dtype {coords.dtype}, expected numbers'
    )
  try:
    found = check_coords(coords, n)
  except ValueError as error:
    raise SlideFileError(f'{path}: {error}') from None
  if (np.abs(found) > 2**40).any():
    raise SlideFileError(
      f'{path}: coords reach {np.abs(found).max():.3g}, which are no pixels'
    )
  return np.rint(found).astype(np.int64)


def _checked_pitch(
  coords: np.ndarray, pitch: float | None
) -> tuple[float, str]:
  """The pitch that positions agree with, and why it was inferred, or ''."""
  points = coords.astype(np.float64)
  told = pitch is not None and math.isfinite(pitch) and pitch > 0
  off = lambda step: fit_grid(points, step)[1].max()
  gap = off(pitch) if told else np.inf
  if gap <= _EXACT:
    return float(pitch), ''  # type: ignore[arg-type]
  found = infer_pitch(points)
  # A small slide lies roughly on many grids; jitter leaves none but the told.
  if gap <= GRID_TOLERANCE and off(found) > _EXACT:
    return float(pitch), ''  # type: ignore[arg-type]
  why = (
    f'its attributes say {pitch:g}, which the positions do not lie on'
    if told
    else 'the file does not store it'
  )
  return found, f'pitch of {found:g} px inferred from the positions: {why}'

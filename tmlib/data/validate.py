"""Checks of bags on the host, before anything is compiled.

Axes: N instances, P features, Q concept dimensions.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.data.bag import Bag, check_bag

__all__ = ['make_bag', 'select_nonempty', 'validate_bag']

_SHOWN = 5


def make_bag(
  features: Any,
  *,
  graph: PatchGraph | None = None,
  coords: Any = None,
  concepts: Any = None,
  dim: int | None = None,
  encoder: str | None = None,
  source: str = 'bag',
) -> Bag:
  """Builds one valid Bag from raw arrays, all of whose instances are real.

  Args:
    features: [N, P] or [1, N, P] or, for an empty bag, [0]; any real dtype.
    graph: symmetric neighbour table over N instances, or None.
    coords: [N, 2], whole numbers, or None.
    concepts: [N, Q], float, or None.
    dim: P that the model expects; None accepts any.
    encoder: name of the encoder that produces `dim`, for the message.
    source: file or bag name, for the message.

  Returns:
    Bag, NumPy, features float32.

  Raises:
    TypeError, ValueError: see `validate_bag`.
  """
  features = np.asarray(features)
  if features.shape == (0,):
    features = features.reshape(0, dim or 0)
  if features.ndim == 3 and features.shape[0] == 1:
    features = features[0]
  mask = np.ones(features.shape[:1], bool)
  bag = Bag(features, mask, graph, coords, concepts)
  return validate_bag(bag, dim=dim, encoder=encoder, source=source)


def validate_bag(
  bag: Bag,
  *,
  dim: int | None = None,
  encoder: str | None = None,
  source: str = 'bag',
) -> Bag:
  """Checks one bag and casts it to what models expect.

  Features and concepts become float32 (float16 and bfloat16 files are common;
  models choose their own compute dtype later), coordinates int32.

  Args:
    bag: Bag with leaves [N, ...]; leading axes of size one are dropped.
    dim: P that the model expects; None accepts any.
    encoder: name of the encoder that produces `dim`, for the message.
    source: file or bag name, for the message.

  Returns:
    The bag, NumPy.

  Raises:
    TypeError: features that are not real numbers, no Bag, or a graph that is
      no neighbour table.
    ValueError: wrong rank or dimension, lengths that differ, NaN or infinite
      values in a real instance, fractional coordinates.
  """
  check_bag(bag, source, tuple(range(5)))  # the rank is checked below
  features = _real(bag.features, 'features', source)
  if features.ndim == 3 and features.shape[0] == 1:
    bag = bag.replace(mask=np.asarray(bag.mask).reshape(-1))
    features = features[0]
  if features.ndim != 2:
    raise ValueError(
      f'features of {source} have shape {features.shape}; expected [N, P] or '
      '[1, N, P]'
    )
  if dim is not None and features.shape[1] != dim:
    hint = f' (encoder "{encoder}")' if encoder else ''
    raise ValueError(
      f'features of {source} have dim {features.shape[1]} but the model '
      f'expects {dim}{hint}; re-extract the features with that encoder or '
      f'build the model for dim {features.shape[1]}'
    )
  mask = np.asarray(bag.mask, bool)
  _check_lengths(bag, len(features), source)
  _check_finite(features, mask, 'features', source)
  concepts = bag.concepts
  if concepts is not None:
    concepts = _real(concepts, 'concepts', source)
    _check_finite(concepts, mask, 'concepts', source)
  coords = bag.coords
  if coords is not None:
    coords = _whole(coords, source)
  return bag.replace(
    features=features, mask=mask, concepts=concepts, coords=coords
  )


def select_nonempty(
  bags: Sequence[Bag],
  names: Sequence[str] | None = None,
  on_empty: str = 'skip',
) -> np.ndarray:
  """Indices of the bags that have at least one real instance.

  Feature files of slides without tissue are empty; nothing can be learned
  from them, and a prediction for them is the model's bias.

  Args:
    bags: n bags.
    names: n names for the message, or None for their positions.
    on_empty: 'skip' drops them with one counted warning, 'error' raises.

  Returns:
    [m], int64, increasing.

  Raises:
    ValueError: an empty bag under 'error', nothing left, or another policy.
  """
  if on_empty not in ('skip', 'error'):
    raise ValueError(f"on_empty must be 'skip' or 'error', got {on_empty!r}")
  full = np.array([bool(np.any(bag.mask)) for bag in bags], bool)
  empty = np.flatnonzero(~full)
  if not len(empty):
    return np.arange(len(bags))
  shown = ', '.join(str(names[i] if names else i) for i in empty[:_SHOWN])
  more = ', ...' if len(empty) > _SHOWN else ''
  message = f'{len(empty)} of {len(bags)} bags are empty: {shown}{more}'
  if on_empty == 'error':
    raise ValueError(f"{message}; use on_empty='skip' to leave them out")
  if len(empty) == len(bags):
    raise ValueError(f'{message}; nothing is left')
  warnings.warn(f'{message}; skipped', stacklevel=2)
  return np.flatnonzero(full)


def _real(array: Any, name: str, source: str) -> np.ndarray:
  """Casts to float32; refuses what is not a real number."""
  array = np.asarray(array)
  # bfloat16 is an extension type without a NumPy kind of its own.
  if array.dtype.kind not in 'fiub' and array.dtype.name != 'bfloat16':
    raise TypeError(
      f'{name} of {source} have dtype {array.dtype}; expected real numbers'
    )
  with np.errstate(over='ignore'):  # reported below as infinite
    return array.astype(np.float32)


def _whole(coords: Any, source: str) -> np.ndarray:
  """Casts coordinates to int32 if that loses nothing."""
  raw = np.asarray(coords)
  with np.errstate(invalid='ignore'):  # NaN fails the comparison below
    cast = raw.astype(np.int32) if raw.dtype.kind in 'iufb' else None
  if cast is None or raw.shape[1:] != (2,) or not np.array_equal(cast, raw):
    raise ValueError(
      f'coords of {source} must be whole numbers of shape [N, 2], got dtype '
      f'{raw.dtype} and shape {raw.shape}'
    )
  return cast


def _check_lengths(bag: Bag, n: int, source: str) -> None:
  lengths = {'mask': bag.mask, 'coords': bag.coords, 'concepts': bag.concepts}
  lengths['segment_ids'] = bag.segment_ids
  if bag.graph is not None:
    lengths['graph'] = bag.graph.nbr
  for name, leaf in lengths.items():
    if leaf is not None and np.shape(leaf)[0] != n:
      raise ValueError(
        f'{name} of {source} has {np.shape(leaf)[0]} rows but there are {n} '
        'instances; both must come from the same file, in the same order'
      )


def _check_finite(
  array: np.ndarray, mask: np.ndarray, name: str, source: str
) -> None:
  # isfinite, never max(|x|): reductions may drop NaN.
  bad = ~np.isfinite(array).all(1) & mask
  rows = np.flatnonzero(bad)
  if len(rows):
    shown = ', '.join(map(str, rows[:_SHOWN]))
    more = ', ...' if len(rows) > _SHOWN else ''
    raise ValueError(
      f'{name} of {source} are NaN or infinite in {len(rows)} of '
      f'{len(array)} rows (rows {shown}{more}); re-extract them or drop '
      'these instances'
    )

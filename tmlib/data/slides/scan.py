"""One look at every file of a cohort, before anything is trained.

Axes: m slides, N_i patches of slide i, P features.

A scan reads each file once, finds what would break a run hours later, and keeps
the moments of the features, from which the statistics of any training fold
follow without reading again. It can be kept in a file and is then repeated for
changed slides only. HDF5 files are read by a child process before they are read
here: damage can crash the library that reads them.
"""

import contextlib
import functools
import logging
import os
import queue
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib.data.slides.arrays import HDF5, load_slide, read_header
from tmlib.data.slides.h5_guard import H5Guard
from tmlib.data.slides.slide import Slide, SlideFileError
from tmlib.ops.grid import GRID_TOLERANCE, fit_grid

__all__ = ['Scan', 'ScanRow', 'merge_moments', 'scan_slides']

_CHUNK = 4096


class ScanRow(NamedTuple):
  """What one file holds.

  Attributes:
    num_patches: N_i.
    dim: P.
    half: whether its features are float16.
    has_coords: positions are stored.
    error: why it cannot be read, or ''.
    bad_patches: patches with a NaN or an infinite feature.
    repeated: patches on the position of another one.
    off_grid: positions lie on no grid.
    note: what had to be guessed, or ''.
    mean: [P] float64, or None where features were not read.
    squares: [P] float64, sum of squared deviations from the mean.
  """

  num_patches: int = 0
  dim: int = 0
  half: bool = False
  has_coords: bool = False
  error: str = ''
  bad_patches: int = 0
  repeated: int = 0
  off_grid: bool = False
  note: str = ''
  mean: np.ndarray | None = None
  squares: np.ndarray | None = None


Scan = dict[Path, ScanRow]


def scan_slides(
  paths: Sequence[Path],
  *,
  full: bool = True,
  cache: str | Path | None = None,
  workers: int = 2,
) -> Scan:
  """Looks at every file.

  Args:
    paths: m feature files.
    full: read features and positions; else only what the headers say.
    cache: a .npz file in which results are kept, or None. A file that cannot be
      written is left alone.
    workers: reading threads.

  Returns:
    {path: row}. Files that cannot be read have an `error`; nothing is raised
    for them.

  Raises:
    ModuleNotFoundError: h5py is needed and missing.
  """
  known = _load(cache) if cache and full else {}
  stamps = {path: _stamp(path) for path in paths}
  found = {p: known[s] for p, s in stamps.items() if s in known}
  missing = [path for path in stamps if path not in found]
  if len(missing) > 50 and full:
    logging.info('reading %d slides once to check them', len(missing))
  workers = max(1, workers)
  guards: queue.SimpleQueue[H5Guard] = queue.SimpleQueue()
  with contextlib.ExitStack() as stack:
    for _ in range(workers):
      guards.put(stack.enter_context(H5Guard()))
    pool = stack.enter_context(ThreadPoolExecutor(workers))
    look = functools.partial(_look, guards=guards, full=full)
    rows = list(pool.map(look, missing))
  found |= dict(zip(missing, rows, strict=True))
  if cache and full and missing:
    _save(cache, {stamps[path]: row for path, row in found.items()})
  return {path: found[path] for path in paths}


def merge_moments(
  rows: Sequence[ScanRow],
) -> tuple[np.ndarray, np.ndarray]:
  """Mean and standard deviation over all patches of some slides.

  Args:
    rows: of a full scan; empty slides do not count.

  Returns:
    mean: [P] float32.
    std: [P] float32, one where a feature is constant.

  Raises:
    ValueError: no patch at all, or a scan of headers.

  References:
    Chan, Golub, LeVeque. Updating formulae and a pairwise algorithm for
    computing sample variances, 1979.
  """
  rows = [row for row in rows if row.num_patches]
  if not rows:
    raise ValueError('no patch to compute statistics from')
  if any(row.mean is None for row in rows):
    raise ValueError('statistics need a full scan')
  means: Any = np.stack([row.mean for row in rows])  # type: ignore[misc]
  sizes = np.array([row.num_patches for row in rows], np.float64)
  total = sizes.sum()
  mean = sizes @ means / total
  own: Any = np.stack([row.squares for row in rows])  # type: ignore[misc]
  squares = own.sum(0) + sizes @ (means - mean) ** 2
  std = np.sqrt(squares / total)
  constant = std <= 1e-7 * np.maximum(np.abs(mean), 1e-30)
  std = np.where(constant, 1, std)
  return mean.astype(np.float32), std.astype(np.float32)


def _look(path: Path, guards: Any, full: bool) -> ScanRow:
  if path.suffix.lower() in HDF5:
    guard = guards.get()
    try:
      error = guard.check(path, full)
    finally:
      guards.put(guard)
    if error:
      return ScanRow(error=error)
  try:
    return _measure(load_slide(path)) if full else _described(path)
  except (SlideFileError, OSError, MemoryError) as error:
    return ScanRow(error=str(error) or type(error).__name__)


def _described(path: Path) -> ScanRow:
  header = read_header(path)
  half = header.dtype.lstrip('<>=') in ('float16', 'f2')
  return ScanRow(header.num_patches, header.dim, half, header.has_coords)


def _measure(slide: Slide) -> ScanRow:
  n, dim = slide.features.shape
  half = slide.features.dtype == np.float16
  row = ScanRow(n, dim, half, slide.coords is not None, note=slide.note)
  if not n:
    return row
  if slide.coords is not None:
    distinct = len(np.unique(slide.coords, axis=0))
    points = slide.coords.astype(np.float64)
    off = bool(fit_grid(points, slide.pitch)[1].max() > GRID_TOLERANCE)
    row = row._replace(repeated=n - distinct, off_grid=off)
  total, bad = np.zeros(dim), 0
  parts = [slice(at, at + _CHUNK) for at in range(0, n, _CHUNK)]
  for part in parts:
    with np.errstate(over='ignore'):
      values = np.asarray(slide.features[part], np.float32)
    bad += int((~np.isfinite(values).all(1)).sum())
    total += values.sum(0, dtype=np.float64)
  if bad:
    return row._replace(bad_patches=bad)
  mean, squares = total / n, np.zeros(dim)
  centre = mean.astype(np.float32)
  for part in parts:
    gap = np.asarray(slide.features[part], np.float32) - centre
    squares += np.einsum('np,np->p', gap, gap)
  # Deviations were taken from the rounded mean.
  squares -= n * (mean - centre.astype(np.float64)) ** 2
  return row._replace(mean=mean, squares=np.maximum(squares, 0))


def _stamp(path: Path) -> str:
  """What tells whether a file changed."""
  try:
    status = os.stat(path)
  except OSError:
    return f'{path.resolve()}|missing'
  return f'{path.resolve()}|{status.st_size}|{status.st_mtime_ns}'


def _save(cache: str | Path, rows: dict[str, ScanRow]) -> None:
  dims = sorted({row.dim for row in rows.values() if row.mean is not None})
  arrays: dict[str, Any] = {'stamps': np.array(list(rows), np.str_)}
  for name in ScanRow._fields[:-2]:
    arrays[name] = np.array([getattr(row, name) for row in rows.values()])
  for dim in dims:
    chosen = [
      (i, row)
      for i, row in enumerate(rows.values())
      if row.mean is not None and row.dim == dim
    ]
    arrays[f'index_{dim}'] = np.array([i for i, _ in chosen])
    arrays[f'mean_{dim}'] = np.stack([row.mean for _, row in chosen])  # type: ignore[misc]
    arrays[f'squares_{dim}'] = np.stack([row.squares for _, row in chosen])  # type: ignore[misc]
  partial = Path(f'{cache}.partial')
  try:
    Path(cache).parent.mkdir(parents=True, exist_ok=True)
    with partial.open('wb') as file:
      np.savez(file, **arrays)
    partial.replace(cache)
  except OSError as error:
    logging.info('the scan is not kept: %s', error)


def _load(cache: str | Path) -> dict[str, ScanRow]:
  try:
    with np.load(cache, allow_pickle=False) as file:
      arrays = {name: file[name] for name in file.files}
    names = ScanRow._fields[:-2]
    columns = [arrays[name].tolist() for name in names]
    rows = [ScanRow(*values) for values in zip(*columns, strict=True)]
    for name in arrays:
      if name.startswith('index_'):
        dim = name.removeprefix('index_')
        pairs = zip(
          arrays[f'mean_{dim}'], arrays[f'squares_{dim}'], strict=True
        )
        for i, (mean, squares) in zip(arrays[name], pairs, strict=True):
          rows[i] = rows[i]._replace(mean=mean, squares=squares)
    return dict(zip(arrays['stamps'].tolist(), rows, strict=True))
  except FileNotFoundError:
    return {}
  except Exception as error:  # whatever it is, the scan is simply repeated
    logging.info('the kept scan cannot be used: %s', error)
    return {}

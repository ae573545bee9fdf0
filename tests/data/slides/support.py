"""Writes feature files as CLAM, TRIDENT and others do."""

import h5py
import numpy as np


def grid_coords(rows, columns, pitch=256, start=(512, 1024)):
  """[N, 2] pixels (x, y), row by row."""
  y, x = np.divmod(np.arange(rows * columns), columns)
  return np.stack([x, y], 1) * pitch + np.asarray(start)


def features_of(n, dim=4, seed=0):
  return np.random.default_rng(seed).normal(size=(n, dim)).astype(np.float32)


def write_clam(path, features, coords=None, coord_attrs=None):
  path.parent.mkdir(parents=True, exist_ok=True)
  with h5py.File(path, 'w') as file:
    file['features'] = features
    if coords is not None:
      file['coords'] = np.asarray(coords, np.int32)
      file['coords'].attrs.update(coord_attrs or {})


def write_trident(path, features, coords, **attrs):
  path.parent.mkdir(parents=True, exist_ok=True)
  with h5py.File(path, 'w') as file:
    file['features'] = features
    file['features'].attrs.update(encoder='uni_v1', savetodir='None')
    file['coords'] = np.asarray(coords, np.int64)
    file['coords'].attrs.update(attrs)


def write_csv(path, header, rows):
  lines = [header, *(','.join(map(str, row)) for row in rows)]
  path.write_text('\n'.join(lines) + '\n')
  return path

"""Streams for unlearning: every run has its own forget set.

Axes: R runs (deletion requests), n examples, B batch, C outputs.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from tmlib.train import Data, run_data

__all__ = [
  'ABSENT',
  'FORGET',
  'RETAIN',
  'assign_roles',
  'check_roles',
  'request_data',
  'split_indices',
]

# Roles of an example in a deletion request.
ABSENT, RETAIN, FORGET = 0, 1, 2


def split_indices(n: int, forget: Any) -> tuple[np.ndarray, np.ndarray]:
  """What a deletion request keeps and what it deletes.

  Args:
    n: number of examples.
    forget: [F] indices, or a bool mask [n] that is True where to forget.

  Returns:
    Retain indices [n - F] in order, and forget indices [F] in the order given.
    An index that is named twice counts once, with a warning.

  Raises:
    TypeError: indices that are no integers.
    ValueError: a mask of another length, indices out of range, nothing to
      forget, nothing to keep.
  """
  forget = np.asarray(forget)
  if forget.ndim != 1:
    raise ValueError(f'forget has shape {forget.shape}, expected one axis.')
  if forget.dtype == bool:
    if len(forget) != n:
      raise ValueError(f'forget is a mask of {len(forget)}, data has n={n}.')
    forget = np.flatnonzero(forget)
  if not len(forget):
    raise ValueError('forget is empty: there is nothing to delete.')
  if not np.issubdtype(forget.dtype, np.integer):
    raise TypeError(
      f'forget has dtype {forget.dtype}; pass integer indices or a bool mask.'
    )
  if not 0 <= forget.min() <= forget.max() < n:
    raise ValueError(
      f'forget holds indices {forget.min()} to {forget.max()}; with n={n} they '
      f'must be in 0..{n - 1}.'
    )
  _, first = np.unique(forget, return_index=True)
  if len(first) < len(forget):
    again = len(forget) - len(first)
    warnings.warn(
      f'forget repeats {again} indices; each counts once.', stacklevel=2
    )
    forget = forget[np.sort(first)]
  retain = np.setdiff1d(np.arange(n), forget)
  if not len(retain):
    raise ValueError(f'forget holds all {n} examples: nothing is retained.')
  return retain, forget


def assign_roles(n: int, requests: Sequence[Any]) -> np.ndarray:
  """Roles [R, n] of R deletion requests, each as of `split_indices`."""
  roles = np.full((len(requests), n), RETAIN)
  for row, forget in zip(roles, requests, strict=True):
    row[split_indices(n, forget)[1]] = FORGET
  return check_roles(roles)


def check_roles(roles: Any) -> np.ndarray:
  """Roles [R, n], each run with at least one retained and forgotten example.

  Raises:
    ValueError: another shape, another value, an empty set.
  """
  roles = np.asarray(roles)
  if roles.ndim != 2:
    raise ValueError(
      f'roles has shape {roles.shape}, expected [R, n]; see assign_roles.'
    )
  if not np.isin(roles, (ABSENT, RETAIN, FORGET)).all():
    raise ValueError('roles must be 0 (absent), 1 (retain) or 2 (forget).')
  for name, value in (('retain', RETAIN), ('forget', FORGET)):
    empty = np.flatnonzero(~(roles == value).any(1))
    if len(empty):
      raise ValueError(f'runs {empty[:5].tolist()} have an empty {name} set.')
  return roles


def request_data(
  arrays: dict[str, Any],
  roles: Any,
  batch_size: int,
  *,
  uses: tuple[bool, bool] = (True, True),
  per_run: dict[str, Any] | None = None,
  ridge: float | None = None,
  seed: int = 0,
) -> Data:
  """Batches in which each run draws from its own retain and forget set.

  Args:
    arrays: {name: [n, ...]} shared by the runs: 'x', 'y', 'teacher', ...
    roles: [R, n], see `check_roles`.
    batch_size: B; at least n gives every run all of its examples, once.
    uses: whether to draw from R and from F (`method.needs`).
    per_run: {name: [R, n, ...]}, such as the corrected 'target'.
    ridge: of the objective in sums; adds 'decay' [B], the share of each
      example: ridge / number of examples that its run draws from.
    seed: of the order.

  Returns:
    A stream whose batches also hold 'forget' [B] and the `per_run` entries.

  Raises:
    ValueError: roles out of range, empty sets, arrays of another length, NaN,
      negative labels, or labels that 'teacher' or 'target' has no output for.
  """
  roles = check_roles(roles)
  _check_arrays(arrays, per_run or {}, roles)
  use_R, use_F = uses
  drawn = ((roles == RETAIN) & use_R) | ((roles == FORGET) & use_F)
  stream = run_data(arrays, drawn.astype(np.float32), batch_size, seed=seed)
  extra = {'forget': (roles == FORGET).astype(np.float32)}
  extra |= {k: np.asarray(v) for k, v in (per_run or {}).items()}
  if ridge is not None:
    share = ridge / drawn.sum(1, keepdims=True)
    extra['decay'] = np.broadcast_to(share, roles.shape).astype(np.float32)

  def load(step, rows):
    batch = stream.load(step, rows)
    run = np.arange(len(roles))[:, None]
    return batch | {k: v[run, batch['index']] for k, v in extra.items()}

  def gather(resident, batch):
    found = stream.gather(resident, {k: batch[k] for k in ('index', 'weight')})
    return found | {k: jnp.asarray(batch[k]) for k in extra}

  fingerprint = stream.fingerprint | {
    'roles': int(roles.astype(np.int64).ravel() @ np.arange(roles.size) % 2**31)
  }
  return stream._replace(load=load, gather=gather, fingerprint=fingerprint)


def _check_arrays(arrays, per_run, roles) -> None:
  R, n = roles.shape
  for group, shape in ((arrays, (n,)), (per_run, (R, n))):
    for name, value in group.items():
      found = np.shape(value)[: len(shape)]
      if found != shape:
        raise ValueError(
          f'{name} has leading shape {found}, roles say {shape}.'
        )
      value = np.asarray(value)
      if (
        np.issubdtype(value.dtype, np.floating) and not np.isfinite(value).all()
      ):
        raise ValueError(f'{name} holds NaN or inf; drop or impute those rows.')
  y = np.asarray(arrays.get('y', 0.0))
  if not np.issubdtype(y.dtype, np.integer) or y.ndim != 1:
    return
  if y.min() < 0:
    raise ValueError(f'y holds the label {y.min()}; labels count from 0.')
  for name in ('teacher', 'target'):
    outputs = (arrays | per_run).get(name)
    if outputs is not None and y.max() >= np.shape(outputs)[-1]:
      raise ValueError(
        f'y holds labels up to {y.max()}, but {name} has '
        f'C={np.shape(outputs)[-1]} outputs, labels 0 to C-1. Labels that '
        'start at 1: pass y - 1.'
      )

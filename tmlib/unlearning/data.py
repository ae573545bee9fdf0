"""Streams for unlearning: every run has its own forget set.

Axes: R runs (deletion requests), n examples, B batch, C outputs.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

from tmlib.train import Data, run_data

__all__ = ['ABSENT', 'FORGET', 'RETAIN', 'request_data', 'check_roles']

# Roles of an example in a deletion request.
ABSENT, RETAIN, FORGET = 0, 1, 2


def check_roles(roles: Any) -> np.ndarray:
  """Roles [R, n], each run with at least one retained and forgotten example.

  Raises:
    ValueError: another shape, another value, an empty set.
  """
  roles = np.asarray(roles)
  if roles.ndim != 2:
    raise ValueError(f'roles has shape {roles.shape}, expected [R, n].')
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
    ValueError: roles out of range or empty sets.
  """
  roles = check_roles(roles)
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

"""Cross-validation folds as runs of one program.

Axes: R runs (a fold of a repeat each), F statistics, B rows, n bags.
"""

from typing import Any

import numpy as np

from tmlib.train.data import Data

__all__ = ['cross_validation_runs', 'tag_runs']


def cross_validation_runs(
  folds: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Lays out repeated cross-validation as R = repeats * F runs.

  Run r trains on the bags outside its fold and is tested on those inside; give
  `train` to `run_data` and `test` to `pass_data`.

  Args:
    folds: [repeats, n], int in [0, F), from `stratified_folds` with one seed
      per repeat.

  Returns:
    train: [R, n], float32, weight one for training bags.
    test: [R, n], float32, weight one for test bags.
    repeat: [R], int32, repeat of each run.
  """
  folds = np.asarray(folds)
  num_folds = int(folds.max()) + 1
  test = folds[:, None, :] == np.arange(num_folds)[None, :, None]
  test = test.reshape(-1, folds.shape[1])
  repeat = np.repeat(np.arange(len(folds), dtype=np.int32), num_folds)
  return (~test).astype(np.float32), test.astype(np.float32), repeat


def tag_runs(data: Data, fold: np.ndarray) -> Data:
  """Adds `batch['fold']`, the row of the statistics that each run reads.

  The features stay on the device once for all runs, unscaled; every run scales
  its own batch by the statistics of its own training bags.

  Args:
    data: data per run, from `run_data` or `pass_data(run_weights=...)`.
    fold: [R], int in [0, F); with `fold_statistics` of several repeats stacked,
      simply arange(R).

  Returns:
    Data whose batches also hold 'fold' [B] int32.

  Raises:
    ValueError: data that are shared by all runs.
  """
  if not data.per_run:
    raise ValueError(
      'tag_runs needs data with a batch per run; use run_data, or pass_data '
      'with run_weights'
    )
  fold = np.asarray(fold, np.int32)

  def load(step: int, rows: slice) -> dict[str, Any]:
    tag = np.repeat(fold[:, None], rows.stop - rows.start, axis=1)
    return {**data.load(step, rows), 'fold': tag}

  def gather(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    return {**data.gather(resident, batch), 'fold': batch['fold']}

  return data._replace(load=load, gather=gather)

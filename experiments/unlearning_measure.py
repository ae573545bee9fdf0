"""What was realised: the gaps of finished parts to their truth.

Axes: R requests, n examples, C classes. Gaps are norms of curvature-weighted
outputs B'(f - f_R), B at the full model: half the square is the Kullback-
Leibler divergence to second order.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tmlib import unlearning as ul
from tmlib.unlearning.data import FORGET

__all__ = [
  'Measured',
  'losses_of',
  'measure',
  'read_logits',
  'split',
  'weighted',
]


class Measured(NamedTuple):
  """One study's realised numbers.

  Attributes:
    gaps: {method: [R, 2]} on F and R; 'nothing' among them.
    unit: [R], gap between two retrains from scratch.
    cosine: [R, 2] of the predicted and true gap of doing nothing.
    error: [R, 2] relative error of the same.
    quality: {method: [R, 3]}: KL on F, KS p-value, membership AUC.
    truth: [R, n, C] retrained logits.
  """

  gaps: dict[str, np.ndarray]
  unit: np.ndarray
  cosine: np.ndarray
  error: np.ndarray
  quality: dict[str, np.ndarray]
  truth: np.ndarray


def read_logits(folder: Path) -> dict[str, np.ndarray]:
  """{'train': [R, n, C], 'test': [R, m, C]} of a finished part."""
  rows: dict[str, dict[int, list]] = {}
  with (folder / 'predictions.csv').open() as file:
    reader = csv.DictReader(file)
    names = [k for k in reader.fieldnames or () if k.startswith('logits_')]
    names.sort(key=lambda k: int(k.rpartition('_')[2]))
    for row in reader:
      runs = rows.setdefault(row['evaluation'], {})
      runs.setdefault(int(row['run']), []).append(
        [float(row[k]) for k in names]
      )
  return {
    k: np.array([runs[r] for r in sorted(runs)]) for k, runs in rows.items()
  }


def weighted(full: np.ndarray, gap: np.ndarray) -> np.ndarray:
  """B' gap at the outputs of the full model; [R, n, C]."""
  p = np.exp(full - full.max(-1, keepdims=True))
  p = (p / p.sum(-1, keepdims=True))[None]
  return np.sqrt(p) * (gap - np.sum(p * gap, -1, keepdims=True))


def split(size: np.ndarray, forget: np.ndarray) -> np.ndarray:
  """[R, n] row norms -> [R, 2] norms on F and R."""
  square = size**2
  return np.sqrt(np.stack(
    [np.sum(square * forget, 1), np.sum(square * ~forget, 1)], 1
  ))  # fmt: skip


def losses_of(logits: np.ndarray, y: np.ndarray) -> np.ndarray:
  """Cross-entropy [..., n]."""
  peak = logits.max(-1, keepdims=True)
  log_z = np.log(np.exp(logits - peak).sum(-1)) + peak[..., 0]
  index = np.broadcast_to(y[:, None], logits.shape[:-1] + (1,))
  return log_z - np.take_along_axis(logits, index, -1)[..., 0]


def measure(study, folder: Path, methods) -> Measured:
  """Reads every part of one study and compares it with the truth."""
  table, forget = study.table, study.requests.roles == FORGET
  full = np.asarray(study.network.apply(study.params, table.x))
  truth = read_logits(folder / 'retrain')
  scratch = read_logits(folder / 'scratch')['train']
  R = len(forget)
  norm = lambda gap: np.linalg.norm(weighted(full, gap), axis=-1)
  unit = np.linalg.norm(norm(scratch[:R] - scratch[R:]), axis=1)
  outputs = {'nothing': None} | dict.fromkeys(methods)
  gaps, quality = {}, {}
  true_loss = losses_of(truth['train'], table.y)
  held = np.asarray(study.network.apply(study.params, table.test_x))
  for name in outputs:
    if name == 'nothing':
      found = {
        'train': np.tile(full, (R, 1, 1)),
        'test': np.tile(held, (R, 1, 1)),
      }
    else:
      found = read_logits(folder / name)
    gaps[name] = split(norm(found['train'] - truth['train']), forget)
    loss, other = losses_of(found['train'], table.y), losses_of(
      found['test'], table.test_y)  # fmt: skip
    rows = []
    for r, f in enumerate(forget):
      kl = ul.kl_to_retrained(found['train'][r, f], truth['train'][r, f]).mean()
      p_value = ul.forget_quality_ks(loss[r, f], true_loss[r, f])[1]
      rows.append([kl, p_value, ul.membership_auc(loss[r, f], other[r])])
    quality[name] = np.array(rows)
  true_gap = weighted(full, full[None] - truth['train'])
  predicted = study.prediction.idle
  cosine, error = np.empty((R, 2)), np.empty((R, 2))
  for r, f in enumerate(forget):
    for j, rows in enumerate((f, ~f)):
      error[r, j], cosine[r, j] = ul.relative_error(
        predicted[r, rows], true_gap[r, rows]
      )
  return Measured(gaps, unit, cosine, error, quality, truth['train'])

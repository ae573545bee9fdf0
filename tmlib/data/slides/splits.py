"""Split files, and splits of one's own: by patient, and by site.

Axes: n bags, F folds.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib.data.folds import stratified_folds
from tmlib.data.slides.table import (
  EMPTY,
  Table,
  TableError,
  clean_id,
  find_column,
  read_table,
  whole,
)

__all__ = ['Split', 'patient_folds', 'read_splits', 'site_folds']

_PARTS = ('train', 'val', 'test')
# How others call them, in any case.
_NAMES = {
  'train': ('train', 'training'),
  'val': ('val', 'valid', 'validation', 'dev'),
  'test': ('test', 'testing'),
}


class Split(NamedTuple):
  """Ids, of slides or of patients, by what they are used for.

  Attributes:
    name: of the split.
    train: to learn from.
    val: to look at while training; may be empty.
    test: to report; may be empty, then `val` is reported.
  """

  name: str
  train: tuple[str, ...]
  val: tuple[str, ...] = ()
  test: tuple[str, ...] = ()


def read_splits(path: str | Path) -> list[Split]:
  """Reads one split file, or all of a folder.

  Args:
    path: a table with columns train, val (or valid) and test that hold ids and
      are filled up with blanks; or with one row per id and true or false in
      these columns (CLAM's `_bool`); or a folder of such tables,
      `splits_0.csv` and so on, of which `_bool` twins and descriptors are left
      aside.

  Returns:
    The splits, in the order of their numbers.

  Raises:
    FileNotFoundError, TableError: no table, other columns, an id in two parts
      of one split.
  """
  path = Path(path)
  if not path.is_dir():
    return [_split(read_table(path))]
  files = sorted(path.glob('*.csv'), key=_number)
  named = [f for f in files if not re.search(r'_(bool|descriptor)$', f.stem)]
  bools = [f for f in files if f.stem.endswith('_bool')]
  found = [f for f in named if 'split' in f.stem] or named or bools
  if not found:
    raise FileNotFoundError(f'no split table (splits_0.csv, ...) in {path}')
  return [_split(read_table(f)) for f in found]


def _number(path: Path) -> tuple[int, str]:
  digits = re.findall(r'\d+', path.stem)
  return (int(digits[-1]) if digits else -1), path.stem


def _split(table: Table) -> Split:
  found = {
    part: find_column(table, '', names, '', required=False)
    for part, names in _NAMES.items()
  }
  columns = {p: table.columns[c] for p, c in found.items() if c is not None}
  if 'train' not in columns or len(columns) < 2:
    raise TableError(
      f'{table.path}: a split needs the columns train and val or test; it has '
      f'{", ".join(name for name in table.columns if name)}'
    )
  values = {x.lower() for texts in columns.values() for x in texts}
  marks = {'true', 'false', '1', '0', '1.0', '0.0'}
  if values <= marks | EMPTY and values & marks:
    parts = _from_marks(table, columns, set(found.values()))
  else:
    parts = {part: _ids(texts) for part, texts in columns.items()}
  _check(table, parts)
  return Split(
    table.path.stem, *(tuple(parts.get(part, ())) for part in _PARTS)
  )


def _ids(texts: list[str]) -> list[str]:
  """Ids without blanks; 1.0 as 1 where all of a column are numbers."""
  known = [x for x in texts if x.lower() not in EMPTY]
  numbers = [whole(x) for x in known]
  if all(x.isdigit() for x in numbers):
    return numbers
  return [clean_id(x) for x in known]


def _from_marks(
  table: Table, columns: dict[str, list[str]], used: set[str | None]
) -> dict[str, list[str]]:
  known = ('slide_id', 'case_id', 'slide', 'case', 'patient_id')
  name = find_column(table, '', known, '', required=False)
  others = [other for other in table.columns if other not in used]
  if name is None and not others:
    raise TableError(f'{table.path}: holds true and false but no column of ids')
  ids = table.columns[others[0] if name is None else name]
  return {
    part: [
      clean_id(one)
      for one, mark in zip(ids, texts, strict=True)
      if mark.lower() in ('true', '1', '1.0')
    ]
    for part, texts in columns.items()
  }


def _check(table: Table, parts: dict[str, list[str]]) -> None:
  seen: dict[str, str] = {}
  for part, names in parts.items():
    for name in dict.fromkeys(names):
      if name in seen:
        raise TableError(
          f'{table.path}: {name} is in {seen[name]} and in {part}; what is '
          'tested must not be trained on'
        )
      seen[name] = part
  if not parts['train']:
    raise TableError(f'{table.path}: nothing to train on')


def patient_folds(
  cases: Sequence[str],
  strata: Sequence[Any],
  num_folds: int,
  seed: int = 0,
) -> np.ndarray:
  """Stratified folds in which all bags of a patient stay together.

  A patient counts as what most of their bags are; patients of one kind are
  dealt to the folds in turn.

  Args:
    cases: n patients.
    strata: n labels, or events.
    num_folds: F, in [2, patients].
    seed: of the order.

  Returns:
    [n] int32 in [0, F).

  Raises:
    ValueError: F out of range.
  """
  names, index = np.unique(np.asarray(cases, str), return_inverse=True)
  kinds, kind = np.unique(np.asarray(strata, str), return_inverse=True)
  counts = np.zeros((len(names), len(kinds)), np.int64)
  np.add.at(counts, (index, kind), 1)
  if not 2 <= num_folds <= len(names):
    raise ValueError(
      f'num_folds must be in [2, {len(names)}], the number of patients; got '
      f'{num_folds}'
    )
  return stratified_folds(counts.argmax(1), num_folds, seed)[index]


def site_folds(
  sites: Sequence[str],
  strata: Sequence[Any],
  num_folds: int,
  seed: int = 0,
) -> np.ndarray:
  """Folds in which a site is tested whole, so that no model knows its look.

  Sites are placed largest first where the fold sizes of every stratum then stay
  most even; ties and equal sizes are broken at random.

  Args:
    sites: n names of where a bag was collected; all known.
    strata: n labels, or events.
    num_folds: F, at most the number of sites.
    seed: of the ties.

  Returns:
    [n] int32 in [0, F).

  Raises:
    ValueError: an unknown site, or fewer sites than folds.

  References:
    Howard et al. The impact of site-specific digital histology signatures on
    deep learning model accuracy and bias, 2021, who place sites by quadratic
    programming; the greedy rule is our choice.
  """
  names, index = np.unique(np.asarray(sites, str), return_inverse=True)
  if '' in names:
    raise ValueError(
      f'{int((names[index] == "").sum())} of {len(index)} bags have no site; '
      'give the table a column "site"'
    )
  if not 2 <= num_folds <= len(names):
    raise ValueError(
      f'num_folds must be in [2, {len(names)}], the number of sites; got '
      f'{num_folds}'
    )
  kinds, kind = np.unique(np.asarray(strata, str), return_inverse=True)
  counts = np.zeros((len(names), len(kinds)))
  np.add.at(counts, (index, kind), 1)
  share = counts.sum(0) / num_folds
  rng = np.random.default_rng(seed)
  order = rng.permutation(len(names))
  order = order[np.argsort(-counts[order].sum(1), kind='stable')]
  load = np.zeros((num_folds, len(kinds)))
  fold_of = np.zeros(len(names), np.int32)
  for site in order:
    # The squared distance to an even share of every stratum, less what is
    # common to all choices.
    gain = ((load + counts[site] - share) ** 2 - (load - share) ** 2) / share
    cost = gain.sum(1)
    best = np.flatnonzero(cost <= cost.min() + 1e-12)
    fold = rng.choice(best)
    fold_of[site] = fold
    load[fold] += counts[site]
  return fold_of[index]

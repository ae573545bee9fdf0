"""Readers of logs: RecBole's `.inter`, MovieLens csv, any csv with a header.

ML-100k is read from the `recbole` package, which is located but never
imported, so none of its dependencies is needed:

  pip install --no-deps recbole==1.2.1

Its licence (GroupLens) allows research, not redistribution.
"""

import csv
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tmlib.recsys.events import EventTable, make_events

__all__ = [
  'find_ml100k',
  'load_movielens_csv',
  'load_recbole_inter',
  'read_events',
  'read_tags',
]


def find_ml100k() -> Path:
  """Folder of ML-100k inside the installed `recbole` package.

  Raises:
    ModuleNotFoundError: if the package is not installed.
    FileNotFoundError: if it came without its example data.
  """
  spec = importlib.util.find_spec('recbole')
  if spec is None or not spec.submodule_search_locations:
    raise ModuleNotFoundError(
      "ML-100k ships with the package 'recbole', which is not installed: "
      'pip install --no-deps recbole==1.2.1'
    )
  root = Path(next(iter(spec.submodule_search_locations)))
  folder = root / 'dataset_example' / 'ml-100k'
  if not (folder / 'ml-100k.inter').is_file():
    raise FileNotFoundError(
      f'{folder} is missing from the installed package recbole; '
      'pip install --no-deps --force-reinstall recbole==1.2.1'
    )
  return folder


def _rows(
  path: Path, delimiter: str, needed: Iterable[str]
) -> tuple[list[str], list[list[str]]]:
  """Header without types (RecBole writes name:type) and rows of equal width."""
  if not path.is_file():
    raise FileNotFoundError(f'{path}: no such file')
  try:
    text = path.read_text(encoding='utf-8-sig')
  except UnicodeDecodeError as error:
    raise ValueError(
      f'{path}: not UTF-8 text (byte {error.start}); unpack it or save it as '
      'UTF-8'
    ) from None
  lines = list(csv.reader(text.splitlines(), delimiter=delimiter))
  lines = [(i, row) for i, row in enumerate(lines, 1) if row]
  if len(lines) < 2:
    raise ValueError(f'{path}: expected a header and at least one event')
  header = [name.split(':')[0].strip() for name in lines[0][1]]
  twice = [name for name in header if header.count(name) > 1]
  if twice:
    raise ValueError(
      f'{path}: the header names column {twice[0]!r} {header.count(twice[0])} '
      'times; rename all but one'
    )
  lacking = [name for name in needed if name not in header]
  if lacking:
    raise ValueError(
      f'{path}: no column {lacking[0]!r} in the header; it has {header}'
    )
  ragged = [i for i, row in lines[1:] if len(row) != len(header)]
  if ragged:
    raise ValueError(
      f'{path}: line {ragged[0]} has another number of fields than the header '
      f'({len(ragged)} such lines)'
    )
  return header, [row for _, row in lines[1:]]


def _numbers(
  path: Path, name: str, column: Sequence[str], empty: bool = False
) -> np.ndarray:
  """float64 of a column; empty fields become NaN where they are allowed."""
  try:
    return np.array([x if x or not empty else 'nan' for x in column], float)
  except ValueError:
    pass
  for row, field in enumerate(column):
    try:
      float(field or 'nan' if empty else field)
    except ValueError:
      raise ValueError(
        f'{path}: event {row}, column {name!r}: {field!r} is not a number'
      ) from None
  raise ValueError(f'{path}: column {name!r} holds something but numbers')


def _columns(
  path: Path, delimiter: str, needed: Sequence[str]
) -> dict[str, list[str]]:
  header, rows = _rows(path, delimiter, needed)
  return {name: [row[i] for row in rows] for i, name in enumerate(header)}


def load_recbole_inter(path: str | Path) -> EventTable:
  """Reads an atomic file of RecBole, tab separated with typed header.

  Args:
    path: the file, a folder that holds one `.inter`, or 'ml-100k' for the set
      inside the installed `recbole` package.

  Returns:
    The table, in the order of the file; lines that repeat stay.

  Raises:
    ModuleNotFoundError, FileNotFoundError: if there is no such file.
    ValueError: for a missing column (user_id, item_id, timestamp) or one that
      is there twice, ragged lines, or fields that are no numbers; the message
      names the place.
  """
  path = find_ml100k() if str(path) == 'ml-100k' else Path(path)
  if path.is_dir():
    found = sorted(path.glob('*.inter'))
    if len(found) != 1:
      raise FileNotFoundError(
        f'{path} holds {len(found)} files *.inter; give the path of one'
      )
    path = found[0]
  names = ('user_id', 'item_id', 'timestamp')
  table = _columns(path, '\t', names)
  user, item, time = (table[name] for name in names)
  return make_events(user, item, _numbers(path, names[2], time))


def load_movielens_csv(
  path: str | Path, max_user: int | None = None
) -> EventTable:
  """Reads `ratings.csv` (userId, movieId, rating, timestamp) of MovieLens.

  Args:
    path: the file or its folder.
    max_user: drops users with a larger id: some copies of ml-latest-small
      append rows of their own, and 610 keeps the official ones.

  Returns:
    The table, in the order of the file.

  Raises:
    FileNotFoundError, ValueError: as `load_recbole_inter`.
  """
  path = Path(path)
  path = path / 'ratings.csv' if path.is_dir() else path
  names = ('userId', 'movieId', 'timestamp')
  table = _columns(path, ',', names)
  user = _numbers(path, names[0], table[names[0]])
  odd = np.flatnonzero(~((user == np.floor(user)) & (np.abs(user) < 2**53)))
  if len(odd):
    raise ValueError(
      f'{path}: event {odd[0]}, column {names[0]!r}: '
      f'{table[names[0]][odd[0]]!r} is no whole number'
    )
  user = user.astype(np.int64)
  time = _numbers(path, names[2], table[names[2]])
  item = np.array(table[names[1]])
  keep = np.ones(len(user), bool) if max_user is None else user <= max_user
  if not keep.any():
    raise ValueError(f'{path}: max_user={max_user} leaves no event')
  return make_events(user[keep], item[keep], time[keep])


def read_events(
  path: str | Path,
  *,
  user: str = 'user',
  item: str = 'item',
  time: str = 'timestamp',
  action: str | None = None,
  modalities: Mapping[str, Sequence[str]] | None = None,
  delimiter: str = ',',
) -> EventTable:
  """Reads any log with a header.

  Args:
    path: the file.
    user: column of the user.
    item: column of the item.
    time: column of the stamp, in seconds.
    action: column of the type of action, or None.
    modalities: {modality: its columns}, numbers; fields that are all empty in a
      row mean that the event lacks the modality.
    delimiter: between fields.

  Returns:
    The table, in the order of the file.

  Raises:
    FileNotFoundError, ValueError: as `load_recbole_inter`.
  """
  path = Path(path)
  extra = [] if action is None else [action]
  wanted = [c for names in (modalities or {}).values() for c in names]
  table = _columns(path, delimiter, [user, item, time, *extra, *wanted])
  features = {
    name: np.stack(
      [_numbers(path, c, table[c], empty=True) for c in columns], 1
    )
    for name, columns in (modalities or {}).items()
  }
  return make_events(
    table[user],
    table[item],
    _numbers(path, time, table[time]),
    action=None if action is None else table[action],
    features=features,
  )


def read_tags(
  path: str | Path,
  names: Sequence[str],
  *,
  key: str = 'item_id',
  columns: Sequence[str] = ('class',),
  numbers: Sequence[str] = (),
  delimiter: str = '\t',
) -> tuple[np.ndarray, tuple[str, ...]]:
  """Attributes of items or users, such as genres or occupations.

  Args:
    path: a table with a header, such as ml-100k.item or ml-100k.user.
    names: the items or users of an `EventTable`, in its order.
    key: column that holds the name.
    columns: columns of words, separated by blanks; each word becomes a tag.
    numbers: numeric columns, standardised; what is empty or NaN becomes the
      mean, 0.
    delimiter: between fields.

  Returns:
    values: [len(names), A] float32: 0 or 1 per tag, then the numbers. Zero
      for a name that is not in the file.
    tags: A names.

  Raises:
    FileNotFoundError, ValueError: as `load_recbole_inter`.
  """
  path = Path(path)
  table: dict[str, Any] = _columns(path, delimiter, [key, *columns, *numbers])
  words = [
    {f'{c}={w}' for c in columns for w in table[c][i].split()}
    for i in range(len(table[key]))
  ]
  tags = sorted(set().union(*words))
  place = {tag: i for i, tag in enumerate(tags)}
  where = {name: i for i, name in enumerate(names)}
  values = np.zeros((len(names), len(tags) + len(numbers)), np.float32)
  standard = []
  for name in numbers:
    column = _numbers(path, name, table[name], empty=True)
    known = column[~np.isnan(column)]
    if not np.isfinite(known).all():
      raise ValueError(f'{path}: column {name!r} holds an infinite number')
    if len(known):
      column = (column - known.mean()) / max(known.std(), 1e-12)
    standard.append(np.nan_to_num(column))
  for i, name in enumerate(map(str.strip, table[key])):
    if name not in where:
      continue
    row = values[where[name]]
    row[[place[word] for word in words[i]]] = 1
    for j, column in enumerate(standard):
      row[len(tags) + j] = column[i]
  return values, (*tags, *numbers)

"""CSV tables as users have them: plain, tab-separated, gzipped or zipped.

Everything is text here; a reader that knows what a column means converts it.
"""

import csv
import gzip
import io
import re
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tmlib.data.slides.paths import near

__all__ = [
  'EMPTY',
  'Table',
  'TableError',
  'clean_id',
  'find_column',
  'read_table',
  'whole',
]

# What tables write where nothing is known.
EMPTY = frozenset({'', 'na', 'n/a', 'nan', 'none', 'null', "'--", '--'})
_SUFFIXES = ('.csv', '.tsv', '.txt', '.zip', '.gz')
# Suffixes of slide images that tables keep and feature files drop.
_IMAGES = (
  '.svs', '.tif', '.tiff', '.ndpi', '.mrxs', '.scn', '.bif', '.svslide',
  '.vms', '.vmu', '.isyntax', '.qptiff', '.czi', '.dcm', '.pt', '.h5',
)  # fmt: skip


class TableError(ValueError):
  """A table that cannot be used; the message names file, column and row."""


class Table(NamedTuple):
  """Rows of text, by column.

  Attributes:
    path: where it came from.
    columns: {name: one text per row}; the index column of pandas is ''.
    lines: line of each row in the file, for messages.
  """

  path: Path
  columns: dict[str, list[str]]
  lines: list[int]

  def where(self, row: int) -> str:
    """Names a row in a message."""
    return f'{self.path}, line {self.lines[row]}'


def read_table(path: str | Path) -> Table:
  """Reads a table with a header.

  Args:
    path: of a .csv or .tsv file, also gzipped, or of a .zip with one such
      member, which is read as a stream and never extracted. Fields may be
      separated by commas, semicolons or tabs.

  Returns:
    Table; fields without the blanks around them, short rows filled with ''.

  Raises:
    FileNotFoundError: no such file.
    TableError: no text table, no rows, a column twice or a row too long.
  """
  path = Path(path)
  if path.is_dir():
    raise TableError(f'{path} is a folder; pass the table itself')
  if not path.is_file():
    raise FileNotFoundError(f'no table at {path}{near(path, _SUFFIXES)}')
  try:
    text = _text(path)
  except TableError:
    raise
  except (OSError, EOFError, zipfile.BadZipFile, RuntimeError) as error:
    raise TableError(f'{path}: cannot be unpacked: {error}') from error
  except UnicodeDecodeError as error:
    raise TableError(
      f'{path}: not UTF-8 text (byte {error.start}); save it as CSV, UTF-8'
    ) from None
  except Exception as error:  # zlib and zipfile have errors of their own
    raise TableError(f'{path}: cannot be unpacked: {error}') from error
  return _parsed(path, text)


def _text(path: Path) -> str:
  if path.suffix.lower() == '.gz':
    with gzip.open(path, 'rb') as file:
      return file.read().decode('utf-8-sig')
  if not zipfile.is_zipfile(path):
    return path.read_bytes().decode('utf-8-sig')
  with zipfile.ZipFile(path) as archive:
    every = archive.namelist()
    if 'xl/workbook.xml' in every:
      raise TableError(
        f'{path}: an Excel workbook; save its sheet as CSV, UTF-8'
      )
    names = [
      name
      for name in every
      if name.lower().endswith(('.csv', '.tsv')) and '__MACOSX' not in name
    ]
    if len(names) != 1:
      raise TableError(
        f'{path}: holds {len(names)} tables {names[:4]}, expected one; unpack '
        'it and pass the one that is meant'
      )
    # The member may be called ../x.csv: its name is never used as a path.
    return archive.read(names[0]).decode('utf-8-sig')


def _parsed(path: Path, text: str) -> Table:
  if '\0' in text:
    raise TableError(f'{path}: holds binary data, expected a text table')
  separator, text = _separator(text)
  # newline='' leaves line ends to the reader: \r\n, and \r of old Macs.
  lines = io.StringIO(text, newline='')
  reader = csv.reader(lines, delimiter=separator, strict=True)
  try:
    rows = list(_rows(reader))
  except csv.Error as error:
    raise TableError(
      f'{path}, line {reader.line_num}: no readable table: {error}; is a quote '
      'left open?'
    ) from None
  if len(rows) < 2:
    raise TableError(
      f'{path}: has {len(rows)} lines, expected a header and rows'
    )
  (_, header), *body = rows
  again = sorted({name for name in header if header.count(name) > 1 and name})
  if again:
    raise TableError(f'{path}: column {again[0]!r} appears twice; rename one')
  for line, row in body:
    if any(row[len(header) :]):
      raise TableError(
        f'{path}, line {line}: {len(row)} fields but the header has '
        f'{len(header)}; a field with {separator!r} inside needs quotes'
      )
  columns = {
    name: [row[i] if i < len(row) else '' for _, row in body]
    for i, name in enumerate(header)
  }
  return Table(path, columns, [line for line, _ in body])


def _separator(text: str) -> tuple[str, str]:
  """What separates fields, and the text without a line that says so."""
  said = re.match(r'\s*sep=([,;\t])\r?\n', text)  # for Excel
  if said:
    return said[1], text[said.end() :]
  first = re.split(r'[\r\n]', text.lstrip(), maxsplit=1)[0]
  # Those in names of columns do not count.
  return max(',;\t', key=re.sub('"[^"]*"', '', first).count), text


def _rows(reader) -> Iterator[tuple[int, list[str]]]:
  for row in reader:
    fields = [field.strip() for field in row]
    if any(fields):
      yield reader.line_num, fields


def find_column(
  table: Table,
  wanted: str,
  names: Sequence[str],
  field: str,
  required: bool = True,
) -> str | None:
  """The column that a user named, or the first known one.

  Args:
    table: to look in.
    wanted: what the user asked for, '' where they did not.
    names: known names, best first; case, blanks, '-' and '_' are the same.
    field: what sets it, for the message.
    required: whether its absence is an error.

  Returns:
    Name of the column, or None.

  Raises:
    TableError: it is not there.
  """
  if wanted:
    if wanted in table.columns:
      return wanted
    raise TableError(
      f'{table.path}: no column {wanted!r} ({field}); it has {_listed(table)}'
    )
  plain = {_plain(name): name for name in reversed(table.columns)}
  for name in names:
    if _plain(name) in plain:
      return plain[_plain(name)]
  if not required:
    return None
  raise TableError(
    f'{table.path}: no column {" or ".join(names[:3])}; it has '
    f'{_listed(table)}. Name the right one by {field}'
  )


def _plain(name: str) -> str:
  return name.lower().replace(' ', '_').replace('-', '_')


def _listed(table: Table) -> str:
  names = [name for name in table.columns if name]
  more = f' and {len(names) - 12} more' if len(names) > 12 else ''
  return ', '.join(names[:12]) + more


def whole(text: str) -> str:
  """'1.0' as '1': pandas writes integers so where a column has blanks."""
  head, _, tail = text.partition('.')
  return head if tail and head.isdigit() and not tail.strip('0') else text


def clean_id(name: str) -> str:
  """A slide's id without blanks around it and the suffix of its image file.

  Args:
    name: as a table or a file name has it.

  Returns:
    The id under which tables and files meet.
  """
  name = name.strip()
  lower = name.lower()
  for suffix in _IMAGES:
    if lower.endswith(suffix):
      return name[: -len(suffix)]
  return name

"""Labels, survival times, targets and splits of the public repositories.

CLAM: case_id, slide_id, label. TransMIL: train, train_label, val, ... in one
file. MCAT, PORPOISE and SurvPath: survival_months and censorship, where
**censorship = 1 means censored**. MHIM: ID, Event (the time!), Status, WSI.
"""

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tmlib.data.slides.table import (
  EMPTY,
  Table,
  TableError,
  clean_id,
  find_column,
  read_table,
  whole,
)

__all__ = ['SlideTable', 'read_labels', 'read_survival', 'read_targets']

_SLIDE = ('slide_id', 'slide', 'wsi', 'filename', 'file_name', 'image_id')
_CASE = ('case_id', 'patient_id', 'case', 'patient', 'case_submitter_id')
_LABEL = ('label', 'class', 'target', 'diagnosis', 'subtype', 'oncotree_code')
_SITE = ('site', 'tissue_source_site', 'center', 'centre', 'hospital')
_TIME = (
  'survival_months', 'os_months', 'survival_days', 'os_days', 'survival_time',
  'time', 'months', 'days',
)  # fmt: skip
_CENSORED = ('censorship', 'censored', 'censor')
_EVENT = ('event', 'status', 'os_status', 'dead', 'vital_status')
# Of a table that pandas wrote and read and wrote.
_INDEX = re.compile(r'Unnamed: \d+')
# uncensored = 1 is an event, is_censored = 1 is none.
_CENSOR = re.compile(r'(?<!un)(?<!not)(?<!not[ _-])censor', re.IGNORECASE)


class SlideTable(NamedTuple):
  """What a table says of slides, row by row.

  Attributes:
    path: of the table.
    slides: slide ids, cleaned; '' where the table is by patient.
    cases: patient of each row; the slide itself where no column tells.
    sites: where it was collected, '' where unknown.
    values: what was asked for: {'label': texts}, {'time': [n], 'event': [n]},
      or {'targets': [n, G]}.
    names: of the G targets, or ().
    skipped: rows left out for want of a value.
    repeated: slides with several rows that agree; one is kept.
  """

  path: Path
  slides: list[str]
  cases: list[str]
  sites: list[str]
  values: dict[str, np.ndarray]
  names: tuple[str, ...] = ()
  skipped: tuple[str, ...] = ()
  repeated: tuple[str, ...] = ()


def read_labels(
  path: str | Path,
  *,
  label_column: str = '',
  slide_column: str = '',
  case_column: str = '',
  incomplete: str = 'error',
) -> SlideTable:
  """Reads classes of slides, or of patients.

  Args:
    path: of a CLAM, TransMIL or similar table.
    label_column: column of the class; '' takes the first known name.
    slide_column: column of the slide id, the same.
    case_column: column of the patient, the same.
    incomplete: 'error' or 'skip' rows without a label.

  Returns:
    SlideTable with values {'label': texts}; 1.0 reads as '1'.

  Raises:
    FileNotFoundError, TableError: see `read_table`; no such column, a slide
      with two labels, an empty label.
  """
  table = read_table(path)
  if not label_column and 'train_label' in table.columns:
    return _transmil(table)
  column = _column(table, label_column, _LABEL, 'label_column')
  texts = [whole(x) for x in table.columns[column]]
  kept, skipped = _complete(table, {column: texts}, incomplete)
  found = _rows(table, slide_column, case_column, kept, skipped)
  values = {'label': np.array([texts[i] for i in kept], object)}
  return _one_row_each(found._replace(values=values))


def read_survival(
  path: str | Path,
  *,
  time_column: str = '',
  event_column: str = '',
  slide_column: str = '',
  case_column: str = '',
  incomplete: str = 'error',
) -> SlideTable:
  """Reads follow-up times and events.

  Args:
    path: of an MCAT, PORPOISE, SurvPath, MHIM or similar table.
    time_column: such as 'survival_months_dss'; '' takes the first known name.
    event_column: 1 = event seen, or, where its name says censor, 1 =
      censored; '' looks for the one that goes with the time.
    slide_column: column of the slide id.
    case_column: column of the patient.
    incomplete: 'error' or 'skip' rows without a time or an event.

  Returns:
    SlideTable with values {'time': [n] float64, 'event': [n] bool}.

  Raises:
    FileNotFoundError, TableError: see `read_table`; no such column, a time that
      is negative or no number, an event other than 0 and 1, a patient with two
      times.
  """
  table = read_table(path)
  time, event = time_column, event_column
  plain = {name.lower() for name in table.columns}
  if not time and {'event', 'status', 'wsi'} <= plain:
    # MHIM: the column Event holds months.
    time = _column(table, '', ('event',), 'time_column')
    event = event or _column(table, '', ('status',), 'event_column')
    case_column = case_column or _column(table, '', ('id',), 'case_column')
  time = _column(table, time, _TIME, 'time_column')
  if not event:
    end = time.removeprefix('survival_months')
    names = [f'censorship{end}'] if end != time else []
    names += [*_CENSORED, *(n for n in _EVENT if n != time.lower())]
    event = _column(table, '', names, 'event_column')
  texts = {time: table.columns[time], event: table.columns[event]}
  kept, skipped = _complete(table, texts, incomplete)
  found = _rows(table, slide_column, case_column, kept, skipped)
  times = _numbers(table, time, kept)
  negative = np.flatnonzero(times < 0)
  if len(negative):
    row = kept[negative[0]]
    raise TableError(
      f'{table.where(row)}: {time} = {times[negative[0]]:g} is negative in '
      f'{len(negative)} rows; a follow-up time cannot be: correct them'
    )
  events = _events(table, event, kept)
  values = {'time': times, 'event': events}
  return _one_row_each(found._replace(values=values))


def read_targets(
  path: str | Path,
  *,
  targets: Sequence[str] = (),
  slide_column: str = '',
  case_column: str = '',
  incomplete: str = 'error',
) -> SlideTable:
  """Reads numbers to predict, such as gene expression.

  Args:
    path: of a table with one row per slide or patient.
    targets: columns; () takes every column of numbers that is no id, no site
      and no index.
    slide_column: column of the slide id.
    case_column: column of the patient.
    incomplete: 'error' or 'skip' rows with an empty target.

  Returns:
    SlideTable with values {'targets': [n, G] float64} and their names.

  Raises:
    FileNotFoundError, TableError: see `read_table`; no such column, or values
      that are no numbers.
  """
  table = read_table(path)
  ids = {
    _column(table, slide_column, _SLIDE, 'slide_column', False),
    _column(table, case_column, _CASE, 'case_column', False),
    _column(table, '', _SITE, 'site_column', False),
    '',
  }
  numeric = lambda texts: all(
    _is_number(x) or x.lower() in EMPTY for x in texts
  )
  names = list(targets) or [
    name
    for name, texts in table.columns.items()
    if name not in ids and not _INDEX.fullmatch(name) and numeric(texts)
  ]
  if not names:
    raise TableError(
      f'{table.path}: no column of numbers to predict; name them by targets'
    )
  for name in names:
    _column(table, name, (), 'targets')
  texts = {name: table.columns[name] for name in names}
  kept, skipped = _complete(table, texts, incomplete)
  found = _rows(table, slide_column, case_column, kept, skipped)
  numbers = np.stack([_numbers(table, name, kept) for name in names], 1)
  values = {'targets': numbers}
  return _one_row_each(found._replace(values=values, names=tuple(names)))


def _column(table, wanted, names, field, required=True) -> str:
  found = find_column(table, wanted, names, field, required)
  return found or ''


def _transmil(table: Table) -> SlideTable:
  """Labels of a split file that holds both."""
  slides, labels = [], []
  for part in ('train', 'val', 'test'):
    names = table.columns.get(part, [])
    texts = table.columns.get(f'{part}_label', [])
    for row, (name, text) in enumerate(zip(names, texts, strict=False)):
      if name.lower() in EMPTY:
        continue
      if text.lower() in EMPTY:
        raise TableError(f'{table.where(row)}: {name} has no {part}_label')
      slides.append(clean_id(name))
      labels.append(whole(text))
  found = SlideTable(
    table.path, slides, list(slides), [''] * len(slides),
    {'label': np.array(labels, object)},
  )  # fmt: skip
  return _one_row_each(found)


def _rows(
  table: Table, slide: str, case: str, kept: list[int], skipped: list[int]
) -> SlideTable:
  """Ids of the rows that are kept, without values."""
  slide = _column(table, slide, _SLIDE, 'slide_column', False)
  case = _column(table, case, _CASE, 'case_column', False)
  site = _column(table, '', _SITE, 'site_column', False)
  if not slide and not case:
    find_column(table, '', _SLIDE, 'slide_column')
  # Never the column '', which is the index of pandas.
  texts = lambda column: (
    table.columns[column] if column else [''] * len(table.lines)
  )
  slides = [clean_id(x) for x in texts(slide)]
  cases = list(texts(case)) if case else slides
  sites = texts(site)
  for column, ids in ((slide, slides), (case, cases)):
    empty = [i for i in kept if column and not ids[i]]
    if empty:
      raise TableError(f'{table.where(empty[0])}: {column} is empty')
  pick = lambda rows: [rows[i] for i in kept]
  left = tuple(slides[i] or cases[i] for i in skipped)
  return SlideTable(
    table.path, pick(slides), pick(cases), pick(sites), {}, skipped=left
  )


def _complete(
  table: Table, texts: dict[str, list[str]], incomplete: str
) -> tuple[list[int], list[int]]:
  """Rows with and without all their values."""
  if incomplete not in ('error', 'skip'):
    raise TableError(f"incomplete={incomplete!r} must be 'error' or 'skip'")
  skipped = []
  for row in range(len(table.lines)):
    missing = [c for c, x in texts.items() if x[row].lower() in EMPTY]
    if not missing:
      continue
    if incomplete == 'error':
      total = sum(
        any(x[i].lower() in EMPTY for x in texts.values())
        for i in range(len(table.lines))
      )
      raise TableError(
        f'{table.where(row)}: {missing[0]} is empty ({total} of '
        f'{len(table.lines)} rows lack a value); fill it in, or leave '
        "such rows out by incomplete='skip'"
      )
    skipped.append(row)
  kept = sorted(set(range(len(table.lines))) - set(skipped))
  if not kept:
    raise TableError(
      f'{table.path}: no row has a value in {" and ".join(texts)}'
    )
  return kept, skipped


def _one_row_each(table: SlideTable) -> SlideTable:
  """Drops rows that repeat another one; refuses those that contradict it."""
  first: dict[str, int] = {}
  kept = []
  for row, (slide, case) in enumerate(
    zip(table.slides, table.cases, strict=True)
  ):
    name = slide or case
    if name not in first:
      first[name] = row
      kept.append(row)
      continue
    there = first[name]
    for key, values in table.values.items():
      if not np.array_equal(values[there], values[row]):
        raise TableError(
          f'{table.path}: {name} appears twice, with {key} {values[there]} and '
          f'{values[row]}; keep one row per slide'
        )
    if table.cases[there] != case:
      raise TableError(
        f'{table.path}: slide {name} belongs to two patients, '
        f'{table.cases[there]} and {case}'
      )
  pick = lambda texts: [texts[i] for i in kept]
  names = [a or b for a, b in zip(table.slides, table.cases, strict=True)]
  again = {names[i] for i in set(range(len(names))) - set(kept)}
  return table._replace(
    repeated=tuple(sorted(again)),
    slides=pick(table.slides),
    cases=pick(table.cases),
    sites=pick(table.sites),
    values={k: v[kept] for k, v in table.values.items()},
  )


def _is_number(text: str) -> bool:
  try:
    return math.isfinite(float(text))
  except ValueError:
    return False


def _numbers(table: Table, column: str, kept: list[int]) -> np.ndarray:
  texts = table.columns[column]
  for row in kept:
    if not _is_number(texts[row]):
      raise TableError(
        f'{table.where(row)}: {column} = {texts[row]!r} is no number'
      )
  return np.array([float(texts[row]) for row in kept])


_SEEN = {
  '1': True, 'true': True, 'yes': True, 'dead': True, 'deceased': True,
  '1:deceased': True, '0': False, 'false': False, 'no': False, 'alive': False,
  'living': False, '0:living': False,
}  # fmt: skip


def _events(table: Table, column: str, kept: list[int]) -> np.ndarray:
  """[n] bool, turned round where the column tells who is censored."""
  found = []
  for row in kept:
    text = whole(table.columns[column][row]).lower()
    if text not in _SEEN:
      raise TableError(
        f'{table.where(row)}: {column} = {table.columns[column][row]!r}, '
        'expected 0 or 1'
      )
    found.append(_SEEN[text])
  events = np.array(found, bool)
  return ~events if _CENSOR.search(column) else events

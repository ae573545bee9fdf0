"""A cohort: what a table says, joined with the files that exist.

Axes: n bags (slides, or patients with all their slides).

Whatever is wrong is found here, at once and by name: nothing is left to fail in
the middle of a run.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib.data.slides.files import match_case
from tmlib.data.slides.scan import Scan
from tmlib.data.slides.slide import ENCODERS, encoders_of
from tmlib.data.slides.splits import Split
from tmlib.data.slides.tables import SlideTable

__all__ = [
  'Cohort', 'CohortError', 'apply_split', 'check_cohort', 'join_slides',
]  # fmt: skip

_SHOWN = 5
_TCGA = re.compile(r'TCGA-([A-Z0-9]{2})-', re.IGNORECASE)


class CohortError(ValueError):
  """Table and files do not fit each other; the message says how to mend it."""


class Cohort(NamedTuple):
  """Bags and what is known of them.

  Attributes:
    names: n ids of slides, or of patients.
    cases: n patients.
    sites: n sites, '' where unknown.
    files: n tuples of feature files; several where a patient has several.
    values: {name: [n, ...]}, as of `SlideTable`.
    target_names: of the targets, or ().
    findings: sentences for the report at start, each with names.
  """

  names: tuple[str, ...]
  cases: tuple[str, ...]
  sites: tuple[str, ...]
  files: tuple[tuple[Path, ...], ...]
  values: dict[str, np.ndarray]
  target_names: tuple[str, ...] = ()
  findings: tuple[str, ...] = ()

  def select(self, index: Any) -> 'Cohort':
    """The bags at some positions."""
    index = np.asarray(index, np.int64)
    pick = lambda items: tuple(items[i] for i in index)
    return self._replace(
      names=pick(self.names),
      cases=pick(self.cases),
      sites=pick(self.sites),
      files=pick(self.files),
      values={name: value[index] for name, value in self.values.items()},
    )


def join_slides(
  table: SlideTable, files: Mapping[str, Path], unit: str = 'slide'
) -> Cohort:
  """Finds the files of a table's rows.

  Args:
    table: of `read_labels`, `read_survival` or `read_targets`.
    files: {slide id: file} of `find_slides`.
    unit: 'slide' for one bag per slide, 'patient' for one per patient, which
      holds all their slides (early fusion).

  Returns:
    Cohort. Rows without a file and files without a row are among its findings.

  Raises:
    CohortError: no row has a file, or slides of a patient contradict another.
  """
  if unit not in ('slide', 'patient'):
    raise CohortError(f"unit={unit!r} must be 'slide' or 'patient'")
  slides = list(files)
  rows: list[int] = []
  found: list[tuple[str, Path]] = []
  missing: list[str] = []
  for row, (slide, case) in enumerate(
    zip(table.slides, table.cases, strict=True)
  ):
    ids = [slide] if slide else match_case(case, slides)
    ids = [name for name in ids if name in files]
    if not ids:
      missing.append(slide or case)
    rows += [row] * len(ids)
    found += [(name, files[name]) for name in ids]
  if not found:
    raise CohortError(_nothing_fits(table, slides))
  findings = _named('rows of the table have no feature file', missing,
                    len(table.cases))  # fmt: skip
  used = {name for name, _ in found}
  findings += _named(
    'feature files are not in the table', [s for s in slides if s not in used],
    len(slides),
  )  # fmt: skip
  findings += _named(
    'rows lack a value and are left out', table.skipped,
    len(table.skipped) + len(table.cases),
  )  # fmt: skip
  findings += _named(
    'slides have several rows that agree; one is kept', table.repeated,
    len(table.cases),
  )  # fmt: skip
  names = [name for name, _ in found]
  cohort = Cohort(
    tuple(names),
    tuple(table.cases[row] for row in rows),
    tuple(
      _site(table.sites[row], table.cases[row], name)
      for row, name in zip(rows, names, strict=True)
    ),
    tuple((path,) for _, path in found),
    {key: value[rows] for key, value in table.values.items()},
    table.names,
    tuple(findings),
  )
  return _by_patient(cohort) if unit == 'patient' else cohort


def check_cohort(
  cohort: Cohort,
  scan: Scan,
  *,
  encoder: str = '',
  incomplete: str = 'error',
) -> Cohort:
  """Leaves out empty slides, and refuses what would break a run.

  Args:
    cohort: of `join_slides`.
    scan: of all its files.
    encoder: a name in `ENCODERS` that the feature size must fit, or ''.
    incomplete: 'error', or 'skip' for slides that are broken or hold NaN.

  Returns:
    Cohort, with further findings.

  Raises:
    CohortError: broken files, NaN, features of several sizes, nothing left.
  """
  findings = list(cohort.findings)
  every = [path for files in cohort.files for path in files]
  rows = {path: scan[path] for path in every}
  bad = {p: r.error for p, r in rows.items() if r.error}
  nan = {p: r for p, r in rows.items() if r.bad_patches}
  if incomplete == 'error':
    _raise_if_broken(bad, nan, len(every))
  empty = [p for p, r in rows.items() if not r.num_patches and not r.error]
  _check_dims({p: r.dim for p, r in rows.items() if r.num_patches}, encoder)
  stems = lambda paths: [path.stem for path in paths]
  total = len(every)
  findings += _named('files cannot be read and are left out', stems(bad), total)
  findings += _named('slides hold NaN and are left out', stems(nan), total)
  findings += _named('slides are empty and are left out', stems(empty), total)
  left_out = {*bad, *nan, *empty}
  for text, condition in (
    ('slides have patches on one position; all but the first have no neighbour',
     lambda r: r.repeated),
    ('slides have patches on no grid; neighbours are those near by',
     lambda r: r.off_grid),
    ('slides have no positions', lambda r: not r.has_coords),
    ('slides do not store their pitch; it is inferred from the positions',
     lambda r: r.note),
  ):  # fmt: skip
    some = [p for p, r in rows.items() if p not in left_out and condition(r)]
    findings += _named(text, stems(some), total)
  files = tuple(
    tuple(path for path in paths if path not in left_out)
    for paths in cohort.files
  )
  kept = [i for i, paths in enumerate(files) if paths]
  if not kept:
    raise CohortError('no slide is left: ' + '; '.join(findings))
  cohort = cohort._replace(files=files, findings=tuple(findings))
  return cohort.select(kept)


def apply_split(
  cohort: Cohort, split: Split
) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
  """Positions of the bags of each part of a split.

  Args:
    cohort: n bags.
    split: ids of slides or of patients.

  Returns:
    parts: {'train': [k] int64, 'val': ..., 'test': ...}; empty parts are left
      out.
    findings: ids of the split that the cohort does not have, and bags that the
      split leaves out.

  Raises:
    CohortError: a patient in two parts, or a part of which nothing is left.
  """
  where: dict[str, str] = {}
  for part in ('train', 'val', 'test'):
    where |= dict.fromkeys(getattr(split, part), part)
  parts: dict[str, list[int]] = {}
  owner: dict[str, tuple[str, str]] = {}
  used, unused = set(), []
  for i, (name, case) in enumerate(
    zip(cohort.names, cohort.cases, strict=True)
  ):
    ids = [name, case, *(path.stem for path in cohort.files[i])]
    found = next((x for x in ids if x in where), None)
    if found is None:
      unused.append(name)
      continue
    used.update(x for x in ids if x in where)
    part = where[found]
    first, there = owner.setdefault(case, (name, part))
    if there != part:
      raise CohortError(
        f'{split.name}: patient {case} is in {there} ({first}) and in {part} '
        f'({name}); slides of one patient must stay together'
      )
    parts.setdefault(part, []).append(i)
  for part in ('train', 'val', 'test'):
    if getattr(split, part) and part not in parts:
      some = ', '.join(getattr(split, part)[:3])
      raise CohortError(
        f'{split.name}: no bag of the part {part!r} is in the cohort (it names '
        f'{some}); do its ids fit the table?'
      )
  gone = [name for name in where if name not in used]
  findings = _named(f'ids of {split.name} have no bag', gone, len(where))
  findings += _named(f'bags are not in {split.name}', unused, len(cohort.names))
  return (
    {part: np.array(index, np.int64) for part, index in parts.items()},
    tuple(findings),
  )


def _by_patient(cohort: Cohort) -> Cohort:
  """One bag per patient, in order of first appearance."""
  members: dict[str, list[int]] = {}
  for i, case in enumerate(cohort.cases):
    members.setdefault(case, []).append(i)
  for case, index in members.items():
    for key, value in cohort.values.items():
      first = value[index[0]]
      other = [i for i in index if not np.array_equal(value[i], first)]
      if other:
        raise CohortError(
          f'slides of patient {case} have {key} {first} '
          f'({cohort.names[index[0]]}) and {value[other[0]]} '
          f'({cohort.names[other[0]]}); correct the table, or use one bag per '
          'slide: unit=slide'
        )
  merged = cohort.select([index[0] for index in members.values()])
  files = tuple(
    tuple(path for i in index for path in cohort.files[i])
    for index in members.values()
  )
  return merged._replace(names=tuple(members), files=files)


def _site(site: str, case: str, slide: str) -> str:
  """The site, for TCGA from the barcode where no column tells."""
  found = _TCGA.match(case) or _TCGA.match(slide)
  return site or (found.group(1).upper() if found else '')


def _named(text: str, names: Sequence[str], total: int) -> list[str]:
  if not names:
    return []
  names = sorted(names)
  more = f', ... ({len(names) - _SHOWN} more)' if len(names) > _SHOWN else ''
  return [f'{len(names)} of {total} {text}: {", ".join(names[:_SHOWN])}{more}']


def _nothing_fits(table: SlideTable, slides: Sequence[str]) -> str:
  wanted = [a or b for a, b in zip(table.slides, table.cases, strict=True)]
  return (
    f'none of the {len(wanted)} ids of {table.path} has a feature file; the '
    f'table has {", ".join(wanted[:2])}, the folder {", ".join(slides[:2])}. '
    'Is it the right folder, and the right slide_column?'
  )


def _raise_if_broken(bad: Mapping, nan: Mapping, total: int) -> None:
  if bad:
    first = next(iter(bad.values()))
    names = ', '.join(path.name for path in list(bad)[:_SHOWN])
    raise CohortError(
      f'{len(bad)} of {total} feature files cannot be read ({names}): {first}. '
      "Leave them out by incomplete='skip'"
    )
  if nan:
    path, row = next(iter(nan.items()))
    names = ', '.join(p.name for p in list(nan)[:_SHOWN])
    raise CohortError(
      f'{len(nan)} of {total} slides hold NaN or infinite features ({names}): '
      f'{path} in {row.bad_patches} of {row.num_patches} patches. Extract them '
      "again, or leave them out by incomplete='skip'"
    )


def _check_dims(dims: Mapping[Path, int], encoder: str) -> None:
  if encoder and encoder not in ENCODERS:
    raise CohortError(
      f'encoder {encoder!r} is unknown; known: {", ".join(ENCODERS)}, or none'
    )
  sizes, counts = np.unique(list(dims.values()), return_counts=True)
  if len(sizes) > 1:
    usual = int(sizes[counts.argmax()])
    odd = [path for path, dim in dims.items() if dim != usual]
    raise CohortError(
      f'features have several sizes: {usual} in {counts.max()} slides but '
      f'{encoders_of(dims[odd[0]])} in {len(odd)}, such as {odd[0]}; use the '
      'files of one encoder'
    )
  if encoder and len(sizes) and sizes[0] != ENCODERS[encoder]:
    path = next(iter(dims))
    raise CohortError(
      f'features have dim {encoders_of(int(sizes[0]))} but encoder {encoder!r} '
      f'makes {ENCODERS[encoder]}; pass the right encoder or '
      f'extract again. First file: {path}'
    )

"""Finds the feature files of a folder, however it is laid out.

CLAM writes `h5_files/` and `pt_files/` side by side; TRIDENT one folder per
encoder below one per patching; others a folder per patient.
"""

from collections.abc import Sequence
from pathlib import Path

from tmlib.data.slides.arrays import SUFFIXES
from tmlib.data.slides.paths import near
from tmlib.data.slides.table import clean_id

__all__ = ['find_slides', 'match_case']

# Both hold the same slides; only the first has positions.
_CLAM = ('h5_files', 'pt_files')


def find_slides(folder: str | Path) -> dict[str, Path]:
  """Slide ids and their files.

  Files of the folder itself; where there are none, those of `h5_files` and
  `pt_files`; where there are none either, those of all folders below. Of
  several files of a slide the one that says most is taken, see `SUFFIXES`.

  Args:
    folder: of feature files.

  Returns:
    {slide id: file}, sorted. An id is the file's name without suffixes.

  Raises:
    FileNotFoundError: no such folder, or no feature file in it.
    ValueError: folders that hold features of the same slides, or two files
      whose names mean one slide.
  """
  folder = Path(folder)
  if folder.is_file():
    raise ValueError(
      f'{folder} is a file; pass the folder of feature files that it lies in'
    )
  if not folder.is_dir():
    raise FileNotFoundError(f'no folder {folder}{near(folder)}')
  files = _features(folder.iterdir())
  if not files:
    files = _features(f for n in _CLAM for f in (folder / n).glob('*'))
  if not files:
    files = _features(folder.rglob('*'))
    _check_one_set(folder, files)
  if not files:
    some = sorted(path.name for path in folder.iterdir())[:4]
    raise FileNotFoundError(
      f'no feature file ({", ".join(SUFFIXES)}) in {folder}; it holds '
      f'{", ".join(some) or "nothing"}'
    )
  return _by_slide(files)


def match_case(case: str, slides: Sequence[str]) -> list[str]:
  """The slides of a patient, by name: the id, or the id and more after it.

  Args:
    case: id of the patient, such as TCGA-3M-AB46.
    slides: sorted slide ids.

  Returns:
    Those that are equal to it or start with it and a separator.
  """
  return [
    slide
    for slide in slides
    if slide == case
    or (slide.startswith(case) and not slide[len(case)].isalnum())
  ]


def _features(paths) -> list[Path]:
  return [
    path
    for path in paths
    if path.suffix.lower() in SUFFIXES
    and path.is_file()
    # Coordinates that TRIDENT keeps of its patching.
    and not path.stem.endswith('_patches')
    and not path.name.startswith('.')
  ]


def _check_one_set(folder: Path, files: list[Path]) -> None:
  seen: dict[str, Path] = {}
  for path in files:
    other = seen.setdefault(clean_id(path.stem), path)
    if other.parent != path.parent:
      a, b = sorted(str(p.parent.relative_to(folder)) for p in (other, path))
      raise ValueError(
        f'{folder} holds several sets of features, in {a} and in {b}; pass one '
        'of these folders'
      )


def _by_slide(files: list[Path]) -> dict[str, Path]:
  rank = lambda path: (SUFFIXES.index(path.suffix.lower()), str(path))
  found: dict[str, Path] = {}
  for path in sorted(files, key=rank):
    name = clean_id(path.stem)
    other = found.setdefault(name, path)
    if other != path and other.suffix == path.suffix:
      raise ValueError(
        f'{other} and {path} are both slide {name!r}; remove or rename one'
      )
  return dict(sorted(found.items()))

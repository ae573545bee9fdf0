"""The cohort of a user: table, files and splits, checked at the start.

Axes: n bags.
"""

import csv
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from tmlib.config import config_field
from tmlib.data import slides

__all__ = ['Fold', 'Study', 'load_study', 'warn']

TASKS = ('subtype', 'survival_nll', 'survival_cox', 'expression')
_UNITS = ('auto', 'slide', 'patient')


class Fold(NamedTuple):
  """What one model learns from and is tested on: positions of bags."""

  name: str
  train: np.ndarray
  val: np.ndarray
  test: np.ndarray


class Study(NamedTuple):
  """All that is known before training.

  Attributes:
    cohort: n bags.
    scan: of their files.
    folds: one per model.
    findings: sentences for the start and the report.
    dim: P.
    half: whether all features are float16.
    has_coords: whether all slides store positions.
  """

  cohort: slides.Cohort
  scan: slides.Scan
  folds: tuple[Fold, ...]
  findings: tuple[str, ...]
  dim: int
  half: bool
  has_coords: bool

  def lengths(self, index: Any) -> np.ndarray:
    """Patches of some bags."""
    return np.array([
      sum(self.scan[path].num_patches for path in self.cohort.files[i])
      for i in index
    ], np.int64)  # fmt: skip

  def rows(self, index: Any) -> list[slides.ScanRow]:
    """The scanned files of some bags."""
    return [self.scan[p] for i in index for p in self.cohort.files[i]]


def load_study(config, workdir: Path | None) -> Study:
  """Reads the table, finds the files, looks at each, and splits.

  Raises:
    ValueError, FileNotFoundError: whatever is wrong, with the config's field.
  """
  _check_choices(config)
  if config.data.synthetic and not config.data.features:
    folder, labels = _synthetic(config, workdir)
  else:
    folder, labels = config.data.features, config.data.labels
  for name, value in (('features', folder), ('labels', labels)):
    if not value:
      raise ValueError(
        f'data.{name} is empty; pass --config.data.features=FOLDER and '
        '--config.data.labels=TABLE'
      )
  with config_field('data.features'):
    files = slides.find_slides(folder)
  with config_field('data.labels'):
    table = _read_table(config, labels)
    cohort = slides.join_slides(table, files, _unit(config))
  cache = None if workdir is None else workdir / 'scan.npz'
  paths = [path for group in cohort.files for path in group]
  scan = slides.scan_slides(paths, cache=cache, workers=config.train.workers)
  with config_field('data.features'):
    cohort = slides.check_cohort(
      cohort,
      scan,
      encoder=config.data.encoder,
      incomplete=config.data.incomplete,
    )
  if 'survival' in config.task:
    cohort = _with_zero_times(cohort)
  # What was left out may be why the next check fails.
  warn(cohort.findings)
  if config.task == 'subtype':
    _check_classes(cohort.values['label'].astype(str))
  kept = [scan[path] for group in cohort.files for path in group]
  folds, more = _folds(config, cohort)
  findings = (*cohort.findings, *more)
  study = Study(
    cohort, scan, folds, findings, kept[0].dim,
    all(row.half for row in kept), all(row.has_coords for row in kept),
  )  # fmt: skip
  _announce(config, study)
  return study


def warn(findings) -> None:
  """Says each finding at the start."""
  for text in findings:
    logging.warning('%s', text)


def _check_choices(config) -> None:
  for name, value, known in (
    ('task', config.task, TASKS),
    ('data.unit', config.data.unit, _UNITS),
    ('data.sampler', config.data.sampler, ('shuffle', 'balanced', 'events')),
    ('data.graph', config.data.graph, ('auto', *slides.GRAPHS)),
    ('data.incomplete', config.data.incomplete, ('error', 'skip')),
  ):
    if value not in known:
      raise ValueError(f'{name}={value!r} must be one of {", ".join(known)}')
  for name, value, least in (
    ('data.folds', config.data.folds, 2),
    ('data.neighbours', config.data.neighbours, 1),
    ('data.max_patches', config.data.max_patches, 0),
    ('epochs', config.epochs, 0),
    ('min_steps', config.min_steps, 0),
    ('train.steps', config.train.steps, 0),
    ('train.batch_size', config.train.batch_size, 1),
    ('train.eval_batch_size', config.train.eval_batch_size, 1),
    ('loss.bins', config.loss.bins, 2),
  ):
    if value < least:
      raise ValueError(f'{name}={value} must be at least {least}')
  for name in ('alpha', 'label_smoothing'):
    value, most = config.loss[name], name == 'alpha'
    if not 0 <= value <= 1 or (value == 1 and not most):
      raise ValueError(
        f'loss.{name}={value} must be in [0, 1{"]" if most else ")"}'
      )
  if config.data.sampler == 'events' and 'survival' not in config.task:
    raise ValueError("data.sampler='events' needs a survival task")
  if config.data.sampler == 'balanced' and config.task != 'subtype':
    raise ValueError("data.sampler='balanced' needs task='subtype'")
  if config.train.runs:
    raise ValueError(
      f'train.runs={config.train.runs}: features are read from disk at each '
      'step, for one run; train another seed by --config.seed in a workdir of '
      'its own'
    )


def _unit(config) -> str:
  if config.data.unit != 'auto':
    return config.data.unit
  return 'slide' if config.task == 'subtype' else 'patient'


def _read_table(config, path: str) -> slides.SlideTable:
  data = config.data
  common = dict(
    slide_column=data.slide_column,
    case_column=data.case_column,
    incomplete=data.incomplete,
  )
  if config.task == 'subtype':
    return slides.read_labels(path, label_column=data.label_column, **common)
  if config.task == 'expression':
    return slides.read_targets(path, targets=data.targets, **common)
  return slides.read_survival(
    path,
    time_column=data.time_column,
    event_column=data.event_column,
    **common,
  )


def _strata(config, cohort: slides.Cohort) -> Any:
  if config.task == 'subtype':
    return cohort.values['label'].astype(str)
  if config.task == 'expression':
    return np.zeros(len(cohort.names), int)
  return cohort.values['event']


def _folds(config, cohort) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
  if config.data.splits:
    return _given_splits(config, cohort)
  strata, number = _strata(config, cohort), config.data.folds
  if config.task == 'subtype':
    _check_class_sizes(config, cohort)
  if config.data.preserve_sites:
    with config_field('data.folds'):
      fold = slides.site_folds(cohort.sites, strata, number, config.seed)
  else:
    with config_field('data.folds'):
      fold = slides.patient_folds(cohort.cases, strata, number, config.seed)
  none = np.zeros(0, np.int64)
  return tuple(
    Fold(
      f'fold_{k}', np.flatnonzero(fold != k), none, np.flatnonzero(fold == k)
    )
    for k in range(number)
  ), ()


def _check_classes(texts: np.ndarray) -> None:
  classes = np.unique(texts).tolist()
  if len(classes) < 2:
    raise ValueError(
      f'data.labels: all {len(texts)} bags have label {classes[0]!r}; '
      'classification needs at least two classes'
    )
  own = len(classes) == len(texts) > 2
  if own or len(classes) > max(20, len(texts) / 2):
    raise ValueError(
      f'data.labels: {len(classes)} different labels for {len(texts)} bags, '
      f'such as {classes[0]!r}; is data.label_column the right one? Numbers '
      'are predicted by --config.task=expression'
    )
  plain: dict[str, str] = {}
  for name in classes:
    other = plain.setdefault(' '.join(name.lower().split()), name)
    if other != name:
      raise ValueError(
        f'data.labels: the labels {other!r} and {name!r} differ in case or '
        'blanks only; write one of them throughout'
      )


def _check_class_sizes(config, cohort) -> None:
  names, index = np.unique(
    cohort.values['label'].astype(str), return_inverse=True
  )
  for k, name in enumerate(names.tolist()):
    patients = {cohort.cases[i] for i in np.flatnonzero(index == k)}
    if len(patients) < config.data.folds:
      raise ValueError(
        f'class {name!r} has {len(patients)} patients, fewer than '
        f'data.folds={config.data.folds}: a fold would be tested without it. '
        'Lower data.folds, or look whether data.label_column is the right one'
      )


def _with_zero_times(cohort: slides.Cohort) -> slides.Cohort:
  """Cohort with the finding that some were never followed up."""
  zero = np.flatnonzero(cohort.values['time'] == 0).tolist()
  if not zero:
    return cohort
  names = ', '.join(cohort.names[i] for i in zero[:5])
  text = (
    f'{len(zero)} of {len(cohort.names)} bags have a follow-up time of zero: '
    f'{names}{", ..." if len(zero) > 5 else ""}'
  )
  return cohort._replace(findings=(*cohort.findings, text))


def _given_splits(config, cohort) -> tuple[tuple[Fold, ...], tuple[str, ...]]:
  folds, findings = [], []
  with config_field('data.splits'):
    for split in slides.read_splits(config.data.splits):
      parts, found = slides.apply_split(cohort, split)
      findings += found
      none = np.zeros(0, np.int64)
      val, test = parts.get('val', none), parts.get('test', none)
      if not len(test):
        # MCAT and SurvPath call what they report val.
        val, test = none, val
      folds.append(Fold(split.name, parts['train'], val, test))
  return tuple(folds), tuple(dict.fromkeys(findings))


def _announce(config, study: Study) -> None:
  """One paragraph that tells a user whether this is what they meant."""
  cohort = study.cohort
  lengths = study.lengths(range(len(cohort.names)))
  lines = [
    f'{len(cohort.names)} bags of {len(set(cohort.cases))} patients, '
    f'{int(np.median(lengths))} patches each (median; {lengths.min()} to '
    f'{lengths.max()}), {study.dim} features'
  ]
  if config.task == 'subtype':
    names, counts = np.unique(
      cohort.values['label'].astype(str), return_counts=True
    )
    listed = zip(names[:12], counts, strict=False)
    lines.append('labels: ' + ', '.join(f'{n} {c}' for n, c in listed))
  elif config.task == 'expression':
    lines.append(f'{len(cohort.target_names)} targets')
  else:
    event, time = cohort.values['event'], cohort.values['time']
    lines.append(
      f'{event.sum()} of {len(event)} with the event, the others censored; '
      f'times {time.min():g} to {time.max():g}. If that is the wrong way '
      'round, see data.event_column'
    )
    if not event.any():
      raise ValueError(
        'data.event_column: all patients are censored, so there is nothing to '
        'learn; a column whose name says "censor" means 1 = censored'
      )
  lines.append(f'{len(study.folds)} models: ' + ', '.join(
    f'{f.name} {len(f.train)} + {len(f.test)}' for f in study.folds[:10]
  ) + ' bags (train + test)')  # fmt: skip
  for line in lines:
    logging.info('%s', line)
  warn(study.findings[len(cohort.findings) :])


def _synthetic(config, workdir: Path | None) -> tuple[str, str]:
  """Two slides per patient; those of every second patient hold a tumour.

  They are there to see that everything runs, not to compare models.
  """
  root = Path(tempfile.mkdtemp()) if workdir is None else workdir / 'synthetic'
  folder, labels = root / 'features', root / 'labels.csv'
  folder.mkdir(parents=True, exist_ok=True)
  rng = np.random.default_rng(config.seed)
  rows = []
  for i in range(config.data.synthetic):
    kind, path = i % 2, folder / f'slide_{i}.npz'
    height, width = 5 + i % 3, 6
    row, column = np.divmod(np.arange(height * width), width)
    features = rng.normal(size=(height * width, 8)).astype(np.float32)
    # A patch of tumour in the slides of the second kind.
    features[(row < 2) & (column < 3), 0] += 3 * kind
    rows.append({
      'case_id': f'patient_{i // 4}{"ab"[kind]}', 'slide_id': f'slide_{i}',
      'label': ('normal', 'tumour')[kind], 'G1': kind + 0.1 * (i // 4),
      'G2': i // 4 - kind, 'survival_months': 20 - 9 * kind + i // 4,
      'censorship': int(i // 4 == 1),
    })  # fmt: skip
    if not path.exists():
      np.savez(
        path,
        features=features,
        coords=np.stack([column, row], 1) * 256,
        pitch=256,
      )
  with labels.open('w', newline='') as file:
    writer = csv.DictWriter(file, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
  return str(folder), str(labels)

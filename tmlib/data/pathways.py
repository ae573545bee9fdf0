"""Patients with bulk expression: pathways as instances, shared genes as edges.

Axes: n patients, G genes, N pathways, F folds, q components, K slots.

Reads the folder layout of the public SurvPath tables: `tcga_<study>.csv`
(follow-up; censorship = 1 means censored), `<study>_rna_clean.csv`,
`<signatures>_signatures.csv` (a column of genes per pathway) and
`splits_<study>/` (published folds).
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.data.folds import stratified_folds
from tmlib.data.slides.splits import read_splits
from tmlib.data.slides.table import EMPTY, Table, TableError, read_table
from tmlib.data.slides.tables import read_survival
from tmlib.ops.graph import ell_from_edges

__all__ = [
  'PathwayCohort',
  'pathway_components',
  'pathway_graph',
  'planted_pathways',
  'read_pathway_cohort',
]

_ENDPOINTS = {'os': '', 'dss': '_dss', 'pfi': '_pfi'}


class PathwayCohort(NamedTuple):
  """A cohort whose bags are patients and whose instances are pathways.

  Attributes:
    cases: n patients.
    genes: G names.
    expression: [n, G] float64, as the table has it (log scale).
    time: [n] float64.
    event: [n] bool.
    pathways: N names.
    membership: [N, G] bool.
    test: [F, n] bool, the patients that a fold tests.
    train: [F, n] bool, the patients that it trains on.
    missing: patients of the splits that have no expression.
  """

  cases: tuple[str, ...]
  genes: tuple[str, ...]
  expression: np.ndarray
  time: np.ndarray
  event: np.ndarray
  pathways: tuple[str, ...]
  membership: np.ndarray
  test: np.ndarray
  train: np.ndarray
  missing: tuple[str, ...] = ()


def read_pathway_cohort(
  folder: str | Path,
  study: str = 'stad',
  *,
  signatures: str = 'hallmarks',
  endpoint: str = 'os',
  smallest: int = 2,
) -> PathwayCohort:
  """Reads one study of a SurvPath folder.

  Args:
    folder: see the module.
    study: as in the file names.
    signatures: 'hallmarks', 'xena' or 'combine', as in the file name.
    endpoint: 'os', 'dss' or 'pfi'.
    smallest: pathways with fewer measured genes are left out, >= 1.

  Returns:
    The patients that a split names and whose expression is known, in the order
    of the follow-up table. A fold tests what its split calls test, or val where
    it has no test.

  Raises:
    FileNotFoundError: no such folder or file; says what should be there.
    ValueError: an unknown endpoint; TableError, a ValueError, for a table that
      cannot be used: it names the file.
  """
  if endpoint not in _ENDPOINTS:
    raise ValueError(
      f'endpoint={endpoint!r} must be one of {", ".join(_ENDPOINTS)}'
    )
  folder = Path(folder)
  paths = [
    folder / f'tcga_{study}.csv',
    folder / f'{study}_rna_clean.csv',
    folder / f'{signatures}_signatures.csv',
    folder / f'splits_{study}',
  ]
  _check_files(folder, paths)
  follow_up = read_survival(
    paths[0],
    time_column=f'survival_months{_ENDPOINTS[endpoint]}',
    incomplete='skip',
  )
  genes, rows = _expression(read_table(paths[1]))
  pathways, membership = _signatures(read_table(paths[2]), genes, smallest)
  splits = read_splits(paths[3])
  wanted = {case for s in splits for case in s.train + s.val + s.test}
  # A patient with several slides has a row for each, with one follow-up.
  first = dict(reversed([*zip(follow_up.cases, range(10**9), strict=False)]))
  known = [c for c in dict.fromkeys(follow_up.cases) if c in wanted]
  cases = tuple(c for c in known if c in rows)
  if len(cases) < 2:
    raise TableError(
      f'{folder}: {len(cases)} patients are in the follow-up table, the splits '
      'and the expression table; are they of one study?'
    )
  index = [first[c] for c in cases]
  part = lambda chosen: np.array([c in chosen for c in cases])
  test = np.stack([part({*(s.test or s.val)}) for s in splits])
  train = np.stack([part({*s.train}) for s in splits])
  for split, rows_of in zip(splits, test, strict=True):
    if not rows_of.any():
      raise TableError(f'{paths[3]}: {split.name} tests no patient of {study}')
  return PathwayCohort(
    cases,
    genes,
    np.stack([rows[c] for c in cases]),
    follow_up.values['time'][index],
    follow_up.values['event'][index],
    pathways,
    membership,
    test,
    train,
    tuple(sorted(wanted - {*cases})),
  )


def _check_files(folder: Path, paths: list[Path]) -> None:
  if not folder.is_dir():
    raise FileNotFoundError(
      f'no folder {folder}; it should hold '
      f'{", ".join(p.name for p in paths)} (mahmoodlab/SurvPath: datasets_csv, '
      'splits)'
    )
  missing = [p.name for p in paths if not p.exists()]
  if missing:
    raise FileNotFoundError(
      f'{folder} has no {" and no ".join(missing)}; the tables and splits are '
      'those of mahmoodlab/SurvPath (datasets_csv, splits)'
    )


def _expression(table: Table) -> tuple[tuple[str, ...], dict[str, np.ndarray]]:
  """Genes, and the row of each case; of repeated cases the first."""
  names = list(table.columns)
  body = [table.columns[name] for name in names[1:]]
  try:
    values = np.array(body, np.float64).T
  except ValueError:
    values = np.full((1, 1), np.nan)
  if not np.isfinite(values).all():
    for name, texts in zip(names[1:], body, strict=True):
      for row, text in enumerate(texts):
        if text.lower() in EMPTY or not _finite(text):
          raise TableError(
            f'{table.where(row)}: {name} = {text!r} is no finite number'
          )
  found: dict[str, np.ndarray] = {}
  for case, row in zip(table.columns[names[0]], values, strict=True):
    found.setdefault(case, row)
  return tuple(names[1:]), found


def _finite(text: str) -> bool:
  try:
    return bool(np.isfinite(float(text)))
  except ValueError:
    return False


def _signatures(table: Table, genes: tuple[str, ...], smallest: int):
  """Names and [N, G] membership of the pathways that are measured."""
  place = {gene: i for i, gene in enumerate(genes)}
  names, rows = [], []
  for name, texts in table.columns.items():
    chosen = sorted({place[gene] for gene in texts if gene in place})
    if name and len(chosen) >= smallest:
      row = np.zeros(len(genes), bool)
      row[chosen] = True
      names.append(name)
      rows.append(row)
  if not names:
    raise TableError(
      f'{table.path}: no pathway has {smallest} genes of the expression table; '
      'are both named by gene symbols?'
    )
  return tuple(names), np.stack(rows)


def pathway_graph(membership: np.ndarray, k: int) -> PatchGraph:
  """Joins pathways that share genes.

  Of the pathways that it shares a gene with, each chooses the k with the
  largest Jaccard index (shared genes over all genes of the two); an edge needs
  both ends, so no degree exceeds k.

  Args:
    membership: [N, G] bool.
    k: at least 1.

  Returns:
    The graph, NumPy; a pathway that shares no gene stays isolated.

  Raises:
    ValueError: k < 1.
  """
  if k < 1:
    raise ValueError(f'k must be >= 1, got {k}')
  member = np.asarray(membership, np.float64)
  size = member.sum(1)
  shared = member @ member.T
  jaccard = shared / np.maximum(size[:, None] + size - shared, 1)
  np.fill_diagonal(jaccard, 0)
  order = np.argsort(-jaccard, 1, kind='stable')[:, :k]
  chosen = np.zeros(jaccard.shape, bool)
  np.put_along_axis(chosen, order, True, 1)
  edges = np.argwhere(chosen & chosen.T & (jaccard > 0))
  return ell_from_edges(edges.reshape(-1, 2), len(member), k)


def pathway_components(
  expression: np.ndarray,
  membership: np.ndarray,
  train: np.ndarray,
  components: int,
) -> np.ndarray:
  """First principal components of the genes of each pathway.

  Genes are standardised, components found and scaled to unit variance on the
  training patients alone; the others are projected.

  Args:
    expression: [n, G].
    membership: [N, G] bool.
    train: [n] bool.
    components: q, at least 1. A pathway with fewer genes has zeros beyond.

  Returns:
    [n, N, q] float32. Signs are such that the loadings of a component sum to
    at least zero.

  Raises:
    ValueError: q < 1, or fewer than two training patients.
  """
  if components < 1:
    raise ValueError(f'components must be >= 1, got {components}')
  train = np.asarray(train, bool)
  if train.sum() < 2:
    raise ValueError(f'components need two patients, got {train.sum()}')
  x = np.asarray(expression, np.float64)
  spread = x[train].std(0)
  x = (x - x[train].mean(0)) / np.where(spread > 1e-9, spread, 1)
  found = np.zeros((len(x), len(membership), components), np.float32)
  for i, genes in enumerate(np.asarray(membership, bool)):
    _, scale, loading = np.linalg.svd(x[train][:, genes], full_matrices=False)
    count = min(components, int((scale > 1e-6 * max(scale.max(), 1)).sum()))
    loading = loading[:count]
    loading *= np.where(loading.sum(1) < 0, -1, 1)[:, None]
    score = x[:, genes] @ loading.T
    found[:, i, :count] = score / np.maximum(score[train].std(0), 1e-9)
  return found


def planted_pathways(
  patients: int, folds: int = 2, seed: int = 0
) -> PathwayCohort:
  """A small simulated cohort, in which two of eight pathways carry the risk.

  Args:
    patients: n, at least 4 * folds.
    folds: F >= 2.
    seed: of everything random.

  Returns:
    A cohort with exponential times, hazard exp(s_0 - s_1) for the activities s
    of pathways 0 and 1, and independent censoring.

  Raises:
    ValueError: too few patients.
  """
  if folds < 2 or patients < 4 * folds:
    raise ValueError(
      f'{patients} patients for {folds} folds; at least 2 folds of 4 each'
    )
  rng = np.random.default_rng(seed)
  names = tuple(f'pathway {i}' for i in range(8))
  # Six genes each; a pathway shares two of them with the next.
  membership = np.zeros((8, 34), bool)
  for i in range(8):
    membership[i, 4 * i : 4 * i + 6] = True
  activity = rng.normal(size=(patients, 8))
  expression = activity @ membership + rng.normal(size=(patients, 34))
  death = rng.exponential(20 * np.exp(activity[:, 1] - activity[:, 0]))
  censoring = rng.exponential(40, patients)
  event = death <= censoring
  fold = stratified_folds(event, folds, seed)
  test = fold == np.arange(folds)[:, None]
  return PathwayCohort(
    tuple(f'patient {i}' for i in range(patients)),
    tuple(f'gene {i}' for i in range(34)),
    expression,
    np.minimum(death, censoring),
    event,
    names,
    membership,
    test,
    ~test,
  )

"""Does tumour touch immune tissue? Windows of sections, told by marker genes.

A spot is immune, or tumour, if its marker genes are among the highest of its
section. Windows that hold both kinds are matched: of one section, with equal
numbers of immune and of tumour spots, once touching and once apart; composition
then tells nothing. No model sees the marker genes.

Axes: s sections, n spots of a section, W windows, N spots of a window, G genes,
P features, F folds, Q signature genes, M concepts.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy.optimize import linear_sum_assignment

from tmlib.config import config_field
from tmlib.data import SpotSection
from tmlib.mil import log_normalize, variable_genes

__all__ = [
  'IMMUNE', 'OTHER', 'SIGNATURES', 'TUMOUR', 'Window', 'components',
  'concept_rows', 'find_windows', 'match_windows', 'patient_of',
  'signature_table', 'spot_kinds',
]  # fmt: skip

OTHER, IMMUNE, TUMOUR = range(3)

# Genes that mark kinds of tissue, rows of the concept matrix. None of them is a
# marker that tells a spot's kind here.
SIGNATURES = {
  'T cells': ('TRAC', 'TRBC2', 'CD7', 'IL7R', 'CCL5', 'LTB'),
  'B cells': ('IGHG1', 'IGHG3', 'IGHM', 'IGLC2', 'MZB1', 'CD74'),
  'macrophages': ('CD68', 'CD14', 'LYZ', 'C1QA', 'C1QB', 'FCER1G'),
  'epithelium': ('MUC1', 'CDH1', 'CLDN4', 'KRT23', 'GRB7', 'ELF3'),
  'fibroblasts': ('COL1A1', 'COL1A2', 'COL3A1', 'DCN', 'LUM', 'FN1'),
  'adipose': ('ADIPOQ', 'PLIN1', 'FABP4', 'PLIN4', 'LPL', 'G0S2'),
  'endothelium': ('PECAM1', 'VWF', 'CDH5', 'AQP1', 'CLDN5', 'ENG'),
  'muscle': ('ACTA2', 'MYH11', 'TAGLN', 'MYL9', 'TPM2', 'CNN1'),
}


class Window(NamedTuple):
  """A square of spots that holds both kinds.

  Attributes:
    section: index of its section.
    corner: (x, y) of its lower corner.
    spots: [N] indices into the section.
    counts: (immune, tumour) spots.
    touch: whether a spot of one kind borders on one of the other.
  """

  section: int
  corner: tuple[int, int]
  spots: np.ndarray
  counts: tuple[int, int]
  touch: bool


def patient_of(section: str) -> str:
  """'C' of section 'C3', as in her2st; another name stands for itself."""
  return section[0] if re.fullmatch(r'[A-Z]\d+', section) else section


def _columns(section: SpotSection, wanted: Sequence[str]) -> list[int]:
  place = {gene: i for i, gene in enumerate(section.genes)}
  return [place[gene] for gene in wanted if gene in place]


def _standard(table: np.ndarray) -> np.ndarray:
  """Columns of mean zero and deviation one; constant ones are zero."""
  spread = table.std(0)
  return (table - table.mean(0)) / np.where(spread > 1e-9, spread, 1)


def spot_kinds(section: SpotSection, contact) -> np.ndarray:
  """[n] OTHER, IMMUNE or TUMOUR by the marker genes that the section has.

  The mean of standardised log expressions; the highest share of the section is
  immune, and of what remains the highest spots are tumour.

  Args:
    section: with counts.
    contact: config with immune, tumour, immune_share and tumour_share.

  Raises:
    ValueError: no marker is measured, or a share out of range.
  """
  logs = log_normalize(section.counts)
  kinds = np.full(len(logs), OTHER)
  for kind, name in ((IMMUNE, 'immune'), (TUMOUR, 'tumour')):
    share = contact[f'{name}_share']
    if not 0 < share < 0.5:
      raise ValueError(f'contact.{name}_share={share} must be in (0, 0.5)')
    columns = _columns(section, contact[name])
    if not columns:
      raise ValueError(
        f'contact.{name}: section {section.name} measures none of '
        f'{", ".join(contact[name]) or "no genes"}'
      )
    score = _standard(logs[:, columns]).mean(1)
    score = np.where(kinds == OTHER, score, -np.inf)
    highest = np.argsort(-score, kind='stable')[: round(share * len(score))]
    kinds[highest] = kind
  return kinds


def find_windows(
  grid: np.ndarray,
  kinds: np.ndarray,
  size: int,
  *,
  pair: tuple = (IMMUNE, TUMOUR),
  corners: bool = False,
  section: int = 0,
) -> list[Window]:
  """Windows that hold both kinds, at least two thirds filled.

  Args:
    grid: [n, 2] int.
    kinds: [n].
    size: spots per side.
    pair: two values of `kinds`.
    corners: whether spots that share only a corner touch.
    section: index to write into the windows.
  """
  found = []
  low, high = grid.min(0), grid.max(0)
  for x in range(low[0], high[0] - size + 2):
    for y in range(low[1], high[1] - size + 2):
      at = ((grid >= (x, y)) & (grid < (x + size, y + size))).all(1)
      one, two = (grid[at & (kinds == kind)] for kind in pair)
      if at.sum() * 3 < 2 * size * size or not len(one) or not len(two):
        continue
      gap = np.abs(one[:, None] - two)
      gap = (gap.max(-1) if corners else gap.sum(-1)).min()
      found.append(
        Window(
          section, (int(x), int(y)), np.flatnonzero(at), (len(one), len(two)),
          bool(gap <= 1),
        )
      )  # fmt: skip
  return found


def match_windows(windows: Sequence[Window], seed: int) -> list[Window]:
  """As many touching as separate windows of each section and composition.

  Of more candidates those are taken whose numbers of spots differ least.

  Args:
    windows: of any sections.
    seed: of the choice where more windows of one answer are equally near.

  Returns:
    Matched windows in the order given; both labels have the same compositions.
  """
  rng = np.random.default_rng(seed)
  strata: dict[tuple, tuple[list[int], list[int]]] = {}
  for i, window in enumerate(windows):
    key = (window.section, *window.counts)
    strata.setdefault(key, ([], []))[window.touch].append(i)
  kept: list[int] = []
  for apart, touch in strata.values():
    sizes = [[len(windows[i].spots) for i in m] for m in (apart, touch)]
    # Ties are broken by chance, which all together is less than one spot.
    noise = 0.5 / max(min(len(apart), len(touch)), 1)
    cost = np.abs(np.subtract.outer(*sizes)) + noise * rng.random(
      (len(apart), len(touch))
    )
    for members, chosen in zip(
      (apart, touch), linear_sum_assignment(cost), strict=True
    ):
      kept += [members[i] for i in chosen]
  return [windows[i] for i in sorted(kept)]


def _unmarked(sections: Sequence[SpotSection], contact):
  """Shared genes that mark no kind, and log expressions of these alone.

  Markers go before counts are scaled: the sum of a spot's counts would tell.
  """
  marked = {*contact.immune, *contact.tumour}
  shared = set(sections[0].genes).intersection(*(s.genes for s in sections))
  genes = [g for g in sections[0].genes if g in shared and g not in marked]
  logs = [log_normalize(s.counts[:, _columns(s, genes)]) for s in sections]
  return genes, logs


def components(
  sections: Sequence[SpotSection], patients: Sequence[str], contact
) -> dict[str, list[np.ndarray]]:
  """Principal components of the expression of unmarked genes, per fold.

  Variable genes and axes are those of the other patients; every gene is
  standardised within its section, which needs no label.

  Args:
    sections: s of them.
    patients: s names.
    contact: config with immune, tumour, genes and components.

  Returns:
    {tested patient: s arrays [n, P]}, of one scale for all components.
  """
  _, logs = _unmarked(sections, contact)
  found = {}
  for patient in dict.fromkeys(patients):
    rest = [i for i, other in enumerate(patients) if other != patient]
    with config_field('contact.genes'):
      seen = np.concatenate([logs[i] for i in rest])
      chosen = variable_genes(seen, min(contact.genes, seen.shape[1]))
    tables = [_standard(x[:, chosen]) for x in logs]
    axes = np.linalg.svd(
      np.concatenate([tables[i] for i in rest]), full_matrices=False
    )[2][: contact.components]
    scale = np.concatenate([tables[i] @ axes[0] for i in rest]).std()
    found[patient] = [x @ axes.T / scale for x in tables]
  return found


def signature_table(
  sections: Sequence[SpotSection], contact
) -> tuple[tuple[str, ...], list[np.ndarray]]:
  """Genes of `SIGNATURES` that all sections have, and their expression.

  Returns:
    Q names, and s arrays [n, Q], standardised within each section.
  """
  genes, logs = _unmarked(sections, contact)
  place = {gene: i for i, gene in enumerate(genes)}
  wanted = [g for group in SIGNATURES.values() for g in group if g in place]
  columns = [place[g] for g in wanted]
  return tuple(wanted), [_standard(x[:, columns]) for x in logs]


def concept_rows(genes: Sequence[str], rows: str, seed: int) -> np.ndarray:
  """Unit rows [M, Q]: signatures, or what must do worse than they.

  Args:
    genes: Q names.
    rows: 'given': one row per signature; 'shuffled': their columns permuted
      alike, which keeps lengths and angles and loses what they mean; 'random':
      as many genes as each signature has, drawn at random with repetition
      across rows.
    seed: of what is random.
  """
  matrix = np.array(
    [[g in group for g in genes] for group in SIGNATURES.values()], np.float32
  )
  matrix = matrix[matrix.any(1)]
  rng = np.random.default_rng(seed)
  if rows == 'shuffled':
    matrix = matrix[:, rng.permutation(len(genes))]
  elif rows == 'random':
    matrix = np.stack([rng.permutation(row) for row in matrix])
  elif rows != 'given':
    raise ValueError(f'rows={rows!r} must be given, shuffled or random')
  return matrix / np.linalg.norm(matrix, axis=1, keepdims=True)

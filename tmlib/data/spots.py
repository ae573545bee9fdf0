"""Spatial transcriptomics: spots with counts, positions, image and labels.

Axes: n spots, G genes, P features of a patch of the image.

Reads the folder layout of the public her2st data: `<section>.tsv.gz` (counts,
a row per spot named XxY), `<section>_selection.tsv` (positions on the grid and
in pixels), and, where they exist, `<section>.jpg` (the stained image) and
`<section>_labeled_coordinates.tsv` (a pathologist's labels).
"""

import gzip
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib.data.slides.table import TableError, read_table

__all__ = [
  'PATCH_FEATURES',
  'SpotSection',
  'planted_spots',
  'read_spots',
  'stain_features',
]

# What `stain_features` computes, in this order.
PATCH_FEATURES = (
  'red mean', 'green mean', 'blue mean', 'red std', 'green std', 'blue std',
  'saturation', 'haematoxylin mean', 'haematoxylin std', 'eosin mean',
  'eosin std', 'luminance 5 %', 'luminance 95 %', 'gradient mean',
  'gradient std', 'roughness', 'dark share',
)  # fmt: skip

# Optical density of haematoxylin and eosin in red, green and blue.
_STAINS = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105]])


class SpotSection(NamedTuple):
  """One section of tissue.

  Attributes:
    name: of the section.
    grid: [n, 2] int64, column x and row y of each spot.
    genes: G names.
    counts: [n, G] float32.
    features: [n, P] float32 of the image around each spot, or None.
    labels: n tissue labels, '' where a spot has none, or None.
    dropped: spots that one of the files lacks.
  """

  name: str
  grid: np.ndarray
  genes: tuple[str, ...]
  counts: np.ndarray
  features: np.ndarray | None = None
  labels: np.ndarray | None = None
  dropped: tuple[str, ...] = ()


def read_spots(
  folder: str | Path,
  section: str,
  *,
  image: bool = False,
  labels: bool = False,
  patch: int = 256,
) -> SpotSection:
  """Reads one section; spots are those that all its files have.

  Args:
    folder: see the module.
    section: as in the file names, such as 'A1'.
    image: whether to compute `stain_features` of the image.
    labels: whether to read the pathologist's labels; their fractional
      coordinates are rounded to the grid.
    patch: side of a patch of the image, pixels.

  Returns:
    The section, spots in the order of the table of counts.

  Raises:
    FileNotFoundError: no such folder or file; says which are needed.
    TableError: a file that cannot be read as what it should be; names it.
    ModuleNotFoundError: an image, but no pillow.
  """
  folder = Path(folder)
  wanted = [f'{section}.tsv.gz', f'{section}_selection.tsv']
  wanted += [f'{section}.jpg'] * image
  wanted += [f'{section}_labeled_coordinates.tsv'] * labels
  missing = [name for name in wanted if not (folder / name).is_file()]
  if missing:
    there = 'has no' if folder.is_dir() else 'is no folder; it should hold'
    raise FileNotFoundError(
      f'{folder} {there} {", ".join(missing)} (almaan/her2st: data/ST-cnts, '
      'ST-spotfiles, ST-imgs, ST-pat)'
    )
  names, genes, counts = _counts(folder / wanted[0])
  place = _places(folder / wanted[1], 'x', 'y')
  pixels = _places(folder / wanted[1], 'pixel_x', 'pixel_y')
  told: dict[str, str] = {}
  if labels:
    table = read_table(folder / wanted[-1])
    spots = _places(folder / wanted[-1], 'x', 'y')
    _need(table, ('label',))
    told = dict(zip(spots, table.columns['label'], strict=True))
  kept = [i for i, name in enumerate(names) if name in place]
  if not kept:
    raise TableError(
      f'{folder}: no spot is in both {wanted[0]} and {wanted[1]}; are they of '
      'one section?'
    )
  used = [names[i] for i in kept]
  features = None
  if image:
    centres = np.array([pixels[name] for name in used])
    features = stain_features(folder / f'{section}.jpg', centres, patch)
  return SpotSection(
    section,
    np.array([place[name] for name in used]).round().astype(np.int64),
    genes,
    counts[kept],
    features,
    np.array([told.get(name, '') for name in used]) if labels else None,
    tuple(sorted({*place} ^ {*names})),
  )


def _counts(path: Path) -> tuple[list[str], tuple[str, ...], np.ndarray]:
  """Spot names, genes and counts; wide, so not by way of text columns."""
  try:
    with gzip.open(path, 'rt', encoding='utf-8') as file:
      header, *lines = file.read().splitlines()
  except (OSError, EOFError, zlib.error, UnicodeDecodeError, ValueError) as e:
    raise TableError(f'{path}: no gzipped table of counts: {e}') from e
  genes = tuple(header.split('\t')[1:])
  names, rows = [], []
  for number, line in enumerate(lines, 2):
    name, *values = line.split('\t')
    try:
      row = np.array(values, np.float32)
    except ValueError as error:
      raise TableError(f'{path}, line {number}: {error}') from None
    if len(row) != len(genes):
      raise TableError(
        f'{path}, line {number}: {len(row)} counts for {len(genes)} genes'
      )
    if not (np.isfinite(row).all() and (row >= 0).all()):
      raise TableError(
        f'{path}, line {number}: a count is negative or not finite'
      )
    names.append(name)
    rows.append(row)
  if not rows or not genes:
    raise TableError(f'{path}: holds no spot or no gene')
  return names, genes, np.stack(rows)


def _need(table: Any, columns: Sequence[str]) -> None:
  lacks = [name for name in columns if name not in table.columns]
  if lacks:
    raise TableError(
      f'{table.path}: no column {lacks[0]}; it has '
      f'{", ".join(list(table.columns)[:8])}'
    )


def _places(path: Path, x: str, y: str) -> dict[str, tuple[float, float]]:
  """{XxY: two columns}, XxY being the rounded position on the grid."""
  table = read_table(path)
  _need(table, ('x', 'y', x, y))
  found = {}
  for row in range(len(table.lines)):
    try:
      at, value = (
        tuple(float(table.columns[key][row]) for key in pair)
        for pair in (('x', 'y'), (x, y))
      )
      name = 'x'.join(str(round(v)) for v in at)
    except (ValueError, OverflowError):
      raise TableError(
        f'{table.where(row)}: {x} or {y} is no finite number'
      ) from None
    if name in found:
      raise TableError(f'{table.where(row)}: spot {name} appears twice')
    found[name] = value
  return found


def stain_features(
  path: str | Path, centres: np.ndarray, patch: int = 256
) -> np.ndarray:
  """Colour and texture of square patches of an H&E image.

  See `PATCH_FEATURES`. The image is decoded at half its resolution. Stains are
  the least-squares densities of fixed haematoxylin and eosin vectors;
  roughness is the mean absolute Laplacian, and the dark share counts pixels
  with a haematoxylin density above 0.5.

  Args:
    path: of the image.
    centres: [n, 2], x and y in pixels.
    patch: side in pixels, at least 8; a patch is cut off at the image's edge.

  Returns:
    [n, 17] float32.

  Raises:
    ModuleNotFoundError: no pillow.
    TableError: no image, or a centre outside of it.
    ValueError: a patch too small.

  References:
    Ruifrok, Johnston. Quantification of histochemical staining by color
    deconvolution, 2001. The choice of features is ours.
  """
  if patch < 8:
    raise ValueError(f'patch={patch} must be at least 8 pixels')
  try:
    from PIL import Image
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      'images are read by pillow: pip install pillow'
    ) from error
  with warnings.catch_warnings():
    # Slides are large: that is no attack.
    warnings.simplefilter('ignore', Image.DecompressionBombWarning)
    try:
      with Image.open(path) as image:
        width, height = image.size
        image.draft('RGB', (width // 2, height // 2))
        pixels = np.asarray(image.convert('RGB'))
    except (OSError, SyntaxError) as error:
      raise TableError(f'{path}: no image: {error}') from error
  scale = pixels.shape[1] / width
  found = []
  for x, y in np.asarray(centres, float):
    if not (0 <= x < width and 0 <= y < height):
      raise TableError(
        f'{path}: spot at pixel ({x:.0f}, {y:.0f}) lies outside of the image '
        f'({width} x {height}); is it of another section or resolution?'
      )
    left, right, top, bottom = (
      int(max(0, (c + side * patch / 2) * scale))
      for c in (x, y)
      for side in (-1, 1)
    )
    found.append(_described(pixels[top : bottom + 1, left : right + 1]))
  return np.stack(found).astype(np.float32)


def _described(pixels: np.ndarray) -> np.ndarray:
  """[17] of a patch [h, w, 3] uint8."""
  rgb = pixels / 255
  flat = rgb.reshape(-1, 3)
  density = -np.log10(np.maximum(flat, 1 / 255))
  stains = density @ np.linalg.pinv(_STAINS)
  top, low = flat.max(1), flat.min(1)
  light = rgb @ np.array([0.299, 0.587, 0.114])
  down, across = np.diff(light, axis=0), np.diff(light, axis=1)
  slope = np.hypot(down[:, 1:], across[1:])
  bend = np.abs(np.diff(light, 2, 0)[:, 1:-1] + np.diff(light, 2, 1)[1:-1])
  spread = np.stack([stains.mean(0), stains.std(0)], 1).ravel()
  return np.concatenate([
    flat.mean(0), flat.std(0), [np.mean((top - low) / np.maximum(top, 1e-3))],
    spread, np.quantile(light, [0.05, 0.95]), [slope.mean(), slope.std()],
    [bend.mean(), np.mean(stains[:, 0] > 0.5)],
  ])  # fmt: skip


def planted_spots(
  sections: int, size: int = 8, genes: int = 24, seed: int = 0
) -> list[SpotSection]:
  """Simulated sections: three bands of tissue, each with genes of its own.

  Args:
    sections: at least 1.
    size: spots per side, at least 4.
    genes: G, at least 3.
    seed: of everything random.

  Returns:
    Sections with counts, six features that tell the tissue through noise, and
    labels.
  """
  rng = np.random.default_rng(seed)
  profile = rng.gamma(1.0, 2.0, (3, genes))
  look = rng.normal(size=(3, 6))
  y, x = np.divmod(np.arange(size * size), size)
  found = []
  for number in range(sections):
    wave = np.sin(x / size * 3 + rng.uniform(0, 6))
    kind = np.clip((3 * (y + wave) / size).astype(int), 0, 2)
    found.append(
      SpotSection(
        f'section {number}',
        np.stack([x, y], 1),
        tuple(f'gene {i}' for i in range(genes)),
        rng.poisson(10 * profile[kind]).astype(np.float32),
        (look[kind] + rng.normal(size=(size * size, 6))).astype(np.float32),
        np.array(['tumour', 'stroma', 'immune'])[kind],
      )
    )
  return found

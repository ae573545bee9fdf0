"""Reads bags when they are asked for, with their graphs.

Axes: N patches, P features, B rows of a batch, K neighbour slots.
"""

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.data.bag import Bag
from tmlib.data.slides.arrays import load_slide
from tmlib.data.slides.slide import Slide, SlideFileError, encoders_of
from tmlib.ops.graph import graph_from_coords, knn_graph
from tmlib.ops.grid import fit_grid, morton_order

__all__ = ['GRAPHS', 'BagReader', 'sample_patches', 'stack_bags']

GRAPHS = ('none', 'grid', 'knn')
# Patches of a block that is kept or dropped together, about 8 x 8 of tissue.
_BLOCK = 64


class BagReader:
  """Bags on disk; `read(i)` opens the files of bag i and builds its graph.

  A bag of several slides is their concatenation; no edge joins two slides, and
  their grid positions are set apart.

  Attributes:
    dim: P.
  """

  def __init__(
    self,
    files: Sequence[Sequence[Path]],
    *,
    dim: int,
    graph: str = 'none',
    coords: bool = False,
    dtype: Any = np.float32,
    neighbours: int = 8,
    max_patches: int = 0,
    seed: int = 0,
  ):
    """Nothing is read yet.

    Args:
      files: feature files of each bag.
      dim: P, the same in all of them.
      graph: 'none', 'grid' (patches that touch) or 'knn' (patches that look
        alike: not a graph of tissue).
      coords: whether bags carry the positions of their patches on the grid.
      dtype: of the features; float16 halves what goes to the device.
      neighbours: K of 'knn'; a grid has 8.
      max_patches: at most so many patches are drawn for training; 0 is all.
      seed: of the drawing.

    Raises:
      ValueError: another graph, or a negative number.
    """
    if graph not in GRAPHS:
      raise ValueError(f'graph={graph!r} must be one of {", ".join(GRAPHS)}')
    if max_patches < 0 or neighbours < 1:
      raise ValueError(
        f'max_patches={max_patches} must be at least 0 and '
        f'neighbours={neighbours} at least 1'
      )
    self.dim = dim
    self._files, self._graph, self._coords = files, graph, coords
    self._dtype, self._neighbours = np.dtype(dtype), neighbours
    self._max, self._seed = max_patches, seed

  def __len__(self) -> int:
    return len(self._files)

  def slides(self, index: int) -> list[Slide]:
    """The slides of one bag, whole, as they are stored."""
    return [self._load(path) for path in self._files[index]]

  def read(self, index: int, draw: int | None = None) -> Bag:
    """One bag.

    Args:
      index: which.
      draw: number of the draw, from which the patches that are kept follow;
        None keeps all.

    Returns:
      Bag with leaves [N, ...], NumPy.

    Raises:
      SlideFileError: a file that changed since it was looked at.
    """
    slides = self.slides(index)
    if draw is not None and self._max:
      slides = self._drawn(slides, np.random.default_rng((self._seed, draw)))
    parts = [self._bag(slide) for slide in slides]
    return parts[0] if len(parts) == 1 else _joined(parts)

  def empty(self) -> Bag:
    """A bag without patches, to pad a batch with."""
    shape = lambda n: np.zeros((0, n), np.int32)
    width = self._neighbours if self._graph == 'knn' else 8
    graph = None
    if self._graph != 'none':
      graph = _table(shape(width), shape(width).astype(bool), shape(width))
    return Bag(
      np.zeros((0, self.dim), self._dtype),
      np.zeros(0, bool),
      graph,
      shape(2) if self._coords else None,
    )

  def _load(self, path: Path) -> Slide:
    slide = load_slide(path)
    n, dim = slide.features.shape
    if n and dim != self.dim:
      raise SlideFileError(
        f'{path}: features have dim {encoders_of(dim)} but the model was built '
        f'for {encoders_of(self.dim)}; use the files of one encoder'
      )
    features = slide.features
    if features.dtype != self._dtype:
      with np.errstate(over='ignore'):
        features = features.astype(self._dtype)
    bad = ~np.isfinite(features).all(1)
    if bad.any():
      raise SlideFileError(
        f'{path}: NaN or infinite features in {bad.sum()} of {n} patches; '
        'extract them again'
      )
    return slide._replace(features=features.reshape(n, self.dim))

  def _drawn(
    self, slides: list[Slide], rng: np.random.Generator
  ) -> list[Slide]:
    """At most `max_patches` in all, each slide by its share."""
    sizes = np.array([len(s.features) for s in slides])
    if sizes.sum() <= self._max:
      return slides
    share = np.floor(self._max * sizes / sizes.sum()).astype(int)
    share[: self._max - share.sum()] += 1
    share = np.minimum(share, sizes)
    kept = []
    for slide, n in zip(slides, share, strict=True):
      near = slide.coords if self._graph == 'grid' else None
      index = sample_patches(rng, len(slide.features), n, near, slide.pitch)
      kept.append(
        slide._replace(
          features=slide.features[index],
          coords=None if slide.coords is None else slide.coords[index],
        )
      )
    return kept

  def _bag(self, slide: Slide) -> Bag:
    n = len(slide.features)
    coords = None
    if self._coords and slide.coords is None and n:
      raise SlideFileError('a slide without positions among slides with them')
    if self._coords:
      coords = np.zeros((0, 2), np.int32)
      if n:
        # x, y pixels to row, column.
        points = np.asarray(slide.coords)[:, ::-1].astype(np.float64)
        coords = fit_grid(points, slide.pitch)[0]
    return Bag(slide.features, np.ones(n, bool), self._edges(slide), coords)

  def _edges(self, slide: Slide) -> PatchGraph | None:
    if self._graph == 'none':
      return None
    if not len(slide.features):
      return self.empty().graph
    if self._graph == 'knn':
      return knn_graph(slide.features, self._neighbours)
    with warnings.catch_warnings():
      # Said once, at start, for the whole cohort.
      warnings.simplefilter('ignore')
      return graph_from_coords(
        np.asarray(slide.coords)[:, ::-1],
        len(slide.features),
        slide.pitch,
        duplicates='first',
        k=8,
      )


def sample_patches(
  rng: np.random.Generator,
  num_patches: int,
  count: int,
  coords: np.ndarray | None = None,
  pitch: float | None = None,
) -> np.ndarray:
  """Draws patches without replacement.

  With positions, whole blocks of about 8 x 8 neighbouring patches are drawn
  (runs of a Z-order curve): most patches keep their neighbours, so that a graph
  is worth building, and all of the slide can still be drawn from.

  Args:
    rng: source of randomness.
    num_patches: N.
    count: patches wanted, at most N.
    coords: [N, 2], or None to draw patches one by one.
    pitch: of the grid, or None.

  Returns:
    [count] int64, increasing.
  """
  if coords is None:
    return np.sort(rng.choice(num_patches, count, replace=False))
  order = morton_order(fit_grid(coords.astype(np.float64), pitch)[0])
  order = np.roll(order, rng.integers(num_patches))
  blocks = np.arange(0, num_patches, _BLOCK)
  rng.shuffle(blocks)
  chosen = [order[at : at + _BLOCK] for at in blocks[: count // _BLOCK + 2]]
  return np.sort(np.concatenate(chosen)[:count])


def stack_bags(bags: Sequence[Bag], n: int) -> Bag:
  """Pads bags to n patches and stacks them, writing every number once.

  Args:
    bags: B bags with the same optional fields.
    n: rows of each, at least the largest bag.

  Returns:
    Bag with leaves [B, n, ...].

  Raises:
    ValueError: a bag larger than n.
  """
  largest = max(len(bag.mask) for bag in bags)
  if largest > n:
    raise ValueError(f'a bag of {largest} patches does not fit into n={n}')

  def stacked(parts: list[Any]) -> np.ndarray:
    out = np.zeros((len(parts), n, *parts[0].shape[1:]), parts[0].dtype)
    for row, part in zip(out, parts, strict=True):
      row[: len(part)] = part
    return out

  graph = None
  if bags[0].graph is not None:
    graphs: Any = [bag.graph for bag in bags]
    nbr = stacked([g.nbr for g in graphs])
    graph = _table(
      nbr,
      stacked([g.emask for g in graphs]),
      stacked([g.rev for g in graphs]),
    )
    for row, bag in zip(nbr, bags, strict=True):
      size = len(bag.mask)
      # A padded patch is its own, masked, neighbour.
      row[size:] = np.arange(size, n, dtype=row.dtype)[:, None]
  coords = None
  if bags[0].coords is not None:
    coords = stacked([bag.coords for bag in bags])
  return Bag(
    stacked([bag.features for bag in bags]),
    stacked([bag.mask for bag in bags]),
    graph,
    coords,
  )


def _joined(bags: Sequence[Bag]) -> Bag:
  """One bag of several slides: edges and positions are set apart."""
  sizes = [len(bag.mask) for bag in bags]
  starts = np.concatenate([[0], np.cumsum(sizes)[:-1]])
  graph = None
  if bags[0].graph is not None:
    graphs: Any = [bag.graph for bag in bags]
    nbr = [
      g.nbr + np.asarray(at, g.nbr.dtype)
      for g, at in zip(graphs, starts, strict=True)
    ]
    graph = _table(
      np.concatenate(nbr),
      np.concatenate([g.emask for g in graphs]),
      np.concatenate([g.rev for g in graphs]),
    )
  coords = None
  if bags[0].coords is not None:
    placed, below = [], 0
    for bag in bags:
      own = np.asarray(bag.coords)
      placed.append(own + np.array([below, 0], own.dtype))
      below += int(own[:, 0].max(initial=0)) + 2
    coords = np.concatenate(placed)
  return Bag(
    np.concatenate([bag.features for bag in bags]),
    np.concatenate([bag.mask for bag in bags]),
    graph,
    coords,
  )


def _table(nbr: Any, emask: Any, rev: Any) -> PatchGraph:
  """A graph in host memory."""
  return PatchGraph(nbr=nbr, emask=emask, rev=rev)

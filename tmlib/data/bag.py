"""Bags of instances: the container, padding, bucketing, stacking.

Axes: B bags, N instances (padded), P features, Q concept dimensions, K slots
of the neighbour table, S bags packed into one row (see `tmlib.data.packing`).

Padding, stacking and bucketing run on the host in NumPy, so that a data
pipeline never touches the device; every model treats the result as arrays.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from kernels_pallas.graph import PatchGraph

__all__ = [
  'Bag',
  'batch_bags',
  'bucket_size',
  'check_alike',
  'check_bag',
  'pad_bag',
  'subsample_bag',
  'widen',
]


# NumPy on the host, jax.Array on a device.
Array = Any


class Bag(struct.PyTreeNode):
  """One bag [N, ...], or a batch of bags [B, N, ...].

  Attributes:
    features: [N, P], float.
    mask: [N], bool; True where an instance is real.
    graph: symmetric neighbour table over the N instances, or None.
    coords: [N, 2], int32 positions on the patch grid, or None.
    concepts: [N, Q], float, unit rows in the space of a text encoder, or None.
    segment_ids: [N], int32 in [0, S): which of the row's bags an instance
      belongs to, or None where a row is one bag.
    num_segments: S, static.
  """

  features: Array
  mask: Array
  graph: PatchGraph | None = None
  coords: Array | None = None
  concepts: Array | None = None
  segment_ids: Array | None = None
  num_segments: int = struct.field(pytree_node=False, default=1)


def check_bag(
  bag: Any, name: str = 'bag', ndims: tuple[int, ...] = (2, 3)
) -> None:
  """Checks that something is a bag, or a batch of bags.

  Args:
    bag: what was given.
    name: for the message.
    ndims: numbers of axes that its features may have.

  Raises:
    TypeError: no Bag, or a graph that is no neighbour table.
    ValueError: features of another number of axes.
  """
  if not isinstance(bag, Bag):
    raise TypeError(
      f'{name} must be a Bag, got {_described(bag)}; make_bag(features) makes'
      ' one from an array [N, P], and batch_bags a batch from a list of them'
    )
  if bag.graph is not None and not hasattr(bag.graph, 'nbr'):
    raise TypeError(
      f'graph of {name} must be a PatchGraph, got {_described(bag.graph)}; make'
      ' one by tmlib.ops.graph.ell_from_edges(edges, n) with edges [E, 2]'
      ' (transpose a list [2, E])'
    )
  shape = jnp.shape(bag.features)
  if len(shape) not in ndims:
    wanted = ' or '.join({2: '[N, P]', 3: '[B, N, P]'}[n] for n in ndims)
    raise ValueError(
      f'features of {name} have shape {shape}, expected {wanted}; batch_bags('
      '[bag]) adds the axis B'
    )


def _described(x: Any) -> str:
  shape = f' of shape {x.shape}' if hasattr(x, 'shape') else ''
  return f'a {type(x).__name__}{shape}'


def bucket_size(n: int, smallest: int = 16) -> int:
  """Smallest of the sizes 2^k and 3 * 2^(k-1) that holds n instances.

  Few sizes mean few compilations; steps of 1.33 to 1.5 waste at most a third.

  Args:
    n: number of instances, >= 0.
    smallest: a power of two, the smallest bucket.

  Returns:
    The padded size, >= max(n, smallest).

  Raises:
    ValueError: negative n, or `smallest` not a power of two.
  """
  if n < 0:
    raise ValueError(f'n must be >= 0, got {n}')
  if smallest < 2 or smallest & (smallest - 1):
    raise ValueError(f'smallest must be a power of two >= 2, got {smallest}')
  if n <= smallest:
    return smallest
  power = 1 << (n - 1).bit_length()
  return 3 * power // 4 if n <= 3 * power // 4 else power


def pad_bag(bag: Bag, n: int) -> Bag:
  """Pads one bag with masked instances up to n rows.

  A padded instance is zero, unmasked, and its own (masked) neighbour, so it
  adds nothing to any sum over instances or edges.

  Args:
    bag: Bag with leaves [N, ...].
    n: rows wanted, >= N.

  Returns:
    Bag with leaves [n, ...], NumPy.

  Raises:
    TypeError: no Bag.
    ValueError: n < N.
  """
  check_bag(bag, ndims=(2,))
  size = len(bag.mask)
  if n < size:
    raise ValueError(
      f'cannot pad a bag of {size} instances to n={n}; n must be >= {size} '
      '(subsample_bag makes a bag smaller)'
    )

  def rows(x):
    x = np.asarray(x)
    return np.pad(x, [(0, n - size)] + [(0, 0)] * (x.ndim - 1))

  padded = jax.tree.map(rows, bag)
  if bag.graph is not None:
    nbr = padded.graph.nbr
    nbr[size:] = np.arange(size, n, dtype=nbr.dtype)[:, None]
  return padded


def batch_bags(bags: list[Bag], n: int | None = None) -> Bag:
  """Stacks bags into one Bag whose leaves have a leading axis B.

  Args:
    bags: bags with leaves [N_b, ...]; all with the same optional fields.
      Neighbour tables of unequal width are widened to the widest.
    n: instances per row; None takes the bucket of the largest bag.

  Returns:
    Bag with leaves [B, n, ...], NumPy.

  Raises:
    TypeError: something else than a list of bags.
    ValueError: no bags, a bag larger than n, or bags that differ in their
      fields, feature size or number of segments.
  """
  if isinstance(bags, Bag):
    raise TypeError('bags must be a list, got a Bag; pass [bag]')
  bags = list(bags)
  for index, bag in enumerate(bags):
    check_bag(bag, f'bags[{index}]', (2,))
  if not bags:
    raise ValueError('batch_bags needs at least one bag, got none')
  for index, bag in enumerate(bags[1:], 1):
    check_alike(bags[0], bag, index)
  if n is None:
    n = bucket_size(max(len(bag.mask) for bag in bags))
  graphs = [bag.graph for bag in bags if bag.graph is not None]
  if graphs:
    width = max(graph.num_slots for graph in graphs)
    bags = [
      bag.replace(graph=widen(graph, width))
      for bag, graph in zip(bags, graphs, strict=True)
    ]
  padded = [pad_bag(bag, n) for bag in bags]
  return jax.tree.map(lambda *leaves: np.stack(leaves), *padded)


def subsample_bag(key: jax.Array, bag: Bag, n: int) -> Bag:
  """Uniform random subset of n instances, without replacement, in file order.

  The graph becomes the induced subgraph. A bag with fewer than n instances
  keeps them all and is masked beyond; a table of at most n rows is returned
  unchanged. Safe under jit and vmap (n is static).

  Args:
    key: PRNG key.
    bag: Bag with leaves [N, ...].
    n: instances wanted, >= 1.

  Returns:
    Bag with leaves [min(n, N), ...].

  Raises:
    ValueError: n < 1.
  """
  if n < 1:
    raise ValueError(f'n must be >= 1, got {n}')
  size = bag.mask.shape[0]
  if n >= size:
    return bag
  scores = jnp.where(bag.mask, jax.random.uniform(key, (size,)), -1)
  kept = jnp.sort(jax.lax.top_k(scores, n)[1])
  sample = jax.tree.map(lambda x: jnp.asarray(x)[kept], bag)
  if bag.graph is None:
    return sample
  # Rows keep their slots, so `rev` stays right; only the indices are renamed.
  chosen = jnp.zeros(size, bool).at[kept].set(True)
  renamed = jnp.cumsum(chosen, dtype=jnp.int32) - 1
  nbr = sample.graph.nbr
  emask = sample.graph.emask & chosen[nbr]
  own = jnp.arange(n, dtype=jnp.int32)[:, None]
  graph = PatchGraph(
    nbr=jnp.where(emask, renamed[nbr], own),
    emask=emask,
    rev=jnp.where(emask, sample.graph.rev, 0),
  )
  return sample.replace(graph=graph)


def widen(graph: PatchGraph, width: int) -> PatchGraph:
  """Adds masked slots to a neighbour table.

  Args:
    graph: leaves [N, K].
    width: slots wanted, >= K.

  Returns:
    PatchGraph, NumPy, leaves [N, width].
  """
  n, k = graph.nbr.shape

  def wide(table) -> Any:
    return np.pad(np.asarray(table), ((0, 0), (0, width - k)))

  nbr = wide(graph.nbr)
  nbr[:, k:] = np.arange(n, dtype=nbr.dtype)[:, None]
  return PatchGraph(nbr=nbr, emask=wide(graph.emask), rev=wide(graph.rev))


def check_alike(first: Bag, bag: Bag, index: int) -> None:
  """Checks that a bag can share a batch with the first one.

  Args:
    first: bag 0.
    bag: another bag.
    index: its position, for the message.

  Raises:
    ValueError: other optional fields, feature size or number of segments.
  """
  if bag.num_segments != first.num_segments:
    raise ValueError(
      f'bag {index} packs num_segments={bag.num_segments} bags but bag 0 '
      f'packs {first.num_segments}; pack all rows with one max_segments'
    )
  for name in ('graph', 'coords', 'concepts', 'segment_ids'):
    here, there = getattr(first, name), getattr(bag, name)
    if (here is None) != (there is None):
      has, lacks = (0, index) if there is None else (index, 0)
      raise ValueError(
        f'bag {has} has {name} but bag {lacks} has none; give {name} to all '
        'bags of a batch or to none'
      )
  for name in ('features', 'concepts'):
    here, there = getattr(first, name), getattr(bag, name)
    if here is not None and here.shape[-1] != there.shape[-1]:
      raise ValueError(
        f'bag {index} has {name} of dim {there.shape[-1]} but bag 0 has '
        f'{here.shape[-1]}; all bags of a batch come from one encoder'
      )

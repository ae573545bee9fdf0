"""Several bags in one row: features side by side, graphs kept apart.

Axes: n bags, R rows, S bags per row at most, N instances per row (capacity),
P features, K neighbour slots.

A packed row costs as much as one padded bag of the same size, so a batch of
many small bags and few large ones wastes little. No edge ever joins two bags.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from kernels_pallas.graph import PatchGraph
from tmlib.data.bag import Bag, check_alike, widen
from tmlib.ops.packing import PackingPlan

__all__ = ['pack_bags', 'pack_values', 'unpack_instances', 'unpack_values']


def pack_bags(bags: Sequence[Bag], plan: PackingPlan) -> Bag:
  """Lays out bags in rows as planned, in one vectorised pass.

  Args:
    bags: n bags, leaves [N_b, ...]; the plan's lengths are their N_b.
    plan: from `plan_packing([len(bag.mask) for bag in bags], ...)`.

  Returns:
    Bag, NumPy: leaves [R, N, ...], `segment_ids` [R, N] int32 (zero in
    padding, where the mask is False), `num_segments` = S. Graph indices are
    shifted by the bag's offset; padded instances are their own neighbours.

  Raises:
    ValueError: a plan made for other bags, or bags that cannot share a batch.
  """
  bags = list(bags)
  lengths = [len(bag.mask) for bag in bags]
  if not np.array_equal(lengths, plan.lengths):
    raise ValueError(
      f'the plan was made for {len(plan.lengths)} bags of other lengths than '
      f'these {len(bags)}; plan with [len(bag.mask) for bag in bags]'
    )
  if not bags:
    raise ValueError('pack_bags needs at least one bag, got none')
  for index, bag in enumerate(bags):
    if bag.segment_ids is not None:
      raise ValueError(f'bag {index} is packed already (it has segment_ids)')
    check_alike(bags[0], bag, index)
  row = np.repeat(plan.row, lengths)
  column = _ranges(plan.offset, plan.lengths)

  def lay(leaves, fill: Any = 0) -> Any:
    flat = np.concatenate([np.asarray(leaf) for leaf in leaves])
    shape = (plan.num_rows, plan.capacity, *flat.shape[1:])
    out = np.full(shape, fill, flat.dtype)
    out[row, column] = flat
    return out

  def optional(name):
    leaves = [getattr(bag, name) for bag in bags]
    return None if leaves[0] is None else lay(leaves)

  graph = None
  graphs = [bag.graph for bag in bags if bag.graph is not None]
  if graphs:
    width = max(graph.num_slots for graph in graphs)
    graphs = [widen(graph, width) for graph in graphs]
    moved = [
      graph.nbr + offset
      for graph, offset in zip(graphs, plan.offset, strict=True)
    ]
    own = np.arange(plan.capacity, dtype=np.int32)[:, None]
    graph = PatchGraph(
      nbr=lay(moved, fill=own),
      emask=lay([graph.emask for graph in graphs]),
      rev=lay([graph.rev for graph in graphs]),
    )
  return Bag(
    features=lay([bag.features for bag in bags]),
    mask=lay([np.asarray(bag.mask, bool) for bag in bags]),
    graph=graph,
    coords=optional('coords'),
    concepts=optional('concepts'),
    segment_ids=lay([np.repeat(plan.slot, lengths)]),
    num_segments=plan.max_segments,
  )


def pack_values(values: Any, plan: PackingPlan, fill: Any = 0) -> np.ndarray:
  """Lays out one value per bag (label, weight, id) as the bags are.

  Args:
    values: [n, ...].
    plan: the plan.
    fill: value of empty slots.

  Returns:
    [R, S, ...], NumPy, in the dtype of `values`.
  """
  values = np.asarray(values)
  shape = (plan.num_rows, plan.max_segments, *values.shape[1:])
  out = np.full(shape, fill, values.dtype)
  out[plan.row, plan.slot] = values
  return out


def unpack_values(packed: Any, plan: PackingPlan) -> np.ndarray:
  """Inverse of `pack_values`: outputs per bag, in the order of the bags.

  Args:
    packed: [R, S, ...], for example logits.
    plan: the plan.

  Returns:
    [n, ...], NumPy.
  """
  return np.asarray(packed)[plan.row, plan.slot]


def unpack_instances(packed: Any, plan: PackingPlan) -> list[np.ndarray]:
  """Outputs per instance (attention, heat maps), one array per bag.

  Args:
    packed: [R, N, ...].
    plan: the plan.

  Returns:
    n arrays [N_b, ...], NumPy.
  """
  row = np.repeat(plan.row, plan.lengths)
  flat = np.asarray(packed)[row, _ranges(plan.offset, plan.lengths)]
  return np.split(flat, np.cumsum(plan.lengths)[:-1])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
  """Concatenation of arange(s, s + l): [sum of lengths]."""
  ends = np.cumsum(lengths)
  within = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
  return np.repeat(starts, lengths) + within

"""One device's part of an attention call, under the mesh of the caller.

A compiler can not divide a Pallas kernel by itself: for TPUs it refuses, for
GPUs it gathers all operands in silence. Sequences and heads are independent, so
each device computes its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, PartitionSpec

__all__ = ['Split', 'find_split', 'over_mesh']


class Split(NamedTuple):
  """Mesh axes over which sequences and heads are divided; None for whole."""

  batch: str | None
  heads: str | None
  axes: frozenset[str]

  def spec(self, *letters: str | None) -> PartitionSpec:
    """Of an array whose axes are 'b' for sequences, 'h' for heads, or None."""
    names = {'b': self.batch, 'h': self.heads, None: None}
    return PartitionSpec(*(names[x] for x in letters))


def find_split(batch: int, groups: int) -> Split | None:
  """The split under the ambient mesh, or None where nothing is to be split.

  Sequences go over 'data' and key heads over 'model', where these axes are of
  type Auto and divide them. Manual axes are the caller's.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty:
    return None
  sizes = dict(mesh.shape)
  auto = frozenset(
    name
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Auto
  )
  if all(sizes[name] == 1 for name in auto):
    return None
  fits = lambda name, size: name in auto and size % sizes[name] == 0
  return Split(
    'data' if fits('data', batch) else None,
    'model' if fits('model', groups) else None,
    auto,
  )


def over_mesh(
  function: Callable[..., Any], split: Split, inputs: Any, outputs: Any
) -> Callable[..., Any]:
  """`function` on each device's part.

  Args:
    function: of pytrees of arrays.
    split: of `find_split`.
    inputs: a PartitionSpec for each array among the arguments, in their trees.
    outputs: a PartitionSpec for each array of the result, in its tree.
  """
  is_spec = lambda x: isinstance(x, PartitionSpec)
  out_specs, out_tree = jax.tree.flatten(outputs, is_leaf=is_spec)

  def call(*args):
    leaves, tree = jax.tree.flatten(args)
    mapped = jax.shard_map(
      lambda *x: tuple(jax.tree.leaves(function(*jax.tree.unflatten(tree, x)))),
      in_specs=tuple(jax.tree.leaves(inputs, is_leaf=is_spec)),
      out_specs=tuple(out_specs),
      axis_names=set(split.axes),
      check_vma=False,
    )
    return jax.tree.unflatten(out_tree, mapped(*leaves))

  return call

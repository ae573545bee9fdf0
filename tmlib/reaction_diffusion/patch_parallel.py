"""One bag split over devices along its patches, with borrowed border rows.

A slide that is too large or too slow for one chip is trained on many: each
holds a run of patches in row-major order, exchanges a halo with its two
neighbours per step of the evolution, and adds its share to the sums over
patches. No chip ever sees the whole slide.

Axes: B bags (one), N patches, P features.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.sharding import PartitionSpec

from kernels_pallas.graph import shard_graph
from tmlib.mil import Bag, MILOutput, pad_bag
from tmlib.train import Data

__all__ = ['PatchParallel', 'patch_data']


class PatchParallel:
  """Takes the place of a model whose bags are split over a mesh axis.

  It has the model's `init` and `apply`, so that `classification_method` trains
  it as it is. Run it under `jax.set_mesh`, as `fit` does, in jit mode. The
  parameters are those of the model: what one trains, the other reads.

  Args:
    model: a module whose sums over patches know the axis of a split graph,
      such as `TMEvolve`.
  """

  def __init__(self, model: nn.Module):
    self.model = model

  def init(self, rngs: Any, bag: Bag, **keywords) -> Any:
    """Variables of the model; their shapes depend on no number of patches."""
    one = jax.tree.map(lambda x: jnp.zeros((1, 1, *x.shape[2:]), x.dtype), bag)
    if one.graph is not None:
      graph = dataclasses.replace(one.graph, axis_name=None, halo=0)
      one = one.replace(graph=graph)
    return self.model.init(rngs, one, **keywords)

  def apply(
    self,
    variables: Any,
    bag: Bag,
    *,
    train: bool = False,
    dropout_keys: jax.Array | None = None,
  ) -> MILOutput:
    """The model's output; `attention` stays split, `extras` are left out.

    Args:
      variables: of the model.
      bag: leaves [B, N, ...]; its graph comes from `shard_graph`, or is whole
        and then the model is applied as it is.
      train: whether dropout is on.
      dropout_keys: [B], one key per bag.
    """
    axis = None if bag.graph is None else bag.graph.axis_name
    split: Any = PartitionSpec(None, axis)
    whole: Any = PartitionSpec()

    def part(variables, bag, keys):
      output: Any = self.model.apply(
        variables, bag, train=train, dropout_keys=keys
      )
      return output.replace(extras={})

    if axis is None:
      return part(variables, bag, dropout_keys)
    return jax.shard_map(
      part,
      in_specs=(whole, split, whole),
      out_specs=MILOutput(
        logits=whole,
        attention=split,
        slide_features=whole,
        aux=whole,
        extras={},
      ),
      check_vma=False,
    )(variables, bag, dropout_keys)


def patch_data(
  bags: Sequence[Bag],
  labels: np.ndarray,
  shards: int,
  *,
  axis_name: str = 'data',
) -> Data:
  """A stream of single bags, each split over the mesh along its patches.

  Args:
    bags: with leaves [N_b, ...] and a graph whose neighbours are near in the
      order of the patches (row-major).
    labels: [number of bags], int.
    shards: devices along the axis.
    axis_name: mesh axis that splits the patches.

  Returns:
    An endless stream, bag after bag. Its `batch_size` is the number of
    patches N, a multiple of `shards` that holds every bag.

  Raises:
    ValueError: if there is no bag or one without graph, if labels do not fit,
      or if a neighbour lies farther away than one shard.
  """
  labels = np.asarray(labels, np.int32)
  if not bags or labels.shape != (len(bags),):
    raise ValueError(
      f'labels have shape {labels.shape} for {len(bags)} bags; give one label'
      ' per bag, and at least one bag'
    )
  missing = [i for i, bag in enumerate(bags) if bag.graph is None]
  if missing:
    raise ValueError(f'bags {missing[:5]} have no graph to be split along')
  nodes = -(-max(len(bag.mask) for bag in bags) // shards) * shards
  padded = [pad_bag(bag, nodes) for bag in bags]
  graphs = [
    shard_graph(bag.graph, shards, axis_name)
    for bag in padded
    if bag.graph is not None
  ]
  # One program for all: the widest halo.
  halo = max(graph.halo for graph in graphs)
  split = [
    bag.replace(graph=_widened(graph, halo))
    for bag, graph in zip(padded, graphs, strict=True)
  ]

  def load(step: int, rows: slice) -> dict[str, Any]:
    index = step % len(split)
    bag = jax.tree.map(lambda x: np.asarray(x)[rows], split[index])
    slide = np.full(rows.stop - rows.start, index, np.int32)
    return {'bag': bag, 'slide': slide}

  def gather(resident: Any, batch: dict[str, Any]) -> dict[str, Any]:
    slide = batch['slide'][:1]
    return {
      'bag': jax.tree.map(lambda x: x[None], batch['bag']),
      'label': resident[slide],
      'weight': jnp.ones(1, jnp.float32),
      'id': slide,
    }

  fingerprint = dict(kind='patch', n=len(bags), patches=nodes)
  return Data(load, nodes, fingerprint, resident=labels, gather=gather)


def _widened(graph: Any, halo: int) -> Any:
  """The same split graph with `halo` rows borrowed from either side."""
  nbr = graph.nbr + np.int32(halo - graph.halo)
  return dataclasses.replace(graph, nbr=nbr, halo=halo)

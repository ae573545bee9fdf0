"""Graphs for bags that come without positions.

Axes: N instances, P features, K neighbour slots.
"""

import numpy as np

from tmlib.data.folds import instance_statistics
from tmlib.data.mil_csv import BagSet
from tmlib.ops.graph import knn_graph

__all__ = ['with_knn_graphs']


def with_knn_graphs(
  bagset: BagSet, k: int, *, mutual: bool = True, scale: str = 'bag'
) -> BagSet:
  """Gives every bag a symmetric k-nearest-neighbour graph of its features.

  This is not a graph of tissue: it joins instances that look alike, wherever
  they lie. Say so beside any picture made from it. A bag's graph depends on
  that bag alone, so no test bag can leak through it.

  Args:
    bagset: bags without graphs.
    k: neighbours per instance, >= 1; small bags have fewer.
    mutual: keep an edge only where both ends choose it (degree <= k).
    scale: 'bag' standardises each feature within the bag before distances are
      taken, so that no unit dominates; 'none' compares features as they are.

  Returns:
    The set with graphs; instances without an edge stay isolated.

  Raises:
    ValueError: k < 1 or another scale.
  """
  if k < 1:
    raise ValueError(f'k must be >= 1, got {k}')
  if scale not in ('bag', 'none'):
    raise ValueError(f"scale must be 'bag' or 'none', got {scale!r}")
  bags = []
  for bag in bagset.bags:
    features = np.asarray(bag.features)
    if scale == 'bag' and len(features):
      mean, std = instance_statistics([bag])
      features = (features - mean) / std
    bags.append(bag.replace(graph=knn_graph(features, k, mutual=mutual)))
  return bagset._replace(bags=bags)

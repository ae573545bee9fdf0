"""Graphs and dense counterparts for the tests of this folder."""

import os
import pathlib

import numpy as np
import pytest

from kernels_pallas.graph import PatchGraph
from tmlib.ops.graph import ell_from_edges, ell_from_grid


def grid_graph(rng, rows, columns, patches, connectivity=4):
  """A random piece of tissue: `patches` of a rows x columns grid."""
  chosen = np.sort(rng.choice(rows * columns, patches, replace=False))
  ij = np.stack(np.divmod(chosen, columns), -1).astype(np.int32)
  return ij, ell_from_grid(ij, connectivity=connectivity)


def random_graph(rng, n, k, edges):
  """A random symmetric graph with at most k edges per node, width k."""
  degree, kept = np.zeros(n, int), []
  for i, j in rng.integers(0, n, (edges, 2)):
    pair = (min(i, j), max(i, j))
    if i != j and pair not in kept and degree[i] < k and degree[j] < k:
      degree[i] += 1
      degree[j] += 1
      kept.append(pair)
  kept = np.array(kept, np.int64).reshape(-1, 2)
  both = np.concatenate([kept, kept[:, ::-1]])
  return ell_from_edges(both, n, k)


def dense(graph: PatchGraph, weights=None):
  """[N, K] edge weights as an [N, N] matrix."""
  n, k = graph.nbr.shape
  matrix = np.zeros((n, n))
  for i in range(n):
    for slot in range(k):
      if graph.emask[i, slot]:
        value = 1.0 if weights is None else float(weights[i, slot])
        matrix[i, int(graph.nbr[i, slot])] += value
  return matrix


def edge_weights(graph: PatchGraph, matrix):
  """The entries of an [N, N] matrix along the edges, [N, K]."""
  rows = np.arange(len(graph.nbr))[:, None]
  return np.where(graph.emask, matrix[rows, graph.nbr], 0)


def symmetric(rng, n):
  """A symmetric matrix of uniform numbers."""
  x = np.triu(rng.uniform(size=(n, n)), 1)
  return x + x.T


def kirc_positions():
  """Grid positions [13472, 2] of the patches of a real slide, or skip."""
  here = pathlib.Path(__file__).resolve()
  default = here.parents[3] / 'shared'
  root = pathlib.Path(os.environ.get('TMLIB_SHARED', default))
  found = sorted((root / 'data' / 'kirc_graph').glob('*_location_list.csv'))
  if not found:
    pytest.skip(f'no KIRC slide below {root}; set TMLIB_SHARED to have it')
  table = np.loadtxt(found[0], delimiter=',', skiprows=1, dtype=np.int64)
  return table[:, 1:].astype(np.int32)

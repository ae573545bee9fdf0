"""Graphs on their whole grid: the layout, and what it costs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.graph import (
  diffuse,
  from_raster,
  raster_layout,
  tiled_layout,
  to_raster,
)
from kernels_pallas.graph.raster import DIRECTIONS, shift
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from tmlib.ops.graph import (
  ell_from_edges,
  ell_from_grid,
  morton_order,
  to_dense,
  validate_graph,
)


@pytest.mark.parametrize('connectivity', [4, 8])
def test_the_same_edges_as_the_table_of_neighbours(connectivity):
  ij = tissue_mask(12, 10, 70)
  ij = np.random.default_rng(0).permutation(ij) - 3
  layout = raster_layout(ij, connectivity)
  validate_graph(layout.graph)
  table = ell_from_grid(ij, connectivity=connectivity)
  cells = to_dense(layout.graph)
  np.testing.assert_array_equal(
    cells[np.ix_(layout.cell, layout.cell)], to_dense(table)
  )
  assert cells.sum() == to_dense(table).sum()


def test_diffusion_on_the_grid_is_that_of_the_patches():
  ij = tissue_mask(9, 12, 60)
  layout, table = raster_layout(ij), ell_from_grid(ij)
  x = jnp.asarray(np.random.default_rng(0).normal(size=(60, 4)), jnp.float32)
  one = lambda graph: jnp.asarray(graph.emask, jnp.float32)

  def on_grid(x):
    graph = layout.graph
    y = diffuse(graph, one(graph), one(graph), 0.3, 0.1, to_raster(x, layout))
    return from_raster(y, layout)

  def on_table(x):
    return diffuse(table, one(table), one(table), 0.3, 0.1, x)

  np.testing.assert_allclose(on_grid(x), on_table(x), atol=1e-5)
  grads = [
    jax.grad(lambda x, f=f: jnp.sum(f(x) ** 2))(x) for f in (on_grid, on_table)
  ]
  np.testing.assert_allclose(*grads, atol=1e-4)
  assert (
    'scatter'
    not in jax.jit(jax.grad(lambda x: on_grid(x).sum())).lower(x).as_text()
  )


def test_what_it_costs_by_hand():
  # Three patches in a row, columns filled up to eight, and one below the first.
  layout = raster_layout(np.array([[5, 7], [5, 8], [5, 9], [6, 7]]))
  assert layout.graph.grid == (2, 8)
  assert layout.fill == 4 / 16
  assert layout.waste == 3
  assert layout.edges == 2 * 4 / (16 * 8)
  np.testing.assert_array_equal(layout.cell, [0, 1, 2, 8])
  assert (layout.patch == 4).sum() == 12
  shape = SHAPES['resection']
  layout = raster_layout(tissue_mask(*shape[:3]))
  assert 0.35 < layout.fill < 0.45


def test_a_shift_looks_in_its_direction():
  x = jnp.arange(12.0).reshape(3, 4, 1)
  for k, (i, j) in enumerate(DIRECTIONS):
    near = shift(x, k)[1, 1, 0]
    assert near == x[1 + i, 1 + j, 0]
    assert DIRECTIONS[7 - k] == (-i, -j)
  assert shift(x, 0)[0, 0, 0] == 0


@pytest.mark.parametrize(
  ('ij', 'options', 'error', 'match'),
  [
    (np.zeros((0, 2), int), {}, ValueError, 'N >= 1'),
    (np.zeros((3, 3), int), {}, ValueError, 'ij has shape'),
    (np.zeros((3, 2)), {}, TypeError, 'expected integers'),
    (np.zeros((3, 2), int), {}, ValueError, '2 patches repeat a position'),
    (np.eye(2, dtype=int), {'connectivity': 6}, ValueError, 'must be 4 or 8'),
  ],
)
def test_bad_input_is_named(ij, options, error, match):
  with pytest.raises(error, match=match):
    raster_layout(ij, **options)


def test_tiles_hold_the_same_graph():
  ij = tissue_mask(30, 20, 300)
  table = ell_from_grid(ij)
  layout = tiled_layout(table, morton_order(ij))
  graph = layout.graph
  validate_graph(graph)
  assert graph.num_nodes == 384
  dense = to_dense(graph)
  np.testing.assert_array_equal(
    dense[np.ix_(layout.place, layout.place)], to_dense(table)
  )
  tiles = dense.reshape(3, 128, 3, 128).any((1, 3)) | np.eye(3, dtype=bool)
  np.testing.assert_array_equal(np.argwhere(tiles).T, [graph.row, graph.column])
  entries, edges = tiles.sum() * 128**2, table.emask.sum()
  assert layout.fill == edges / entries
  assert layout.waste == (entries - edges) / edges
  assert layout.padding == 84 / 384
  np.testing.assert_array_equal(layout.node[layout.place], np.arange(300))


def test_a_tile_without_an_edge_is_visited():
  layout = tiled_layout(ell_from_edges([[0, 1], [1, 0]], 300))
  np.testing.assert_array_equal(layout.graph.row, [0, 1, 2])


def test_tiles_want_one_whole_graph():
  table = ell_from_edges([[0, 1], [1, 0]], 4)
  two = jax.tree.map(lambda x: np.stack([x, x]), table)
  for graph, order, match in (
    (two, None, 'one whole graph'),
    (table, [0, 0, 1, 2], 'permutation of the 4 nodes'),
    (
      dataclasses.replace(table, nbr=table.nbr + 3),
      None,
      r'must lie in \[0, 4\)',
    ),
  ):
    with pytest.raises(ValueError, match=match):
      tiled_layout(graph, order)

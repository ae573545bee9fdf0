"""Message passing on several devices, by real compilers, on modelled memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.graph import (
  PatchGraph,
  RasterGraph,
  TiledGraph,
  block_sparse,
  diffuse,
  ell_sddmm,
  ell_spmm,
  raster_layout,
  reference,
  stencil,
  tiled_layout,
)
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from tests.kernels_pallas import gpu_targets, tpu_targets


def leaves(nodes, slots, features, dtype, lead=()):
  edges = (*lead, nodes, slots)
  return [
    (edges, jnp.int32),
    (edges, jnp.bool_),
    (edges, jnp.int32),
    (edges, jnp.float32),
    (edges, jnp.float32),
    ((*lead, nodes, features), dtype),
  ]


def gradients(make, nbr, emask, rev, wa, wb, x):
  """Of one step in everything; the rates are made of ones."""
  graph = make(nbr, emask, rev)
  rate = jnp.ones(x.shape[-1])

  def loss(wa, wb, alpha, eta, x):
    y = diffuse(graph, wa, wb, alpha, eta, x)
    return jnp.sum(y.astype(jnp.float32) ** 2)

  return jax.grad(loss, range(5))(wa, wb, rate, rate, x)


def on_raster(shape):
  grid = shape.rows, -(-shape.columns // 8) * 8
  return grid[0] * grid[1], functools.partial(RasterGraph, grid=grid)


def each(chips, quick):
  return [
    pytest.param(x, y, marks=[] if (x, y) in quick else [pytest.mark.slow])
    for x in chips
    for y in ('float32', 'bfloat16')
  ]


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'dtype'), each(tpu_targets.CHIPS, [('v5e:2x2', 'float32')])
)
def test_tpu(chip, dtype):
  shape = SHAPES['biopsy']
  nodes, make = on_raster(shape)
  text = tpu_targets.compile_for_tpu(
    chip,
    functools.partial(gradients, make),
    leaves(nodes, 8, shape.features, dtype),
  )
  # The step and the gradient of x.
  assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'dtype'), each(tpu_targets.CHIPS, [('v5e:2x2', 'float32')])
)
def test_tiles_on_a_tpu(chip, dtype):
  nodes, pairs = 1280, 28
  lists = [((pairs,), jnp.int32)] * 2

  def run(row, column, *rest):
    make = functools.partial(TiledGraph, row=row, column=column)
    if forward:
      *table, wa, wb, x = rest
      return diffuse(make(*table), wa, wb, 0.3, 0.2, x)
    return gradients(make, *rest)

  # Gradients gather weights, asynchronously where a chip has sparse cores; the
  # older jaxlib can not read that program back.
  forward = jax.__version_info__ < (0, 12) and chip[:3] not in ('v4:', 'v5e')
  shapes = lists + leaves(nodes, 8, 128, dtype)
  text = tpu_targets.compile_for_tpu(chip, run, shapes)
  count = text.count('custom_call_target="tpu_custom_call"')
  assert count == (1 if forward else 2)


@pytest.mark.aot
@pytest.mark.slow
def test_a_slice_gathers_nothing():
  shape = SHAPES['biopsy']
  nodes, make = on_raster(shape)
  text = tpu_targets.compile_for_tpu(
    'v5e:2x2',
    functools.partial(gradients, make),
    leaves(nodes, 8, shape.features, 'float32', (4,)),
    P('data'),
    (1, 4),
  )
  assert text.count('custom_call_target="tpu_custom_call"') == 2
  assert 'all-gather' not in text


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'dtype'),
  each(gpu_targets.CHIPS, [('H100', 'float32')]),
)
def test_gpu(chip, dtype):
  shape = SHAPES['resection']
  text = gpu_targets.compile_for_gpu(
    chip,
    functools.partial(gradients, PatchGraph),
    *leaves(shape.patches, 8, shape.features, dtype),
    spills=False,
  )
  # The step, the gradient of x, and that of weights and rates.
  assert text.count('__gpu$xla.gpu.triton') == 3


@pytest.mark.aot
def test_the_pair_on_a_gpu():
  shape = SHAPES['resection']

  def pair(nbr, emask, rev, wa, wb, x):
    del wb
    graph = PatchGraph(nbr, emask, rev)
    how = {'implementation': 'pallas'}

    def loss(w, x):
      e = ell_sddmm(graph, ell_spmm(graph, w, x, **how), x, **how)
      return jnp.sum(e**2)

    return jax.grad(loss, (0, 1))(wa, x)

  with pytest.MonkeyPatch.context() as patch:
    # "pallas" asks the machine at hand, which only compiles here.
    patch.setattr(jax, 'default_backend', lambda: 'gpu')
    text = gpu_targets.compile_for_gpu(
      'H100',
      pair,
      *leaves(shape.patches, 8, shape.features, 'float32'),
      spills=False,
    )
  assert text.count('__gpu$xla.gpu.triton') >= 5


def test_plain_jit_under_a_mesh():
  where = jax.make_mesh((2,), ('data',), axis_types=(AxisType.Auto,))
  layout = raster_layout(tissue_mask(7, 6, 30))
  rng = np.random.default_rng(0)
  nodes = layout.graph.num_nodes
  stack = lambda x: jnp.stack([jnp.asarray(x)] * 4)
  graph = jax.tree.map(stack, layout.graph)
  wa, wb = (
    jnp.asarray(rng.normal(size=(4, nodes, 8)), 'float32') for _ in '12'
  )
  x = jnp.asarray(rng.normal(size=(4, nodes, 3)), 'float32')

  def run(graph, wa, wb, x, path='interpret_gpu'):
    f = lambda x: jnp.sum(
      diffuse(graph, wa, wb, 0.3, 0.2, x, implementation=path) ** 2
    )
    return jax.grad(f)(x)

  want = run(graph, wa, wb, x, 'xla')
  placed = jax.device_put((graph, wa, wb, x), NamedSharding(where, P('data')))
  with jax.set_mesh(where):
    compiled = jax.jit(run).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  np.testing.assert_allclose(compiled(*placed), want, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['deltas', 'adjoint'])
def test_the_stencil_reads_only_what_was_written(kind, monkeypatch):
  # Three blocks of rows, the last of which reaches beyond the grid.
  monkeypatch.setattr(stencil, '_BLOCK', 3 * 16 * 128)
  layout = raster_layout(tissue_mask(8, 14, 60))
  graph = jax.tree.map(jnp.asarray, layout.graph)
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights = tuple(draw(*graph.nbr.shape) for _ in '12')
  gates = tuple(draw(1, 20) for _ in '12')
  x = draw(graph.num_nodes, 20)
  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  name = f'gated_{kind}'
  got = getattr(stencil, name)(graph, weights, gates, x, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  want = getattr(reference, name)(graph, weights, gates, x)
  np.testing.assert_allclose(got, want, atol=1e-4)


@pytest.mark.slow
def test_tiles_read_only_what_was_written():
  # Here, so that the compilers' tests need jax only.
  from tmlib.ops.graph import ell_from_grid

  rng = np.random.default_rng(0)
  table = ell_from_grid(tissue_mask(20, 14, 200))
  graph = jax.tree.map(jnp.asarray, tiled_layout(table).graph)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  weights = tuple(draw(*graph.nbr.shape) for _ in '12')
  gates = tuple(draw(1, 20) for _ in '12')
  args = graph, weights, gates, draw(graph.num_nodes, 20)
  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  got = block_sparse.gated_deltas(*args, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  want = reference.gated_deltas(*args)
  np.testing.assert_allclose(got, want, atol=1e-4)

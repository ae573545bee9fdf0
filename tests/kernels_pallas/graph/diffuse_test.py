"""The Pallas bodies of message passing, against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import diffuse, ell_sddmm, ell_spmm
from kernels_pallas.graph import PatchGraph, raster_layout, tiled_layout
from kernels_pallas.graph.shapes import tissue_mask
from kernels_pallas.tuning import CHIPS, find_kernels
from tmlib.ops.graph import ell_from_edges, to_dense

# The GPU's bodies take any graph, the TPU's one on its grid.
PATHS = ['interpret', 'interpret_gpu']


def random_graph(seed, nodes=20, padding=3):
  """Symmetric, with isolated nodes, padding and empty slots."""
  rng = np.random.default_rng(seed)
  density = rng.choice([0, 0.1, 0.3])
  pairs = np.argwhere(np.triu(rng.random((nodes, nodes)) < density, 1))
  both = np.concatenate([pairs, pairs[:, ::-1]], 1).reshape(-1, 2)
  return ell_from_edges(both, nodes + padding, 5, truncate=True)


def raster(rows=11, columns=9, patches=50, seed=0):
  return raster_layout(tissue_mask(rows, columns, patches, seed)).graph


def graph_for(path):
  return raster() if path == 'interpret' else random_graph(2)


def operands(graph, features, seed=0):
  """wa, wb, alpha, eta, x, and a cotangent; float64."""
  rng = np.random.default_rng(seed)
  edges, nodes = graph.nbr.shape, (graph.num_nodes, features)
  draw = lambda *shapes: [rng.normal(size=s) for s in shapes]
  return draw(edges, edges, features, features, nodes, nodes)


def dense(graph, wa, wb, alpha, eta, x, g):
  """Values and gradients of diffuse by matrices."""
  a, b = to_dense(graph, wa), to_dense(graph, wb)
  flow = lambda w: w @ x - w.sum(1)[:, None] * x
  back = lambda w, g: w.T @ g - w.sum(1)[:, None] * g
  row, slot = np.nonzero(graph.emask)
  step = np.zeros((*graph.nbr.shape, x.shape[1]))
  step[row, slot] = x[graph.nbr[row, slot]] - x[row]
  p = g[:, None] * step
  return flow(a) * alpha + flow(b) * eta, (
    p @ alpha,
    p @ eta,
    (flow(a) * g).sum(0),
    (flow(b) * g).sum(0),
    back(a, g * alpha) + back(b, g * eta),
  )


@functools.partial(jax.jit, static_argnums=0)
def derive(path, graph, wa, wb, alpha, eta, x, g):
  function = functools.partial(diffuse, graph, implementation=path)
  y, vjp = jax.vjp(function, wa, wb, alpha, eta, x)
  return y, vjp(g.astype(y.dtype))


def close(got, want, tolerance):
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for a, b in zip(got, want, strict=True):
    b = np.asarray(b, float)
    bound = tolerance * max(1.0, np.abs(b).max(initial=0))
    np.testing.assert_allclose(np.asarray(a, float), b, rtol=0, atol=bound)


def arrays(args, dtype='float32'):
  return [jnp.asarray(a, dtype) for a in args]


@pytest.mark.parametrize('path', PATHS)
def test_values_and_gradients_equal_matrices(path):
  graph = graph_for(path)
  args = operands(graph, 5)
  close(derive(path, graph, *arrays(args)), dense(graph, *args), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('path', PATHS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), features=st.sampled_from([1, 17, 130]))
def test_any_graph(path, seed, features):
  if path == 'interpret':
    rng = np.random.default_rng(seed)
    rows, columns = (int(x) for x in rng.integers(1, 14, 2))
    cells = int(rng.integers(1, rows * columns + 1))
    graph = raster(rows, columns, cells, seed)
  else:
    graph = random_graph(seed, 20 + seed % 30)
  args = operands(graph, features, seed)
  close(derive(path, graph, *arrays(args)), dense(graph, *args), 1e-5)


def test_tiles_of_any_graph():
  """Two tiles of nodes in an order of no meaning, and lonely ones."""
  table = random_graph(4, 150, 20)
  order = np.random.default_rng(0).permutation(170)
  graph = jax.tree.map(jnp.asarray, tiled_layout(table, order).graph)
  args = operands(graph, 5)
  lonely = ~np.asarray(graph.emask).any(1)[:, None]
  assert lonely.any()
  want = dense(graph, *args)
  args[4] = np.where(lonely, np.nan, args[4])
  close(derive('interpret', graph, *arrays(args)), want, 1e-5)


@pytest.mark.parametrize('path', PATHS)
def test_half_precision_sums_in_single(path):
  graph = graph_for(path)
  args = arrays(operands(graph, 16), 'bfloat16')
  exact = [np.asarray(a, float) for a in args]
  y, grads = derive(path, graph, *args)
  assert {a.dtype for a in (y, *grads)} == {jnp.dtype('bfloat16')}
  close((y, grads), dense(graph, *exact), 2e-2)


@pytest.mark.parametrize('path', PATHS)
def test_nan_where_nobody_looks_and_a_constant_field(path):
  graph = graph_for(path)
  args = operands(graph, 4)
  edges = np.asarray(graph.emask)
  wa, wb, alpha, eta, x, g = arrays(args)
  assert not edges.any(1).all()
  lonely = ~edges.any(1)[:, None]
  hole = [jnp.where(edges, w, jnp.nan) for w in (wa, wb)]
  got = derive(path, graph, *hole, alpha, eta, jnp.where(lonely, jnp.nan, x), g)
  want = derive(path, graph, wa, wb, alpha, eta, jnp.where(lonely, 0, x), g)
  close(got, want, 0)
  still = jnp.full_like(x, 0.1)
  y = derive(path, graph, wa, wb, alpha, eta, still, g)[0]
  np.testing.assert_array_equal(y, jnp.zeros_like(y))


def energy(path, graph, w, x):
  """A scalar through the pair that is closed under differentiation."""
  y = jnp.tanh(ell_spmm(graph, w, x, implementation=path))
  e = ell_sddmm(graph, y, x, implementation=path)
  return jnp.sum(e**2)


def test_the_pair_in_the_kernel_to_second_order():
  graph = random_graph(2, 12, 1)
  wa, _, _, _, x, _ = operands(graph, 3)

  def both(path, w, x):
    first = jax.grad(functools.partial(energy, path, graph), (0, 1))
    second = jax.grad(lambda *a: sum(jnp.sum(v**2) for v in first(*a)), (0, 1))
    return first(w, x), second(w, x)

  with jax.enable_x64(True):
    want = jax.jit(both, static_argnums=0)('xla', *arrays((wa, x), 'float64'))
  run = jax.jit(both, static_argnums=0)
  # A gradient of a gradient adds many terms: a hundred roundings.
  close(run('interpret_gpu', *arrays((wa, x))), want, 1e-5)
  text = run.lower('interpret_gpu', *arrays((wa, x))).as_text()
  assert 'stablehlo.scatter' not in text


@pytest.mark.parametrize('path', PATHS)
def test_leading_axes_and_rates_of_each_graph(path):
  graph = graph_for(path)
  two = jax.tree.map(lambda x: jnp.stack([x, x]), graph)
  cases = [arrays(operands(graph, 3, seed)) for seed in (0, 1)]
  wa, wb, alpha, eta, x, g = (jnp.stack(v) for v in zip(*cases, strict=True))
  got = derive(path, two, wa, wb, alpha[:, None], eta[:, None], x, g)
  for i, case in enumerate(cases):
    part = jax.tree.map(lambda a, i=i: np.asarray(a[i]), got)
    want = jax.tree.map(np.asarray, derive(path, graph, *case))
    part = [
      a.reshape(b.shape)
      for a, b in zip(jax.tree.leaves(part), jax.tree.leaves(want), strict=True)
    ]
    close(part, want, 1e-6)


def test_default_is_the_plain_one_on_a_cpu():
  graph = random_graph(5)
  args = arrays(operands(graph, 3))
  got, want = derive(None, graph, *args), derive('xla', graph, *args)
  close(got, jax.tree.map(np.asarray, want), 1e-5)


@pytest.mark.parametrize(
  ('nodes', 'chip', 'count'),
  [(2**13, 'H100', 2), (2**13, 'v5e', 0), (2**12, 'H100', 0)],
)
def test_few_features_need_no_kernel(nodes, chip, count):
  edges = jax.ShapeDtypeStruct((nodes, 8), jnp.int32)
  mask = jax.ShapeDtypeStruct((nodes, 8), jnp.bool_)
  w = jax.ShapeDtypeStruct((nodes, 8), jnp.float32)
  x = jax.ShapeDtypeStruct((nodes, 128), jnp.float32)

  def run(nbr, emask, rev, w, x):
    graph = PatchGraph(nbr, emask, rev)
    return ell_sddmm(graph, ell_spmm(graph, w, x), x)

  found = find_kernels(run, (edges, mask, edges, w, x), CHIPS[chip])
  assert len(found) == count


def test_float64_is_refused_by_the_kernels():
  graph = random_graph(5)
  with jax.enable_x64(True):
    args = arrays(operands(graph, 3), 'float64')[:-1]
    with pytest.raises(ValueError, match='float64 is neither'):
      diffuse(graph, *args, implementation='interpret_gpu')
    assert diffuse(graph, *args).dtype == np.float64

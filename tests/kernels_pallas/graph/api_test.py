import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads

import kernels_pallas.graph as K
from kernels_pallas.graph.reference import _block_size
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from tmlib.ops.graph import ell_from_edges, ell_from_grid, to_dense

PATHS = (None, 'xla')


def random_graph(rng, nodes=10, padding=2, slots=3):
  """A random symmetric graph with isolated nodes, padding and empty slots."""
  density = rng.choice([0, 0.1, 0.4])
  pairs = np.argwhere(np.triu(rng.random((nodes, nodes)) < density, 1))
  both = np.concatenate([pairs, pairs[:, ::-1]], 1).reshape(-1, 2)
  return ell_from_edges(both, nodes + padding, slots, truncate=True)


def full_graph(nodes=6):
  """A ring with chords: three neighbours for every node."""
  ring = [(i, (i + 1) % nodes) for i in range(nodes)]
  chords = [(i, i + nodes // 2) for i in range(nodes // 2)]
  edges = np.array(ring + chords)
  return ell_from_edges(np.concatenate([edges, edges[:, ::-1]]), nodes, 3)


def random_args(rng, graph, features, count=2):
  n, k = graph.nbr.shape
  weights = rng.normal(size=(count, n, k))
  gates = rng.normal(size=(count, features))
  return *weights, *gates, rng.normal(size=(n, features))


def laplacian(matrix):
  return matrix - np.diag(matrix.sum(1))


def arrays(*args, dtype=None):
  return tuple(jnp.asarray(a, dtype) for a in args)


# --- values, against dense matrices in float64


@functools.partial(jax.jit, static_argnums=0)
def operations(path, graph, wa, wb, alpha, eta, x, b):
  run = {'implementation': path}
  return (
    K.ell_spmm(graph, wa, x, **run),
    K.ell_sddmm(graph, x, b, **run),
    K.ell_transpose(graph, wa, **run),
    K.ell_diffuse2(graph, wa, wb, alpha, eta, x, **run),
    K.ell_diffuse(graph, wa, alpha, x, **run),
  )


@pytest.mark.parametrize('path', PATHS)
@given(seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_operations_equal_dense_ones(path, seed):
  rng = np.random.default_rng(seed)
  graph = random_graph(rng)
  wa, wb, alpha, eta, x = random_args(rng, graph, 4)
  b = rng.normal(size=x.shape)
  dense_a, dense_b = to_dense(graph, wa), to_dense(graph, wb)
  with jax.enable_x64(True):
    spmm, sddmm, turned, both, single = operations(
      path, graph, *arrays(wa, wb, alpha, eta, x, b)
    )
  np.testing.assert_allclose(spmm, dense_a @ x, atol=1e-12)
  dots = (x @ b.T) * to_dense(graph)
  np.testing.assert_allclose(to_dense(graph, sddmm), dots, atol=1e-12)
  assert not np.asarray(sddmm)[~graph.emask].any()
  np.testing.assert_array_equal(to_dense(graph, turned), dense_a.T)
  assert not np.asarray(turned)[~graph.emask].any()
  want = laplacian(dense_a) @ x * alpha
  np.testing.assert_allclose(single, want, atol=1e-12)
  want = want + laplacian(dense_b) @ x * eta
  np.testing.assert_allclose(both, want, atol=1e-12)


def test_path_of_three_by_hand():
  graph = ell_from_edges([[0, 1], [1, 0], [1, 2], [2, 1]], 3)
  w = jnp.array([[2.0, 9.0], [3.0, 5.0], [7.0, 9.0]])
  x = jnp.array([[1.0, 0.0], [10.0, 1.0], [100.0, 0.0]])
  np.testing.assert_array_equal(
    K.ell_spmm(graph, w, x), [[20, 2], [503, 0], [70, 7]]
  )
  np.testing.assert_array_equal(
    K.ell_sddmm(graph, x, x), [[10, 0], [10, 1000], [1000, 0]]
  )
  np.testing.assert_array_equal(
    K.ell_transpose(graph, w), [[3, 0], [2, 7], [5, 0]]
  )
  np.testing.assert_array_equal(
    K.ell_diffuse2(graph, w, w, 1.0, 0.0, x),
    [[18, 2], [3 * -9 + 5 * 90, -8], [7 * -90, 7]],
  )


def test_a_constant_field_is_exactly_still():
  rng = np.random.default_rng(0)
  graph = full_graph()
  wa, wb, alpha, eta, x = arrays(*random_args(rng, graph, 4), dtype='float32')
  x = jnp.full_like(x, 0.1)
  y = jax.jit(K.ell_diffuse2)(graph, wa, wb, alpha, eta, x)
  np.testing.assert_array_equal(y, jnp.zeros_like(x))


@pytest.mark.parametrize('nodes', [8209, 8192])
def test_rows_beyond_one_block(nodes):
  """Inner products run by blocks of nodes; 8209 is prime."""
  rng = np.random.default_rng(1)
  edges = np.stack([np.arange(nodes), np.roll(np.arange(nodes), 1)], 1)
  graph = ell_from_edges(np.concatenate([edges, edges[:, ::-1]]), nodes)
  x, g = rng.normal(size=(2, nodes, 64))
  w = rng.normal(size=graph.nbr.shape)

  @jax.jit
  def run(graph, w, alpha, x, g):
    f = lambda w, alpha: K.ell_diffuse2(graph, w, w, alpha, 0.0, x)
    return K.ell_sddmm(graph, g, x), *jax.vjp(f, w, alpha)[1](g)

  dots, dw, dalpha = run(graph, *arrays(w, np.ones(64), x, g, dtype='float32'))
  near = x[graph.nbr]
  np.testing.assert_allclose(dots, np.einsum('nd,nkd->nk', g, near), atol=2e-4)
  product = g[:, None] * (near - x[:, None])
  np.testing.assert_allclose(dw, product.sum(-1), atol=2e-4)
  want = np.einsum('nk,nkd->d', w, product)
  np.testing.assert_allclose(dalpha, want, atol=2e-2, rtol=1e-4)


@pytest.mark.parametrize('n', [1, 7, 64, 421, 13_472, 8209])
@pytest.mark.parametrize('limit', [1, 500, 10**9])
def test_block_sizes_prefer_divisors(n, limit):
  block = _block_size(n, limit)
  assert 1 <= block <= max(min(n, limit), min(n, 64))
  if n == 13_472 and limit == 500:
    assert block == 421


# --- derivatives


@pytest.mark.parametrize('path', PATHS)
def test_gradients_equal_jacobians_of_dense_operations(path):
  rng = np.random.default_rng(3)
  graph = random_graph(rng, 6, 1)
  assert graph.emask.any()
  assert not graph.emask.all()
  row, slot = np.nonzero(graph.emask)
  column = graph.nbr[row, slot]

  def dense(w):
    return jnp.zeros((7, 7)).at[row, column].set(w[row, slot])

  def table(matrix):
    empty = jnp.zeros(graph.nbr.shape)
    return empty.at[row, slot].set(matrix[row, column])

  def dense_operations(wa, wb, alpha, eta, x, b):
    flow = lambda w: dense(w) @ x - dense(w).sum(1)[:, None] * x
    return (
      dense(wa) @ x,
      table(x @ b.T),
      table(dense(wa).T),
      flow(wa) * alpha[None] + flow(wb) * eta[None],
      flow(wa) * alpha[None],
    )

  with jax.enable_x64(True):
    args = *random_args(rng, graph, 3), rng.normal(size=(7, 3))
    ours = functools.partial(operations, path, graph)
    jacobian = lambda f: jax.jit(jax.jacrev(f, range(6)))(*arrays(*args))
    got, want = jacobian(ours), jacobian(dense_operations)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(g, w, atol=1e-12)


@functools.partial(jax.jit, static_argnums=0)
def energy(path, graph, wa, wb, alpha, eta, x):
  """A scalar through every operation, with no vanishing derivative."""
  run = {'implementation': path}
  y = jnp.tanh(K.ell_diffuse2(graph, wa, wb, alpha, eta, x, **run))
  e = K.ell_sddmm(graph, y, x * x, **run)
  back = K.ell_transpose(graph, jnp.sin(e) * wb, **run)
  z = K.ell_spmm(graph, back, y, **run)
  return (z**3).sum() + (e * wa).sum()


EVERY = tuple(range(2, 7))


def test_second_derivatives_equal_those_without_own_rules():
  rng = np.random.default_rng(3)
  graph = full_graph()
  with jax.enable_x64(True):
    args = arrays(*random_args(rng, graph, 2))
    gradient = jax.grad(energy, EVERY)
    got = jax.jit(jax.jacrev(gradient, EVERY), static_argnums=0)(
      None, graph, *args
    )
    # Forward over reverse: none of our rules takes part.
    want = jax.jit(jax.jacfwd(gradient, EVERY), static_argnums=0)(
      'xla', graph, *args
    )
    assert all(np.abs(w).max() > 1e-3 for w in jax.tree.leaves(want))
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      np.testing.assert_allclose(g, w, atol=1e-9, rtol=1e-9)


def test_third_derivative_against_finite_differences():
  rng = np.random.default_rng(4)
  graph = full_graph()
  with jax.enable_x64(True):
    args = arrays(*random_args(rng, graph, 2))
    step = arrays(*random_args(rng, graph, 2))

    def along(f):
      dot = lambda g: sum(map(jnp.vdot, g, step))
      return lambda *a: dot(jax.grad(f, range(5))(*a))

    f = lambda *a: jnp.sum(K.ell_diffuse2(graph, *a) ** 3)
    second, third = jax.jit(along(along(f))), jax.jit(along(along(along(f))))
    at = lambda t: second(*(a + t * s for a, s in zip(args, step, strict=True)))
    h = 1e-5
    want = (at(h) - at(-h)) / (2 * h)
    np.testing.assert_allclose(third(*args), want, rtol=1e-6)


@pytest.mark.parametrize(
  ('path', 'modes'), [(None, ('rev',)), ('xla', ('fwd', 'rev'))]
)
def test_derivatives_against_finite_differences(path, modes):
  rng = np.random.default_rng(5)
  graph = full_graph()
  with jax.enable_x64(True):
    args = arrays(*random_args(rng, graph, 2))
    f = functools.partial(energy, path, graph)
    check_grads(f, args, order=1, modes=modes, rtol=1e-5, atol=1e-5)


def test_own_rules_have_no_scatter():
  rng = np.random.default_rng(6)
  graph = full_graph()
  args = arrays(*random_args(rng, graph, 2), dtype='float32')

  def text(path):
    first = jax.grad(functools.partial(energy, path, graph), range(5))
    square = lambda *a: sum(jnp.sum(v**2) for v in first(*a))
    return jax.jit(jax.grad(square, range(5))).lower(*args).as_text()

  assert 'scatter' not in text(None)
  assert 'scatter' in text('xla')


# --- padding


def test_a_graph_without_slots_sums_to_zero():
  graph = ell_from_edges(np.zeros((0, 2), int), 5, 1)
  graph = jax.tree.map(lambda leaf: leaf[:, :0], graph)
  got = K.ell_spmm(graph, jnp.zeros((5, 0)), jnp.ones((5, 2)))
  np.testing.assert_array_equal(got, np.zeros((5, 2)))


@pytest.mark.parametrize('path', PATHS)
def test_nan_in_padding_and_empty_slots_is_harmless(path):
  rng = np.random.default_rng(3)
  graph = random_graph(rng, 6, 3)
  assert graph.emask.any()
  wa, wb, alpha, eta, x = arrays(*random_args(rng, graph, 4), dtype='float32')
  empty = ~jnp.asarray(graph.emask)
  padded = (jnp.arange(9) >= 6)[:, None]

  @jax.jit
  def run(hole):
    fill = lambda where, a: jnp.where(where, hole, a)
    args = fill(empty, wa), fill(empty, wb), alpha, eta, fill(padded, x)
    f = lambda *a: operations(path, graph, *a, a[-1] * 2)
    values, vjp = jax.vjp(f, *args)
    return values, vjp(jax.tree.map(jnp.ones_like, values))

  got, want = run(jnp.nan), run(0.0)
  assert not any(np.asarray(y)[6:].any() for y in got[0])
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(g, w)


# --- batches, vmap, dtypes


def stack(trees):
  return jax.tree.map(lambda *a: jnp.stack([jnp.asarray(v) for v in a]), *trees)


@pytest.mark.parametrize('path', PATHS)
def test_leading_axes_equal_a_loop_and_vmap(path):
  rng = np.random.default_rng(8)
  graphs = [random_graph(rng) for _ in range(6)]
  cases = [random_args(rng, g, 3) for g in graphs]
  value = jax.jit(jax.value_and_grad(energy, EVERY), static_argnums=0)
  with jax.enable_x64(True):
    graph = stack(graphs)
    wa, wb, _, _, x = stack(cases)
    alpha, eta = arrays(*cases[0][2:4])
    deep = lambda a: a.reshape(2, 3, *a.shape[1:])
    args = jax.tree.map(deep, (graph, wa, wb)), alpha, eta, deep(x)
    total, grads = value(path, *args[0], *args[1:])
    each = jax.jit(
      jax.vmap(functools.partial(value, path), in_axes=(0, 0, 0, None, None, 0))
    )(graph, wa, wb, alpha, eta, x)
    loop = stack(
      [
        value(path, g, *arrays(*case[:2]), alpha, eta, x[i])
        for i, (g, case) in enumerate(zip(graphs, cases, strict=True))
      ]
    )
  close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-9)
  jax.tree.map(close, each, loop)
  loop = jax.tree.map(np.asarray, loop)
  close(total, loop[0].sum())
  for i, (got, want) in enumerate(zip(grads, loop[1], strict=True)):
    close(got, want.sum(0) if i in (2, 3) else deep(want))


def test_one_graph_serves_many_inputs_by_vmap():
  rng = np.random.default_rng(9)
  graph = random_graph(rng, 9, 0)
  w, x = arrays(
    rng.normal(size=(4, *graph.nbr.shape)),
    rng.normal(size=(4, 9, 3)),
    dtype='float32',
  )
  got = jax.vmap(functools.partial(K.ell_spmm, graph))(w, x)
  want = [to_dense(graph, np.asarray(v)) @ y for v, y in zip(w, x, strict=True)]
  np.testing.assert_allclose(got, np.stack(want), atol=1e-5)
  with pytest.raises(ValueError, match='jax.vmap'):
    K.ell_spmm(graph, w, x)


def test_rates_per_batch_entry_and_scalars():
  rng = np.random.default_rng(10)
  graph = full_graph()
  two = stack([graph, graph])
  wa, wb, alpha, eta, x = arrays(*random_args(rng, graph, 3), dtype='float32')
  twice = lambda a: jnp.stack([a, a])
  rates = jnp.stack([alpha, 2 * alpha])[:, None]
  diffuse = jax.jit(K.ell_diffuse2)
  got = diffuse(two, twice(wa), twice(wb), rates, 0.5, twice(x))
  for i in (0, 1):
    want = diffuse(graph, wa, wb, (i + 1) * alpha, jnp.full(3, 0.5), x)
    np.testing.assert_allclose(got[i], want, atol=1e-6)


def test_low_precision_sums_in_float32():
  # Node 0 sums 256 + 1 + 1; a bfloat16 accumulator would stay at 256.
  graph = full_graph()
  half = jnp.bfloat16
  x = jnp.array([[0], [256], [0], [1], [0], [1]], half)
  w = jnp.ones((6, 3), half)
  y, vjp = jax.vjp(jax.jit(functools.partial(K.ell_spmm, graph)), w, x)
  assert y.dtype == half
  assert float(y[0, 0]) == 258
  assert [g.dtype for g in vjp(y)] == [half, half]
  many = jnp.ones((6, 300), half)
  dots = jax.jit(functools.partial(K.ell_sddmm, graph))(many, many)
  assert dots.dtype == half
  assert float(dots[0, 0]) == 300

  def total(alpha, eta, x):
    return K.ell_diffuse2(graph, w, w, alpha, eta, x).astype('float32').sum()

  rates = jnp.ones(1), jnp.float32(1)
  grads = jax.jit(jax.grad(total, (0, 1, 2)))(*rates, x)
  assert [g.dtype for g in grads] == [jnp.float32, jnp.float32, half]


def test_same_numbers_on_every_run():
  rng = np.random.default_rng(11)
  graph = ell_from_grid(tissue_mask(40, 40, 700))
  args = arrays(*random_args(rng, graph, 16), dtype='float32')
  f = jax.jit(jax.grad(functools.partial(energy, None, graph), (0, 1, 4)))
  for one, two in zip(f(*args), f(*args), strict=True):
    np.testing.assert_array_equal(one, two)


# --- errors


def tiny():
  graph = full_graph()
  return graph, jnp.ones((6, 3)), jnp.ones((6, 2))


@pytest.mark.parametrize(
  ('path', 'match'),
  [
    ('pallas', 'has no CPU body'),
    ('interpret', 'neither a RasterGraph nor a TiledGraph'),
    ('fast', "implementation='fast' must be one of"),
  ],
)
def test_implementations_that_can_not_be(path, match):
  graph, w, x = tiny()
  for call in (
    lambda: K.ell_spmm(graph, w, x, implementation=path),
    lambda: K.ell_sddmm(graph, x, x, implementation=path),
    lambda: K.ell_transpose(graph, w, implementation=path),
    lambda: K.ell_diffuse2(graph, w, w, 1, 1, x, implementation=path),
    lambda: K.diffuse(graph, w, w, 1, 1, x, implementation=path),
    lambda: K.ell_diffuse(graph, w, 1, x, implementation=path),
  ):
    with pytest.raises(ValueError, match=match):
      call()


@pytest.mark.parametrize(
  ('call', 'error', 'match'),
  [
    (lambda g, w, x: K.ell_spmm(g, w[:4], x), ValueError, r'w has shape \(4'),
    (lambda g, w, x: K.ell_spmm(g, w, x[:4]), ValueError, 'x has shape'),
    (lambda g, w, x: K.ell_spmm(g, w, x[:, 0]), ValueError, 'x has shape'),
    (lambda g, w, x: K.ell_spmm((g, w), w, x), TypeError, 'PatchGraph'),
    (lambda g, w, x: K.ell_spmm(g, w, x > 0), TypeError, 'x has dtype bool'),
    (lambda g, w, x: K.ell_sddmm(g, x, x[:, :1]), ValueError, 'b has shape'),
    (lambda g, w, x: K.ell_diffuse(g, w[:4], 1, x), ValueError, 'w has shape'),
    (
      lambda g, w, x: K.ell_diffuse2(g, w, w, jnp.ones(3), 1, x),
      ValueError,
      'alpha has shape',
    ),
    (
      lambda g, w, x: K.ell_diffuse2(g, w, w, 1, jnp.ones((6, 2)), x),
      ValueError,
      'eta has shape .* belongs into the weights',
    ),
  ],
)
def test_errors_name_the_argument(call, error, match):
  with pytest.raises(error, match=match):
    call(*tiny())


# --- shapes


@pytest.mark.parametrize('name', ['tiny', 'biopsy', 'resection'])
def test_named_shapes_look_like_tissue(name):
  shape = SHAPES[name]
  ij = tissue_mask(*shape[:3])
  assert ij.shape == (shape.patches, 2)
  graph = ell_from_grid(ij)
  assert graph.emask.sum(1).mean() > (3 if name == 'tiny' else 5.5)


def test_tissue_mask_rejects_more_patches_than_cells():
  with pytest.raises(ValueError, match=r'patches=7 must lie in \[0, 6\]'):
    tissue_mask(2, 3, 7)

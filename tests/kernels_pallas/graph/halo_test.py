import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels_pallas.graph as K
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from tmlib.ops.graph import ell_from_edges, ell_from_grid

COLLECTIVES = ('all-gather', 'all-reduce', 'collective-permute', 'all-to-all')


def mesh_of(devices):
  return Mesh(np.ravel(devices), ('data',), axis_types=(AxisType.Auto,))


def count(compiled):
  text = compiled.as_text()
  return {c: len(re.findall(rf' {c}(-start)?\(', text)) for c in COLLECTIVES}


def grid(rows, columns):
  ij = np.stack(np.meshgrid(range(rows), range(columns), indexing='ij'), -1)
  # Four neighbours compile in half the time of eight.
  return ell_from_grid(ij.reshape(-1, 2), connectivity=4)


def diffuse(graph, wa, wb, alpha, x):
  return K.ell_diffuse2(graph, wa, wb, alpha, 0.5, x)


def everything(graph, wa, wb, alpha, x):
  """Every operation, forward and backward."""
  y, vjp = jax.vjp(functools.partial(diffuse, graph), wa, wb, alpha, x)
  e, edge_vjp = jax.vjp(functools.partial(K.ell_sddmm, graph), y, x)
  z = K.ell_spmm(graph, K.ell_transpose(graph, e), y)
  return (y, z), (e, *vjp(z)[:2]), (vjp(z)[3], *edge_vjp(e)), vjp(z)[2]


def shapes_of(graph, *lead, features=8):
  struct = lambda *a, dtype='float32': jax.ShapeDtypeStruct(a, dtype)
  table = lambda a: struct(*lead, *a.shape, dtype=a.dtype)
  w = struct(*lead, *graph.nbr.shape)
  x = struct(*lead, graph.num_nodes, features)
  return jax.tree.map(table, graph), w, w, struct(features), x


def compile_batch(mesh, spec, f, args, platform='cpu'):
  split, whole = NamedSharding(mesh, spec), NamedSharding(mesh, P())
  place = lambda a: whole if len(a.shape) == 1 else split
  outputs = jax.tree.map(place, jax.eval_shape(f, *args))
  inputs = jax.tree.map(place, args)
  jitted = jax.jit(f, in_shardings=inputs, out_shardings=outputs)
  return jitted.trace(*args).lower(lowering_platforms=(platform,)).compile()


def compile_nodes(mesh, graph, platform='cpu', f=everything, features=8):
  split = K.shard_graph(graph, mesh.size)
  rows, whole = P('data'), P()
  inputs = (rows, rows, rows, whole, rows)
  sharded = jax.shard_map(
    f, mesh=mesh, in_specs=inputs, out_specs=rows, check_vma=False
  )
  args = shapes_of(split, features=features)
  place = lambda a: NamedSharding(mesh, whole if len(a.shape) == 1 else rows)
  jitted = jax.jit(sharded, in_shardings=jax.tree.map(place, args))
  return jitted.trace(*args).lower(lowering_platforms=(platform,)).compile()


# --- the split graph


def test_neighbours_in_the_extended_index_space():
  # Eight nodes in a row, two shards: each borrows one row.
  ends = np.stack([np.arange(7), np.arange(1, 8)], 1)
  graph = ell_from_edges(np.concatenate([ends, ends[:, ::-1]]), 8)
  split = K.shard_graph(graph, 2)
  assert (split.halo, split.axis_name) == (1, 'data')
  one = [[2, 1], [1, 3], [2, 4], [3, 5]]
  two = [[0, 2], [1, 3], [2, 4], [3, 4]]
  np.testing.assert_array_equal(split.nbr, one + two)
  np.testing.assert_array_equal(split.rev, graph.rev)


def test_a_graph_without_crossing_edges_needs_no_halo():
  graph = ell_from_edges([[0, 1], [1, 0], [2, 3], [3, 2]], 4)
  assert K.shard_graph(graph, 2).halo == 0


def test_far_neighbours_are_an_error_that_names_the_node():
  graph = ell_from_edges([[0, 7], [7, 0]], 8)
  with pytest.raises(
    ValueError, match='node 0 .* 6 rows beyond .* fewer shards'
  ):
    K.shard_graph(graph, 4)


def test_shards_must_divide_the_nodes():
  graph = grid(3, 3)
  with pytest.raises(ValueError, match='shards=2 must be positive and divide'):
    K.shard_graph(graph, 2)
  with pytest.raises(ValueError, match='already split'):
    K.shard_graph(K.shard_graph(graph, 3), 3)


@pytest.mark.parametrize('width', [-1, 5])
def test_a_halo_is_no_wider_than_a_shard(width):
  with pytest.raises(ValueError, match=r'must lie in \[0, 4\]'):
    K.halo_exchange(jnp.ones((4, 2)), 'data', width)


@pytest.mark.parametrize('width', [0, 1, 3])
def test_halo_exchange_borrows_the_border_rows(width):
  mesh = mesh_of(jax.devices()[:4])
  x = jnp.arange(12.0)[:, None] + 1
  f = functools.partial(K.halo_exchange, axis_name='data', width=width)
  run = jax.shard_map(
    f, mesh=mesh, in_specs=P('data'), out_specs=P('data'), check_vma=False
  )
  got = np.asarray(jax.jit(run)(x)).reshape(4, -1)
  padded = np.pad(np.arange(12.0) + 1, width)
  want = [padded[3 * s : 3 * s + 3 + 2 * width] for s in range(4)]
  np.testing.assert_array_equal(got, want)


# --- one graph split along its nodes equals the whole one


def node_case(lead=()):
  rng = np.random.default_rng(0)
  shape = SHAPES['tiny']
  ij = tissue_mask(*shape[:3])[:68]
  graph = ell_from_grid(ij, connectivity=4)
  n, k = graph.nbr.shape
  normal = lambda *s: jnp.asarray(rng.normal(size=s))
  w = normal(2, *lead, n, k)
  args = w[0], w[1], normal(3), normal(*lead, n, 3)
  repeat = lambda a: jnp.broadcast_to(a, (*lead, *a.shape))
  return graph, jax.tree.map(repeat, graph), args


def loss(graph, wa, wb, alpha, x):
  y = jnp.tanh(diffuse(graph, wa, wb, alpha, x))
  e = K.ell_sddmm(graph, y, x)
  z = K.ell_spmm(graph, K.ell_transpose(graph, e), y)
  return (z * x).sum() + (e**2).sum()


def second(graph, *args):
  """A loss of gradients, so that its gradient is of second order."""
  wa, x = jax.grad(loss, (1, 4))(graph, *args)
  return (wa**2).sum() + (x**3).sum()


@pytest.mark.parametrize('lead', [(), (2,)])
def test_node_sharded_equals_whole(lead):
  mesh = mesh_of(jax.devices()[:4])
  rows = P(*[None] * len(lead), 'data')
  specs = (rows, rows, P(), rows)
  with jax.enable_x64(True):
    one, graph, args = node_case(lead)
    split = K.shard_graph(graph, 4)
    assert 0 < split.halo <= 17
    assert one.emask.any()

    def local(graph, *args):
      """Values, gradients and gradients of the second order, per shard."""
      value, grads = jax.value_and_grad(loss, (1, 2, 3, 4))(graph, *args)
      if lead:
        return value, grads, grads
      seconds = jax.grad(functools.partial(second, graph), (0, 1, 2, 3))(*args)
      return value, grads, seconds

    def per_shard(graph, *args):
      value, grads, seconds = local(graph, *args)
      total = functools.partial(jax.lax.psum, axis_name='data')
      join = lambda g: (g[0], g[1], total(g[2]), g[3])
      return total(value), join(grads), join(seconds)

    sharded = jax.shard_map(
      per_shard,
      mesh=mesh,
      in_specs=(rows, *specs),
      out_specs=(P(), specs, specs),
      check_vma=False,
    )
    got = jax.jit(sharded)(split, *args)
    want = jax.jit(local)(graph, *args)
  for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert np.abs(w).max() > 1e-3
    np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


def test_plain_path_differentiates_through_the_exchange():
  """Its derivatives come from jax, through the transposed permutes."""
  mesh = mesh_of(jax.devices()[:4])
  rows = P('data')
  with jax.enable_x64(True):
    graph, _, args = node_case()
    split = K.shard_graph(graph, 4)
    run = lambda path: lambda g, w, x: K.ell_spmm(g, w, x, implementation=path)

    def outer(w, x, path):
      f = jax.shard_map(
        run(path),
        mesh=mesh,
        in_specs=(rows,) * 3,
        out_specs=rows,
        check_vma=False,
      )
      return (f(split, w, x) ** 3).sum()

    for path in (None, 'xla'):
      got = jax.jit(jax.grad(functools.partial(outer, path=path), (0, 1)))(
        args[0], args[3]
      )
      want = jax.grad(
        lambda w, x: (K.ell_spmm(graph, w, x) ** 3).sum(), (0, 1)
      )(args[0], args[3])
      for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-9, atol=1e-9)


# --- what the compilers make of it


def test_a_split_batch_is_never_gathered():
  mesh = mesh_of(jax.devices()[:4])
  graph = grid(8, 8)
  for lead, spec in (((8,), P('data')), ((2, 4), P(None, 'data'))):
    found = count(
      compile_batch(mesh, spec, everything, shapes_of(graph, *lead))
    )
    # The gradient of the shared rates is a sum over the batch.
    assert found == dict.fromkeys(COLLECTIVES, 0) | {'all-reduce': 1}


def test_a_split_batch_is_never_gathered_under_vmap():
  mesh = mesh_of(jax.devices()[:4])
  each = jax.vmap(everything, (0, 0, 0, None, 0))
  f = lambda *args: each(*args)[:3]
  found = count(compile_batch(mesh, P('data'), f, shapes_of(grid(8, 8), 8)))
  assert found == dict.fromkeys(COLLECTIVES, 0)


def test_split_nodes_use_permutes_only():
  mesh = mesh_of(jax.devices()[:4])
  found = count(compile_nodes(mesh, grid(32, 8)))
  assert found.pop('collective-permute') > 0
  assert not any(found.values())


def topology(name):
  topologies = pytest.importorskip('jax.experimental.topologies')
  pytest.importorskip('libtpu', reason='needs libtpu to compile for a TPU')
  return mesh_of(topologies.get_topology_desc(name, 'tpu').devices)


@pytest.mark.aot
def test_tpu_never_gathers_a_split_batch():
  mesh = topology('v5e:2x2')
  args = shapes_of(grid(16, 16), 8)
  for f in (
    everything,
    lambda *a: jax.vmap(everything, (0, 0, 0, None, 0))(*a)[:3],
  ):
    found = count(compile_batch(mesh, P('data'), f, args, 'tpu'))
    assert found.pop('all-reduce') <= 1
    assert not any(found.values())


@pytest.mark.aot
@pytest.mark.parametrize('name', ['v5e:2x2', 'v5e:4x4'])
def test_tpu_splits_nodes_by_permutes_only(name):
  found = count(compile_nodes(topology(name), grid(64, 16), 'tpu'))
  assert found.pop('collective-permute') > 0
  assert not any(found.values())


def test_a_static_field_keeps_shard_specs_short():
  split = K.shard_graph(grid(4, 4), 2)
  assert len(jax.tree.leaves(split)) == 3
  wide = dataclasses.replace(split, halo=split.halo + 1)
  assert jax.tree.structure(wide) != jax.tree.structure(split)

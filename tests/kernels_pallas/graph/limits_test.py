"""Graphs that are not: edges to nowhere, empty arrays, other machines."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels_pallas.graph as K
from kernels_pallas.graph.shapes import tissue_mask
from tmlib.ops.graph import ell_from_grid


def tiny():
  graph = ell_from_grid(np.array([[0, 0], [0, 1], [1, 1], [2, 1], [2, 2]]))
  n, k = graph.nbr.shape
  rng = np.random.default_rng(0)
  single = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  return graph, single(n, k), single(n, 3)


def changed(graph, **leaf):
  """All edges of a leaf become that number."""
  ((name, value),) = leaf.items()
  old = np.asarray(getattr(graph, name))
  new = np.where(np.asarray(graph.emask), value, old)
  return dataclasses.replace(graph, **{name: new})


@pytest.mark.parametrize(
  ('change', 'error', 'match'),
  [
    (lambda g: changed(g, nbr=9), ValueError, r'graph.nbr\[0, .\] is 9'),
    (lambda g: changed(g, nbr=-1), ValueError, r'graph.nbr\[0, .\] is -1'),
    (lambda g: changed(g, rev=99), ValueError, 'graph.rev.* is 99'),
    (lambda g: changed(g, emask=1), TypeError, 'graph.emask is int'),
    (lambda g: changed(g, nbr=1.5), TypeError, 'graph.nbr is float'),
    (
      lambda g: K.PatchGraph(np.asarray(g.nbr).tolist(), g.emask, g.rev),  # pyright: ignore
      TypeError,
      'graph.nbr is list',
    ),
    (
      lambda g: dataclasses.replace(g, rev=g.rev[:, :1]),
      ValueError,
      'graph.rev has shape',
    ),
  ],
)
def test_a_broken_table_is_named(change, error, match):
  graph, w, x = tiny()
  broken = change(graph)
  for call in (
    lambda: K.ell_spmm(broken, w, x),
    lambda: K.ell_sddmm(broken, x, x),
    lambda: K.diffuse(broken, w, w, 1, 1, x),
  ):
    with pytest.raises(error, match=match):
      call()


def test_edges_out_of_range_are_clamped_under_jit():
  graph, w, x = tiny()
  call = jax.jit(
    lambda nbr: K.ell_spmm(dataclasses.replace(graph, nbr=nbr), w, x)
  )
  far, last = changed(graph, nbr=99), changed(graph, nbr=len(x) - 1)
  np.testing.assert_array_equal(call(far.nbr), call(last.nbr))


@pytest.mark.parametrize('path', [None, 'xla', 'interpret_gpu'])
def test_empty_arrays_give_empty_sums(path):
  graph, w, x = tiny()
  how = {'implementation': path}
  cut = lambda nodes, slots: jax.tree.map(lambda t: t[:nodes, :slots], graph)
  for g, rows in ((cut(0, graph.num_slots), 0), (cut(len(x), 0), len(x))):
    few, mine = w[:rows, : g.num_slots], x[:rows]
    np.testing.assert_array_equal(K.ell_spmm(g, few, mine, **how), 0 * mine)
    assert K.ell_sddmm(g, mine, mine, **how).shape == few.shape
    step = lambda x, g=g, w=few: K.diffuse(g, w, w, 0.1, 0.1, x, **how).sum()
    np.testing.assert_array_equal(jax.grad(step)(mine), 0 * mine)
  assert K.ell_spmm(graph, w, x[:, :0], **how).shape == (len(x), 0)
  none = K.ell_sddmm(graph, x[:, :0], x[:, :0], **how)
  np.testing.assert_array_equal(none, 0 * w)


def test_the_body_is_chosen_at_lowering():
  layout = K.raster_layout(tissue_mask(8, 8, 40))
  nodes = layout.graph.num_nodes
  w, x = jnp.ones((nodes, 8)), jnp.ones((nodes, 128))

  def text(graph):
    call = lambda w, x: K.diffuse(graph, w, w, 1, 1, x, implementation='pallas')
    return (
      jax.jit(call).trace(w, x).lower(lowering_platforms=('tpu',)).as_text()
    )

  assert 'tpu_custom_call' in text(layout.graph)
  leaves = (getattr(layout.graph, name) for name in ('nbr', 'emask', 'rev'))
  with pytest.raises(ValueError, match='neither a RasterGraph'):
    text(K.PatchGraph(*leaves))

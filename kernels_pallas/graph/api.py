"""Message passing on patch graphs: weighted sums and edge inner products.

Axes: N nodes, K slots per node, D features. Leading batch axes [...] are part
of the interface and must agree in all arguments. Where `graph.axis_name` is
set the nodes of one graph are split over that mesh axis, and these functions
must be called inside `shard_map`.

`implementation`: None is Pallas on GPU, and on TPU for a `RasterGraph` or a
`TiledGraph`, and jax.numpy elsewhere, decided when the program is compiled,
with the same derivatives, of any order in reverse mode. The `ell_` functions
are jax.numpy everywhere for less than 2^20 features: what a body saves there
(it reads each row once, where XLA's loops over slots and blocks read it once
per slot) is less than what it costs to trace it in every program. "pallas"
insists on Pallas; "xla" (or "reference") is plain jax.numpy without rules of
its own, which also has forward mode; "interpret" and "interpret_gpu" run the
TPU's and the GPU's body in Pallas' interpreter. A TPU has a body for these two
graphs only, and none for inner products.

Under a mesh (`jax.set_mesh`) whose axes are of type Auto, the Pallas bodies
divide the first leading axis over 'data' where it divides it.

Call them inside `jax.jit`, where the loop over slots becomes one fused loop.
XLA on a CPU fuses a plain sum over the result with its gathers, many times
slower, and so it does with the gradient of a factor outside, which is such a
sum: put factors into the weights or the rates of `ell_diffuse`.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.common.checks import check_implementation, known
from kernels_pallas.graph import block_sparse, reference, stencil, vjp
from kernels_pallas.graph.patch_graph import PatchGraph

__all__ = [
  'check_edges',
  'diffuse',
  'ell_diffuse',
  'ell_diffuse2',
  'ell_sddmm',
  'ell_spmm',
  'ell_transpose',
]


def _path(
  name: str, implementation: str | None, graph: PatchGraph, *arrays: jax.Array
) -> Callable[..., Any]:
  """The function of that name; after the checks of its arguments."""
  if implementation != 'plain':
    check_implementation(implementation, vjp.refusal(graph, *arrays))
  if implementation in ('xla', 'reference'):
    return getattr(reference, name)
  on_tpu = stencil.takes(graph) or block_sparse.takes(graph)
  if implementation == 'interpret' and not on_tpu:
    raise ValueError(
      'implementation="interpret": the TPU has no body for a graph that is '
      'neither a RasterGraph nor a TiledGraph; make one with raster_layout or '
      'tiled_layout, or use None or "xla"'
    )
  return functools.partial(getattr(vjp, name), implementation)


# Numbers of an array of features that are worth a body of its own.
_LARGE = 2**20


def _own(implementation: str | None, x: jax.Array) -> str | None:
  """Of an `ell_` function of the features x."""
  small = implementation is None and x.size < _LARGE
  return 'plain' if small else implementation


def _check_table(graph: PatchGraph) -> None:
  """Leaves of a graph: shapes, dtypes and, where they are known, values."""
  if not isinstance(graph, PatchGraph):
    raise TypeError(
      f'graph must be a PatchGraph, got {type(graph).__name__}; build one '
      'with tmlib.ops.graph.ell_from_grid'
    )
  kinds = {'nbr': jnp.integer, 'emask': jnp.bool_, 'rev': jnp.integer}
  for name, kind in kinds.items():
    leaf = getattr(graph, name)
    if not hasattr(leaf, 'dtype') or not jnp.issubdtype(leaf.dtype, kind):
      what = getattr(leaf, 'dtype', type(leaf).__name__)
      want = 'bool' if name == 'emask' else 'integer'
      raise TypeError(f'graph.{name} is {what}, expected an array of {want}')
    if leaf.ndim < 2 or leaf.shape != graph.nbr.shape:
      raise ValueError(
        f'graph.{name} has shape {leaf.shape}, expected [..., N, K] like '
        f'graph.nbr {graph.nbr.shape}'
      )
  check_edges(graph)


def check_edges(graph: PatchGraph) -> None:
  """Raises if an edge is known to lead nowhere.

  Empty slots are not looked at. `tmlib.ops.graph.check_graph` checks all that a
  graph promises.

  Args:
    graph: the graph; where its leaves are traced, nothing is checked, and edges
      are clamped to the nodes.

  Raises:
    ValueError: on a neighbour or a slot of an opposite edge out of range.
  """
  emask = known(graph.emask)
  ends = graph.num_nodes + 2 * graph.halo, graph.num_slots
  for name, end in zip(('nbr', 'rev'), ends, strict=True):
    values = known(getattr(graph, name))
    if emask is None or values is None:
      continue
    wrong = emask & ((values < 0) | (values >= end))
    if wrong.any():
      where = np.unravel_index(wrong.argmax(), wrong.shape)
      place = list(map(int, where))
      raise ValueError(
        f'graph.{name}{place} is {values[where]}, expected [0, {end}); set '
        'graph.emask to False where there is no edge'
      )


def _check(graph: PatchGraph, **arrays: jax.Array) -> bool:
  """Whether there is anything to do.

  Edge arrays are called w*, node arrays anything else.
  """
  _check_table(graph)
  for name, array in arrays.items():
    edges = name.startswith('w')
    lead = graph.nbr.shape if edges else graph.nbr.shape[:-1]
    rank = graph.nbr.ndim
    if array.ndim != rank or array.shape[: len(lead)] != lead:
      want = '[..., N, K]' if edges else '[..., N, D]'
      raise ValueError(
        f'{name} has shape {array.shape}, expected {want} with the graph '
        f'table {graph.nbr.shape} [..., N, K]; use jax.vmap to share one '
        'graph between several inputs'
      )
    if not jnp.issubdtype(array.dtype, jnp.floating):
      raise TypeError(
        f'{name} has dtype {array.dtype}, expected a floating dtype'
      )
  return all(x.size for x in (graph.nbr, *arrays.values()))


def ell_spmm(
  graph: PatchGraph,
  w: jax.Array,
  x: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  r"""Weighted sum over neighbours: y_i = sum_k w_ik x[nbr_ik].

  Sums run in float32 or wider. Empty slots count as zero whatever they hold,
  and a node without neighbours gets zero.

  Args:
    graph: the graph, table [..., N, K].
    w: [..., N, K], float, a weight per directed edge.
    x: [..., N, D], float, features.
    implementation: see the module docstring.

  Returns:
    [..., N, D], dtype of x.

  Raises:
    ValueError: on shapes that disagree, edges out of range as far as they are
      known, or an unknown implementation.
    TypeError: on anything but a PatchGraph and floating arrays.
  """
  w, x = jnp.asarray(w), jnp.asarray(x)
  if not _check(graph, w=w, x=x):
    check_implementation(implementation, None)
    return jnp.zeros_like(x)
  return _path('spmm', _own(implementation, x), graph, w, x)(graph, w, x)


def ell_sddmm(
  graph: PatchGraph,
  a: jax.Array,
  b: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  r"""Inner products along edges: e_ik = <a_i, b[nbr_ik]>.

  Args:
    graph: the graph, table [..., N, K].
    a: [..., N, D], float, features at the tail of the edge.
    b: [..., N, D], float, features at its head.
    implementation: see the module docstring.

  Returns:
    [..., N, K], the promoted dtype of a and b; zero in empty slots.

  Raises:
    ValueError: on shapes that disagree, edges out of range as far as they are
      known, or an unknown implementation.
    TypeError: on anything but a PatchGraph and floating arrays.
  """
  a, b = jnp.asarray(a), jnp.asarray(b)
  some = _check(graph, a=a, b=b)
  if a.shape != b.shape:
    raise ValueError(f'a has shape {a.shape} but b has shape {b.shape}')
  if not some:
    check_implementation(implementation, None)
    return jnp.zeros(graph.nbr.shape, jnp.result_type(a, b))
  return _path('sddmm', _own(implementation, a), graph, a, b)(graph, a, b)


def ell_transpose(
  graph: PatchGraph, w: jax.Array, *, implementation: str | None = None
) -> jax.Array:
  r"""Weights of the opposite edges: w^T_ik = w[nbr_ik, rev_ik].

  Args:
    graph: the graph, table [..., N, K].
    w: [..., N, K], float, a weight per directed edge.
    implementation: see the module docstring.

  Returns:
    [..., N, K]; zero in empty slots.

  Raises:
    ValueError: on shapes that disagree, edges out of range as far as they are
      known, or an unknown implementation.
    TypeError: on anything but a PatchGraph and floating arrays.
  """
  w = jnp.asarray(w)
  if not _check(graph, w=w):
    check_implementation(implementation, None)
    return jnp.zeros_like(w)
  return _path('transpose', _own(implementation, w), graph, w)(graph, w)


def _gate(rate: jax.Array | float, name: str, x: jax.Array) -> jax.Array:
  """Broadcasts [], [D] or [..., 1, D] to [..., 1, D] over the batch of x."""
  value = jnp.asarray(rate)
  if not jnp.issubdtype(value.dtype, jnp.floating):
    value = value.astype(jnp.float32)
  shape = (*x.shape[:-2], 1, x.shape[-1])
  full = value
  if value.ndim < x.ndim:
    full = value.reshape((1,) * (x.ndim - value.ndim) + value.shape)
  fits = full.ndim == x.ndim and all(
    size in (1, want) for size, want in zip(full.shape, shape, strict=True)
  )
  if not fits:
    raise ValueError(
      f'{name} has shape {value.shape}, expected a scalar, [D] or [..., 1, D] '
      f'for x of shape {x.shape}; a factor that varies over nodes belongs '
      'into the weights'
    )
  return jnp.broadcast_to(full, shape)


def ell_diffuse(
  graph: PatchGraph,
  w: jax.Array,
  alpha: jax.Array | float,
  x: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  r"""Diffusion with a rate per feature, in one pass over the neighbours.

  y_i = alpha * sum_k w_ik (x[nbr_ik] - x_i), where alpha weighs features and *
  is elementwise. A constant field gives exactly zero, and the gradient in alpha
  needs no y. Differentiable in everything but the graph.

  Args:
    graph: the graph, table [..., N, K].
    w: [..., N, K], float, weights.
    alpha: scalar, [D] or [..., 1, D], rate per feature.
    x: [..., N, D], float, features.
    implementation: see the module docstring.

  Returns:
    [..., N, D], dtype of x; zero for a node without neighbours.

  Raises:
    ValueError: on shapes that disagree, edges out of range as far as they are
      known, or an unknown implementation.
    TypeError: on anything but a PatchGraph and floating arrays.
  """
  w, x = jnp.asarray(w), jnp.asarray(x)
  some = _check(graph, w=w, x=x)
  gates = (_gate(alpha, 'alpha', x),)
  if not some:
    check_implementation(implementation, None)
    return jnp.zeros_like(x)
  how = _own(implementation, x)
  path = _path('gated_deltas', how, graph, w, *gates, x)
  return path(graph, (w,), gates, x)


def diffuse(
  graph: PatchGraph,
  wa: jax.Array,
  wb: jax.Array,
  alpha: jax.Array | float,
  eta: jax.Array | float,
  x: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  r"""Two diffusions in one pass over the neighbours.

  y_i = sum_k (alpha * wa_ik + eta * wb_ik) * (x[nbr_ik] - x_i), where alpha and
  eta weigh features and * is elementwise. Differences, not a difference of
  sums: a constant field gives exactly zero. Differentiable in everything but
  the graph.

  Args:
    graph: the graph, table [..., N, K].
    wa: [..., N, K], float, weights of the first diffusion.
    wb: [..., N, K], float, weights of the second one.
    alpha: scalar, [D] or [..., 1, D], rate of the first one per feature.
    eta: scalar, [D] or [..., 1, D], rate of the second one per feature.
    x: [..., N, D], float, features.
    implementation: see the module docstring.

  Returns:
    [..., N, D], dtype of x; zero for a node without neighbours.

  Raises:
    ValueError: on shapes that disagree, edges out of range as far as they are
      known, or an unknown implementation.
    TypeError: on anything but a PatchGraph and floating arrays.
  """
  wa, wb, x = jnp.asarray(wa), jnp.asarray(wb), jnp.asarray(x)
  some = _check(graph, wa=wa, wb=wb, x=x)
  gates = _gate(alpha, 'alpha', x), _gate(eta, 'eta', x)
  if not some:
    check_implementation(implementation, None)
    return jnp.zeros_like(x)
  path = _path('gated_deltas', implementation, graph, wa, wb, *gates, x)
  return path(graph, (wa, wb), gates, x)


def ell_diffuse2(
  graph: PatchGraph,
  wa: jax.Array,
  wb: jax.Array,
  alpha: jax.Array | float,
  eta: jax.Array | float,
  x: jax.Array,
  *,
  implementation: str | None = None,
) -> jax.Array:
  """`diffuse`, whose None is jax.numpy for few features, as of `ell_spmm`."""
  how = _own(implementation, jnp.asarray(x))
  return diffuse(graph, wa, wb, alpha, eta, x, implementation=how)

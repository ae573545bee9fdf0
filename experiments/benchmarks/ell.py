"""Message passing on a patch graph against the usual ways to write it.

  python experiments/benchmarks/ell.py [--graph=positions.csv] [--tiles=4]

All candidates run in one process, in turns, so that they share whatever else
the machine is doing. The table gives medians with quartiles, and the ratio to
ours. Without --graph the patches are a synthetic tissue of the same fill as a
kidney resection. A positions file is a csv whose last two columns are the row
and column of each patch, with one header line.

Axes: N patches, K slots, E directed edges, D features.
"""

import argparse
import functools
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import sparse
from scipy import sparse as scipy_sparse
from scipy import spatial

from kernels_pallas import graph as kernels
from kernels_pallas.graph.shapes import SHAPES, tissue_mask
from tmlib.ops.graph import ell_from_grid, row_major_order

__all__ = ['main']


def positions(path: str | None, tiles: int) -> np.ndarray:
  """[N, 2] positions in row-major order, `tiles` copies side by side."""
  if path is None:
    shape = SHAPES['resection']
    ij = tissue_mask(shape.rows, shape.columns, shape.patches)
  else:
    ij = np.loadtxt(path, delimiter=',', skiprows=1)[:, -2:].astype(int)
  step = [int(np.ptp(ij[:, 0])) + 2, 0]
  ij = np.concatenate([ij + [tile * step[0], 0] for tile in range(tiles)])
  return ij[row_major_order(ij)]


def candidates(graph, w, x) -> dict[str, Callable]:
  """Ways to compute y_i = sum_k w_ik x[nbr_ik] as functions of w and x."""
  n, k = graph.nbr.shape
  row, slot = np.nonzero(graph.emask)
  column = graph.nbr[row, slot]
  table = jax.tree.map(jnp.asarray, graph)
  edges = jnp.asarray(np.stack([row, column], 1))
  flat = jnp.asarray(row * k + slot)

  def gather_all(w, x):
    w = jnp.where(table.emask, w, 0)
    return jnp.einsum('nk,nkd->nd', w, x[table.nbr])

  def segment_sum(w, x):
    messages = w.ravel()[flat][:, None] * x[edges[:, 1]]
    return jax.ops.segment_sum(
      messages, edges[:, 0], n, indices_are_sorted=True
    )

  def bcoo(w, x):
    matrix = sparse.BCOO(
      (w.ravel()[flat], edges),
      shape=(n, n),
      indices_sorted=True,
      unique_indices=True,
    )
    return matrix @ x

  return {
    'ours': functools.partial(kernels.ell_spmm, table),
    'gather all, einsum': gather_all,
    'segment_sum': segment_sum,
    'BCOO': bcoo,
  }


def gradient(f: Callable) -> Callable:
  """(w, x, g) -> cotangents of w and x."""
  return lambda w, x, g: jax.vjp(f, w, x)[1](g)


def measure(
  runs: dict[str, Callable], repeats: int, warmup: int = 2
) -> dict[str, np.ndarray]:
  """Milliseconds of each run, taken in turns."""
  times = {name: [] for name in runs}
  for repeat in range(repeats + warmup):
    for name, run in runs.items():
      start = time.perf_counter()
      jax.block_until_ready(run())
      if repeat >= warmup:
        times[name].append(1e3 * (time.perf_counter() - start))
  return {name: np.asarray(ms) for name, ms in times.items()}


def report(title: str, times: dict[str, np.ndarray]) -> None:
  """Prints a markdown table; the first entry is the base of the ratios."""
  base = np.median(next(iter(times.values())))
  print(f'\n| {title} | median ms | quartiles | fastest | ratio to first |')
  print('| --- | ---: | ---: | ---: | ---: |')
  for name, ms in times.items():
    low, middle, high = np.quantile(ms, (0.25, 0.5, 0.75))
    print(
      f'| {name} | {middle:.2f} | {low:.2f} - {high:.2f} | {ms.min():.2f} '
      f'| {middle / base:.2f} |'
    )


def check(runs: dict[str, Callable]) -> None:
  """All candidates must agree before any of them is timed."""
  results = {name: jax.tree.leaves(run()) for name, run in runs.items()}
  first = next(iter(results.values()))
  for name, leaves in results.items():
    for got, want in zip(leaves, first, strict=True):
      np.testing.assert_allclose(got, want, atol=2e-3, err_msg=name)


def operations(graph, w, x, g) -> dict[str, Callable]:
  """The other operations of the family, forward and backward."""
  table = jax.tree.map(jnp.asarray, graph)
  rate = jnp.full(x.shape[1], 0.5)
  diffuse = lambda w, rate, x: kernels.ell_diffuse2(table, w, w, rate, rate, x)
  back = lambda w, rate, x, g: jax.vjp(diffuse, w, rate, x)[1](g)
  calls = {
    'ell_spmm': (functools.partial(kernels.ell_spmm, table), w, x),
    'ell_sddmm': (functools.partial(kernels.ell_sddmm, table), g, x),
    'ell_transpose': (functools.partial(kernels.ell_transpose, table), w),
    'ell_diffuse': (functools.partial(kernels.ell_diffuse, table), w, rate, x),
    'ell_diffuse2': (diffuse, w, rate, x),
    'ell_diffuse2, gradient in all': (back, w, rate, x, g),
  }
  return {
    name: functools.partial(jax.jit(f), *args)
    for name, (f, *args) in calls.items()
  }


def builders(ij: np.ndarray) -> dict[str, Callable]:
  """Building the graph from positions."""
  return {
    'ell_from_grid (whole table)': lambda: ell_from_grid(ij),
    'scipy KDTree.query_pairs (pairs only)': lambda: spatial.KDTree(
      ij
    ).query_pairs(1.5, output_type='ndarray'),
  }


def main() -> None:
  """Runs everything and prints markdown."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').split('\n')[0])
  parser.add_argument('--graph', help='csv of patch positions')
  parser.add_argument('--tiles', type=int, default=1, help='copies of it')
  parser.add_argument('--dim', type=int, default=128, help='features D')
  parser.add_argument('--repeats', type=int, default=20)
  args = parser.parse_args()
  for name in ('tiles', 'dim', 'repeats'):
    if getattr(args, name) < 1:
      parser.error(f'--{name}={getattr(args, name)} must be at least 1')

  ij = positions(args.graph, args.tiles)
  graph = ell_from_grid(ij)
  rng = np.random.default_rng(0)
  n, k = graph.nbr.shape
  w = jnp.asarray(rng.random((n, k)), jnp.float32)
  w = jnp.where(graph.emask, w, 0)
  x, g = jnp.asarray(rng.normal(size=(2, n, args.dim)), jnp.float32)
  print(
    f'N={n} K={k} E={int(graph.emask.sum())} D={args.dim}, float32, jax '
    f'{jax.__version__} on {jax.devices()[0].device_kind} '
    f'({jax.default_backend()})'
  )

  report('graph build', measure(builders(ij), args.repeats))
  forms = candidates(graph, w, x)
  forward: dict[str, Callable] = {
    name: functools.partial(jax.jit(f), w, x) for name, f in forms.items()
  }
  matrix = scipy_sparse.csr_matrix(
    (
      np.asarray(w)[graph.emask],
      (np.nonzero(graph.emask)[0], graph.nbr[graph.emask]),
    ),
    (n, n),
  )
  dense = np.asarray(x)
  forward['scipy CSR'] = lambda: matrix @ dense
  check(forward)
  report('weighted sum, forward', measure(forward, args.repeats))
  backward = {
    name: functools.partial(jax.jit(gradient(f)), w, x, g)
    for name, f in forms.items()
  }
  plain = functools.partial(
    kernels.ell_spmm,
    jax.tree.map(jnp.asarray, graph),
    implementation='xla',
  )
  backward['ours, derived by jax'] = functools.partial(
    jax.jit(gradient(plain)), w, x, g
  )
  mask = jnp.asarray(graph.emask)
  masked = {
    name: (lambda run=run: (jnp.where(mask, run()[0], 0), run()[1]))
    for name, run in backward.items()
  }
  check(masked)
  report('weighted sum, gradient in w and x', measure(backward, args.repeats))
  report('all operations', measure(operations(graph, w, x, g), args.repeats))


if __name__ == '__main__':
  main()

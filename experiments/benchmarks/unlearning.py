"""Cost of auditing 32 forget points on a 10k-parameter network.

  python experiments/benchmarks/unlearning.py

Prints seconds and curvature products of the matrix-free audit, beside one
dense solve (`--dense`; it needs all retain rows and the [P, P] curvature) and
beside retraining, and the temporary memory of a curvature product for growing
retain sets.
"""

import argparse
import functools
import resource
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from tmlib import unlearning as ul
from tmlib.unlearning import ggn


def _network(features=64, hidden=128, classes=10):
  """Params (P = 64 * 128 + 128 * 10 = 9,472) and the function."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(
    rng.normal(size=shape) / shape[0] ** 0.5, jnp.float32
  )
  params = {'u': draw(features, hidden), 'v': draw(hidden, classes)}
  return params, lambda p, x: jnp.tanh(x @ p['u']) @ p['v']


def _data(n, seed=0):
  rng = np.random.default_rng(seed)
  centre = rng.normal(size=(10, 64))
  y = rng.integers(0, 10, n)
  x = centre[y] + 1.5 * rng.normal(size=(n, 64))
  return {'x': jnp.asarray(x / 8, jnp.float32), 'y': jnp.asarray(y)}


def _seconds(call):
  start = time.perf_counter()
  out = jax.block_until_ready(call())
  return time.perf_counter() - start, out


def _train(apply, params, data, ridge, steps=300):
  """Full-batch momentum on the sum loss divided by n."""
  n = len(data['x'])

  @jax.jit
  def run(params, data):
    def step(carry, _):
      p, m = carry
      g = ggn.objective_gradient(apply, 'softmax', p, data, ridge, None)
      m = jax.tree.map(lambda m, g: 0.9 * m + g / n, m, g)
      return (jax.tree.map(lambda p, m: p - 0.5 * m, p, m), m), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    return jax.lax.scan(step, (params, zeros), length=steps)[0][0]

  return run(params, data)


def _memory(apply, params, batch_size):
  """Temporary bytes of one compiled curvature product against n_R."""
  print('\nretain set | temporary bytes of one product')
  for n in (500, 2000, 8000):
    data = _data(n)
    product = functools.partial(
      ggn.ggn_matvec, apply, 'softmax', batch_size=batch_size
    )
    compiled = jax.jit(
      lambda p, d, v, product=product: product(p, d, v, ridge=1.0)
    ).lower(params, data, params).compile()  # fmt: skip
    memory: Any = compiled.memory_analysis()
    print(f'{n:10d} | {memory.temp_size_in_bytes:,}')


def main():
  """Runs everything once; times include compilation where stated."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--retain', type=int, default=2000)
  parser.add_argument('--dense', action='store_true')
  args = parser.parse_args()
  warnings.simplefilter('ignore')
  params, apply = _network()
  data = _data(args.retain + 32)
  part = lambda s: {k: v[s] for k, v in data.items()}
  forget, retain, ridge = part(slice(32)), part(slice(32, None)), 1.0
  count = len(ravel_pytree(params)[0])
  print(f'P = {count}, n_R = {args.retain}, n_F = 32, C = 10, ridge {ridge}')
  seconds, params = _seconds(lambda: _train(apply, params, data, ridge))
  print(f'training, 300 gradient steps: {seconds:.1f} s (with compilation)')
  cpu = time.process_time()
  seconds, report = _seconds(
    lambda: ul.audit_network(apply, 'softmax', params, retain, forget, ridge)
  )
  cpu = time.process_time() - cpu
  print(
    f'audit: {seconds:.1f} s, {cpu:.1f} CPU-seconds (with compilation), '
    f'{report.products} curvature products, worst residual '
    f'{report.residual:.1e}; lmax {report.lmax:.3g}, recommended '
    f'{report.recommendation}, flags {list(report.flags)}'
  )
  v = params
  product = jax.jit(
    lambda p, d, v: ggn.ggn_matvec(apply, 'softmax', p, d, v, ridge=ridge)
  )
  jax.block_until_ready(product(params, retain, v))
  seconds, _ = _seconds(lambda: product(params, retain, v))
  print(f'one curvature product: {1e3 * seconds:.1f} ms')
  seconds, _ = _seconds(lambda: _train(apply, params, retain, ridge))
  print(f'retraining, 300 gradient steps: {seconds:.1f} s (with compilation)')
  _memory(apply, params, 256)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  print(f'\npeak memory of the process: {peak:.0f} MiB')
  if args.dense:
    _dense(apply, params, retain, ridge)


def _dense(apply, params, retain, ridge):
  """The naive way: all rows, the [P, P] curvature, one Cholesky."""
  solver = ul.Solver('primal')
  seconds, _ = _seconds(
    lambda: ul.retain_displacement(
      apply, 'softmax', params, retain, ridge, solver=solver
    )
  )
  print(f'one dense solve: {seconds:.1f} s')
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
  print(f'peak memory with it: {peak:.0f} MiB')


if __name__ == '__main__':
  main()

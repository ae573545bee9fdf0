"""Softmax attention: tiles in bounded memory against `jax.nn` and plain jnp.

  python experiments/benchmarks/attention.py [--threads=2] [--repeats=5]
      [--longest=65536]

One sequence of H heads with D features in float32, T queries and T keys, causal
and not, forward and with gradients of q, k and v. All ways run in turns in one
process; the median is printed and its ratio to `tiles`, and the memory that the
compiled program needs beyond its operands. Where the logits of `jax.nn` would
need more than `--logits` GB only `tiles` is run, once.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial

sys.path[0] = __file__.rpartition('/experiments/')[0]

SIZES = [(1024, 8, 64), (4096, 4, 64), (4096, 4, 128)]
LONG = [(16384, 1, 64), (32768, 1, 64), (65536, 1, 64)]


def arguments() -> argparse.Namespace:
  """Parsed before jax starts, which reads the number of threads once."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--threads', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--longest', type=int, default=65536)
  parser.add_argument('--logits', type=float, default=2.0)
  return parser.parse_args()


def measure(functions, args, repeats):
  """Median milliseconds of each function, measured in turns."""
  import jax

  seconds = {name: [] for name in functions}
  for turn in range(repeats + (repeats > 1)):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*args))
      # The first turn warms caches, where there is more than one.
      if turn or repeats == 1:
        seconds[name].append(time.perf_counter() - start)
  return {name: 1e3 * statistics.median(s) for name, s in seconds.items()}


def compare(size, causal, flags):
  """Prints a row per way for one size."""
  import jax
  import jax.numpy as jnp

  from kernels_pallas import attention

  tokens, heads, dim = size
  keys = jax.random.split(jax.random.key(0), 3)
  args = [jax.random.normal(key, (1, tokens, heads, dim)) for key in keys]
  ways = {
    'tiles': partial(attention, causal=causal),
    'jax.nn': partial(jax.nn.dot_product_attention, is_causal=causal),
    'plain': partial(attention, causal=causal, implementation='reference'),
  }
  fits = heads * tokens**2 * 4 < flags.logits * 1e9
  repeats = flags.repeats if fits else 1
  ways = ways if fits else {'tiles': ways['tiles']}

  def gradient(*x, way):
    return jax.grad(lambda *x: jnp.sum(way(*x) ** 2), (0, 1, 2))(*x)

  programs = {
    kind: {
      name: jax.jit(make(way)).lower(*args).compile()
      for name, way in ways.items()
    }
    for kind, make in {
      'forward': lambda way: way,
      'gradient': lambda way: partial(gradient, way=way),
    }.items()
  }
  if fits:
    results = [programs['gradient'][name](*args) for name in ways]
    for other in results[1:]:
      for a, b in zip(results[0], other, strict=True):
        error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
        assert error < 1e-4, error
  times = {k: measure(p, args, repeats) for k, p in programs.items()}
  for name in ways:
    row = [f'{tokens:7}{heads:3}{dim:5} {causal!s:6}{name:8}']
    for kind, done in times.items():
      memory = programs[kind][name].memory_analysis()
      memory = memory.temp_size_in_bytes if memory else float('nan')
      ratio = done[name] / done['tiles']
      row.append(
        f'{done[name]:10.1f} ms{ratio:6.2f} x{memory / 2**20:9.1f} MiB'
      )
    print(''.join(row), flush=True)


def main() -> None:
  """Prints one table."""
  flags = arguments()
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(
      0, set(sorted(os.sched_getaffinity(0))[: flags.threads])
    )
  import jax

  print(
    f'jax {jax.__version__}, {jax.default_backend()}, {flags.threads} threads'
  )
  print(
    f'{"T":>7}{"H":>3}{"D":>5} {"causal":6}{"":8}'
    f'{"forward":>13}{"":8}{"memory":>13}{"gradient":>13}{"":8}{"memory":>13}'
  )
  for size in SIZES:
    for causal in (False, True):
      compare(size, causal, flags)
  for size in LONG:
    if size[0] <= flags.longest:
      compare(size, True, flags)


if __name__ == '__main__':
  main()

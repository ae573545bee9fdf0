"""XOR attention of links against HSTU's attention over the whole history.

  python experiments/benchmarks/rectangle_attention.py [--threads=2]
      [--repeats=5] [--links=32] [--longest=65536]

One sequence of N items in float32, 4 heads of 32 features, forward and with the
gradients of all operands. `xor` and `hstu` are the loops over tiles that a CPU
runs, `square` is the reference of HSTU, which holds N x N logits. All ways run
in turns in one process; the median is printed, its ratio to `xor`, and the
memory that the compiled program needs beyond its operands. Where the logits of
`square` would need more than `--logits` GB it is left out, and above
`--longest-square` items HSTU as well. The last lines are the slopes of log time
over log N, between the largest sizes of each way.
"""

import argparse
import math
import os
import statistics
import sys
import time
from functools import partial

sys.path[0] = __file__.rpartition('/experiments/')[0]

SIZES = [1024, 4096, 8192, 65536]
HEADS, DIM = 4, 32


def arguments() -> argparse.Namespace:
  """Parsed before jax starts, which reads the number of threads once."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--threads', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--links', type=int, default=32)
  parser.add_argument('--longest', type=int, default=65536)
  parser.add_argument('--longest-square', type=int, default=8192)
  parser.add_argument('--logits', type=float, default=1.0)
  parser.add_argument('--phi', choices=('silu', 'softmax'), default='silu')
  return parser.parse_args()


def measure(functions, args, repeats):
  """Median milliseconds of each function, measured in turns."""
  import jax

  seconds = {name: [] for name in functions}
  for turn in range(repeats + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*args))
      # The first turn warms caches.
      if turn:
        seconds[name].append(time.perf_counter() - start)
  return {name: 1e3 * statistics.median(s) for name, s in seconds.items()}


def compile_ways(items, flags):
  """Programs by kind and way, and their operands."""
  import jax
  import jax.numpy as jnp

  from kernels_pallas import hstu_attention, xor_attention

  draw = lambda key, tokens: tuple(
    jax.random.normal(k, (1, tokens, HEADS, DIM))
    for k in jax.random.split(key, 3)
  )
  one, other = jax.random.split(jax.random.key(0))
  args = draw(one, flags.links), draw(other, items)
  whole = lambda links, history, **how: hstu_attention(*history, **how)
  ways = {
    'xor': partial(xor_attention, phi=flags.phi),
    'hstu': whole,
    'square': partial(whole, implementation='reference'),
  }
  if items > flags.longest_square:
    del ways['hstu']
  if HEADS * items**2 * 4 > flags.logits * 1e9:
    del ways['square']

  def gradient(links, history, way):
    def loss(links, history):
      leaves = jax.tree.leaves(way(links, history))
      return sum(jnp.sum(x**2) for x in leaves)

    return jax.grad(loss, (0, 1))(links, history)

  makes = {
    'forward': lambda way: way,
    'gradient': lambda way: partial(gradient, way=way),
  }
  programs = {
    kind: {
      name: jax.jit(make(way)).lower(*args).compile()
      for name, way in ways.items()
    }
    for kind, make in makes.items()
  }
  return programs, args


def check(programs, args):
  """HSTU's loop equals its reference, where both run."""
  import jax
  import jax.numpy as jnp

  found = programs['gradient']
  if 'square' not in found:
    return
  both = (jax.tree.leaves(found[name](*args)[1]) for name in ('hstu', 'square'))
  for a, b in zip(*both, strict=True):
    error = float(jnp.abs(a - b).max() / jnp.abs(b).max())
    if error > 1e-4:
      raise AssertionError(f'hstu and square differ by {error:.1e}')


def compare(items, flags):
  """Prints a row per way for one length; milliseconds by kind and way."""
  programs, args = compile_ways(items, flags)
  check(programs, args)
  times = {k: measure(p, args, flags.repeats) for k, p in programs.items()}
  for name in programs['forward']:
    row = [f'{items:7} {name:8}']
    for kind, done in times.items():
      memory = programs[kind][name].memory_analysis()
      memory = memory.temp_size_in_bytes if memory else float('nan')
      ratio = done[name] / done['xor']
      row.append(
        f'{done[name]:10.1f} ms{ratio:8.2f} x{memory / 2**20:9.1f} MiB'
      )
    print(''.join(row), flush=True)
  return times


def slope(points):
  """Of log time over log N between the two largest sizes."""
  (n, a), (m, b) = points[-2:]
  return math.log(b / a) / math.log(m / n)


def main() -> None:
  """Prints one table."""
  flags = arguments()
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(
      0, set(sorted(os.sched_getaffinity(0))[: flags.threads])
    )
  import jax

  print(
    f'jax {jax.__version__}, {jax.default_backend()}, {flags.threads} threads, '
    f'{flags.links} links, {flags.phi}'
  )
  print(
    f'{"N":>7} {"":8}{"forward":>13}{"":10}{"memory":>13}'
    f'{"gradient":>13}{"":10}{"memory":>13}'
  )
  points = {}
  for items in SIZES:
    if items <= flags.longest:
      for kind, done in compare(items, flags).items():
        for name, x in done.items():
          points.setdefault((name, kind), []).append((items, x))
  for (name, kind), found in points.items():
    if len(found) > 1:
      print(f'{name:8} {kind:9} time ~ N^{slope(found):.2f}')


if __name__ == '__main__':
  main()

"""Experts of a sparse layer: dropless blocks against four other ways.

  python experiments/benchmarks/moe.py [--threads=2] [--repeats=7]

y_t = sum over the k chosen experts of w gelu(x W_in) W_out, forward and with
gradients of x, W_in and W_out, in float32. All ways run side by side in one
process, in turns, so that a noisy machine hurts all of them; the median is
printed, and its ratio to `blocked`. `capacity` drops tokens: its figure is for
less work. Sizes: T tokens, D features, F hidden units, E experts, k = 2.
"""

import argparse
import os
import statistics
import sys
import time
from functools import partial

sys.path[0] = __file__.rpartition('/experiments/')[0]

WAYS = ('blocked', 'ragged_dot', 'scan', 'dense', 'capacity')


def arguments() -> argparse.Namespace:
  """Parsed before jax starts, which reads the number of threads once."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--threads', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=7)
  return parser.parse_args()


def ragged(x, w_in, w_out, routing):
  """Sort by expert, `jax.lax.ragged_dot` twice, sort back."""
  import jax
  import jax.numpy as jnp

  experts = routing.experts.reshape(-1)
  order = jnp.argsort(experts, stable=True)
  sizes = jnp.bincount(experts, length=w_in.shape[0])
  rows = x[order // routing.experts.shape[1]]
  hidden = jax.nn.gelu(jax.lax.ragged_dot(rows, w_in, sizes))
  out = jax.lax.ragged_dot(hidden, w_out, sizes)
  out = jnp.zeros_like(out).at[order].set(out, unique_indices=True)
  out = out.reshape(*routing.experts.shape, -1)
  return jnp.einsum('tk,tkd->td', routing.weights, out)


def measure(functions, args, repeats):
  """Median milliseconds of each function, measured in turns."""
  import jax

  seconds = {name: [] for name in functions}
  for function in functions.values():
    jax.block_until_ready(function(*args))
  for _ in range(repeats):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function(*args))
      seconds[name].append(time.perf_counter() - start)
  return {name: 1e3 * statistics.median(s) for name, s in seconds.items()}


def main() -> None:
  """Prints one table per size."""
  flags = arguments()
  if hasattr(os, 'sched_setaffinity'):
    os.sched_setaffinity(
      0, set(sorted(os.sched_getaffinity(0))[: flags.threads])
    )
  import jax
  import jax.numpy as jnp
  import numpy as np

  from kernels_pallas.grouped_matmul.shapes import SHAPES
  from tmlib import moe

  print(
    f'jax {jax.__version__}, {jax.default_backend()}, {flags.threads} threads'
  )
  for name in ('small', 'medium', 'large'):
    size = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(keys[0], (size.tokens, size.features))
    shape = (size.experts, size.features, size.hidden)
    w_in = jax.random.normal(keys[1], shape) / size.features**0.5
    w_out = jax.random.normal(keys[2], (shape[0], shape[2], shape[1]))
    w_out = w_out / size.hidden**0.5
    logits = jax.random.normal(keys[3], (size.tokens, size.experts))
    routing = moe.topk_route(logits, size.k)

    def layer(x, w_in, w_out, way, routing=routing):
      if way == 'ragged_dot':
        return ragged(x, w_in, w_out, routing)
      return moe.expert_mlp(x, w_in, w_out, routing, impl=way)

    def loss(x, w_in, w_out, way, layer=layer):
      return (layer(x, w_in, w_out, way) ** 2).mean()

    args = (x, w_in, w_out)
    want = layer(*args, 'dense')
    for way in WAYS[:-1]:
      error = float(jnp.abs(layer(*args, way) - want).max())
      assert error < 1e-5 * max(1.0, float(np.abs(want).max())), (way, error)
    forward = {w: jax.jit(partial(layer, way=w)) for w in WAYS}
    gradient = {
      w: jax.jit(jax.value_and_grad(partial(loss, way=w), (0, 1, 2)))
      for w in WAYS
    }
    fast = measure(forward, args, flags.repeats)
    slow = measure(gradient, args, flags.repeats)
    print(
      f'\nT={size.tokens} D={size.features} F={size.hidden} '
      f'E={size.experts} k={size.k}'
    )
    print(
      f'{"":12}{"forward ms":>12}{"ratio":>8}{"with grad ms":>14}{"ratio":>8}'
    )
    for way in WAYS:
      print(
        f'{way:12}{fast[way]:12.1f}{fast[way] / fast["blocked"]:8.1f}'
        f'{slow[way]:14.1f}{slow[way] / slow["blocked"]:8.1f}'
      )


if __name__ == '__main__':
  main()

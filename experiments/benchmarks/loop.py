"""What the training loop costs per step, beyond the compiled call itself.

  python experiments/benchmarks/loop.py

Prints medians over repetitions, in microseconds per step:
  bare call   the compiled step in a Python loop that does nothing else but
              wait for the call before the last one, as `fit` does;
  loop        `fit` on the same step and a batch that is on the devices already,
              metrics read at the last step only;
  overhead    their difference, repetition by repetition;
  thread      what it adds to hand the same batch over from the prefetch thread;
  prefetch    loading a batch and putting it on the devices, in that thread,
              beside the steps.
"""

import argparse
import collections
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

sys.path[0] = __file__.rpartition('/experiments/')[0]

from tmlib import train  # noqa: E402
from tmlib.train import loop, prefetching, program  # noqa: E402


def build(axis_name: str | None) -> train.Method:
  """A regression so small that the call is nearly all dispatch."""

  def loss(params, batch, key, step):
    del key, step
    error = (batch['x'] @ params - batch['y']) ** 2
    return jnp.sum(error * batch['weight']), batch['weight'].sum(), {}

  return train.gradient_method(
    lambda key, batch: jnp.zeros(batch['x'].shape[-1]),
    loss,
    lambda params, batch: {'sums': {}, 'outputs': {}},
    optax.sgd(1e-3),
  )(axis_name)


def counter(axis_name: str | None) -> train.Method:
  """A method without data, of one addition."""
  del axis_name
  init = lambda key, batch: {'x': jnp.zeros(())}
  update = lambda state, batch: ({'x': state['x'] + 1}, {'x': state['x']})
  return train.Method(init, update, lambda state, batch: {})


def stream(batch_size: int, features: int) -> train.Data:
  """Shuffled batches from in-memory arrays."""
  rng = np.random.default_rng(0)
  x = rng.normal(size=(1024, features)).astype(np.float32)
  return train.array_data({'x': x, 'y': x.sum(1)}, batch_size)


def timed(call: Callable[[], object]) -> float:
  """Seconds that `call` takes."""
  start = time.perf_counter()
  call()
  return time.perf_counter() - start


def bare(prepared: program.Program, loaded: Any, steps: int) -> float:
  """Seconds of `steps` compiled calls with two in flight."""
  state = prepared.init()
  flight = collections.deque()
  jax.block_until_ready(state)

  def run():
    nonlocal state
    for _ in range(steps):
      state, metrics = prepared.step(state, loaded)
      flight.append(metrics)
      if len(flight) > 2:
        jax.block_until_ready(flight.popleft())
    jax.block_until_ready(state)

  return timed(run)


class _Prepared:
  """`fit` on one program that is compiled once, with one batch ready."""

  def __init__(self, method: train.Build, data: train.Data | None, steps: int):
    self.steps, self.seconds = steps, []
    self._method, self._data = method, data
    mesh = train.make_mesh()
    layout = train.Layout(mesh)
    with jax.set_mesh(mesh):
      self.program = program.Program(method, data, {}, layout)
      self.program.compile()
      self.loaded = self.program.load(0)

  def fit(self, threaded: bool) -> float:
    """Seconds in the loop of one call of `fit`, compiling excluded."""
    load = lambda start: self.loaded
    batches = lambda _, starts: (
      prefetching.prefetch(load, iter(starts))
      if threaded
      else (self.loaded for _ in starts)
    )
    stage, compiled = loop._Session._stage, self.program
    compiled.compile = lambda train=True, init=False, evaluate=True: []

    def clocked(session, *args):
      start = time.perf_counter()
      found = stage(session, *args)
      self.seconds.append(time.perf_counter() - start)
      return found

    options = train.Options(log_every=self.steps)
    with (
      mock.patch.object(loop, 'Program', return_value=compiled),
      mock.patch.object(loop, '_batches', batches),
      mock.patch.object(loop._Session, '_stage', clocked),
    ):
      train.fit(
        self._method, self._data, steps=self.steps, options=options, writers=[]
      )
    return self.seconds[-1]


def measure(
  method: train.Build, data: train.Data | None, steps: int, repeats: int
) -> dict[str, float]:
  """Medians in microseconds per step."""
  prepared = _Prepared(method, data, steps)
  rounds = [
    (
      bare(prepared.program, prepared.loaded, steps),
      prepared.fit(threaded=False),
      prepared.fit(threaded=True),
    )
    for _ in range(repeats + 1)
  ][1:]
  median = lambda values: statistics.median(values) * 1e6 / steps
  return {
    'bare call': median(a for a, _, _ in rounds),
    'loop': median(b for _, b, _ in rounds),
    'overhead': median(b - a for a, b, _ in rounds),
    'thread': median(c - b for _, b, c in rounds),
  }


def measure_prefetch(data: train.Data, steps: int, repeats: int) -> float:
  """Median microseconds per batch that is loaded and put on the devices."""
  layout = train.Layout(train.make_mesh())
  load = lambda step: layout.place(data, [step], stacked=False)

  def drain():
    for batch in prefetching.prefetch(load, iter(range(steps))):
      jax.block_until_ready(batch)

  drain()
  found = [timed(drain) for _ in range(repeats)]
  return statistics.median(found) * 1e6 / steps


def main() -> None:
  """Prints the table."""
  parser = argparse.ArgumentParser(description='Loop overhead.')
  parser.add_argument('--steps', type=int, default=2000)
  parser.add_argument('--repeats', type=int, default=9)
  options = parser.parse_args()
  sizes = {'batch 64 x 32': (64, 32), 'batch 256 x 512': (256, 512)}
  cases = {'no data': (counter, None)}
  cases |= {name: (build, stream(*size)) for name, size in sizes.items()}
  print(f'{jax.device_count()} {jax.devices()[0].device_kind} device(s), jax'
        f' {jax.__version__}; medians, microseconds per step')  # fmt: skip
  columns = ('bare call', 'loop', 'overhead', 'thread', 'prefetch')
  print(' ' * 18 + ''.join(f'{name:>12}' for name in columns))
  for name, (method, data) in cases.items():
    row = measure(method, data, options.steps, options.repeats)
    if data is not None:
      row['prefetch'] = measure_prefetch(data, 200, options.repeats)
    print(f'{name:18}' + ''.join(f'{x:12.1f}' for x in row.values()))


if __name__ == '__main__':
  main()

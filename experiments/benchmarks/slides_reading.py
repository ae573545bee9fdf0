"""How long a training step waits for slides that are read from disk.

  python experiments/benchmarks/slides_reading.py --slides=100 --patches=10000

Writes float16 features to a temporary folder (or --folder), asks the system to
drop them from its page cache, and trains on them for one epoch: reading, the
graph and stacking run in threads while the device computes. Printed: reading
alone, the step alone (batch in memory), and the step fed from disk, with the
processor time of each and what came from the disk; the share of the last that
was spent waiting for input; and what binds, which is the largest of reading
alone, the step alone and, where the device is the processor, the time that
both take from its cores.
"""

import argparse
import os
import tempfile
import time
from pathlib import Path

import h5py
import jax
import numpy as np
import optax

from tmlib.data import bucket_size, slides
from tmlib.mil import classification_method, create_model
from tmlib.train.prefetching import prefetch


def write(folder: Path, count: int, patches: int, dim: int) -> list[Path]:
  """Slides on a square grid, as TRIDENT writes them."""
  rng, paths = np.random.default_rng(0), []
  side = int(np.ceil(np.sqrt(patches)))
  y, x = np.divmod(np.arange(patches), side)
  for i in range(count):
    path = folder / f'slide_{i}.h5'
    paths.append(path)
    if path.exists():
      continue
    with h5py.File(path, 'w') as file:
      features = rng.standard_normal((patches, dim), np.float32)
      file['features'] = features.astype(np.float16)
      file['coords'] = np.stack([x, y], 1) * 256
      file['coords'].attrs.update(patch_size=256, patch_size_level0=256)
  return paths


def drop(paths: list[Path]) -> None:
  """Asks the system to forget the files; they are read from disk again."""
  os.sync()
  for path in paths:
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def main() -> None:
  """Measures and prints."""
  parser = argparse.ArgumentParser()
  parser.add_argument('--slides', type=int, default=100)
  parser.add_argument('--patches', type=int, default=10_000)
  parser.add_argument('--dim', type=int, default=1024)
  parser.add_argument('--batch', type=int, default=4)
  parser.add_argument('--workers', type=int, default=2)
  parser.add_argument('--hidden', type=int, default=128)
  parser.add_argument('--model', default='gated_abmil')
  parser.add_argument('--graph', default='none', choices=slides.GRAPHS)
  parser.add_argument('--folder', default='')
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as temporary:
    folder = Path(args.folder or temporary)
    folder.mkdir(parents=True, exist_ok=True)
    paths = write(folder, args.slides, args.patches, args.dim)
    measure(args, paths)


def measure(args, paths: list[Path]) -> None:
  """One epoch read alone, computed alone, and both together."""
  from concurrent.futures import ThreadPoolExecutor

  reader = slides.BagReader(
    [(path,) for path in paths],
    dim=args.dim, graph=args.graph, dtype=np.float16,
  )  # fmt: skip
  size, bucket = args.batch, bucket_size(args.patches)
  steps = len(paths) // size
  pool = ThreadPoolExecutor(args.workers)

  def load(step: int):
    index = range(step * size, (step + 1) * size)
    bags = list(pool.map(reader.read, index))
    batch = {
      'bag': slides.stack_bags(bags, bucket),
      'id': np.arange(size, dtype=np.int32),
      'weight': np.ones(size, np.float32),
      'label': np.arange(size, dtype=np.int32) % 2,
    }
    return jax.device_put(batch)

  model = create_model(
    args.model, in_dim=args.dim, num_classes=2, hidden=args.hidden
  )
  build = classification_method(model, optax.adam(1e-4), num_classes=2)
  method, batch = build(None), load(0)
  state = method.init(jax.random.key(0), batch)
  update = jax.jit(method.update, donate_argnums=0)
  state, _ = jax.block_until_ready(update(state, batch))

  drop(paths)
  reading = Clock(steps)
  for step in range(steps):
    load(step)
  reading.stop()
  alone = Clock(steps)
  for _ in range(steps):
    state, metrics = update(state, batch)
    jax.block_until_ready(metrics)
  alone.stop()
  drop(paths)
  waited, both = 0.0, Clock(steps)
  batches = prefetch(load, iter(range(steps)))
  for _ in range(steps):
    before = time.perf_counter()
    batch = next(batches)
    waited += time.perf_counter() - before
    state, metrics = update(state, batch)
    jax.block_until_ready(metrics)
  both.stop()
  batches.close()
  print(
    f'{args.model}, {len(paths)} slides of {args.patches} x {args.dim} float16,'
    f' batch {size}, {steps} steps, graph {args.graph}, '
    f'{jax.devices()[0].device_kind}, {cores()} cores, '
    f'load {os.getloadavg()[0]:.1f}'
  )
  for name, clock in (
    ('reading alone', reading), ('step alone', alone),
    ('step from disk', both),
  ):  # fmt: skip
    print(f'{name:15}{clock}')
  share = waited / steps / both.wall
  print(f'waited for input {waited / steps:6.3f} s/step, {share:.0%} of it')
  bounds = {
    'reading (disk and unpacking)': reading.wall,
    'the step': alone.wall,
  }
  if jax.default_backend() == 'cpu':
    bounds['the cores'] = (reading.cpu + alone.cpu) / cores()
  name, least = max(bounds.items(), key=lambda item: item[1])
  print(f'binding: {name}, at least {least:.3f} s/step')


def cores() -> int:
  """Cores that this process may use."""
  return len(os.sched_getaffinity(0))


class Clock:
  """Wall and processor seconds, and megabytes from the disk, per step."""

  def __init__(self, steps: int):
    self.steps, self._start = steps, self._now()
    self.wall = self.cpu = self.disk = 0.0

  def _now(self) -> np.ndarray:
    try:
      text = Path('/proc/self/io').read_text()
      disk = float(text.split('read_bytes:')[1].split()[0]) / 1e6
    except OSError:
      disk = float('nan')
    return np.array([time.perf_counter(), time.process_time(), disk])

  def stop(self) -> None:
    """Takes the times of a step since the start."""
    self.wall, self.cpu, self.disk = (self._now() - self._start) / self.steps

  def __str__(self) -> str:
    return (
      f'{self.wall:7.3f} s/step, {self.cpu:6.3f} s of processor, '
      f'{self.disk:6.1f} MB from disk'
    )


if __name__ == '__main__':
  main()

"""Time and memory of one training pass of TMEvolve on a whole slide.

  python experiments/benchmarks/tmevolve.py                     # 13,472 patches
  python experiments/benchmarks/tmevolve.py --patches=53888
  python experiments/benchmarks/tmevolve.py --patches=100000 --models=tmevolve

One pass is the loss, its gradient and an Adam step, for one bag of `--patches`
patches with `--features` features on the patch grid of a real slide
(`--slide`, a csv of index, x, y; copies side by side make it larger), or of a
disc of tissue where no slide is given. Every model runs in its own process, so
that the peak of resident memory is its own; the fastest of `--repeats` passes
counts. CPU seconds add up all threads and depend less on other load.

Models: `tmevolve` (the default configuration), `uniform` (the control: uniform
diffusion, same width, steps and readout) and, where torch and torchmil are
installed, `patchgcn` (torchmil's, 3 layers of the same width).
"""

import argparse
import importlib.util
import json
import os
import pathlib
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# The checkout, wherever the script is called from.
sys.path[0] = str(pathlib.Path(__file__).resolve().parents[2])

MODELS = ('tmevolve', 'uniform', 'patchgcn')


def positions(path: str | None, patches: int) -> np.ndarray:
  """Grid positions [patches, 2]: copies of one slide, a gap apart."""
  if path:
    table = np.loadtxt(path, delimiter=',', skiprows=1, dtype=np.int64)
    ij = table[:, 1:3]
  else:
    radius = int(np.ceil(np.sqrt(patches / np.pi))) + 1
    ij = np.indices((2 * radius, 2 * radius)).reshape(2, -1).T
    ij = ij[((ij - radius) ** 2).sum(1) < radius**2]
  ij = ij[np.lexsort((ij[:, 1], ij[:, 0]))] - ij.min(0)
  copies = -(-patches // len(ij))
  shift = np.array([ij[:, 0].max() + 2, 0])
  tiled = [ij + shift * copy for copy in range(copies)]
  return np.concatenate(tiled)[:patches].astype(np.int32)


def jax_pass(model: str, ij: np.ndarray, x: np.ndarray, args) -> Any:
  """Returns a training pass, and what the compiler says of its memory."""
  import jax
  import optax

  from tmlib.mil import Bag
  from tmlib.ops.graph import ell_from_grid
  from tmlib.reaction_diffusion import TMEvolve

  graph = ell_from_grid(ij, connectivity=8)
  bag = Bag(x, np.ones(len(ij), bool), graph)
  bag = jax.tree.map(lambda leaf: jax.device_put(leaf[None]), bag)
  net = TMEvolve(2, hidden=args.hidden, uniform=model == 'uniform')
  params = jax.jit(net.init)(jax.random.key(0), bag)
  optimizer = optax.adam(1e-4)
  state = (params, optimizer.init(params))

  def update(state, bag):
    params, moments = state

    def loss(params):
      output: Any = net.apply(params, bag)
      return jax.nn.logsumexp(output.logits[0]) - 1

    value, grad = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(grad, moments)
    return (optax.apply_updates(params, updates), moments), value

  start = time.perf_counter()
  step = jax.jit(update, donate_argnums=0).lower(state, bag).compile()
  seconds = time.perf_counter() - start
  memory = step.memory_analysis()

  def run():
    nonlocal state
    state, value = step(state, bag)
    return float(value)

  return run, {
    'compile_s': seconds,
    'temp_MiB': memory.temp_size_in_bytes / 2**20 if memory else None,
  }


def torch_pass(ij: np.ndarray, x: np.ndarray, args) -> Any:
  """The same for torchmil's PatchGCN, with a normalised sparse adjacency."""
  import torch  # pyright: ignore[reportMissingImports]
  from torchmil.models import PatchGCN  # pyright: ignore[reportMissingImports]

  from tmlib.ops.graph import ell_from_grid

  graph = ell_from_grid(ij, connectivity=8)
  tail, slot = np.nonzero(graph.emask)
  head = graph.nbr[tail, slot]
  degree = graph.emask.sum(1)
  weight = 1 / np.sqrt(degree[tail] * degree[head])
  size = len(ij)
  adjacency = torch.sparse_coo_tensor(
    np.stack([0 * tail, tail, head]),
    torch.tensor(weight, dtype=torch.float32),
    (1, size, size),
    check_invariants=True,
  ).coalesce()
  features = torch.from_numpy(x)[None]
  net = PatchGCN((x.shape[1],), n_gcn_layers=3, hidden_dim=args.hidden)
  optimizer = torch.optim.Adam(net.parameters(), 1e-4)
  target = torch.ones(1)

  def run():
    optimizer.zero_grad()
    loss = net.criterion(net(features, adjacency).reshape(1), target)
    loss.backward()
    optimizer.step()
    return loss.item()

  return run, {'compile_s': 0.0, 'temp_MiB': None}


def fastest(run: Callable[[], float], repeats: int) -> tuple[float, float]:
  """Least wall and CPU seconds of a pass, after one to warm up."""
  run()
  walls, cpus = [], []
  for _ in range(repeats):
    wall, cpu = time.perf_counter(), time.process_time()
    if not np.isfinite(run()):
      raise FloatingPointError('the loss is not finite')
    walls.append(time.perf_counter() - wall)
    cpus.append(time.process_time() - cpu)
  return min(walls), min(cpus)


def measure(model: str, args) -> dict[str, Any]:
  """One model in this process."""
  ij = positions(args.slide, args.patches)
  rng = np.random.default_rng(0)
  x = rng.standard_normal((len(ij), args.features), dtype=np.float32)
  if model == 'patchgcn':
    run, row = torch_pass(ij, x, args)
  else:
    run, row = jax_pass(model, ij, x, args)
  wall, cpu = fastest(run, args.repeats)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return {'model': model, 'wall_s': wall, 'cpu_s': cpu, 'peak_GiB': peak, **row}


def report(rows: list[dict[str, Any]], args) -> None:
  """Prints one line per model, with its ratio to the first."""
  print(
    f'\n{args.patches} patches, P={args.features}, D={args.hidden}: loss, '
    f'gradient and Adam step; fastest of {args.repeats}'
  )
  print(
    f'{"model":10} {"wall s":>8} {"CPU s":>8} {"ratio":>6} {"peak GiB":>9} '
    f'{"temp MiB":>9} {"compile s":>9}'
  )
  for row in rows:
    temp = '' if row['temp_MiB'] is None else f'{row["temp_MiB"]:.0f}'
    print(
      f'{row["model"]:10} {row["wall_s"]:8.2f} {row["cpu_s"]:8.2f} '
      f'{row["wall_s"] / rows[0]["wall_s"]:6.2f} {row["peak_GiB"]:9.2f} '
      f'{temp:>9} {row["compile_s"]:9.1f}'
    )


def main() -> None:
  """Parses the command line and measures each model in a child process."""
  default = os.environ.get('TMLIB_SHARED')
  slides = (
    pathlib.Path(default).glob('data/kirc_graph/*.csv') if default else ()
  )
  parser = argparse.ArgumentParser(
    description='Time and memory of one training pass of TMEvolve.'
  )
  parser.add_argument('--patches', type=int, default=13472)
  parser.add_argument('--features', type=int, default=1024)
  parser.add_argument('--hidden', type=int, default=128)
  parser.add_argument('--repeats', type=int, default=3)
  parser.add_argument('--models', default=','.join(MODELS))
  parser.add_argument('--slide', default=next(map(str, slides), None))
  parser.add_argument('--only', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only:
    print(json.dumps(measure(args.only, args)))
    return
  rows = []
  for model in args.models.split(','):
    if model not in MODELS:
      parser.error(f'--models={model}: allowed are {", ".join(MODELS)}')
    if model == 'patchgcn' and not importlib.util.find_spec('torchmil'):
      print('patchgcn is left out: torch and torchmil are not installed')
      continue
    command = [sys.executable, __file__, *sys.argv[1:], f'--only={model}']
    done = subprocess.run(
      command, stdout=subprocess.PIPE, check=True, text=True
    )
    rows.append(json.loads(done.stdout.splitlines()[-1]))
  report(rows, args)


if __name__ == '__main__':
  main()

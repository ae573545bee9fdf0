"""Time and memory of forward and backward of bag models, beside torchmil.

  python experiments/benchmarks/mil.py
  python experiments/benchmarks/mil.py --patches=2000 --models=transmil

One pass is the loss of one bag and its gradient in all parameters, in float32,
for `--patches` patches of `--features` features on a disc of tissue. Each model
and library runs in a process of its own, so that the peak of resident memory is
its own; the fastest of `--repeats` passes after one to warm up counts. CPU
seconds add up all threads and depend less on other load. `floor` is what the
pass would take if it were nothing but its arithmetic (the compiler's count), at
the rate of one large matrix product of features, measured in the same process:
where a library is near it, no other can be much faster.

Widths are equal: gated ABMIL 512 with a scorer of 128 units; DSMIL on the
features, queries of 128; TransMIL 512, 8 heads, 256 landmarks; Patch-GCN 128, 3
convolutions, mixed to 128 (its authors mix to 512). torchmil's TransMIL lacks
the convolution along the sequence, and its Patch-GCN averages neighbours where
ours takes their softmax: ours do more. `--torch` is the interpreter that has
torchmil, where this one has not.
"""

import argparse
import json
import pathlib
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

# The checkout, wherever the script is called from.
_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(_ROOT)

# Options at the width of torchmil's models below.
MODELS = {
  'gated_abmil': {'hidden': 512, 'attention': 128},
  'dsmil': {'hidden': 0, 'query': 128, 'query_layers': 'linear'},
  'transmil': {'hidden': 512, 'heads': 8, 'landmarks': 256},
  'patch_gcn': {'hidden': 128, 'layers': 3, 'width': 128, 'attention': 128},
}


def disc(patches: int) -> np.ndarray:
  """Positions of patches on a disc, row by row: [patches, 2], int32."""
  radius = int(np.ceil(np.sqrt(patches / np.pi))) + 1
  ij = np.indices((2 * radius, 2 * radius)).reshape(2, -1).T
  ij = ij[((ij - radius) ** 2).sum(1) < radius**2]
  return ij[:patches].astype(np.int32)


def edges(ij: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Directed edges between 8-neighbours on the grid."""
  low = ij.min(0) - 1
  wide = np.full(tuple(ij.max(0) - low + 2), -1)
  place = ij - low
  wide[tuple(place.T)] = np.arange(len(ij))
  tails, heads = [], []
  for step in np.indices((3, 3)).reshape(2, -1).T - 1:
    if step.any():
      head = wide[tuple((place + step).T)]
      tails.append(np.flatnonzero(head >= 0))
      heads.append(head[head >= 0])
  return np.concatenate(tails), np.concatenate(heads)


def jax_pass(model: str, x: np.ndarray, ij: np.ndarray) -> Any:
  """A pass of ours, the seconds of its compilation, and its floor."""
  import jax

  from tmlib.mil import Bag, create_model
  from tmlib.ops.graph import ell_from_grid

  graph = ell_from_grid(ij, connectivity=8) if model == 'patch_gcn' else None
  bag = Bag(x, np.ones(len(x), bool), graph)
  bag = jax.tree.map(lambda leaf: jax.device_put(leaf[None]), bag)
  net = create_model(
    model, in_dim=x.shape[1], num_classes=1, dropout=0.0, **MODELS[model]
  )
  params = jax.jit(net.init)(jax.random.key(0), bag)

  def loss(params, bag):
    output: Any = net.apply(params, bag)
    total = jax.nn.softplus(-output.logits[0, 0])
    for logits, _ in output.aux_logits.values():
      total += jax.nn.softplus(-logits[0, 0, 0])
    return total

  start = time.perf_counter()
  step = jax.jit(jax.value_and_grad(loss)).lower(params, bag).compile()
  seconds = time.perf_counter() - start
  count = step.cost_analysis() or {}
  floor = count.get('flops', float('nan')) / product_rate(bag.features[0])

  def run():
    value, grads = step(params, bag)
    jax.block_until_ready(grads)
    return float(value)

  return run, seconds, floor


def product_rate(x: Any) -> float:
  """Operations per second of x [N, P] times [P, 512]."""
  import jax
  import jax.numpy as jnp

  w = jnp.ones((x.shape[1], 512), x.dtype)
  product = jax.jit(jnp.matmul)

  def run():
    jax.block_until_ready(product(x, w))
    return 0.0

  return 2 * x.size * 512 / fastest(run, 7)[0]


def torch_pass(model: str, x: np.ndarray, ij: np.ndarray) -> Any:
  """The same of torchmil's model."""
  import torch  # pyright: ignore[reportMissingImports]
  from torch import nn  # pyright: ignore[reportMissingImports]
  from torchmil import models  # pyright: ignore[reportMissingImports]

  size, features = x.shape
  inputs = [torch.from_numpy(x)[None]]
  if model == 'gated_abmil':
    embed = nn.Sequential(nn.Linear(features, 512), nn.ReLU())
    net = models.ABMIL((features,), att_dim=128, gated=True, feat_ext=embed)
  elif model == 'dsmil':
    net = models.DSMIL((features,), att_dim=128)
  elif model == 'transmil':
    net = models.TransMIL((features,), att_dim=512, n_heads=8, n_landmarks=256)
  else:
    net = models.PatchGCN((features,), n_gcn_layers=3, hidden_dim=128)
    tail, head = edges(ij)
    degree = np.maximum(np.bincount(tail, minlength=size), 1)
    weight = 1 / np.sqrt(degree[tail] * degree[head])
    inputs.append(
      torch.sparse_coo_tensor(
        np.stack([0 * tail, tail, head]),
        torch.tensor(weight, dtype=torch.float32),
        (1, size, size),
        check_invariants=True,
      ).coalesce()
    )
  softplus = nn.functional.softplus

  def run():
    net.zero_grad()
    if model == 'dsmil':
      bag, instance = net(*inputs, return_inst_pred=True)
      loss = softplus(-bag).sum() + softplus(-instance.max())
    else:
      loss = softplus(-net(*inputs)).sum()
    loss.backward()
    return loss.item()

  return run, 0.0, float('nan')


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


def measure(task: str, args) -> dict[str, Any]:
  """One library, model and size in this process."""
  library, model, patches = task.split(',')
  ij = disc(int(patches))
  rng = np.random.default_rng(0)
  x = rng.standard_normal((len(ij), args.features), dtype=np.float32)
  make = jax_pass if library == 'tmlib' else torch_pass
  run, seconds, floor = make(model, x, ij)
  wall, cpu = fastest(run, args.repeats)
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
  return {
    'wall': wall, 'cpu': cpu, 'peak': peak, 'compile': seconds, 'floor': floor,
  }  # fmt: skip


def main() -> None:
  """Parses the command line and measures each model in a child process."""
  parser = argparse.ArgumentParser(
    description='Time and memory of forward and backward of bag models.'
  )
  parser.add_argument('--patches', default='2000,13472')
  parser.add_argument('--features', type=int, default=1024)
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--models', default=','.join(MODELS))
  parser.add_argument('--torch', default=sys.executable)
  parser.add_argument('--only', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only:
    print(json.dumps(measure(args.only, args)))
    return
  from experiments.benchmarks.child import measured

  print(
    f'P={args.features}, one bag, float32: loss and gradient; fastest of '
    f'{args.repeats}; ratio = torchmil / tmlib\n'
    f'{"model":12} {"patches":>8} {"library":>9} {"wall s":>8} {"CPU s":>8} '
    f'{"floor s":>8} {"peak GiB":>9} {"compile s":>9} {"wall":>6} {"CPU":>6}'
  )
  for model in args.models.split(','):
    if model not in MODELS:
      parser.error(f'--models={model}: allowed are {", ".join(MODELS)}')
    for patches in args.patches.split(','):
      ours = measured(__file__, f'tmlib,{model},{patches}', sys.executable)
      theirs = measured(__file__, f'torchmil,{model},{patches}', args.torch)
      for library, row in (('torchmil', theirs), ('tmlib', ours)):
        if row is None:
          print(f'{model:12} {patches:>8} {library:>9} is not installed')
          continue
        line = (
          f'{model:12} {patches:>8} {library:>9} {row["wall"]:8.3f} '
          f'{row["cpu"]:8.3f} {row["floor"]:8.3f} {row["peak"]:9.2f} '
          f'{row["compile"]:9.1f}'
        )
        if library == 'tmlib' and theirs and ours:
          wall, cpu = (theirs[k] / ours[k] for k in ('wall', 'cpu'))
          line += f' {wall:6.2f} {cpu:6.2f}'
        print(line, flush=True)


if __name__ == '__main__':
  main()

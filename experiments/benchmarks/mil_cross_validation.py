"""A whole cross-validation of gated ABMIL, beside a Torch loop of equal work.

  python experiments/benchmarks/mil_cross_validation.py --torch=PYTHON

The job of `configs/mil.py`: 10 folds x 5 seeds of UCSB breast cancer, 100 steps
of 16 bags each, AdamW, width 64, standardised by the training bags of a fold,
then the test bags. Ours trains the 50 runs in one program; Torch trains them
one after another, in batches of 16 padded and masked bags, from memory, with
no logging: the same arithmetic. Each runs in a process of its own, data read
and libraries imported before the clock starts; ours includes compilation. The
mean AUC over seeds says that both learned. `--torch` is the interpreter that
has torch, where this one has not.
"""

import argparse
import json
import pathlib
import sys
import tempfile
import time
from typing import Any

import numpy as np

# The checkout, wherever the script is called from.
_ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[0] = str(_ROOT)


def config_of(args) -> Any:
  """`configs/mil.py`, cut to the folds and steps asked for."""
  from experiments import cli

  config: Any = cli.load_config(str(_ROOT / 'configs' / 'mil.py'))
  config.data.sets = (args.set,)
  config.train.update(steps=args.steps, runs=args.seeds)
  return config


def prepare(args, path: pathlib.Path) -> None:
  """Bags, folds and statistics, as both sides read them."""
  from experiments import tmevolve
  from tmlib.data import batch_bags

  config = config_of(args)
  bagset = tmevolve.load_set(config, args.set)
  folds = tmevolve.make_folds(config, bagset)
  longest = max(len(bag.mask) for bag in bagset.bags)
  bags = batch_bags(bagset.bags, longest)
  mean, std = folds.statistics
  np.savez(
    path, features=bags.features, mask=bags.mask, label=bagset.labels,
    train=folds.train, test=folds.test, repeat=folds.repeat, mean=mean, std=std,
  )  # fmt: skip


def auc(data, score: np.ndarray) -> float:
  """Mean over seeds; a seed pools the test bags of its folds."""
  from scipy.stats import rankdata

  found = []
  for seed in np.unique(data['repeat']):
    runs = data['repeat'] == seed
    test = data['test'][runs] > 0
    values, label = (
      score[runs][test],
      np.broadcast_to(data['label'], test.shape)[test],
    )
    positive = label == 1
    p, n = positive.sum(), (~positive).sum()
    rank = rankdata(values)[positive].sum()
    found.append((rank - p * (p + 1) / 2) / (p * n))
  return float(np.mean(found))


def ours(args, data) -> tuple[float, float]:
  """Seconds and AUC of the part that `configs/mil.py` trains."""
  from experiments import tmevolve
  from tmlib import train

  config = config_of(args)
  part = (tmevolve.make(config).parts or {})['gated_abmil']
  start = time.perf_counter()
  result = train.fit(
    part.build, part.data, steps=args.steps, runs=part.runs or 0,
    seed=config.seed, evaluations=part.evaluations, writers=(),
    options=train.Options(log_every=args.steps),
  )  # fmt: skip
  seconds = time.perf_counter() - start
  score = np.zeros(data['test'].shape)
  for run, found in enumerate(result.evaluations['test']):
    outputs = found.outputs
    score[run, outputs['id']] = outputs['probability'][:, 1]
  return seconds, auc(data, score)


def theirs(args, data) -> tuple[float, float]:
  """The same of a plain Torch loop."""
  import torch  # pyright: ignore[reportMissingImports]
  from torch import nn  # pyright: ignore[reportMissingImports]

  torch.set_num_threads(args.threads)
  torch.manual_seed(0)
  features = torch.from_numpy(data['features'])
  mask = torch.from_numpy(data['mask'])
  label = torch.from_numpy(data['label']).long()

  class GatedABMIL(nn.Module):
    """Ilse et al., 2018, with the widths of the config."""

    def __init__(self, inputs, hidden=64, attention=64):
      super().__init__()
      self.embed = nn.Linear(inputs, hidden)
      self.a, self.b = (nn.Linear(hidden, attention) for _ in range(2))
      self.score = nn.Linear(attention, 1)
      self.out = nn.Linear(hidden, 2)
      self.drop = nn.Dropout(0.25)

    def forward(self, x, mask):
      h = self.drop(torch.relu(self.embed(x)))
      s = self.score(torch.tanh(self.a(h)) * torch.sigmoid(self.b(h)))[..., 0]
      w = torch.softmax(s.masked_fill(~mask, -torch.inf), -1)
      return self.out(torch.einsum('bn,bnd->bd', w, h))

  start = time.perf_counter()
  score = np.zeros(data['test'].shape)
  rng = np.random.default_rng(0)
  for run in range(len(score)):
    mean, std = (
      torch.from_numpy(data[k][run]).float() for k in ('mean', 'std')
    )
    x = (features - mean) / std * mask[..., None]
    chosen = np.flatnonzero(data['train'][run])
    net = GatedABMIL(x.shape[-1])
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    order = np.concatenate(
      [rng.permutation(chosen) for _ in range(args.steps)]
    ).reshape(args.steps, -1)[:, :16]
    for index in torch.from_numpy(order):
      optimizer.zero_grad()
      logits = net(x[index], mask[index])
      nn.functional.cross_entropy(logits, label[index]).backward()
      optimizer.step()
      schedule.step()
    net.eval()
    tested = torch.from_numpy(np.flatnonzero(data['test'][run]))
    with torch.no_grad():
      found = torch.softmax(net(x[tested], mask[tested]), -1)[:, 1]
    score[run, tested.numpy()] = found.numpy()
  return time.perf_counter() - start, auc(data, score)


def main() -> None:
  """Parses the command line, measures both in turns and prints the ratio."""
  parser = argparse.ArgumentParser(
    description='A whole cross-validation of gated ABMIL, beside Torch.'
  )
  parser.add_argument('--set', default='ucsb')
  parser.add_argument('--seeds', type=int, default=5)
  parser.add_argument('--steps', type=int, default=100)
  parser.add_argument('--threads', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=2)
  parser.add_argument('--torch', default=sys.executable)
  parser.add_argument('--only', help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.only:
    library, path = args.only.split(':', 1)
    data = dict(np.load(path))
    print(json.dumps((ours if library == 'tmlib' else theirs)(args, data)))
    return
  from experiments.benchmarks.child import measured

  rows: dict[str, list[Any]] = {'tmlib': [], 'torch': []}
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder) / 'folds.npz'
    prepare(args, path)
    runs = len(np.load(path)['repeat'])
    for _ in range(args.repeats):
      for library, python in (('tmlib', sys.executable), ('torch', args.torch)):
        row = measured(__file__, f'{library}:{path}', python)
        if row is None:
          print(f'{library} is not installed')
        else:
          rows[library].append(row)
  print(f'{args.set}: {runs} trainings of {args.steps} steps of 16 bags')
  best = {k: min(v) for k, v in rows.items() if v}
  for library, (seconds, value) in best.items():
    ratio = seconds / best['tmlib'][0]
    print(f'{library:6} {seconds:7.1f} s  AUC {value:.3f}  {ratio:5.2f} x')


if __name__ == '__main__':
  main()

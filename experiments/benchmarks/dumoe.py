"""A training step of DUMoE and of SASRec, ours and RecBole's, in one run.

  python experiments/benchmarks/dumoe.py [--threads=2] [--repeats=10]

Equal width, depth, heads, feed-forward units, batch, length and catalogue;
cross entropy over all items, Adam, dropout 0.2, float32. RecBole's SASRec is
used where torch and recbole can be imported (extra packages, not needed by
tmlib). It learns one target per window in a step, ours every position of it, so
both steps per second and targets per second are printed. All run in turns, the
median is shown.
"""

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

sys.path[0] = __file__.rpartition('/experiments/')[0]


def arguments() -> argparse.Namespace:
  """Parsed before jax starts, which reads the number of threads once."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--threads', type=int, default=2)
  parser.add_argument('--repeats', type=int, default=10)
  parser.add_argument('--items', type=int, default=1682)
  parser.add_argument('--batch', type=int, default=64)
  parser.add_argument('--length', type=int, default=50)
  parser.add_argument('--dim', type=int, default=64)
  parser.add_argument('--blocks', type=int, default=2)
  return parser.parse_args()


def windows(flags):
  """Full windows of random items; the target is the next item."""
  import numpy as np

  rng = np.random.default_rng(0)
  shape = (flags.batch, flags.length)
  item = rng.integers(1, flags.items + 1, (flags.batch, flags.length + 1))
  item = item.astype(np.int32)
  time_of = np.cumsum(rng.integers(1, 90_000, shape), 1).astype(np.int32)
  return {
    'item': item[:, :-1],
    'target': item[:, 1:],
    'time': time_of,
    'now': time_of,
    'action': np.zeros(shape, np.int32),
    'profile': np.zeros((flags.batch, 0), np.float32),
    'features': {},
    'present': {},
    'id': np.arange(flags.batch, dtype=np.int32),
    'weight': np.ones(flags.batch, np.float32),
  }


def ours(flags, name: str, batch) -> Callable[[], object]:
  """A compiled step that goes on from its own state."""
  import jax
  import jax.numpy as jnp
  import optax

  from tmlib.recsys import DUMoEConfig
  from tmlib.recsys.method import build_stage

  size: dict[str, Any] = dict(
    dim=flags.dim, heads=2, blocks=flags.blocks, hidden=4 * flags.dim,
    dropout=0.2,
  )  # fmt: skip
  config = (
    DUMoEConfig.sasrec(flags.items, **size)
    if name == 'sasrec'
    else DUMoEConfig(flags.items, **size)
  )
  stage = 'backbone' if name == 'sasrec' else 'joint'
  method = build_stage(stage, config, optax.adam(1e-3))(None)
  batch = jax.tree.map(jnp.asarray, batch)
  state = [jax.jit(method.init)(jax.random.key(0), batch)]
  update = jax.jit(method.update, donate_argnums=0)

  def step():
    state[0], metrics = update(state[0], batch)
    return jax.block_until_ready(metrics['loss'])

  return step


def theirs(flags, batch) -> Callable[[], object]:
  """RecBole's SASRec and Adam; raises ImportError where it is missing."""
  import torch  # pyright: ignore[reportMissingImports]
  from recbole.model.sequential_recommender.sasrec import (  # pyright: ignore[reportMissingImports]
    SASRec,
  )

  torch.set_num_threads(flags.threads)

  class Catalogue:
    """The one thing that the model asks of a data set."""

    def num(self, field):
      del field
      return flags.items + 1

  config = dict(
    USER_ID_FIELD='user', ITEM_ID_FIELD='item', LIST_SUFFIX='_list',
    ITEM_LIST_LENGTH_FIELD='length', NEG_PREFIX='neg_',
    MAX_ITEM_LIST_LENGTH=flags.length, device='cpu', n_layers=flags.blocks,
    n_heads=2, hidden_size=flags.dim, inner_size=4 * flags.dim,
    hidden_dropout_prob=0.2, attn_dropout_prob=0.2, hidden_act='gelu',
    layer_norm_eps=1e-12, initializer_range=0.02, loss_type='CE',
  )  # fmt: skip
  torch.manual_seed(0)
  model = SASRec(config, Catalogue()).train()
  optimizer = torch.optim.Adam(model.parameters(), 1e-3)
  feed = {
    'item_list': torch.as_tensor(batch['item']).long(),
    'length': torch.full((flags.batch,), flags.length),
    'item': torch.as_tensor(batch['target'][:, -1]).long(),
  }

  def step():
    optimizer.zero_grad()
    loss = model.calculate_loss(feed)
    loss.backward()
    optimizer.step()
    return loss.item()

  return step


def main() -> None:
  """Prints the table."""
  flags = arguments()
  if hasattr(os, 'sched_setaffinity'):
    cores = sorted(os.sched_getaffinity(0))[: flags.threads]
    os.sched_setaffinity(0, set(cores))
  import jax

  batch = windows(flags)
  steps = {name: ours(flags, name, batch) for name in ('sasrec', 'dumoe')}
  try:
    steps['recbole sasrec'] = theirs(flags, batch)
  except ImportError as error:
    print(f'without RecBole: {error}')
  for step in steps.values():
    step()
    step()
  seconds = {name: [] for name in steps}
  for _ in range(flags.repeats):
    for name, step in steps.items():
      start = time.perf_counter()
      step()
      seconds[name].append(time.perf_counter() - start)
  print(
    f'jax {jax.__version__}, {flags.threads} threads; batch {flags.batch}, '
    f'length {flags.length}, width {flags.dim}, {flags.blocks} blocks, '
    f'{flags.items} items'
  )
  for name, values in seconds.items():
    median = statistics.median(values)
    targets = flags.batch * (1 if 'recbole' in name else flags.length)
    print(
      f'{name:15} {1e3 * median:8.1f} ms a step, {1 / median:6.2f} steps/s, '
      f'{targets / median:9.0f} targets/s'
    )


if __name__ == '__main__':
  main()

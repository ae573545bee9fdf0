"""Iterations per second of mean-field solvers against peers, on one machine.

  python experiments/benchmarks/mean_field.py [--peers=PYTHON] \
    [--mfglib=PYTHON] [--bench=PYTHON] [--size=10]

The crowd of `mean_field.envs.crowd_2d`: size x size torus, reward -log mu, from
two cells. Mirror descent and fictitious play in tmlib (compiled, exploitability
only at the end) against the same two iterations in NumPy with dense transition
matrices, which is what a Python loop can do at best; against OpenSpiel where
--peers is an interpreter with `pip install open_spiel==2.0.2`; and against
MFGLib where --mfglib is one with `pip install mfglib==0.3.0`. Their gaps after
equal iterations are compared too: all do the same work. (OpenSpiel's mirror
descent differs from the second iteration on: its policy reads a table that is
rewritten during the sweep.)

bench-mfg-suite (--bench: `pip install bench-mfg-suite==0.1.3`) has stationary
games only, so it meets tmlib on its Lasry-Lions chain: mirror descent with the
exploitability of every iteration. It stops each population after 20 and 50
steps from the last one; tmlib goes to rounding from the start.

Seconds are CPU seconds of the process, all its threads added up, so that other
work on the machine does not count.

  --scaling prints seconds per iteration and memory of the compiled program up
  to 200 x 200 cells and 100 steps; --batch solves 1,000 random games at once.
"""

import argparse
import functools
import json
import platform
import subprocess
import time
from typing import Any

import jax
import numpy as np

from tmlib import mean_field
from tmlib.mean_field import solvers

OPEN_SPIEL = """
import json, sys, time
from open_spiel.python.mfg.algorithms import fictitious_play, mirror_descent
from open_spiel.python.mfg.algorithms import nash_conv
import pyspiel
size, horizon, count = map(int, sys.argv[1:])
game = pyspiel.load_game('mfg_crowd_modelling_2d', dict(
  only_distribution_reward=True, size=size, horizon=horizon,
  initial_distribution='[0|0;1|2]', initial_distribution_value='[0.75;0.25]'))
found = {}
for name, make in (('online_mirror_descent',
                    lambda: mirror_descent.MirrorDescent(game, lr=0.1)),
                   ('fictitious_play',
                    lambda: fictitious_play.FictitiousPlay(game))):
  solver = make()
  begin = time.process_time()
  for _ in range(count):
    solver.iteration()
  seconds = (time.process_time() - begin) / count
  gap = nash_conv.NashConv(game, solver.get_policy()).nash_conv()
  found[name] = [seconds, gap]
print(json.dumps(found))
"""

MFGLIB = """
import json, sys, time
import torch
torch.set_default_dtype(torch.float64)
import mfglib.alg as alg
from mfglib.env import Environment
from mfglib.scoring import exploitability_score
size, horizon, count = map(int, sys.argv[1:])
cells = size * size
step = [(0, 0), (1, 0), (0, 1), (0, -1), (-1, 0)]
def move(s, a):
  return (s // size + a[0]) % size * size + (s % size + a[1]) % size
p = torch.zeros(cells, cells, 5)
for s in range(cells):
  for a in range(5):
    for e in range(5):
      p[move(move(s, step[a]), step[e]), s, a] += 0.2
mu0 = torch.zeros(cells)
mu0[0], mu0[size + 2] = 0.75, 0.25
reward = lambda env, t, d: -torch.log(d.sum(-1) + 1e-25)[:, None].repeat(1, 5)
env = Environment(T=horizon - 1, S=(cells,), A=(5,), mu0=mu0, r_max=60.0,
                  reward_fn=reward, transition_fn=lambda env, t, d: p)
found = {}
for name, solver in (('online_mirror_descent', alg.OnlineMirrorDescent(0.1)),
                     ('fictitious_play', alg.FictitiousPlay())):
  state = solver.init_state(env, torch.full((horizon, cells, 5), 0.2))
  begin = time.process_time()
  for _ in range(count):
    state = solver.step_next_state(state, None, None)
  seconds = (time.process_time() - begin) / count
  found[name] = [seconds, exploitability_score(env, state.pi)]
print(json.dumps(found))
"""

BENCH = """
import json, sys, time
import numpy as np
from benchmfg.envs.lasry_lions_chain import lasry_lions_chain_jit as chain
from benchmfg.envs.lasry_lions_chain.lasry_lions_chain import LasryLionsChain
from benchmfg.envs.mfg_model_class_jit import EnvSpec
from benchmfg.learner.jax.omd_jax import OMD_jax
size, horizon, count = map(int, sys.argv[1:])
env = LasryLionsChain(size, 3, 3, horizon, np.full(size, 1 / size),
                      np.array([0.1, 0.8, 0.1]),
                      crowd_penalty_coefficient=4.0, gamma=0.9)
spec = EnvSpec(env, chain.transition_lasry_lions_chain,
               chain.reward_lasry_lions_chain)
start = np.full((size, 3), 1 / 3, np.float32)
run = lambda n: OMD_jax(spec, start, 0.1, n, temperature=1.0).eval()
run(2)
begin = time.process_time()
gaps = run(count)[-1]
seconds = (time.process_time() - begin) / count
print(json.dumps({'online_mirror_descent': [seconds, gaps[-1]]}))
"""


def crowd(size: int, horizon: int) -> mean_field.MFGame:
  """The game that all solve."""
  initial = np.zeros((size, size))
  initial[0, 0], initial[1, 2] = 0.75, 0.25
  return mean_field.envs.crowd_2d(size, horizon, initial)


def tmlib_seconds(
  game: mean_field.MFGame, name: str, iterations: int, repeats: int = 3
) -> float:
  """CPU seconds per iteration, the best of some calls."""
  solve = getattr(mean_field, name)
  call = lambda: solve(game, iterations, log_every=iterations)
  jax.block_until_ready(call())
  best = np.inf
  for _ in range(repeats):
    begin = time.process_time()
    jax.block_until_ready(call())
    best = min(best, time.process_time() - begin)
  return best / iterations


def numpy_seconds(
  game: mean_field.MFGame, name: str, iterations: int
) -> tuple[float, float]:
  """Seconds per iteration of dense NumPy, and its exploitability at the end."""
  states, actions, _ = game.idx.shape
  p = np.zeros((states, actions, states))
  np.add.at(
    p,
    (np.arange(states)[:, None, None], np.arange(actions)[:, None], game.idx),
    np.asarray(game.prob),
  )
  flat, times = p.reshape(-1, states), range(game.horizon or 0)

  def push(pi):
    flow = [np.asarray(game.mu0)]
    for t in times[:-1]:
      flow.append((flow[-1][:, None] * pi[t]).ravel() @ flat)
    return np.stack(flow)

  def backward(mu, value):
    q, v = np.zeros(game.policy_shape), np.zeros(states)
    for t in reversed(times):
      q[t] = -np.log(mu[t] + 1e-25)[:, None] + (p @ v)
      v = value(q[t], t)
    return q

  pi = np.full(game.policy_shape, 1 / actions)
  y = np.zeros_like(pi)
  begin = time.process_time()
  for k in range(1, iterations + 1):
    mu = push(pi)
    if name == 'online_mirror_descent':
      now = pi
      y += 0.1 * backward(mu, lambda q, t, now=now: (now[t] * q).sum(-1))
      e = np.exp(y - y.max(-1, keepdims=True))
      pi = e / e.sum(-1, keepdims=True)
    else:
      br = np.eye(actions)[backward(mu, lambda q, t: q.max(-1)).argmax(-1)]
      old = k * mu[..., None]
      new = push(br)[..., None]
      total = old + new
      mixed = (old * pi + new * br) / np.where(total > 0, total, 1)
      pi = np.where(total > 0, mixed, 1 / actions)
  seconds = (time.process_time() - begin) / iterations
  mu = push(pi)
  q = backward(mu, lambda q, t: q.max(-1))
  return seconds, float((mu * (q.max(-1) - (pi * q).sum(-1))).sum())


def peer(
  python: str, script: str, size: int, horizon: int, count: int
) -> dict[str, list[float]]:
  """{solver: [seconds per iteration, gap]}, in another interpreter."""
  found = subprocess.run(
    [python, '-c', script, str(size), str(horizon), str(count)],
    capture_output=True, text=True, check=True,
  )  # fmt: skip
  return json.loads(found.stdout)


def compare(args: Any) -> None:
  """Prints one JSON line per solver."""
  game = crowd(args.size, args.horizon)
  given = {
    'open_spiel': (args.peers, OPEN_SPIEL),
    'mfglib': (args.mfglib, MFGLIB),
  }
  peers = {
    name: peer(python, script, args.size, args.horizon, args.peer_iterations)
    for name, (python, script) in given.items()
    if python
  }
  for name in ('online_mirror_descent', 'fictitious_play'):
    ours = tmlib_seconds(game, name, args.iterations)
    slow, _ = numpy_seconds(game, name, args.numpy_iterations)
    _, slow_gap = numpy_seconds(game, name, args.peer_iterations)
    with jax.enable_x64(True):
      solve = getattr(mean_field, name)
      gap = float(solve(game, args.peer_iterations).gap)
    row = {
      'solver': name, 'size': args.size, 'horizon': args.horizon,
      'iterations_per_second': round(1 / ours, 1),
      'numpy_iterations_per_second': round(1 / slow, 1),
      'ratio_to_numpy': round(slow / ours, 1),
      'gap_minus_numpy_gap': gap - slow_gap,
    }  # fmt: skip
    for other, found in peers.items():
      seconds, other_gap = found[name]
      row[f'{other}_iterations_per_second'] = round(1 / seconds, 3)
      row[f'ratio_to_{other}'] = round(seconds / ours, 1)
      row[f'gap_minus_{other}_gap'] = gap - other_gap
    row['machine'] = f'{platform.machine()}, {jax.default_backend()}'
    print(json.dumps(row), flush=True)


def chains(args: Any) -> None:
  """Prints one JSON line per stationary chain, beside bench-mfg-suite."""
  for size in (11, 101):
    game = mean_field.envs.lasry_lions_chain(size, aversion=4.0, discount=0.9)
    count = args.numpy_iterations
    # Its horizon is a number of sweeps: .9^150 is below rounding.
    seconds, gap = peer(args.bench, BENCH, size, 150, count)[
      'online_mirror_descent'
    ]
    row: dict[str, Any] = {'chain': size, 'iterations': count}
    for name, every in (('', 1), ('_gap_at_the_end_only', count)):
      solve = functools.partial(
        mean_field.online_mirror_descent, game, count, log_every=every
      )
      result = jax.block_until_ready(solve())
      begin = time.process_time()
      jax.block_until_ready(solve())
      ours = (time.process_time() - begin) / count
      row[f'iterations_per_second{name}'] = round(1 / ours)
      row[f'ratio_to_bench_mfg_suite{name}'] = round(seconds / ours, 1)
      row['gap'] = float(result.gap)
    row |= {
      'bench_mfg_suite_iterations_per_second': round(1 / seconds),
      'bench_mfg_suite_gap': gap,
    }
    print(json.dumps(row), flush=True)


def scaling(args: Any) -> None:
  """Prints one JSON line per size: seconds and bytes per iteration."""
  for size, horizon in ((10, 10), (30, 30), (100, 50), (200, 100)):
    game = crowd(size, horizon)
    count = max(2, min(args.iterations, 10**7 // (size * size * horizon)))
    seconds = tmlib_seconds(game, 'online_mirror_descent', count, repeats=1)
    initial = mean_field.uniform_policy(game)
    compiled = solvers.run_compiled.lower(
      game, {'lr': 0.1}, initial, 0.0, name='online_mirror_descent', logs=1,
      every=count,
    ).compile()  # fmt: skip
    memory: Any = compiled.memory_analysis()
    row = {
      'size': size, 'horizon': horizon, 'states': size * size,
      'seconds_per_iteration': round(seconds, 6),
      'argument_mb': round(memory.argument_size_in_bytes / 2**20, 2),
      'temporary_mb': round(memory.temp_size_in_bytes / 2**20, 2),
      'output_mb': round(memory.output_size_in_bytes / 2**20, 2),
    }  # fmt: skip
    print(json.dumps(row), flush=True)


def batch(args: Any) -> None:
  """Prints one JSON line: a batch of random games, together and in sequence."""
  games = [
    mean_field.envs.garnet(seed, 20, 3, 2, 10) for seed in range(args.games)
  ]
  many = mean_field.stack_games(games)

  def solve(game):
    return mean_field.online_mirror_descent(game, 100, log_every=100)

  together = jax.jit(jax.vmap(solve))
  jax.block_until_ready(together(many))
  begin = time.process_time()
  result = jax.block_until_ready(together(many))
  seconds = time.process_time() - begin
  # Once to compile: games differ in the width of their lists of ways in.
  for _ in range(2):
    begin = time.process_time()
    for game in games[:20]:
      jax.block_until_ready(solve(game))
    single = (time.process_time() - begin) / 20
  row = {
    'games': args.games, 'states': 20, 'iterations': 100,
    'seconds': round(seconds, 3),
    'games_per_second': round(args.games / seconds),
    'games_per_second_in_sequence': round(1 / single),
    'median_gap': float(np.median(result.gap)),
  }  # fmt: skip
  print(json.dumps(row), flush=True)


def main() -> None:
  """Parses flags and prints the rows that they ask for."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--size', type=int, default=10)
  parser.add_argument('--horizon', type=int, default=10)
  parser.add_argument('--iterations', type=int, default=1000)
  parser.add_argument('--peer_iterations', type=int, default=3)
  parser.add_argument('--numpy_iterations', type=int, default=200)
  parser.add_argument('--peers', default='')
  parser.add_argument('--mfglib', default='')
  parser.add_argument('--bench', default='')
  parser.add_argument('--games', type=int, default=1000)
  parser.add_argument('--scaling', action='store_true')
  parser.add_argument('--batch', action='store_true')
  args = parser.parse_args()
  if args.scaling:
    scaling(args)
  elif args.batch:
    batch(args)
  else:
    compare(args)
    if args.bench:
      chains(args)


if __name__ == '__main__':
  main()

"""Rounds per second of the sequential algorithms against Python loops.

  python experiments/benchmarks/dueling.py [--rounds=1048576] [--seeds=1000]

One round of fair epsilon-greedy, K = 8 arms and N = 4 users: decide whether to
explore, take the next pair or draw two arms from the current lottery, let all
users answer, update the tally, add the regret. tmlib plays all seeds in one
scan. Baselines, each with the lottery held fixed (they are spared the solver):
  numpy      one seed, one round at a time, as bandit libraries are written;
  numpy_all  all seeds at once, one round at a time: what NumPy can do;
  duelpy     one seed with its own feedback and estimate classes, a pair of them
             per user (optional: pip install duelpy).
A ratio is tmlib's rounds x seeds per second over the baseline's. For 'etc' and
'elimination' the baseline is still the epsilon-greedy loop.
"""

import argparse
import importlib
import json
import os
import platform
import time
from typing import Any

import jax
import numpy as np

from tmlib import dueling
from tmlib.dueling import greedy, regret

ARMS, USERS = 8, 4


def instance() -> dueling.DuelingEnv:
  """Four users who hide different arms."""
  return dueling.hard_instance(
    jax.random.key(0), ARMS, USERS, 0.1, groups=USERS
  )


def tmlib_rate(rounds: int, seeds: int, policy: str) -> tuple[float, float]:
  """(rounds x seeds per second, seconds of the timed part)."""
  method: Any = dueling.bandit_method(instance(), policy, rounds, seeds)(None)
  fold = min(rounds, 4096)
  step = jax.jit(
    lambda s: jax.lax.scan(lambda s, _: method.update(s), s, length=fold)[0],
    donate_argnums=0,
  )
  state = jax.block_until_ready(step(method.init(jax.random.key(1))))
  begin = time.perf_counter()
  calls = max(1, rounds // fold - 1)
  for _ in range(calls):
    state = step(state)
  jax.block_until_ready(state)
  seconds = time.perf_counter() - begin
  return calls * fold * seeds / seconds, seconds


def _setting():
  env = instance()
  p = np.asarray(env.preference, np.float64)
  b = np.asarray(dueling.borda_scores(p.astype(np.float32)), np.float64)
  best = np.exp(np.log(b @ np.asarray(dueling.solve_nsw(b).pi)).mean())
  loss = best - np.exp(np.log(b).mean(0))
  pairs = list(zip(*map(np.asarray, regret.pair_order(ARMS)), strict=True))
  return p, loss, pairs, greedy.greedy_epochs(ARMS, USERS, 2**20)


def numpy_rate(rounds: int) -> float:
  """One seed, NumPy, one round at a time."""
  p, loss, pairs, epochs = _setting()
  rng = np.random.default_rng(0)
  wins, counts = np.zeros((ARMS, ARMS, USERS)), np.zeros((ARMS, ARMS))
  lottery, explored, total = np.full(ARMS, 1 / ARMS), 0, 0.0
  cumulative, committed = np.cumsum(lottery), 0.01
  begin = time.perf_counter()
  for t in range(rounds):
    epsilon = epochs.epsilon[np.searchsorted(epochs.start, t, side='right') - 1]
    explore = rng.random() < epsilon
    if explore:
      i, j = pairs[explored % len(pairs)]
    else:
      i, j = np.searchsorted(cumulative, rng.random(2) * cumulative[-1])
    won = rng.random(USERS) < p[:, i, j]
    if explore:
      wins[i, j] += won
      counts[i, j] += 1
      explored += 1
      total += (loss[i] + loss[j]) / 2
    else:
      total += committed
  return rounds / (time.perf_counter() - begin)


def numpy_all_rate(rounds: int, seeds: int) -> float:
  """All seeds at once, NumPy, one round at a time; rounds x seeds a second."""
  p, loss, pairs, epochs = _setting()
  rng = np.random.default_rng(0)
  index = np.zeros((ARMS, ARMS), int)
  i, j = np.array(pairs).T
  index[i, j] = index[j, i] = np.arange(len(pairs))
  p = p.transpose(1, 2, 0)
  wins = np.zeros((seeds, len(pairs), USERS), np.int32)
  counts = np.zeros((seeds, len(pairs)), np.int32)
  rows, explored = np.arange(seeds), np.zeros(seeds, int)
  cumulative = np.cumsum(np.full(ARMS, 1 / ARMS))
  total, committed = np.zeros(seeds), 0.01
  begin = time.perf_counter()
  for t in range(rounds):
    epsilon = epochs.epsilon[np.searchsorted(epochs.start, t, side='right') - 1]
    explore = rng.random(seeds) < epsilon
    pair = explored % len(pairs)
    draws = np.searchsorted(cumulative, rng.random((2, seeds)) * cumulative[-1])
    left = np.where(explore, i[pair], draws[0])
    right = np.where(explore, j[pair], draws[1])
    won = rng.random((seeds, USERS)) < p[left, right]
    at = index[left, right]
    wins[rows, at] += won & explore[:, None]
    counts[rows, at] += explore
    explored += explore
    total += np.where(explore, (loss[left] + loss[right]) / 2, committed)
  return rounds * seeds / (time.perf_counter() - begin)


def duelpy_rate(rounds: int) -> float | None:
  """One seed, duelpy's feedback and estimate; None if it is not installed."""
  try:
    feedback: Any = importlib.import_module('duelpy.feedback.matrix_feedback')
    stats: Any = importlib.import_module('duelpy.stats.preference_estimate')
  except ImportError:
    return None
  p, loss, pairs, epochs = _setting()
  rng = np.random.RandomState(0)
  users = [feedback.MatrixFeedback(q, random_state=rng) for q in p]
  estimates = [stats.PreferenceEstimate(num_arms=ARMS) for _ in p]
  lottery, explored, total = np.full(ARMS, 1 / ARMS), 0, 0.0
  cumulative, committed = np.cumsum(lottery), 0.01
  begin = time.perf_counter()
  for t in range(rounds):
    epsilon = epochs.epsilon[np.searchsorted(epochs.start, t, side='right') - 1]
    explore = rng.random_sample() < epsilon
    if explore:
      i, j = pairs[explored % len(pairs)]
    else:
      i, j = np.searchsorted(cumulative, rng.random_sample(2) * cumulative[-1])
    for user, estimate in zip(users, estimates, strict=True):
      won = user.duel(i, j)
      if explore:
        estimate.enter_sample(i, j, won)
    explored += explore
    total += (loss[i] + loss[j]) / 2 if explore else committed
  return rounds / (time.perf_counter() - begin)


def main() -> None:
  """Prints one JSON line per policy."""
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--rounds', type=int, default=2**20)
  parser.add_argument('--seeds', type=int, default=1000)
  parser.add_argument('--loop_rounds', type=int, default=20_000)
  args = parser.parse_args()
  base = {
    'numpy': numpy_rate(args.loop_rounds),
    'numpy_all': numpy_all_rate(args.loop_rounds // 10, args.seeds),
    'duelpy': duelpy_rate(args.loop_rounds),
  }
  for policy in ('eps_greedy', 'etc', 'elimination'):
    rate, seconds = tmlib_rate(args.rounds, args.seeds, policy)
    row: dict[str, Any] = {
      'policy': policy,
      'rounds_per_second': round(rate),
      'seconds': round(seconds, 2),
    }
    for name, slow in base.items():
      row[f'{name}_rounds_per_second'] = slow and round(slow)
      row[f'ratio_to_{name}'] = slow and round(rate / slow, 1)
    row['machine'] = (
      f'{platform.machine()}, {os.cpu_count()} cores, {jax.default_backend()}'
    )
    print(json.dumps(row), flush=True)


if __name__ == '__main__':
  main()

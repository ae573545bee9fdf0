r"""What the compilers say about our kernels and about those of JAX.

  python experiments/benchmarks/kernels_static.py --out=DIR
    [--ops=attention,gmm] [--shapes=causal] [--chips=v5e,H100]
    [--passes=forward,backward] [--who='ours,jax flash'] [--blocks=chosen|all]
    [--jobs=1] [--quick] [--join=DIR,DIR] [--timings=DIR]

Needs no device: libtpu for TPUs (extra `aot`), jax-cuda13-plugin and ptxas for
GPUs; where one is missing its chips are left out by name. Every figure is a
COMPILER ESTIMATE or a property of compiled code, never a measurement. Each
kernel is compiled alone in a process of its own (some estimates end theirs);
the plain XLA programs share this one.

Writes rows.jsonl (as they come; rows of the same versions and commit are kept
when the command is run again), table.md and cycles.png. `--quick` is one row;
`--join` makes the table of the rows of other folders.
`--timings` compares with published timings instead, see kernels_timings.py.
"""

import argparse
import collections
import concurrent.futures
import contextlib
import datetime
import functools
import json
import os
import pathlib
import subprocess
import sys
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Read when jax starts: no device is asked for, and none is sought.
ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-1',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
  """Of the command line; lists are separated by commas."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawTextHelpFormatter
  )
  many = lambda text: [x for x in text.split(',') if x]
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--ops', type=many, default=[])
  # A name may hold a comma.
  parser.add_argument('--shapes', type=lambda x: x.split(';'), default=[])
  parser.add_argument('--chips', type=many, default=[])
  parser.add_argument('--passes', type=many, default=['forward', 'backward'])
  parser.add_argument('--who', type=many, default=[])
  parser.add_argument('--blocks', choices=['chosen', 'all'], default='chosen')
  parser.add_argument('--jobs', type=int, default=1)
  parser.add_argument('--quick', action='store_true')
  parser.add_argument('--join', type=many, default=[])
  parser.add_argument('--timings', type=pathlib.Path)
  return parser.parse_args(argv)


def versions() -> dict[str, str]:
  """Of what decides the figures, and the commit of this tree."""
  found = {}
  for name in ('jax', 'jaxlib', 'libtpu', 'jax-cuda13-plugin'):
    try:
      found[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
      found[name] = 'missing'
  run = functools.partial(
    subprocess.run, cwd=ROOT, capture_output=True, text=True, check=False
  )
  found['commit'] = run(['git', 'rev-parse', '--short', 'HEAD']).stdout.strip()
  changed = run(['git', 'status', '--short', '--', 'kernels_pallas']).stdout
  found['commit'] += ' with changes' if changed.strip() else ''
  return found


def plan(flags: argparse.Namespace) -> list[tuple[Any, ...]]:
  """(case, chip, pass, who, blocks, function, note) of every row."""
  from experiments.benchmarks.kernels_peers import PEERS
  from kernels_pallas.tuning import CHIPS, all_cases

  wanted = lambda name, names: not names or name in names
  rows = []
  for case in all_cases():
    if case.shape.startswith('tiny') and case.shape not in flags.shapes:
      continue
    if not (wanted(case.op, flags.ops) and wanted(case.shape, flags.shapes)):
      continue
    for chip in CHIPS.values():
      if not wanted(chip.name, flags.chips):
        continue
      ours = [None]
      if flags.blocks == 'all':
        ours += case.blocks.get(chip.platform, ())
      for kind in flags.passes:
        for blocks in ours:
          function = case.make(blocks, None)
          rows.append((case, chip, kind, 'ours', blocks, function, ''))
        for peer in PEERS:
          if peer.op != case.op or peer.platform not in (chip.platform, 'any'):
            continue
          tried = peer.blocks if flags.blocks == 'all' else peer.blocks[:3]
          for blocks in tried:
            function = peer.make(case, blocks)
            if function is not None:
              rows.append(
                (case, chip, kind, peer.name, blocks, function, peer.note)
              )
  rows = [row for row in rows if wanted(row[3], flags.who)]
  return rows[:1] if flags.quick else rows


def xla_row(function: Any, operands: Any, chip: Any) -> dict[str, Any]:
  """XLA's own model of a plain program: its optimal seconds, as cycles."""
  import jax
  import numpy as np
  from jax.sharding import Mesh, NamedSharding, PartitionSpec

  from kernels_pallas.tuning.compile_one import topology_of

  if chip.platform == 'gpu':
    return {'compiles': True, 'reason': 'XLA models no GPU without one'}
  mesh = Mesh(np.array(topology_of(chip).devices[:1]), ('device',))
  whole = NamedSharding(mesh, PartitionSpec())
  placed = [
    jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole) for x in operands
  ]
  try:
    lowered = jax.jit(function).trace(*placed)
    compiled = lowered.lower(lowering_platforms=('tpu',)).compile()
  except Exception as error:  # Whatever the compiler says is the answer.
    return {'compiles': False, 'reason': str(error)[:300]}
  cost, memory = compiled.cost_analysis() or {}, compiled.memory_analysis()
  seconds = cost.get('optimal_seconds', 0)
  return {
    'compiles': True,
    'cycles': round(seconds * chip.clock) if seconds > 0 else None,
    'reason': f'optimal_seconds; {memory.temp_size_in_bytes >> 20} MiB beside'
    if memory
    else '',
  }


def known_groups(case: Any) -> Any:
  """A context for traces in which equal groups of rows are known to be so."""
  if not case.options.get('equal'):
    return contextlib.nullcontext()
  from experiments.benchmarks.kernels_known import equal_groups

  return equal_groups(int(case.operands[2][0]))


def kernel_rows(
  function: Any, operands: Any, chip: Any, skip: int
) -> list[dict[str, Any]]:
  """A row per Pallas kernel, of which the first `skip` are left out."""
  from kernels_pallas.tuning import find_kernels, profile

  try:
    kernels = find_kernels(function, operands, chip)[skip:]
  except Exception as error:  # What an op does not take is a row, too.
    why = f'{type(error).__name__}: {error}'
    return [{'kernel': '', 'compiles': False, 'reason': why[:300]}]
  if not kernels:
    return [{'kernel': '', 'compiles': True, 'reason': 'plain XLA there'}]
  found = []
  for kernel in kernels:
    figures = profile(kernel, chip)._asdict()
    figures['reason'] = figures['reason'][:300]
    grid = [x if isinstance(x, int) else None for x in kernel.grid]
    found.append({'kernel': kernel.name, 'grid': grid, **figures})
  return found


def run_row(row: tuple[Any, ...]) -> list[dict[str, Any]]:
  """The finished rows of one entry of the plan."""
  from experiments.benchmarks.kernels_peers import PEERS
  from kernels_pallas.tuning import find_kernels
  from kernels_pallas.tuning.cases import backward, structs

  case, chip, kind, who, blocks, function, note = row
  operands = structs(case)
  back = kind == 'backward'
  peer = next((p for p in PEERS if p.name == who), None)
  plain = peer is not None and peer.platform == 'any'
  whole = backward(function) if back else function
  if plain:
    done = [{'kernel': '', **xla_row(whole, operands, chip)}]
  else:
    with known_groups(case):
      try:
        skip = len(find_kernels(function, operands, chip)) if back else 0
      except Exception:  # The same error is the row's reason below.
        skip = 0
      done = kernel_rows(whole, operands, chip, skip)
  scale = case.scale if back else (1.0, 1.0)
  floor = chip.floor(case.flops * scale[0], case.bytes_moved * scale[1])
  head = {
    **dict(zip(('op', 'shape', 'chip', 'pass', 'who'), key(row), strict=False)),
    'blocks': blocks,
    'floor_cycles': round(floor * chip.clock),
  }
  for x in done:
    x['reason'] = '; '.join(filter(None, [x.get('reason'), note]))
  return [head | x for x in done]


def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
  """What tells a row of the plan from the others."""
  case, chip, kind, who, blocks = row[:5]
  blocks = None if blocks is None else list(blocks)
  return case.op, case.shape, chip.name, kind, who, str(blocks)


def missing() -> dict[str, str]:
  """Chips that can not be compiled for here, and why."""
  from kernels_pallas.tuning import CHIPS
  from kernels_pallas.tuning.chips import missing_compiler

  found = {name: missing_compiler(chip) for name, chip in CHIPS.items()}
  return {name: why for name, why in found.items() if why}


def run(flags: argparse.Namespace) -> dict[str, Any]:
  """Fills rows.jsonl; returns missing compilers and all rows."""
  flags.out.mkdir(parents=True, exist_ok=True)
  path = flags.out / 'rows.jsonl'
  about, lacking = versions(), missing()
  for chip, why in lacking.items():
    print(f'{chip} is left out: {why}', file=sys.stderr)
  command = ' '.join(x for x in sys.argv[1:] if not x.startswith('--out'))
  kept = []
  if path.exists():
    lines = path.read_text(encoding='utf-8').splitlines()
    kept = [x for x in map(json.loads, lines) if x['versions'] == about]
  known = lambda x: (
    *(x[k] for k in ('op', 'shape', 'chip', 'pass', 'who')),
    str(x['blocks']),
  )
  have = set(map(known, kept))
  todo = [r for r in plan(flags) if r[1].name not in lacking]
  todo = [row for row in todo if key(row) not in have]
  path.write_text(''.join(json.dumps(x) + '\n' for x in kept), encoding='utf-8')
  with (
    path.open('a', encoding='utf-8') as file,
    concurrent.futures.ThreadPoolExecutor(flags.jobs) as pool,
  ):
    for n, rows in enumerate(pool.map(run_row, todo)):
      for row in rows:
        row |= {'versions': about, 'command': command}
        file.write(json.dumps(row) + '\n')
        kept.append(json.loads(json.dumps(row)))
        file.flush()
        name = ' '.join(str(row[x]) for x in ('chip', 'op', 'shape', 'pass'))
        cycles = row.get('cycles') or row.get('registers')
        print(
          f'{n + 1}/{len(todo)} {name} {row["who"]} {row["blocks"]} '
          f'{row["kernel"]} {cycles} {row["reason"][:80]}',
          flush=True,
        )
  return {'missing': lacking, 'rows': kept}


def join(flags: argparse.Namespace) -> dict[str, Any]:
  """The rows of other folders, of which the last of the same name counts."""
  flags.out.mkdir(parents=True, exist_ok=True)
  rows: dict[str, Any] = {}
  for folder in flags.join:
    text = (pathlib.Path(folder) / 'rows.jsonl').read_text(encoding='utf-8')
    # Kernels of one call may share a name.
    times: collections.Counter[str] = collections.Counter()
    for row in map(json.loads, text.splitlines()):
      names = 'op', 'shape', 'pass', 'chip', 'who', 'blocks', 'kernel'
      name = str([row[x] for x in names])
      rows[f'{name} {times[name]}'] = row
      times[name] += 1
  return {'missing': {}, 'rows': list(rows.values())}


def main() -> None:
  """Runs the plan and writes the report."""
  flags = arguments()
  if flags.timings:
    from experiments.benchmarks import kernels_timings

    kernels_timings.compare(flags)
    return
  from experiments.benchmarks import kernels_report

  done = join(flags) if flags.join else run(flags)
  today = datetime.date.today().isoformat()
  text = kernels_report.table(done, today)
  (flags.out / 'table.md').write_text(text, encoding='utf-8')
  kernels_report.picture(done['rows'], flags.out / 'cycles.png')


if __name__ == '__main__':
  sys.path[0] = str(ROOT)
  os.environ.update(ENVIRONMENT)
  main()

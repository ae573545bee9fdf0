"""What the compilers say about a kernel, without a device.

Every figure is a compiler's estimate or a property of its code, none is
measured. A TPU's compiler simulates the grid: tiles that a program skips for
its place in the grid count nothing, whatever depends on data counts as a guess.
"""

import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from typing import Any, NamedTuple

from kernels_pallas.tuning.chips import Chip, missing_compiler
from kernels_pallas.tuning.kernels import Kernel, to_bytecode

__all__ = [
  'Profile',
  'occupancy',
  'parse_bundles',
  'parse_launch',
  'parse_ptxas',
  'parse_sass',
  'parse_utilization',
  'profile',
]

# The estimate simulates the grid step by step, in up to five megabytes a step.
_MOST_STEPS = 700
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Profile(NamedTuple):
  """Of one kernel on one chip; None for what its compiler does not say.

  Attributes:
    compiles: whether the compiler takes it.
    reason: why not, or why an estimate is missing.
    cycles: of the whole grid on one device.
    vmem: bytes of on-chip memory of a TPU core.
    bundles: instructions of the loop over the grid, all branches.
    units: share of the slots of each TPU unit that the code fills.
    spills: stores of spilled registers in a TPU's code, bytes on a GPU.
    registers: per thread.
    shared: bytes of shared memory per block.
    threads: per block.
    occupancy: resident threads over the most that a multiprocessor holds.
    tensor: tensor-core instructions in the code.
    exps: exponentials in the code.
  """

  compiles: bool
  reason: str = ''
  cycles: int | None = None
  vmem: int | None = None
  bundles: int | None = None
  units: dict[str, float] | None = None
  spills: int | None = None
  registers: int | None = None
  shared: int | None = None
  threads: int | None = None
  occupancy: float | None = None
  tensor: int | None = None
  exps: int | None = None


def parse_bundles(text: str) -> int:
  """Instructions inside the loop over the grid, of a `final_bundles` dump."""
  inside = re.compile(r'^\s*(0x)?[0-9a-f]+\s+(\w\w)?\s*: >', re.MULTILINE)
  return len(inside.findall(text))


def parse_utilization(text: str) -> tuple[dict[str, float], int]:
  """Filled share of each unit's slots, and the number of spill stores.

  Args:
    text: of a dump of `static-per-bundle-utilization`: names, slots per
      instruction, and a row of filled slots per instruction.
  """
  _, names, slots, _, *rows = text.splitlines()
  names = [x.strip() for x in names.split(',')]
  slots = [int(x) for x in slots.split()]
  filled = [0] * len(names)
  rows = [row.split() for row in rows if row.strip()]
  for row in rows:
    filled = [a + int(b) for a, b in zip(filled, row, strict=True)]
  total = max(len(rows), 1)
  shares = {
    name: used / (total * most)
    for name, used, most in zip(names, filled, slots, strict=True)
  }
  return shares, dict(zip(names, filled, strict=True))['VSTORE:SPILL']


def parse_ptxas(text: str) -> dict[str, int]:
  """Registers and bytes of spill stores, of `ptxas -v`; the worst function."""
  registers = [int(x) for x in re.findall(r'Used (\d+) registers', text)]
  spills = [int(x) for x in re.findall(r'(\d+) bytes spill stores', text)]
  if not registers:
    raise ValueError(f'ptxas named no registers: {text[:200]!r}')
  return {'registers': max(registers), 'spills': max(spills, default=0)}


def parse_launch(text: str) -> dict[str, int]:
  """Threads and bytes of shared memory per block, of XLA's thunk sequence."""
  threads = re.search(r'threads: \[(\d+), ?(\d+), ?(\d+)\]', text)
  shared = re.search(r'shared_memory: (\d+)', text)
  if threads is None:
    return {}
  size = int(threads[1]) * int(threads[2]) * int(threads[3])
  return {'threads': size, 'shared': int(shared[1]) if shared else 0}


def parse_sass(text: str) -> dict[str, int]:
  """Tensor-core and exponential instructions in a GPU's code."""
  tensor = re.findall(r'\b(?:HGMMA|HMMA|UTCHMMA|UTCQMMA|UTCMMA)\b', text)
  return {'tensor': len(tensor), 'exps': len(re.findall(r'MUFU\.EX2', text))}


def occupancy(chip: Chip, registers: int, shared: int, threads: int) -> float:
  """Resident threads of a multiprocessor over the most that it holds, 2048."""
  warps = -(-threads // 32)
  # Registers are given out to warps in lots of 256.
  per_block = warps * (-(-registers * 32 // 256) * 256)
  blocks = min(
    65536 // max(per_block, 1),
    (chip.shared + 1024) // (shared + 1024),
    2048 // threads,
    32,
  )
  return blocks * threads / 2048


def _environment(chip: Chip, folder: str, cycles: bool) -> dict[str, str]:
  env = dict(os.environ, JAX_PLATFORMS='cpu')
  env['PYTHONPATH'] = os.pathsep.join(
    [str(_ROOT), *filter(None, [env.get('PYTHONPATH')])]
  )
  if chip.platform == 'gpu':
    env['XLA_FLAGS'] = (
      f'--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_emitter_re=ptx'
    )
    return env
  flags = [
    f'--xla_jf_dump_to={folder}',
    '--xla_jf_dump_llo_text=true',
    '--xla_jf_dump_llo_pass_label_regex=.*final.*',
  ]
  if cycles:
    flags.append(f'--xla_jf_dump_static_llo_profile_to={folder}')
  return env | {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-1',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
    'LIBTPU_INIT_ARGS': ' '.join(flags),
  }


def _compile(
  module: bytes, chip: Chip, folder: str, cycles: bool, seconds: int
) -> dict[str, Any]:
  path = pathlib.Path(folder) / 'module.mlir'
  path.write_bytes(module)
  worker = 'kernels_pallas.tuning.compile_one'
  done = subprocess.run(
    [sys.executable, '-m', worker, chip.name, str(path), str(seconds)],
    env=_environment(chip, folder, cycles),
    capture_output=True,
    text=True,
    check=False,
  )
  if done.returncode == 0 and done.stdout.strip():
    return json.loads(done.stdout.strip().splitlines()[-1])
  if done.returncode == -24:  # SIGXCPU
    why = f'the compiler ended: more than {seconds} s of computation'
    return {'compiles': False, 'reason': why}
  fatal = re.findall(r'^F\d.*?\] (.*)', done.stderr, re.MULTILINE)
  why = fatal[0] if fatal else done.stderr.strip()[-200:]
  how = f'the compiler ended (exit code {done.returncode})'
  return {'compiles': False, 'reason': f'{how}: {why}'}


def _read_tpu(folder: str) -> dict[str, Any]:
  """Of the dump of the kernel, the longest: XLA may copy operands before it."""
  found: dict[str, Any] = {}

  def longest(pattern):
    paths = [
      path
      for path in pathlib.Path(folder).glob(pattern)
      if '-TLP-' not in path.name and '-<late' not in path.name
    ]
    return (
      max(paths, key=lambda x: x.stat().st_size).read_text() if paths else ''
    )

  units = longest('*-final_hlo-static-per-bundle-utilization.txt')
  bundles = longest('*[0-9]-final_bundles.txt')
  if units:
    found['units'], found['spills'] = parse_utilization(units)
  if bundles:
    found['bundles'] = parse_bundles(bundles)
  return found


def _cuda_tool(name: str) -> str | None:
  """Path of a program that comes with NVIDIA's wheels, or on PATH."""
  import importlib.util
  import shutil

  spec = importlib.util.find_spec('nvidia')
  for place in (spec.submodule_search_locations or []) if spec else []:
    for path in sorted(pathlib.Path(place).glob(f'*/bin/{name}')):
      return str(path)
  return shutil.which(name)


def _read_gpu(folder: str, chip: Chip) -> dict[str, Any]:
  found: dict[str, Any] = {}
  run = lambda *x: subprocess.run(
    x, capture_output=True, text=True, check=False
  )
  for path in sorted(pathlib.Path(folder).glob('*.thunk_sequence.txt')):
    found |= parse_launch(path.read_text())
  ptxas, dump = _cuda_tool('ptxas'), _cuda_tool('cuobjdump')
  major, minor = chip.capability
  arch = f'sm_{major}{minor}' + ('a' if major >= 9 else '')
  for path in sorted(pathlib.Path(folder).glob('*.ptx')):
    if ptxas is None or '.entry' not in path.read_text():
      continue
    cubin = str(path.with_suffix('.cubin'))
    told = run(ptxas, '-v', f'-arch={arch}', str(path), '-o', cubin)
    found |= parse_ptxas(told.stderr + told.stdout)
    if dump is not None:
      found |= parse_sass(run(dump, '-sass', cubin).stdout)
  if {'registers', 'shared', 'threads'} <= found.keys():
    found['occupancy'] = occupancy(
      chip, found['registers'], found['shared'], found['threads']
    )
  return found


def _without_cycles(kernel: Kernel, chip: Chip) -> str:
  """Why no estimate of cycles is asked for; empty where it is, or no TPU."""
  if chip.name == 'v4':
    return 'v4 has no model of its DMA'
  if chip.platform == 'tpu' and not all(
    isinstance(x, int) for x in kernel.grid
  ):
    return 'how many steps there are depends on data'
  if chip.platform == 'tpu' and kernel.steps > _MOST_STEPS:
    return f'{kernel.steps} steps are too many to simulate'
  return ''


def profile(
  kernel: Kernel, chip: Chip, *, cycles: bool = True, seconds: int = 120
) -> Profile:
  """Compiles a kernel in a process of its own and reads what it leaves.

  Where the estimate of cycles ends the process, or does not come to an end, a
  second one does without.

  Args:
    kernel: of `find_kernels`.
    chip: to compile for.
    cycles: whether to ask for cycles at all.
    seconds: of computation that a process may take.

  Raises:
    ImportError: if the compiler of that chip is not installed.
  """
  missing = missing_compiler(chip)
  if missing:
    raise ImportError(f'no figures for {chip.name}: {missing}')
  try:
    module = to_bytecode(kernel, chip)
  except Exception as error:  # Whatever Pallas does not take is the answer.
    return Profile(False, f'{type(error).__name__}: {error}')
  with tempfile.TemporaryDirectory() as folder:
    reason = _without_cycles(kernel, chip)
    cycles = cycles and not reason and chip.platform == 'tpu'
    result = _compile(module, chip, folder, cycles, seconds)
    if (
      cycles and not result['compiles'] and 'compiler ended' in result['reason']
    ):
      reason = result['reason']
      result = _compile(module, chip, folder, False, seconds)
    if not result['compiles']:
      return Profile(**result)
    read = (
      _read_tpu(folder) if chip.platform == 'tpu' else _read_gpu(folder, chip)
    )
  return Profile(**{**result, **read, 'reason': reason})

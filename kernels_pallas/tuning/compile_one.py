"""Compiles one module for one chip: python -m ...compile_one CHIP FILE SECONDS.

A process of its own for `profile`: some of the compilers' estimates end the
process, and the flags that ask for them are read once. Prints one line of JSON.
"""

import json
import pathlib
import re
import sys
from typing import Any

import numpy as np

from kernels_pallas.tuning.chips import (
  Chip,
  find_chip,
  missing_compiler,
  target_config,
)

__all__ = ['compile_module', 'find_estimates', 'topology_of']


def topology_of(chip: Chip) -> Any:
  """JAX's description of a slice, without a device.

  Raises:
    ImportError: if the compiler of that chip is not installed.
  """
  from jax.experimental import topologies

  missing = missing_compiler(chip)
  if missing:
    raise ImportError(missing)
  if chip.platform == 'tpu':
    return topologies.get_topology_desc(chip.topology, 'tpu')
  return topologies.get_topology_desc(
    '', 'cuda', target_config=target_config(chip), topology=chip.topology
  )


def compile_module(chip: Chip, module: bytes) -> str:
  """HLO of the compiled program."""
  from jax._src import compiler
  from jax._src.interpreters import mlir
  from jax._src.lib import xla_client  # pyright: ignore
  from jax._src.lib.mlir import ir  # pyright: ignore

  with mlir.make_ir_context():
    parsed = ir.Module.parse(module)
  devices = topology_of(chip).devices[:1]
  options = compiler.get_compile_options(1, 1)
  compiled = devices[0].client.compile(
    parsed, xla_client.DeviceList(tuple(np.array(devices))), options
  )
  return '\n'.join(x.to_string() for x in compiled.hlo_modules())


def find_estimates(hlo: str) -> dict[str, int]:
  """Cycles and bytes of on-chip memory of the kernel in a TPU program."""
  found = {}
  for line in hlo.splitlines():
    if 'tpu_custom_call' not in line:
      continue
    cycles = re.search(r'"estimated_cycles":"(\d+)"', line)
    memory = re.search(
      r'"used_scoped_memory_configs":\[[^\]]*"size":"(\d+)"', line
    )
    if cycles:
      found['cycles'] = int(cycles[1])
    if memory:
      found['vmem'] = int(memory[1])
  return found


def _limit(seconds: int) -> None:
  """Ends this process after that much computation, where that is possible."""
  try:
    import resource
  except ImportError:
    return
  resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))


def main() -> None:
  """Reads its three arguments."""
  chip, path = find_chip(sys.argv[1]), pathlib.Path(sys.argv[2])
  _limit(int(sys.argv[3]))
  try:
    hlo = compile_module(chip, path.read_bytes())
    result = {'compiles': True, **find_estimates(hlo)}
  except Exception as error:  # Whatever a compiler says is the answer.
    result = {'compiles': False, 'reason': f'{type(error).__name__}: {error}'}
  sys.stdout.write(json.dumps(result) + '\n')


if __name__ == '__main__':
  main()

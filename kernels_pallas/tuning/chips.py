"""The chips that kernels are compiled for, and which one is asked for now.

Peaks are those of one JAX device. A TPU's clock is its peak matrix rate over
the multiply-adds per cycle that its compiler counts: a square of 128 or 256 per
matrix unit.
"""

import importlib.util
from typing import NamedTuple

import jax

__all__ = [
  'CHIPS',
  'Chip',
  'chip_in_use',
  'find_chip',
  'missing_compiler',
  'target_config',
]


class Chip(NamedTuple):
  """A kind of device.

  Attributes:
    name: as in tables.
    platform: 'tpu' or 'gpu'.
    kind: JAX's `device_kind`.
    topology: of the smallest slice that the TPU compiler knows.
    cores: tensor cores of a TPU, multiprocessors of a GPU.
    flops: 1/s, products and sums in bfloat16.
    bandwidth: bytes/s of the device memory.
    clock: Hz.
    shared: bytes of shared memory that a block may ask for.
    capability: of a GPU.
  """

  name: str
  platform: str
  kind: str
  topology: str
  cores: int
  flops: float
  bandwidth: float
  clock: float
  shared: int = 0
  capability: tuple[int, int] = (0, 0)

  def floor(self, flops: float, bytes_moved: float) -> float:
    """Seconds that the work takes at least: matrix rate or bandwidth."""
    return max(flops / self.flops, bytes_moved / self.bandwidth)


def _tpu(name, kind, topology, cores, *rates):
  return Chip(name, 'tpu', kind, topology, cores, *rates)


def _gpu(name, kind, *rest):
  return Chip(name, 'gpu', kind, '1x1x1', *rest)


CHIPS = {
  chip.name: chip
  for chip in (
    _tpu('v4', 'TPU v4', 'v4:2x2x1', 2, 275e12, 1228e9, 1.05e9),
    _tpu('v5e', 'TPU v5 lite', 'v5e:2x2', 1, 197e12, 819e9, 1.5e9),
    _tpu('v5p', 'TPU v5', 'v5p:2x2x1', 2, 459e12, 2765e9, 1.75e9),
    _tpu('v6e', 'TPU v6 lite', 'v6e:2x2', 1, 918e12, 1640e9, 1.75e9),
    _tpu('7x', 'TPU7x', 'tpu7x:2x2x1', 1, 1155e12, 3700e9, 2.2e9),
    _gpu(
      'A100',
      'NVIDIA A100-SXM4-80GB',
      108,
      312e12,
      2039e9,
      1.41e9,
      166912,
      (8, 0),
    ),
    _gpu(
      'H100',
      'NVIDIA H100 80GB HBM3',
      132,
      989e12,
      3352e9,
      1.98e9,
      232448,
      (9, 0),
    ),
    _gpu('B200', 'NVIDIA B200', 148, 2250e12, 8000e9, 1.85e9, 232448, (10, 0)),
  )
}


def find_chip(name: str) -> Chip:
  """The chip of that name.

  Raises:
    ValueError: if there is none.
  """
  if name not in CHIPS:
    raise ValueError(f'chip={name!r} must be one of {tuple(CHIPS)}')
  return CHIPS[name]


def missing_compiler(chip: Chip) -> str | None:
  """Which package must be installed to compile for `chip`, or None."""
  tpu = chip.platform == 'tpu'
  module = 'libtpu' if tpu else 'jax_cuda13_plugin'
  if importlib.util.find_spec(module) is not None:
    return None
  return f'the package {"libtpu" if tpu else "jax-cuda13-plugin"} is missing'


def chip_in_use() -> str | None:
  """Name of the chip that the current trace is for; None if not known.

  That of the ambient mesh, which a program compiled for another machine has,
  else that of the default device.
  """
  device = getattr(jax.sharding.get_abstract_mesh(), 'abstract_device', None)
  if device is not None:
    kind = device.device_kind
  elif jax.default_backend() in ('tpu', 'gpu'):
    kind = jax.devices()[0].device_kind
  else:
    return None
  for chip in CHIPS.values():
    same = chip.kind == kind if chip.platform == 'tpu' else chip.name in kind
    if same:
      return chip.name
  return None


def target_config(chip: Chip) -> str:
  """A GPU in the text form of XLA's GpuTargetConfig."""
  major, minor = chip.capability
  fields = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 49152,
    'shared_memory_per_core': chip.shared + 1024,
    'threads_per_core_limit': 2048,
    'core_count': chip.cores,
    'fpus_per_core': 128,
    'block_dim_limit_x': 2147483647,
    'block_dim_limit_y': 65535,
    'block_dim_limit_z': 65535,
    'memory_bandwidth': int(chip.bandwidth),
    'l2_cache_size': 52428800,
    'clock_rate_ghz': chip.clock / 1e9,
    'device_memory_size': 84978434048,
    'shared_memory_per_block_optin': chip.shared,
    'registers_per_core_limit': 65536,
    'registers_per_block_limit': 65536,
  }
  info = ' '.join(f'{key}: {value}' for key, value in fields.items())
  capability = f'cuda_compute_capability {{ major: {major} minor: {minor} }}'
  return (
    f'gpu_device_info {{ {info} {capability} }} platform_name: "CUDA" '
    'dnn_version_info { major: 9 minor: 8 } '
    f'device_description_str: "{chip.kind}"'
  )

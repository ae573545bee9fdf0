"""GPUs that exist for the compiler only."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Compute capability, cores, shared memory per block, bandwidth, clock, name.
CHIPS = {
  'A100': ((8, 0), 108, 166912, 2039e9, 1.41, 'NVIDIA A100-SXM4-80GB'),
  'H100': ((9, 0), 132, 232448, 3352.32e9, 1.98, 'NVIDIA H100 80GB HBM3'),
  'B200': ((10, 0), 148, 232448, 8000e9, 1.85, 'NVIDIA B200'),
}


def target_config(chip: str) -> str:
  """The text form of XLA's GpuTargetConfig."""
  (major, minor), cores, shared, bandwidth, clock, name = CHIPS[chip]
  fields = {
    'threads_per_block_limit': 1024,
    'threads_per_warp': 32,
    'shared_memory_per_block': 49152,
    'shared_memory_per_core': shared + 1024,
    'threads_per_core_limit': 2048,
    'core_count': cores,
    'fpus_per_core': 128,
    'block_dim_limit_x': 2147483647,
    'block_dim_limit_y': 65535,
    'block_dim_limit_z': 65535,
    'memory_bandwidth': int(bandwidth),
    'l2_cache_size': 52428800,
    'clock_rate_ghz': clock,
    'device_memory_size': 84978434048,
    'shared_memory_per_block_optin': shared,
    'registers_per_core_limit': 65536,
    'registers_per_block_limit': 65536,
  }
  info = ' '.join(f'{key}: {value}' for key, value in fields.items())
  capability = f'cuda_compute_capability {{ major: {major} minor: {minor} }}'
  return (
    f'gpu_device_info {{ {info} {capability} }} platform_name: "CUDA" '
    'dnn_version_info { major: 9 minor: 8 } '
    f'device_description_str: "{name}"'
  )


def compile_for_gpu(chip: str, function, *shapes, spills: bool = True) -> str:
  """The compiled program's text; skips without the CUDA compiler.

  Args:
    chip: a key of CHIPS.
    function: to compile.
    *shapes: (shape, dtype) of each argument.
    spills: whether a kernel may keep registers in memory.
  """
  if importlib.util.find_spec('jax_cuda13_plugin') is None:
    pytest.skip('the CUDA compiler (jax-cuda13-plugin) is not installed')
  from jax._src.mesh import AbstractDevice
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    '', 'cuda', target_config=target_config(chip), topology='1x1x1'
  )
  mesh = Mesh(np.array(topology.devices[:1]), ('d',))
  whole = NamedSharding(mesh, PartitionSpec())
  device = AbstractDevice(
    device_kind=topology.devices[0].device_kind, num_cores=1, platform='gpu'
  )
  abstract = mesh.abstract_mesh.update(abstract_device=device)
  structs = [jax.ShapeDtypeStruct(*s, sharding=whole) for s in shapes]
  with jax.sharding.use_abstract_mesh(abstract):
    lowered = (
      jax.jit(function).trace(*structs).lower(lowering_platforms=('cuda',))
    )
  flag = 'xla_gpu_fail_ptx_compilation_on_register_spilling'
  options = {} if spills else {flag: True}
  return lowered.compile(compiler_options=options).as_text()

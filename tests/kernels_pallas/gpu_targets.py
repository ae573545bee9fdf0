"""GPUs that exist for the compiler only."""

import importlib.util

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas.tuning.chips import find_chip, target_config

CHIPS = 'A100', 'H100', 'B200'


def compile_for_gpu(
  chip: str,
  function,
  *shapes,
  spills: bool = True,
  spec=None,
  devices=(1, 1),
) -> str:
  """The compiled program's text; skips without the CUDA compiler.

  Args:
    chip: of CHIPS.
    function: to compile.
    *shapes: (shape, dtype) of each argument.
    spills: whether a kernel may keep registers in memory.
    spec: how each argument lies on the mesh; None for whole.
    devices: of the mesh axes 'run' and 'data'.
  """
  if importlib.util.find_spec('jax_cuda13_plugin') is None:
    pytest.skip('the CUDA compiler (jax-cuda13-plugin) is not installed')
  from jax._src.mesh import AbstractDevice
  from jax.experimental import topologies

  count = devices[0] * devices[1]
  topology = topologies.get_topology_desc(
    '',
    'cuda',
    target_config=target_config(find_chip(chip)),
    topology=f'1x1x{count}',
  )
  grid = np.array(topology.devices[:count]).reshape(devices)
  mesh = Mesh(grid, ('run', 'data'))
  placed = NamedSharding(mesh, spec or PartitionSpec())
  device = AbstractDevice(
    device_kind=topology.devices[0].device_kind, num_cores=1, platform='gpu'
  )
  abstract = mesh.abstract_mesh.update(abstract_device=device)
  structs = [jax.ShapeDtypeStruct(*s, sharding=placed) for s in shapes]
  with jax.sharding.use_abstract_mesh(abstract):
    lowered = (
      jax.jit(function).trace(*structs).lower(lowering_platforms=('cuda',))
    )
  flag = 'xla_gpu_fail_ptx_compilation_on_register_spilling'
  options = {} if spills else {flag: True}
  return lowered.compile(compiler_options=options).as_text()

"""TPUs that exist for the compiler only."""

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

CHIPS = ['v4:2x2x1', 'v5e:2x2', 'v5p:2x2x1', 'v6e:2x2', 'tpu7x:2x2x1']


def compile_for_tpu(chip, function, leaves, spec=None, devices=(1, 1)) -> str:
  """The compiled program's text; skips without the TPU compiler.

  Args:
    chip: of CHIPS.
    function: to compile.
    leaves: (shape, dtype) of each argument.
    spec: how each argument lies on the mesh; None for whole.
    devices: of the mesh axes 'run' and 'data'.
  """
  pytest.importorskip('libtpu')
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(chip, 'tpu')
  count = devices[0] * devices[1]
  grid = np.array(topology.devices[:count]).reshape(devices)
  mesh = Mesh(grid, ('run', 'data'))
  placed = NamedSharding(mesh, spec or PartitionSpec())
  structs = [jax.ShapeDtypeStruct(*x, sharding=placed) for x in leaves]
  with jax.set_mesh(mesh):
    lowered = (
      jax.jit(function).trace(*structs).lower(lowering_platforms=('tpu',))
    )
  return lowered.compile().as_text()

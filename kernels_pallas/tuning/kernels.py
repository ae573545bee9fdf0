"""The Pallas kernels of a function, each as a program of its own.

A compiler's estimate of a whole program mixes a kernel with the copies around
it, and fails where those can not be estimated. A kernel is therefore taken out
of the traced function and compiled alone, its operands in device memory.
"""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType

from kernels_pallas.tuning.chips import Chip

__all__ = ['Kernel', 'find_kernels', 'on_chip', 'to_bytecode']

_PLATFORMS = {'mosaic': 'tpu', 'triton': 'gpu', 'mosaic_gpu': 'gpu'}


class Kernel(NamedTuple):
  """A `pallas_call`: name, grid, function and shapes of its operands.

  Axes of the grid that depend on data are no numbers.
  """

  name: str
  grid: tuple[Any, ...]
  function: Callable[..., Any]
  operands: tuple[jax.ShapeDtypeStruct, ...]

  @property
  def steps(self) -> int:
    """Number of grid points along the axes that are known."""
    return math.prod(x for x in self.grid if isinstance(x, int))


def on_chip(chip: Chip) -> Any:
  """A context in which traces and lowerings are for `chip`."""
  # No public way says what a program without a device is traced for.
  from jax._src.mesh import AbstractDevice

  device: Any = AbstractDevice(
    device_kind=chip.kind, num_cores=chip.cores, platform=chip.platform
  )
  mesh: Any = AbstractMesh((1,), ('device',), (AxisType.Auto,))
  return jax.sharding.use_abstract_mesh(mesh.update(abstract_device=device))


def _calls(jaxpr: Any) -> Iterator[Any]:
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'pallas_call':
      yield equation
      continue
    leaves = jax.tree.leaves(
      list(equation.params.values()),
      is_leaf=lambda x: hasattr(x, 'jaxpr') or hasattr(x, 'eqns'),
    )
    for leaf in leaves:
      inner = getattr(leaf, 'jaxpr', leaf)
      if hasattr(inner, 'eqns'):
        yield from _calls(inner)


def find_kernels(
  function: Callable[..., Any], operands: Any, chip: Chip
) -> list[Kernel]:
  """The kernels that `function` runs on `chip`, in order.

  Args:
    function: of arrays.
    operands: its arguments, arrays or `jax.ShapeDtypeStruct`.
    chip: kernels for other platforms are left out.

  Returns:
    No kernel where the function runs plain XLA there.
  """
  with on_chip(chip):
    jaxpr = jax.make_jaxpr(function)(*operands).jaxpr
  found = []
  for equation in _calls(jaxpr):
    params = equation.params
    # .../pallas/mosaic/core.py holds the parameters of TPU kernels.
    backend = type(params['compiler_params']).__module__.split('.')[-2]
    if _PLATFORMS.get(backend) != chip.platform:
      continue
    call = functools.partial(equation.primitive.bind, **params)
    shapes = tuple(
      jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in equation.invars
    )
    grid = tuple(params['grid_mapping'].grid)
    name = params.get('name') or params['jaxpr'].debug_info.func_name
    found.append(Kernel(name, grid, call, shapes))
  return found


def to_bytecode(kernel: Kernel, chip: Chip) -> bytes:
  """The kernel lowered for `chip`, as StableHLO bytecode."""
  from jax._src.interpreters import mlir

  with on_chip(chip):
    platform = 'tpu' if chip.platform == 'tpu' else 'cuda'
    lowered = (
      jax.jit(kernel.function)
      .trace(*kernel.operands)
      .lower(lowering_platforms=(platform,))
    )
  module: Any = lowered.compiler_ir()
  return mlir.module_to_bytecode(module)

"""Calls at realistic shapes: how an op joins reports and benchmarks.

The `shapes.py` of a kernel folder that has a function `cases() -> list[Case]`
is found here; nothing else needs to know the op.
"""

import importlib
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['Case', 'all_cases', 'backward', 'draw', 'structs']


class Case(NamedTuple):
  """A call of an op at a named shape.

  Attributes:
    op: name of the public function.
    shape: name of the shape and what is particular about the call.
    options: what else the op is told, known when it is traced; for those who
      set another library's op beside it.
    make: (blocks, implementation) -> the op as a function of the operands.
    reference: the same in plain jax.numpy, in the dtype of its operands.
    operands: shapes of floats, to be drawn from a normal distribution, and
      arrays of integers, which mean something.
    flops: products and sums that the matrix units must do, forward.
    bytes_moved: operands and results, each once.
    blocks: by platform, block sizes to try beside the op's own choice.
    scale: multiples of flops and bytes_moved in the backward pass.
  """

  op: str
  shape: str
  options: Mapping[str, Any]
  make: Callable[[Any, str | None], Callable[..., Any]]
  reference: Callable[..., Any]
  operands: tuple[jax.ShapeDtypeStruct | np.ndarray, ...]
  flops: float
  bytes_moved: float
  blocks: Mapping[str, tuple[Any, ...]]
  scale: tuple[float, float] = (2.5, 2.0)


def all_cases() -> list[Case]:
  """Those of all kernel folders."""
  found = []
  root = pathlib.Path(__file__).parents[1]
  for path in sorted(root.rglob('shapes.py')):
    parts = path.relative_to(root).with_suffix('').parts
    module = importlib.import_module('.'.join((root.name, *parts)))
    found += module.cases() if hasattr(module, 'cases') else []
  return found


def structs(case: Case) -> tuple[jax.ShapeDtypeStruct, ...]:
  """Shapes and dtypes of all operands."""
  return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.operands)


def draw(case: Case, seed: int = 0) -> tuple[np.ndarray, ...]:
  """Operands: floats from a normal distribution, integers as they are."""
  rng = np.random.default_rng(seed)
  fill = lambda x: rng.standard_normal(x.shape, np.float32).astype(x.dtype)
  return tuple(
    x if isinstance(x, np.ndarray) else fill(x) for x in case.operands
  )


def backward(function: Callable[..., Any]) -> Callable[..., Any]:
  """Gradients of the sum of `function` in all operands that are floats.

  It may return several arrays: their sums count alike.
  """

  def gradients(*operands):
    floats = [
      n for n, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
    ]

    def of_floats(*values):
      given = list(operands)
      for n, value in zip(floats, values, strict=True):
        given[n] = value
      return function(*given)

    out, pull = jax.vjp(of_floats, *(operands[n] for n in floats))
    return pull(jax.tree.map(jnp.ones_like, out))

  return gradients

"""A `pallas_call` whose operands have names."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

__all__ = ['in_32_bits', 'launch']


def in_32_bits(call: Callable[..., Any]) -> Callable[..., Any]:
  """A `pallas_call` whose body and index maps are traced without x64.

  The compilers of kernels want 32 bits, also of Python's numbers.
  """

  def run(*args):
    with jax.enable_x64(False):
      return call(*args)

  return run


def launch(
  body: Callable[..., None],
  operands: Any,
  specs: Any,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  prefetched: tuple[jax.Array, ...] = (),
  **options: Any,
) -> list[jax.Array]:
  """A `pallas_call` of body(operands, outputs, scratch).

  Args:
    body: gets references in a NamedTuple like `operands`, a list and a
      dictionary.
    operands: a NamedTuple of arrays, of tuples of them, and of None for what is
      not there.
    specs: of the operands; more than needed.
    outputs: shape and spec of each.
    scratch: by name.
    prefetched: integers that index maps get after the indices of the grid, on
      TPU only.
    **options: of `pallas_call`.
  """
  given, tree = jax.tree.flatten(operands)
  needed = type(operands)(
    *(
      None if x is None else spec
      for x, spec in zip(operands, specs, strict=True)
    )
  )

  def kernel(*refs):
    # What was prefetched is for the specs alone.
    refs = refs[len(prefetched) :]
    rest = refs[len(given) :]
    space = dict(zip(scratch, rest[len(outputs) :], strict=True))
    mine = jax.tree.unflatten(tree, refs[: len(given)])
    body(mine, rest[: len(outputs)], space)

  how = {
    'in_specs': jax.tree.leaves(needed),
    'out_specs': [spec for _, spec in outputs],
    'scratch_shapes': list(scratch.values()),
  }
  if prefetched:
    from jax.experimental.pallas import tpu as pltpu

    how = {
      'grid_spec': pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(prefetched), grid=options.pop('grid'), **how
      )
    }
  call = pl.pallas_call(
    kernel, out_shape=[shape for shape, _ in outputs], **how, **options
  )
  return in_32_bits(call)(*prefetched, *given)

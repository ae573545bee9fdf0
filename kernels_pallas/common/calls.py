"""A `pallas_call` whose operands have names."""

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import pallas as pl

__all__ = ['launch']


def launch(
  body: Callable[..., None],
  operands: Any,
  specs: Any,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  **options: Any,
) -> list[jax.Array]:
  """A `pallas_call` of body(operands, outputs, scratch).

  Args:
    body: gets references in a NamedTuple like `operands`, a list and a
      dictionary.
    operands: a NamedTuple, None for what is not there.
    specs: of the operands; more than needed.
    outputs: shape and spec of each.
    scratch: by name.
    **options: of `pallas_call`.
  """
  kind = type(operands)
  names = [x for x in kind._fields if getattr(operands, x) is not None]

  def kernel(*refs):
    given = dict.fromkeys(kind._fields)
    given |= dict(zip(names, refs[: len(names)], strict=True))
    rest = refs[len(names) :]
    space = dict(zip(scratch, rest[len(outputs) :], strict=True))
    body(kind(**given), rest[: len(outputs)], space)

  call = pl.pallas_call(
    kernel,
    out_shape=[shape for shape, _ in outputs],
    in_specs=[getattr(specs, x) for x in names],
    out_specs=[spec for _, spec in outputs],
    scratch_shapes=list(scratch.values()),
    **options,
  )
  return call(*(getattr(operands, x) for x in names))

"""Which body a program runs: decided when it is lowered, for any machine."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

__all__ = ['by_platform']

_NO_CPU = (
  'implementation="pallas" has no CPU body; use None, or "interpret" to test '
  'its numbers'
)

# The identity, which no compiler is given.
_refused = Primitive('refused')


@_refused.def_abstract_eval
def _refused_shape(x, *, why):
  del why
  return x


@_refused.def_impl
def _refused_now(x, *, why):
  raise ValueError(why)


def _refused_at_lowering(ctx, x, *, why):
  raise ValueError(why)


mlir.register_lowering(_refused, _refused_at_lowering)
batching.defvectorized(_refused)


def by_platform(
  implementation: str | None,
  plain: Callable[..., Any],
  bodies: Mapping[str, Callable[..., Any] | str],
  *args: Any,
) -> Any:
  """Runs the body of the platform that the program is lowered for.

  Args:
    implementation: None, for `plain` where there is no body; or 'pallas', for a
      ValueError there, which comes at lowering: only then is it known whether
      a program is for this machine.
    plain: the same function of `args` in plain jax.numpy.
    bodies: by platform ('tpu', 'cuda'), or why it has none.
    *args: arrays.
  """

  def refuse(why: str) -> Callable[..., Any]:
    def refusal(*args):
      shapes = jax.eval_shape(plain, *args)
      named = lambda x: _refused.bind(jnp.zeros(x.shape, x.dtype), why=why)
      return jax.tree.map(named, shapes)

    return refusal

  insists = implementation == 'pallas'
  branches = {
    platform: body
    if callable(body)
    else refuse(f'implementation="pallas": {body}; use None or "xla"')
    if insists
    else plain
    for platform, body in bodies.items()
  }
  default = refuse(_NO_CPU) if insists else plain
  return jax.lax.platform_dependent(*args, default=default, **branches)

"""XOR attention with a backward pass of its own, on any platform.

Axes: B sequences, L links, N items, H heads, D and V features.

The backward pass reads the history once as well. Of the forward pass it needs,
for a softmax, the logarithm of the sums of each link; those of an item run over
links only and are computed again.
"""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from kernels_pallas.common.platforms import by_platform
from kernels_pallas.common.sharding import Split, find_split, over_mesh
from kernels_pallas.rectangle_attention import xla
from kernels_pallas.rectangle_attention.options import Config, Rows, Tokens

__all__ = ['core', 'refusal']

# The largest head, links and products of the two of the Pallas bodies.
LARGEST_DIM = 256
LARGEST_LINKS = 256
LARGEST_ON_GPU = 4096


def refusal(links: Tokens, platform: str) -> str | None:
  """Why the Pallas body of 'tpu' or 'cuda' does not take them, or None."""
  _, count, _, dim = links.q.shape
  dim = max(dim, links.v.shape[3])
  if links.q.dtype not in (jnp.float32, jnp.bfloat16):
    return f'dtype {links.q.dtype} is neither float32 nor bfloat16'
  if dim > LARGEST_DIM:
    return f'a head of {dim} features has more than {LARGEST_DIM}'
  largest = LARGEST_LINKS
  if platform == 'tpu' and links.q.dtype == jnp.float32:
    largest //= 2
  if count > largest:
    return f'{count} links of {links.q.dtype} are more than {largest}'
  size = (1 << (count - 1).bit_length()) * (1 << (dim - 1).bit_length())
  largest = LARGEST_ON_GPU // (2 if links.q.dtype == jnp.float32 else 1)
  if platform == 'cuda' and size > largest:
    return (
      f'{count} links of {dim} features, to powers of two, are more than the '
      f'{largest} numbers that a GPU holds'
    )
  return None


def _call(
  name: str,
  config: Config,
  implementation: str | None,
  args: tuple[Any, ...],
) -> Any:
  """Resolved at lowering, so that cross-compiling picks the right body."""
  plain = functools.partial(getattr(xla, name), config)
  if implementation == 'xla':
    return plain(*args)
  # The bodies are imported where they are asked for: Triton's may be gone.
  from kernels_pallas.rectangle_attention import gpu, tpu

  def body(module: ModuleType, interpret: bool = False) -> Callable[..., Any]:
    return functools.partial(getattr(module, name), config, interpret=interpret)

  if implementation == 'interpret':
    return body(tpu, True)(*args)
  if implementation == 'interpret_gpu':
    return body(gpu, True)(*args)
  links = args[0]
  bodies = {
    platform: refusal(links, platform) or body(module)
    for platform, module in (('tpu', tpu), ('cuda', gpu))
  }
  return by_platform(implementation, plain, bodies, *args)


def _specs(split: Split, rows: Rows) -> tuple[Any, ...]:
  """Of the links or the history, and of the rows."""
  heads = split.spec('b', None, 'h', None)
  of_rows = lambda x: split.spec('b', *[None] * (x.ndim - 1))
  return Tokens(heads, heads, heads), jax.tree.map(of_rows, rows)


def _forward(
  config: Config, implementation: str | None, *args: Any
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  links, _, rows = args
  split = find_split(links.q.shape[0], links.q.shape[2])
  function = lambda *a: _call('forward', config, implementation, a)
  if split is not None:
    tokens, of_rows = _specs(split, rows)
    lse = None if config.weights == 'silu' else split.spec('b', 'h', None)
    inputs, outputs = (tokens, tokens, of_rows), (tokens.q, tokens.q, lse)
    function = over_mesh(function, split, inputs, outputs)
  return function(*args)


def _backward(
  config: Config, implementation: str | None, *args: Any
) -> tuple[Tokens, Tokens]:
  links, _, rows, lse = args[:4]
  split = find_split(links.q.shape[0], links.q.shape[2])
  function = lambda *a: _call('backward', config, implementation, a)
  if split is not None:
    tokens, of_rows = _specs(split, rows)
    column = None if lse is None else split.spec('b', 'h', None)
    inputs = tokens, tokens, of_rows, column, column, tokens.q, tokens.q
    function = over_mesh(function, split, inputs, (tokens, tokens))
  return function(*args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def core(
  config: Config,
  implementation: str | None,
  links: Tokens,
  history: Tokens,
  rows: Rows,
) -> tuple[jax.Array, jax.Array]:
  """The function of `reference.forward` on the platform of the program."""
  return _forward(config, implementation, links, history, rows)[:2]


def _core_forward(config, implementation, *args):
  of_links, of_items, lse = _forward(config, implementation, *args)
  kept = None if lse is None else of_links
  return (of_links, of_items), (args, kept, lse)


def _core_backward(config, implementation, residual, cotangents):
  args, out, lse = residual
  g_links, g_items = cotangents
  delta = None
  if lse is not None:
    delta = jnp.einsum(
      'blhv,blhv->bhl', g_links, out, preferred_element_type=lse.dtype
    )
    # A link that sees no item has lse = -inf; its weights are exp(-inf) = 0.
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse)
  links, history = _backward(
    config, implementation, *args, lse, delta, g_links, g_items
  )
  return links, history, None


core.defvjp(_core_forward, _core_backward)

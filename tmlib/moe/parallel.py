"""Experts spread over a mesh axis, tokens exchanged by all-to-all.

Axes: P devices of the axis, T tokens, E experts (E / P on a device), D
features, C slots that each device has for each expert.

Each device routes its own tokens, sends each one to the devices of its
experts and gets the results back: two all-to-all of [E, C, D], no gather of
the tokens. Shapes are static, so C must be chosen: C = T / P holds every
routing (no expert can be chosen twice by one token) and drops nothing.
"""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from tmlib.moe.experts import (
  Activation,
  capacity_of,
  combine,
  slots_of,
  take_rows,
)
from tmlib.moe.routing import Routing

__all__ = ['parallel_expert_mlp']


def _local(x, w_in, w_out, routing, act, axis, capacity):
  """One device's part, inside shard_map."""
  slots, filled = slots_of(routing, capacity)
  rows = take_rows(x, filled).reshape(-1, capacity, x.shape[1])
  # [E, C, D] -> [E / P, P C, D] and back.
  rows = jax.lax.all_to_all(rows, axis, 0, 1, tiled=True)
  hidden = act(jnp.einsum('ecd,edf->ecf', rows, w_in))
  out = jnp.einsum('ecf,efd->ecd', hidden, w_out)
  out = jax.lax.all_to_all(out, axis, 1, 0, tiled=True)
  out = combine(out.reshape(-1, x.shape[1]), routing.weights, slots)
  dropped = (routing.mask[:, None] & (slots == filled.shape[0])).sum()
  return out.astype(x.dtype), jax.lax.psum(dropped, axis)


def parallel_expert_mlp(
  x: jax.Array,
  w_in: jax.Array,
  w_out: jax.Array,
  routing: Routing,
  *,
  axis: str,
  act: Activation = jax.nn.gelu,
  capacity_factor: float | None = None,
) -> tuple[jax.Array, jax.Array]:
  """`expert_mlp` with tokens and experts split over a mesh axis.

  In jit mode the ambient mesh (`jax.set_mesh`) must have the axis, arguments
  are global, and the result is sharded over tokens. Inside `shard_map` over
  the axis, arguments are the device's own: T / P tokens, E / P experts, and
  a routing of the own tokens over all E experts.

  Args:
    x: [T, D], float.
    w_in: [E, D, F], float.
    w_out: [E, F, D], float.
    routing: of `topk_route`.
    axis: name of the mesh axis.
    act: elementwise.
    capacity_factor: slots of a device for an expert, as a multiple of
      T K / (P E); None holds every token.

  Returns:
    y: [T, D], dtype of x.
    dropped: [] int, assignments that found no slot, over all devices.

  Raises:
    ValueError: if the mesh has no such axis, or its size divides neither T
      nor E.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if axis not in mesh.axis_names:
    raise ValueError(
      f'axis={axis!r} is not one of the ambient mesh {mesh.axis_names}; enter '
      'the mesh with jax.set_mesh, or call this inside jax.shard_map'
    )
  devices = mesh.shape[axis]
  manual = axis in mesh.manual_axes
  num_experts, k = routing.num_experts, routing.experts.shape[1]
  local_tokens = x.shape[0] if manual else x.shape[0] // devices
  for name, size in (('tokens', x.shape[0]), ('experts', num_experts)):
    checked = name == 'experts' or not manual
    if checked and size % devices:
      raise ValueError(
        f'{size} {name} cannot be split over the {devices} devices of axis '
        f'{axis!r}; choose multiples'
      )
  if w_in.shape[0] * (devices if manual else 1) != num_experts:
    raise ValueError(
      f'w_in has {w_in.shape[0]} experts, the routing {num_experts} on '
      f'{devices} devices'
    )
  capacity = local_tokens
  if capacity_factor is not None:
    capacity = capacity_of(local_tokens, k, num_experts, capacity_factor)

  def local(x, w_in, w_out, routing):
    return _local(x, w_in, w_out, routing, act, axis, capacity)

  if manual:
    return local(x, w_in, w_out, routing)
  return jax.shard_map(
    local,
    in_specs=P(axis),
    out_specs=(P(axis), P()),
    axis_names={axis},
    check_vma=False,
  )(x, w_in, w_out, routing)

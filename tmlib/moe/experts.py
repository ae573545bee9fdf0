"""The experts of a sparse layer, computed in several equal ways.

Axes: T tokens, D features, F hidden units, E experts, K experts per token, C
slots per expert.

y_t = sum_k w_tk f_e(x_t), e = experts_tk, f_e(x) = act(x W_in,e) W_out,e.
"""

import math
from collections.abc import Callable

import chex
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from kernels_pallas.grouped_matmul import (
  block_gmm,
  block_layout,
  gather_rows,
  scatter_rows,
)
from tmlib.moe.routing import ExpertChoice, Routing

__all__ = [
  'IMPLS',
  'capacity_of',
  'combine',
  'expert_mlp',
  'kept',
  'slots_of',
  'take_rows',
]

Activation = Callable[[jax.Array], jax.Array]
IMPLS = ('auto', 'dense', 'capacity', 'blocked', 'scan', 'pallas', 'interpret')


def _check_factor(capacity_factor: float) -> None:
  if not 0 < capacity_factor < math.inf:
    raise ValueError(
      f'capacity_factor={capacity_factor} must be positive and finite; E / K '
      'holds every token'
    )


def capacity_of(
  tokens: int, k: int, num_experts: int, capacity_factor: float
) -> int:
  """Slots per expert: ceil(factor T K / E), at least 1 and at most T.

  Raises:
    ValueError: if the factor is not positive and finite.
  """
  _check_factor(capacity_factor)
  wanted = -(-capacity_factor * tokens * k // num_experts)
  return int(min(max(wanted, 1), max(tokens, 1)))


def slots_of(routing: Routing, capacity: int) -> tuple[jax.Array, jax.Array]:
  """The slot of each assignment, and the token in each slot.

  All first choices come before all second ones, so that a full expert turns
  second choices away first.

  Args:
    routing: of `topk_route`.
    capacity: C, slots per expert.

  Returns:
    slots: [T, K] int32 in [0, E C); E C for an assignment without a slot.
    tokens: [E C] int32; T for an empty slot.
  """
  tokens, k = routing.experts.shape
  num_experts = routing.num_experts
  size = num_experts * capacity
  experts = routing.experts.T.reshape(-1)
  hot = jax.nn.one_hot(experts, num_experts, dtype=jnp.int32)
  rank = (jnp.cumsum(hot, 0) * hot).sum(1) - 1
  fits = (rank >= 0) & (rank < capacity)
  slots = jnp.where(fits, experts * capacity + rank, size)
  token = jnp.tile(jnp.arange(tokens, dtype=jnp.int32), k)
  filled = jnp.full(size, tokens, jnp.int32)
  filled = filled.at[slots].set(token, mode='drop')
  return slots.reshape(k, tokens).T, filled


def kept(routing: Routing, capacity: int) -> jax.Array:
  """Which assignments find a slot when each expert has `capacity` of them.

  Args:
    routing: of `topk_route`.
    capacity: C.

  Returns:
    [T, K] bool; False for masked tokens too.
  """
  slots, filled = slots_of(routing, capacity)
  return slots < filled.shape[0]


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
  """x[index], zeros where the index lies beyond the end."""
  return jnp.take(x, index, axis=0, mode='fill', fill_value=0)


def combine(out: jax.Array, weights: jax.Array, slots: jax.Array) -> jax.Array:
  """[slots, D] -> [T, D]: sum_k w_tk out[slots_tk], no slot counting zero."""
  weights = jnp.where(slots < out.shape[0], weights, 0)
  return jnp.einsum(
    'tk,tkd->td', weights.astype(out.dtype), take_rows(out, slots)
  )


def _combined(routing: Routing | ExpertChoice) -> jax.Array:
  """[T, E], the weight of each expert for each token."""
  num_experts = routing.num_experts
  if isinstance(routing, ExpertChoice):
    zeros = jnp.zeros(routing.probs.shape, routing.weights.dtype)
    experts = jnp.arange(num_experts)[:, None]
    return zeros.at[routing.tokens, experts].add(routing.weights, mode='drop')
  hot = jax.nn.one_hot(routing.experts, num_experts)
  return jnp.einsum('tk,tke->te', routing.weights, hot)


def _used(x: jax.Array, combined: jax.Array) -> jax.Array:
  """x, zero where no expert is met: 0 * NaN is NaN in gradients too."""
  return jnp.where((combined != 0).any(1, keepdims=True), x, 0)


def _dense(x, w_in, w_out, routing, act):
  combined = _combined(routing)
  x = _used(x, combined)
  hidden = act(jnp.einsum('td,edf->tef', x, w_in))
  out = jnp.einsum('tef,efd->ted', hidden, w_out)
  # where: an expert that overflows must not reach tokens of other experts.
  out = jnp.where(combined[..., None] != 0, out, 0)
  return jnp.einsum('te,ted->td', combined.astype(out.dtype), out)


def _scan(x, w_in, w_out, routing, act):
  def add(total, inputs):
    first, second, weight = inputs
    out = act(x @ first) @ second
    out = jnp.where(weight[:, None] != 0, out, 0)
    return total + weight[:, None].astype(out.dtype) * out, None

  combined = _combined(routing)
  x = _used(x, combined)
  return jax.lax.scan(add, jnp.zeros_like(x), (w_in, w_out, combined.T))[0]


def _chosen(x, w_in, w_out, routing, act):
  """Expert choice: the tokens of each expert are a batch already."""
  rows = take_rows(x, routing.tokens)
  hidden = act(jnp.einsum('ecd,edf->ecf', rows, w_in))
  out = jnp.einsum('ecf,efd->ecd', hidden, w_out)
  out = out * routing.weights[..., None].astype(out.dtype)
  return jnp.zeros_like(x).at[routing.tokens].add(out, mode='drop')


def _capacity(x, w_in, w_out, routing, act, capacity):
  slots, filled = slots_of(routing, capacity)
  rows = take_rows(x, filled).reshape(-1, capacity, x.shape[1])
  hidden = act(jnp.einsum('ecd,edf->ecf', rows, w_in))
  out = jnp.einsum('ecf,efd->ecd', hidden, w_out)
  return combine(out.reshape(-1, x.shape[1]), routing.weights, slots)


def _blocked(x, w_in, w_out, routing, act, block, implementation):
  layout = block_layout(routing.experts.reshape(-1), routing.num_experts, block)
  rows = gather_rows(x, layout)
  matmul = lambda a, w: block_gmm(
    a, w, layout.groups, implementation=implementation
  )
  out = scatter_rows(matmul(act(matmul(rows, w_in)), w_out), layout)
  out = out.reshape(*routing.experts.shape, -1)
  return jnp.einsum('tk,tkd->td', routing.weights.astype(out.dtype), out)


def _per_device(function, x, w_in, w_out, routing):
  """Each device's own tokens, where the ambient mesh has several devices.

  Sorting tokens of all devices would gather them, and a kernel cannot be
  partitioned by the compiler. Tokens stay on the axis 'data' if it divides
  them; else every device computes all of them.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if mesh.empty or mesh.size == 1 or mesh.manual_axes:
    return function(x, w_in, w_out, routing)
  splits = 'data' in mesh.axis_names and x.shape[0] % mesh.shape['data'] == 0
  tokens = P('data') if splits else P()
  return jax.shard_map(
    function,
    in_specs=(tokens, P(), P(), tokens),
    out_specs=tokens,
    check_vma=False,
  )(x, w_in, w_out, routing)


def _check(x, w_in, w_out, routing, impl, capacity_factor):
  chex.assert_rank([x, w_in, w_out], [2, 3, 3])
  num_experts, features, hidden = w_in.shape
  if w_out.shape != (num_experts, hidden, features):
    raise ValueError(
      f'w_in {w_in.shape} [E, D, F] needs w_out of shape '
      f'{(num_experts, hidden, features)} [E, F, D], got {w_out.shape}'
    )
  if x.shape[1] != features:
    raise ValueError(f'x has {x.shape[1]} features, w_in has {features}')
  if routing.probs.shape != (x.shape[0], num_experts):
    raise ValueError(
      f'routing is for {routing.probs.shape} tokens and experts, but x and '
      f'w_in have {(x.shape[0], num_experts)}'
    )
  if impl not in IMPLS:
    raise ValueError(f'impl={impl!r} must be one of {IMPLS}')
  _check_factor(capacity_factor)


def expert_mlp(
  x: jax.Array,
  w_in: jax.Array,
  w_out: jax.Array,
  routing: Routing | ExpertChoice,
  *,
  act: Activation = jax.nn.gelu,
  impl: str = 'auto',
  capacity_factor: float = 1.25,
  block: int = 128,
) -> jax.Array:
  r"""y_t = sum_k w_tk act(x_t W_in,e) W_out,e over the experts e of token t.

  All ways agree but for rounding, except 'capacity', which drops what finds no
  slot (`kept` says which). An expert without tokens gets zero gradient.

  Args:
    x: [T, D], float; a token without an expert may hold anything.
    w_in: [E, D, F], float.
    w_out: [E, F, D], float.
    routing: of `topk_route`, or of `expert_choice_route`, for which every
      impl but 'dense' and 'scan' means the same.
    act: elementwise.
    impl: 'auto' is 'blocked'; 'blocked' sorts tokens by expert into blocks
      (Pallas on TPU and GPU, a loop of XLA products on a CPU); 'pallas'
      insists on the kernel, 'interpret' runs it in the interpreter; 'capacity'
      gives each expert `capacity_factor T K / E` slots; 'scan' and 'dense'
      compute every expert on every token.
    capacity_factor: in (0, inf), for 'capacity'.
    block: rows of a block, for 'blocked' and the kernels.

  Returns:
    [T, D], dtype of x.

  Raises:
    ValueError: on shapes that disagree, an unknown impl, or, with any impl, a
      factor that is not positive and finite.
  """
  _check(x, w_in, w_out, routing, impl, capacity_factor)
  if impl == 'dense':
    out = _dense(x, w_in, w_out, routing, act)
  elif impl == 'scan':
    out = _scan(x, w_in, w_out, routing, act)
  elif isinstance(routing, ExpertChoice):
    out = _chosen(x, w_in, w_out, routing, act)
  elif impl == 'capacity':
    capacity = capacity_of(
      x.shape[0], routing.experts.shape[1], w_in.shape[0], capacity_factor
    )
    out = _capacity(x, w_in, w_out, routing, act, capacity)
  else:
    path = impl if impl in ('pallas', 'interpret') else None
    out = _per_device(
      lambda a, b, c, r: _blocked(a, b, c, r, act, block, path),
      x, w_in, w_out, routing,
    )  # fmt: skip
  return out.astype(x.dtype)

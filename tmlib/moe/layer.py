"""A sparse mixture-of-experts layer for Flax Linen.

Axes: [...] any axes of tokens, D features, E experts.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from tmlib.moe.balance import balance_losses
from tmlib.moe.experts import Activation, capacity_of, expert_mlp, kept
from tmlib.moe.routing import (
  check_k,
  check_noise,
  expert_choice_route,
  topk_route,
)

__all__ = ['MoELayer']


class MoELayer(nn.Module):
  """Router, experts and an optional expert that every token meets.

  Attributes:
    num_experts: E.
    hidden: units per expert.
    k: experts per token, in [1, E]; for 'expert' choice, the average.
    router: 'token' (each token takes its k experts) or 'expert' (each expert
      takes its tokens: not causal, not for serving).
    normalize: 'post' or 'pre', see `topk_route`.
    noise_std: of the router while training.
    use_bias: balance by a bias of the selection, which the caller moves with
      `update_bias`; it lies in the collection 'router'.
    shared_hidden: units of the expert that every token meets; 0 for none.
    act: activation of the experts.
    impl: see `expert_mlp`.
    capacity_factor: for impl 'capacity'.
    block: for impl 'blocked' and the kernels.
    zero_out: start with output matrices of zero: the layer adds nothing.
    dtype: of the experts' computation; None is that of the input. The router
      is always float32.
  """

  num_experts: int
  hidden: int
  k: int = 2
  router: str = 'token'
  normalize: str = 'post'
  noise_std: float = 0.0
  use_bias: bool = False
  shared_hidden: int = 0
  act: Activation = nn.gelu
  impl: str = 'auto'
  capacity_factor: float = 1.25
  block: int = 128
  zero_out: bool = False
  dtype: Any = None

  @nn.compact
  def __call__(
    self,
    x: jax.Array,
    mask: jax.Array | None = None,
    *,
    train: bool = False,
    axis_name: str | None = None,
  ) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Applies the layer.

    Args:
      x: [..., D], float.
      mask: [...], bool, False for padding, whose output is zero.
      train: adds noise to the router, from the RNG stream 'router'.
      axis_name: data axis that balance losses sum over, inside `shard_map`.

    Returns:
      y: [..., D]; add it to x for a residual layer.
      aux: of `balance_losses`, `dropped_frac`, and `experts` [..., k]. Expert
        choice has `dropped_frac`, the tokens without an expert, alone.

    Raises:
      ValueError: for num_experts, hidden, k, noise_std, capacity_factor, router
        or impl out of range.
    """
    check_k(self.k, self.num_experts)
    check_noise(self.noise_std)
    if self.hidden < 1:
      raise ValueError(f'hidden={self.hidden} must be at least 1')
    if self.router not in ('token', 'expert'):
      raise ValueError(f"router={self.router!r} must be 'token' or 'expert'")
    lead, features = x.shape[:-1], x.shape[-1]
    tokens = x.reshape(-1, features)
    flat_mask = None if mask is None else mask.reshape(-1)
    if flat_mask is not None:
      tokens = jnp.where(flat_mask[:, None], tokens, 0)
    kernel = nn.initializers.lecun_normal(in_axis=-2, out_axis=-1)
    matrices = nn.initializers.lecun_normal(
      in_axis=-2, out_axis=-1, batch_axis=(0,)
    )
    last = nn.initializers.zeros if self.zero_out else matrices
    gate = self.param('gate', kernel, (features, self.num_experts))
    shape = (self.num_experts, features, self.hidden)
    w_in = self.param('w_in', matrices, shape)
    w_out = self.param('w_out', last, (shape[0], shape[2], shape[1]))
    dtype = self.dtype or x.dtype
    logits = tokens.astype(jnp.float32) @ gate.astype(jnp.float32)
    routing, aux = self._route(logits, flat_mask, train, axis_name, lead)
    out = expert_mlp(
      tokens.astype(dtype),
      w_in.astype(dtype),
      w_out.astype(dtype),
      routing,
      act=self.act,
      impl=self.impl,
      capacity_factor=self.capacity_factor,
      block=self.block,
    )
    if self.shared_hidden:
      hidden = nn.Dense(self.shared_hidden, use_bias=False, name='shared_in')
      back = nn.Dense(
        features,
        use_bias=False,
        name='shared_out',
        kernel_init=nn.initializers.zeros if self.zero_out else kernel,
      )
      out = out + back(self.act(hidden(tokens.astype(dtype))))
    if flat_mask is not None:
      out = jnp.where(flat_mask[:, None], out, 0)
    return out.astype(x.dtype).reshape(*lead, features), aux

  def _route(self, logits, mask, train, axis_name, lead):
    count = logits.shape[0]
    if self.router == 'expert':
      capacity = capacity_of(count, self.k, self.num_experts, 1.0)
      choice = expert_choice_route(logits, capacity, mask=mask)
      met = jnp.zeros(count, bool).at[choice.tokens].set(True, mode='drop')
      valid = jnp.ones(count, bool) if mask is None else mask
      lost = (valid & ~met).sum() / jnp.maximum(valid.sum(), 1)
      return choice, {'dropped_frac': lost}
    noise = self.noise_std if train else 0.0
    bias = None
    if self.use_bias:
      zeros = lambda: jnp.zeros(self.num_experts)
      bias = self.variable('router', 'bias', zeros).value
    routing = topk_route(
      logits,
      self.k,
      key=self.make_rng('router') if noise else None,
      noise_std=noise,
      normalize=self.normalize,
      bias=bias,
      mask=mask,
    )
    aux = balance_losses(routing, logits, noise_std=noise, axis_name=axis_name)
    dropped = jnp.zeros(())
    if self.impl == 'capacity':
      capacity = capacity_of(
        count, self.k, self.num_experts, self.capacity_factor
      )
      lost = routing.mask[:, None] & ~kept(routing, capacity)
      dropped = lost.sum() / jnp.maximum(routing.mask.sum() * self.k, 1)
    aux['dropped_frac'] = dropped
    aux['experts'] = routing.experts.reshape(*lead, self.k)
    return routing, aux

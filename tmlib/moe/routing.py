"""Which experts see a token, and with what weight.

Axes: T tokens, E experts, K experts per token, C tokens per expert, G groups.

Routers compute in float32 whatever the dtype of the logits.
"""

import math
from typing import NamedTuple

import chex
import jax
import jax.core
import jax.numpy as jnp

__all__ = [
  'ExpertChoice',
  'Routing',
  'check_k',
  'check_noise',
  'expert_choice_route',
  'group_route',
  'topk_route',
  'update_bias',
]


class Routing(NamedTuple):
  """Each token's choice of experts.

  Attributes:
    weights: [T, K] float32; zero for a masked token.
    experts: [T, K] int32, the best first; E for a masked token.
    probs: [T, E] float32, softmax of the logits without noise or bias; zero
      for a masked token.
    scores: [T, E] float32, what the choice was made by: logits, noise, bias.
  """

  weights: jax.Array
  experts: jax.Array
  probs: jax.Array
  scores: jax.Array

  @property
  def num_experts(self) -> int:
    """E."""
    return self.probs.shape[-1]

  @property
  def mask(self) -> jax.Array:
    """[T] bool, the tokens that are routed at all."""
    return self.experts[:, 0] < self.num_experts


class ExpertChoice(NamedTuple):
  """Each expert's choice of tokens.

  Attributes:
    weights: [E, C] float32; zero where fewer than C tokens exist.
    tokens: [E, C] int32, the best first; T where fewer than C tokens exist.
    probs: [T, E] float32; zero for a masked token.
  """

  weights: jax.Array
  tokens: jax.Array
  probs: jax.Array

  @property
  def num_experts(self) -> int:
    """E."""
    return self.probs.shape[-1]


def check_k(k: int, num_experts: int) -> None:
  """Raises a ValueError unless there are experts and k lies in [1, E]."""
  if num_experts < 1:
    raise ValueError(
      f'num_experts={num_experts} leaves no expert to route to; take at least 1'
    )
  if not 1 <= k <= num_experts:
    raise ValueError(
      f'k={k} must lie in [1, {num_experts}], the number of experts'
    )


def check_noise(noise_std: float) -> None:
  """Raises a ValueError unless the scale of the noise lies in [0, inf)."""
  if not 0 <= noise_std < math.inf:
    raise ValueError(
      f'noise_std={noise_std} must be finite and not negative; 0 is no noise'
    )


def topk_route(
  logits: jax.Array,
  k: int,
  *,
  key: jax.Array | None = None,
  noise_std: float = 0.0,
  normalize: str = 'post',
  bias: jax.Array | None = None,
  mask: jax.Array | None = None,
) -> Routing:
  r"""Each token takes the k experts with the largest logits.

  Selection is by r + noise_std / E * N(0, 1), or by r + bias; equal scores go
  to the lower index. Weights come from the noisy logits without the bias: a
  softmax over the chosen ones ('post'), or the softmax over all, of which the
  chosen ones are kept and not scaled up ('pre').

  Args:
    logits: [T, E], float, r.
    k: experts per token, in [1, E].
    key: PRNG key of the noise; required where noise_std > 0.
    noise_std: scale of the noise, finite and >= 0; 0 at inference.
    normalize: 'post' or 'pre', where the softmax stands.
    bias: [E], float, added for the selection alone (see `update_bias`).
    mask: [T], bool, False for padding, which meets no expert and may hold
      anything.

  Returns:
    The routing. Gradients flow through weights and probs; those of a masked
    token are zero.

  Raises:
    ValueError: if k, noise_std, normalize or the shapes are out of range.

  References:
    Shazeer et al. Outrageously large neural networks, 2017 ('post', noise).
    Riquelme et al. Scaling vision with sparse mixture of experts, 2021
    ('pre', noise of scale 1 / E). Wang et al. Auxiliary-loss-free load
    balancing, 2024 (the bias).
  """
  chex.assert_rank(logits, 2)
  tokens, num_experts = logits.shape
  check_k(k, num_experts)
  check_noise(noise_std)
  if normalize not in ('pre', 'post'):
    raise ValueError(f"normalize={normalize!r} must be 'pre' or 'post'")
  clean = logits.astype(jnp.float32)
  if mask is not None:
    chex.assert_shape(mask, (tokens,))
    # Before the softmax too: its gradient at NaN is NaN whatever follows.
    clean = jnp.where(mask[:, None], clean, 0)
  noisy = clean
  if noise_std > 0:
    if key is None:
      raise ValueError(f'noise_std={noise_std} needs a key; pass key=...')
    noise = jax.random.normal(key, clean.shape)
    noisy = clean + noise_std / num_experts * noise
  scores = jax.lax.stop_gradient(noisy)
  if bias is not None:
    if noise_std > 0:
      raise ValueError(
        f'bias and noise_std={noise_std} both balance the load, and the load '
        'loss knows no bias; pass one of them'
      )
    chex.assert_shape(bias, (num_experts,))
    scores = scores + jax.lax.stop_gradient(bias.astype(jnp.float32))[None]
  _, experts = jax.lax.top_k(scores, k)
  all_weights = noisy if normalize == 'post' else jax.nn.softmax(noisy)
  weights = jnp.take_along_axis(all_weights, experts, 1)
  if normalize == 'post':
    weights = jax.nn.softmax(weights)
  probs = jax.nn.softmax(clean)
  if mask is not None:
    weights = jnp.where(mask[:, None], weights, 0)
    experts = jnp.where(mask[:, None], experts, num_experts)
    probs = jnp.where(mask[:, None], probs, 0)
  return Routing(weights, experts.astype(jnp.int32), probs, scores)


def expert_choice_route(
  logits: jax.Array, capacity: int, *, mask: jax.Array | None = None
) -> ExpertChoice:
  """Each expert takes the `capacity` tokens with the largest probability.

  The load is equal by construction, but a token's experts depend on the other
  tokens of the batch, later ones included: not for causal models, and not for
  serving.

  Args:
    logits: [T, E], float.
    capacity: C, tokens per expert, in [1, T].
    mask: [T], bool, False for padding, which may hold anything.

  Returns:
    The choice; a token may have no expert, or all of them.

  Raises:
    ValueError: if the capacity is out of range.

  References:
    Zhou et al. Mixture-of-experts with expert choice routing, 2022.
  """
  chex.assert_rank(logits, 2)
  tokens, num_experts = logits.shape
  check_k(1, num_experts)
  if not 1 <= capacity <= tokens:
    raise ValueError(
      f'capacity={capacity} must lie in [1, {tokens}], the number of tokens'
    )
  logits = logits.astype(jnp.float32)
  if mask is not None:
    chex.assert_shape(mask, (tokens,))
    logits = jnp.where(mask[:, None], logits, 0)
  probs = jax.nn.softmax(logits)
  if mask is not None:
    probs = jnp.where(mask[:, None], probs, 0)
  weights, chosen = jax.lax.top_k(probs.T, capacity)
  if mask is not None:
    valid = mask[chosen]
    weights = jnp.where(valid, weights, 0)
    chosen = jnp.where(valid, chosen, tokens)
  return ExpertChoice(weights, chosen.astype(jnp.int32), probs)


def group_route(
  logits: jax.Array,
  groups: jax.Array,
  num_groups: int,
  k: int,
  *,
  mask: jax.Array | None = None,
  **options,
) -> Routing:
  """All tokens of a group, such as a user's events, share their experts.

  The logits of a group are the mean over its tokens; then `topk_route`.

  Args:
    logits: [T, E], float.
    groups: [T] int32 in [0, G), the group of each token; that of padding is
      not looked at. Under jit, where ids cannot be refused, a token with an id
      out of range is padding.
    num_groups: G.
    k: experts per group.
    mask: [T], bool, False for padding, which counts in no mean.
    **options: of `topk_route`.

  Returns:
    The routing of the T tokens. For balance losses that count each group once,
    route group means with `topk_route` instead.

  Raises:
    ValueError: as `topk_route`, and on ids out of range outside jit.
  """
  chex.assert_rank([logits, groups], [2, 1])
  valid = jnp.ones(groups.shape, bool) if mask is None else mask
  inside = (groups >= 0) & (groups < num_groups)
  wrong = valid & ~inside
  if not isinstance(wrong, jax.core.Tracer) and wrong.any():
    raise ValueError(
      f'groups holds {groups[wrong][0]} at token {wrong.argmax()}, but must '
      f'lie in [0, {num_groups}); raise num_groups or mask the token'
    )
  ok = valid & inside
  groups = jnp.where(ok, groups, 0)
  values = jnp.where(ok[:, None], logits.astype(jnp.float32), 0)
  total = jax.ops.segment_sum(values, groups, num_groups)
  count = jax.ops.segment_sum(ok.astype(jnp.float32), groups, num_groups)
  routing = topk_route(total / jnp.maximum(count, 1)[:, None], k, **options)
  own = jax.tree.map(lambda x: x[groups], routing)
  return Routing(
    weights=jnp.where(ok[:, None], own.weights, 0),
    experts=jnp.where(ok[:, None], own.experts, routing.num_experts),
    probs=jnp.where(ok[:, None], own.probs, 0),
    scores=own.scores,
  )


def update_bias(
  bias: jax.Array, load: jax.Array, rate: float = 1e-3
) -> jax.Array:
  """Balances the load by the bias of the selection, without a loss.

  b_e <- b_e + rate * sign(mean load - load_e).

  Args:
    bias: [E], float.
    load: [E], tokens or fraction of tokens per expert in the last batch, over
      all devices.
    rate: step, > 0.

  Returns:
    [E], the new bias.

  References:
    Wang et al. Auxiliary-loss-free load balancing strategy for mixture of
    experts, 2024, algorithm 1.
  """
  chex.assert_equal_shape([bias, load])
  load = load.astype(bias.dtype)
  return bias + rate * jnp.sign(load.mean() - load)

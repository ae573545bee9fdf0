r"""Experts on top of a user vector, one per interest.

Axes: B examples, L positions, T = B L tokens, D features, E experts, F hidden
units, K experts per token, N points.

y = z + sum_{e in I} pi_e B_e act(A_e z), B_e = 0 at the start, so that the
adapter begins as the identity.
"""

from typing import Any, NamedTuple

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.moe import Routing, expert_mlp, topk_route
from tmlib.recsys.options import DUMoEConfig

__all__ = [
  'Adapted',
  'apply_experts',
  'centre_logits',
  'diversity_loss',
  'gate_logits',
  'init_adapter',
  'kmeans',
  'normalized',
  'route',
  'routing_input',
]


class Adapted(NamedTuple):
  """What the adapter did.

  Attributes:
    y: [B, L, D].
    routing: of the T tokens; None without experts.
    logits: [T, E], that were routed; None without experts.
  """

  y: jax.Array
  routing: Routing | None
  logits: jax.Array | None


def init_adapter(key: jax.Array, config: DUMoEConfig) -> dict[str, Any]:
  """Parameters by groups: experts, gate, bias (of the selection), centres."""
  c = config
  keys = jax.random.split(key, 3)
  scale = c.dim**-0.5
  normal = lambda key, *shape: scale * jax.random.normal(key, shape)
  experts = {
    'w_in': normal(keys[0], c.experts, c.dim, c.expert_hidden),
    'w_out': jnp.zeros((c.experts, c.expert_hidden, c.dim)),
  }
  if c.shared_hidden:
    experts['shared_in'] = normal(keys[1], c.dim, c.shared_hidden)
    experts['shared_out'] = jnp.zeros((c.shared_hidden, c.dim))
  return {
    'experts': experts,
    'gate': {'kernel': normal(keys[2], c.dim, c.experts)},
    'bias': jnp.zeros(c.experts),
    'centres': jnp.zeros((c.experts, c.dim)),
  }


def normalized(x: jax.Array) -> jax.Array:
  """Layer norm without parameters along the last axis; zero stays zero."""
  x = x - x.mean(-1, keepdims=True)
  return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def routing_input(
  config: DUMoEConfig, z: jax.Array, valid: jax.Array
) -> jax.Array:
  """[B, L, D], what decides the experts: LN(z), or its mean up to each event.

  Args:
    config: `routing` says which.
    z: [B, L, D].
    valid: [B, L] bool; padding counts in no mean.
  """
  x = normalized(z)
  if config.routing == 'event':
    return x
  real = valid[..., None]
  total = jnp.cumsum(jnp.where(real, x, 0), 1)
  count = jnp.cumsum(real.astype(x.dtype), 1)
  # Without history the profile decides.
  return jnp.where(count > 0, total / jnp.maximum(count, 1), x)


def gate_logits(params: dict, x: jax.Array) -> jax.Array:
  """[..., E] float32, W_g x."""
  kernel = params['gate']['kernel'].astype(jnp.float32)
  return x.astype(jnp.float32) @ kernel


def centre_logits(params: dict, config: DUMoEConfig, x: jax.Array) -> jax.Array:
  """[..., E]: -|x - c_e|^2 / (temperature D); top-k takes the k nearest.

  Serving routes to k experts; so does the assignment that trains them.
  """
  c = params['centres']
  cross = jnp.einsum('...d,ed->...e', x, c)
  size = jnp.sum(c * c, -1).reshape((1,) * (x.ndim - 1) + (-1,))
  square = jnp.sum(x * x, -1, keepdims=True) - 2 * cross + size
  return -square / (config.temperature * config.dim)


def route(
  params: dict,
  config: DUMoEConfig,
  x: jax.Array,
  source: str,
  valid: jax.Array,
  keys: jax.Array | None = None,
) -> tuple[Routing, jax.Array]:
  """Experts of every token.

  Args:
    params: of `init_adapter`.
    config: k, normalize, noise and balance.
    x: [B, L, D], of `routing_input`.
    source: 'gate' or 'centres'.
    valid: [B, L] bool; other tokens meet no expert.
    keys: [B] PRNG keys of the noise; None for none.

  Returns:
    routing: of T tokens.
    logits: [T, E].
  """
  c = config
  flat = lambda a: a.reshape(-1, *a.shape[2:])
  if source == 'centres':
    logits = centre_logits(params, c, x)
    routing = topk_route(flat(logits), c.k, mask=flat(valid))
    return routing, flat(logits)
  logits = gate_logits(params, x)
  noise = 0.0 if keys is None else c.noise_std
  bias = params['bias'] if c.balance == 'bias' else None
  if not noise:
    routing = topk_route(
      flat(logits), c.k, normalize=c.normalize, bias=bias, mask=flat(valid)
    )
    return routing, flat(logits)
  # A key per example, so that batch mates never change the noise.
  one = lambda r, key, mask: topk_route(
    r, c.k, key=key, noise_std=noise, normalize=c.normalize, mask=mask
  )
  routing = jax.vmap(one)(logits, keys, valid)
  return jax.tree.map(flat, routing), flat(logits)


def apply_experts(
  params: dict, config: DUMoEConfig, z: jax.Array, routing: Routing
) -> jax.Array:
  """[B, L, D]: z plus its experts and the shared one.

  Args:
    params: of `init_adapter`.
    config: impl.
    z: [B, L, D].
    routing: of the T tokens.
  """
  p = params['experts']
  tokens = z.reshape(-1, z.shape[-1])
  out = expert_mlp(
    tokens, p['w_in'], p['w_out'], routing, act=nn.gelu, impl=config.impl
  )
  if 'shared_in' in p:
    out = out + nn.gelu(tokens @ p['shared_in']) @ p['shared_out']
  return z + out.reshape(z.shape)


def diversity_loss(w_out: jax.Array, eps: float = 1e-6) -> jax.Array:
  r"""Mean overlap of the output spaces of pairs of experts, in [0, 1].

  mean_{e != e'} |B_e^T B_e'|_F^2 / (|B_e|_F^2 |B_e'|_F^2 + eps).

  Args:
    w_out: [E, F, D], B_e^T.
    eps: keeps it 0, with gradient 0, at B = 0.

  Returns:
    []; 0 for a single expert.
  """
  chex.assert_rank(w_out, 3)
  count = w_out.shape[0]
  if count < 2:
    return jnp.zeros((), w_out.dtype)
  gram = jnp.einsum('efd,ghd->efgh', w_out, w_out)
  cross = jnp.sum(gram**2, (1, 3))
  size = jnp.sum(w_out**2, (1, 2))
  ratio = cross / (size[:, None] * size[None] + eps)
  return jnp.where(jnp.eye(count, dtype=bool), 0, ratio).sum() / (
    count * (count - 1)
  )


def kmeans(
  key: jax.Array,
  points: jax.Array | np.ndarray,
  clusters: int,
  *,
  weight: jax.Array | None = None,
  steps: int = 25,
) -> tuple[jax.Array, jax.Array]:
  """Lloyd's algorithm from the start of k-means++.

  Args:
    key: PRNG key.
    points: [N, D], float.
    clusters: E, in [1, N].
    weight: [N] >= 0; points of weight zero pull no centre.
    steps: rounds.

  Returns:
    centres: [E, D]; a cluster that lost all points keeps its centre.
    assignment: [N] int32, the nearest centre; ties go to the lower index.

  Raises:
    ValueError: if `clusters` is out of range.

  References:
    Arthur, Vassilvitskii. k-means++: the advantages of careful seeding, 2007.
  """
  points = jnp.asarray(points)
  chex.assert_rank(points, 2)
  if not 1 <= clusters <= len(points):
    raise ValueError(
      f'clusters={clusters} must lie in [1, {len(points)}], the number of '
      'points'
    )
  weight = jnp.ones(len(points)) if weight is None else weight

  def squares(centres):
    cross = points @ centres.T
    size = jnp.sum(points**2, 1)[:, None] + jnp.sum(centres**2, 1)[None]
    return jnp.maximum(size - 2 * cross, 0)

  def draw(key, mass):
    # Where all points are alike, any will do.
    mass = jnp.where(mass.sum() > 0, mass, weight)
    return points[jax.random.categorical(key, jnp.log(mass))]

  keys = jax.random.split(key, clusters)
  first = draw(keys[0], weight)
  centres = jnp.tile(first[None], (clusters, 1))

  def seed(i, centres):
    # Those not drawn yet are copies of the first.
    nearest = squares(centres).min(1)
    return centres.at[i].set(draw(keys[i], weight * nearest))

  centres = jax.lax.fori_loop(1, clusters, seed, centres)

  def lloyd(_, centres):
    hot = jax.nn.one_hot(squares(centres).argmin(1), clusters)
    hot = hot * weight[:, None]
    count = hot.sum(0)[:, None]
    means = (hot.T @ points) / jnp.where(count > 0, count, 1)
    return jnp.where(count > 0, means, centres)

  centres = jax.lax.fori_loop(0, steps, lloyd, centres)
  return centres, squares(centres).argmin(1).astype(jnp.int32)

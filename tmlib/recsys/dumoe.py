r"""DUMoE: drift-aware users and an adapter with an expert per interest.

Axes: B examples, L positions, T = B L tokens, D features, I items, E experts,
C candidates.

The published abstract gives the parts (static profile, short-term signals,
long-term history, a sparse mixture as interest adapter, three-stage training)
and no equations; those here are our choice.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tmlib.recsys.adapter import (
  Adapted,
  apply_experts,
  init_adapter,
  route,
  routing_input,
)
from tmlib.recsys.encoder import HALF_LIFE_PACE, UserEncoder, UserState
from tmlib.recsys.options import DUMoEConfig

__all__ = [
  'GROUPS',
  'STAGES',
  'adapt',
  'catalogue_logits',
  'check_batch',
  'check_source',
  'encode',
  'half_lives',
  'init',
  'interest_logits',
  'score_items',
  'stage_optimizer',
]

# Groups of parameters; `bias` moves by the sign of the load alone, `centres`
# are set between stages.
GROUPS = ('encoder', 'heads', 'experts', 'gate', 'bias', 'centres')

# stage -> (groups that learn, what routes; '' for no experts)
STAGES: dict[str, tuple[tuple[str, ...], str]] = {
  'backbone': (('encoder', 'heads'), ''),
  'experts': (('experts', 'heads'), 'centres'),
  'distil': (('gate',), 'gate'),
  'gate': (('gate', 'bias'), 'gate'),
  'adapter': (('experts', 'heads', 'gate', 'bias'), 'gate'),
  'random': (('experts', 'heads'), 'gate'),
  'joint': (('encoder', 'heads', 'experts', 'gate', 'bias'), 'gate'),
}


def check_batch(config: DUMoEConfig, batch: dict) -> None:
  """Refuses, on the host, what JAX would clamp in silence.

  Args:
    config: the sizes.
    batch: of `training_windows` or `query_windows`, or arrays like them.

  Raises:
    ValueError: for an item or action outside its table, or a modality that is
      missing or of another width.
  """
  for name, most in (
    ('item', config.num_items),
    ('target', config.num_items),
    ('action', config.num_actions - 1),
  ):
    values = np.asarray(batch[name])
    if values.size and not 0 <= values.min() <= values.max() <= most:
      raise ValueError(
        f'{name}: values run from {values.min()} to {values.max()}, allowed '
        f'are 0 to {most}; was the table made from another log?'
      )
  for name, width in config.modalities:
    if name not in batch['features']:
      raise ValueError(
        f'features: no modality {name!r}; the batch has '
        f'{sorted(batch["features"])}'
      )
    found = batch['features'][name].shape[-1]
    if found != width:
      raise ValueError(
        f'features[{name!r}] has width {found}, the config says {width}'
      )
  found = batch['profile'].shape[-1]
  if config.profile_dim and found != config.profile_dim:
    raise ValueError(
      f'profile has width {found}, the config says {config.profile_dim}'
    )


def check_source(source: str) -> None:
  """Refuses what routes nothing: 'gate', 'centres' or '' (no experts)."""
  if source not in ('', 'gate', 'centres'):
    raise ValueError(f"source={source!r} is not one of 'gate', 'centres', ''")


def init(key: jax.Array, config: DUMoEConfig, batch: dict) -> dict[str, Any]:
  """Parameters by `GROUPS`.

  Args:
    key: PRNG key.
    config: the model.
    batch: any batch, for its shapes.

  Returns:
    {group: parameters}; without experts 'encoder' and 'heads' alone.
  """
  keys = jax.random.split(key, 3)
  encoder = UserEncoder(config).init(keys[0], batch)['params']
  heads = {'item_bias': jnp.zeros(config.num_items + 1)}
  if config.num_tags:
    scale = config.dim**-0.5
    heads['tags'] = scale * jax.random.normal(
      keys[1], (config.dim, config.num_tags)
    )
    heads['tag_bias'] = jnp.zeros(config.num_tags)
  params = {'encoder': encoder, 'heads': heads}
  if config.experts:
    params |= init_adapter(keys[2], config)
  return params


def encode(
  params: dict,
  config: DUMoEConfig,
  batch: dict,
  *,
  keys: jax.Array | None = None,
) -> UserState:
  """The user at each position of each window.

  Args:
    params: of `init`.
    config: the model.
    batch: of `training_windows` or `query_windows`.
    keys: [B] PRNG keys of the dropout, in training; None for none.

  Returns:
    The state, leaves [B, L, ...].
  """
  variables = {'params': params['encoder']}
  return UserEncoder(config).apply(variables, batch, keys)  # pyright: ignore


def adapt(
  params: dict,
  config: DUMoEConfig,
  z: jax.Array,
  valid: jax.Array,
  *,
  source: str = 'gate',
  keys: jax.Array | None = None,
  last: bool = False,
) -> Adapted:
  """Adds the experts.

  Args:
    params: of `init`.
    config: the model.
    z: [B, L, D].
    valid: [B, L] bool, real events. A window without any still gets an answer
      at its last position, from the profile.
    source: 'gate' or 'centres' ('' for none).
    keys: [B] PRNG keys of the gate's noise; None for none.
    last: only the last position; then L = 1 in what is returned.

  Returns:
    The result.

  Raises:
    ValueError: for another source.
  """
  check_source(source)
  if not config.experts or not source:
    return Adapted(z[:, -1:] if last else z, None, None)
  x = routing_input(config, z, valid)
  real = jnp.asarray(valid).at[:, -1].set(True)
  if last:
    x, z, real = x[:, -1:], z[:, -1:], real[:, -1:]
  routing, logits = route(params, config, x, source, real, keys)
  return Adapted(apply_experts(params, config, z, routing), routing, logits)


def half_lives(params: dict, config: DUMoEConfig) -> np.ndarray:
  """[H] or [R, H] float64, learned half-lives in seconds."""
  shift = np.asarray(params['encoder']['half_life_shift'], np.float64)
  return np.asarray(config.half_lives) * np.exp(HALF_LIFE_PACE * shift)


def catalogue_logits(params: dict, y: jax.Array) -> jax.Array:
  """[..., I + 1]: <y, E_j> + b_j; -inf for padding, column 0."""
  table = params['encoder']['items']
  bias = params['heads']['item_bias']
  bias = bias.reshape((1,) * (y.ndim - 1) + (-1,))
  return (y @ table.T + bias).at[..., 0].set(-jnp.inf)


def score_items(params: dict, y: jax.Array, items: jax.Array) -> jax.Array:
  """Scores of chosen candidates.

  Args:
    params: of `init`.
    y: [B, D].
    items: [B, C] int32 in [1, I]; others are clamped under jit.

  Returns:
    [B, C], <y, E_j> + b_j.
  """
  table = params['encoder']['items'][items]
  return (
    jnp.einsum('bd,bcd->bc', y, table) + params['heads']['item_bias'][items]
  )


def interest_logits(params: dict, y: jax.Array) -> jax.Array:
  """[..., tags], logit of each tag on the next item."""
  bias = params['heads']['tag_bias']
  bias = bias.reshape((1,) * (y.ndim - 1) + (-1,))
  return y @ params['heads']['tags'] + bias


def stage_optimizer(
  stage: str,
  optimizer: optax.GradientTransformation,
  *,
  bias_rate: float = 1e-3,
) -> optax.GradientTransformation:
  """The optimizer of a stage: frozen groups stay as they are, bit by bit.

  Args:
    stage: of `STAGES`.
    optimizer: of the groups that learn.
    bias_rate: step of the selection's bias, which follows the sign of the
      load's surplus (`tmlib.moe.update_bias`).

  Returns:
    The transformation.

  Raises:
    ValueError: for an unknown stage.
  """
  if stage not in STAGES:
    raise ValueError(f'stage={stage!r} is not one of {sorted(STAGES)}')
  learn = STAGES[stage][0]

  def label(params):
    name = lambda group: (
      'off' if group not in learn else 'bias' if group == 'bias' else 'on'
    )
    return {
      group: jax.tree.map(lambda _, g=group: name(g), tree)
      for group, tree in params.items()
    }

  transforms: dict[Any, Any] = {
    'on': optimizer,
    'bias': optax.sign_sgd(bias_rate),
    'off': optax.set_to_zero(),
  }
  return optax.partition(transforms, label)

"""Instances: easy, cyclic, random, and the hard ones of the lower bounds.

Hard family: half of the arms are good, half are bad. A good arm beats a bad one
with probability level - eps, inside a half every duel is a coin. One hidden
good arm beats bad arms with probability `level`. It shows only in duels against
bad arms, and each of these costs constant regret. Fixing the hidden arm's
level, rather than the others', keeps the best welfare and the price of
exploration the same for every eps, so the worst eps is decided by
identification alone.

Axes: N users, K arms, G groups, D features.
"""

import jax
import jax.numpy as jnp

from tmlib.dueling import envs, glm

__all__ = [
  'cyclic_instance',
  'easy_instance',
  'glm_cyclic_instance',
  'glm_hard_instance',
  'hard_instance',
  'random_instance',
]


def _from_upper(upper: jax.Array) -> jax.Array:
  """Completes [..., K, K] upper triangles to preference matrices."""
  upper = jnp.triu(upper, 1)
  diagonal = jnp.broadcast_to(jnp.eye(upper.shape[-1]) / 2, upper.shape)
  lower = jnp.tril(1 - jnp.swapaxes(upper, -1, -2), -1)
  return upper + lower + diagonal


def hard_instance(
  key: jax.Array,
  num_arms: int,
  num_users: int = 1,
  eps: float | jax.Array = 0.1,
  *,
  level: float = 0.8,
  groups: int = 1,
  outcomes: str = 'independent',
  feedback: str = 'all',
) -> envs.DuelingEnv:
  """Draws a member of the tabular hard family.

  Args:
    key: PRNG key; draws the hidden arms.
    num_arms: K, even, at least 4.
    num_users: N.
    eps: [] in [0, level - 1/2], lead of the hidden arm; may be traced.
    level: in (1/2, 1], probability that the hidden arm beats a bad one.
    groups: G <= min(N, K / 2); user u hides an arm of its own group u mod G.
      One group: identical users.
    outcomes: 'independent' or 'shared'.
    feedback: 'all' or 'one'.

  Returns:
    The environment. Arms 0..K/2 - 1 are the good ones.

  Raises:
    ValueError: a number outside its range.
  """
  half = num_arms // 2
  if num_arms < 4 or num_arms % 2:
    raise ValueError(f'num_arms={num_arms} must be even and at least 4')
  if not 1 <= groups <= min(num_users, half):
    raise ValueError(
      f'groups={groups} must lie in [1, min(num_users, num_arms / 2)] = '
      f'[1, {min(num_users, half)}]'
    )
  if not 0.5 < level <= 1:
    raise ValueError(f'level={level} must lie in (1/2, 1]')
  if isinstance(eps, int | float) and not 0 <= eps <= level - 0.5:
    raise ValueError(f'eps={eps} must lie in [0, level - 1/2]')
  hidden = jax.random.permutation(key, half)[jnp.arange(num_users) % groups]
  good = jnp.arange(num_arms) < half
  lead = level - jnp.asarray(eps)
  win = jnp.where(jnp.arange(num_arms)[None] == hidden[:, None], level, lead)
  cross = (good[:, None] & ~good[None])[None]
  p = jnp.where(cross, win[:, :, None], 0.5)
  p = jnp.where(cross.swapaxes(1, 2), 1 - win[:, None, :], p)
  return envs.DuelingEnv(p, outcomes, feedback)


def easy_instance(
  num_arms: int, num_users: int = 1, gap: float = 0.3
) -> envs.DuelingEnv:
  """One arm beats every other with probability 1/2 + gap; the rest are equal.

  Args:
    num_arms: K >= 2.
    num_users: N.
    gap: in (0, 1/2].

  Returns:
    The environment; arm 0 is the best for all users.
  """
  if not 0 < gap <= 0.5:
    raise ValueError(f'gap={gap} must lie in (0, 1/2]')
  upper = jnp.full((num_arms, num_arms), 0.5).at[0].set(0.5 + gap)
  p = _from_upper(upper)
  return envs.make_env(jnp.broadcast_to(p, (num_users, *p.shape)))


def cyclic_instance(
  num_arms: int,
  num_users: int = 1,
  strength: float = 0.3,
  lead: float = 0.0,
) -> envs.DuelingEnv:
  """Rock-paper-scissors of K arms: no Condorcet winner.

  Arm i beats the (K - 1) / 2 arms after it with probability 1/2 + strength. Arm
  u mod K gains `lead` in every duel of user u, which makes it the Borda winner;
  it remains beaten by some arm while lead < strength.

  Args:
    num_arms: K, odd, at least 3.
    num_users: N.
    strength: in (0, 1/2].
    lead: in [0, 1/2 - strength].

  Returns:
    The environment.
  """
  if num_arms < 3 or num_arms % 2 == 0:
    raise ValueError(f'num_arms={num_arms} must be odd and at least 3')
  if not 0 < strength <= 0.5 or not 0 <= lead <= 0.5 - strength:
    raise ValueError(
      f'strength={strength} must lie in (0, 1/2] and lead={lead} in '
      '[0, 1/2 - strength]'
    )
  arms = jnp.arange(num_arms)
  ahead = (arms[None] - arms[:, None]) % num_arms
  win = (ahead >= 1) & (ahead <= (num_arms - 1) // 2)
  sign = jnp.where(ahead == 0, 0, jnp.where(win, 1, -1))
  own = jnp.arange(num_users)[:, None] % num_arms
  first = (arms[None] == own).astype(float)
  tilt = lead * (first[:, :, None] - first[:, None, :])
  return envs.make_env(0.5 + strength * sign[None] + tilt)


def random_instance(
  key: jax.Array, num_arms: int, num_users: int = 1, concentration: float = 0.5
) -> envs.DuelingEnv:
  """Independent Beta(c, c) preferences for every user and pair.

  Args:
    key: PRNG key.
    num_arms: K >= 2.
    num_users: N.
    concentration: c > 0; small values give decided users.

  Returns:
    The environment.
  """
  shape = (num_users, num_arms, num_arms)
  upper = jax.random.beta(key, concentration, concentration, shape)
  return envs.make_env(_from_upper(upper))


def glm_hard_instance(
  key: jax.Array,
  bits: int,
  delta: float | jax.Array,
  num_users: int = 1,
) -> 'glm.GlmEnv':
  """Draws a member of the generalized-linear hard family (linear link).

  K = 2^(d + 1) arms, 2^d good ones that carry all sign vectors s(i) in
  {-1, 1}^d, and as many bad ones. Good i beats bad j with probability
  3/4 + <s(i), theta>, theta in {-delta, delta}^d; inside a half every duel is a
  coin. Every duel between the halves informs on all d signs at constant cost.
  The constant 1/4 is one more, known, coordinate, so D = d + 1.

  Args:
    key: PRNG key; draws the signs of theta (the same for all users).
    bits: d >= 1.
    delta: [] in [0, 1 / (4 d)], size of the coordinates; the lower bound takes
      (d T)^(-1/3).
    num_users: N.

  Returns:
    The environment; arms 0..2^d - 1 are good.

  Raises:
    ValueError: bits below one or delta out of range.
  """
  if bits < 1:
    raise ValueError(f'bits={bits} must be at least 1')
  if isinstance(delta, int | float) and not 0 <= delta <= 1 / (4 * bits):
    raise ValueError(f'delta={delta} must lie in [0, 1/(4 bits)]')
  half = 2**bits
  signs = 2 * ((jnp.arange(half)[:, None] >> jnp.arange(bits)[None]) & 1) - 1
  row = jnp.concatenate([signs, jnp.ones((half, 1))], 1)
  upper = jnp.zeros((2 * half, 2 * half, bits + 1))
  upper = upper.at[:half, half:].set(
    jnp.broadcast_to(row[:, None], (half, half, bits + 1))
  )
  phi = upper - upper.transpose(1, 0, 2)
  flips = jnp.where(jax.random.bernoulli(key, 0.5, (bits,)), 1, -1)
  theta = jnp.append(flips * jnp.asarray(delta), 0.25)
  theta = jnp.broadcast_to(theta, (num_users, bits + 1))
  return glm.GlmEnv(phi, theta, 'linear')


def glm_cyclic_instance(
  key: jax.Array,
  num_arms: int,
  dim: int,
  num_users: int = 1,
  strength: float = 1.0,
  link: str = 'logistic',
) -> 'glm.GlmEnv':
  """Generalized-linear preferences without a Condorcet winner.

  phi_ij = (x_i - x_j, c_ij) with c_ij = +1 where j is among the (K - 1) / 2
  arms after i on a circle and -1 where it is before: the last coordinate of
  theta is `strength`, the others are small and differ between users.

  Args:
    key: PRNG key.
    num_arms: K, odd, at least 3.
    dim: D >= 2.
    num_users: N.
    strength: weight of the cycle, > 0.
    link: one of `glm.LINKS`.

  Returns:
    The environment.
  """
  if num_arms < 3 or num_arms % 2 == 0 or dim < 2:
    raise ValueError(
      f'num_arms={num_arms} must be odd and >= 3, and dim={dim} >= 2'
    )
  x_key, theta_key = jax.random.split(key)
  x = jax.random.normal(x_key, (num_arms, dim - 1)) / jnp.sqrt(dim - 1)
  arms = jnp.arange(num_arms)
  ahead = (arms[None] - arms[:, None]) % num_arms
  cycle = jnp.where(ahead <= (num_arms - 1) // 2, 1.0, -1.0)
  cycle = jnp.where(ahead == 0, 0, cycle)
  phi = jnp.concatenate([x[:, None] - x[None], cycle[..., None]], -1)
  taste = 0.3 * strength * jax.random.normal(theta_key, (num_users, dim - 1))
  theta = jnp.concatenate([taste, jnp.full((num_users, 1), strength)], 1)
  return glm.glm_env(phi, theta, link)

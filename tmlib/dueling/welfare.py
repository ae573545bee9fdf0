r"""Welfare of a lottery over arms.

v_u(pi) = <pi, b_u>;
  geometric    G = (prod_u v_u)^(1/N)      (Nash social welfare, the default)
  product      F = prod_u v_u
  log          (1/N) sum_u log v_u
  utilitarian  (1/N) sum_u v_u
  egalitarian  min_u v_u

The first three have the same maximisers. Users with a zero row make all three
degenerate; `solve_nsw` floors the scores for that reason.

Axes: N users, K arms; leading axes broadcast.
"""

import jax
import jax.numpy as jnp

from tmlib.dueling import checks

__all__ = [
  'KINDS',
  'NASH',
  'nash_welfare',
  'user_utility',
  'welfare_of_utility',
]

NASH = ('geometric', 'product', 'log')
KINDS = NASH + ('utilitarian', 'egalitarian')


def user_utility(pi: jax.Array, b: jax.Array) -> jax.Array:
  """Expected score of a lottery for each user: v_u = <pi, b_u>.

  Args:
    pi: [..., K], rows on the simplex.
    b: [..., N, K].

  Returns:
    [..., N].

  Raises:
    ValueError: pi and b have different numbers of arms.
  """
  if jnp.shape(pi)[-1:] != jnp.shape(b)[-1:]:
    raise ValueError(
      f'pi {jnp.shape(pi)} must be [..., K] and b {jnp.shape(b)} [..., N, K], '
      'with one K'
    )
  return jnp.einsum('...k,...nk->...n', pi, b)


def welfare_of_utility(v: jax.Array, kind: str = 'geometric') -> jax.Array:
  """Welfare of the users' utilities.

  Args:
    v: [..., N], non-negative for the Nash kinds.
    kind: one of `KINDS`.

  Returns:
    [...].

  Raises:
    ValueError: an unknown kind.
  """
  checks.check_choice('kind', kind, KINDS)
  if kind == 'utilitarian':
    return v.mean(-1)
  if kind == 'egalitarian':
    return v.min(-1)
  # log(0) = -inf is right for 'log' and becomes an exact zero otherwise; a
  # negative estimate of a non-negative score counts as zero.
  log = jnp.log(jnp.maximum(v, 0))
  if kind == 'log':
    return log.mean(-1)
  return jnp.exp(log.mean(-1) if kind == 'geometric' else log.sum(-1))


def nash_welfare(
  pi: jax.Array, b: jax.Array, kind: str = 'geometric'
) -> jax.Array:
  """Welfare of a lottery.

  Args:
    pi: [..., K], rows on the simplex.
    b: [..., N, K], scores.
    kind: one of `KINDS`.

  Returns:
    [...], in [0, 1] for scores in [0, 1] (kind 'log': at most 0).

  Raises:
    ValueError: an unknown kind.
  """
  return welfare_of_utility(user_utility(pi, b), kind)

"""Environments: users who answer duels.

User u prefers arm i to arm j with probability P^u_ij; P^u_ij + P^u_ji = 1.

  outcomes = 'independent': the users answer a duel with independent coins.
  outcomes = 'shared': one uniform number decides for all of them; users with
    equal preferences then always agree.
  feedback = 'all': every user answers every duel.
  feedback = 'one': one user, drawn uniformly, answers it.

Axes: N users, K arms.
"""

from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks

__all__ = ['FEEDBACK', 'OUTCOMES', 'DuelingEnv', 'Duel', 'duel', 'make_env']

OUTCOMES = ('independent', 'shared')
FEEDBACK = ('all', 'one')


class DuelingEnv(flax.struct.PyTreeNode):
  """Preferences of all users and the way in which they answer.

  Build it with `make_env`, which checks; the fields are plain.

  Attributes:
    preference: [N, K, K] in [0, 1], P[u, i, j] = Pr(user u prefers i to j).
    outcomes: 'independent' or 'shared' (static).
    feedback: 'all' or 'one' (static).
  """

  preference: Any
  outcomes: str = flax.struct.field(pytree_node=False, default='independent')
  feedback: str = flax.struct.field(pytree_node=False, default='all')

  @property
  def num_users(self) -> int:
    """N."""
    return self.preference.shape[0]

  @property
  def num_arms(self) -> int:
    """K."""
    return self.preference.shape[-1]


class Duel(NamedTuple):
  """Answers to one duel.

  Attributes:
    wins: [N], 1 where the user prefers the left arm, else 0; meaningless where
      the user did not answer.
    answered: [N] bool.
  """

  wins: jax.Array
  answered: jax.Array


def make_env(
  preference: Any,
  outcomes: str = 'independent',
  feedback: str = 'all',
  symmetrize: bool = False,
) -> DuelingEnv:
  """Checks the preferences and builds the environment.

  Args:
    preference: [N, K, K] in [0, 1], with P + P^T = 1 and diagonal 1/2.
    outcomes: 'independent' or 'shared'.
    feedback: 'all' or 'one'.
    symmetrize: replace P by (P + 1 - P^T) / 2 before the check.

  Returns:
    The environment.

  Raises:
    ValueError: see `checks.check_preference`; an unknown choice.
  """
  checks.check_choice('outcomes', outcomes, OUTCOMES)
  checks.check_choice('feedback', feedback, FEEDBACK)
  xp = np if isinstance(preference, np.ndarray | list | tuple) else jnp
  preference = xp.asarray(preference)
  if symmetrize and preference.ndim == 3:
    preference = (preference + 1 - xp.swapaxes(preference, -1, -2)) / 2
  checks.check_preference(preference)
  return DuelingEnv(jnp.asarray(preference), outcomes, feedback)


def duel(key: jax.Array, env: DuelingEnv, i: Any, j: Any) -> Duel:
  """Lets arms i and j duel once.

  Args:
    key: PRNG key; consumed.
    env: the environment.
    i: [] int in [0, K), left arm.
    j: [] int in [0, K), right arm.

  Returns:
    The answers, [N] each.
  """
  chex.assert_rank([i, j], 0)
  outcome_key, user_key = jax.random.split(key)
  users = env.num_users
  draws = 1 if env.outcomes == 'shared' else users
  uniform = jax.random.uniform(outcome_key, (draws,))
  wins = jnp.broadcast_to(uniform, (users,)) < env.preference[:, i, j]
  answered = jnp.ones(users, bool)
  if env.feedback == 'one':
    answered = jnp.arange(users) == jax.random.randint(user_key, (), 0, users)
  return Duel(wins.astype(env.preference.dtype), answered)

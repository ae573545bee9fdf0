r"""Best response of one provider, and the epsilon-Nash certificate.

The search is blind: it maximises the share over alpha_i on a grid, then on a
finer one around the best point and so on, re-solving the users' equilibrium
every time. It uses none of the theory of `envelope`, so it can certify it.

Ties. Where nobody comes whatever alpha_i is, or everybody does, the share is
flat and every alpha_i there is a best response. The search then goes on with
what users would get: a provider without users makes itself as attractive as it
can, one that has all of them widens its lead. This is what logit users of
vanishing temperature make providers do.

Axes: M providers, K types of users, P points of the grid.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tmlib.market import checks
from tmlib.market.game import ProviderGame
from tmlib.market.users import UserEq, split_users, utilities

__all__ = ['BestResponse', 'best_response', 'certify', 'respond']

_POINTS, _LEVELS = 25, 8
# |log odds| of a share that is not rounded to 0 or 1 stay below this.
_EDGE = 1000.0


class BestResponse(NamedTuple):
  """What a provider can do alone.

  Attributes:
    alpha: [], its best share of training.
    share: [], share of the users that it then has.
    gain: [], by how much that exceeds its share now; at least zero.
  """

  alpha: Any
  share: Any
  gain: Any


def _score(game: ProviderGame, alpha: jax.Array, here: jax.Array):
  """Increasing in the share of one provider, strict where it is flat."""
  found = split_users(game, alpha)
  x = jnp.where(here, found.x, 0).sum()
  rest = jnp.where(here, 0, found.x).sum() + found.outside
  empty, _ = utilities(game, alpha, jnp.zeros_like(found.x))
  mine = jnp.where(here[None], empty, -jnp.inf).max(1)
  others = jnp.where(here[None], -jnp.inf, empty).max(1)
  if game.outside is not None:
    others = jnp.maximum(others, game.outside)
  # By how much nobody comes, or nobody leaves, squashed to keep the order.
  short = jnp.tanh(jnp.nan_to_num((mine - found.U_types).max()))
  lead = jnp.tanh(jnp.nan_to_num((found.U_types - others).min()))
  safe = lambda y: jnp.log(jnp.where(y > 0, y, 1))
  score = jnp.where(rest > 0, safe(x) - safe(rest), _EDGE + lead)
  return jnp.where(x > 0, score, -_EDGE + short), x


def respond(game: ProviderGame, i: Any, alpha: jax.Array) -> BestResponse:
  """`best_response` without checks, in the dtype of its arguments."""
  dtype = jnp.result_type(alpha, game.budgets)
  game = jax.tree.map(jax.lax.stop_gradient, game)
  alpha = jax.lax.stop_gradient(jnp.asarray(alpha, dtype))
  here = jnp.arange(game.num_providers) == i
  score = jax.vmap(lambda a: _score(game, jnp.where(here, a, alpha), here))
  # alpha = 1 serves nobody; stop where capacity is still a normal number.
  top = 1 - 8 * jnp.finfo(dtype).eps
  now = jnp.where(here, alpha, 0).sum()

  def zoom(level, carry):
    low, high, best, _, held = carry
    grid = jnp.append(jnp.linspace(low, high, _POINTS, dtype=dtype), best)
    scores, shares = score(grid)
    chosen = scores.argmax()
    best, space = grid[chosen], (high - low) / (_POINTS - 1)
    low, high = jnp.maximum(best - space, 0), jnp.minimum(best + space, top)
    held = jnp.where(level == 0, shares[-1], held)
    return low, high, best, shares[chosen], held

  nothing = jnp.zeros((), dtype)
  carry = (nothing, jnp.asarray(top, dtype), now, nothing, nothing)
  *_, best, share, held = jax.lax.fori_loop(0, _LEVELS, zoom, carry)
  return BestResponse(best, share, jnp.maximum(share - held, 0))


def certify(game: ProviderGame, alpha: jax.Array) -> tuple[jax.Array, UserEq]:
  """Largest share that any provider could gain alone, and the equilibrium.

  Args:
    game: the game.
    alpha: [M].

  Returns:
    eps [] >= 0, and the users' equilibrium at alpha.
  """
  providers = jnp.arange(game.num_providers)
  gains = jax.lax.map(lambda i: respond(game, i, alpha).gain, providers)
  return gains.max(), split_users(game, alpha)


_respond = jax.jit(respond)


def best_response(game: ProviderGame, i: int, alpha: Any) -> BestResponse:
  """The split of its budget that gives provider i most users.

  Args:
    game: the game.
    i: provider, in [0, M).
    alpha: [M] in [0, 1], everybody's current choice.

  Returns:
    Best alpha, its share and the gain; NumPy in float64 unless game or alpha
    hold jax arrays. Never exactly 1, where nobody would be served.

  Raises:
    ValueError: i out of range, alpha of another shape or outside [0, 1].
  """
  alpha = checks.check_alpha(alpha, game.num_providers)
  if checks.concrete(i) and not 0 <= i < game.num_providers:
    raise ValueError(
      f'i={i} names no provider; allowed are 0 to {game.num_providers - 1}'
    )
  return checks.precise(lambda g, a: _respond(g, i, a), game, alpha)

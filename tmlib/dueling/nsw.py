r"""The fair lottery: welfare maximisation over the simplex, with a certificate.

Nash kinds. f(pi) = (1/N) sum_u log <pi, b_u> is concave, and
  f(pi*) - f(pi) <= g(pi) := max_i (1/N) sum_u b_u(i) / v_u(pi) - 1
(first-order bound at the best vertex). Pairwise Frank-Wolfe moves mass from
the worst supported arm to the best arm; the exact line search solves
sum_u d_u / (v_u + s d_u) = 0 by a safeguarded Newton iteration. The returned
gap is in units of the value: g for 'log', G (e^g - 1) for 'geometric',
F (e^{N g} - 1) for 'product'. It is computed for the returned lottery, never
assumed, and rounded up by a few ulps, so it never promises too much.

Multiplicative (EM) updates are monotone too but stall near vertices when the
gaps are small, which is where regret is decided.

One user: the argmax, exactly. Utilitarian: the argmax of the mean. Egalitarian:
a matrix game, see `matrix_game`.

At the optimum (1/N) sum_u v_u(pi) / v_u(pi*) <= 1 for all pi. Uniform pi gives
v_u = 1/2 for Borda scores, so mean_u 1/v_u(pi*) <= 2, and with v_u <= 1 every
user keeps v_u(pi*) >= 1/(N + 1).

Axes: N users, K arms.
"""

import functools
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks, matrix_game, welfare

__all__ = [
  'FLOOR',
  'Solution',
  'first_order_gap',
  'maximize_welfare',
  'solve_nsw',
]

# Scores are raised to this inside the Nash kinds: true scores are >= 0, so it
# only repairs estimates, by no more than their own error.
FLOOR = 0.0


class Solution(NamedTuple):
  """A lottery and how good it is.

  Attributes:
    pi: [K], on the simplex.
    value: [], welfare of pi.
    gap: [], certified bound: best welfare - value <= gap.
  """

  # jax arrays, or NumPy where the input was NumPy.
  pi: Any
  value: Any
  gap: Any


def first_order_gap(pi: jax.Array, b: jax.Array) -> jax.Array:
  """Duality gap of the mean log utility: max_i mean_u b_u(i) / v_u(pi) - 1.

  Args:
    pi: [K], on the simplex.
    b: [N, K], positive.

  Returns:
    [], at least zero up to rounding.
  """
  v = welfare.user_utility(pi, b)
  return (b / v[:, None]).mean(0).max() - 1


def _line_search(v: jax.Array, d: jax.Array, longest: jax.Array) -> jax.Array:
  """Maximises sum_u log(v_u + s d_u) over s in [0, longest]."""

  def slope(s):
    return (d / (v + s * d)).sum()

  def body(_, bracket):
    low, high, s = bracket
    ratio = d / (v + s * d)
    first, second = ratio.sum(), (ratio**2).sum()
    low = jnp.where(first > 0, s, low)
    high = jnp.where(first > 0, high, s)
    newton = s + first / jnp.where(second > 0, second, 1)
    inside = (newton > low) & (newton < high)
    return low, high, jnp.where(inside, newton, (low + high) / 2)

  start = (jnp.zeros_like(longest), longest, longest / 2)
  _, _, s = jax.lax.fori_loop(0, 25, body, start)
  return jnp.where(slope(longest) >= 0, longest, s)


def _pairwise_frank_wolfe(
  b: jax.Array, tol: float, max_steps: int
) -> jax.Array:
  arms = b.shape[1]

  def scores(pi):
    return (b / welfare.user_utility(pi, b)[:, None]).mean(0)

  def unfinished(carry):
    _, gap, moved, step = carry
    return (gap > tol) & moved & (step < max_steps)

  def body(carry):
    pi, _, _, step = carry
    score = scores(pi)
    best = score.argmax()
    worst = jnp.where(pi > 0, score, jnp.inf).argmin()
    d = b[:, best] - b[:, worst]
    s = _line_search(welfare.user_utility(pi, b), d, pi[worst])
    is_best, is_worst = jnp.arange(arms) == best, jnp.arange(arms) == worst
    # A full step must leave an exact zero: a rounding residue would stay in
    # the support and be chosen as the worst arm again and again.
    left = jnp.where(s >= pi[worst], 0, pi[worst] - s)
    moved = pi + jnp.where(is_best, pi[worst] - left, 0)
    new = jnp.where(is_worst & ~is_best, left, moved)
    new = new / new.sum()
    gap = scores(new).max() - 1
    return new, gap, (new != pi).any(), step + 1

  # Start at the best single arm, or in the middle where every arm is worthless
  # to somebody (log 0).
  single = jnp.log(b).mean(0)
  start = jnp.where(
    jnp.isfinite(single.max()),
    jax.nn.one_hot(single.argmax(), arms, dtype=b.dtype),
    jnp.full(arms, 1 / arms, b.dtype),
  )
  carry = (start, scores(start).max() - 1, jnp.bool_(True), jnp.int32(0))
  return jax.lax.while_loop(unfinished, body, carry)[0]


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def maximize_welfare(
  b: jax.Array,
  kind: str = 'geometric',
  tol: float | None = None,
  max_steps: int | None = None,
) -> Solution:
  """`solve_nsw` without checks, in the dtype of `b`; for use under a trace.

  Args:
    b: [N, K] float.
    kind: one of `welfare.KINDS` (static).
    tol: Frank-Wolfe stops at this log gap; None: 1e-10 in float64, 2e-6 in
      float32 (static).
    max_steps: largest number of Frank-Wolfe steps (static); None: 10,000 in
      float64, 64 + 2 K in float32, where rounding may keep the gap above tol.

  Returns:
    The solution.
  """
  chex.assert_rank(b, 2)
  users, arms = b.shape
  eps = float(jnp.finfo(b.dtype).eps)
  if kind == 'egalitarian':
    pi, value, gap = matrix_game.solve_game(b)
    return Solution(pi, value, gap)
  if kind == 'utilitarian' or users == 1:
    pi = jax.nn.one_hot(b.mean(0).argmax(), arms, dtype=b.dtype)
    raised = b if kind == 'utilitarian' else jnp.maximum(b, FLOOR)
    value = welfare.nash_welfare(pi, raised, kind)
    # The arm is exact; the value is as good as its own rounding.
    return Solution(pi, value, 8 * eps * jnp.abs(value))
  if tol is None:
    tol = 1e-10 if eps < 1e-10 else 2e-6
  if max_steps is None:
    max_steps = 10_000 if eps < 1e-10 else 64 + 2 * arms
  b = jnp.maximum(b, FLOOR)
  pi = _pairwise_frank_wolfe(b, tol, max_steps)
  gap = jnp.maximum(first_order_gap(pi, b), 0) + 8 * eps
  value = welfare.nash_welfare(pi, b, kind)
  if kind == 'geometric':
    gap = value * jnp.expm1(gap)
  if kind == 'product':
    gap = value * jnp.expm1(users * gap)
  return Solution(pi, value, gap)


def solve_nsw(
  b: Any,
  kind: str = 'geometric',
  tol: float | None = None,
  max_steps: int | None = None,
) -> Solution:
  """Finds the lottery of greatest welfare and certifies it.

  NumPy input (or nested lists) is solved in float64, whatever the caller's
  precision, and gives NumPy back; a jax array is solved in its own dtype.

  Args:
    b: [N, K] float, Borda scores or their estimates; the Nash kinds use
      max(b, 0).
    kind: one of `welfare.KINDS`.
    tol: stops at this log-welfare gap; None: 1e-10 in float64, 2e-6 in float32.
    max_steps: largest number of Frank-Wolfe steps; None: 10,000 in float64,
      64 + 2 K in float32.

  Returns:
    pi [K], value [] and gap [] with best welfare - value <= gap.

  Raises:
    ValueError: an unknown kind, a wrong shape, NaN, or no positive score.
  """
  checks.check_choice('kind', kind, welfare.KINDS)
  shape = np.shape(b)
  if len(shape) != 2 or 0 in shape:
    raise ValueError(f'b has shape {shape}; expected [N >= 1, K >= 1]')
  if checks.concrete(b):
    values = np.asarray(b)
    if values.dtype.kind not in 'biuf':
      raise ValueError(f'b has dtype {values.dtype}; expected numbers')
    if not np.isfinite(values).all():
      user, arm = np.argwhere(~np.isfinite(values))[0]
      raise ValueError(
        f'b[{user}, {arm}] = {values[user, arm]} must be finite; a user '
        'without votes has no score: drop or pool such users first'
      )
    # Numbers below `tiny` are flushed to zero by the compiled code.
    tiny = np.finfo(values.dtype).tiny if values.dtype.kind == 'f' else 0
    if kind in welfare.NASH and (values.max(1) <= tiny).any():
      user = int(values.max(1).argmin())
      raise ValueError(
        f'user {user} has no positive score (max {values[user].max():.3g}), so '
        'every lottery has zero Nash welfare; drop the user or rescale b'
      )
  if not isinstance(b, jax.Array):
    with jax.enable_x64(True):
      found = maximize_welfare(
        jnp.asarray(np.asarray(b, np.float64)), kind, tol, max_steps
      )
    # Back to NumPy: float64 jax arrays lose their precision in the next
    # operation outside the context.
    return Solution(*map(np.asarray, found))
  b = b.astype(jnp.result_type(b, float)) if b.dtype.kind in 'biu' else b
  return maximize_welfare(b, kind, tol, max_steps)

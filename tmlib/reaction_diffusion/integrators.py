r"""Time stepping: explicit rules and two implicit ones.

Explicit rules take a right-hand side f: u -> du/dt; implicit ones take the
split of `Dynamics`, du/dt = T u + rate (v(u) - u) + force(u), with T u =
gain(u) - outflow u and gain >= 0. States are pytrees of arrays [..., N, D].

  rule            order   largest tau (explicit bound t* = stable_tau)
  euler           1       t*
  heun            2       t*: a convex combination of two Euler steps
  rk4             4       t* (l2 only, limit 2.785 / 2 of S4's bound; it is not
                          such a combination and has no maximum principle)
  semi_implicit   1       any: maximum principle (symmetric flux), not
                          conservative
  imex_cg         1       any: maximum principle, and conservative where rate =
                          0, both to the tolerance of the solver. Iterations
                          grow with sqrt(tau); `Solution` tells how it went

The order is that of the whole evolution, also where the coefficients depend on
the state: explicit rules then look them up at every stage.

semi_implicit. u' = (u + tau (gain(u) + rate v(u) + force)) / (1 + tau (outflow
  + rate)): without force the weights of u, of its neighbours and of v are >= 0
  and sum to one, whatever tau is. Neighbours are weighed by their old values,
  so what leaves i is not what arrives at j.
imex_cg. ((1 + tau rate) I - tau T) u' = u + tau (rate v(u) + force). The decay
  must be implicit: with it on the right-hand side the step would be u' = u -
  tau rate u for a constant field, unstable for tau rate > 2. The matrix is a
  symmetric M-matrix, so its inverse is >= 0 and its rows sum to 1 / (1 + tau
  rate), which gives the maximum principle; its columns do too, which gives
  conservation. Its condition number is at most 1 + 2 tau / (1 + tau rate).

Axes: ... leading axes, N patches, D channels.

References:
  Shu, Osher. Efficient implementation of essentially non-oscillatory
  shock-capturing schemes, 1988 (heun as SSPRK2).
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from tmlib.reaction_diffusion.dynamics import Dynamics, right_hand_side

__all__ = [
  'EXPLICIT',
  'INTEGRATORS',
  'Solution',
  'conjugate_gradients',
  'euler',
  'heun',
  'imex_cg',
  'integrate',
  'rk4',
  'semi_implicit',
]

EXPLICIT = ('euler', 'heun', 'rk4')
INTEGRATORS = (*EXPLICIT, 'semi_implicit', 'imex_cg')

State = TypeVar('State')


def euler(
  rhs: Callable[[State], State], u: State, tau: jax.Array | float
) -> State:
  """One forward Euler step: u + tau f(u)."""
  return jax.tree.map(lambda u, f: u + tau * f, u, rhs(u))


def heun(
  rhs: Callable[[State], State], u: State, tau: jax.Array | float
) -> State:
  """One SSPRK2 step: the mean of u and of two Euler steps from it."""
  twice = euler(rhs, euler(rhs, u, tau), tau)
  return jax.tree.map(lambda u, v: (u + v) / 2, u, twice)


def rk4(
  rhs: Callable[[State], State], u: State, tau: jax.Array | float
) -> State:
  """One step of the classical fourth-order Runge-Kutta rule."""
  move = lambda slope, t: jax.tree.map(lambda u, k: u + t * k, u, slope)
  k1 = rhs(u)
  k2 = rhs(move(k1, tau / 2))
  k3 = rhs(move(k2, tau / 2))
  k4 = rhs(move(k3, tau))
  mean = lambda a, b, c, d: (a + 2 * (b + c) + d) / 6
  return move(jax.tree.map(mean, k1, k2, k3, k4), tau)


def semi_implicit(
  dynamics: Dynamics, u: State, tau: jax.Array | float
) -> State:
  """One step with the diagonal taken implicitly: one sparse pass, any tau."""

  def leaf(u, transport, outflow, rate, target, force):
    gain = transport + outflow * u
    new = u + tau * (gain + rate * target + force)
    return new / (1 + tau * (outflow + rate))

  return jax.tree.map(
    leaf,
    u,
    dynamics.transport(u),
    dynamics.outflow,
    dynamics.rate,
    dynamics.target(u),
    dynamics.force(u),
  )


class Solution(NamedTuple):
  """What an iterative solve of A x = b found.

  Attributes:
    state: x, like b.
    converged: [...], bool, whether every channel of a row met the tolerance.
    residual: [...], |A x - b| / |b| of a row over its patches and channels,
      computed anew; rounding keeps it above about eps |A| |x| / |b|.
    iterations: [], int32, how many there were.
  """

  state: Any
  converged: jax.Array
  residual: jax.Array
  iterations: jax.Array


def imex_cg(
  dynamics: Dynamics,
  u: Any,
  tau: jax.Array | float,
  *,
  tol: float = 1e-6,
  iterations: int = 1000,
  axis_name: str | None = None,
) -> Solution:
  """One step with transport and decay implicit, by conjugate gradients.

  The derivative solves one more system with the same matrix instead of
  unrolling the iteration. What a step fails to conserve is at most the
  residual.

  Args:
    dynamics: with `symmetric` True.
    u: pytree of [..., N, D].
    tau: step > 0.
    tol: relative residual to reach in every channel. It takes about sqrt(q) / 2
      ln(2 sqrt(q) / tol) iterations, q = 1 + 2 tau: 14 at tau = 1, 410 at 1000.
    iterations: at most so many.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    Solution; its `state` is the next state.

  Raises:
    ValueError: a transport that is not symmetric.
  """
  if not dynamics.symmetric:
    raise ValueError(
      "integrator='imex_cg' needs a symmetric transport, but flux='upwind' "
      "is directed; use integrator='semi_implicit' or an explicit rule"
    )
  matvec, rhs = _implicit_system(dynamics, u, tau)

  def solve(matvec, b):
    found = conjugate_gradients(
      matvec, b, tol=tol, iterations=iterations, axis_name=axis_name
    )
    return found.state, found[1:]

  state, told = jax.lax.custom_linear_solve(
    matvec, rhs, solve, symmetric=True, has_aux=True
  )
  return Solution(state, *told)


def conjugate_gradients(
  matvec: Callable[[Any], Any],
  b: Any,
  *,
  tol: float = 1e-6,
  iterations: int = 1000,
  axis_name: str | None = None,
) -> Solution:
  """Solves A x = b for symmetric positive definite A acting along patches.

  Every row and channel has its own step lengths, so channels and bags of a
  batch never mix. The loop ends when all of them have converged; those that
  were ready earlier only get better.

  Args:
    matvec: x -> A x; A acts on the axis N of each leaf, channel by channel.
    b: pytree of [..., N, D].
    tol: relative residual to reach in every row and channel.
    iterations: at most so many.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    Solution. Not differentiable as it stands (a `while_loop`).
  """

  def dot(x, y):
    total = jnp.sum(x * y, -2, keepdims=True)
    return total if axis_name is None else jax.lax.psum(total, axis_name)

  dots = lambda x, y: jax.tree.map(dot, x, y)
  ratio = lambda a, b: jnp.where(b > 0, a / jnp.where(b > 0, b, 1), 0)
  ratios = lambda a, b: jax.tree.map(ratio, a, b)
  axpy = lambda s, x, y: jax.tree.map(lambda s, x, y: s * x + y, s, x, y)
  row = lambda tree: jax.tree.reduce(
    jnp.add, jax.tree.map(lambda v: jnp.sum(v, (-2, -1)), tree)
  )
  size = dots(b, b)

  def open_channels(rr):
    """[...], how many channels of a row are above the tolerance."""
    return row(jax.tree.map(lambda r, s: r > tol**2 * s, rr, size))

  def proceed(carry):
    *_, rr, count = carry
    return (count < iterations) & jnp.any(open_channels(rr) > 0)

  def body(carry):
    x, r, p, rr, count = carry
    ap = matvec(p)
    step = ratios(rr, dots(p, ap))
    x = axpy(step, p, x)
    r = axpy(jax.tree.map(jnp.negative, step), ap, r)
    rr_new = dots(r, r)
    p = axpy(ratios(rr_new, rr), p, r)
    return x, r, p, rr_new, count + 1

  x = jax.tree.map(jnp.zeros_like, b)
  start = (x, b, b, size, jnp.int32(0))
  x, _, _, rr, count = jax.lax.while_loop(proceed, body, start)
  gap = jax.tree.map(jnp.subtract, matvec(x), b)
  residual = jnp.sqrt(ratio(row(dots(gap, gap)), row(size)))
  return Solution(x, open_channels(rr) == 0, residual, count)


def integrate(
  integrator: str,
  dynamics: Dynamics | Callable[[State], Dynamics],
  u: State,
  tau: jax.Array | float,
  *,
  tol: float = 1e-6,
  iterations: int = 1000,
  axis_name: str | None = None,
) -> Solution:
  """One step of the rule called `integrator`.

  Args:
    integrator: one of `INTEGRATORS`.
    dynamics: see `Dynamics`; or a function of the state, called by explicit
      rules at every stage and by implicit ones at the start of the step.
    u: state, pytree of [..., N, D].
    tau: step > 0.
    tol: of 'imex_cg'.
    iterations: of 'imex_cg', at most.
    axis_name: mesh axis that splits the patches, if any.

  Returns:
    Solution, with the next state. Rules that solve nothing have converged with
    a residual of zero.

  Raises:
    ValueError: unknown rule, or 'imex_cg' for a transport that is not
      symmetric.
  """
  if integrator not in INTEGRATORS:
    raise ValueError(
      f'integrator={integrator!r} is unknown; allowed: {", ".join(INTEGRATORS)}'
    )
  at = lambda u: dynamics if isinstance(dynamics, Dynamics) else dynamics(u)
  if integrator == 'imex_cg':
    return imex_cg(
      at(u), u, tau, tol=tol, iterations=iterations, axis_name=axis_name
    )
  if integrator == 'semi_implicit':
    new = semi_implicit(at(u), u, tau)
  else:
    rule = {'euler': euler, 'heun': heun, 'rk4': rk4}[integrator]
    new = rule(lambda u: right_hand_side(at(u))(u), u, tau)
  lead = jax.tree.leaves(u)[0].shape[:-2]
  return Solution(new, jnp.ones(lead, bool), jnp.zeros(lead), jnp.int32(0))


def _implicit_system(dynamics: Dynamics, u: Any, tau: jax.Array | float):
  """The matrix and the right-hand side of `imex_cg`."""

  def matvec(v):
    return jax.tree.map(
      lambda v, rate, transport: (1 + tau * rate) * v - tau * transport,
      v,
      dynamics.rate,
      dynamics.transport(v),
    )

  rhs = jax.tree.map(
    lambda u, rate, target, force: u + tau * (rate * target + force),
    u,
    dynamics.rate,
    dynamics.target(u),
    dynamics.force(u),
  )
  return matvec, rhs

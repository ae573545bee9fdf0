"""Order, bounds and conservation of the integrators, on dense matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib import reaction_diffusion as rd
from tmlib.reaction_diffusion import integrators

N, D = 12, 2
RNG = np.random.default_rng(0)
_X = np.triu(RNG.uniform(size=(N, N)), 1)
# Symmetric conductances with row sums at most one.
C = (_X + _X.T) / (_X + _X.T).sum(1).max()
LAPLACE = C - np.diag(C.sum(1))
W = RNG.normal(size=(D, D))
U0 = RNG.normal(size=(N, D))


def dynamics(rate, force=0.0):
  return rd.Dynamics(
    transport=lambda u: jnp.asarray(LAPLACE) @ u,
    outflow=jnp.asarray(C.sum(1, keepdims=True)),
    rate=rate,
    target=lambda u: jnp.tanh(u @ W),
    force=lambda u: force * jnp.sin(u),
  )


@functools.partial(jax.jit, static_argnums=0)
def march(integrator, u, tau, steps, rate, force):
  """`steps` steps; one compile for every step size and count."""
  step = lambda _, u: rd.integrate(
    integrator, dynamics(rate, force), u, tau, iterations=14
  )
  return jax.lax.fori_loop(0, steps, step, u)


def march64(integrator, tau, steps, rate=0.0, force=0.0, u=U0):
  with jax.enable_x64(True):
    out = march(integrator, jnp.asarray(u), float(tau), steps, rate, force)
    return np.asarray(out)


@pytest.mark.parametrize(
  ('integrator', 'order'),
  [('euler', 1), ('heun', 2), ('rk4', 4), ('semi_implicit', 1), ('imex_cg', 1)],
)
def test_converges_at_its_order(integrator, order):
  # Richardson: the gap between tau and tau / 2 shrinks by 2^order.
  last = [
    march64(integrator, 1 / n, n, rate=0.7, force=0.4) for n in (16, 32, 64)
  ]
  first = np.abs(last[0] - last[1]).max()
  second = np.abs(last[1] - last[2]).max()
  assert np.log2(first / second) == pytest.approx(order, abs=0.12)
  # And all to the same limit.
  truth = march64('rk4', 1 / 256, 256, rate=0.7, force=0.4)
  assert np.abs(last[-1] - truth).max() < 0.02


@pytest.mark.parametrize('tau', [1.0, 10.0, 100.0])
@pytest.mark.parametrize('integrator', ['semi_implicit', 'imex_cg'])
def test_implicit_rules_accept_any_step(integrator, tau):
  u = march64(integrator, tau, 30)
  assert u.min() >= U0.min(0).min() - 1e-6
  assert u.max() <= U0.max(0).max() + 1e-6
  drift = np.abs(u.mean(0) - U0.mean(0)).max()
  if integrator == 'imex_cg':
    assert drift < 1e-6
  else:
    assert drift > 1e-4


def test_explicit_rules_do_not():
  for integrator in integrators.EXPLICIT:
    assert np.abs(march64(integrator, 100.0, 30)).max() > 1e6


def test_decay_is_implicit():
  # With the decay on the right-hand side this diverges at tau lam > 2.
  for tau in (3.0, 30.0):
    u = march64('imex_cg', tau, 60, rate=0.9)
    assert np.abs(u).max() <= np.abs(U0).max()


def test_imex_step_equals_a_direct_solve():
  tau, rate = 4.0, 0.3
  want = np.linalg.solve(
    (1 + tau * rate) * np.eye(N) - tau * LAPLACE,
    U0 + tau * (rate * np.tanh(U0 @ W) + 0.2 * np.sin(U0)),
  )
  np.testing.assert_allclose(
    march64('imex_cg', tau, 1, rate, 0.2), want, atol=1e-9
  )
  with jax.enable_x64(True):
    parts, u = dynamics(rate, 0.2), jnp.asarray(U0)
    residual = rd.imex_residual(parts, u, jnp.asarray(want), tau)
    assert residual < 1e-12
    # A wrong solution has the residual that it has.
    off = jnp.asarray(want + 1.0)
    matrix = (1 + tau * rate) * np.eye(N) - tau * LAPLACE
    gap = np.linalg.norm(matrix @ np.ones((N, D)))
    size = np.linalg.norm(matrix @ want)
    found = rd.imex_residual(parts, u, off, tau)
    assert found == pytest.approx(gap / size, rel=1e-9)


def test_semi_implicit_step_by_hand():
  # Two patches, c = 1, tau = 1: u_i' = (u_i + u_j) / (1 + 1).
  parts = rd.Dynamics(
    transport=lambda u: u[::-1] - u,
    outflow=1.0,
    rate=0.0,
    target=lambda u: u,
    force=jnp.zeros_like,
  )
  found = rd.semi_implicit(parts, jnp.array([[4.0], [0.0]]), 1.0)
  np.testing.assert_allclose(found, [[2.0], [2.0]])


def test_gradient_of_a_solve():
  with jax.enable_x64(True):

    @jax.jit
    @jax.value_and_grad
    def loss(tau):
      u = rd.imex_cg(dynamics(0.3, 0.2), jnp.asarray(U0), tau, iterations=14)
      return jnp.sum(u**3)

    eps = 1e-5
    slope = (loss(2.0 + eps)[0] - loss(2.0 - eps)[0]) / (2 * eps)
    np.testing.assert_allclose(loss(2.0)[1], slope, rtol=1e-6)


def test_a_solved_channel_stays_put():
  # A zero channel must not become NaN beside one that still converges.
  b = jnp.stack([jnp.zeros(N), jnp.arange(float(N))], -1)
  matvec = lambda x: 2.0 * x
  x = rd.conjugate_gradients(matvec, b, iterations=5)
  np.testing.assert_allclose(x, b / 2)


def test_refuses_what_it_cannot_do():
  parts = dynamics(0.0)._replace(symmetric=False)
  with pytest.raises(ValueError, match='symmetric transport'):
    rd.integrate('imex_cg', parts, jnp.asarray(U0), 0.1)
  with pytest.raises(ValueError, match="'magic' is unknown; allowed: euler"):
    rd.integrate('magic', parts, jnp.asarray(U0), 0.1)

"""Order, bounds and conservation of the integrators, on dense matrices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import sparse
from scipy.sparse.linalg import spsolve

from tmlib import reaction_diffusion as rd
from tmlib.ops.graph import ell_from_grid
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
  step = lambda _, u: (
    rd.integrate(integrator, dynamics(rate, force), u, tau, tol=1e-12).state
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


SIDE = 40
_IJ = np.stack(np.divmod(np.arange(SIDE**2), SIDE), -1).astype(np.int32)
GRID = ell_from_grid(_IJ, connectivity=4)


def grid_problem(dtype, batch=1):
  """Conductances on a grid that is too large to be solved in a few steps."""
  rng = np.random.default_rng(1)
  weight = rng.uniform(0.2, 1, size=(SIDE**2, 1))
  weight = np.where(GRID.emask, weight * weight[GRID.nbr][..., 0], 0) / 4
  graph = jax.tree.map(lambda x: np.stack([x] * batch), GRID)
  gain = np.ones(D, dtype)
  c = rd.Coefficients(
    intra=np.stack([weight.astype(dtype)] * batch),
    boundary=None,
    alpha=gain,
    eta=gain,
    alpha_z=dtype(1),
  )
  h = rng.normal(size=(batch, SIDE**2, D)).astype(dtype)
  row = np.repeat(np.arange(SIDE**2), 4)[GRID.emask.ravel()]
  sums = sparse.coo_matrix(
    (weight[GRID.emask], (row, GRID.nbr[GRID.emask])), (SIDE**2, SIDE**2)
  ).tocsr()
  laplace = sparse.diags_array(np.asarray(sums.sum(1)).ravel()) - sums
  return rd.Fields(h, np.ones((batch, SIDE**2, 1), dtype)), c, graph, laplace


@pytest.mark.parametrize('dtype', [np.float32, np.float64])
def test_iterations_grow_with_the_step_until_it_is_solved(dtype):
  with jax.enable_x64(dtype == np.float64):
    fields, c, graph, laplace = grid_problem(dtype)
    solve = jax.jit(
      lambda u, tau: rd.imex_cg(rd.make_dynamics(c, graph), u, tau)
    )
    counts = []
    for tau in (1.0, 30.0, 1000.0):
      found = jax.device_get(solve(fields, dtype(tau)))
      matrix = sparse.eye_array(SIDE**2) + tau * laplace
      h = fields.hidden[0].astype(np.float64)
      want = spsolve(matrix.tocsc(), h)
      error = np.abs(found.state.hidden[0] - want).max()
      drift = np.abs((found.state.hidden[0] - h).mean(0)).max()
      assert found.converged.all()
      assert error < 1e-5
      assert drift < 1e-6
      # As told, up to what float32 can tell at all: eps times |A|.
      assert found.residual < 1e-6 + 0.2 * np.finfo(dtype).eps * (1 + 2 * tau)
      q = 1 + 2 * tau
      assert found.iterations <= np.sqrt(q) / 2 * np.log(2e6 * np.sqrt(q)) + 1
      counts.append(int(found.iterations))
    # What 32 iterations once left undone.
    assert counts[0] < 32 < 100 < counts[2]


def test_a_solve_that_stops_early_says_so():
  with jax.enable_x64(True):
    fields, c, graph, laplace = grid_problem(np.float64, batch=2)
    # A constant field is solved at once, its batch mate is not.
    fields = fields._replace(hidden=fields.hidden * np.ones((2, 1, 1)))
    fields.hidden[0] = 1.0
    tau = 1000.0
    found = jax.jit(
      lambda u: rd.imex_cg(rd.make_dynamics(c, graph), u, tau, iterations=9)
    )(fields)
    found = jax.device_get(found)
  np.testing.assert_array_equal(found.converged, [True, False])
  assert found.iterations == 9
  matrix = sparse.eye_array(SIDE**2) + tau * laplace
  both = lambda u: np.concatenate([u.hidden[1], u.concepts[1]], 1)
  gap = np.linalg.norm(matrix @ both(found.state) - both(fields))
  want = gap / np.linalg.norm(both(fields))
  assert want > 0.1
  assert found.residual[0] < 1e-9
  assert found.residual[1] == pytest.approx(want, rel=1e-9)


def test_the_evolution_reports_its_solves():
  fields, c, graph, _ = grid_problem(np.float32)
  run = lambda **options: rd.evolve(
    fields, c, graph, 1000.0, 2, integrator='imex_cg', trace=True, **options
  )
  _, seen = run()
  assert seen.converged.shape == seen.residual.shape == (2, 1)
  assert seen.converged.all()
  _, seen = run(iterations=9)
  assert not seen.converged[0]
  assert seen.residual[0] > 0.1
  _, seen = rd.evolve(fields, c, graph, 0.5, 2, trace=True)
  assert seen.converged.all()
  assert not seen.residual.any()


@pytest.mark.parametrize(
  ('integrator', 'order'),
  [('euler', 1), ('heun', 2), ('rk4', 4), ('semi_implicit', 1)],
)
def test_order_holds_where_coefficients_follow_the_state(integrator, order):
  graph = ell_from_grid(
    np.stack(np.divmod(np.arange(12), 4), -1).astype(np.int32), connectivity=4
  )
  rng = np.random.default_rng(2)
  fields = rd.Fields(rng.normal(size=(12, D)), rng.dirichlet([1] * 3, 12))
  gain = np.full(D, 0.9)

  def follow(fields):
    # Perona-Malik: edges close where the field differs.
    open_ = rd.edge_stopping(3 * fields.hidden, graph)
    return rd.Coefficients(
      jnp.where(graph.emask, open_, 0) / 4, None, gain, gain, 0.9
    )

  with jax.enable_x64(True):
    fields = jax.tree.map(jnp.asarray, fields)

    @functools.partial(jax.jit, static_argnums=1)
    def march(tau, steps):
      return rd.evolve(
        fields, follow, graph, tau, steps, integrator=integrator
      )[0].hidden

    ends = [np.asarray(march(2.0 / n, n)) for n in (8, 16, 32)]
  first = np.abs(ends[0] - ends[1]).max()
  second = np.abs(ends[1] - ends[2]).max()
  assert np.log2(first / second) == pytest.approx(order, abs=0.25)


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
      u = rd.imex_cg(dynamics(0.3, 0.2), jnp.asarray(U0), tau, tol=1e-13)
      return jnp.sum(u.state**3)

    eps = 1e-5
    slope = (loss(2.0 + eps)[0] - loss(2.0 - eps)[0]) / (2 * eps)
    np.testing.assert_allclose(loss(2.0)[1], slope, rtol=1e-6)


def test_a_solved_channel_stays_put():
  # A zero channel must not become NaN beside one that still converges.
  b = jnp.stack([jnp.zeros(N), jnp.arange(float(N))], -1)
  matvec = lambda x: 2.0 * x
  found = rd.conjugate_gradients(matvec, b, iterations=5)
  np.testing.assert_allclose(found.state, b / 2)
  assert found.converged
  assert found.iterations == 1


def test_refuses_what_it_cannot_do():
  parts = dynamics(0.0)._replace(symmetric=False)
  with pytest.raises(ValueError, match='symmetric transport'):
    rd.integrate('imex_cg', parts, jnp.asarray(U0), 0.1)
  with pytest.raises(ValueError, match="'magic' is unknown; allowed: euler"):
    rd.integrate('magic', parts, jnp.asarray(U0), 0.1)

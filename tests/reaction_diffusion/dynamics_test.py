"""Facts S1-S4, against dense NumPy, on random graphs and on a real slide."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.reaction_diffusion import support
from tmlib import reaction_diffusion as rd
from tmlib.ops.graph import ell_from_grid

N, K, D, M = 20, 4, 3, 3
STEPS = 6


def problem(seed, lam=0.0, exchange=1.0, graph=None):
  """Random coefficients and fields on a random graph, float64."""
  rng = np.random.default_rng(seed)
  if graph is None:
    graph = support.random_graph(rng, N, K, 60)
  n = len(graph.nbr)
  rho, gate = support.symmetric(rng, n), support.symmetric(rng, n)
  coefficients = rd.Coefficients(
    intra=support.edge_weights(graph, rho) / K,
    boundary=support.edge_weights(graph, (1 - rho) * gate) / K,
    alpha=rng.uniform(size=D),
    eta=rng.uniform(size=D),
    alpha_z=rng.uniform(),
    eta_z=rng.uniform(),
    exchange=exchange * rng.normal(size=(M, D)),
    lam=np.float64(lam),
    kernel=rng.normal(size=(D, D)),
    bias=rng.normal(size=D),
    reaction='relax',
  )
  fields = rd.Fields(
    2 * rng.normal(size=(n, D)), rng.dirichlet(np.ones(M), size=n)
  )
  return coefficients, fields, graph


@jax.jit
def path(coefficients, fields, graph, tau):
  """Every state of a forward Euler evolution."""
  step = rd.right_hand_side(rd.make_dynamics(coefficients, graph))

  def body(u, _):
    return rd.euler(step, u, tau), u

  last, past = jax.lax.scan(body, fields, None, length=STEPS)
  return jax.tree.map(lambda p, x: jnp.concatenate([p, x[None]]), past, last)


def euler64(*args):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, path(*args))


def dense_step(c, fields, graph, tau):
  """One step with matrices, straight from the definition."""
  a, b = support.dense(graph, c.intra), support.dense(graph, c.boundary)
  laplace = lambda w, u: w @ u - w.sum(1, keepdims=True) * u
  h, z = fields
  flux = laplace(b, z)
  dh = c.alpha * laplace(a, h) + c.eta * laplace(b, h) + flux @ c.exchange
  dh += c.lam * (np.tanh(h @ c.kernel + c.bias) - h)
  dz = c.alpha_z * laplace(a, z) + c.eta_z * flux
  return rd.Fields(h + tau * dh, z + tau * dz)


def energy(c, h, graph):
  """H^T L H / 2 summed over channels, by a double loop over patches."""
  total = 0.0
  for w, gain in ((c.intra, c.alpha), (c.boundary, c.eta)):
    matrix = support.dense(graph, w)
    gap = (h[:, None] - h[None]) ** 2 @ gain
    total += np.sum(matrix * gap) / 4
  return total


def test_equals_matrices():
  c, fields, graph = problem(0, lam=0.4)
  found = euler64(c, fields, graph, 0.5)
  want = fields
  for t in range(1, STEPS + 1):
    want = dense_step(c, want, graph, 0.5)
    np.testing.assert_allclose(found.hidden[t], want.hidden, atol=1e-12)
    np.testing.assert_allclose(found.concepts[t], want.concepts, atol=1e-12)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), lam=st.floats(0, 0.999))
def test_s1_s2_concepts_stay_on_the_simplex_and_h_is_bounded(seed, lam):
  c, fields, graph = problem(seed, lam)
  tau = rd.stable_tau(lam)
  h, z = euler64(c, fields, graph, tau)
  np.testing.assert_allclose(z.sum(-1), 1, atol=1e-12)
  assert (z >= -1e-12).all()
  assert (z <= z[0].max(0) + 1e-12).all()
  assert (z >= z[0].min(0) - 1e-12).all()
  flux = 2 * np.abs(c.exchange).max()
  bound = np.abs(h[0]).max()
  for t in range(1, STEPS + 1):
    bound = (1 - tau * lam) * bound + tau * lam + tau * flux
    assert np.abs(h[t]).max() <= bound + 1e-9


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tau=st.floats(0.01, 1))
def test_s3_sums_are_conserved_for_every_exchange(seed, tau):
  c, fields, graph = problem(seed, exchange=10.0)
  h, z = euler64(c, fields, graph, tau)
  np.testing.assert_allclose(
    h.sum(1), h[:1].sum(1) * np.ones((7, 1)), atol=1e-9
  )
  np.testing.assert_allclose(
    z.sum(1), z[:1].sum(1) * np.ones((7, 1)), atol=1e-9
  )


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), tau=st.floats(0.01, 1))
def test_s4_the_energy_never_rises(seed, tau):
  c, fields, graph = problem(seed, exchange=0.0)
  h, _ = euler64(c, fields, graph, tau)
  energies = [energy(c, x, graph) for x in h]
  assert np.diff(energies).max() <= 1e-9 * energies[0]


def test_a_reaction_breaks_conservation():
  c, fields, graph = problem(3, lam=0.5)
  h, _ = euler64(c, fields, graph, 0.5)
  assert np.abs(h[-1].sum(0) - h[0].sum(0)).min() > 1e-3


def test_beyond_the_bound_states_blow_up():
  # Two patches, one edge, K = 1: L = [[1, -1], [-1, 1]] has eigenvalue 2.
  graph = ell_from_grid(np.array([[0, 0], [0, 1]], np.int32), connectivity=4)
  coefficients = rd.Coefficients(
    intra=graph.emask.astype(np.float64),
    boundary=None,
    alpha=np.ones(1),
    eta=np.ones(1),
  )
  fields = rd.Fields(np.array([[1.0], [-1.0]]), np.ones((2, 1)))
  for tau, largest in ((1.0, 1.0), (1.5, 2.0**STEPS)):
    h, _ = euler64(coefficients, fields, graph, tau)
    # Eigenvalue 1 - 2 tau of the step, exactly.
    assert abs(h[-1]).max() == pytest.approx(largest)


@pytest.mark.parametrize('reaction', sorted(rd.REACTIONS))
def test_polynomials_keep_their_box_and_pull_back_from_outside(reaction):
  kind = rd.REACTIONS[reaction]
  polynomial = {
    'fisher': lambda u: u - u**2,
    'zeldovich': lambda u: u**2 - u**3,
    'allen_cahn': lambda u: u - u**3,
  }[reaction]
  u = np.linspace(kind.low, kind.high, 101)
  with jax.enable_x64(True):
    v = np.asarray(kind.target(jnp.asarray(u)))
  np.testing.assert_allclose(
    kind.stiffness * (v - u), polynomial(u), atol=1e-14
  )
  assert v.min() >= kind.low - 1e-14
  assert v.max() <= kind.high + 1e-14
  c, fields, graph = problem(5, exchange=0.0)
  lam = 0.9
  c = c.replace(reaction=reaction, lam=np.float64(lam), kernel=None, bias=None)
  tau = rd.stable_tau(lam, reaction=reaction)
  inside = fields._replace(
    hidden=kind.low
    + (kind.high - kind.low)
    * np.random.default_rng(0).uniform(size=fields.hidden.shape)
  )
  h, _ = euler64(c, inside, graph, tau)
  assert h.min() >= kind.low - 1e-12
  assert h.max() <= kind.high + 1e-12
  # Far outside the polynomial itself overflows within these steps.
  h, _ = euler64(c, fields._replace(hidden=50 * fields.hidden), graph, tau)
  assert np.abs(h).max() <= np.abs(h[0]).max()


def test_to_box():
  x = jnp.array([-9.0, 0.0, 9.0])
  for reaction, kind in rd.REACTIONS.items():
    boxed = rd.to_box(x, reaction)
    assert kind.low <= boxed.min() <= boxed.max() <= kind.high
  np.testing.assert_array_equal(rd.to_box(x, 'relax'), x)


def test_stable_and_sharp_tau():
  assert rd.stable_tau(0.0) == 1
  assert rd.stable_tau(0.5) == pytest.approx(2 / 3)
  assert rd.stable_tau(0.5, reaction='none') == 1
  assert rd.stable_tau(0.5, reaction='allen_cahn') == 0.5
  assert rd.stable_tau(0.5, flux='upwind') == pytest.approx(0.4)
  c, _, graph = problem(7, lam=0.3)
  outflow = np.sum(
    c.intra[..., None] * c.alpha + c.boundary[..., None] * c.eta, 1
  )
  z = np.sum(c.intra * c.alpha_z + c.boundary * c.eta_z, 1)
  want = 1 / max(outflow.max() + 0.3, z.max())
  assert rd.sharp_tau(c, graph) == pytest.approx(want, rel=1e-5)
  assert want >= rd.stable_tau(0.3)


def test_scaled_coefficients_scale_the_right_hand_side():
  c, fields, graph = problem(9, lam=0.3)
  velocity = support.symmetric(np.random.default_rng(0), N)
  velocity = support.edge_weights(graph, np.triu(velocity) - np.tril(velocity))
  c = c.replace(velocity=velocity)
  with jax.enable_x64(True):
    rhs = lambda c: rd.right_hand_side(rd.make_dynamics(c, graph))(fields)
    one, part = jax.device_get((rhs(c), rhs(c.scaled(0.3))))
  for a, b in zip(one, part, strict=True):
    assert np.abs(a).max() > 0.01
    np.testing.assert_allclose(0.3 * a, b, atol=1e-12)


def test_upwind_conserves_and_stays_positive():
  rng = np.random.default_rng(0)
  c, fields, graph = problem(11, exchange=0.0)
  phi = rng.normal(size=(M, M)) * 5
  with jax.enable_x64(True):
    velocity = np.asarray(
      rd.upwind_velocity(
        jnp.asarray(c.boundary), jnp.asarray(fields.concepts), phi, graph
      )
    )
  matrix = support.dense(graph, velocity)
  np.testing.assert_allclose(matrix, -matrix.T, atol=1e-15)
  assert np.abs(matrix).max() > 0.01
  fields = fields._replace(hidden=np.abs(fields.hidden))
  tau = rd.stable_tau(0.0, flux='upwind')
  h, _ = euler64(c.replace(velocity=velocity), fields, graph, tau)
  assert h.min() >= 0
  np.testing.assert_allclose(h[-1].sum(0), h[0].sum(0), rtol=1e-12)
  # One step by the definition: F_ij = v+_ij U_i - v-_ij U_j leaves i.
  want = dense_step(c, fields, graph, tau).hidden
  for i in range(N):
    for j in range(N):
      v, u = matrix[i, j], fields.hidden
      want[i] -= tau * (max(v, 0) * u[i] - max(-v, 0) * u[j])
  np.testing.assert_allclose(h[1], want, atol=1e-12)


@pytest.fixture(scope='module')
def kirc():
  ij = support.kirc_positions()
  return ij, ell_from_grid(ij, connectivity=8)


def test_facts_hold_on_a_real_slide(kirc):
  ij, graph = kirc
  assert len(ij) == 13472
  assert graph.emask.sum() == 103486
  assert (~graph.emask.any(1)).sum() == 8
  rng = np.random.default_rng(0)
  n = len(ij)
  rho = rng.uniform(size=(n, 1)).astype(np.float32)
  # rho_i rho_j is symmetric and lies in [0, 1].
  rho = np.where(graph.emask, rho * rho[graph.nbr][..., 0], 0)
  c = rd.Coefficients(
    intra=rho / 8,
    boundary=np.where(graph.emask, (1 - rho) * 0.7, 0) / 8,
    alpha=np.full(D, 0.999, np.float32),
    eta=np.full(D, 0.999, np.float32),
    alpha_z=np.float32(0.999),
    eta_z=np.float32(0.999),
  )
  fields = rd.Fields(
    rng.normal(size=(n, D)).astype(np.float32),
    rng.dirichlet(np.ones(M), size=n).astype(np.float32),
  )
  h, z = jax.tree.map(np.asarray, path(c, fields, graph, np.float32(1)))
  np.testing.assert_allclose(z.sum(-1), 1, atol=1e-5)
  assert z.min() >= -1e-6
  assert np.abs(h).max() <= np.abs(h[0]).max() + 1e-5
  assert np.abs((h[-1] - h[0]).astype(np.float64).mean(0)).max() < 1e-6

  def energy(x):
    gap = x[:, None] - x[graph.nbr]
    weights = 0.999 * (c.intra + c.boundary)
    return np.sum(weights[..., None] * gap.astype(np.float64) ** 2) / 4

  energies = [energy(x) for x in h]
  assert np.diff(energies).max() <= 0
  # Uniform weights reach eigenvalue 1.4976 on this slide, so 2.5 diverges.
  c = c.replace(intra=graph.emask / np.float32(8), boundary=0 * c.boundary)
  wild = path(c, fields, graph, np.float32(2.5)).hidden
  tame = path(c, fields, graph, np.float32(1)).hidden
  assert np.abs(tame).max() <= np.abs(h[0]).max() + 1e-5
  growth = np.linalg.norm(wild, axis=(1, 2))
  assert growth[-1] > 20 * growth[0]

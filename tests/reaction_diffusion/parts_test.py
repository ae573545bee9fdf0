"""Concepts, regions, conductances, readout and diagnostics, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.reaction_diffusion import support
from tmlib import reaction_diffusion as rd
from tmlib.ops.graph import ell_from_grid

RNG = np.random.default_rng(0)
N, K, D, M, R = 14, 4, 5, 3, 4
_, GRAPH = support.grid_graph(RNG, 5, 4, N)
EDGES = support.dense(GRAPH)
MASK = np.ones(N, bool)
MEMBER = MASK[:, None]
H = RNG.normal(size=(N, D)).astype(np.float32)
Z = RNG.dirichlet(np.ones(M), size=N).astype(np.float32)
S = RNG.dirichlet(np.ones(R), size=N).astype(np.float32)


def softmax(x):
  x = np.exp(x - x.max(-1, keepdims=True))
  return x / x.sum(-1, keepdims=True)


# Concepts.


def test_similarity_by_hand():
  matrix = np.eye(2, dtype=np.float32)
  # Rows are normalised: (3, 4) / 5; a zero row has no direction.
  rows = jnp.array([[3.0, 4.0], [0.0, 0.0]])
  logits = rd.similarity_logits(rows, matrix, jnp.log(10.0))
  np.testing.assert_allclose(logits, [[6.0, 8.0], [0.0, 0.0]], rtol=1e-6)
  # The scale is clipped at 100.
  logits = rd.similarity_logits(rows, matrix, jnp.asarray(9.0))
  np.testing.assert_allclose(logits[0], [60.0, 80.0], rtol=1e-5)
  grad = jax.grad(lambda x: rd.unit_rows(x).sum())(rows)
  assert np.isfinite(grad).all()


def test_concept_field():
  logits = jnp.array([[0.0, np.log(3.0)], [np.nan, np.inf]])
  mask = jnp.array([True, False])
  np.testing.assert_allclose(
    rd.concept_field(logits, mask), [[0.25, 0.75], [0, 0]], rtol=1e-6
  )
  boxed = rd.concept_field(
    logits, mask, activation='sigmoid', bias=jnp.array([np.log(3.0), 0.0])
  )
  np.testing.assert_allclose(boxed, [[0.75, 0.75], [0, 0]], rtol=1e-6)
  with pytest.raises(ValueError, match='takes no bias'):
    rd.concept_field(logits, mask, bias=jnp.zeros(2))
  with pytest.raises(ValueError, match='allowed: softmax, sigmoid'):
    rd.concept_field(logits, mask, activation='relu')


@pytest.mark.parametrize(
  ('matrix', 'message'),
  [
    (np.zeros((0, 4)), 'M=0'),
    (np.ones(4), r'expected \[M, Q\]'),
    (
      np.ones((2, 3)) / np.sqrt(3),
      'Q=3 columns but .* have 4',
    ),
    (
      [[1, 0, 0, 0], [np.nan, 0, 0, 0]],
      r'infinite entries in rows \[1\]',
    ),
    (np.zeros((2, 4)), 'zero rows'),
  ],
)
def test_bad_concept_matrices(matrix, message):
  with pytest.raises(ValueError, match=message):
    rd.check_concept_matrix(matrix, 4)


def test_concept_rows_are_normalised_with_a_warning():
  with pytest.warns(UserWarning, match='norms in'):
    found = rd.check_concept_matrix([[3.0, 4.0], [0.0, 2.0]])
  np.testing.assert_allclose(found, [[0.6, 0.8], [0, 1]], rtol=1e-6)


# Regions.


def region_params():
  draw = lambda *shape: RNG.normal(size=shape).astype(np.float32)
  return rd.RegionParams(draw(D, D), draw(R, D), draw(R, M), draw(D, D))


def assign_by_loops(h, z, p, groups, edges, k, omega, smooth, temperature):
  """The definition, one bag at a time, in float64."""
  h, z = h.astype(np.float64), z.astype(np.float64)
  out = np.zeros((len(h), len(p.prototypes)))
  for rows in groups:
    norm = h[rows] - h[rows].mean(1, keepdims=True)
    norm /= np.sqrt((norm**2).mean(1, keepdims=True) + 1e-6)
    q = p.prototypes.astype(np.float64)
    offset = z[rows] @ p.concept_prototypes.T
    score = lambda q, norm=norm, offset=offset: softmax(
      (norm @ p.query @ q.T / np.sqrt(h.shape[1]) + offset) / temperature
    )
    s = score(q)
    centroid = s.T @ h[rows] / s.sum(0)[:, None]
    out[rows] = score(q + (centroid - q) @ p.update)
  for _ in range(smooth):
    degree = edges.sum(1, keepdims=True)
    out = (1 - omega * degree / k) * out + omega / k * edges @ out
  return out


def test_regions_equal_loops_also_when_bags_are_packed():
  p = region_params()
  ids = np.zeros(N, np.int32)
  options = dict(temperature=0.7, omega=0.6, smooth_iters=2)
  found = rd.assign_regions(H, Z, MEMBER, p, GRAPH, **options)
  want = assign_by_loops(H, Z, p, [np.arange(N)], EDGES, K, 0.6, 2, 0.7)
  np.testing.assert_allclose(found, want, atol=2e-5)
  np.testing.assert_allclose(found.sum(-1), 1, atol=1e-5)
  # Two bags in one row: each has its own refined prototypes.
  ids = (np.arange(N) >= 6).astype(np.int32)
  member = rd.membership(MASK, ids, 3)
  found = rd.assign_regions(H, Z, member, p, temperature=0.7)
  groups = [np.arange(6), np.arange(6, N)]
  want = assign_by_loops(H, Z, p, groups, EDGES, K, 0, 0, 0.7)
  np.testing.assert_allclose(found, want, atol=2e-5)
  usage = rd.region_usage(found, member)
  np.testing.assert_allclose(usage[0], want[:6].mean(0), atol=1e-5)
  np.testing.assert_array_equal(usage[2], np.zeros(R))


def test_smoothing_by_hand():
  graph = ell_from_grid(np.array([[0, 0], [0, 1]], np.int32), connectivity=4)
  s = jnp.array([[1.0, 0.0], [0.0, 1.0]])
  # One edge each, K = 4, omega = 1: three quarters stay.
  found = rd.smooth_regions(s, graph, 1, omega=1.0)
  np.testing.assert_allclose(found, [[0.75, 0.25], [0.25, 0.75]], rtol=1e-6)
  found = rd.smooth_regions(s, graph, 1, omega=1.0, degree=2)
  np.testing.assert_allclose(found, [[0.5, 0.5], [0.5, 0.5]], rtol=1e-6)


# Conductance.


def test_same_region():
  rho = rd.same_region(S, GRAPH)
  np.testing.assert_allclose(
    support.dense(GRAPH, rho), EDGES * (S @ S.T), rtol=1e-5
  )
  root = np.sqrt(S)
  rho = rd.same_region(S, GRAPH, 'bhattacharyya')
  np.testing.assert_allclose(
    support.dense(GRAPH, rho), EDGES * (root @ root.T), atol=1e-3
  )
  # Undecided but equal rows: 1 / R and one.
  even = np.full((N, R), 1 / R, np.float32)
  inner = rd.same_region(even, GRAPH)
  np.testing.assert_allclose(inner, GRAPH.emask / R, rtol=1e-6)
  rho = rd.same_region(even, GRAPH, 'bhattacharyya')
  np.testing.assert_allclose(rho, GRAPH.emask, rtol=1e-6)
  # A hard assignment has a finite gradient.
  hard = jnp.eye(R)[np.arange(N) % R]
  grad = jax.grad(lambda s: rd.same_region(s, GRAPH, 'bhattacharyya').sum())
  assert np.isfinite(grad(hard)).all()
  with pytest.raises(ValueError, match='allowed: inner, bhattacharyya'):
    rd.same_region(S, GRAPH, 'cosine')


def test_conductance_equals_matrices():
  theta = RNG.normal(size=(M, M)).astype(np.float32)
  kappa = rd.edge_stopping(H, GRAPH)
  distance = ((H[:, None] - H[None]) ** 2).sum(-1)
  want = EDGES * np.exp(-distance / D)
  np.testing.assert_allclose(support.dense(GRAPH, kappa), want, atol=1e-5)
  found = rd.edge_conductance(
    S, Z, GRAPH, theta=theta, bias=0.3, stopping=kappa, degree=5
  )
  rho = S @ S.T
  gate = 1 / (1 + np.exp(-(Z @ (theta + theta.T) / 2 @ Z.T) - 0.3))
  a, b = support.dense(GRAPH, found.intra), support.dense(GRAPH, found.boundary)
  np.testing.assert_allclose(a, want * rho / 5, atol=1e-6)
  np.testing.assert_allclose(b, EDGES * (1 - rho) * gate / 5, atol=1e-6)
  np.testing.assert_allclose(a, a.T, atol=1e-7)
  np.testing.assert_allclose(b, b.T, atol=1e-7)
  assert (a + b).sum(1).max() <= 1
  uniform = rd.uniform_conductance(GRAPH, jnp.float32)
  np.testing.assert_allclose(support.dense(GRAPH, uniform), EDGES / K)


# Readout.


def test_aggregation_by_hand_and_dead_regions():
  values = np.array([[2.0], [4.0], [9.0]], np.float32)
  s = np.array([[1.0, 0.0], [0.5, 0.5], [0.0, 0.0]], np.float32)
  member = np.array([[True], [True], [False]])
  found = rd.aggregate_regions(values, s, member)
  np.testing.assert_allclose(found.mass, [[1.5, 0.5]])
  np.testing.assert_allclose(found.mean[0, :, 0], [4 / 1.5, 4.0], rtol=1e-6)
  heat = rd.patch_heatmap(jnp.array([[0.6, 0.4]]), found, s, member)
  np.testing.assert_allclose(heat, [0.4, 0.2 + 0.4, 0], rtol=1e-6)
  # A thousandth of the patches that are there, not of the padded rows.
  s = np.array([[0.998, 0.002], [0.9999, 0.0001]], np.float32)
  s = np.concatenate([s, np.zeros((5000, 2), np.float32)])
  member = np.arange(5002)[:, None] < 2
  found = rd.aggregate_regions(np.ones((5002, 1), np.float32), s, member)
  np.testing.assert_array_equal(found.alive, [[True, True]])
  s[0] = 0.999, 0.001
  found = rd.aggregate_regions(np.ones((5002, 1), np.float32), s, member)
  np.testing.assert_array_equal(found.alive, [[True, False]])
  np.testing.assert_allclose(found.mean[0, :, 0], [1, 0], rtol=1e-6)


def test_patch_softmax_per_bag():
  scores = jnp.array([0.0, np.log(3.0), 7.0, np.nan, np.inf])
  ids, mask = np.int32([0, 0, 1, 0, 1]), np.array([1, 1, 1, 0, 0], bool)
  member = rd.membership(mask, ids, 3)
  found = rd.patch_softmax(scores, member)
  np.testing.assert_allclose(found, [0.25, 0.75, 1, 0, 0], rtol=1e-6)
  grad = jax.grad(lambda x: jnp.sum(rd.patch_softmax(x, member) ** 2))(scores)
  assert np.isfinite(grad).all()


def test_entropies_by_hand():
  s = np.array([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]], np.float32)
  member = np.array([[True, False], [True, False], [False, False]])
  found = rd.assignment_entropy(s, member)
  np.testing.assert_allclose(found, [np.log(2) / 2, 0], rtol=1e-6)
  usage = rd.region_usage(s, member)
  np.testing.assert_allclose(usage, [[0.75, 0.25], [0, 0]])
  want = 0.75 * np.log(0.75) + 0.25 * np.log(0.25)
  np.testing.assert_allclose(rd.region_balance(usage), [want, 0], rtol=1e-6)
  grad = jax.grad(lambda s: rd.assignment_entropy(s, member).sum())
  assert np.isfinite(grad(s)).all()
  overlap = rd.prototype_overlap(jnp.array([[1.0, 0], [0, 3.0], [1, 1]]))
  np.testing.assert_allclose(overlap, 4 * 0.5 / 6, rtol=1e-6)
  assert rd.prototype_overlap(jnp.ones((1, 2))) == 0


# Diagnostics.


def test_flux_energy_and_interface_equal_matrices():
  c = rd.edge_conductance(S, Z, GRAPH)
  alpha, eta = RNG.uniform(size=(2, D)).astype(np.float32)
  coefficients = rd.Coefficients(c.intra, c.boundary, alpha, eta)
  fields = rd.Fields(H, Z)
  a, b = support.dense(GRAPH, c.intra), support.dense(GRAPH, c.boundary)
  both = np.concatenate([H, Z], 1)
  gap = np.abs(both[:, None] - both[None]).sum(-1)
  flux = rd.boundary_flux(fields, c.boundary, GRAPH)
  np.testing.assert_allclose(flux, (b * gap).sum(1), rtol=1e-4)
  intra, inter = rd.dirichlet_energy(fields, coefficients, GRAPH)
  for found, w, gain in ((intra, a, alpha), (inter, b, eta)):
    gap = ((H[:, None] - H[None]) ** 2) @ gain
    np.testing.assert_allclose(found, (w * gap).sum(1) / 4, rtol=1e-4)
  gamma = rd.interface_matrix(S, c.boundary, GRAPH)
  np.testing.assert_allclose(gamma, S.T @ b @ S, rtol=1e-4)
  mean = rd.per_bag(jnp.stack([intra, inter]), MEMBER)
  np.testing.assert_allclose(
    mean[:, 0], [intra.mean(), inter.mean()], rtol=1e-5
  )


def test_region_diagnostics():
  graph = ell_from_grid(
    np.stack([np.zeros(4), np.arange(4)], 1).astype(np.int32), connectivity=4
  )
  labels = np.array([0, 0, 2, -1])
  rho = support.edge_weights(
    graph,
    np.array(
      [[0, 0.9, 0, 0], [0.9, 0, 0.2, 0], [0, 0.2, 0, 0.5], [0, 0, 0.5, 0]]
    ),
  ).astype(np.float32)
  found = rd.region_diagnostics(rho, labels, graph)
  # Edge 0-1 lies inside, 1-2 across, 2-3 is unknown.
  assert found['rho_inside'] == pytest.approx(0.9)
  assert found['beta_across'] == pytest.approx(0.8)


def test_tables_are_what_the_data_can_see():
  theta = RNG.normal(size=(M, M)).astype(np.float32)
  exchange = RNG.normal(size=(M, D)).astype(np.float32)
  one = rd.identifiable_tables(theta, 0.3, exchange)
  # A constant from the bias into Theta, a common row, an antisymmetric part.
  skew = np.triu(np.ones((M, M), np.float32), 1)
  two = rd.identifiable_tables(
    theta + 0.5 + skew - skew.T, -0.2, exchange + np.arange(D, dtype=np.float32)
  )
  for name in one:
    np.testing.assert_allclose(one[name], two[name], atol=1e-5)
  gate = rd.edge_conductance(S, Z, GRAPH, theta=theta, bias=0.3).gate
  moved = rd.edge_conductance(S, Z, GRAPH, theta=theta + 0.5, bias=-0.2).gate
  np.testing.assert_allclose(gate, moved, atol=1e-6)


def test_tables_of_sigmoid_concepts_keep_what_a_box_can_tell():
  theta = RNG.normal(size=(M, M)).astype(np.float32)
  exchange = RNG.normal(size=(M, D)).astype(np.float32)
  tables = rd.identifiable_tables(theta, 0.3, exchange, 'sigmoid')
  # Neither move is invisible here: the tables see both, as the model does.
  shifted = rd.identifiable_tables(theta + 0.5, -0.2, exchange + 1, 'sigmoid')
  np.testing.assert_allclose(
    tables['permeability'], shifted['permeability'], atol=1e-6
  )
  assert abs(tables['background'] - shifted['background']) > 0.1
  np.testing.assert_allclose(shifted['exchange'] - tables['exchange'], 1)
  box = RNG.uniform(size=Z.shape).astype(np.float32)
  gates = [
    rd.edge_conductance(S, box, GRAPH, theta=t, bias=b).gate
    for t, b in ((theta, 0.3), (theta + 0.5, -0.2))
  ]
  assert np.abs(gates[0] - gates[1]).max() > 1e-3
  # From the tables alone one gets the gate of any pair of patches.
  logit = lambda p: np.log(p / (1 - p))
  bias = logit(tables['background'])
  square = logit(tables['permeability']) - bias
  want = rd.edge_conductance(S, box, GRAPH, theta=square, bias=bias).gate
  np.testing.assert_allclose(gates[0], want, atol=1e-5)
  with pytest.raises(ValueError, match="'relu' is unknown"):
    rd.identifiable_tables(theta, 0.3, exchange, 'relu')


# Dropout.


def test_dropout_knows_keys_and_positions_only():
  keys = jax.random.split(jax.random.key(0), 3)
  drop = jax.jit(rd.patch_dropout, static_argnums=1)
  y = drop(jnp.ones((3, 8, 64)), 0.25, keys)
  assert set(np.unique(y)) == {0, np.float32(1 / 0.75)}
  assert np.mean(y == 0) == pytest.approx(0.25, abs=0.03)
  longer = drop(jnp.ones((1, 11, 64)), 0.25, keys[2:])
  np.testing.assert_array_equal(longer[0, :8], y[2])

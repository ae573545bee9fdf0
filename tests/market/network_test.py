"""Wardrop equilibria of networks: Braess by hand, convex solvers elsewhere."""

import numpy as np
import pytest

from experiments import provider_networks
from tmlib import market

# A ring of five nodes with chords; links in both directions.
RING = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (0, 2), (1, 3), (2, 4)]
EDGES = RING + [(b, a) for a, b in RING]
OD = [(0, 3, 2.0), (1, 4, 1.5), (3, 1, 1.0), (4, 2, 0.7)]


def beckmann(edges, od, free, b, power):
  """Least Beckmann objective and its flows, one commodity per origin."""
  cp = pytest.importorskip('cvxpy')
  nodes = sorted({n for e in edges for n in e}, key=str)
  row = {n: i for i, n in enumerate(nodes)}
  incidence = np.zeros((len(nodes), len(edges)))
  for e, (tail, head) in enumerate(edges):
    incidence[row[tail], e], incidence[row[head], e] = -1, 1
  flows, constraints = [], []
  for origin in dict.fromkeys(o for o, *_ in od):
    supply = np.zeros(len(nodes))
    for o, d, demand in od:
      if o == origin:
        supply[row[o]] -= demand
        supply[row[d]] += demand
    flow = cp.Variable(len(edges), nonneg=True)
    constraints.append(incidence @ flow == supply)
    flows.append(flow)
  total = sum(flows)
  cost = free @ total + (free * b / (power + 1)) @ cp.power(total, power + 1)
  problem = cp.Problem(cp.Minimize(cost), constraints)
  problem.solve(solver='CLARABEL')
  return problem.value, total.value


def objective(flow, free, b, power):
  return free @ flow + (free * b / (power + 1)) @ flow ** (power + 1)


def test_braess_by_hand():
  without, bridged = (
    provider_networks.braess(x).solve() for x in (False, True)
  )
  np.testing.assert_allclose(without.cost, 65)
  np.testing.assert_allclose(without.flow, [2000] * 4)
  np.testing.assert_allclose(bridged.cost, 80)
  np.testing.assert_allclose(bridged.flow, [4000, 0, 0, 4000, 4000], atol=1e-6)
  assert without.converged
  assert bridged.converged


@pytest.mark.parametrize('power', [1.0, 4.0])
def test_ring_against_a_convex_solver(power):
  free = np.random.default_rng(0).uniform(0.5, 2, len(EDGES))
  curve = market.LinkCurve(free, b=0.15, power=power)
  found = market.wardrop_network(EDGES, OD, curve, tol=1e-10)
  value, flow = beckmann(EDGES, OD, free, 0.15, power)
  assert found.converged
  assert found.relative_gap <= 1e-10
  assert objective(found.flow, free, 0.15, power) <= value * (1 + 1e-7)
  np.testing.assert_allclose(found.flow, flow, atol=1e-3)
  # The flow is the sum of its paths, and they carry the demands.
  again = np.zeros(len(EDGES))
  for (_, _, demand), paths in zip(OD, found.paths, strict=True):
    np.testing.assert_allclose(sum(h for _, h in paths), demand)
    for links, h in paths:
      again[list(links)] += h
  np.testing.assert_allclose(again, found.flow, atol=1e-12)


def test_parallel_links_are_the_market():
  # Two providers as two links of one trip: t = gamma x / s - a + 1.
  game = market.ProviderGame(budgets=(10.0, 6.0), tau=0)
  alpha = np.array([0.5, 0.6])
  users = market.user_equilibrium(game, alpha)
  a, s = 1 - (1 + alpha * game.budgets) ** -0.3, (1 - alpha) * game.budgets
  edges = [('o', 'd'), ('o', 'm'), ('m', 'd')]
  curve = market.LinkCurve(
    np.array([1 - a[0], 1 - a[1], 0]), b=0.0, slope=np.append(1 / s, 0)
  )
  found = market.wardrop_network(edges, [('o', 'd', 1.0)], curve)
  np.testing.assert_allclose(found.flow[:2], users.x, atol=1e-9)
  np.testing.assert_allclose(1 - found.cost[0], users.U, atol=1e-9)


@pytest.mark.slow
@pytest.mark.skipif(
  not provider_networks.has_sioux_falls(),
  reason='Sioux Falls: pip install --no-deps open_spiel==2.0.2',
)
def test_sioux_falls_against_a_convex_solver():
  network = provider_networks.sioux_falls()
  assert len(network.edges) == 76
  assert len(network.od) == 528
  found = network.solve(1e-8)
  assert found.relative_gap <= 1e-6
  free, b = network.latency.parts[:2]
  value, flow = beckmann(network.edges, network.od, free, b, 4.0)
  assert abs(objective(found.flow, free, b, 4.0) / value - 1) < 1e-6
  np.testing.assert_allclose(found.flow, flow, atol=1e-2)


@pytest.mark.parametrize(
  ('edges', 'od', 'match'),
  [
    ([], [(0, 1, 1.0)], 'edges is empty'),
    ([(0, 1)], [], 'od is empty'),
    ([(0, 1), (0, 1)], [(0, 1, 1.0)], 'two links'),
    ([(0, 1)], [(0, 2, 1.0)], r'od\[0\] names node 2'),
    ([(0, 1)], [(1, 1, 1.0)], 'to itself'),
    ([(0, 1)], [(0, 1, -1.0)], 'demand -1'),
    ([(0, 1)], [(1, 0, 1.0)], 'no path from 1 to 0'),
  ],
)
def test_bad_networks_are_named(edges, od, match):
  with pytest.raises(ValueError, match=match):
    market.wardrop_network(
      edges, od, market.LinkCurve(1.0 + np.zeros(len(edges)))
    )


def test_bad_times_are_named():
  with pytest.raises(ValueError, match='link 0 is -1'):
    market.wardrop_network(
      [(0, 1)], [(0, 1, 1.0)], market.LinkCurve(np.array([-1.0]))
    )

r"""Wardrop equilibrium of a road (or service) network.

Each trip takes a path of least time, times rising with flow: the minimum of

  sum_e int_0^{f_e} t_e(z) dz

over the path flows h >= 0 that carry each demand (Beckmann). Paths are made as
they are needed: shortest paths at the current times join the list, then sweeps
of path equilibration move, demand by demand, flow from each dearer path to the
cheapest one, by a Newton step on the links where the two differ.

The certificate needs no trust in that: with D_od the shortest times,

  relative gap = (sum_e f_e t_e - sum_od d_od D_od) / sum_e f_e t_e

Axes: E links, V nodes, N demands (origin, destination), P paths per demand.

References:
  Beckmann, McGuire, Winsten. Studies in the economics of transportation, 1956.
  Dafermos, Sparrow. The traffic assignment problem for a general network, 1969.
  LeBlanc, Morlok, Pierskalla. An efficient approach to solving the road network
  equilibrium traffic assignment problem, 1975 (Sioux Falls).
"""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy import sparse
from scipy.sparse import csgraph

__all__ = ['LinkCurve', 'NetworkEq', 'wardrop_network']

_SWEEPS = 20


@jax.tree_util.register_pytree_node_class
class LinkCurve:
  """Link times t = free (1 + b (f / capacity)^power), a pytree.

  Attributes:
    free: [E] or [], time of an empty link, >= 0.
    b: [E] or [], >= 0.
    capacity: [E] or [], > 0.
    power: [E] or [], >= 1.
    slope: [E] or [], added as slope * f: linear links that are free when empty.
  """

  def __init__(
    self, free: Any, b: Any = 0.15, capacity: Any = 1.0, power: Any = 4.0,
    slope: Any = 0.0,
  ):  # fmt: skip
    self.parts = (free, b, capacity, power, slope)

  def __call__(self, flow: jax.Array) -> jax.Array:
    """Times [E] at flows [E]."""
    free, b, capacity, power, slope = self.parts
    return free * (1 + b * (flow / capacity) ** power) + slope * flow

  def tree_flatten(self):
    """For jax."""
    return self.parts, None

  @classmethod
  def tree_unflatten(cls, _, parts):
    """For jax."""
    return cls(*parts)


class NetworkEq(NamedTuple):
  """An equilibrium of a network.

  Attributes:
    flow: [E].
    time: [E].
    cost: [N], time of the shortest path of each demand.
    paths: N lists of (links, flow), those that are used.
    relative_gap: [], see the module.
    gaps: [rounds], the relative gap before each round.
    converged: whether it is within tol.
  """

  flow: np.ndarray
  time: np.ndarray
  cost: np.ndarray
  paths: list[list[tuple[tuple[int, ...], float]]]
  relative_gap: float
  gaps: np.ndarray
  converged: bool


@functools.partial(jax.jit, static_argnums=4)
def _equilibrate(curve, uses, mask, h, sweeps):
  """Sweeps of path equilibration; h [N, P] -> h, from uses [N, P, E]."""

  def timed(flow):
    return jax.jvp(curve, (flow,), (jnp.ones_like(flow),))

  def one(flow, demand):
    uses, mask, h = demand
    time, slope = timed(flow)
    cost = jnp.where(mask, uses @ time, jnp.inf)
    best = cost.argmin()
    differs = jnp.abs(uses - uses[best][None])
    rate = differs @ slope
    dear = jnp.where(mask, cost - cost[best], 0)
    # On links of constant time everything moves.
    step = jnp.where(rate > 0, dear / jnp.where(rate > 0, rate, 1), jnp.inf)
    step = jnp.where(dear > 0, jnp.minimum(h, step), 0)
    new = (h - step).at[best].add(step.sum())
    return jnp.maximum(flow + (new - h) @ uses, 0), new

  def sweep(_, h):
    # Flows anew, so that rounding does not add up.
    flow = jnp.einsum('np,npe->e', h, uses)
    return jax.lax.scan(one, flow, (uses, mask, h))[1]

  h = jax.lax.fori_loop(0, sweeps, sweep, h)
  return h, jnp.einsum('np,npe->e', h, uses)


class _Graph(NamedTuple):
  """Link ends as indices, and demands grouped by origin."""

  tail: np.ndarray
  head: np.ndarray
  nodes: int
  origin: np.ndarray
  target: np.ndarray
  demand: np.ndarray
  names: list


def _read(edges, od) -> _Graph:
  """Checks and indexes edges and demands."""
  if len(edges) == 0:
    raise ValueError('edges is empty; give (tail, head) pairs')
  if len(od) == 0:
    raise ValueError('od is empty; give (origin, destination, demand) triples')
  names = list(dict.fromkeys(node for edge in edges for node in edge[:2]))
  index = {name: i for i, name in enumerate(names)}
  tail, head = ([index[e[k]] for e in edges] for k in (0, 1))
  if len(set(zip(tail, head, strict=True))) < len(edges):
    raise ValueError(
      'edges has two links between the same nodes; put a node into one of them'
    )
  for n, (origin, target, demand) in enumerate(od):
    for node in (origin, target):
      if node not in index:
        raise ValueError(f'od[{n}] names node {node!r}, which no edge touches')
    if origin == target:
      raise ValueError(f'od[{n}] goes from {origin!r} to itself; drop it')
    if not (np.isfinite(demand) and demand > 0):
      raise ValueError(f'od[{n}] has demand {demand}; it must be positive')
  get = lambda k: np.array([index[x[k]] for x in od])
  demand = np.array([x[2] for x in od], float)
  return _Graph(
    np.array(tail), np.array(head), len(names), get(0), get(1), demand, names
  )


def _shortest(graph: _Graph, time: np.ndarray):
  """Shortest times [N] and the links of a shortest path of each demand."""
  # csgraph drops explicit zeros: a link that costs nothing costs next to it.
  weight = np.maximum(time, 1e-14 * max(1.0, time.max()))
  matrix = sparse.csr_matrix(
    (weight, (graph.tail, graph.head)), (graph.nodes, graph.nodes)
  )
  origins, row = np.unique(graph.origin, return_inverse=True)
  distance, before = csgraph.dijkstra(
    matrix, indices=origins, return_predecessors=True
  )
  link = {
    ends: e for e, ends in enumerate(zip(graph.tail, graph.head, strict=True))
  }
  paths = []
  for n, target in enumerate(graph.target):
    if not np.isfinite(distance[row[n], target]):
      raise ValueError(
        f'od[{n}]: no path from {graph.names[graph.origin[n]]!r} to '
        f'{graph.names[target]!r}'
      )
    path, node = [], target
    while node != graph.origin[n]:
      previous = before[row[n], node]
      path.append(link[previous, node])
      node = previous
    paths.append(tuple(path[::-1]))
  cost = np.array([time[list(path)].sum() for path in paths])
  return cost, paths


def _pack(paths, flows, edges: int):
  """Lists of paths as arrays uses [N, P, E], mask [N, P], h [N, P]."""
  # A multiple of four, so that few shapes are compiled.
  width = -(-max(map(len, paths)) // 4) * 4
  uses = np.zeros((len(paths), width, edges))
  mask = np.zeros((len(paths), width), bool)
  h = np.zeros((len(paths), width))
  for n, (mine, flow) in enumerate(zip(paths, flows, strict=True)):
    mask[n, : len(mine)] = True
    h[n, : len(mine)] = flow
    for p, path in enumerate(mine):
      uses[n, p, list(path)] = 1
  return uses, mask, h


def wardrop_network(
  edges: Sequence[tuple[Hashable, Hashable]],
  od: Sequence[tuple[Hashable, Hashable, float]],
  latency: Callable[[jax.Array], jax.Array],
  tol: float = 1e-8,
  max_rounds: int = 200,
) -> NetworkEq:
  """User equilibrium of a network, in float64.

  Args:
    edges: E pairs (tail, head); one way each, no two alike.
    od: N triples (origin, destination, demand > 0).
    latency: flows [E] -> times [E], each rising with its own flow only; such as
      `LinkCurve`.
    tol: relative gap at which to stop.
    max_rounds: rounds of new paths, each with up to 20 sweeps.

  Returns:
    Flows, times, paths and the certified relative gap.

  Raises:
    ValueError: edges or demands that do not fit, a demand without a path, or
      times that are negative or not finite.
  """
  graph = _read(edges, od)
  count = len(edges)
  curve = latency
  if not isinstance(latency, LinkCurve):
    curve = jax.tree_util.Partial(latency)
  flow = np.zeros(count)
  paths: list[list[tuple[int, ...]]] = [[] for _ in od]
  flows: list[list[float]] = [[] for _ in od]
  gaps, gap = [], np.inf
  with jax.enable_x64(True):
    times = jax.jit(curve)
    for round_ in range(max_rounds + 1):
      time = np.asarray(times(jnp.asarray(flow)))
      _check_times(time, count)
      cost, found = _shortest(graph, time)
      if round_:
        total = flow @ time
        gap = float((total - graph.demand @ cost) / total) if total > 0 else 0.0
        gaps.append(gap)
        if gap <= tol or round_ == max_rounds:
          break
      for n, path in enumerate(found):
        if path not in paths[n]:
          paths[n].append(path)
          flows[n].append(0.0 if round_ else float(graph.demand[n]))
      uses, mask, h = _pack(paths, flows, count)
      h, flow = _equilibrate(curve, uses, mask, h, _SWEEPS)
      h, flow = np.asarray(h), np.asarray(flow)
      for n, mine in enumerate(paths):
        keep = [p for p in range(len(mine)) if h[n, p] > 0]
        paths[n] = [mine[p] for p in keep]
        flows[n] = [float(h[n, p]) for p in keep]
  used = [
    list(zip(p, f, strict=True)) for p, f in zip(paths, flows, strict=True)
  ]
  return NetworkEq(flow, time, cost, used, gap, np.array(gaps), gap <= tol)


def _check_times(time: np.ndarray, count: int) -> None:
  if time.shape != (count,):
    raise ValueError(
      f'latency returns shape {time.shape}; expected ({count},), one per link'
    )
  bad = ~(np.isfinite(time) & (time >= 0))
  if bad.any():
    e = int(bad.argmax())
    raise ValueError(
      f'latency of link {e} is {time[e]}; times are >= 0, finite'
    )

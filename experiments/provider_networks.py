"""Networks with demand for the Wardrop solver."""

import ast
import importlib.util
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tmlib import market
from tmlib.market.network import LinkCurve

__all__ = ['NETWORKS', 'Network', 'braess', 'has_sioux_falls', 'sioux_falls']


class Network(NamedTuple):
  """What `market.wardrop_network` takes.

  Attributes:
    edges: E pairs.
    od: triples.
    latency: flows -> times.
  """

  edges: list
  od: list
  latency: LinkCurve

  def solve(self, tol: float = 1e-8) -> market.NetworkEq:
    """The equilibrium."""
    return market.wardrop_network(self.edges, self.od, self.latency, tol)


def braess(bridge: bool = True) -> Network:
  """Four nodes, 4000 drivers; the bridge makes everybody slower, 65 -> 80."""
  edges = [('s', 'a'), ('a', 't'), ('s', 'b'), ('b', 't'), ('a', 'b')]
  free = np.array([0.0, 45.0, 45.0, 0.0, 0.0])
  slope = np.array([0.01, 0.0, 0.0, 0.01, 0.0])
  keep = 5 if bridge else 4
  curve = LinkCurve(free[:keep], b=0.0, slope=slope[:keep])
  return Network(edges[:keep], [('s', 't', 4000.0)], curve)


def _folder() -> Path | None:
  spec = importlib.util.find_spec('open_spiel')
  if spec is None or not spec.submodule_search_locations:
    return None
  return Path(spec.submodule_search_locations[0])


def has_sioux_falls() -> bool:
  """Whether the `open_spiel` wheel is there."""
  return _folder() is not None


def _value(node: ast.expr) -> Any:
  """A literal, in which numbers may be multiplied."""
  if isinstance(node, ast.Dict):
    keys = [_value(k) for k in node.keys if k is not None]
    return dict(zip(keys, map(_value, node.values), strict=True))
  if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
    return _value(node.left) * _value(node.right)
  return ast.literal_eval(node)


def sioux_falls() -> Network:
  """24 nodes, 76 links, 528 demands, from the `open_spiel` wheel (data only).

  Returns:
    The network, with times free (1 + a f^4).

  Raises:
    FileNotFoundError: the wheel is not installed.
  """
  folder = _folder()
  if folder is None:
    raise FileNotFoundError(
      'the Sioux Falls data lie in the open_spiel wheel, of which no code is '
      'used: pip install --no-deps open_spiel==2.0.2, or pass '
      '--config.networks="(\'braess\',)"'
    )
  text = (folder / 'python/games/dynamic_routing_data.py').read_text()
  found = {}
  for node in ast.parse(text).body:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
      name = node.targets[0].id
      if name.startswith('__SIOUX_FALLS') and 'NODES' not in name:
        found[name.removeprefix('__SIOUX_FALLS_')] = _value(node.value)
  times, factors = found['FREE_FLOW_TRAVEL_TIME'], found['BPR_A_COEFF']
  free = np.array([float(t) for t in times.values()])
  a = np.array([factors[key] for key in times])
  # Flows near 1e4: measured in such units, a f^4 is no product of extremes.
  unit = 1e4
  curve = LinkCurve(free, b=a * unit**4)
  od = [(o, d, count * 1e2 / unit) for o, d, count in found['DEMAND_AUX']]
  return Network([tuple(key.split('->')) for key in times], od, curve)


NETWORKS = {'braess': braess, 'sioux_falls': sioux_falls}

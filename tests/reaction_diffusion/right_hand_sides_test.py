"""Published right-hand sides against dense NumPy, and their step bounds."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as Spec

from kernels_pallas.graph import shard_graph
from tests.reaction_diffusion import support
from tmlib import reaction_diffusion as rd
from tmlib.ops.graph import ell_from_grid

N, K, D = 16, 4, 3
RNG = np.random.default_rng(0)
GRAPH = support.random_graph(RNG, N, K, 50)
LINKED = GRAPH.emask.any(1)
_RAW = np.where(GRAPH.emask, RNG.uniform(0.1, 1, size=(N, K)), 0)
A = _RAW / np.maximum(_RAW.sum(1, keepdims=True), 1e-9)
DENSE = support.dense(GRAPH, A)
H = RNG.normal(size=(N, D))
ALPHA, BETA = RNG.uniform(size=(2, D))
H0 = RNG.normal(size=(N, D))


def laplace(w, h):
  return w @ h - w.sum(1, keepdims=True) * h


def run64(f, *args):
  with jax.enable_x64(True):
    return jax.tree.map(np.asarray, f(*map(jnp.asarray, args)))


@functools.partial(jax.jit, static_argnums=0)
def march(name, h, tau, alpha, beta):
  """Two hundred Euler steps of one reaction of GREAD."""
  rhs = lambda h: rd.gread(h, A, GRAPH, reaction=name, alpha=alpha, beta=beta)
  return jax.lax.fori_loop(0, 200, lambda _, h: rd.euler(rhs, h, tau), h)


def test_attention_rows_are_stochastic():
  q, k = RNG.normal(size=(2, N, 4))
  found = run64(lambda q, k: rd.attention_weights(q, k, GRAPH, 2), q, k)
  edges = support.dense(GRAPH)
  want = 0
  for half in (slice(0, 2), slice(2, 4)):
    scores = np.exp(q[:, half] @ k[:, half].T / np.sqrt(2)) * edges
    want += scores / np.maximum(scores.sum(1, keepdims=True), 1e-30) / 2
  np.testing.assert_allclose(support.dense(GRAPH, found), want, atol=1e-12)
  np.testing.assert_allclose(found.sum(1), LINKED, atol=1e-12)
  with pytest.raises(ValueError, match='heads=3'):
    rd.attention_weights(q, k, GRAPH, 3)


def test_grand():
  source = RNG.normal(size=(N, D))
  found = run64(
    lambda h, s: rd.grand(h, A, GRAPH, alpha=ALPHA, beta=BETA, source=s),
    H,
    source,
  )
  want = ALPHA * laplace(DENSE, H) + BETA * source
  np.testing.assert_allclose(found, want, atol=1e-12)
  plain = run64(lambda h: rd.grand(h, A, GRAPH, alpha=2.0), H)
  assert rd.grand_tau(2.0) == 0.5
  stepped = H + 0.5 * plain
  assert np.abs(stepped).max() <= np.abs(H).max() + 1e-12
  # With alpha tau = 1 each linked patch takes the mean of its neighbours.
  np.testing.assert_allclose(stepped[LINKED], (DENSE @ H)[LINKED], atol=1e-12)


def test_gread_equals_its_formulas():
  r = {
    'fisher': -(H - 1) * H,
    'allen_cahn': -(H**2 - 1) * H,
    'zeldovich': -(H**2 - H) * H,
    'bspm': -DENSE @ laplace(DENSE, H),
    'source': H0,
  }
  for name, want in r.items():
    found = run64(
      lambda h, s, name=name: rd.gread(
        h, A, GRAPH, reaction=name, alpha=ALPHA, beta=BETA, source=s
      ),
      H,
      H0,
    )
    want = ALPHA * laplace(DENSE, H) + BETA * want
    np.testing.assert_allclose(found, want, atol=1e-12, err_msg=name)
  with pytest.raises(ValueError, match="'x' is unknown; allowed: fisher"):
    rd.gread(H, A, GRAPH, reaction='x')
  with pytest.raises(ValueError, match='source=H0'):
    rd.gread(H, A, GRAPH, reaction='source')


@pytest.mark.parametrize(
  ('name', 'low'), [('fisher', 0), ('allen_cahn', -1), ('zeldovich', 0)]
)
def test_gread_stays_in_its_box_under_the_bound(name, low):
  alpha, beta = 0.8, 0.9
  tau = rd.gread_tau(name, alpha, beta)
  start = RNG.uniform(low, 1, size=(N, D))
  h = run64(lambda h: march(name, h, tau, alpha, beta), start)
  assert h.min() >= low - 1e-12
  assert h.max() <= 1 + 1e-12
  if name == 'allen_cahn':
    # From standard normal features, outside the box, the polynomial explodes.
    wild = run64(lambda h: march(name, h, tau, alpha, beta), 5 * H)
    assert not np.isfinite(wild).all()


def test_bounds_of_gains_per_channel_are_those_of_the_worst():
  alpha, beta = np.array([1.0, 0.5, 0.8]), np.array([0.1, 0.4, 0.8])
  for name in ('fisher', 'allen_cahn', 'bspm', 'source'):
    each = [rd.gread_tau(name, a, b) for a, b in zip(alpha, beta, strict=True)]
    found = rd.gread_tau(name, alpha, beta)
    assert found == pytest.approx(min(each))
  with pytest.raises(ValueError, match='beta <= alpha'):
    rd.gread_tau('bspm', alpha, np.array([0.1, 0.6, 0.8]))
  # One gain of each kind, and under jit, where values are not known.
  found = jax.jit(lambda a: rd.gread_tau('bspm', a, 0.5))(alpha)
  assert found == pytest.approx(1 / 1.5)
  pairs = [
    rd.acmp_bound(A, GRAPH, threshold=0.4, alpha=a, delta=b)
    for a, b in zip(alpha, beta, strict=True)
  ]
  tau, radius = rd.acmp_bound(A, GRAPH, threshold=0.4, alpha=alpha, delta=beta)
  assert tau == pytest.approx(min(pair[0] for pair in pairs))
  np.testing.assert_allclose(radius, [pair[1] for pair in pairs], rtol=1e-6)
  with pytest.raises(ValueError, match='delta > 0'):
    rd.acmp_bound(A, GRAPH, threshold=0.4, delta=np.array([1.0, 0.0]))


def test_bounds_of_a_split_graph_are_those_of_the_whole():
  rng = np.random.default_rng(4)
  ij = np.stack(np.divmod(np.arange(32), 4), -1).astype(np.int32)
  whole = ell_from_grid(ij, connectivity=4)
  split = shard_graph(whole, 4, 'patch')
  # The last rows of the grid are the stiffest.
  scale = np.linspace(0.1, 1, 32)[:, None]
  c = np.where(whole.emask, scale * rng.uniform(size=whole.nbr.shape), 0) / 4
  v = c * np.where(np.arange(4) % 2, 1.0, -1.0)

  def bounds(c, v, graph):
    half = jnp.full(2, 0.5)
    full = rd.Coefficients(c, c, half, half, velocity=v, lam=0.1)
    tau, radius = rd.acmp_bound(c, graph, threshold=0.1)
    return jnp.stack([
      rd.sharp_tau(full, graph), rd.adr_tau(c, v, graph), tau, radius
    ])  # fmt: skip

  mesh = jax.make_mesh((4,), ('patch',), axis_types=(AxisType.Auto,))
  rows = Spec('patch')
  each = jax.jit(
    jax.shard_map(
      lambda *args: bounds(*args)[None],
      mesh=mesh, in_specs=(rows, rows, rows), out_specs=rows, check_vma=False,
    )
  )(c, v, split)  # fmt: skip
  want = jax.jit(bounds)(c, v, whole)
  np.testing.assert_allclose(each, np.tile(want, (4, 1)), rtol=1e-6)


def test_bspm_needs_beta_below_alpha():
  assert rd.gread_tau('bspm', 1.0, 0.5) == pytest.approx(2 / 3)
  assert rd.gread_tau('source', 2.0, 9.0) == 0.5
  with pytest.raises(ValueError, match='beta <= alpha'):
    rd.gread_tau('bspm', 0.5, 1.0)
  with pytest.raises(ValueError, match="'x' is unknown"):
    rd.gread_tau('x')
  # A symmetric row-stochastic matrix: two swapped patches, mu = -1 and 1.
  swap = np.array([[0.0, 1.0], [1.0, 0.0]])
  f = lambda a, b: a * (swap - np.eye(2)) - b * swap @ (swap - np.eye(2))
  mu = np.linalg.eigvalsh(np.eye(2) + 2 / 3 * f(1.0, 0.5))
  assert np.abs(mu).max() <= 1 + 1e-12
  mu = np.linalg.eigvalsh(np.eye(2) + 0.8 * f(1.0, 0.5))
  assert np.abs(mu).max() > 1


def test_acmp_cannot_leave_its_box():
  threshold, alpha, delta = 0.4, 0.7, 0.5
  f = lambda h: rd.acmp(
    h, A, GRAPH, threshold=threshold, alpha=alpha, delta=delta
  )
  want = alpha * laplace((DENSE - threshold) * (DENSE > 0), H)
  want += delta * H * (1 - H**2)
  np.testing.assert_allclose(run64(f, H), want, atol=1e-12)
  bound = lambda a, **kw: rd.acmp_bound(a, GRAPH, alpha=alpha, **kw)
  tau, radius = run64(lambda a: bound(a, threshold=threshold, delta=delta), A)
  gap = np.where(GRAPH.emask, A - threshold, 0)
  repulsion = np.maximum(-gap, 0).sum(1).max()
  assert radius == pytest.approx(np.sqrt(1 + 2 * alpha * repulsion / delta))
  assert radius > 1.2

  @jax.jit
  def walk(h):
    return jax.lax.fori_loop(0, 300, lambda _, h: rd.euler(f, h, tau), h)

  corner = radius * np.sign(H)
  for start in (corner, radius * RNG.uniform(-1, 1, size=H.shape)):
    end = run64(walk, start)
    assert np.abs(end).max() <= radius + 1e-6
  # It really repels: the state ends beyond the unit box.
  assert np.abs(end).max() > 1
  with pytest.raises(ValueError, match='delta > 0'):
    bound(jnp.asarray(A), threshold=0.4, delta=0.0)


def test_adr():
  c = support.edge_weights(GRAPH, support.symmetric(RNG, N))
  v = support.symmetric(RNG, N)
  v = support.edge_weights(GRAPH, np.triu(v) - np.tril(v))
  f = lambda h: rd.adr(h, c, v, GRAPH, rate=0.3, target=0.5)
  flow = support.dense(GRAPH, v)
  want = laplace(support.dense(GRAPH, c), H) + 0.3 * (0.5 - H)
  want += np.maximum(-flow, 0) @ H
  want -= np.maximum(flow, 0).sum(1, keepdims=True) * H
  np.testing.assert_allclose(run64(f, H), want, atol=1e-12)
  conserved = run64(lambda h: rd.adr(h, c, v, GRAPH), H)
  np.testing.assert_allclose(conserved.sum(0), 0, atol=1e-12)
  tau = float(rd.adr_tau(c, v, GRAPH, rate=0.3))
  worst = (c + np.maximum(v, 0)).sum(1).max() + 0.3
  assert tau == pytest.approx(1 / worst, rel=1e-5)
  positive = np.abs(H)
  assert (positive + 0.999 * tau * run64(f, positive)).min() >= 0
  # At 1.5 tau a lone positive patch at the worst place goes negative.
  lone = np.zeros((N, 1))
  lone[(c + np.maximum(v, 0)).sum(1).argmax()] = 1
  g = lambda h: rd.adr(h, c, v, GRAPH, rate=0.3)
  assert (lone + 1.5 * tau * run64(g, lone)).min() < 0

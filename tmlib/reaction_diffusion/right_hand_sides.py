r"""Right-hand sides of published graph reaction-diffusion models.

Each is a free function du/dt = f(u) over arrays, with the largest step tau of
forward Euler for which its bound is proved. Write A for row-stochastic
weights: a_ij >= 0 and sum_j a_ij = 1 (a patch without edges does not move).

Axes: ... leading axes, N patches, K slots, D channels.
"""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph import PatchGraph, ell_sddmm, ell_spmm
from tmlib.ops.softmax import masked_softmax
from tmlib.reaction_diffusion.transport import (
  advection,
  align,
  laplacian,
  largest,
)

__all__ = [
  'GREAD_REACTIONS',
  'acmp',
  'acmp_bound',
  'adr',
  'adr_tau',
  'attention_weights',
  'grand',
  'grand_tau',
  'gread',
  'gread_tau',
]

GREAD_REACTIONS = ('fisher', 'allen_cahn', 'zeldovich', 'bspm', 'source')


def attention_weights(
  queries: jax.Array, keys: jax.Array, graph: PatchGraph, heads: int = 1
) -> jax.Array:
  r"""Row-stochastic attention along edges, averaged over heads.

  a_ij = mean_h softmax_j(<q_ih, k_jh> / sqrt(D / heads)).

  Args:
    queries: [..., N, D].
    keys: [..., N, D].
    graph: the patch graph.
    heads: divides D.

  Returns:
    [..., N, K], rows sum to one, or to zero for a patch without edges.

  Raises:
    ValueError: heads that do not divide D.

  References:
    Chamberlain, Rowbottom, Gorinova, Webb, Rossi, Bronstein. GRAND: graph
    neural diffusion, 2021.
  """
  dim = queries.shape[-1]
  if heads < 1 or dim % heads:
    raise ValueError(f'heads={heads} must be >= 1 and divide D={dim}')
  total = jnp.zeros(graph.nbr.shape, queries.dtype)
  for q, k in zip(
    jnp.split(queries, heads, -1), jnp.split(keys, heads, -1), strict=True
  ):
    scores = ell_sddmm(graph, q, k) / jnp.sqrt(float(dim // heads))
    total += masked_softmax(scores, graph.emask)
  return total / heads


def grand(
  h: jax.Array,
  weights: jax.Array,
  graph: PatchGraph,
  *,
  alpha: jax.Array | float = 1.0,
  beta: jax.Array | float = 0.0,
  source: jax.Array | None = None,
) -> jax.Array:
  r"""GRAND: dH/dt = alpha (A H - H) + beta H0.

  Args:
    h: [..., N, D], H.
    weights: [..., N, K], A, rows sum to one.
    graph: the patch graph.
    alpha: [] or [D], >= 0.
    beta: [] or [D].
    source: [..., N, D], H0, or None for no source.

  Returns:
    [..., N, D].

  References:
    Chamberlain et al. GRAND: graph neural diffusion, 2021.
  """
  f = align(jnp.asarray(alpha), h.ndim) * laplacian(weights, h, graph)
  if source is None:
    return f
  return f + align(jnp.asarray(beta), h.ndim) * source


def grand_tau(alpha: jax.Array | float = 1.0) -> jax.Array:
  """Largest step of `grand`: 1 / max(alpha).

  H'_i = (1 - tau alpha) H_i + tau alpha sum_j a_ij H_j is a convex combination,
  so |H'| <= |H| in the sup norm (plus tau beta |H0| with a source: growth is
  linear at worst).
  """
  return 1 / jnp.max(jnp.asarray(alpha))


def gread(
  h: jax.Array,
  weights: jax.Array,
  graph: PatchGraph,
  *,
  reaction: str = 'fisher',
  alpha: jax.Array | float = 1.0,
  beta: jax.Array | float = 1.0,
  source: jax.Array | None = None,
) -> jax.Array:
  r"""GREAD: dH/dt = alpha (A H - H) + beta r(H).

  fisher: H (1 - H); allen_cahn: H (1 - H^2); zeldovich: H^2 (1 - H);
  bspm: -A (A H - H), which sharpens; source: H0. The polynomials are meant for
  H in their box ([0, 1], [-1, 1], [0, 1]) and diverge outside.

  Args:
    h: [..., N, D], H.
    weights: [..., N, K], A.
    graph: the patch graph.
    reaction: one of `GREAD_REACTIONS`.
    alpha: [] or [D], >= 0.
    beta: [] or [D], >= 0.
    source: [..., N, D], H0 of reaction 'source'.

  Returns:
    [..., N, D].

  Raises:
    ValueError: unknown reaction, or 'source' without one.

  References:
    Choi, Hong, Park, Cho. GREAD: graph neural reaction-diffusion networks,
    2023.
  """
  if reaction not in GREAD_REACTIONS:
    raise ValueError(
      f'reaction={reaction!r} is unknown; allowed: {", ".join(GREAD_REACTIONS)}'
    )
  if reaction == 'source' and source is None:
    raise ValueError("reaction='source' needs source=H0, the initial state")
  diffused = laplacian(weights, h, graph)
  r = {
    'fisher': lambda: h * (1 - h),
    'allen_cahn': lambda: h * (1 - h * h),
    'zeldovich': lambda: h * h * (1 - h),
    'bspm': lambda: -ell_spmm(graph, weights, diffused),
    'source': lambda: source,
  }[reaction]()
  alpha, beta = (align(jnp.asarray(x), h.ndim) for x in (alpha, beta))
  return alpha * diffused + beta * r


def gread_tau(
  reaction: str,
  alpha: jax.Array | float = 1.0,
  beta: jax.Array | float = 1.0,
) -> jax.Array:
  r"""Largest step of `gread` with row-stochastic (bspm: symmetric) weights.

  Polynomials: g(u) = (1 - tau alpha) u + tau beta r(u) has g' >= 1 - tau (alpha
  + k beta) with -k = min r' on the box (k = 1, 2, 1 for fisher, allen_cahn,
  zeldovich), so under tau <= 1 / (alpha + k beta) it is monotone, fixes the
  ends up to -tau alpha times the end, and adding tau alpha A H, at most tau
  alpha times the end, keeps H in the box.
  bspm: for a symmetric A with eigenvalues mu in [-1, 1] those of f are (mu - 1)
  (alpha - beta mu): none positive iff beta <= alpha, and at least -2 (alpha +
  beta), so |1 + tau f| <= 1 in l2 under tau <= 1 / (alpha + beta).
  source: as `grand_tau`.

  Args:
    reaction: one of `GREAD_REACTIONS`.
    alpha: [] or [D], >= 0.
    beta: [] or [D], >= 0.

  Returns:
    [], the least tau of all channels.

  Raises:
    ValueError: unknown reaction; bspm with beta > alpha in some channel, where
      some modes grow for every step (seen where the gains are known before
      compilation).
  """
  if reaction not in GREAD_REACTIONS:
    raise ValueError(
      f'reaction={reaction!r} is unknown; allowed: {", ".join(GREAD_REACTIONS)}'
    )
  gains = alpha, beta
  known = not any(isinstance(gain, jax.core.Tracer) for gain in gains)
  if reaction == 'bspm' and known and np.any(np.greater(beta, alpha)):
    raise ValueError(
      f"reaction='bspm' with beta={beta} > alpha={alpha} amplifies modes of "
      'eigenvalue above alpha / beta whatever the step; use beta <= alpha'
    )
  k = {'source': 0.0, 'allen_cahn': 2.0}.get(reaction, 1.0)
  alpha, beta = map(jnp.asarray, gains)
  return 1 / jnp.max(alpha + k * beta)


def acmp(
  h: jax.Array,
  weights: jax.Array,
  graph: PatchGraph,
  *,
  threshold: float = 0.0,
  alpha: jax.Array | float = 1.0,
  delta: jax.Array | float = 1.0,
) -> jax.Array:
  r"""ACMP: attraction, repulsion and an Allen-Cahn term.

  dH_i/dt = alpha sum_j (a_ij - threshold)(H_j - H_i) + delta H_i (1 - H_i^2).

  Neighbours with a_ij below the threshold repel; the Allen-Cahn term holds the
  state together.

  Args:
    h: [..., N, D], H.
    weights: [..., N, K], a >= 0.
    graph: the patch graph.
    threshold: >= 0.
    alpha: [] or [D], >= 0.
    delta: [] or [D], >= 0.

  Returns:
    [..., N, D].

  References:
    Wang, Yi, Liu, Wang, Jin. ACMP: Allen-Cahn message passing for graph neural
    networks with particle phase transition, 2023.
  """
  alpha, delta = (align(jnp.asarray(x), h.ndim) for x in (alpha, delta))
  moved = laplacian(weights - threshold, h, graph)
  return alpha * moved + delta * h * (1 - h * h)


def acmp_bound(
  weights: jax.Array,
  graph: PatchGraph,
  *,
  threshold: float = 0.0,
  alpha: jax.Array | float = 1.0,
  delta: jax.Array | float = 1.0,
) -> tuple[jax.Array, jax.Array]:
  r"""Step and radius of a box that `acmp` cannot leave.

  Let p = max_i sum_j (threshold - a_ij)^+ be the repulsion and m = max_i sum_j
  (a_ij - threshold) at least 0. With R^2 = 1 + 2 alpha p / delta the box [-R,
  R] is invariant under tau <= 1 / (alpha m + delta (3 R^2 - 1)). Proof: u' =
  g(u) + tau alpha sum_j (a_ij - threshold) u_j with g(u) = u (1 - tau alpha
  sum_j (a_ij - threshold) + tau delta (1 - u^2)). The step makes g monotone on
  the box, so |u'| <= g(R) + tau alpha R sum_j |a_ij - threshold| = R + tau R
  (2 alpha sum_j (threshold - a_ij)^+ - delta (R^2 - 1)) <= R.

  Args:
    weights: [..., N, K], a.
    graph: the patch graph.
    threshold: >= 0.
    alpha: [] or [D], >= 0.
    delta: [] or [D], >= 0.

  Returns:
    tau: [], the least of all channels, and of all shards of a split graph.
    radius: [] or [D], R of each channel.

  Raises:
    ValueError: delta = 0 with a positive threshold: nothing then stops
      repelling patches from running away (seen where delta is known before
      compilation).
  """
  known = not isinstance(delta, jax.core.Tracer)
  if threshold > 0 and known and np.any(np.less_equal(delta, 0)):
    raise ValueError(
      f'delta={delta} with threshold={threshold} has no bounded step: '
      'repulsion alone diverges; use delta > 0 or threshold=0'
    )
  gap = jnp.where(graph.emask, weights - threshold, 0)
  repulsion = largest(jnp.sum(jnp.maximum(-gap, 0), -1), graph)
  pull = jnp.maximum(largest(jnp.sum(gap, -1), graph), 0)
  alpha, delta = jnp.asarray(alpha), jnp.asarray(delta)
  square = 1 + 2 * alpha * repulsion / jnp.where(delta > 0, delta, 1)
  rate = alpha * pull + delta * (3 * square - 1)
  return 1 / jnp.max(rate), jnp.sqrt(square)


def adr(
  h: jax.Array,
  conductance: jax.Array,
  velocity: jax.Array,
  graph: PatchGraph,
  *,
  rate: float = 0.0,
  target: jax.Array | float = 0.0,
) -> jax.Array:
  r"""Advection-diffusion-reaction on a graph.

  dH_i/dt = sum_j c_ij (H_j - H_i) + sum_j (v^-_ij H_j - v^+_ij H_i)
            + rate (target - H_i)

  Args:
    h: [..., N, D], H.
    conductance: [..., N, K], c >= 0, symmetric.
    velocity: [..., N, K], v, antisymmetric.
    graph: the patch graph.
    rate: >= 0.
    target: [..., N, D] or [], what the reaction pulls to.

  Returns:
    [..., N, D]. Conserves sum_i H_i for rate = 0.

  References:
    Eliasof, Haber, Treister. ADR-GNN: advection-diffusion-reaction graph neural
    networks, 2023. Our choice: upwind fluxes and a linear reaction.
  """
  moved = laplacian(conductance, h, graph) + advection(velocity, h, graph)
  return moved + rate * (target - h)


def adr_tau(
  conductance: jax.Array,
  velocity: jax.Array,
  graph: PatchGraph,
  *,
  rate: float = 0.0,
) -> jax.Array:
  """Largest step for which `adr` keeps H >= 0 (with a target >= 0).

  The coefficient of H_i in H'_i is 1 - tau (sum_j c_ij + sum_j v^+_ij + rate);
  all others are >= 0. Returns [], 1 / max_i of that sum, over all shards of a
  split graph.
  """
  out = jnp.where(graph.emask, conductance + jnp.maximum(velocity, 0), 0)
  return 1 / (largest(jnp.sum(out, -1), graph) + rate)

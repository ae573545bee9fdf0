r"""The dynamics of TMEvolve: two diffusions, a concept flux, a reaction.

  dH_i/dt = alpha (Delta^a H)_i + eta (Delta^b H)_i + (Delta^b Z)_i E
            + k lam (v(H_i) - H_i)                        [+ upwind transport]
  dZ_i/dt = alpha_z (Delta^a Z)_i + eta_z (Delta^b Z)_i

with (Delta^w U)_i = sum_j w_ij (U_j - U_i), symmetric conductances a, b >= 0
and sum_j (a_ij + b_ij) <= 1, gains alpha, eta in (0, 1), lam in [0, 1), and a
reaction of stiffness k and target v in its box (`reactions.py`).

Write c_ijd = alpha_d a_ij + eta_d b_ij. Four facts hold for an explicit step
U' = U + tau dU/dt; `stable_tau` is the largest tau that they allow.

S1 (concepts stay concepts). Z'_i = (1 - tau sum_j c_ij) Z_i + tau sum_j c_ij
  Z_j. The weights are >= 0 when tau max_i sum_j c_ij <= 1 and they sum to one,
  so Z'_i is a convex combination of rows of Z: a simplex or a box is preserved,
  and no component leaves the range that it had.

S2 (bounded). The coefficient of H_i is 1 - tau (sum_j c_ijd + k lam) >= 0 when
  tau <= 1 / (1 + k lam). Then H'_i is a combination of H_i, its neighbours and
  the target v with weights that are >= 0 and sum to one, plus the flux:
    |H'| <= (1 - tau k lam) |H| + tau k lam B + tau F   in the sup norm,
  B the largest modulus in the box (1 here), F = max_i |(Delta^b Z)_i E| <=
  max_i sum_j b_ij |Z_j - Z_i|_1 max|E|, that is 2 max|E| on the simplex and
  M max|E| for sigmoid concepts. So limsup |H| <= B + F / (k lam) with a
  reaction; without one |H| <= |H0| + t F. With symmetric flux, growth is linear
  at worst.

S3 (conservation). a, b are symmetric, so the terms of edge ij and ji cancel in
  the sum over patches: with lam = 0 sum_i H_i and sum_i Z_i are constant,
  whatever E and tau are. The upwind term conserves too.

S4 (energy). Let L = diag(sum_j c_ij) - c and E(u) = u^T L u / 2. By Gershgorin
  its eigenvalues lie in [0, 2 max_i sum_j c_ij], so under the bound |1 - tau
  mu| <= 1 and E(U') = sum (1 - tau mu)^2 mu |u_mu|^2 / 2 <= E(U), for lam = 0,
  E = 0 and weights that do not change. It is the total that cannot rise; the
  part inside regions alone may.

Axes: ... leading axes, N patches (padded), K slots, D channels, M concepts.

References:
  The facts are elementary and the definition is our choice. Predecessors:
  GRAND (2021), GREAD (2023), ADR-GNN (2023).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct

from kernels_pallas.graph import PatchGraph, ell_diffuse, ell_diffuse2
from tmlib.reaction_diffusion.reactions import REACTIONS, stiffness
from tmlib.reaction_diffusion.transport import (
  advection,
  align,
  laplacian,
  largest,
  row_sum,
  times,
)

__all__ = [
  'Coefficients',
  'Dynamics',
  'Fields',
  'make_dynamics',
  'right_hand_side',
  'sharp_tau',
  'stable_tau',
]


class Fields(NamedTuple):
  """The state that evolves.

  Attributes:
    hidden: [..., N, D], visual field H.
    concepts: [..., N, M], concept field Z, rows on the simplex (or in a box).
  """

  hidden: jax.Array
  concepts: jax.Array


class Coefficients(struct.PyTreeNode):
  """Everything on the right-hand side but the state.

  Attributes:
    intra: [..., N, K], a, or None for no diffusion inside regions.
    boundary: [..., N, K], b, or None for no flux across boundaries.
    alpha: [D], gain of a on H, in (0, 1).
    eta: [D], gain of b on H, in (0, 1).
    alpha_z: [], gain of a on Z, in (0, 1).
    eta_z: [], gain of b on Z, in (0, 1).
    exchange: [M, D], E, what a flux of concepts adds to H, or None.
    velocity: [..., N, K], antisymmetric upwind velocity (b already inside), or
      None. It acts on H only, since it would take Z off the simplex.
    lam: [], reaction rate in [0, 1).
    kernel: [D, D], W of the reaction 'relax', else None.
    bias: [D], b of the reaction 'relax', else None.
    reaction: name, static.
  """

  intra: jax.Array | None
  boundary: jax.Array | None
  alpha: jax.Array
  eta: jax.Array
  alpha_z: jax.Array | float = 0.5
  eta_z: jax.Array | float = 0.5
  exchange: jax.Array | None = None
  velocity: jax.Array | None = None
  lam: jax.Array | float = 0.0
  kernel: jax.Array | None = None
  bias: jax.Array | None = None
  reaction: str = struct.field(pytree_node=False, default='none')

  def scaled(self, factor: jax.Array | float) -> 'Coefficients':
    """Coefficients of `factor` > 0 times the right-hand side."""
    times = lambda x: None if x is None else factor * x
    return self.replace(
      alpha=factor * self.alpha,
      eta=factor * self.eta,
      alpha_z=factor * self.alpha_z,
      eta_z=factor * self.eta_z,
      exchange=times(self.exchange),
      velocity=times(self.velocity),
      lam=factor * self.lam,
    )


class Dynamics(NamedTuple):
  """du/dt = transport(u) + rate (target(u) - u) + force(u), over pytrees.

  The split is what implicit integrators need; explicit ones use the sum.

  Attributes:
    transport: u -> linear transport, with `outflow` on minus its diagonal.
    outflow: like u (broadcastable), sum_j c_ij >= 0.
    rate: like u (broadcastable), >= 0.
    target: u -> like u.
    force: u -> like u, everything else.
    symmetric: whether `transport` is a symmetric matrix.
  """

  transport: Callable[[Any], Any]
  outflow: Any
  rate: Any
  target: Callable[[Any], Any]
  force: Callable[[Any], Any]
  symmetric: bool = True


def make_dynamics(coefficients: Coefficients, graph: PatchGraph) -> Dynamics:
  """The dynamics of TMEvolve for given coefficients.

  Args:
    coefficients: see `Coefficients`.
    graph: the patch graph.

  Returns:
    Dynamics over `Fields`.
  """
  c = coefficients
  # A number: what cannot react has no term, and no derivative in its rate.
  rate: Any = 0.0
  if c.reaction != 'none':
    rate = stiffness(c.reaction) * jnp.asarray(c.lam)

  def outflow_of(alpha, eta) -> jax.Array:
    total = jnp.zeros((), c.alpha.dtype)
    for weights, gain in ((c.intra, alpha), (c.boundary, eta)):
      if weights is not None:
        total = total + row_sum(weights, graph) * align(
          jnp.asarray(gain), weights.ndim
        )
    return total

  def transport(fields):
    h = _diffuse(c, c.alpha, c.eta, fields.hidden, graph)
    if c.velocity is not None:
      h += advection(c.velocity, fields.hidden, graph)
    z = _diffuse(c, c.alpha_z, c.eta_z, fields.concepts, graph)
    return Fields(h, z)

  def force(fields):
    zero = Fields(
      jnp.zeros_like(fields.hidden), jnp.zeros_like(fields.concepts)
    )
    if c.exchange is None or c.boundary is None:
      return zero
    flux = laplacian(c.boundary, fields.concepts, graph)
    return zero._replace(hidden=times(flux, c.exchange))

  still: Any = 0.0
  outflow_h = outflow_of(c.alpha, c.eta)
  if c.velocity is not None:
    outflow_h = outflow_h + row_sum(jnp.maximum(c.velocity, 0), graph)
  return Dynamics(
    transport=transport,
    outflow=Fields(outflow_h, outflow_of(c.alpha_z, c.eta_z)),
    rate=Fields(rate, still),
    target=lambda fields: fields._replace(hidden=_target(c, fields.hidden)),
    force=force,
    symmetric=c.velocity is None,
  )


def right_hand_side(dynamics: Dynamics) -> Callable[[Any], Any]:
  """The map u -> du/dt, the sum of the parts of `dynamics`."""

  def leaf(transport, rate, target, u, force):
    if isinstance(rate, float) and rate == 0:
      return transport + force
    return transport + rate * (target - u) + force

  def rhs(u):
    return jax.tree.map(
      leaf,
      dynamics.transport(u),
      dynamics.rate,
      dynamics.target(u),
      u,
      dynamics.force(u),
    )

  return rhs


def stable_tau(
  lam: jax.Array | float = 0.0,
  *,
  reaction: str = 'relax',
  flux: str = 'symmetric',
) -> jax.Array | float:
  r"""Largest step for which the facts hold for every graph and parameter.

  tau = 1 / (1 + k lam) for S1, S2 and S4. With the upwind flux, whose outflow
  sum_j b_ij v^+_ij <= 1 comes on top of sum_j c_ij <= 1, tau = 1 / (2 + k lam)
  keeps S1, and H from changing sign where it starts with one; directed flux may
  pile H up, so S2 and S4 have no counterpart.

  Args:
    lam: reaction rate in [0, 1).
    reaction: name of the reaction, for its stiffness k.
    flux: 'symmetric' or 'upwind'.

  Returns:
    The bound, like `lam`.
  """
  return 1.0 / ((2.0 if flux == 'upwind' else 1.0) + stiffness(reaction) * lam)


def sharp_tau(coefficients: Coefficients, graph: PatchGraph) -> jax.Array:
  """The bound of S1 and S2 for these very coefficients, >= `stable_tau`.

  Args:
    coefficients: see `Coefficients`.
    graph: the patch graph.

  Returns:
    [], 1 / max(sum_j c_ij + k lam), over all bags and, where a graph is split,
    over all shards; infinite where nothing moves.
  """
  dynamics = make_dynamics(coefficients, graph)
  total = jax.tree.map(
    lambda outflow, rate: largest(jnp.asarray(outflow) + rate, graph),
    dynamics.outflow,
    dynamics.rate,
  )
  return 1 / jnp.maximum(*total)


def _diffuse(c, alpha, eta, values, graph):
  """Both diffusions, alpha Delta^a U + eta Delta^b U; gains [] or [D]."""
  if c.intra is not None and c.boundary is not None:
    return ell_diffuse2(graph, c.intra, c.boundary, alpha, eta, values)
  for weights, gain in ((c.intra, alpha), (c.boundary, eta)):
    if weights is not None:
      return ell_diffuse(graph, weights, gain, values)
  return jnp.zeros_like(values)


def _target(c, hidden):
  if c.reaction == 'none':
    return hidden
  if c.reaction == 'relax':
    return jnp.tanh(times(hidden, c.kernel) + align(c.bias, hidden.ndim))
  reaction = REACTIONS[c.reaction]
  return reaction.target(jnp.clip(hidden, reaction.low, reaction.high))

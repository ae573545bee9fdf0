r"""Pseudo-time evolution: a scan over steps of any integrator.

Axes: ... leading axes, N patches (padded), K slots, D channels, M concepts, T
steps.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from kernels_pallas.graph import PatchGraph
from tmlib.reaction_diffusion import diagnostics
from tmlib.reaction_diffusion.dynamics import (
  Coefficients,
  Fields,
  make_dynamics,
)
from tmlib.reaction_diffusion.integrators import EXPLICIT, integrate
from tmlib.reaction_diffusion.options import check_tau

__all__ = ['Trace', 'evolve']


class Trace(NamedTuple):
  """The evolution as seen from outside; index 0 is the initial state.

  Attributes:
    flux: [T + 1, ..., N], L1 flux across boundaries of each patch.
    energy_intra: [T + 1, ..., N], Dirichlet energy inside regions.
    energy_inter: [T + 1, ..., N], Dirichlet energy across boundaries.
    residual: [T, ...], relative residual of the linear solves of 'imex_cg';
      zero for other integrators.
    converged: [T, ...], bool, whether they met their tolerance.
  """

  flux: jax.Array
  energy_intra: jax.Array
  energy_inter: jax.Array
  residual: jax.Array
  converged: jax.Array


def evolve(
  fields: Fields,
  coefficients: Coefficients | Callable[[Fields], Coefficients],
  graph: PatchGraph,
  tau: jax.Array | float,
  steps: int,
  *,
  integrator: str = 'euler',
  remat: bool = True,
  trace: bool = False,
  tol: float = 1e-6,
  iterations: int = 1000,
) -> tuple[Fields, Trace | None]:
  """Evolves the fields by `steps` steps of size `tau`.

  Args:
    fields: H [..., N, D] and Z [..., N, M]; zero in padding.
    coefficients: right-hand side, fixed, or a pure function of the fields;
      explicit rules evaluate it at every stage, so that they keep their order,
      implicit ones at the start of each step. Facts S1 and S2 hold stage by
      stage, whatever the function does, while tau stays within the bound.
    graph: the patch graph.
    tau: step; explicit rules are stable up to `stable_tau`. A tau that is known
      before compilation is checked, against the least that is known of lam; of
      a function, against its value at the initial fields: it must not raise lam
      later.
    steps: T >= 0; T = 0 returns the fields.
    integrator: see `integrators.INTEGRATORS`.
    remat: keep only the state of each step for the backward pass and recompute
      the rest: (T + 1) N (D + M) numbers.
    trace: also return diagnostics of every step.
    tol: relative residual that the solver of 'imex_cg' is to reach.
    iterations: of that solver, at most.

  Returns:
    fields: after T steps.
    trace: Trace, or None.

  Raises:
    ValueError: negative `steps`, unknown integrator, a known `tau` beyond the
      bound.
  """
  if steps < 0:
    raise ValueError(f'steps={steps} must be >= 0; 0 is the static model')
  lookup = coefficients if callable(coefficients) else lambda _: coefficients
  pace, used = lookup, tau
  if integrator in EXPLICIT:
    # The right-hand side is linear in its coefficients. With tau inside, its
    # derivative comes with theirs, and no step is run again for it.
    pace, used = lambda fields: lookup(fields).scaled(tau), 1.0
  known_tau = _known(tau)
  if known_tau is not None:
    start = lookup(fields)
    check_tau(
      known_tau,
      _known(start.lam) or 0.0,
      reaction=start.reaction,
      flux='symmetric' if start.velocity is None else 'upwind',
      integrator=integrator,
    )

  def step(fields, _):
    found = integrate(
      integrator,
      lambda fields: make_dynamics(pace(fields), graph),
      fields,
      used,
      tol=tol,
      iterations=iterations,
      axis_name=graph.axis_name,
    )
    new = jax.tree.map(
      lambda new, old: new.astype(old.dtype), found.state, fields
    )
    if not trace:
      return new, None
    seen = _observe(fields, lookup(fields), graph)
    return new, (seen, found.residual, found.converged)

  if remat:
    step = jax.checkpoint(step, prevent_cse=False)
  final, seen = jax.lax.scan(step, fields, None, length=steps)
  if seen is None:
    return final, None
  observed, *solves = seen
  last = _observe(final, lookup(final), graph)
  join = lambda past, last: jnp.concatenate([past, last[None]])
  return final, Trace(*map(join, observed, last), *solves)


def _known(value: jax.Array | float) -> float | None:
  """A number, or None where it is being traced."""
  try:
    return float(value)
  except jax.errors.ConcretizationTypeError:
    return None


def _observe(fields: Fields, coefficients: Coefficients, graph: PatchGraph):
  """Flux and energies of one state."""
  if coefficients.boundary is None:
    flux = jnp.zeros_like(fields.hidden[..., 0])
  else:
    flux = diagnostics.boundary_flux(fields, coefficients.boundary, graph)
  return flux, *diagnostics.dirichlet_energy(fields, coefficients, graph)

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
from tmlib.reaction_diffusion.integrators import imex_residual, integrate
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
  """

  flux: jax.Array
  energy_intra: jax.Array
  energy_inter: jax.Array
  residual: jax.Array


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
  iterations: int = 32,
) -> tuple[Fields, Trace | None]:
  """Evolves the fields by `steps` steps of size `tau`.

  Args:
    fields: H [..., N, D] and Z [..., N, M]; zero in padding.
    coefficients: right-hand side, fixed, or a pure function of the fields that
      is evaluated before every step.
    graph: the patch graph.
    tau: step; explicit rules are stable up to `stable_tau`.
    steps: T >= 0; T = 0 returns the fields.
    integrator: see `integrators.INTEGRATORS`.
    remat: keep only the state of each step for the backward pass and recompute
      the rest: (T + 1) N (D + M) numbers.
    trace: also return diagnostics of every step.
    iterations: of the solver in 'imex_cg'.

  Returns:
    fields: after T steps.
    trace: Trace, or None.

  Raises:
    ValueError: negative `steps`, unknown integrator, a Python number `tau`
      beyond the bound.
  """
  if steps < 0:
    raise ValueError(f'steps={steps} must be >= 0; 0 is the static model')
  lookup = coefficients if callable(coefficients) else lambda _: coefficients
  if not callable(coefficients) and isinstance(tau, int | float):
    check_tau(
      tau,
      _known(coefficients.lam),
      reaction=coefficients.reaction,
      flux='symmetric' if coefficients.velocity is None else 'upwind',
      integrator=integrator,
    )
  axis_name = graph.axis_name

  def step(fields, _):
    c = lookup(fields)
    dynamics = make_dynamics(c, graph)
    new = integrate(
      integrator,
      dynamics,
      fields,
      tau,
      iterations=iterations,
      axis_name=axis_name,
    )
    new = jax.tree.map(lambda new, old: new.astype(old.dtype), new, fields)
    if not trace:
      return new, None
    residual = jnp.zeros(graph.nbr.shape[:-2])
    if integrator == 'imex_cg':
      residual = imex_residual(dynamics, fields, new, tau, axis_name)
    return new, (_observe(fields, c, graph), residual)

  if remat:
    step = jax.checkpoint(step, prevent_cse=False)
  final, seen = jax.lax.scan(step, fields, None, length=steps)
  if seen is None:
    return final, None
  observed, residual = seen
  last = _observe(final, lookup(final), graph)
  join = lambda past, last: jnp.concatenate([past, last[None]])
  return final, Trace(*map(join, observed, last), residual=residual)


def _known(lam: jax.Array | float) -> float:
  """The rate, or the least that it can be where it is being traced."""
  try:
    return float(lam)
  except jax.errors.ConcretizationTypeError:
    return 0.0


def _observe(fields: Fields, coefficients: Coefficients, graph: PatchGraph):
  """Flux and energies of one state."""
  if coefficients.boundary is None:
    flux = jnp.zeros_like(fields.hidden[..., 0])
  else:
    flux = diagnostics.boundary_flux(fields, coefficients.boundary, graph)
  return flux, *diagnostics.dirichlet_energy(fields, coefficients, graph)

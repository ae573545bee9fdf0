"""Checks of TMEvolve's options, on the host and before anything compiles."""

import math
from collections.abc import Sequence
from typing import Any

from tmlib.reaction_diffusion.conductance import SAME_REGION
from tmlib.reaction_diffusion.dynamics import stable_tau
from tmlib.reaction_diffusion.integrators import EXPLICIT, INTEGRATORS
from tmlib.reaction_diffusion.reactions import REACTIONS, stiffness

__all__ = [
  'CHOICES',
  'check_choice',
  'check_options',
  'check_tau',
  'largest_lam',
]

CHOICES = {
  'activation': ('softmax', 'sigmoid'),
  'concept_mode': ('similarity', 'projected', 'learned', 'none'),
  'flux': ('symmetric', 'upwind'),
  'integrator': INTEGRATORS,
  'pooling': ('region', 'patch'),
  'reaction': ('none', 'relax', *REACTIONS),
  'reassign': ('once', 'every_step'),
  'same_region': SAME_REGION,
  'task': ('classify', 'survival', 'expression'),
}


def check_choice(name: str, value: str, allowed: Sequence[str]) -> None:
  """Raises ValueError, listing what is allowed, unless it is."""
  if value not in allowed:
    raise ValueError(
      f'{name}={value!r} is unknown; allowed: {", ".join(allowed)}'
    )


def check_tau(
  tau: float,
  lam: float = 0.0,
  *,
  reaction: str = 'none',
  flux: str = 'symmetric',
  integrator: str = 'euler',
) -> None:
  """Checks a fixed step against the stability bound.

  Args:
    tau: step.
    lam: reaction rate in [0, 1).
    reaction: name of the reaction.
    flux: 'symmetric' or 'upwind'.
    integrator: implicit ones accept any positive step.

  Raises:
    ValueError: a step that is not positive and finite, or beyond the bound.
  """
  if not (tau > 0 and math.isfinite(tau)):
    raise ValueError(f'tau={tau} must be positive and finite')
  bound = float(stable_tau(lam, reaction=reaction, flux=flux))
  if integrator in EXPLICIT and tau > bound * (1 + 1e-6):
    k, row = stiffness(reaction), 2 if flux == 'upwind' else 1
    rate = 'lam' if k == 1 else f'{k:g}*lam'
    formula = f'1/({row}+{rate})' if k else f'1/{row}'
    raise ValueError(
      f'tau={tau} exceeds stability bound {formula}={bound:.4g}; use '
      "integrator='semi_implicit' or lower tau"
    )


def largest_lam(
  tau: float | str, *, reaction: str, flux: str, integrator: str
) -> float:
  """Largest reaction rate for which a step stays legal while lam is learned.

  A fixed explicit tau needs tau (row + k lam) <= 1, so lam <= (1 / tau - row) /
  k. Where tau follows lam, or any tau is legal, it is 1.

  Args:
    tau: fixed step, or 'learned' or 'cfl'.
    reaction: name of the reaction, not 'none'.
    flux: 'symmetric' or 'upwind'.
    integrator: name.

  Returns:
    A rate in [0, 1].
  """
  if isinstance(tau, str) or integrator not in EXPLICIT:
    return 1.0
  row = 2 if flux == 'upwind' else 1
  return min(1.0, max(0.0, (1 / tau - row) / stiffness(reaction)))


def check_options(options: Any) -> None:
  """Checks every option of a `TMEvolve`.

  Args:
    options: an object with the attributes of `TMEvolve`.

  Raises:
    ValueError: names the option, its value, what is allowed and the fix.
  """
  o = options
  for name, allowed in CHOICES.items():
    check_choice(name, getattr(o, name), allowed)
  lowest = {
    'num_outputs': 1, 'hidden': 1, 'regions': 1, 'num_concepts': 1,
    'steps': 0, 'refine_iters': 0, 'smooth_iters': 0, 'cg_iterations': 1,
  }  # fmt: skip
  for name, low in lowest.items():
    value = getattr(o, name)
    if not isinstance(value, int) or value < low:
      raise ValueError(f'{name}={value!r} must be an integer >= {low}')
  if o.degree is not None and o.degree < 1:
    raise ValueError(f'degree={o.degree} must be >= 1, or None')
  if not 0 <= o.lam < 1:
    raise ValueError(f'lam={o.lam} must lie in [0, 1); 0 is no reaction')
  if not 0 < o.cfl <= 1:
    raise ValueError(f'cfl={o.cfl} must lie in (0, 1], a share of the bound')
  if not 0 < o.omega <= 1:
    raise ValueError(f'omega={o.omega} must lie in (0, 1]')
  if not 0 <= o.dropout < 1:
    raise ValueError(f'dropout={o.dropout} must lie in [0, 1)')
  if not o.temperature > 0:
    raise ValueError(f'temperature={o.temperature} must be > 0')
  _check_step(o)
  _check_pairs(o)


def _check_step(o) -> None:
  """The step, and that what is learned about it can start where asked."""
  kind = dict(reaction=o.reaction, flux=o.flux, integrator=o.integrator)
  if isinstance(o.tau, str):
    check_choice('tau', o.tau, ('learned', 'cfl', 'or a number'))
    if o.tau == 'learned' and o.cfl == 1:
      raise ValueError(
        "cfl=1 with tau='learned' has no start: the share is a sigmoid, below "
        "1; use cfl=0.99, or tau='cfl' to fix it at the bound"
      )
    return
  check_tau(o.tau, o.lam, **kind)
  if o.lam > 0 and o.reaction != 'none':
    top = largest_lam(o.tau, **kind)
    if o.lam >= top:
      raise ValueError(
        f'lam={o.lam} leaves no room to learn: tau={o.tau} allows rates below '
        f"{top:.4g} only; lower tau or lam, or use tau='learned'"
      )


def _check_pairs(o) -> None:
  """Options that exclude one another."""
  if o.flux == 'upwind' and o.integrator == 'imex_cg':
    raise ValueError(
      "flux='upwind' is directed, but integrator='imex_cg' needs a symmetric "
      "operator; use integrator='semi_implicit' or 'euler'"
    )
  if o.flux == 'upwind' and o.concept_mode == 'none':
    raise ValueError(
      "flux='upwind' takes its direction from concepts; use another "
      "concept_mode than 'none'"
    )
  if o.concept_mode in ('similarity', 'projected'):
    if o.concept_matrix is None:
      raise ValueError(
        f'concept_mode={o.concept_mode!r} needs concept_matrix [M, Q], unit '
        "rows of text embeddings; or use concept_mode='learned'"
      )
  elif o.concept_matrix is not None:
    raise ValueError(
      f'concept_mode={o.concept_mode!r} does not read concept_matrix; use '
      "concept_mode='similarity' or 'projected', or drop the matrix"
    )

r"""Optimal designs: which pairs to compare when preferences are linear.

A design w on the candidate rows phi_m has information V(w) = sum_m w_m phi_m
phi_m^T. Kiefer-Wolfowitz: w maximises log det V exactly when
  max_m phi_m^T V^{-1} phi_m = rank,
so the excess over the rank certifies how far any design is from optimal.
Frank-Wolfe with the exact step, and with away steps that drop poor rows.

Axes: M candidate rows, D features.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks

__all__ = ['Design', 'optimal_design', 'round_design']


class Design(NamedTuple):
  """Weights over candidate rows and their certificate.

  Attributes:
    weights: [M], on the simplex.
    gap: [], max_m phi_m^T V^{-1} phi_m / D - 1 >= 0; zero at the optimum.
  """

  # jax arrays, or NumPy where the input was NumPy.
  weights: Any
  gap: Any


@functools.partial(jax.jit, static_argnums=(1, 2))
def _frank_wolfe(phi: jax.Array, tol: float, max_steps: int) -> Design:
  rows, dim = phi.shape

  def leverage(w):
    v = jnp.einsum('md,m,me->de', phi, w, phi)
    return jnp.einsum('md,md->m', phi, jnp.linalg.solve(v, phi.T).T)

  def unfinished(carry):
    _, lever, step = carry
    return (lever.max() / dim - 1 > tol) & (step < max_steps)

  def body(carry):
    w, lever, step = carry
    best = lever.argmax()
    worst = jnp.where(w > 0, lever, jnp.inf).argmin()
    # Toward the best row, or away from the worst, whichever promises more.
    toward = lever[best] - dim >= dim - lever[worst]
    row = jnp.where(toward, best, worst)
    x = lever[row]
    # Exact maximiser of log det along the segment: (x/D - 1) / (x - 1).
    size = (x / dim - 1) / jnp.where(jnp.abs(x - 1) > 1e-12, x - 1, 1e-12)
    away_limit = -w[row] / jnp.maximum(1 - w[row], 1e-12)
    size = jnp.where(
      toward, size, jnp.where(x <= 1, away_limit, jnp.maximum(size, away_limit))
    )
    hit = jnp.arange(rows) == row
    new = (1 - size) * w + size * hit
    new = jnp.where(~toward & hit & (size <= away_limit), 0, new)
    new = jnp.maximum(new, 0)
    new = new / new.sum()
    return new, leverage(new), step + 1

  start = jnp.full(rows, 1 / rows, phi.dtype)
  carry = (start, leverage(start), jnp.int32(0))
  w, lever, _ = jax.lax.while_loop(unfinished, body, carry)
  return Design(w, jnp.maximum(lever.max() / dim - 1, 0))


def optimal_design(
  phi: Any, tol: float = 1e-3, max_steps: int = 20_000
) -> Design:
  """D- and G-optimal design over candidate rows.

  NumPy input is solved in float64 and gives NumPy back; a jax array is solved
  in its own dtype.

  Args:
    phi: [M, D] float, features of the candidate pairs; they must span R^D.
    tol: stops at max leverage <= D (1 + tol).
    max_steps: largest number of Frank-Wolfe steps.

  Returns:
    Weights [M] and the certificate gap [].

  Raises:
    ValueError: a wrong shape, NaN, or rows of rank below D.

  References:
    Kiefer, Wolfowitz. The equivalence of two extremum problems, 1960.
    Atwood. Sequences converging to D-optimal designs, 1973 (away steps).
  """
  if np.ndim(phi) != 2 or 0 in np.shape(phi):
    raise ValueError(f'phi has shape {np.shape(phi)}; expected [M, D]')
  if checks.concrete(phi):
    rows = np.asarray(phi, np.float64)
    if not np.isfinite(rows).all():
      raise ValueError('phi has a value that is not finite')
    rank = int(np.linalg.matrix_rank(rows))
    if rank < rows.shape[1]:
      raise ValueError(
        f'phi has rank {rank} < D = {rows.shape[1]}: some direction of theta '
        'never shows; drop dependent features or add pairs'
      )
  if isinstance(phi, jax.Array):
    return _frank_wolfe(phi, tol, max_steps)
  with jax.enable_x64(True):
    rows = jnp.asarray(np.asarray(phi, np.float64))
    found = _frank_wolfe(rows, tol, max_steps)
  return Design(*map(np.asarray, found))


def round_design(weights: Any, rounds: int) -> np.ndarray:
  """Rounds a design to whole numbers of duels by largest remainders.

  Args:
    weights: [M], on the simplex.
    rounds: number of duels to hand out.

  Returns:
    [M] int64, sums to `rounds`; at least one duel for every supported row where
    rounds allow.
  """
  w = np.asarray(weights, np.float64)
  w = np.where(w > 1e-9, w, 0)
  w = w / w.sum()
  exact = w * rounds
  counts = np.floor(exact).astype(np.int64)
  if rounds >= (w > 0).sum():
    counts = np.maximum(counts, (w > 0).astype(np.int64))
  order = np.argsort(counts - exact)
  short = rounds - int(counts.sum())
  if short > 0:
    counts[order[:short]] += 1
  while short < 0:
    over = np.argmax(np.where(counts > 1, counts - exact, -np.inf))
    counts[over] -= 1
    short += 1
  return counts

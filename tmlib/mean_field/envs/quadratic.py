r"""Linear-quadratic game: the crowd's mean attracts, moving costs.

x' = x + a D + noise, noise of variance v per step; with the mean m of the crowd

  r = D (-a^2 / 2 + q a (m - x) - k (m - x)^2 / 2), at the end -c (m - x)^2 / 2.

On the line the equilibrium is known: m stays where it is, a = -g_t (x - m),

  g_t = (q + eta_{t+1}) / (1 + eta_{t+1} D)
  eta_t = D (g_t^2 - 2 q g_t + k) + eta_{t+1} (1 - g_t D)^2, eta_T = c
  V_t(x) = -eta_t (x - m)^2 / 2 - chi_t, chi_t = chi_{t+1} + eta_{t+1} v / 2.

The game here lives on a lattice of spacing h on which steps and noise land
exactly, so that only the rounding of actions to h / D and the far ends differ
from the line: both vanish as h does, values like h^2.

Axes: S cells, A actions, E = 3 noise outcomes, H = T + 1 time steps.

References:
  Carmona, Fouque, Sun. Mean field games and systemic risk, 2015. The lattice
  and the recursion in discrete time are ours.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.tree_util import Partial

from tmlib.mean_field import checks
from tmlib.mean_field.game import MFGame

__all__ = ['LinearQuadratic', 'linear_quadratic', 'riccati']


class LinearQuadratic(NamedTuple):
  """The solution on the line.

  Attributes:
    gain: [T], g: a = -g (x - m).
    eta: [T + 1], curvature of the value.
    chi: [T + 1], cost of the noise to come.
  """

  gain: np.ndarray
  eta: np.ndarray
  chi: np.ndarray


def riccati(
  steps: int = 10,
  *,
  time_step: float = 0.5,
  coupling: float = 0.5,
  state_cost: float = 1.0,
  end_cost: float = 1.0,
  variance: float = 0.5,
) -> LinearQuadratic:
  """The recursion of the module docstring.

  Args:
    steps: T.
    time_step: D.
    coupling: q.
    state_cost: k.
    end_cost: c.
    variance: v, of the noise of a step.

  Returns:
    The solution on the line, float64.
  """
  eta, chi, gain = [end_cost], [0.0], []
  for _ in range(steps):
    g = (coupling + eta[0]) / (1 + eta[0] * time_step)
    cost = time_step * (g**2 - 2 * coupling * g + state_cost)
    chi.insert(0, chi[0] + eta[0] * variance / 2)
    eta.insert(0, cost + eta[0] * (1 - g * time_step) ** 2)
    gain.insert(0, g)
  return LinearQuadratic(np.array(gain), np.array(eta), np.array(chi))


def _reward(x, actions, weights, steps, mu, t):
  time_step, coupling, state_cost, end_cost = weights
  x, actions = jnp.asarray(x), jnp.asarray(actions)
  off = (mu @ x - x)[:, None]
  running = -(actions**2)[None] / 2 + coupling * actions[None] * off
  running = time_step * (running - state_cost * off**2 / 2)
  return jnp.where(t == steps, -end_cost * off**2 / 2 + 0 * running, running)


def linear_quadratic(
  steps: int = 10,
  *,
  spacing: float = 0.5,
  reach: float = 6.0,
  fastest: float = 4.0,
  time_step: float = 0.5,
  coupling: float = 0.5,
  state_cost: float = 1.0,
  end_cost: float = 1.0,
  variance: float = 0.5,
  initial_std: float = 1.0,
  mean: float = 0.0,
) -> MFGame:
  """The linear-quadratic game on a lattice.

  Args:
    steps: T; H = T + 1, the last decision only collects the end cost.
    spacing: h; noise moves by sqrt(3 v / 2), which must be a multiple of h.
    reach: cells lie in [-reach, reach].
    fastest: largest |a|, rounded to a multiple of h / D.
    time_step: D.
    coupling: q, with q^2 <= k for a concave problem.
    state_cost: k.
    end_cost: c.
    variance: v, of the noise of a step.
    initial_std: of the initial law, a normal one on the lattice.
    mean: of the initial law.

  Returns:
    The game; state i is x = -reach + i h, action j is a = (j - A // 2) h / D.

  Raises:
    ValueError: q^2 > k; noise that misses the lattice; a size out of range.
  """
  checks.check_count('steps', steps)
  sizes = {'spacing': spacing, 'reach': reach, 'fastest': fastest,
           'time_step': time_step, 'initial_std': initial_std}  # fmt: skip
  for name, value in sizes.items():
    checks.check_between(name, value, 0, np.inf, closed='')
  if coupling**2 > state_cost:
    raise ValueError(
      f'coupling={coupling} squared exceeds state_cost={state_cost}: the '
      'problem is not concave; lower the coupling'
    )
  noise = np.sqrt(1.5 * variance) / spacing
  if abs(noise - round(noise)) > 1e-9:
    raise ValueError(
      f'noise moves by sqrt(3 variance / 2) = {noise * spacing:.6g}, which is '
      f'no multiple of spacing={spacing}; change one of them'
    )
  half, width = round(reach / spacing), round(fastest * time_step / spacing)
  x = spacing * np.arange(-half, half + 1)
  jumps = np.arange(-width, width + 1)
  drawn = round(noise) * np.array([-1, 0, 1])
  moved = np.arange(len(x))[:, None, None] + jumps[:, None] + drawn
  idx = np.clip(moved, 0, len(x) - 1)
  mu0 = np.exp(-(((x - mean) / initial_std) ** 2) / 2)
  weights = np.array([time_step, coupling, state_cost, end_cost])
  reward = Partial(
    _reward, x, jumps * spacing / time_step, weights, np.int32(steps)
  )
  prob = np.full(idx.shape, 1 / 3)
  return MFGame(idx, prob, reward, mu0 / mu0.sum(), steps + 1)

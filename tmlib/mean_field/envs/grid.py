"""Moves on lines and grids: successor tables that several games share.

Axes: S cells, A actions, E noise outcomes.
"""

import numpy as np

__all__ = ['LINE_MOVES', 'PLANE_MOVES', 'moves', 'noisy_moves']

# stay, right, left; and for a plane (row, column): stay, down, right, left, up.
LINE_MOVES = ((0,), (1,), (-1,))
PLANE_MOVES = ((0, 0), (1, 0), (0, 1), (0, -1), (-1, 0))


def moves(
  shape: tuple[int, ...],
  steps: tuple[tuple[int, ...], ...],
  *,
  torus: bool = True,
  blocked: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
  """Where each step leads from each cell.

  Args:
    shape: of the grid; S is its product.
    steps: A displacements, the first of which is to stay.
    torus: edges are joined; else a step over an edge is not possible.
    blocked: [S] bool, cells that nobody may enter.

  Returns:
    target: [S, A] int, the cell itself where the step is not possible.
    open: [S, A] bool, the step is possible; staying always is.
  """
  cells = np.stack(np.unravel_index(np.arange(np.prod(shape)), shape), -1)
  moved = cells[:, None] + np.asarray(steps)[None]
  size = np.asarray(shape)
  over = (moved < 0) | (moved >= size)
  inside = np.logical_not(over.any(-1) & (not torus))
  target = np.ravel_multi_index(tuple(np.moveaxis(moved % size, -1, 0)), shape)
  if blocked is not None:
    inside &= ~np.asarray(blocked, bool)[target]
  inside[:, 0] = True
  here = np.arange(len(cells))[:, None]
  return np.where(inside, target, here), inside


def noisy_moves(
  shape: tuple[int, ...],
  steps: tuple[tuple[int, ...], ...],
  noise: float,
  *,
  torus: bool = True,
  blocked: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """A chosen step, then with probability `noise` a random one.

  The random step is uniform among those possible in the cell that the chosen
  one led to.

  Args:
    shape: of the grid.
    steps: displacements, both of actions and of noise; the first is to stay.
    noise: probability in [0, 1] of the random step.
    torus: edges are joined.
    blocked: [S] bool, cells that nobody may enter.

  Returns:
    idx: [S, A, E] int, E = A.
    prob: [S, A, E].
    mask: [S, A] bool, the steps that are possible.
  """
  target, inside = moves(shape, steps, torus=torus, blocked=blocked)
  idx = target[target]
  drawn = noise * inside / inside.sum(-1, keepdims=True)
  drawn[:, 0] += 1 - noise
  return idx, drawn[target], inside

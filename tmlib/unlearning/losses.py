r"""Losses on network outputs, with the curvature that unlearning needs.

Axes: B examples, C outputs. Written for one example [C]; vmapped by users.

For a loss l(f, y), convex in the outputs f:
  residual   rho = -dl/df,
  curvature  L = d2l/df2 = B B',  u -> L u,
  root       B' u, so that X = B' J is the design matrix of the local problem,
  whitened   r with B r = rho, its residual.
Softmax, p = softmax(f): rho = y - p, L = diag(p) - p p',
B = diag(sqrt p) - p sqrt(p)'. Since rho sums to zero, r = rho / sqrt(p) solves
B r = rho - p sum(rho) = rho.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ['BUILT_IN', 'Loss', 'SOFTMAX', 'SQUARE', 'convex', 'get_loss']


class Loss(NamedTuple):
  """A loss of one example; every function takes (f [C], y [C], ...).

  Attributes:
    name: for messages.
    value: (f, y) -> [].
    residual: (f, y) -> [C], -dl/df.
    curvature: (f, y, u) -> [C], L u.
    root: (f, y, u) -> [C], B' u with L = B B'.
    whitened: (f, y) -> [C], r with B r = residual.
    local: the critical weight is only local (growth slower than quadratic).
  """

  name: str
  value: Callable[..., jax.Array]
  residual: Callable[..., jax.Array]
  curvature: Callable[..., jax.Array]
  root: Callable[..., jax.Array]
  whitened: Callable[..., jax.Array]
  local: bool = True


def _softmax_curvature(f, y, u):
  p = jax.nn.softmax(f)
  return p * u - p * (p @ u)


def _softmax_root(f, y, u):
  p = jax.nn.softmax(f)
  return jnp.sqrt(p) * (u - p @ u)


def _softmax_whitened(f, y):
  # exp(-log p / 2) in place of 1 / sqrt(p), which overflows earlier.
  log_p = jax.nn.log_softmax(f)
  return (y - jnp.exp(log_p)) * jnp.exp(-0.5 * jnp.maximum(log_p, -60.0))


SOFTMAX = Loss(
  'softmax',
  value=lambda f, y: -y @ jax.nn.log_softmax(f),
  residual=lambda f, y: y - jax.nn.softmax(f),
  curvature=_softmax_curvature,
  root=_softmax_root,
  whitened=_softmax_whitened,
)

SQUARE = Loss(
  'square',
  value=lambda f, y: 0.5 * jnp.sum((y - f) ** 2),
  residual=lambda f, y: y - f,
  curvature=lambda f, y, u: u,
  root=lambda f, y, u: u,
  whitened=lambda f, y: y - f,
  local=False,
)


BUILT_IN = (SOFTMAX, SQUARE)


def convex(name: str, value: Callable[..., jax.Array]) -> Loss:
  """A `Loss` from its value alone, by differentiation in the C outputs.

  Args:
    name: for messages.
    value: (f [C], y [C]) -> [], convex in f; its Hessian must not have
      negative eigenvalues (checked at the data before every solve).

  Returns:
    Loss, with the symmetric root of a C x C Hessian per example.
  """
  hessian = jax.hessian(value)

  def root_matrix(f, y):
    eigs, basis = jnp.linalg.eigh(hessian(f, y))
    return basis, jnp.sqrt(jnp.maximum(eigs, 0))

  def root(f, y, u):
    basis, scale = root_matrix(f, y)
    return basis @ (scale * (basis.T @ u))

  def whitened(f, y):
    basis, scale = root_matrix(f, y)
    tiny = scale <= jnp.finfo(f.dtype).eps ** 0.5 * jnp.max(scale)
    inverse = jnp.where(tiny, 0, 1 / jnp.where(tiny, 1, scale))
    return basis @ (inverse * (basis.T @ -jax.grad(value)(f, y)))

  return Loss(
    name,
    value,
    residual=lambda f, y: -jax.grad(value)(f, y),
    curvature=lambda f, y, u: hessian(f, y) @ u,
    root=root,
    whitened=whitened,
  )


def get_loss(loss: str | Loss) -> Loss:
  """'softmax', 'square', or a `Loss` as it is.

  Raises:
    ValueError: an unknown name.
  """
  if isinstance(loss, Loss):
    return loss
  if loss in ('softmax', 'square'):
    return SOFTMAX if loss == 'softmax' else SQUARE
  raise ValueError(
    f"loss={loss!r}; allowed: 'softmax', 'square', or a Loss (see `convex`)."
  )

r"""Generalized-linear preferences.

P^u_ij = mu(<phi_ij, theta_u>), phi_ij = -phi_ji, mu(-x) = 1 - mu(x).
  logistic  mu(x) = 1 / (1 + e^-x)
  probit    mu(x) = Phi(x)
  linear    mu(x) = 1/2 + x, clipped to [0, 1]

The estimator maximises the ridge quasi-likelihood
  sum_m wins_m x_m - counts_m A(x_m) - l2/2 |theta|^2,  x_m = <phi_m, theta>,
with A' = mu: maximum likelihood for the logistic link, least squares for the
linear one. It is concave; Newton with step halving. With g the gradient and H
the negative Hessian at the returned theta, sqrt(g^T H^-1 g) (the Newton
decrement) is the distance to the optimum in standard errors.

Axes: N users, K arms, D features, M distinct pairs.
"""

import functools
import warnings
from typing import Any, NamedTuple

import chex
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tmlib.dueling import checks, envs

__all__ = [
  'LINKS',
  'GlmEnv',
  'GlmFit',
  'as_tabular',
  'curvature',
  'glm_env',
  'glm_mle',
  'link_mean',
  'pair_rows',
]

LINKS = ('logistic', 'probit', 'linear')
_HALVINGS = 8


class GlmEnv(flax.struct.PyTreeNode):
  """Generalized-linear preferences of all users; build with `glm_env`.

  Attributes:
    phi: [K, K, D], antisymmetric features of the ordered pairs.
    theta: [N, D], tastes.
    link: one of `LINKS` (static).
    outcomes: 'independent' or 'shared' (static).
    feedback: 'all' or 'one' (static).
  """

  phi: Any
  theta: Any
  link: str = flax.struct.field(pytree_node=False, default='logistic')
  outcomes: str = flax.struct.field(pytree_node=False, default='independent')
  feedback: str = flax.struct.field(pytree_node=False, default='all')

  @property
  def num_users(self) -> int:
    """N."""
    return self.theta.shape[0]

  @property
  def num_arms(self) -> int:
    """K."""
    return self.phi.shape[0]

  @property
  def preference(self) -> jax.Array:
    """[N, K, K], the preference matrices that the features imply."""
    x = jnp.einsum('ijd,nd->nij', self.phi, self.theta)
    return link_mean(x, self.link)


class GlmFit(NamedTuple):
  """Estimated tastes.

  Attributes:
    theta: [N, D].
    residual: [N], Newton decrement at theta; far below one when converged.
  """

  theta: jax.Array
  residual: jax.Array


def link_mean(x: jax.Array, link: str) -> jax.Array:
  """mu(x), elementwise, in [0, 1].

  Args:
    x: [...].
    link: one of `LINKS`.

  Returns:
    [...].
  """
  checks.check_choice('link', link, LINKS)
  if link == 'logistic':
    return jax.nn.sigmoid(x)
  if link == 'probit':
    return jax.scipy.stats.norm.cdf(x)
  return jnp.clip(0.5 + x, 0, 1)


def _link_slope(x: jax.Array, link: str) -> jax.Array:
  if link == 'logistic':
    return jax.nn.sigmoid(x) * jax.nn.sigmoid(-x)
  if link == 'probit':
    return jax.scipy.stats.norm.pdf(x)
  return jnp.ones_like(x)


def _link_integral(x: jax.Array, link: str) -> jax.Array:
  """A(x) with A' = mu (unclipped)."""
  if link == 'logistic':
    return jax.nn.softplus(x)
  if link == 'probit':
    norm = jax.scipy.stats.norm
    return x * norm.cdf(x) + norm.pdf(x)
  return x / 2 + x**2 / 2


def curvature(env: GlmEnv) -> jax.Array:
  """kappa: the smallest slope of the link over users and pairs.

  Args:
    env: the environment.

  Returns:
    [], > 0; error bounds scale with 1 / kappa.
  """
  x = jnp.einsum('ijd,nd->nij', env.phi, env.theta)
  slope = _link_slope(x, env.link)
  if env.link == 'linear':
    slope = jnp.where(jnp.abs(x) < 0.5, slope, 0)
  return slope.min()


def pair_rows(phi: Any) -> tuple[np.ndarray, np.ndarray]:
  """The unordered pairs and their features.

  Args:
    phi: [K, K, D].

  Returns:
    pairs [K (K-1) / 2, 2] with i < j, and rows [K (K-1) / 2, D].
  """
  phi = np.asarray(phi)
  i, j = np.triu_indices(phi.shape[0], 1)
  return np.stack([i, j], 1), phi[i, j]


def glm_env(
  phi: Any,
  theta: Any,
  link: str = 'logistic',
  outcomes: str = 'independent',
  feedback: str = 'all',
) -> GlmEnv:
  """Checks features and tastes and builds the environment.

  Args:
    phi: [K, K, D] float, phi_ij = -phi_ji.
    theta: [N, D] float.
    link: one of `LINKS`.
    outcomes: 'independent' or 'shared'.
    feedback: 'all' or 'one'.

  Returns:
    The environment.

  Raises:
    ValueError: a wrong shape, NaN, features that are not antisymmetric, rows of
      rank below D, an unknown choice.

  Warns:
    UserWarning: the link is saturated for some pair (kappa < 1e-3).
  """
  checks.check_choice('link', link, LINKS)
  checks.check_choice('outcomes', outcomes, envs.OUTCOMES)
  checks.check_choice('feedback', feedback, envs.FEEDBACK)
  a, t = np.asarray(phi, np.float64), np.asarray(theta, np.float64)
  if a.ndim != 3 or a.shape[0] != a.shape[1] or a.shape[0] < 2:
    raise ValueError(f'phi has shape {a.shape}; expected [K, K, D] with K >= 2')
  if t.ndim != 2 or t.shape[0] == 0 or t.shape[1] != a.shape[2]:
    raise ValueError(
      f'theta has shape {t.shape}; expected [N >= 1, D = {a.shape[2]}]'
    )
  if not (np.isfinite(a).all() and np.isfinite(t).all()):
    raise ValueError('phi and theta must be finite')
  error = np.abs(a + a.transpose(1, 0, 2)).max((2,))
  if error.max() > 1e-5:
    i, j = np.unravel_index(error.argmax(), error.shape)
    raise ValueError(
      f'phi[{i}, {j}] + phi[{j}, {i}] has an entry of size {error.max():.3g}; '
      'features must be antisymmetric: use (phi - phi.transpose(1, 0, 2)) / 2'
    )
  rank = int(np.linalg.matrix_rank(pair_rows(a)[1]))
  if rank < a.shape[2]:
    raise ValueError(
      f'phi has rank {rank} < D = {a.shape[2]} over the pairs; drop dependent '
      'features'
    )
  env = GlmEnv(jnp.asarray(phi), jnp.asarray(theta), link, outcomes, feedback)
  kappa = float(curvature(env))
  if kappa < 1e-3:
    warnings.warn(
      f'the {link} link is saturated: kappa = {kappa:.2g}; estimates degrade '
      'like 1 / kappa, so scale theta or phi down',
      stacklevel=2,
    )
  return env


def as_tabular(env: GlmEnv) -> envs.DuelingEnv:
  """The same users without the features.

  Args:
    env: generalized-linear environment.

  Returns:
    The tabular environment with equal preferences.
  """
  return envs.DuelingEnv(env.preference, env.outcomes, env.feedback)


def glm_mle(
  phi: jax.Array,
  wins: jax.Array,
  counts: jax.Array,
  link: str = 'logistic',
  l2: float | jax.Array = 1.0,
  steps: int = 30,
  offset: jax.Array | None = None,
) -> GlmFit:
  """Ridge (quasi-)maximum likelihood per user, by damped Newton steps.

  Args:
    phi: [M, D], features of the compared pairs (left minus right).
    wins: [N, M], how often the left arm won (a tie counts 1/2).
    counts: [N, M], how often the pair was compared.
    link: one of `LINKS`.
    l2: [] > 0, ridge weight; it keeps unseen directions at zero.
    steps: Newton steps.
    offset: [M], added to <phi, theta>; None: zero. With a population's taste in
      the offset, theta is a user's deviation from it.

  Returns:
    theta [N, D] and the residual [N]. A user who was never asked keeps zero.

  Raises:
    ValueError: an unknown link, l2 <= 0, or wins outside [0, counts].
  """
  checks.check_choice('link', link, LINKS)
  checks.check_positive('l2', l2)
  if checks.concrete(wins, counts):
    won, met = np.asarray(wins), np.asarray(counts)
    if not (np.isfinite(met) & (won >= 0) & (won <= met)).all():
      raise ValueError('wins must lie in [0, counts] and not be NaN')
  chex.assert_rank([phi, wins, counts], 2)
  chex.assert_equal_shape([wins, counts])
  offset = jnp.zeros(len(phi), phi.dtype) if offset is None else offset
  return _newton(phi, wins, counts, link, l2, steps, offset)


@functools.partial(jax.jit, static_argnames=('link', 'steps'))
def _newton(phi, wins, counts, link, l2, steps, offset):
  dim = phi.shape[1]
  halvings = 0.5 ** jnp.arange(_HALVINGS, dtype=phi.dtype)

  def one_user(won, met):
    def objective(theta):
      x = phi @ theta + offset
      fit = won @ x - met @ _link_integral(x, link)
      return fit - l2 / 2 * theta @ theta

    def mean(x):
      return 0.5 + x if link == 'linear' else link_mean(x, link)

    def newton(theta):
      x = phi @ theta + offset
      slope = phi.T @ (won - met * mean(x)) - l2 * theta
      weight = met * _link_slope(x, link)
      hessian = phi.T @ (weight[:, None] * phi)
      hessian += l2 * jnp.eye(dim, dtype=phi.dtype)
      return slope, jnp.linalg.solve(hessian, slope)

    def body(_, theta):
      _, step = newton(theta)
      # Halving guards the first steps; at the optimum rounding decides, and
      # then the full step is as good as any.
      value = jax.vmap(lambda a: objective(theta + a * step))(halvings)
      size = halvings[jnp.nanargmax(value)]
      return theta + size * step

    theta = jax.lax.fori_loop(0, steps, body, jnp.zeros(dim, phi.dtype))
    slope, step = newton(theta)
    return theta, jnp.sqrt(jnp.maximum(slope @ step, 0))

  return GlmFit(*jax.vmap(one_user)(wins, counts))

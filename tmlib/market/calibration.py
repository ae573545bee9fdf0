r"""Congestion weight and choice temperature from observed shares.

Logit users in T markets of known accuracy, capacity and price. Two steps:

1. Inversion. log x_i - log x_j = (v_i - v_j) / tau - (gamma / tau) (L_i - L_j)
   with latencies at the observed loads: two unknowns, linear, least squares.
   Exact without noise; with it, the loads are errors in variables.
2. Likelihood. Scoring steps on the multinomial likelihood of the shares that
   the equilibrium predicts, with its implicit derivatives, in (log gamma,
   log tau). Standard errors are from the Fisher information.

Axes: T markets, M providers.

References:
  Berry. Estimating discrete-choice models of product differentiation, 1994
  (inversion). The second step is our choice.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.market.game import ProviderGame, quality
from tmlib.market.users import split_users

__all__ = ['Calibration', 'calibrate']


class Calibration(NamedTuple):
  """Estimates.

  Attributes:
    gamma: weight of latency.
    tau: temperature.
    errors: [2], standard errors of gamma and tau; NaN where `users` is None.
    inversion: (gamma, tau) of the first step.
    predicted: [T, M], shares at the estimates.
    deviance: 2 users sum x log(x / predicted), per market on average.
    converged: whether the last scoring step was negligible.
  """

  gamma: float
  tau: float
  errors: np.ndarray
  inversion: tuple[float, float]
  predicted: np.ndarray
  deviance: float
  converged: bool


def _predict_both(theta, game, budgets, alphas):
  def all_shares(theta):
    def one(budget, alpha):
      gamma, tau = jnp.exp(theta)
      here = dataclasses.replace(
        game, budgets=budget, gamma=gamma, tau=tau, wardrop=False
      )
      found = split_users(here, alpha)
      return jnp.append(found.x, found.outside)

    return jax.vmap(one)(budgets, alphas)

  return all_shares(theta), jax.jacfwd(all_shares)(theta)


_both = jax.jit(_predict_both)


def _invert(game, budgets, alphas, x):
  """Least squares of the inversion, (gamma, tau)."""
  rows, targets = [], []
  for budget, alpha, share in zip(budgets, alphas, x, strict=True):
    here = dataclasses.replace(game, budgets=budget)
    v, s = (np.asarray(z) for z in quality(here, jnp.asarray(alpha)))
    wait = np.asarray(game.latency.value(jnp.asarray(share[: len(s)]), s))
    if game.outside is not None:
      v, wait = np.append(v, game.outside), np.append(wait, 0)
    log = np.log(share[: len(v)])
    rows.append(np.stack([v[1:] - v[0], wait[0] - wait[1:]], 1))
    targets.append(log[1:] - log[0])
  rows, targets = np.concatenate(rows), np.concatenate(targets)
  scale = np.abs(rows).max(0)
  few = len(rows) < 2 or (scale <= 0).any()
  if few or np.linalg.cond(rows / scale) > 1e8:
    raise ValueError(
      'the markets do not tell gamma from tau: accuracies and latencies differ '
      'in proportion (or not at all); add markets with other splits'
    )
  inverse_tau, ratio = np.linalg.lstsq(rows, targets, rcond=None)[0]
  if inverse_tau <= 0:
    # Noise; the likelihood starts from indifferent users.
    return 1.0, 1.0
  return max(ratio / inverse_tau, 1e-3), 1 / inverse_tau


def _check(game, budgets, alphas, shares):
  if game.weights is not None:
    raise ValueError('calibrate takes one type of users; drop weights')
  shape = (len(alphas), game.num_providers)
  for name, x in (('budgets', budgets), ('alpha', alphas), ('shares', shares)):
    if x.shape != shape:
      raise ValueError(f'{name} has shape {x.shape}; expected {shape}')
  if not ((alphas >= 0) & (alphas < 1)).all():
    raise ValueError('alpha must lie in [0, 1): alpha = 1 serves nobody')
  if not (np.isfinite(shares) & (shares > 0)).all():
    raise ValueError(
      'shares must be positive: logit users leave nobody without any; pool '
      'markets or drop the provider'
    )
  total = shares.sum(1)
  if game.outside is None and np.abs(total - 1).max() > 1e-6:
    raise ValueError(
      f'shares sum to {total[np.abs(total - 1).argmax()]:.6g} in a market; '
      'they must sum to one, or set outside'
    )
  if game.outside is not None and not (total < 1).all():
    raise ValueError(
      'shares sum to one or more although outside is set; drop outside'
    )


def calibrate(
  game: ProviderGame,
  alpha: Any,
  shares: Any,
  budgets: Any = None,
  users: float | None = None,
  max_steps: int = 50,
) -> Calibration:
  """Fits gamma and tau to observed shares.

  Args:
    game: accuracy, latency, prices and outside are taken as known; its gamma
      and tau are ignored.
    alpha: [T, M], splits of the budgets.
    shares: [T, M], positive; rows sum to one, or to less with an outside
      option.
    budgets: [T, M]; None: the game's in every market.
    users: number of users behind each market's shares, for standard errors.
    max_steps: of scoring.

  Returns:
    The estimates.

  Raises:
    ValueError: shapes that differ, shares that are no shares, markets that do
      not identify the two numbers.
  """
  alphas, x = np.array(alpha, float), np.array(shares, float)
  if budgets is None:
    budgets = np.broadcast_to(np.asarray(game.budgets), alphas.shape)
  budgets = np.array(budgets, float)
  _check(game, budgets, alphas, x)
  x = np.append(x, 1 - x.sum(1, keepdims=True), 1)
  cells = slice(None) if game.outside is not None else slice(0, -1)
  game = dataclasses.replace(game, tau=1.0, wardrop=False)
  with jax.enable_x64(True):
    first = _invert(game, budgets, alphas, x)
    theta = np.log(first)
    likelihood, information, step = -np.inf, np.eye(2), np.zeros(2)
    new, damp, converged = theta, 1.0, False
    shares_now = x
    for _ in range(max_steps):
      p, jac = (np.asarray(z) for z in _both(new, game, budgets, alphas))
      p, jac = p[:, cells], jac[:, cells]
      value = (x[:, cells] * np.log(p)).sum()
      if not value >= likelihood - 1e-13 * abs(likelihood):
        damp /= 2
        new = theta + damp * step
        if damp < 1e-6:
          break
        continue
      theta, likelihood, damp, shares_now = new, value, 1.0, p
      information = np.einsum('tmi,tm,tmj->ij', jac, 1 / p, jac)
      score = np.einsum('tmi,tm->i', jac, x[:, cells] / p)
      step = np.clip(np.linalg.lstsq(information, score)[0], -1, 1)
      converged = bool(np.abs(step).max() < 1e-9)
      if converged:
        break
      new = theta + step
  gamma, tau = np.exp(theta)
  errors = np.full(2, np.nan)
  if users is not None:
    covariance = np.linalg.inv(users * information)
    errors = np.sqrt(np.diag(covariance)) * np.exp(theta)
  real = x[:, cells]
  deviance = 2 * (real * np.log(real / shares_now)).sum(1).mean()
  return Calibration(
    float(gamma),
    float(tau),
    errors,
    (float(first[0]), float(first[1])),
    shares_now[:, : alphas.shape[1]],
    float(deviance * (1 if users is None else users)),
    converged,
  )

r"""Latency of a provider that serves load x with capacity s.

Each is increasing in x, decreasing and convex in s. The theory in `nash` rests
on these three properties only.

  linear              x / s                      fluid queue
  mm1                 1 / (s - x)                response time of an M/M/1 queue
  processor_sharing   s / (s - x) = 1/(1 - rho)  mean slowdown of M/G/1-PS: time
                      in the system over the time alone; the law of the job
                      sizes does not matter. (Its mean response time is that of
                      mm1, which is why the slowdown is what is offered here.)
  bpr                 t0 (1 + b (x / s)^power)   Bureau of Public Roads

The two queues need x < s.

References:
  Kleinrock. Queueing systems, volume 2, 1976 (processor sharing).
  Bureau of Public Roads. Traffic assignment manual, 1964.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ['LATENCIES', 'Latency', 'bpr', 'load_slope', 'marginal']

# (x or t, s) -> array of the same shape.
Curve = Callable[[jax.Array, jax.Array], jax.Array]


class Latency(NamedTuple):
  """A latency model; its functions are elementwise.

  Attributes:
    name: for messages.
    value: L(x, s), s > 0; infinite at x >= s where `capacitated`.
    inverse: load at which latency t is reached: L(inverse(t, s), s) = t; zero
      for t <= L(0, s).
    capacitated: whether loads must stay below s.
    social: (x L)_x = L + x L_x, what one more user costs all of them.
    social_inverse: its inverse in x.
  """

  name: str
  value: Curve
  inverse: Curve
  capacitated: bool
  social: Curve
  social_inverse: Curve


def _queue(x, s):
  """Spare capacity, and whether there is any."""
  return jnp.where(x < s, s - x, 1), x < s


def _mm1(x, s):
  spare, ok = _queue(x, s)
  return jnp.where(ok, 1 / spare, jnp.inf)


def _mm1_social(x, s):
  spare, ok = _queue(x, s)
  return jnp.where(ok, s / spare**2, jnp.inf)


def _sharing(x, s):
  spare, ok = _queue(x, s)
  return jnp.where(ok, s / spare, jnp.inf)


def _sharing_social(x, s):
  spare, ok = _queue(x, s)
  return jnp.where(ok, (s / spare) ** 2, jnp.inf)


def _above(t, least, load):
  """`load` of the latency t where t exceeds its least value, else zero."""
  ok = t > least
  return jnp.where(ok, load(jnp.where(ok, t, least + 1)), 0)


@functools.cache
def bpr(t0: float = 1.0, b: float = 0.15, power: float = 4.0) -> Latency:
  """Latency t0 (1 + b (x / s)^power).

  Args:
    t0: latency of an idle provider, > 0.
    b: relative increase at x = s, > 0.
    power: > 0.

  Returns:
    The latency model; equal arguments give the same object.

  Raises:
    ValueError: an argument that is not positive.
  """
  for name, number in (('t0', t0), ('b', b), ('power', power)):
    if not number > 0:
      raise ValueError(f'{name}={number} must be positive')
  root = 1 / power

  def curve(b):
    value = lambda x, s: t0 * (1 + b * (x / s) ** power)
    inverse = lambda t, s: _above(
      t, t0, lambda t: s * ((t / t0 - 1) / b) ** root
    )
    return value, inverse

  name = f'bpr({t0:g}, {b:g}, {power:g})'
  return Latency(name, *curve(b), False, *curve(b * (1 + power)))


LATENCIES = {
  'linear': Latency(
    'linear',
    lambda x, s: x / s,
    lambda t, s: s * jnp.maximum(t, 0),
    False,
    lambda x, s: 2 * x / s,
    lambda t, s: s * jnp.maximum(t, 0) / 2,
  ),
  'mm1': Latency(
    'mm1',
    _mm1,
    lambda t, s: _above(t, 1 / s, lambda t: s - 1 / t),
    True,
    _mm1_social,
    lambda t, s: _above(t, 1 / s, lambda t: s - jnp.sqrt(s / t)),
  ),
  'processor_sharing': Latency(
    'processor_sharing',
    _sharing,
    lambda t, s: _above(t, jnp.ones_like(s), lambda t: s * (1 - 1 / t)),
    True,
    _sharing_social,
    lambda t, s: _above(
      t, jnp.ones_like(s), lambda t: s * (1 - 1 / jnp.sqrt(t))
    ),
  ),
  'bpr': bpr(),
}


def load_slope(latency: Latency, x: jax.Array, s: jax.Array) -> jax.Array:
  """L_x(x, s), elementwise."""
  return jax.jvp(lambda x: latency.value(x, s), (x,), (jnp.ones_like(x),))[1]


@functools.cache
def marginal(latency: Latency) -> Latency:
  """The latency that makes selfish users split as a planner would.

  Users who feel (x L)_x instead of L minimise the total latency: Pigou's toll
  is x L_x.

  Args:
    latency: a model.

  Returns:
    A model whose value is L + x L_x. Its own `social` is not defined further
    and repeats its value.
  """
  return Latency(
    f'marginal {latency.name}',
    latency.social,
    latency.social_inverse,
    latency.capacitated,
    latency.social,
    latency.social_inverse,
  )

"""Data of networks, checked on the host before anything is compiled.

Axes: n examples, C outputs. Data is a dict {'x': [n, ...], 'y': [n, C] or [n]
int labels, 'weight': [n], optional}.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from tmlib.unlearning.losses import BUILT_IN, Loss
from tmlib.unlearning.problem import concrete, copies

__all__ = ['as_data', 'check_deterministic', 'check_request', 'outputs_of']

Apply = Callable[[Any, jax.Array], jax.Array]


def outputs_of(apply_fn: Apply, params: Any, x: Any) -> int:
  """C, from the shape that the model gives one example."""
  x = _numbers('x', x)
  shape = jax.eval_shape(apply_fn, params, x[:1]).shape
  if len(shape) != 2:
    raise ValueError(f'apply_fn must return [B, C], got shape {shape}.')
  return shape[1]


def _numbers(name: str, value: Any) -> jax.Array:
  if not hasattr(value, 'dtype'):
    value = np.asarray(value)
  if not (jnp.issubdtype(value.dtype, jnp.number) or value.dtype == np.bool_):
    raise TypeError(
      f'{name} has dtype {value.dtype}; encode text and missing values as '
      'numbers first.'
    )
  return jnp.asarray(value)


def _finite(name: str, value: jax.Array) -> None:
  if jnp.issubdtype(value.dtype, jnp.floating) and concrete(value):
    if not np.isfinite(np.asarray(value)).all():
      raise ValueError(f'{name} holds NaN or inf; drop or impute those rows.')


def as_data(
  data: dict[str, Any], outputs: int, name: str = 'data'
) -> dict[str, jax.Array]:
  """The data with targets [n, C] and weights [n] filled in.

  Args:
    data: see the module docstring.
    outputs: C.
    name: for messages.

  Returns:
    {'x': [n, ...], 'y': [n, C] float, 'weight': [n] float}.

  Raises:
    TypeError: text or objects in place of numbers.
    ValueError: a missing key, an empty set, unequal lengths, labels outside
      0..C-1, NaN or inf, weights that are negative or zero throughout. Values
      are checked where they are concrete.
  """
  missing = [k for k in ('x', 'y') if k not in data]
  if missing:
    raise ValueError(f'{name} lacks {missing}; it holds {sorted(data)}.')
  x, y = (_numbers(f'{name}[{k!r}]', data[k]) for k in ('x', 'y'))
  n = x.shape[0]
  if n == 0:
    raise ValueError(f'{name} is empty: the set needs at least one example.')
  if y.shape[:1] != (n,):
    raise ValueError(f'{name}: x has {n} examples but y has {len(y)}.')
  y = _targets(f"{name}['y']", y, outputs)
  for key, value in (('x', x), ('y', y)):
    _finite(f'{name}[{key!r}]', value)
  weight = data.get('weight')
  if weight is None:
    weight = jnp.ones(n)
  else:
    weight = _numbers(f"{name}['weight']", weight)
    _check_weight(f"{name}['weight']", weight, n)
  return {'x': x, 'y': y, 'weight': weight.astype(y.dtype)}


def _targets(name: str, y: jax.Array, outputs: int) -> jax.Array:
  exact = not jnp.issubdtype(y.dtype, jnp.floating)
  if exact and y.ndim == 1 and outputs > 1:
    y = y.astype(jnp.int32)
    if concrete(y) and not 0 <= int(y.min()) <= int(y.max()) < outputs:
      raise ValueError(
        f'{name} holds labels {int(y.min())} to {int(y.max())}, but the model '
        f'has C={outputs} outputs, labels 0 to {outputs - 1}. Labels that '
        'start at 1: pass y - 1.'
      )
    return jax.nn.one_hot(y, outputs)
  if y.shape[1:] != (outputs,):
    raise ValueError(
      f'{name} has shape {y.shape} and dtype {y.dtype}, the model has '
      f'C={outputs}: pass [n, C] targets (one output is y[:, None]) or [n] '
      'integer labels.'
    )
  return y.astype(jnp.result_type(float)) if exact else y


def _check_weight(name: str, weight: jax.Array, n: int) -> None:
  if weight.shape != (n,):
    raise ValueError(f'{name} has shape {weight.shape}, expected ({n},).')
  if not concrete(weight):
    return
  values = np.asarray(weight, np.float64)
  if not (np.isfinite(values) & (values >= 0)).all():
    raise ValueError(f'{name} must be finite and >= 0.')
  if not values.any():
    raise ValueError(f'{name} is zero throughout: the set is empty.')


def check_deterministic(apply_fn: Apply, params: Any, x: jax.Array) -> None:
  """Refuses models whose output depends on chance or on batch mates.

  Dropout and batch statistics have no Jacobian per example; pass an `apply_fn`
  with train=False.

  Raises:
    ValueError: two calls, or a batch and its halves, disagree; outputs that
      are not finite.
  """
  x = x[: min(len(x), 8)]
  whole, again = apply_fn(params, x), apply_fn(params, x)
  if not np.isfinite(np.asarray(whole, np.float32)).all():
    raise ValueError('apply_fn returns NaN or inf: are the params finite?')
  single = jnp.concatenate(
    [apply_fn(params, x[i : i + 1]) for i in range(len(x))]
  )
  scale = 1e-3 * (1 + float(jnp.abs(whole).max()))
  if not float(jnp.abs(whole - again).max()) <= scale:
    raise ValueError('apply_fn is random (dropout?): pass train=False to it.')
  if not float(jnp.abs(whole - single).max()) <= scale:
    raise ValueError(
      'apply_fn depends on the batch an example is in (batch norm?): pass '
      'train=False or use running statistics.'
    )


def _check_loss(apply_fn, loss, params, name, data) -> None:
  """What a loss asks of its data: softmax of targets, convexity at them."""
  if loss.name == 'softmax':
    y = np.asarray(data['y'])
    if (y < 0).any() or (np.abs(y.sum(1) - 1) > 1e-3).any():
      raise ValueError(
        f"{name}['y'] has rows that are no distribution over the classes; "
        "loss='softmax' needs rows >= 0 that sum to one."
      )
  elif loss not in BUILT_IN:
    eye = jnp.eye(data['y'].shape[1], dtype=data['y'].dtype)

    def lowest(row):
      f = apply_fn(params, row[0][None])[0]
      bend = jax.vmap(lambda u: loss.curvature(f, row[1], u))(eye)
      eigs = jnp.linalg.eigvalsh(bend)
      return eigs[0], eigs[-1]

    low, high = jax.lax.map(
      lowest, (data['x'], data['y']), batch_size=min(64, len(data['x']))
    )
    slack = 100 * float(jnp.finfo(low.dtype).eps) * float(jnp.abs(high).max())
    if float(low.min()) < -slack:
      raise ValueError(
        f'loss {loss.name!r} has the negative curvature {float(low.min()):.2e} '
        f'in its outputs on {name}: it is not convex, so that the Gauss-Newton '
        'operator is indefinite. Use a convex loss.'
      )


def check_request(
  apply_fn: Apply,
  loss: Loss,
  params: Any,
  retain: dict[str, Any],
  forget: dict[str, Any],
) -> tuple[dict[str, jax.Array], dict[str, jax.Array], tuple[str, ...]]:
  """Everything about a deletion request that can go wrong before a solve.

  Returns:
    Retain and forget set as of `as_data`, and flags: 'duplicates' where copies
    of forget examples are left in the retain set (which also warns).

  Raises:
    TypeError, ValueError: see `as_data` and `check_deterministic`; targets
      that are no distributions; a loss that is not convex.
  """
  outputs = outputs_of(apply_fn, params, retain['x'])
  sets = {}
  for name, data in (('retain', retain), ('forget', forget)):
    sets[name] = as_data(data, outputs, name)
    check_deterministic(apply_fn, params, sets[name]['x'])
    _check_loss(apply_fn, loss, params, name, sets[name])
  x_R, x_F = (np.asarray(sets[k]['x']) for k in ('retain', 'forget'))
  if x_R.shape[1:] != x_F.shape[1:]:
    raise ValueError(
      f'retain and forget examples differ in shape: {x_R.shape[1:]} and '
      f'{x_F.shape[1:]}.'
    )
  flags = ()
  count = copies(x_R, x_F)
  if count:
    flags = ('duplicates',)
    warnings.warn(
      f'{count} of {len(x_F)} forget examples are also in the retain set: '
      'retraining keeps their information. Remove the copies.',
      stacklevel=3,
    )
  return sets['retain'], sets['forget'], flags

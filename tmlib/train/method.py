"""The one contract: a method is a few pure functions.

Whatever tmlib trains, simulates, plays or solves step by step is a `Method`.
The loop folds `update`; it knows nothing else about any method.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

__all__ = [
  'Batch',
  'Build',
  'Evaluation',
  'Method',
  'Metrics',
  'State',
  'build_method',
  'check_evaluation',
  'check_update',
]

# Every leaf has the example axis first. `batch['weight']` marks padding with
# zeros and `batch['id']` holds each example's global index.
Batch = dict[str, Any]
# Any pytree of arrays; it holds one PRNG key, which is never split per device.
State = Any
# Scalars, or pairs (sum, weight) whose quotient is reported. Already global.
Metrics = dict[str, Any]
# {'sums': {name: (sum, weight)}, 'outputs': {name: [B, ...]}}
Evaluation = dict[str, dict[str, Any]]


class Method(NamedTuple):
  """Three pure functions that make a method.

  Attributes:
    init: (key, batch or None) -> state. The example batch gives the shapes.
    update: (state, batch or None) -> (state, metrics), one step.
    evaluate: (state, batch or None) -> {'sums': {name: (sum, weight)},
      'outputs': {name: [B, ...]}}. The loop adds `sums` over batches and
      concatenates `outputs` over the examples whose weight is positive.
  """

  init: Callable[[jax.Array, Batch | None], State]
  update: Callable[[State, Batch | None], tuple[State, Metrics]]
  evaluate: Callable[[State, Batch | None], Evaluation]


# The argument names the data axis in per-device mode; None in jit mode.
Build = Callable[[str | None], Method]


def build_method(build: Build, axis_name: str | None) -> Method:
  """`build(axis_name)`, held to be a Method.

  Raises:
    TypeError: if a Method stands where its builder is expected, or the builder
      returns something else.
  """
  if isinstance(build, Method):
    raise TypeError(
      'build must be a function axis name -> Method, got a Method; pass'
      ' lambda axis_name: method'
    )
  if not callable(build):
    raise TypeError(
      f'build must be a function axis name -> Method, got {_kind(build)}'
    )
  method = build(axis_name)
  if callable(method):
    raise TypeError(
      f'build({axis_name!r}) must return a Method, got a function; if it is a'
      ' builder itself, as gradient_method returns, pass that one as build'
    )
  if not isinstance(method, Method):
    raise TypeError(
      f'build({axis_name!r}) must return a Method, got {_kind(method)}; return'
      ' tmlib.train.Method(init, update, evaluate)'
    )
  return method


def _kind(x: Any) -> str:
  return f'a {type(x).__name__}'


def check_update(old: State, result: Any) -> None:
  """Holds one update to the contract, while it is traced.

  Args:
    old: the state given to `update`.
    result: what it returned: the pair of its new state and its metrics.

  Raises:
    TypeError: if `result` is not such a pair.
    ValueError: if the state's structure, shapes or dtypes changed, or a metric
      is neither a scalar nor a pair of scalars.
  """
  if type(result) is not tuple or len(result) != 2:
    raise TypeError(
      f'update must return the pair (state, metrics), got {_kind(result)};'
      ' metrics may be {}'
    )
  new, metrics = result
  if not isinstance(metrics, Mapping):
    raise TypeError(
      f'update must return its metrics as a dict, got {_kind(metrics)}; return'
      " for example state, {'loss': loss}"
    )
  absent = 'absent'
  before, after = (
    {
      jax.tree_util.keystr(path): (jnp.shape(x), str(jnp.result_type(x)))
      for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }
    for tree in (old, new)
  )
  changed = [
    f'state{name}: {before.get(name, absent)} -> {after.get(name, absent)}'
    for name in sorted(before.keys() | after.keys())
    if before.get(name) != after.get(name)
  ]
  if changed:
    raise ValueError(
      'update must return a state of the shapes and dtypes it was given:\n  '
      + '\n  '.join(changed[:10])
    )
  for name, value in metrics.items():
    for x in value if isinstance(value, tuple) else (value,):
      if jnp.shape(x):
        raise ValueError(
          f'metric {name!r} has shape {jnp.shape(x)}; a metric is a scalar or'
          ' a pair (sum, weight) of scalars'
        )


def check_evaluation(found: Any) -> None:
  """Holds one evaluation to the contract, while it is traced.

  Raises:
    TypeError: if it is no dict with 'sums' and 'outputs'.
    ValueError: if a sum is no pair of scalars.
  """
  missing = [
    key
    for key in ('sums', 'outputs')
    if not isinstance(found, Mapping) or not isinstance(found.get(key), Mapping)
  ]
  if missing:
    got = sorted(found) if isinstance(found, Mapping) else _kind(found)
    raise TypeError(
      "evaluate must return {'sums': {name: (sum, weight)}, 'outputs': {name:"
      f' [B, ...]}}}}; {" and ".join(missing)} missing or no dict, got {got};'
      ' either may be {}'
    )
  for name, value in found['sums'].items():
    if type(value) is not tuple or [jnp.shape(x) for x in value] != [(), ()]:
      shapes = jax.tree.map(jnp.shape, value)
      raise ValueError(
        f'evaluate: sums[{name!r}] must be a pair (sum, weight) of scalars, got'
        f' {shapes}'
      )

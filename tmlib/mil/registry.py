"""Bag models by name, for configs that hold only names and numbers.

Models are found by module and class when they are asked for, so that a model
of a family that is built on this one (TMEvolve) has its place here without
being imported here.
"""

import dataclasses
import difflib
import importlib
import numbers
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import linen as nn

__all__ = ['MODELS', 'ModelSpec', 'create_model', 'model_options']


class ModelSpec(NamedTuple):
  """Where a model lives, and what its name stands for.

  Attributes:
    module: of the class.
    name: of the class.
    options: attributes that the name fixes in advance.
    aux_weights: weights of its auxiliary losses as its authors use them,
      relative to the loss of the bag.
    class_losses: those of them that exist only where bags have classes.
    needs_graph: reads `bag.graph`.
    needs_text: takes `text`, embeddings of a text encoder.
    unpacks: takes packed rows apart, at S times their work: better fed with
      padded bags.
  """

  module: str
  name: str
  options: Mapping[str, Any] = {}
  aux_weights: Mapping[str, float] = {}
  class_losses: tuple[str, ...] = ()
  needs_graph: bool = False
  needs_text: bool = False
  unpacks: bool = False


def _clam(multi_branch: bool) -> ModelSpec:
  return ModelSpec(
    'tmlib.mil.clam', 'CLAM', {'multi_branch': multi_branch},
    aux_weights={'instance': 3 / 7}, class_losses=('instance',),
  )  # fmt: skip


def _pool(pool: str, space: str = 'embedding') -> ModelSpec:
  return ModelSpec(
    'tmlib.mil.models', 'PoolMIL', {'pool': pool, 'space': space}
  )


MODELS: dict[str, ModelSpec] = {
  'mean_pool': _pool('mean'),
  'max_pool': _pool('max'),
  'log_sum_exp_pool': _pool('log_sum_exp'),
  'noisy_or_pool': _pool('noisy_or'),
  'top_k_pool': _pool('top_k'),
  'mean_instance': _pool('mean', 'instance'),
  'max_instance': _pool('max', 'instance'),
  'log_sum_exp_instance': _pool('log_sum_exp', 'instance'),
  'noisy_or_instance': _pool('noisy_or', 'instance'),
  'top_k_instance': _pool('top_k', 'instance'),
  'abmil': ModelSpec('tmlib.mil.models', 'ABMIL', {'gated': False}),
  'gated_abmil': ModelSpec('tmlib.mil.models', 'ABMIL'),
  'clam_sb': _clam(multi_branch=False),
  'clam_mb': _clam(multi_branch=True),
  'dsmil': ModelSpec('tmlib.mil.dsmil', 'DSMIL', aux_weights={'instance': 1.0}),
  'dtfd': ModelSpec('tmlib.mil.dtfd', 'DTFD', aux_weights={'tier1': 1.0}),
  'transmil': ModelSpec('tmlib.mil.transmil', 'TransMIL', unpacks=True),
  'patch_gcn': ModelSpec('tmlib.mil.patch_gcn', 'PatchGCN', needs_graph=True),
  'wikg': ModelSpec('tmlib.mil.wikg', 'WiKG'),
  'vila_mil': ModelSpec('tmlib.mil.vila_mil', 'ViLaMIL', needs_text=True),
  'concep_path': ModelSpec(
    'tmlib.mil.concept_models',
    'ConcepPath',
    aux_weights={'orthogonality': 2.0},
    needs_text=True,
  ),
  'zero_shot': ModelSpec(
    'tmlib.mil.concept_models', 'ZeroShot', needs_text=True
  ),
  'tmevolve': ModelSpec(
    'tmlib.reaction_diffusion',
    'TMEvolve',
    aux_weights={'region_balance': 0.01},
    needs_graph=True,
  ),
}


def create_model(
  name: str, *, in_dim: int | None = None, num_classes: int, **options: Any
) -> nn.Module:
  """Builds a bag model by name.

  Args:
    name: a key of `MODELS`.
    in_dim: P, features of an instance, >= 1; None takes what comes first.
    num_classes: C, >= 1: classes, survival bins, genes, or one log-risk.
    **options: attributes of the model, for example hidden=64.

  Returns:
    A Linen module: apply({'params': p}, bag, train=..., dropout_keys=...) ->
    MILOutput, where `bag` has leaves [B, N, ...] and `dropout_keys` is [B].

  Raises:
    ValueError: an unknown name, a size out of range, an option that the model
      does not have, or one with a value of another type or out of range.
  """
  spec = _find(name)
  for label, size in (('in_dim', in_dim), ('num_classes', num_classes)):
    if size is not None and size < 1:
      raise ValueError(f'{label} must be >= 1, got {size}')
  cls = getattr(importlib.import_module(spec.module), spec.name)
  known = _fields(cls)
  if spec.needs_text and 'text' not in options:
    raise ValueError(
      f'model {name!r} needs text=..., the embeddings of its concepts by a '
      'text encoder'
    )
  unknown = sorted(set(options) - known)
  if unknown:
    raise ValueError(
      f'model {name!r} has no option {unknown[0]!r}'
      f'{_guess(unknown[0], known)} Options: {", ".join(sorted(known))}'
    )
  if spec.module.startswith('tmlib.mil.'):  # others check their own
    _check_values(cls, options)
  # TMEvolve calls C `num_outputs`, and compares P with its parameters.
  outputs = 'num_classes' if 'num_classes' in known else 'num_outputs'
  sizes = {outputs: num_classes, 'in_dim': in_dim}
  sizes = {key: value for key, value in sizes.items() if key in known}
  return cls(**{**spec.options, **options, **sizes})


def model_options(name: str) -> frozenset[str]:
  """Names of the options that a model of this name takes.

  Args:
    name: a key of `MODELS`.

  Returns:
    Names of its attributes, less the sizes that `create_model` sets.

  Raises:
    ValueError: an unknown name.
  """
  spec = _find(name)
  cls = getattr(importlib.import_module(spec.module), spec.name)
  return frozenset(_fields(cls) - {'num_classes', 'num_outputs', 'in_dim'})


def _find(name: str) -> ModelSpec:
  if name not in MODELS:
    raise ValueError(
      f'unknown model {name!r}{_guess(name, MODELS)} Known: '
      f'{", ".join(sorted(MODELS))}'
    )
  return MODELS[name]


def _check_values(cls: Any, options: Mapping[str, Any]) -> None:
  """Refuses values that would fail, or mean nothing, deep in a layer."""
  for field in dataclasses.fields(cls):
    if field.name not in options:
      continue
    name, usual = field.name, field.default
    value: Any = options[name]
    wrong = f'{name}={value!r}'
    if isinstance(usual, bool):
      if not isinstance(value, bool | np.bool_):
        raise ValueError(f'{wrong} must be True or False')
    elif isinstance(usual, int):
      # A size that may be absent is 0 then, and usually; so may a seed be.
      least = min(usual, 1)
      if not _is(value, numbers.Integral) or value < least:
        raise ValueError(f'{wrong} must be an integer >= {least}')
    elif isinstance(usual, float) and not _is(value, numbers.Real):
      raise ValueError(f'{wrong} must be a number')
    elif isinstance(usual, str) and not isinstance(value, str):
      raise ValueError(f'{wrong} must be a name, such as {usual!r}')
    if name.endswith('dropout') and not 0 <= options[name] < 1:
      raise ValueError(f'{wrong} must be in [0, 1)')
    if name == 'dtype' and value is not None:
      _check_dtype(value)


def _is(value: Any, kind: type) -> bool:
  return isinstance(value, kind) and not isinstance(value, bool)


def _check_dtype(value: Any) -> None:
  try:
    if jnp.issubdtype(jnp.dtype(value), jnp.floating):
      return
  except TypeError:
    pass
  raise ValueError(
    f'dtype={value!r} must be a floating dtype, such as bfloat16'
  )


def _guess(name: str, known: Any) -> str:
  close = difflib.get_close_matches(name, known, 1)
  return f'; did you mean {close[0]!r}?' if close else '.'


def _fields(cls: Any) -> set[str]:
  """Attributes of a Linen module that a user sets."""
  return {f.name for f in dataclasses.fields(cls)} - {'parent', 'name'}

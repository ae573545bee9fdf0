"""Parameters of published Torch models, by key map; no Torch needed.

A state dictionary of numpy arrays becomes the name, options and Flax parameters
of the model that it belongs to. Read a `.pt` file with `tmlib.data.read_pt`.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

__all__ = ['TorchModel', 'from_torch']


class TorchModel(NamedTuple):
  """A published model as one of ours.

  Attributes:
    name: for `create_model`.
    options: for `create_model`: in_dim, num_classes, hidden, ...; numbers that
      are not part of the weights (dropout, number of instances) are left out.
    params: apply({'params': params}, bag).
    ignored: keys that were not read: biases of a softmax, which it ignores, and
      whatever else was saved with the model.
  """

  name: str
  options: dict[str, Any]
  params: dict[str, Any]
  ignored: tuple[str, ...]


class _Keys:
  """A state dictionary that knows what was asked of it."""

  def __init__(self, arrays: Mapping[str, Any]):
    self.arrays = dict(arrays)
    self.read: set[str] = set()

  def __contains__(self, key: str) -> bool:
    return key in self.arrays

  def find(self, pattern: str) -> list[str]:
    """First groups of the keys that match, in order."""
    found = (re.fullmatch(pattern, key) for key in self.arrays)
    return sorted({m.group(1) for m in found if m}, key=lambda x: (len(x), x))

  def __getitem__(self, key: str) -> np.ndarray:
    if key not in self.arrays:
      shown = ', '.join(sorted(self.arrays)[:8])
      raise ValueError(
        f'the checkpoint has no {key!r}; it has {shown}, ... Is it whole, and '
        'of this model?'
      )
    self.read.add(key)
    return np.asarray(self.arrays[key]).astype(np.float32)

  def dense(self, key: str, bias: bool = True) -> dict[str, np.ndarray]:
    """A linear layer [out, in] as kernel [in, out]; a missing bias is zero."""
    kernel = self[f'{key}.weight'].T
    if not bias:
      return {'kernel': kernel}
    if f'{key}.bias' not in self:
      return {'kernel': kernel, 'bias': np.zeros(kernel.shape[1], np.float32)}
    return {'kernel': kernel, 'bias': self[f'{key}.bias']}

  def norm(self, key: str) -> dict[str, np.ndarray]:
    """A layer norm."""
    return {'scale': self[f'{key}.weight'], 'bias': self[f'{key}.bias']}

  def gated(self, key: str, a: str, b: str, c: str) -> dict[str, Any]:
    """A gated scorer; the bias of its output moves no softmax."""
    return {
      'v': self.dense(f'{key}.{a}'),
      'u': self.dense(f'{key}.{b}'),
      'w': self.dense(f'{key}.{c}', bias=False),
    }


def _flat(state: Mapping[str, Any], prefix: str = ''):
  """Nested dictionaries as dotted keys, wrappers of modules taken off."""
  for key, value in state.items():
    name = f'{prefix}{key}'
    if isinstance(value, Mapping):
      yield from _flat(value, f'{name}.')
    else:
      # DataParallel, Lightning, and CLAM's Sequential that is called `module`.
      name = re.sub(r'^(?:(?:module|model|state_dict)\.)+', '', name)
      yield name.replace('.module.', '.'), value


def _below(arrays: Mapping[str, Any], mark: str) -> dict[str, Any] | None:
  """Keys less whatever stands before `mark`, or None where no key ends so."""
  ends = [k for k in arrays if k == mark or k.endswith(f'.{mark}')]
  if not ends:
    return None
  prefix = min(ends, key=len).removesuffix(mark)
  return {k.removeprefix(prefix): value for k, value in arrays.items()}


def from_torch(state: Mapping[str, Any]) -> TorchModel:
  """Recognises a published model by its keys and converts its weights.

  Known: CLAM-SB and CLAM-MB (old and new prefixes, gated or not) and models of
  the same layers without instance classifiers (ABMIL, CHIEF, and AMIL of
  Patch-GCN and MCAT, with a layer more); the ABMIL of MIL-Lab; DSMIL (one query
  layer or two); DTFD; TransMIL; Patch-GCN; WiKG.

  Args:
    state: name -> array [...], possibly nested; values that `np.asarray` takes.
      Whatever stands before a model's own names (model_state_dict., net.) is
      taken off.

  Returns:
    TorchModel.

  Raises:
    ValueError: a dictionary of none of these models, or one that lacks a key.
  """
  every = dict(_flat(state))
  for mark, convert in _FAMILIES.items():
    arrays = _below(every, mark)
    if arrays is not None:
      keys = _Keys(arrays)
      name, options, params = convert(keys)
      ignored = sorted(set(keys.arrays) - keys.read)
      return TorchModel(name, options, params, tuple(ignored))
  shown = ', '.join(sorted(every)[:8]) or 'nothing'
  raise ValueError(
    f'no known model has these keys: {shown}; known are CLAM, ABMIL, DSMIL, '
    'DTFD, TransMIL, Patch-GCN and WiKG'
  )


def _clam(keys: _Keys):
  if keys.find(r'(fc_omic|mm)\..*'):
    raise ValueError(
      'the checkpoint fuses slides with molecular profiles (fc_omic, mm); only '
      'models of slides alone can be read'
    )
  embed = keys.dense('attention_net.0')
  at = keys.find(r'attention_net\.(\d+)\.attention_c\.weight')
  gated = bool(at)
  if gated:
    scorer = keys.gated(
      f'attention_net.{at[0]}', 'attention_a.0', 'attention_b.0', 'attention_c'
    )
  else:
    first, last = keys.find(r'attention_net\.(\d+\.\d+)\.weight')
    scorer = {
      'v': keys.dense(f'attention_net.{first}'),
      'w': keys.dense(f'attention_net.{last}', bias=False),
    }
  many = keys.find(r'classifiers\.(\d+)\.weight')
  params: dict[str, Any] = {'embed': embed, 'attention': scorer}
  if many:
    heads = [keys.dense(f'classifiers.{c}') for c in many]
    params['head'] = np.concatenate([head['kernel'] for head in heads], 1)
    params['head_bias'] = np.concatenate([head['bias'] for head in heads])
    classes = len(many)
  else:
    one = 'classifier' if 'classifier.weight' in keys else 'classifiers'
    params['head'] = keys.dense(one)
    classes = len(params['head']['bias'])
  options = _sizes(embed, classes, scorer)
  options['gated'] = gated
  if 'rho.0.weight' in keys:
    params['slide'] = keys.dense('rho.0')
    options['slide'] = len(params['slide']['bias'])
  instance = keys.find(r'instance_classifiers\.(\d+)\.weight')
  if not instance and not many:
    return 'gated_abmil' if gated else 'abmil', options, params
  if len(instance) != classes:
    raise ValueError(
      f'the checkpoint has {len(instance)} instance classifiers for {classes} '
      'classes; CLAM has one per class'
    )
  parts = [keys.dense(f'instance_classifiers.{c}') for c in instance]
  params['instance'] = np.stack([part['kernel'] for part in parts])
  params['instance_bias'] = np.stack([part['bias'] for part in parts])
  return 'clam_mb' if many else 'clam_sb', options, params


def _sizes(embed, classes: int, scorer) -> dict[str, Any]:
  return {
    'in_dim': embed['kernel'].shape[0],
    'num_classes': classes,
    'hidden': embed['kernel'].shape[1],
    'attention': scorer['v']['kernel'].shape[1],
  }


def _mil_lab(keys: _Keys):
  layers = keys.find(r'patch_embed\.(\d+)\.weight')
  if len(layers) > 1:
    raise ValueError(
      f'the checkpoint embeds patches by {len(layers)} layers; only models '
      'with one (num_fc_layers=1) can be read'
    )
  embed = keys.dense('patch_embed.0')
  gated = 'global_attn.attention_c.weight' in keys
  if gated:
    names = ('attention_a.0', 'attention_b.0', 'attention_c')
    scorer = keys.gated('global_attn', *names)
  else:
    first, last = keys.find(r'global_attn\.(\d+)\.weight')
    scorer = {
      'v': keys.dense(f'global_attn.{first}'),
      'w': keys.dense(f'global_attn.{last}', bias=False),
    }
  heads = scorer['w']['kernel'].shape[1]
  if heads > 1:
    raise ValueError(f'the checkpoint has {heads} heads; ABMIL has one')
  head = keys.dense('classifier')
  params = {'embed': embed, 'attention': scorer, 'head': head}
  options = _sizes(embed, len(head['bias']), scorer)
  return 'gated_abmil' if gated else 'abmil', options, params


def _dsmil(keys: _Keys):
  first = 'i_classifier.fc'
  first += '.0' if f'{first}.0.weight' in keys else ''
  params: dict[str, Any] = {'instance': keys.dense(first)}
  deep = 'b_classifier.q.0.weight' in keys
  if deep:
    params['query'] = keys.dense('b_classifier.q.0')
    params['query_out'] = keys.dense('b_classifier.q.2')
  else:
    params['query'] = keys.dense('b_classifier.q')
  values = 'identity'
  if 'b_classifier.v.1.weight' in keys:
    params['value'] = keys.dense('b_classifier.v.1')
    # The code with two query layers also has the relu.
    values = 'relu' if deep else 'linear'
  params['head'] = {
    'kernel': keys['b_classifier.fcc.weight'].transpose(1, 2, 0),
    'bias': keys['b_classifier.fcc.bias'],
  }
  classes, size, _ = params['head']['kernel'].shape
  options = {
    'in_dim': size,
    'num_classes': classes,
    'hidden': 0,
    'query': params['query']['kernel'].shape[1],
    'query_layers': 'mlp' if deep else 'linear',
    'values': values,
  }
  return 'dsmil', options, params


def _dtfd(keys: _Keys):
  names = ('attention_V.0', 'attention_U.0', 'attention_weights')
  params = {
    'embed': keys.dense('dim_reduction.fc1'),
    'attention': keys.gated('attention', *names),
    'tier1': keys.dense('classifier.fc'),
    'tier2_attention': keys.gated('att_classifier.attention', *names),
    'head': keys.dense('att_classifier.classifier.fc'),
  }
  blocks = keys.find(r'dim_reduction\.resBlocks\.(\d+)\..*')
  if blocks:
    raise ValueError(
      f'the checkpoint has {len(blocks)} residual blocks in dim_reduction; '
      'only models without (numLayer_Res=0) can be read'
    )
  size, hidden = params['embed']['kernel'].shape
  options = {
    'in_dim': size,
    'num_classes': len(params['head']['bias']),
    'hidden': hidden,
    'attention': params['attention']['v']['kernel'].shape[1],
  }
  return 'dtfd', options, params


def _transmil(keys: _Keys):
  params: dict[str, Any] = {
    'embed': keys.dense('_fc1.0'),
    'cls': keys['cls_token'].reshape(-1),
    'norm': keys.norm('norm'),
    'head': keys.dense('_fc2'),
  }
  size = len(params['cls'])
  heads = taps = 0
  for n in (1, 2):
    at = f'layer{n}.attn'
    residual = keys[f'{at}.res_conv.weight']  # [H, 1, W, 1]
    heads, taps = residual.shape[0], residual.shape[2]
    each = size // heads
    qkv = keys[f'{at}.to_qkv.weight'].reshape(3, heads, each, size)
    params |= {
      f'norm_{n}': keys.norm(f'layer{n}.norm'),
      f'qkv_{n}': qkv.transpose(3, 0, 1, 2),
      f'out_{n}': keys[f'{at}.to_out.0.weight'].T.reshape(heads, each, size),
      f'out_bias_{n}': keys[f'{at}.to_out.0.bias'],
      f'residual_{n}': residual[:, 0, :, 0].T,
    }
  for width, name in ((7, 'proj'), (5, 'proj1'), (3, 'proj2')):
    kernel = keys[f'pos_layer.{name}.weight']  # [E, 1, W, W]
    params[f'ppeg_{width}'] = kernel[:, 0].transpose(1, 2, 0)
    params[f'ppeg_bias_{width}'] = keys[f'pos_layer.{name}.bias']
  options = {
    'in_dim': params['embed']['kernel'].shape[0],
    'num_classes': len(params['head']['bias']),
    'hidden': size,
    'heads': heads,
    'taps': taps,
    # What a batch of one slide saw when it was trained.
    'shared_norm': True,
  }
  return 'transmil', options, params


def _patch_gcn(keys: _Keys):
  params: dict[str, Any] = {
    'embed': keys.dense('fc.0'),
    'mix': keys.dense('path_phi.0'),
    'attention': keys.gated(
      'path_attention_head', 'attention_a.0', 'attention_b.0', 'attention_c'
    ),
    'slide': keys.dense('path_rho.0'),
    'head': keys.dense('classifier'),
  }
  layers = keys.find(r'layers\.(\d+)\.conv\.mlp\.0\.weight')
  for n, layer in enumerate(layers):
    at = f'layers.{layer}'
    # Where PyTorch Geometric keeps it depends on its version.
    old = f'{at}.conv.t' in keys
    t = keys[f'{at}.conv.t' if old else f'{at}.conv.aggr_module.t']
    params[f'conv_{n}'] = {
      'temperature': t.reshape(()),
      'in': keys.dense(f'{at}.conv.mlp.0'),
      'norm': keys.norm(f'{at}.conv.mlp.1'),
      'out': keys.dense(f'{at}.conv.mlp.4'),
    }
    # The first layer's own norm is saved but not used.
    if n:
      params[f'norm_{n}'] = keys.norm(f'{at}.norm')
  size, hidden = params['embed']['kernel'].shape
  options = {
    'in_dim': size,
    'num_classes': len(params['head']['bias']),
    'hidden': hidden,
    'layers': len(layers),
  }
  return 'patch_gcn', options, params


def _wikg(keys: _Keys):
  params: dict[str, Any] = {
    'embed': keys.dense('_fc1.0'),
    'head_map': keys.dense('W_head'),
    'tail_map': keys.dense('W_tail'),
    'sum': keys.dense('linear1'),
    'product': keys.dense('linear2'),
    'norm': keys.norm('norm'),
    'head': keys.dense('fc'),
  }
  gate = [
    name
    for name in ('readout.gate_nn', 'readout.nn')
    if f'{name}.0.weight' in keys
  ]
  if gate:
    params['attention'] = keys.dense(f'{gate[0]}.0')
    params['attention_out'] = keys.dense(f'{gate[0]}.2', bias=False)
  size, hidden = params['embed']['kernel'].shape
  options = {
    'in_dim': size,
    'num_classes': len(params['head']['bias']),
    'hidden': hidden,
    'pool': 'attention' if gate else 'mean',
    # What the weights were trained with.
    'paper_code_compat': True,
  }
  return 'wikg', options, params


# A key that only this family has -> its conversion.
_FAMILIES: dict[str, Callable[[_Keys], tuple[str, dict, dict]]] = {
  'b_classifier.fcc.weight': _dsmil,
  'dim_reduction.fc1.weight': _dtfd,
  'layer1.attn.to_qkv.weight': _transmil,
  'path_attention_head.attention_c.weight': _patch_gcn,
  'W_head.weight': _wikg,
  'patch_embed.0.weight': _mil_lab,
  'attention_net.0.weight': _clam,
}

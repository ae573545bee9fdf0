"""Published Torch models give the same numbers here.

The goldens hold numbers that Torch computed: `torch_models.npz` tiny models
with random weights, written anew after the published definitions (with
nystrom-attention 0.0.14 for TransMIL), `torch_checkpoints.npz` the published
CLAM and DSMIL checkpoints on inputs that `drawn` makes. The checkpoints
themselves lie beside the checkout.
"""

import functools
import pathlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tmlib.data import read_pt
from tmlib.mil import Bag, batch_bags, create_model, from_torch
from tmlib.mil.dtfd import DTFD
from tmlib.mil.nystrom import NystromParams, nystrom_attention
from tmlib.ops.graph import ell_from_grid

HERE = pathlib.Path(__file__).parent
CHECKPOINTS = HERE.parents[1].parent / 'shared' / 'data' / 'checkpoints'


@functools.cache
def goldens(name):
  with np.load(HERE / 'goldens' / f'{name}.npz') as found:
    return dict(found)


def tiny(model):
  """Weights, and what else the goldens hold of a tiny model."""
  found, weights = {}, {}
  for key, value in goldens('torch_models').items():
    name, rest = key.split('/', 1)
    if name == model:
      where = weights if rest.startswith('weights/') else found
      where[rest.removeprefix('weights/')] = value
  return weights, found


def run(model, params, x, coords=None):
  """Output for one bag, in a batch with another and with padding."""
  graph = None if coords is None else ell_from_grid(coords, connectivity=8)
  bag = Bag(x, np.ones(len(x), bool), graph)
  batch = batch_bags([bag, bag], n=len(x) + 5)
  output = jax.jit(model.apply)({'params': params}, batch)
  return jax.tree.map(lambda leaf: np.asarray(leaf)[0], output), len(x)


CASES = {
  'amil': {},
  'clam_sb': {'instances': 3},
  'clam_mb': {'instances': 3},
  'dsmil': {},
  'dsmil_old': {},
  'transmil': {},
  'patch_gcn': {},
  'wikg': {'neighbours': 4, 'paper_code_compat': False},
}
NAMES = {'amil': 'gated_abmil', 'dsmil_old': 'dsmil'}
CLOSE: Any = {'rtol': 1e-5, 'atol': 1e-5}


@pytest.mark.parametrize('name', CASES)
def test_tiny_models_equal_torch(name):
  weights, found = tiny(name)
  model = from_torch(weights)
  assert model.name == NAMES.get(name, name)
  net = create_model(model.name, **(model.options | CASES[name]))
  output, n = run(net, model.params, found['x'], found.get('coords'))
  np.testing.assert_allclose(output.logits, found['logits'], **CLOSE)
  if 'attention' in found:
    np.testing.assert_allclose(
      output.attention[:n], found['attention'], **CLOSE
    )
  if 'cls_attention' in found:
    row = output.extras['cls_attention'][:n]
    np.testing.assert_allclose(row, found['cls_attention'], **CLOSE)
  if name.startswith('clam'):
    losses = output.aux_by_class['instance']
    np.testing.assert_allclose(losses, found['instance'], **CLOSE)
  if name.startswith('dsmil'):
    best = output.aux_logits['instance'][0][0]
    np.testing.assert_allclose(best, found['instance'], **CLOSE)
  # What init makes is what the key map makes.
  shapes = jax.eval_shape(
    net.init, jax.random.key(0),
    batch_bags([Bag(found['x'], np.ones(n, bool), None if 'coords' not in found
                    else ell_from_grid(found['coords'], connectivity=8))]),
  )['params']  # fmt: skip
  want = jax.tree.map(lambda leaf: leaf.shape, shapes)
  assert want == jax.tree.map(np.shape, model.params)


def test_clam_subtyping_and_wikg_as_its_code_computes():
  weights, found = tiny('clam_mb')
  model = from_torch(weights)
  net = create_model('clam_mb', **model.options, instances=3, subtyping=True)
  output, _ = run(net, model.params, found['x'])
  losses = output.aux_by_class['instance']
  np.testing.assert_allclose(losses, found['subtyping'], **CLOSE)
  weights, found = tiny('wikg')
  model = from_torch(weights)
  net = create_model('wikg', **model.options, neighbours=4)
  output, _ = run(net, model.params, found['x'])
  np.testing.assert_allclose(output.logits, found['compat_logits'], **CLOSE)


@pytest.mark.parametrize('distil', ['afs', 'max', 'max_min'])
def test_dtfd_equals_torch_for_the_same_split(distil, monkeypatch):
  weights, found = tiny('dtfd')
  model = from_torch(nested(weights))
  split = jnp.asarray(found['group'], jnp.int32)

  def fixed(keys, member, groups):
    del keys, groups
    padded = jnp.full(member.shape[1], 3, jnp.int32).at[: len(split)].set(split)
    return jnp.broadcast_to(padded, member.shape[:2])

  monkeypatch.setattr('tmlib.mil.dtfd.pseudo_bags', fixed)
  net = create_model('dtfd', **model.options, groups=3, distil=distil)
  assert isinstance(net, DTFD)
  output, n = run(net, model.params, found['x'])
  np.testing.assert_allclose(output.logits, found[f'logits_{distil}'], **CLOSE)
  tier1 = output.aux_logits['tier1'][0]
  np.testing.assert_allclose(tier1, found['tier1'], **CLOSE)
  np.testing.assert_allclose(output.attention[:n].sum(), 1, rtol=1e-5)


def nested(weights):
  """As DTFD saves it: a dictionary of state dictionaries."""
  out = {}
  for key, value in weights.items():
    part, rest = key.split('.', 1)
    out.setdefault(part, {})[rest] = value
  return out


def test_nystrom_equals_the_package():
  weights, found = tiny('nystrom')
  x = found['x']
  heads, size = 2, x.shape[1]
  qkv = weights['to_qkv.weight'].reshape(3, heads, size // heads, size)
  params = NystromParams(
    qkv.transpose(3, 0, 1, 2),
    weights['to_out.0.weight'].T.reshape(heads, size // heads, size),
    weights['to_out.0.bias'],
    weights['res_conv.weight'][:, 0, :, 0].T,
  )
  # Two rows more than there are tokens.
  padded = np.pad(x, ((0, 2), (0, 0)))
  count = jnp.full(1, len(x), jnp.int32)
  (got,) = nystrom_attention(padded[None], count, params, m=4, shared_norm=True)
  np.testing.assert_allclose(got[: len(x)], found['y'], **CLOSE)


def test_prefixes_and_stray_keys():
  weights, _ = tiny('clam_sb')
  want = from_torch(weights)
  renamed = {
    'module.' + k.replace('attention_net.', 'attention_net.module.'): v
    for k, v in weights.items()
  }
  renamed['module.instance_loss_fn.labels'] = np.arange(2)
  got = from_torch(renamed)
  jax.tree.map(np.testing.assert_array_equal, got.params, want.params)
  assert (got.name, got.options) == (want.name, want.options)
  assert 'instance_loss_fn.labels' in got.ignored
  assert 'attention_net.3.attention_c.bias' in got.ignored
  # CHIEF keeps the scorer and the classifier only.
  bare = {k: v for k, v in weights.items() if 'instance' not in k}
  assert from_torch(bare).name == 'gated_abmil'


@pytest.mark.parametrize(
  'prefix', ['model_state_dict.', 'net.model.', 'state_dict.aggregator.module.']
)
@pytest.mark.parametrize('name', sorted(set(CASES) | {'dtfd'}))
def test_whatever_stands_before_the_names(name, prefix):
  weights, _ = tiny(name)
  want = from_torch(weights)
  wrapped = {f'{prefix}{key}': value for key, value in weights.items()}
  found = from_torch(wrapped | {'epoch': 3, 'optimizer': {'state': {0: 1.0}}})
  assert (found.name, found.options) == (want.name, want.options)
  jax.tree.map(np.testing.assert_array_equal, found.params, want.params)
  assert {'epoch', 'optimizer.state.0'} <= set(found.ignored)


@pytest.mark.parametrize('gated', [True, False])
def test_the_abmil_of_mil_lab(gated):
  weights, _ = tiny('amil')
  want = from_torch(weights)
  scorer = 'attention_net.3.attention_'
  named = {'attention_net.0': 'patch_embed.0', 'classifier': 'classifier'}
  named |= {
    f'{scorer}{a}': f'global_attn.attention_{a}' for a in ('a.0', 'b.0', 'c')
  }
  if not gated:
    del named[f'{scorer}b.0']
    named[f'{scorer}a.0'] = 'global_attn.module.0'
    named[f'{scorer}c'] = 'global_attn.module.3'
  state = {
    f'model.{there}.{part}': weights[f'{here}.{part}']
    for here, there in named.items()
    for part in ('weight', 'bias')
  }
  model = from_torch(state)
  assert model.name == ('gated_abmil' if gated else 'abmil')
  jax.tree.map(
    np.testing.assert_array_equal,
    model.params['attention'],
    {k: want.params['attention'][k] for k in ('v', 'u', 'w')[:: 2 - gated]},
  )
  assert model.options == {
    'in_dim': 6, 'num_classes': 3, 'hidden': 5, 'attention': 4,
  }  # fmt: skip
  state['model.patch_embed.3.weight'] = state['model.patch_embed.0.weight']
  with pytest.raises(ValueError, match='by 2 layers'):
    from_torch(state)


def test_models_fused_with_other_data_are_refused():
  weights, _ = tiny('amil')
  with pytest.raises(ValueError, match='molecular profiles'):
    from_torch(weights | {'fc_omic.0.0.weight': np.ones((2, 2))})


def test_scorers_without_a_gate():
  weights, _ = tiny('clam_sb')
  plain = {k: v for k, v in weights.items() if '.3.' not in k}
  for here, there in (('0', 'attention_a.0'), ('3', 'attention_c')):
    for part in ('weight', 'bias'):
      key = f'attention_net.3.module.{here}.{part}'
      plain[key] = weights[f'attention_net.3.{there}.{part}']
  model = from_torch(plain)
  assert model.name == 'clam_sb'
  assert model.options['gated'] is False
  assert set(model.params['attention']) == {'v', 'w'}


def test_errors():
  with pytest.raises(ValueError, match='no known model has these keys: a; kno'):
    from_torch({'a': np.ones(2)})
  weights, _ = tiny('clam_sb')
  del weights['classifiers.weight']
  with pytest.raises(ValueError, match="has no 'classifiers.weight'; it has"):
    from_torch(weights)


def drawn(seed, n, p):
  """Inputs of the published checkpoints, in [-1, 1)."""
  i = np.arange(n * p, dtype=np.int64)
  x = ((i * 1103515245 + 12345 + seed * 7919) % 2**31) / 2.0**31
  return (x.reshape(n, p) * 2 - 1).astype(np.float32)


@pytest.mark.parametrize(
  ('file', 'prefix', 'seed'),
  [
    ('clam_sb_s_0_checkpoint.pt', 'clam', 1),
    ('dsmil_c16_aggregator.pth', 'dsmil_c16', 2),
    ('dsmil_tcga_aggregator.pth', 'dsmil_tcga', 2),
  ],
)
def test_published_checkpoints_equal_torch(file, prefix, seed):
  path = CHECKPOINTS / file
  if not path.is_file():
    pytest.skip(f'{file} is not beside the checkout')
  model = from_torch(read_pt(path))
  found = {
    key.removeprefix(f'{prefix}_'): value
    for key, value in goldens('torch_checkpoints').items()
    if key.startswith(f'{prefix}_')
  }
  net = create_model(model.name, **model.options)
  output, n = run(net, model.params, drawn(seed, 64, model.options['in_dim']))
  np.testing.assert_allclose(
    output.logits, found['logits'], rtol=1e-5, atol=1e-5
  )
  attention = found['attention'].reshape(n, -1).mean(1)
  np.testing.assert_allclose(output.attention[:n], attention, atol=1e-5)
  if prefix == 'clam':
    losses = output.aux_by_class['instance']
    np.testing.assert_allclose(losses, found['instance'], rtol=1e-5, atol=1e-5)
    assert model.name == 'clam_sb'
    assert model.options['hidden'] == 512
    assert re.search('instance_loss_fn', ' '.join(model.ignored))

"""The compiler's account of a step, for slices that are not there."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tmlib import train
from tmlib.train import aot

D = 128  # a full lane, so that no array is padded


def build(axis_name):
  def init_params(key, batch):
    return {'w': jax.random.normal(key, (D, D)), 'b': jnp.zeros(D)}

  def loss_fn(params, batch, key, step):
    y = jnp.tanh(batch['x'] @ params['w'] + params['b'][None])
    loss = jnp.sum((y - batch['x']) ** 2, -1)
    weight = batch['weight']
    return jnp.sum(loss * weight), weight.sum(), {}

  return train.gradient_method(
    init_params, loss_fn, lambda p, b: {}, optax.adam(1e-3)
  )(axis_name)


def stream(n=8):
  rng = np.random.default_rng(0)
  x = rng.normal(size=(n, D)).astype(np.float32)
  return train.array_data({'x': x}, n, shuffle=False)


def test_collectives_are_read_from_the_text():
  layout = '{1,0:T(8,128)S(1)}'
  hlo = '\n'.join(
    [
      f'%ar = f32[512,512]{layout} all-reduce(%x), channel_id=1',
      f'%two = (f32[8]{{0}}, bf16[4,2]{layout}) all-reduce(%a, %b)',
      f'%ags = (f32[8,16]{layout}, f32[32,16]{layout}) all-gather-start(%p)',
      f'%agd = f32[32,16]{layout} all-gather-done(%all-gather-start)',
      '%cps = (s32[10]{0}, s32[10]{0}, u32[]{:S(2)}, u32[]{:S(2)})'
      ' collective-permute-start(%q)',
      '%cpd = s32[10]{0} collective-permute-done(%collective-permute-start)',
      '%cp = pred[16]{0} collective-permute(%mask)',
      'ROOT %sub = f32[512]{0} subtract(%param, %all-reduce.1)',
    ]
  )
  found = aot.collectives(hlo)
  assert found == {
    'all-reduce': (2, 512 * 512 * 4 + 32 + 16, 512 * 512 * 4),
    'all-gather': (1, 32 * 16 * 4, 32 * 16 * 4),
    'collective-permute': (2, 40 + 16, 40),
  }


def test_a_missing_compiler_says_what_to_install(monkeypatch):
  monkeypatch.delenv('TPU_LIBRARY_PATH', raising=False)
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match=r'tmlib\[aot\]'):
    aot.topology_devices('v5e:2x2')


@pytest.mark.aot
class TestCompile:
  @pytest.fixture(autouse=True)
  def _compiler(self):
    pytest.importorskip('libtpu', reason='libtpu is not installed')

  @pytest.mark.parametrize('topology', ['v5x:2x2', 'v5e:3x3', 'v5e'])
  def test_an_unknown_slice_is_refused(self, topology):
    with pytest.raises(ValueError, match='v5e:16x16'):
      aot.topology_devices(topology)

  def test_a_batch_must_divide(self):
    with pytest.raises(ValueError, match='batch_size 8 .* 256'):
      aot.compile_for(build, stream(), 'v5e:16x16')

  @pytest.mark.parametrize('parallel', ['jit', 'pmap'])
  def test_counts_bytes_and_flops_of_one_chip(self, parallel):
    rows = 1024
    (found,) = aot.compile_for(
      build,
      stream(),
      'v5e:16x16',
      options=train.Options(parallel=parallel),
      batch_size=rows,
    ).values()
    assert (found.chips, found.kind) == (256, 'TPU v5 lite')
    assert found.kernels == 0
    # Parameters and both moments in float32, and a 256th of the batch.
    state = 3 * 4 * (D * D + D)
    share = rows // 256 * (4 * D + 8)
    assert state + share <= found.argument_bytes <= 1.3 * (state + share) + 8192
    # The state is donated, all but scalars.
    assert state <= found.alias_bytes <= found.output_bytes
    # Forward and the weights' gradient: two products of the chip's rows.
    work = 2 * 2 * (rows // 256) * D * D
    assert work <= found.flops <= 2 * work + 40 * state
    # One sum of the gradients, and no gather of the batch.
    assert set(found.collectives) == {'all-reduce'}
    gradient = 4 * (D * D + D)
    sent = found.collectives['all-reduce'].bytes
    assert gradient <= sent <= gradient + 4096
    text = str(found)
    assert 'all-reduce' in text
    assert '256 chips' in text

  def test_a_rule_splits_the_state(self):
    def account(rules):
      options = train.Options(rules=rules)
      (found,) = aot.compile_for(
        build, stream(), 'v5e:2x2', options=options
      ).values()
      return found

    whole, split = account(()), account((('.', 'fsdp:data'),))
    assert split.argument_bytes < 0.5 * whole.argument_bytes
    assert 'all-gather' in split.collectives

  def test_runs_fill_the_mesh(self):
    n, runs = 8, 3
    x = np.zeros((n, D), np.float32)
    data = train.run_data({'x': x}, np.ones((runs, n)), n)
    options = train.Options(mesh=(4, 1, 1))
    (found,) = aot.compile_for(
      build, data, 'v5e:2x2', runs=runs, options=options
    ).values()
    # One run a chip: nothing but the flags of the guard may travel.
    assert sum(c.bytes for c in found.collectives.values()) < 1024

  def test_without_data(self):
    def solver(axis_name):
      def update(state, batch):
        x = state['x'] - 0.1 * state['x']
        return {'x': x}, {'norm': jnp.sum(x**2)}

      init = lambda key, batch: {'x': jax.random.normal(key, (256,))}
      return train.Method(init, update, lambda s, b: {})

    (found,) = aot.compile_for(solver, None, 'v5e:2x2').values()
    assert found.argument_bytes >= 1024

  def test_what_does_not_fit_is_one_error(self):
    def giant(axis_name):
      def update(state, batch):
        return jax.tree.map(lambda x: x + 1, state), {'a': jnp.float32(0)}

      init = lambda key, batch: jnp.zeros((8 << 30,), jnp.float32)
      return train.Method(init, update, lambda s, b: {})

    with pytest.raises(ValueError, match='does not fit'):
      aot.compile_for(giant, None, 'v5e:2x2')

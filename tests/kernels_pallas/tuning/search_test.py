"""Ranking of configurations, by time and by estimates."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import gmm
from kernels_pallas.rectangle_attention import xor_attention
from kernels_pallas.tuning import Profile, autotune, search

X = np.ones((64, 64), np.float32)


def repeated(times):
  """A function that takes long for many `times`, and fails for none."""
  if times < 0:
    return lambda x: x @ jnp.ones((3, 3))
  return lambda x: jax.lax.fori_loop(0, times, lambda _, y: y @ x / 64, x)


def test_a_device_is_timed():
  ranked = autotune(repeated, [3000, 1, -1], (X,), repeats=3)
  assert [x.config for x in ranked] == [1, 3000, -1]
  assert all(x.unit == 'seconds' for x in ranked)
  assert 0 < ranked[0].cost < ranked[1].cost
  assert ranked[2].cost == math.inf
  assert 'TypeError' in ranked[2].reason


def make(block):
  return lambda links, items: xor_attention(
    (links,) * 3, (items,) * 3, block=block
  )


OPERANDS = tuple(
  jax.ShapeDtypeStruct((1, n, 2, 64), jnp.bfloat16) for n in (16, 1024)
)


def test_estimates_rank_without_a_device(monkeypatch):
  told = {
    # Blocks of the 1024 items.
    2: Profile(True, cycles=500),
    4: Profile(True, cycles=900),
    1: Profile(False, reason='vmem is full'),
    8: Profile(True, bundles=7, reason='no model of its DMA'),
  }
  monkeypatch.setattr(search, 'profile', lambda k, chip: told[k.grid[2]])
  ranked = autotune(make, [1024, 128, 256, 512], OPERANDS, chip='v5e')
  assert [(x.config, x.cost, x.unit) for x in ranked] == [
    (512, 500, 'cycles'),
    (256, 900, 'cycles'),
    (128, 7 * 8, 'bundles'),
    (1024, math.inf, 'cycles'),
  ]
  assert ranked[-1].reason == 'vmem is full'


def test_what_has_no_estimate_says_why():
  struct = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
  sizes = np.array([256, 256], np.int32)
  operands = struct(512, 128), struct(2, 128, 128), sizes
  whys = 'depends on data', 'no Pallas kernel'
  for how, why in zip((None, 'xla'), whys, strict=True):
    plain = lambda _, how=how: lambda *x: gmm(*x, implementation=how)
    (nothing,) = autotune(plain, [0], operands, chip='v5e')
    assert nothing.cost == math.inf
    assert why in nothing.reason


@pytest.mark.aot
def test_the_compiler_prefers_blocks_that_are_not_tiny():
  pytest.importorskip('libtpu')
  ranked = autotune(make, [128, 512], OPERANDS, chip='v5e')
  assert [x.config for x in ranked] == [512, 128]
  assert ranked[0].unit == 'cycles'


@pytest.mark.parametrize(
  ('configs', 'options', 'message'),
  [
    ([], {}, 'configs is empty'),
    ([1], {'repeats': 0}, 'repeats=0'),
    ([1], {'chip': 'v9'}, "chip='v9' must be one of"),
    ([1], {'chip': 'H100'}, 'run on one'),
  ],
)
def test_bad_input(configs, options, message):
  with pytest.raises(ValueError, match=message):
    autotune(repeated, configs, (X,), **options)

"""What is read from the compilers' dumps, and what is told without them."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.softmax_attention import Blocks, attention
from kernels_pallas.tuning import CHIPS, find_kernels, profile
from kernels_pallas.tuning.cases import backward
from kernels_pallas.tuning.compile_one import find_estimates
from kernels_pallas.tuning.profiles import (
  occupancy,
  parse_bundles,
  parse_launch,
  parse_ptxas,
  parse_sass,
  parse_utilization,
)

# Cut from real dumps of libtpu 0.0.52 and of CUDA 13.
UTILIZATION = """== CAPACTIY:
MATMUL, MATPUSH, XLU, VALU, VPOP, EUP, VLOAD, VLOAD:FILL, VSTORE, \
VSTORE:SPILL, SALU
    4     4     3     4     2     1     3     3     1     1     2
== UTILIZATION:
0 0 0 0 0 0 1 0 0 0 0
4 0 0 2 0 1 1 0 0 0 2
2 0 3 4 2 1 0 1 1 1 0
0 0 0 2 0 0 0 0 1 1 0
"""
BUNDLES = """= control target key start
LB: loop body
= control target key end

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: bf16[2,4,2048,128]] }
  0x14   :  { %s16219_s29 = smov.u32 0 /* copy for cssa */ }
  0x15 LB: > { %27416 = sst [smem:[#allocation19_spill]] %s16113_s18 }
  0x16   : > { %27417 = sst [smem:[#allocation20_spill]] %s16 }
 0xbc6   : > { %15988 = shalt.err (!%p15985_p12) /*
hlo: attention_forward
 */ }
 0xbd7 PF: > { %s29567_s15 = sld [smem:[#allocatio }
 0xbd8   : >> { %p14183_p6 = pnand %p14190_p7, %p16 }
 0xbe6   :  { %s29575_s27 = sld [smem:[#allocatio }
"""
PTXAS = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'block_gmm' for 'sm_90a'
ptxas info    : Function properties for block_gmm
    0 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 96 registers, used 1 barriers
"""
THUNKS = (
  '001: kCustomKernel [source | sink] block_gmm grid: [72, 2, 1] '
  'threads: [128, 1, 1]  shared_memory: 36864 bytes\n'
)
SASS = """
  /*0a00*/   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8].tnspB, RZ, !UPT ;
  /*0a70*/   HMMA.16816.F32.BF16 R56, R4, R8, R56 ;
  /*0a80*/   MUFU.EX2 R24, R25 ;
  /*0a90*/   MUFU.RCP R24, R25 ;
"""
HLO = """
%k = custom-call(%x), custom_call_target="tpu_custom_call",
%k.1 = custom-call(%x), custom_call_target="tpu_custom_call", backend_config={\
"custom_call_config":{"body":"TUz"},"estimated_cycles":"174965",\
"used_scoped_memory_configs":[{"memory_space":"1","offset":"0","size":"3002368"}]}
%f = fusion(%x), backend_config={"estimated_cycles":"999"}
"""


def test_parsers_on_real_dumps():
  units, spills = parse_utilization(UTILIZATION)
  assert spills == 2
  assert units['MATMUL'] == 6 / 16
  assert units['EUP'] == 2 / 4
  assert parse_bundles(BUNDLES) == 5
  assert parse_ptxas(PTXAS) == {'registers': 96, 'spills': 12}
  assert parse_launch(THUNKS) == {'threads': 128, 'shared': 36864}
  assert parse_launch('nothing') == {}
  assert parse_sass(SASS) == {'tensor': 2, 'exps': 1}
  assert find_estimates(HLO) == {'cycles': 174965, 'vmem': 3002368}
  with pytest.raises(ValueError, match='named no registers'):
    parse_ptxas('fatal')


@pytest.mark.parametrize(
  ('registers', 'shared', 'threads', 'want'),
  [
    # 128 registers: 4 blocks of 128 threads; shared memory: 4 of 57 KiB.
    (128, 0, 128, 4 * 128 / 2048),
    (32, 56 * 1024, 128, 4 * 128 / 2048),
    # 97 registers are given out as 104: 4 blocks of 4 warps.
    (97, 0, 128, 4 * 128 / 2048),
    (32, 0, 32, 32 * 32 / 2048),
  ],
)
def test_occupancy_by_hand(registers, shared, threads, want):
  got = occupancy(CHIPS['H100'], registers, shared, threads)
  assert got == want


def test_kernels_are_those_of_the_platform():
  q = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.bfloat16)
  function = lambda q, k, v: attention(q, k, v, causal=True)
  names = lambda f, chip: [k.name for k in find_kernels(f, (q, q, q), chip)]
  for chip in ('v6e', 'H100'):
    assert names(function, CHIPS[chip]) == ['attention_forward']
    assert names(backward(function), CHIPS[chip]) == [
      'attention_forward',
      'attention_dq',
      'attention_dkv',
    ]
  plain = lambda q, k, v: attention(q, k, v, implementation='xla')
  assert names(plain, CHIPS['v6e']) == []


@pytest.mark.parametrize(
  ('chip', 'package'), [('v5e', 'libtpu'), ('H100', 'jax-cuda13-plugin')]
)
def test_a_missing_compiler_is_named(monkeypatch, chip, package):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ImportError, match=f'{chip}: the package {package} is'):
    profile(None, CHIPS[chip])


@pytest.mark.aot
@pytest.mark.parametrize(
  'name', ['v5e', pytest.param('v4', marks=[pytest.mark.slow])]
)
def test_a_tpu_kernel(name):
  pytest.importorskip('libtpu')
  q = jax.ShapeDtypeStruct((1, 256, 1, 128), jnp.bfloat16)
  function = lambda q, k, v: attention(q, k, v, blocks=Blocks(128, 128))
  (kernel,) = find_kernels(function, (q, q, q), CHIPS[name])
  assert kernel.grid == (1, 1, 2, 2)
  found = profile(kernel, CHIPS[name])
  assert found.compiles, found.reason
  assert found.vmem > 128 * 128 * 2
  assert found.bundles > 100
  assert 0 < found.units['MATMUL'] < 1
  if name == 'v4':
    assert found.cycles is None
    assert 'v4' in found.reason
  else:
    # Four steps at least, and no step that takes a million.
    assert 4 * 100 < found.cycles < 4e6


@pytest.mark.aot
@pytest.mark.slow
def test_a_gpu_kernel():
  pytest.importorskip('jax_cuda13_plugin')
  q = jax.ShapeDtypeStruct((1, 256, 1, 64), jnp.bfloat16)
  (kernel,) = find_kernels(attention, (q, q, q), CHIPS['H100'])
  found = profile(kernel, CHIPS['H100'])
  assert found.compiles, found.reason
  assert found.threads == 128
  assert 0 < found.registers <= 255
  assert found.spills == 0
  assert found.tensor > 0
  assert found.exps > 0


@pytest.mark.aot
def test_what_does_not_compile_is_told():
  pytest.importorskip('libtpu')
  x = jax.ShapeDtypeStruct((8, 128), jnp.float32)

  def body(x, out, space):
    space[:8, :128] = x[...]
    out[...] = space[:8, :128]

  function = pl.pallas_call(
    body,
    out_shape=x,
    # A gigabyte of VMEM.
    scratch_shapes=[pltpu.VMEM((2**14, 2**14), jnp.float32)],
    compiler_params=pltpu.CompilerParams(),
    name='too_large',
  )
  (kernel,) = find_kernels(function, (x,), CHIPS['v4'])
  assert kernel.name == 'too_large'
  found = profile(kernel, CHIPS['v4'])
  assert not found.compiles
  assert 'vmem' in found.reason.lower()

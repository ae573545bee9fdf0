"""Kernels and their gradients compile where `jax_enable_x64` is on."""

import jax
import pytest

from kernels_pallas.tuning.cases import all_cases, backward
from tests.kernels_pallas import gpu_targets, tpu_targets

pytestmark = pytest.mark.aot

OPS = ['attention', 'gmm', 'hstu_attention', 'xor_attention']


def program(op):
  (case,) = [x for x in all_cases() if (x.op, x.shape) == (op, 'tiny')]
  leaves = [(x.shape, x.dtype) for x in case.operands]
  return backward(case.make(None, 'pallas')), leaves


@pytest.mark.parametrize('op', OPS)
def test_tpu(op):
  with jax.enable_x64(True):
    text = tpu_targets.compile_for_tpu('v5e:2x2', *program(op))
  assert 'custom_call_target="tpu_custom_call"' in text


@pytest.mark.parametrize('op', OPS)
def test_gpu(op):
  with jax.enable_x64(True):
    function, leaves = program(op)
    text = gpu_targets.compile_for_gpu('H100', function, *leaves)
  assert '__gpu$xla.gpu.triton' in text

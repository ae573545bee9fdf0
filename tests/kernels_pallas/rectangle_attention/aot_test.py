"""The compilers of real chips take the kernels and their gradients."""

import jax
import jax.numpy as jnp
import pytest

from kernels_pallas import hstu_attention
from kernels_pallas.rectangle_attention.shapes import SHAPES
from tests.kernels_pallas import gpu_targets, tpu_targets

pytestmark = pytest.mark.aot


def hstu(name, dtype, bias):
  """Gradients of q, k, v and the bias, (shape, dtype) of each operand."""
  b, _, n, h, d, v = SHAPES[name]

  def gradients(q, k, v, lengths, bias):
    def loss(q, k, v, bias):
      out = hstu_attention(q, k, v, bias=bias, lengths=lengths)
      return jnp.sum(out.astype(jnp.float32) ** 2)

    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return jax.grad(loss, wanted)(q, k, v, bias)

  leaves = [((b, n, h, d), dtype)] * 2 + [((b, n, h, v), dtype)]
  leaves.append(((b,), jnp.int32))
  if bias:
    return gradients, [*leaves, ((1, h, n, n), jnp.float32)]
  return lambda *args: gradients(*args, None), leaves


# A program, and the kernels in it.
CALLS = {
  'hstu': (hstu('train', 'bfloat16', True), 4),
  'hstu-lifelong': (hstu('lifelong', 'bfloat16', False), 3),
  'hstu-single': (hstu('wide', 'float32', True), 4),
}


def each(chips, quick):
  """All pairs of a chip and a call; those that are not quick are slow."""
  return [
    pytest.param(x, y, marks=[] if (x, y) in quick else [pytest.mark.slow])
    for x in chips
    for y in CALLS
  ]


@pytest.mark.parametrize(
  ('chip', 'call'), each(tpu_targets.CHIPS, [('v5e:2x2', 'hstu')])
)
def test_tpu(chip, call):
  program, kernels = CALLS[call]
  text = tpu_targets.compile_for_tpu(chip, *program)
  assert text.count('custom_call_target="tpu_custom_call"') == kernels


@pytest.mark.parametrize(
  ('chip', 'call'), each(gpu_targets.CHIPS, [('H100', 'hstu')])
)
def test_gpu(chip, call):
  (function, leaves), kernels = CALLS[call]
  text = gpu_targets.compile_for_gpu(
    chip, function, *leaves, spills=call.endswith('single')
  )
  assert text.count('__gpu$xla.gpu.triton') == kernels

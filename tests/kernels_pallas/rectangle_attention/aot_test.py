"""The compilers of real chips take the kernels and their gradients."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas import hstu_attention, xor_attention
from kernels_pallas.rectangle_attention.shapes import SHAPES, RectangleShape
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


def xor(name, dtype, phi, segments=False):
  """Gradients of links and history, (shape, dtype) of each operand."""
  b, count, n, h, d, v = SHAPES[name]

  def gradients(*arrays):
    links, history, (lengths, *ids) = arrays[:3], arrays[3:6], arrays[6:]

    def loss(links, history):
      both = xor_attention(
        links, history, lengths=lengths, segment_ids=ids or None, phi=phi
      )
      return sum(jnp.sum(x.astype(jnp.float32) ** 2) for x in both)

    return jax.grad(loss, (0, 1))(links, history)

  leaves = [
    ((b, tokens, h, dim), dtype) for tokens in (count, n) for dim in (d, d, v)
  ]
  leaves.append(((b,), jnp.int32))
  if segments:
    leaves += [((b, count), jnp.int32), ((b, n), jnp.int32)]
  return gradients, leaves


# A program, and the kernels in it.
CALLS = {
  'xor-silu': (xor('train', 'bfloat16', 'silu'), 2),
  'xor-softmax': (xor('lifelong', 'bfloat16', 'softmax', True), 2),
  'xor-wide': (xor('wide', 'bfloat16', 'softmax'), 2),
  'xor-single': (xor('tiny', 'float32', 'softmax', True), 2),
  'hstu': (hstu('train', 'bfloat16', True), 4),
  'hstu-ragged': (hstu('train', 'bfloat16', False), 3),
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
  ('chip', 'call'),
  each(tpu_targets.CHIPS, [('v5e:2x2', x) for x in ('xor-silu', 'hstu')]),
)
def test_tpu(chip, call):
  program, kernels = CALLS[call]
  text = tpu_targets.compile_for_tpu(chip, *program)
  assert text.count('custom_call_target="tpu_custom_call"') == kernels


@pytest.mark.parametrize(
  ('chip', 'call'),
  each(gpu_targets.CHIPS, [('H100', x) for x in ('xor-silu', 'hstu')]),
)
def test_gpu(chip, call):
  (function, leaves), kernels = CALLS[call]
  text = gpu_targets.compile_for_gpu(
    chip, function, *leaves, spills=call.endswith('single')
  )
  assert text.count('__gpu$xla.gpu.triton') == kernels


@pytest.mark.slow
@pytest.mark.parametrize('chip', tpu_targets.CHIPS)
@pytest.mark.parametrize('size', [(128, 2, 256), (128, 8, 32)])
def test_the_largest_that_is_promised_fits(chip, size, monkeypatch):
  count, heads, dim = size
  shape = RectangleShape(2, count, 1000, heads, dim, dim)
  monkeypatch.setitem(SHAPES, 'largest', shape)
  program = xor('largest', 'float32', 'softmax', True)
  text = tpu_targets.compile_for_tpu(chip, *program)
  assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.slow
@pytest.mark.parametrize('runs', [False, True])
@pytest.mark.parametrize('call', ['xor-silu', 'hstu-ragged'])
def test_a_slice_gathers_nothing(call, runs):
  (function, leaves), kernels = CALLS[call]
  if runs:
    function = jax.vmap(function, spmd_axis_name='run')
    leaves = [((2, *shape), dtype) for shape, dtype in leaves]
  text = tpu_targets.compile_for_tpu(
    'v5e:2x2',
    function,
    leaves,
    P('run', 'data') if runs else P('data'),
    (2, 2) if runs else (1, 4),
  )
  assert text.count('custom_call_target="tpu_custom_call"') == kernels
  assert 'all-gather' not in text

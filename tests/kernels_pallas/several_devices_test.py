"""Kernels in programs over several devices, by the real compilers.

A compiler can not divide a kernel. For TPUs it says so; for GPUs it gathers all
operands on each device in silence, and only the compiled program tells.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas import (
  attention,
  diffuse,
  hstu_attention,
  segment_pool,
  xor_attention,
)
from kernels_pallas.graph import PatchGraph
from kernels_pallas.grouped_matmul import gmm
from tests.kernels_pallas import gpu_targets, tpu_targets

B = 4


def tokens(count):
  return [((B, count, 4, 64), jnp.bfloat16)] * 3


def graphs(nodes, features):
  edges = (B, nodes, 8)
  return [
    (edges, jnp.int32),
    (edges, jnp.bool_),
    (edges, jnp.int32),
    (edges, jnp.float32),
    ((B, nodes, features), jnp.float32),
  ]


def xor(*x):
  return jnp.concatenate(xor_attention(x[:3], x[3:]), 1)


def pool(values, scores, ids):
  return segment_pool(values, scores, ids, 16)


def step(nbr, emask, rev, w, x):
  return diffuse(PatchGraph(nbr, emask, rev), w, w, 0.3, 0.2, x)


def experts(lhs, rhs, sizes):
  """Each device has rows, and groups, of its own."""
  return jax.vmap(gmm)(lhs, rhs, sizes)


# A function of arrays that are divided along their first axis, their shapes,
# and the kernels of value and gradients.
OPS = {
  'attention': (
    functools.partial(attention, causal=True),
    tokens(256),
    3,
  ),
  'hstu': (hstu_attention, tokens(256), 3),
  'xor': (xor, tokens(16) + tokens(512), 2),
  'pool': (
    pool,
    [
      ((B, 2048, 256), jnp.bfloat16),
      ((B, 2048), jnp.float32),
      ((B, 2048), jnp.int32),
    ],
    2,
  ),
  'diffuse': (step, graphs(1024, 128), 3),
  'gmm': (
    experts,
    [
      ((B, 1024, 128), jnp.bfloat16),
      ((B, 4, 128, 256), jnp.bfloat16),
      ((B, 4), jnp.int32),
    ],
    3,
  ),
}


def gradients(function, *operands):
  """Of all operands that are floats."""
  floats = [
    n for n, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)
  ]

  def loss(*values):
    given = list(operands)
    for n, value in zip(floats, values, strict=True):
      given[n] = value
    return jnp.sum(function(*given).astype(jnp.float32) ** 2)

  values = [operands[n] for n in floats]
  return jax.grad(loss, range(len(values)))(*values)


def program(op, mode):
  """(function, shapes, how they lie, devices on 'run' and 'data')."""
  function, leaves, _ = OPS[op]
  function = functools.partial(gradients, function)
  if mode == 'runs':
    leaves = [((2, *shape), dtype) for shape, dtype in leaves]
    many = jax.vmap(function, spmd_axis_name='run')
    return many, leaves, P('run'), (2, 1)
  if mode == 'per device':
    function = jax.shard_map(
      function, in_specs=P('data'), out_specs=P('data'), check_vma=False
    )
  return function, leaves, P('data'), (1, 2)


QUICK = [('attention', 'jit'), ('xor', 'per device'), ('pool', 'runs')]
CALLS = [
  pytest.param(
    op, mode, marks=[] if (op, mode) in QUICK else [pytest.mark.slow]
  )
  for op in OPS
  for mode in ('jit', 'per device', 'runs')
  # Rows of a group that devices share can not be divided.
  if (op, mode) != ('gmm', 'jit')
]


@pytest.mark.aot
@pytest.mark.parametrize(('op', 'mode'), CALLS)
def test_two_gpus_gather_nothing(op, mode):
  function, leaves, spec, devices = program(op, mode)
  text = gpu_targets.compile_for_gpu(
    'H100', function, *leaves, spec=spec, devices=devices
  )
  assert text.count('__gpu$xla.gpu.triton') == OPS[op][2]
  assert 'all-gather' not in text
  # And two devices there are: each has half of the first operand.
  first, *_ = (shape for shape, _ in leaves)
  half = ','.join(map(str, (first[0] // 2, *first[1:])))
  assert f'[{half}]' in text[: text.index('\n')]


@pytest.mark.aot
@pytest.mark.slow
def test_a_bare_kernel_is_gathered_on_two_gpus(monkeypatch):
  # What the wrapper is for, and that the test above would see it.
  from kernels_pallas.softmax_attention import vjp

  monkeypatch.setattr(vjp, 'find_split', lambda *_: None)
  function, leaves, spec, devices = program('attention', 'jit')
  text = gpu_targets.compile_for_gpu(
    'A100', function, *leaves, spec=spec, devices=devices
  )
  assert 'all-gather' in text


@pytest.mark.aot
@pytest.mark.parametrize(
  'mode', ['jit', pytest.param('per device', marks=pytest.mark.slow)]
)
def test_products_on_a_slice(mode):
  function, leaves, _ = OPS['gmm']
  leaves = [(shape[1:], dtype) for shape, dtype in leaves]
  function = functools.partial(gradients, gmm)
  if mode == 'per device':
    function = jax.shard_map(
      function, in_specs=P(), out_specs=P(), check_vma=False
    )
  text = tpu_targets.compile_for_tpu('v5e:2x2', function, leaves, P(), (1, 4))
  assert text.count('custom_call_target="tpu_custom_call"') == 3
  assert 'all-gather' not in text

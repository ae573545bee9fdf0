"""The compilers of real chips take the kernels and their gradients.

For pages, of a program that insists on Pallas, on a machine without it.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from kernels_pallas.softmax_attention import Rope, Spans, attention
from kernels_pallas.softmax_attention.shapes import SHAPES
from tests.kernels_pallas import gpu_targets, tpu_targets

pytestmark = pytest.mark.aot

# Shape, dtype, options that are known, arrays that are not.
CALLS = {
  'causal': ('prefill', 'bfloat16', {'causal': True}, []),
  'rotated': ('prefill', 'bfloat16', {'causal': True, 'rope': Rope()}, []),
  'everything': (
    'chunk',
    'bfloat16',
    {'causal': True, 'window': 4096, 'rope': Rope()},
    ['query_offset', 'lengths', 'segment_ids', 'spans', 'key_bias'],
  ),
  'slide': ('slide', 'bfloat16', {}, ['segment_ids']),
  'single': ('wide', 'float32', {'rope': Rope(interleaved=True)}, ['key_bias']),
  'decode': ('decode', 'bfloat16', {}, ['lengths']),
}


def program(call):
  """Gradients of all operands, and the (shape, dtype) of each."""
  name, dtype, fixed, names = CALLS[call]
  b, t, s, h, g, d, v = SHAPES[name]
  of_query, of_key = ((b, t), jnp.int32), ((b, s), jnp.int32)
  made = {
    'query_offset': ((b,), jnp.int32),
    'lengths': ((b,), jnp.int32),
    'segment_ids': (of_query, of_key),
    'spans': (of_query, of_key, ((b, t), jnp.bool_)),
    'key_bias': ((b, s), jnp.float32),
  }
  options = {name: made[name] for name in names}
  if 'rope' in fixed:
    options |= {'positions': of_query, 'key_positions': of_key}
  options['key_bias'] = made['key_bias'] if 'key_bias' in names else None
  operands = [
    ((b, t, h, d), dtype),
    ((b, s, g, d), dtype),
    ((b, s, g, v), dtype),
  ]
  is_shape = lambda x: (
    isinstance(x, tuple)
    and isinstance(x[0], tuple)
    and (not isinstance(x[0][0], tuple))
  )
  leaves, tree = jax.tree.flatten((operands, options), is_leaf=is_shape)

  def gradients(*arrays):
    (q, k, v), options = jax.tree.unflatten(tree, arrays)
    bias = options.pop('key_bias')
    if 'spans' in options:
      options['spans'] = Spans(*options['spans'])

    def loss(q, k, v, bias):
      out, lse = attention(
        q, k, v, key_bias=bias, return_lse=True, **options, **fixed
      )
      return jnp.sum(out.astype(jnp.float32) ** 2) + jnp.sum(lse)

    wanted = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    return jax.grad(loss, wanted)(q, k, v, bias)

  return gradients, leaves


def each(chips, quick, calls=CALLS):
  """All pairs of a chip and a call; those that are not quick are slow."""
  return [
    pytest.param(x, y, marks=[] if (x, y) in quick else [pytest.mark.slow])
    for x in chips
    for y in calls
  ]


@pytest.mark.parametrize(
  ('chip', 'call'),
  each(tpu_targets.CHIPS, [('v5e:2x2', 'everything'), ('v4:2x2x1', 'decode')]),
)
def test_tpu(chip, call):
  text = tpu_targets.compile_for_tpu(chip, *program(call))
  assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.parametrize(
  ('chip', 'call'),
  each(gpu_targets.CHIPS, [(chip, 'causal') for chip in gpu_targets.CHIPS]),
)
def test_gpu(chip, call):
  function, leaves = program(call)
  # Heads of 256 features in single precision do not fit into registers.
  text = gpu_targets.compile_for_gpu(
    chip, function, *leaves, spills=call == 'single'
  )
  assert text.count('__gpu$xla.gpu.triton') == 3


# Sequences, queries, keys, page, dtype, whether keys are rotated.
PAGED = {
  'decode': (8, 1, 4096, 64, 'bfloat16', False),
  'short pages': (8, 1, 4096, 16, 'bfloat16', True),
  'prefill': (2, 512, 8192, 128, 'bfloat16', True),
  'single': (2, 100, 1000, 40, 'float32', False),
}


def paged(call):
  """Attention to pages of a pool that is four times as large as needed."""
  b, t, s, page, dtype, turn = PAGED[call]
  pool = (4 * b * s // page, page, 2, 128), dtype
  whole = (b, s // page), (b,), (b,), (b, t), (b, s)
  leaves = [((b, t, 8, 128), dtype), pool, pool]
  leaves += [(shape, jnp.int32) for shape in whole]

  def function(q, k, v, table, lengths, offset, *positions):
    rotated = dict(zip(('positions', 'key_positions'), positions, strict=True))
    return attention(
      q,
      k,
      v,
      block_table=table,
      lengths=lengths,
      causal=True,
      query_offset=offset,
      implementation='pallas',
      **(rotated | {'rope': Rope()} if turn else {}),
    )

  return function, leaves


def check_pages(text):
  """No copy of the pages outside of the kernel."""
  assert ' gather(' not in text
  assert 'dynamic-slice' not in text


@pytest.mark.parametrize(
  ('chip', 'call'),
  each(
    tpu_targets.CHIPS,
    [('v6e:2x2', 'short pages'), ('v4:2x2x1', 'single')],
    PAGED,
  ),
)
def test_pages_on_tpu(chip, call):
  text = tpu_targets.compile_for_tpu(chip, *paged(call))
  assert text.count('custom_call_target="tpu_custom_call"') == 1
  check_pages(text)


@pytest.mark.parametrize(
  ('chip', 'call'),
  each(gpu_targets.CHIPS, [('A100', 'single'), ('H100', 'prefill')], PAGED),
)
def test_pages_on_gpu(chip, call):
  function, leaves = paged(call)
  text = gpu_targets.compile_for_gpu(chip, function, *leaves)
  assert text.count('__gpu$xla.gpu.triton') == 1
  check_pages(text)


@pytest.mark.parametrize('runs', [False, True])
def test_a_slice_gathers_nothing(runs):
  function, leaves = program('decode')
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
  assert text.count('custom_call_target="tpu_custom_call"') == 3
  assert 'all-gather' not in text

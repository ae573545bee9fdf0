"""Attention against loops in float64, values and gradients, on every path."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import attention
from kernels_pallas.softmax_attention import Blocks, Rope, tiles
from kernels_pallas.softmax_attention.options import rope_table
from tests.kernels_pallas.softmax_attention import problems

CASES = {
  'plain': ['scale'],
  'causal': ['causal', 'lengths'],
  'window': ['window', 'segments', 'interleaved'],
  'offset': ['offset', 'window', 'bias', 'rope'],
  'spans': ['causal', 'spans', 'rope', 'bias', 'lengths'],
  'diagonal': ['causal', 'rope'],
  'shifted': ['causal', 'rope', 'lengths'],
  'packed': ['causal', 'bias', 'packed'],
}
SHAPES = {
  'plain': problems.Shape(1, 1, 50, heads=3),
  'causal': problems.Shape(heads=4, groups=2),
  'window': problems.Shape(queries=290),
  'offset': problems.Shape(values=48),
  'spans': problems.Shape(groups=2),
  # Tiles of 384 queries and keys, whose queries are cut into 256 and 128.
  'diagonal': problems.Shape(1, 700, 700),
  # Tiles of keys before the diagonal, and on it.
  'shifted': problems.Shape(2, 250, 506, heads=2, groups=2),
  'packed': problems.Shape(1, 700, 700),
}
# Several tiles in either direction, none of which fits.
BLOCKS = {
  'xla': Blocks(64, 96),
  'interpret': Blocks(128, 128),
  'interpret_gpu': Blocks(32, 64),
}
LARGE = ['diagonal', 'shifted', 'packed']
QUICK = [('xla', case) for case in CASES if case not in LARGE]
QUICK += [(path, 'spans') for path in ('interpret', 'interpret_gpu')]
QUICK += [('interpret', 'packed'), ('interpret', 'shifted')]
SLOW = [(p, c) for p in BLOCKS for c in CASES if (p, c) not in QUICK]


def derive(q, k, v, options, cotangents, **how):
  """(out, lse) and the gradients of q, k, v and the bias, in one program."""
  known = {name: x for name, x in options.items() if np.isscalar(x)}
  known |= {name: x for name, x in options.items() if isinstance(x, Rope)}
  arrays = {name: x for name, x in options.items() if name not in known}

  @jax.jit
  def run(q, k, v, arrays, cotangents):
    bias = arrays.get('key_bias')

    def function(q, k, v, bias):
      given = arrays if bias is None else arrays | {'key_bias': bias}
      return attention(q, k, v, return_lse=True, **given, **known, **how)

    (out, lse), vjp = jax.vjp(function, q, k, v, bias)
    of_out, of_lse = cotangents
    of_lse = jnp.where(lse > -jnp.inf, of_lse.astype(lse.dtype), 0)
    found = vjp((of_out.astype(out.dtype), of_lse))
    return out, lse, *(g for g in found if g is not None)

  return run(q, k, v, arrays, cotangents)


def cotangents(shape, seed=5):
  rng = np.random.default_rng(seed)
  b, t, _, h, _, _, v = shape
  return rng.normal(size=(b, t, h, v)), rng.normal(size=(b, t, h))


@functools.cache
def truth(shape, names, seed=0, dtype='float64'):
  """All of `derive` by the reference in float64, of rounded operands."""
  rounded = problems.operands(shape, seed)
  if dtype != 'float64':
    rounded = [np.asarray(jnp.asarray(x, dtype), float) for x in rounded]
  options = problems.draw(shape, names, seed)
  with jax.enable_x64(True):
    out = derive(
      *rounded, options, cotangents(shape), implementation='reference'
    )
    return [np.asarray(x) for x in out]


def answer(path, shape, names, seed=0, dtype='float32'):
  q, k, v = (jnp.asarray(x, dtype) for x in problems.operands(shape, seed))
  options = problems.draw(shape, names, seed)
  blocks = BLOCKS[path]
  if shape == SHAPES['packed'] and path == 'interpret':
    blocks = Blocks(384, 384)
  how = {'implementation': path, 'blocks': blocks}
  return derive(q, k, v, options, cotangents(shape), **how)


def close(got, want, tolerance):
  """Within a fraction of the largest entry; infinities in the same places."""
  assert len(got) == len(want)
  for a, b in zip(got, want, strict=True):
    a, finite = np.asarray(a, float), np.isfinite(b)
    assert a.shape == b.shape
    np.testing.assert_array_equal(a[~finite], b[~finite])
    bound = tolerance * max(1.0, np.abs(b[finite]).max(initial=0))
    np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=bound)


@pytest.mark.parametrize('case', [x for x in CASES if x not in LARGE])
def test_the_reference_equals_loops(case):
  shape, names = SHAPES[case], tuple(CASES[case])
  options = problems.draw(shape, names)
  want = problems.brute_force(*problems.operands(shape), options)
  close(truth(shape, names)[:2], want, 1e-12)
  if case in ('causal', 'spans'):
    assert np.isneginf(want[1]).any()


@pytest.mark.parametrize(
  ('path', 'case'),
  QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW],
)
def test_values_and_gradients(path, case):
  shape, names = SHAPES[case], tuple(CASES[case])
  close(answer(path, shape, names), truth(shape, names), 1e-5)


@pytest.mark.parametrize(
  'path',
  [
    'xla',
    *(pytest.param(x, marks=pytest.mark.slow) for x in BLOCKS if x != 'xla'),
  ],
)
def test_tiles_of_other_segments_are_not_computed(path):
  """NaN in their keys and values would enter as 0 x NaN."""
  shape = problems.Shape(1, 512, 512)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  segments = np.repeat(np.array([3, 5], np.int32), 256)[None]
  k, v = (x.at[:, 256:].set(jnp.nan) for x in (k, v))
  options = {'segment_ids': segments}
  how = {'implementation': path, 'blocks': Blocks(128, 128)}
  out, lse, *gradients = derive(q, k, v, options, cotangents(shape), **how)
  want, *_ = problems.brute_force(
    *(np.asarray(x, float)[:, :256] for x in (q, k, v)), {}
  )
  np.testing.assert_allclose(out[:, :256], want, atol=1e-5)
  for x in (lse, *gradients):
    assert np.isfinite(x[:, :256]).all()


def test_blocks_that_may_share_a_segment():
  ids = np.array([[0, 0, 1, 1, 7, 2, 5], [4, 4, 4, 4, 4, 4, 4]], np.int32)
  ranges = tiles.segment_ranges(jnp.asarray(ids), 2, 4)
  np.testing.assert_array_equal(ranges[0], [[0, 1, 2, 5], [0, 1, 7, 5]])
  others = jnp.array([[[0, 6, 9], [0, 8, 9]], [[0, 1, 2], [0, 1, 2]]])
  first, end = np.moveaxis(tiles.segment_blocks(ranges, others), 1, 0)
  np.testing.assert_array_equal(first, [[0, 3, 1, 3], [3] * 4])
  np.testing.assert_array_equal(end, [[1, 0, 2, 0], [0] * 4])


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
@pytest.mark.parametrize('case', ['causal', 'spans', 'shifted'])
def test_half_precision(path, case):
  shape, names = SHAPES[case], tuple(CASES[case])
  want = truth(shape, names, dtype='bfloat16')
  got = answer(path, shape, names, dtype='bfloat16')
  assert got[0].dtype == got[2].dtype == jnp.bfloat16
  close(got, want, 2e-2)


@st.composite
def drawn(draw):
  groups = draw(st.integers(1, 2))
  shape = problems.Shape(
    batch=draw(st.integers(1, 2)),
    queries=draw(st.sampled_from([1, 2, 17, 129, 150])),
    keys=draw(st.sampled_from([1, 3, 31, 130, 255])),
    heads=groups * draw(st.integers(1, 3)),
    groups=groups,
    dim=draw(st.sampled_from([32, 64, 80, 96, 160])),
    values=draw(st.sampled_from([32, 48, 128, 256])),
  )
  options = st.sampled_from(
    ['lengths', 'segments', 'bias', 'spans', 'window', 'rope', 'interleaved']
  )
  names = draw(st.sets(options, max_size=4))
  names |= draw(st.sampled_from([set(), {'causal'}, {'offset'}]))
  return shape, tuple(sorted(names)), draw(st.integers(0, 9))


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
@settings(max_examples=12, deadline=None)
@given(drawn())
def test_any_shape_and_options(path, case):
  shape, names, seed = case
  got = answer(path, shape, names, seed)
  close(got, truth(shape, names, seed), 1e-5)


def test_angles_of_far_positions():
  positions = np.array([[0, 1, 31_337, 1_000_003, 16_000_001]], np.int32)
  table = rope_table(jnp.asarray(positions), 64, 1e4, np.dtype('float32'))
  angles = positions[..., None] * 1e4 ** (-np.arange(0, 64, 2) / 64)
  want = np.concatenate([np.cos(angles), np.sin(angles)], -1)
  np.testing.assert_allclose(table, want, atol=1e-6)


def test_memory_does_not_grow_with_the_square():
  """The backward pass included; one head's logits alone would take 17 GB."""
  queries = 65_536
  struct = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.float32)
  loss = lambda q, k, v: attention(q, k, v, causal=True).sum()
  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(struct, struct, struct)
  memory = compiled.compile().memory_analysis()
  # Copies in blocks of q, k, v, out, g and their gradients, and a few tiles.
  assert memory.temp_size_in_bytes < 16 * queries * 2 * 64 * 4 + 2**24


def test_nothing_to_attend_to():
  q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
  out, lse = attention(q, k, k, return_lse=True)
  assert out.shape == (1, 3, 2, 8)
  assert lse.shape == (1, 3, 2)
  assert not out.any()
  assert np.isneginf(lse).all()


def test_sums_alone():
  rng = np.random.default_rng(0)
  q, k = (jnp.asarray(rng.normal(size=(1, 5, 2, 8)), jnp.float32) for _ in 'qk')
  none = jnp.zeros((1, 5, 2, 0))
  _, want = attention(q, k, k, return_lse=True)
  out, lse = attention(q, k, none, return_lse=True)
  assert out.shape == (1, 5, 2, 0)
  np.testing.assert_array_equal(lse, want)


def test_bad_input_is_named():
  q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))
  v = jnp.ones((2, 7, 2, 6))
  ids = np.zeros((2, 5), int), np.zeros((2, 7), int)
  turn = {'rope': Rope(), 'positions': ids[0], 'key_positions': ids[1]}
  cases = [
    (ValueError, 'q has shape', (q[0], k, v), {}),
    (ValueError, 'q has 4 heads', (q, k[:, :, [0] * 3], v[:, :, [0] * 3]), {}),
    (ValueError, 'agree in keys and heads', (q, k, v[:, :6]), {}),
    (ValueError, 'only v may differ', (q, k[..., :7], v), {}),
    (ValueError, '2, 1, 1 sequences', (q, k[:1], v[:1]), {}),
    (TypeError, 'cast one', (q, k.astype(jnp.bfloat16), v), {}),
    (TypeError, 'q has dtype int32', (ids[0].reshape(2, 5, 1, 1), k, v), {}),
    (ValueError, 'must be one of', (q, k, v), {'implementation': 'triton'}),
    (ValueError, 'no CPU body', (q, k, v), {'implementation': 'pallas'}),
    (ValueError, 'must be finite', (q, k, v), {'scale': float('nan')}),
    (ValueError, 'at least 1', (q, k, v), {'window': 0}),
    (ValueError, 'pass a pair', (q, k, v), {'segment_ids': ids[0]}),
    (ValueError, 'k has 7 keys', (q, k, v), {'lengths': np.array([1, 8])}),
    (ValueError, 'holds -1', (q, k, v), {'lengths': np.array([-1, 2])}),
    (ValueError, 'query_offset has shape', (q, k, v), {'query_offset': ids[0]}),
    (
      ValueError,
      'one number per key',
      (q, k, v),
      {'key_bias': np.ones((2, 5))},
    ),
    (TypeError, 'for a mask', (q, k, v), {'key_bias': ids[1] == 0}),
    (ValueError, 'rope needs positions', (q, k, v), {'rope': Rope()}),
    (ValueError, 'without rope', (q, k, v), {'positions': ids[0]}),
    (ValueError, 'pairs of features', (q[..., :7], k[..., :7], v), turn),
    (ValueError, 'holds -3', (q, k, v), turn | {'positions': ids[0] - 3}),
    (ValueError, 'theta=-1', (q, k, v), turn | {'rope': Rope(-1.0)}),
    (ValueError, 'multiples of 16', (q, k, v), {'blocks': Blocks(8, 16)}),
    (TypeError, 'rope=True is no Rope', (q, k, v), {'rope': True}),
    (TypeError, 'expected a Spans', (q, k, v), {'spans': ids}),
  ]
  for error, message, arrays, options in cases:
    with pytest.raises(error, match=message):
      attention(*arrays, **options)
  wide = jnp.ones((1, 2, 1, 300))
  with pytest.raises(ValueError, match='300 features has more than 256'):
    attention(wide, wide, wide, implementation='interpret')

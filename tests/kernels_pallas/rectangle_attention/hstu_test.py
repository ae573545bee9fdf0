"""HSTU's attention against loops in float64, values and gradients."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import hstu_attention
from kernels_pallas.softmax_attention import Blocks
from tests.kernels_pallas.softmax_attention import problems
from tests.kernels_pallas.softmax_attention.attention_test import close

# Several tiles in either direction, none of which fits.
BLOCKS = {
  'xla': Blocks(64, 96),
  'interpret': Blocks(128, 128),
  'interpret_gpu': Blocks(32, 64),
}
# Options, and the sequences and heads of the bias.
CASES = {
  'plain': ([], None),
  'lengths': (['causal', 'lengths'], None),
  'window': (['causal', 'window', 'segments'], (1, 1)),
  'offset': (['offset', 'lengths', 'segments'], (1, 2)),
  'bias': (['causal'], (2, 2)),
  'shared': (['causal'], (2, 1)),
}
SHAPE = problems.Shape(groups=2, values=48)
QUICK = [('xla', 'window'), ('xla', 'shared')]
QUICK += [('interpret', 'offset'), ('interpret_gpu', 'offset')]
SLOW = [(p, c) for p in BLOCKS for c in CASES if (p, c) not in QUICK]


def draw(shape, case, seed=0):
  """Options of a call, known and not, and the bias."""
  names, sizes = CASES[case] if isinstance(case, str) else case
  options = problems.draw(shape, names, seed)
  options.setdefault('causal', False)
  rng = np.random.default_rng(seed + 7)
  if sizes is None:
    return options, None
  size = (*sizes, shape.queries, shape.keys)
  hidden = rng.random(size) < 0.1
  return options, np.where(hidden, -np.inf, rng.normal(size=size))


def brute_force(q, k, v, options, bias):
  """One query at a time."""
  batch, queries, heads, dim = q.shape
  share = heads // k.shape[2]
  out = np.zeros((batch, queries, heads, v.shape[3]))
  for b, t, s in np.ndindex(batch, queries, k.shape[1]):
    for h in range(heads if problems.sees(b, t, s, options) else 0):
      x = k[b, s, h // share] @ q[b, t, h] / math.sqrt(dim)
      if bias is not None:
        x += bias[b % len(bias), h % bias.shape[1], t, s]
      weight = 0.0 if np.isneginf(x) else x / (1 + math.exp(-x))
      out[b, t, h] += weight * v[b, s, h // share] / k.shape[1]
  return out


def derive(operands, options, bias, cotangent, **how):
  """The values and the gradients of all that has one, in one program."""
  known = {name: x for name, x in options.items() if np.isscalar(x)}
  arrays = {name: x for name, x in options.items() if name not in known}

  @jax.jit
  def run(q, k, v, bias, arrays, cotangent):
    function = lambda q, k, v, bias: hstu_attention(
      q, k, v, bias=bias, **arrays, **known, **how
    )
    out, vjp = jax.vjp(function, q, k, v, bias)
    found = vjp(cotangent.astype(out.dtype))
    return out, *(g for g in found if g is not None)

  return run(*operands, bias, arrays, cotangent)


def cotangent(shape):
  size = shape.batch, shape.queries, shape.heads, shape.values
  # As large as the values of a sum over S.
  return shape.keys * np.random.default_rng(5).normal(size=size)


@functools.cache
def truth(shape, case, seed=0, dtype='float64'):
  operands = problems.operands(shape, seed)
  if dtype != 'float64':
    operands = [np.asarray(jnp.asarray(x, dtype), float) for x in operands]
  options, bias = draw(shape, case, seed)
  with jax.enable_x64(True):
    found = derive(
      operands, options, bias, cotangent(shape), implementation='reference'
    )
    return [np.asarray(x) for x in found]


def answer(path, shape, case, seed=0, dtype='float32'):
  operands = [jnp.asarray(x, dtype) for x in problems.operands(shape, seed)]
  options, bias = draw(shape, case, seed)
  bias = None if bias is None else jnp.asarray(bias, jnp.float32)
  how = {'implementation': path, 'blocks': BLOCKS[path]}
  return derive(operands, options, bias, cotangent(shape), **how)


@pytest.mark.parametrize('case', CASES)
def test_the_reference_equals_loops(case):
  shape = problems.Shape(2, 19, 23, groups=2, dim=8, values=4)
  options, bias = draw(shape, case)
  want = brute_force(*problems.operands(shape), options, bias)
  close(truth(shape, case)[:1], [want], 1e-12)


@pytest.mark.parametrize(
  ('path', 'case'),
  QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW],
)
def test_values_and_gradients(path, case):
  close(answer(path, SHAPE, case), truth(SHAPE, case), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
def test_half_precision(path):
  want = truth(SHAPE, 'offset', dtype='bfloat16')
  got = answer(path, SHAPE, 'offset', dtype='bfloat16')
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
    dim=draw(st.sampled_from([32, 64, 80, 160])),
    values=draw(st.sampled_from([32, 48, 128])),
  )
  names = draw(st.sets(st.sampled_from(['lengths', 'segments', 'window'])))
  names |= draw(st.sampled_from([set(), {'causal'}, {'offset'}]))
  ones = draw(st.tuples(st.booleans(), st.booleans()))
  sizes = tuple(
    1 if one else size
    for one, size in zip(ones, (shape.batch, shape.heads), strict=True)
  )
  sizes = draw(st.sampled_from([None, sizes]))
  return shape, (tuple(sorted(names)), sizes), draw(st.integers(0, 9))


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
@settings(max_examples=8, deadline=None)
@given(drawn())
def test_any_shape_and_options(path, case):
  shape, options, seed = case
  close(answer(path, shape, options, seed), truth(shape, options, seed), 1e-5)


def test_a_norm_per_sequence():
  shape = problems.Shape(2, 5, 7, dim=8, values=4)
  operands = [jnp.asarray(x, jnp.float32) for x in problems.operands(shape)]
  lengths = np.array([7, 3], np.int32)

  @jax.jit
  def values_and_slope(norm):
    call = lambda n: hstu_attention(
      *operands, causal=False, lengths=lengths, norm=n, implementation='xla'
    )
    return call(norm), jax.jacobian(call)(norm)

  want, _ = values_and_slope(jnp.ones(2))
  got, slope = values_and_slope(jnp.asarray(lengths, jnp.float32))
  n = lengths[:, None, None, None]
  np.testing.assert_allclose(got, want / n, atol=1e-6)
  own = np.stack([slope[b, ..., b] for b in range(2)])
  np.testing.assert_allclose(own, -want / n**2, atol=1e-6)


def test_memory_does_not_grow_with_the_square():
  queries = 65_536
  struct = jax.ShapeDtypeStruct((1, queries, 2, 64), jnp.float32)
  loss = lambda q, k, v: hstu_attention(q, k, v).sum()
  compiled = jax.jit(jax.grad(loss, (0, 1, 2))).lower(struct, struct, struct)
  memory = compiled.compile().memory_analysis()
  assert memory.temp_size_in_bytes < 16 * queries * 2 * 64 * 4 + 2**24


@pytest.mark.parametrize('path', ['xla', 'interpret_gpu'])
def test_what_lies_beyond_the_end_may_be_anything(path):
  rng = np.random.default_rng(0)
  q, k, v = (
    jnp.asarray(rng.normal(size=(2, 6, 1, 8)), 'float32') for _ in 'qkv'
  )
  lengths = np.array([4, 6])
  beyond = (np.arange(6) >= lengths[:, None])[..., None, None]

  def derive(k, v):
    call = lambda *x: hstu_attention(*x, lengths=lengths, implementation=path)
    out, pull = jax.vjp(jax.jit(call), q, k, v)
    return out, *pull(out)

  want = derive(k, v)
  got = derive(*(jnp.where(beyond, jnp.nan, x) for x in (k, v)))
  for a, b in zip(got, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_nothing_to_attend_to():
  q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
  out = hstu_attention(q, k, k)
  assert out.shape == (1, 3, 2, 8)
  assert not out.any()
  assert hstu_attention(q, q, q[..., :0]).shape == (1, 3, 2, 0)


def test_bad_input_is_named():
  q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 7, 2, 8))
  cases = [
    (ValueError, 'q has shape', (q[0], k, k), {}),
    (ValueError, 'q has 8 features and k has 7', (q, k[..., :7], k), {}),
    (ValueError, 'must be one of', (q, k, k), {'implementation': 'triton'}),
    (ValueError, 'no CPU body', (q, k, k), {'implementation': 'pallas'}),
    (ValueError, 'scale=inf must be finite', (q, k, k), {'scale': np.inf}),
    (ValueError, 'window=0', (q, k, k), {'window': 0}),
    (ValueError, 'multiples of 16', (q, k, k), {'blocks': Blocks(8, 16)}),
    (ValueError, r'Blocks\(query, key\)', (q, k, k), {'blocks': (16, 16)}),
    (ValueError, r'Blocks\(query, key\)', (q, k, k), {'blocks': 16}),
    (ValueError, 'norm holds 0', (q, k, k), {'norm': np.array([1, 0])}),
    (ValueError, 'norm has shape', (q, k, k), {'norm': np.ones(3)}),
    (ValueError, 'lengths holds 8', (q, k, k), {'lengths': np.array([1, 8])}),
    (ValueError, 'heads before queries', (q, k, k), {'bias': np.ones((5, 7))}),
    (TypeError, 'for a mask', (q, k, k), {'bias': np.ones((1, 1, 5, 7), bool)}),
  ]
  for error, message, arrays, options in cases:
    with pytest.raises(error, match=message):
      hstu_attention(*arrays, **options)

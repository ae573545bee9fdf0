"""XOR attention against the masked square of logits in float64."""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import xor_attention
from tests.kernels_pallas.softmax_attention.attention_test import close


class Shape(NamedTuple):
  """Sequences, links, items, heads, features, values."""

  batch: int = 2
  links: int = 5
  items: int = 300
  heads: int = 3
  dim: int = 32
  values: int = 48


# Items of a tile: several tiles, none of which fits.
BLOCKS = {'xla': 64, 'interpret': 128, 'interpret_gpu': 32}
CASES = {
  'silu': ('silu', ()),
  'softmax': ('softmax', ()),
  'silu-masked': ('silu', ('lengths', 'segments')),
  'softmax-masked': ('softmax', ('lengths', 'segments')),
}
QUICK = [('xla', 'silu'), ('xla', 'softmax-masked')]
QUICK += [('interpret', 'softmax-masked'), ('interpret_gpu', 'softmax-masked')]
SLOW = [(p, c) for p in BLOCKS for c in CASES if (p, c) not in QUICK]


def operands(shape, seed=0):
  """Six arrays of links and history, and two cotangents, in float64."""
  rng = np.random.default_rng(seed)
  b, count, n, h, d, v = shape
  size = lambda tokens, dim: rng.normal(size=(b, tokens, h, dim))
  links = size(count, d), size(count, d), size(count, v)
  history = size(n, d), size(n, d), size(n, v)
  # As large as the values of a sum over N.
  return links, history, (size(count, v) * n, size(n, v) * n)


def options(shape, case, seed=0):
  phi, names = CASES[case] if isinstance(case, str) else case
  rng = np.random.default_rng(seed + 1)
  integers = lambda high, *size: rng.integers(0, high, size, np.int32)
  made = {'phi': phi}
  if 'lengths' in names:
    lengths = np.r_[shape.items // 3, integers(shape.items + 1, shape.batch)]
    made['lengths'] = lengths[-shape.batch :].astype(np.int32)
    made['lengths'][-1] = shape.items // 3
  if 'empty' in names:
    made['lengths'] = np.zeros(shape.batch, np.int32)
  if 'segments' in names:
    # Segment 3 has links only, segment 4 items only.
    of_links = integers(4, shape.batch, shape.links)
    of_items = integers(4, shape.batch, shape.items)
    made['segment_ids'] = of_links, np.where(of_items == 3, 4, of_items)
  return made


def square(links, history, phi, lengths=None, segment_ids=None):
  """Attention over links and items with the mask of the definition."""
  q, k, v = (
    np.concatenate(pair, 1) for pair in zip(links, history, strict=True)
  )
  batch, tokens = q.shape[:2]
  count = links[0].shape[1]
  items = tokens - count
  is_link = np.arange(tokens) < count
  mask = np.repeat((is_link[:, None] != is_link)[None], batch, 0)
  if lengths is not None:
    exists = np.arange(tokens) < count + lengths[:, None]
    mask &= exists[:, :, None] & exists[:, None]
  if segment_ids is not None:
    ids = np.concatenate(segment_ids, 1)
    mask &= ids[:, :, None] == ids[:, None]
  x = np.einsum('bthd,bshd->bhts', q, k) / math.sqrt(q.shape[3])
  mask = np.broadcast_to(mask[:, None], x.shape)
  if phi == 'silu':
    weights = np.where(mask, x / (1 + np.exp(-x)), 0) / items
  else:
    weights = np.where(mask, np.exp(x), 0)
    total = weights.sum(-1, keepdims=True)
    weights = weights / np.where(total > 0, total, 1)
  out = np.einsum('bhts,bshv->bthv', weights, v)
  return out[:, :count], out[:, count:]


def derive(links, history, cotangents, given, **how):
  """Both values and the gradients of all six arrays, in one program."""
  phi = given['phi']
  arrays = {name: x for name, x in given.items() if name != 'phi'}

  @jax.jit
  def run(links, history, cotangents, arrays):
    function = lambda *x: xor_attention(*x, phi=phi, **arrays, **how)
    out, vjp = jax.vjp(function, links, history)
    found = vjp(jax.tree.map(lambda g, x: g.astype(x.dtype), cotangents, out))
    return jax.tree.leaves((out, found))

  return run(links, history, cotangents, arrays)


def rounded(tree, dtype):
  return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)


@functools.cache
def truth(shape, case, seed=0, dtype='float64'):
  *arrays, cotangents = operands(shape, seed)
  if dtype != 'float64':
    arrays = jax.tree.map(
      lambda x: np.asarray(x, float), rounded(arrays, dtype)
    )
  given = options(shape, case, seed)
  with jax.enable_x64(True):
    found = derive(*arrays, cotangents, given, implementation='reference')
    return [np.asarray(x) for x in found]


def answer(path, shape, case, seed=0, dtype='float32'):
  *arrays, cotangents = operands(shape, seed)
  how = {'implementation': path, 'block': BLOCKS[path]}
  given = options(shape, case, seed)
  return derive(*rounded(arrays, dtype), cotangents, given, **how)


@pytest.mark.parametrize('case', CASES)
def test_the_reference_equals_the_masked_square(case):
  shape = Shape(2, 6, 23, dim=8, values=4)
  links, history, _ = operands(shape)
  want = square(links, history, **options(shape, case))
  got = truth(shape, case)[:2]
  close(got, want, 1e-12)
  if 'masked' in case:
    assert not got[1][1, shape.items // 3 :].any()


@pytest.mark.parametrize(
  ('path', 'case'),
  QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW],
)
def test_values_and_gradients(path, case):
  close(answer(path, Shape(), case), truth(Shape(), case), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
@pytest.mark.parametrize('case', ['silu', 'softmax-masked'])
def test_half_precision(path, case):
  want = truth(Shape(), case, dtype='bfloat16')
  got = answer(path, Shape(), case, dtype='bfloat16')
  assert got[0].dtype == got[2].dtype == jnp.bfloat16
  close(got, want, 2e-2)


@st.composite
def drawn(draw):
  shape = Shape(
    batch=draw(st.integers(1, 2)),
    links=draw(st.sampled_from([1, 3, 16, 33])),
    items=draw(st.sampled_from([1, 2, 31, 130, 257])),
    heads=draw(st.sampled_from([1, 2, 5])),
    dim=draw(st.sampled_from([8, 32, 64, 80])),
    values=draw(st.sampled_from([8, 48, 64])),
  )
  masks = [(), ('lengths',), ('segments',), ('lengths', 'segments'), ('empty',)]
  phi = draw(st.sampled_from(['silu', 'softmax']))
  return shape, (phi, draw(st.sampled_from(masks))), draw(st.integers(0, 9))


@pytest.mark.slow
@pytest.mark.parametrize('path', BLOCKS)
@settings(max_examples=10, deadline=None)
@given(drawn())
def test_any_shape_and_mask(path, case):
  shape, given, seed = case
  close(answer(path, shape, given, seed), truth(shape, given, seed), 1e-5)


def test_nobody_to_attend_to():
  links, history, _ = operands(Shape(2, 3, 4, dim=8, values=8))
  none = tuple(x[:, :0] for x in history)
  for phi in ('silu', 'softmax'):
    of_links, of_items = xor_attention(links, none, phi=phi)
    assert of_links.shape == (2, 3, 3, 8)
    assert of_items.shape == (2, 0, 3, 8)
    assert not of_links.any()


def test_memory_does_not_grow_with_the_history():
  """But for the arrays of the history and their gradients."""
  of_links = [jax.ShapeDtypeStruct((1, 64, 4, 64), jnp.float32)] * 3

  def temporary(items):
    history = [jax.ShapeDtypeStruct((1, items, 4, 64), jnp.float32)] * 3
    loss = lambda *x: sum(y.sum() for y in xor_attention(*x, phi='softmax'))
    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(of_links, history)
    return compiled.compile().memory_analysis().temp_size_in_bytes

  items = 65_536
  # Blocks of q, k, v, g and their gradients; logits would be as large again.
  assert temporary(items) < 9 * items * 4 * 64 * 4


@pytest.mark.parametrize('path', BLOCKS)
def test_what_lies_beyond_the_end_may_be_anything(path):
  shape, case = Shape(2, 3, 40, 1, 8, 8), 'softmax-masked'
  links, history, cotangents = operands(shape)
  given = options(shape, case)
  beyond = np.arange(shape.items) >= given['lengths'][:, None]
  assert beyond.any()
  for x in (*history, cotangents[1]):
    x[beyond] = np.nan
  found = derive(
    *rounded((links, history, cotangents), 'float32'),
    given,
    implementation=path,
  )
  close(found, truth(shape, case), 1e-5)


def test_second_order_of_the_loop():
  links, history, _ = operands(Shape(1, 2, 5, 1, 4, 3))

  def slope(path):
    def value(q, k):
      call = functools.partial(xor_attention, implementation=path)
      both = call((q, *links[1:]), (history[0], k, history[2]), phi='softmax')
      return sum(jnp.sum(jnp.sin(x)) for x in both)

    total = lambda *x: sum(
      jnp.sum(jnp.cos(g)) for g in jax.grad(value, (0, 1))(*x)
    )
    return jax.jit(jax.grad(total, (0, 1)))(links[0], history[1])

  with jax.enable_x64(True):
    for got, want in zip(slope('xla'), slope('reference'), strict=True):
      np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def test_no_values_at_all():
  links, history, _ = operands(Shape(1, 2, 5, 1, 4, 0))
  of_links, of_items = xor_attention(links, history)
  assert of_links.shape == (1, 2, 1, 0)
  assert of_items.shape == (1, 5, 1, 0)


def test_bad_input_is_named():
  links, history, _ = operands(Shape(2, 3, 7, 2, 8, 8))
  links, history = rounded((links, history), 'float32')
  fewer = tuple(x[:, :, :1] for x in links)
  half = tuple(x.astype(jnp.bfloat16) for x in links)
  many = tuple(jnp.ones((1, 300, 1, 8)) for _ in range(3))
  ids = np.zeros((2, 7), int)
  cases = [
    (ValueError, 'links must be', links[:2], history, {}),
    (ValueError, 'history: q has shape', links, [x[0] for x in history], {}),
    (ValueError, 'history: k', links, (*history[:2], history[2][:, :6]), {}),
    (ValueError, 'repeat links', fewer, history, {}),
    (TypeError, 'cast one', half, history, {}),
    (ValueError, "phi='relu'", links, history, {'phi': 'relu'}),
    (ValueError, 'no use', links, history, {'phi': 'softmax', 'norm': 2.0}),
    (ValueError, 'norm holds -1', links, history, {'norm': -1.0}),
    (TypeError, 'norm has dtype complex', links, history, {'norm': 1j}),
    (TypeError, 'one number', links, history, {'scale': np.ones(2)}),
    (ValueError, 'scale=nan', links, history, {'scale': float('nan')}),
    (ValueError, 'history has 7 items', links, history, {'lengths': [8, 1]}),
    (ValueError, 'of links, of items', links, history, {'segment_ids': ids}),
    (ValueError, 'a multiple of 16', links, history, {'block': 8}),
    (ValueError, 'must be one of', links, history, {'implementation': 'cuda'}),
    (ValueError, 'no CPU', links, history, {'implementation': 'pallas'}),
    (
      ValueError,
      '300 links of float32 are more than 128',
      many,
      many,
      {'implementation': 'interpret'},
    ),
  ]
  for error, message, a, b, how in cases:
    with pytest.raises(error, match=message):
      xor_attention(a, b, **how)
  wide = tuple(jnp.ones((1, 100, 1, 64)) for _ in range(3))
  with pytest.raises(ValueError, match='2048 numbers that a GPU holds'):
    xor_attention(wide, wide, implementation='interpret_gpu')

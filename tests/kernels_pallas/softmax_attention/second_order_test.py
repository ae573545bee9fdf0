"""Gradients of functions of gradients of attention, in reverse mode.

Against the reference in float64, whose derivatives are JAX's own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import attention
from kernels_pallas.softmax_attention import Blocks, Rope
from tests.kernels_pallas.softmax_attention import problems, sharding_test
from tests.kernels_pallas.softmax_attention.attention_test import (
  BLOCKS,
  CASES,
  close,
)

# Three blocks of queries and two of keys, none of which fits.
SMALL = problems.Shape(2, 37, 53, 4, 2, 8, 6)
FEW = Blocks(16, 32)
ONE_QUERY = problems.Shape(2, 1, 53, 4, 2, 8, 6)
LARGE = problems.Shape(2, 150, 290, 2, 1, 32, 48)
KERNELS = ['interpret', 'interpret_gpu']
QUICK = [(path, 'spans') for path in KERNELS]
SLOWLY = pytest.mark.slow
SLOW = [(path, x) for path in KERNELS for x in CASES if x != 'spans']


def raise_order(function, count):
  """A sum of a function of its gradients, nonlinear in each."""

  def total(*x):
    found = jax.grad(function, tuple(range(count)))(*x)
    return sum(jnp.sum(jnp.sin(g.astype(_wide(g)) / 4)) for g in found)

  return total


def _wide(x):
  return jnp.promote_types(x.dtype, jnp.float32)


def derive(operands, options, order=2, **how):
  """The last gradients in q, k, v and the bias, in one program."""
  known = {n: x for n, x in options.items() if np.isscalar(x)}
  known |= {n: x for n, x in options.items() if isinstance(x, Rope)}
  arrays = {n: x for n, x in options.items() if n not in known}
  bias = arrays.pop('key_bias', None)
  if bias is not None:
    operands = *operands, jnp.asarray(bias, _wide(operands[0]))

  @jax.jit
  def run(operands, arrays):
    def value(q, k, v, *bias):
      given = arrays | ({'key_bias': bias[0]} if bias else {})
      out, lse = attention(q, k, v, return_lse=True, **given, **known, **how)
      lse = jnp.where(lse > -jnp.inf, lse, 0.0)
      return jnp.sum(jnp.sin(out.astype(lse.dtype))) + jnp.sum(jnp.cos(lse))

    function, count = value, len(operands)
    for _ in range(order - 1):
      function = raise_order(function, count)
    return jax.grad(function, tuple(range(count)))(*operands)

  return run(operands, arrays)


@functools.cache
def truth(shape, case, order=2, dtype='float64'):
  options = problems.draw(shape, CASES[case])
  with jax.enable_x64(True):
    # Rounded as the operands in question are.
    operands = [jnp.asarray(x, dtype) for x in problems.operands(shape)]
    operands = [x.astype('float64') for x in operands]
    found = derive(operands, options, order, implementation='reference')
    return [np.asarray(x) for x in found]


def of_the_loop(shape, case, order=2):
  options = problems.draw(shape, CASES[case])
  with jax.enable_x64(True):
    found = derive(
      problems.operands(shape),
      options,
      order,
      implementation='xla',
      blocks=FEW,
    )
    return [np.asarray(x) for x in found]


# What the other cases ask for is among these.
LOOP = ['window', 'offset', 'spans']


@pytest.mark.parametrize(
  'case',
  LOOP + [pytest.param(x, marks=SLOWLY) for x in CASES if x not in LOOP],
)
def test_the_loop(case):
  # In 'causal', 'offset', 'spans' and 'packed' some queries see no key.
  close(of_the_loop(SMALL, case), truth(SMALL, case), 1e-11)


@pytest.mark.slow
def test_one_query():
  close(of_the_loop(ONE_QUERY, 'offset'), truth(ONE_QUERY, 'offset'), 1e-11)


def test_third_order():
  close(of_the_loop(SMALL, 'causal', 3), truth(SMALL, 'causal', 3), 1e-9)


@pytest.mark.parametrize(
  ('path', 'case'),
  QUICK + [pytest.param(*x, marks=SLOWLY) for x in SLOW],
)
def test_kernels(path, case):
  operands = [jnp.asarray(x, 'float32') for x in problems.operands(LARGE)]
  options = problems.draw(LARGE, CASES[case])
  how = {'implementation': path, 'blocks': BLOCKS[path]}
  close(derive(operands, options, **how), truth(LARGE, case), 2e-5)


@pytest.mark.parametrize(
  'path', ['xla', *(pytest.param(x, marks=SLOWLY) for x in KERNELS)]
)
def test_half_precision(path):
  operands = [jnp.asarray(x, 'bfloat16') for x in problems.operands(LARGE)]
  options = problems.draw(LARGE, CASES['spans'])
  how = {'implementation': path, 'blocks': BLOCKS[path]}
  got = derive(operands, options, **how)
  assert [x.dtype for x in got] == ['bfloat16'] * 3 + ['float32']
  close(got, truth(LARGE, 'spans', dtype='bfloat16'), 3e-2)


def test_slope_of_the_gradient():
  """By differences of the first order, without any second."""
  rng = np.random.default_rng(3)
  where = problems.operands(SMALL)
  step, weight = ([rng.normal(size=x.shape) for x in where] for _ in range(2))
  options = problems.draw(SMALL, ['causal', 'lengths'])

  def loss(q, k, v):
    out, lse = attention(
      q, k, v, return_lse=True, implementation='xla', blocks=FEW, **options
    )
    return jnp.sum(out**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0.0) ** 2)

  first = jax.jit(jax.grad(loss, (0, 1, 2)))
  dot = lambda a, b: sum(jnp.vdot(x, y) for x, y in zip(a, b, strict=True))
  with jax.enable_x64(True):
    at = lambda e: [x + e * u for x, u in zip(where, step, strict=True)]
    want = (dot(first(*at(1e-5)), weight) - dot(first(*at(-1e-5)), weight)) / (
      2e-5
    )
    second = jax.jit(jax.grad(lambda *x: dot(first(*x), weight), (0, 1, 2)))
    np.testing.assert_allclose(dot(second(*where), step), want, rtol=1e-7)


def test_pages():
  rng = np.random.default_rng(0)
  shape = problems.Shape(2, 5, 24, 2, 1, 8, 4)
  table = rng.permutation(9)[:8].reshape(2, 4)
  options = {'lengths': np.array([24, 13], np.int32)}
  how = {'implementation': 'xla', 'blocks': FEW}
  with jax.enable_x64(True):
    q, k, v = (jnp.asarray(x) for x in problems.operands(shape))
    pool = lambda x: (
      jnp.zeros((9, 6, *x.shape[2:]))
      .at[table]
      .set(x.reshape(2, 4, 6, *x.shape[2:]))
    )
    want = derive((q, k, v), options, **how)
    paged = options | {'block_table': table}
    got = derive((q, pool(k), pool(v)), paged, **how)
    close(got, [want[0], *(np.asarray(pool(x)) for x in want[1:])], 1e-12)


def test_tiles_of_other_segments_are_not_computed():
  """NaN in their keys and values would enter as 0 x NaN."""
  shape = problems.Shape(1, 64, 64, 2, 1, 8, 8)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  segments = np.repeat(np.array([3, 5], np.int32), 32)[None]
  k, v = (x.at[:, 32:].set(jnp.nan) for x in (k, v))
  how = {'implementation': 'xla', 'blocks': Blocks(16, 16)}
  # Of the sum of all, the outputs of the other segment are NaN themselves.
  call = lambda q, k, v: attention(q, k, v, segment_ids=segments, **how)
  value = lambda *x: jnp.sum(jnp.sin(call(*x)[:, :32]))
  part = lambda found: sum(jnp.sum(jnp.sin(g[:, :32])) for g in found)
  total = lambda *x: part(jax.grad(value, (0, 1, 2))(*x))
  for x in jax.jit(jax.grad(total, (0, 1, 2)))(q, k, v):
    assert np.isfinite(x[:, :32]).all()
    assert x[:, :32].any()


@pytest.mark.parametrize(
  'path', ['xla', pytest.param('interpret_gpu', marks=SLOWLY)]
)
def test_what_lies_beyond_the_end_may_be_anything(path):
  shape = problems.Shape(2, 19, 41, 2, 1, 16, 16)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  options = {'lengths': np.array([7, 41], np.int32)}
  beyond = (np.arange(41) >= options['lengths'][:, None])[..., None, None]
  call = lambda k, v: derive((q, k, v), options, implementation=path)
  want = call(k, v)
  got = call(*(jnp.where(beyond, jnp.nan, x) for x in (k, v)))
  for a, b in zip(got, want, strict=True):
    assert b.any()
    np.testing.assert_array_equal(a, b)


def test_memory_does_not_grow_with_the_square():
  """Of a Hessian-vector product; one head's logits would take 268 MB."""
  queries = 8192
  struct = [jax.ShapeDtypeStruct((1, queries, 1, 64), jnp.float32)] * 3
  loss = lambda *x: jnp.sum(jnp.sin(attention(*x, causal=True)))

  def product(x, direction):
    slope = lambda *x: sum(
      jnp.vdot(g, u)
      for g, u in zip(jax.grad(loss, (0, 1, 2))(*x), direction, strict=True)
    )
    return jax.grad(slope, (0, 1, 2))(*x)

  compiled = jax.jit(product).lower(struct, struct).compile()
  memory = compiled.memory_analysis()
  # Some 20 arrays of that shape, and a few tiles.
  assert memory.temp_size_in_bytes < 32 * queries * 64 * 4 + 2**24


def second(q, k, v, bias, ids, implementation=None):
  def total(*x):
    found, out = sharding_test.gradients(*x, ids, implementation)
    return sum(jnp.sum(jnp.sin(g / 8)) for g in found) + jnp.sum(jnp.cos(out))

  return jax.grad(total, (0, 1, 2, 3))(q, k, v, bias)


def test_several_devices():
  one = sharding_test.operands(4)
  call = functools.partial(second, implementation='reference')
  want = jax.jit(call)(*one)
  where = sharding_test.mesh('data', 'model')
  specs = [P('data', None, 'model')] * 3 + [P('data'), P('data')]
  placed = [
    jax.device_put(x, NamedSharding(where, s))
    for x, s in zip(one, specs, strict=True)
  ]
  with jax.set_mesh(where):
    compiled = jax.jit(second).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got[0].sharding.is_equivalent_to(placed[0].sharding, 4)
  sharding_test.close(got, want)


@pytest.mark.slow
@pytest.mark.parametrize('path', ['xla', *KERNELS])
def test_runs(path):
  one = sharding_test.operands(2)
  runs = [jnp.stack([x, 2 * x]) for x in one]
  function = functools.partial(second, implementation=path)
  got = jax.jit(jax.vmap(function))(*runs)
  call = jax.jit(functools.partial(second, implementation='reference'))
  for i in range(2):
    sharding_test.close(
      jax.tree.map(lambda x, i=i: x[i], got), call(*(x[i] for x in runs))
    )

"""Keys in pages, and one query per sequence, against loops in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import attention
from kernels_pallas.softmax_attention import Blocks
from tests.kernels_pallas.softmax_attention import problems

PATHS = ['xla', 'interpret', 'interpret_gpu']


def spread(rng, x, page, lengths, spare=3):
  """A pool of pages that holds x [B, n page, ...] anywhere, and its table.

  NaN wherever there is no key.
  """
  batch, keys = x[0].shape[:2]
  count = keys // page
  size = batch * count + spare
  table = rng.permutation(size)[: batch * count].reshape(batch, count)
  beyond = np.arange(keys)[None] >= lengths[:, None]

  def fill(x):
    pool = np.full((size, page, *x.shape[2:]), np.nan)
    x = np.where(beyond[:, :, None, None], np.nan, x)
    pool[table] = x.reshape(batch, count, page, *x.shape[2:])
    return jnp.asarray(pool, jnp.float32)

  return *map(fill, x), table.astype(np.int32)


def check(path, shape, page, names, seed=0, blocks=None):
  rng = np.random.default_rng(seed)
  q, k, v = problems.operands(shape, seed)
  options = problems.draw(shape, names, seed)
  lengths = options.get('lengths', np.full(shape.batch, shape.keys))
  want = problems.brute_force(q, k, v, options)
  pool_k, pool_v, table = spread(rng, (k, v), page, lengths)
  known = {x: options.pop(x) for x in ('causal', 'rope') if x in options}

  @jax.jit
  def run(q, k, v, table, options):
    return attention(
      q,
      k,
      v,
      block_table=table,
      return_lse=True,
      implementation=path,
      blocks=blocks,
      **options,
      **known,
    )

  got = run(jnp.asarray(q, jnp.float32), pool_k, pool_v, table, options)
  for a, b in zip(got, want, strict=True):
    finite = np.isfinite(b)
    np.testing.assert_array_equal(np.isneginf(a), ~finite)
    bound = 1e-5 * max(1.0, np.abs(b[finite]).max(initial=0))
    a = np.asarray(a, float)
    np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=bound)


CASES = {
  # In place on every path: two tiles of 8 pages, the last of them in part.
  'prefill': (problems.Shape(2, 40, 240, 4, 2, 128, 128), 24, ['offset']),
  'decode': (
    problems.Shape(3, 1, 320, 6, 2, 128, 128),
    16,
    ['offset', 'lengths', 'rope'],
  ),
  'masks': (
    problems.Shape(2, 9, 256, 2, 2, 128, 128),
    32,
    ['causal', 'lengths', 'spans', 'segments', 'bias', 'rope'],
  ),
  # Copied on a TPU for the size of its pages, and on a GPU of its heads.
  'copied': (
    problems.Shape(2, 5, 42, 2, 1, 96, 48),
    6,
    ['causal', 'lengths', 'rope'],
  ),
}


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('case', CASES)
def test_pages_equal_keys_in_order(path, case):
  shape, page, names = CASES[case]
  check(path, shape, page, names)


@pytest.mark.parametrize('path', PATHS)
def test_pages_where_integers_are_wide(path):
  shape, page, names = CASES['decode']
  with jax.enable_x64(True):
    check(path, shape, page, names)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
  st.sampled_from(PATHS),
  st.sampled_from([(1, 1), (4, 1), (2, 2)]),
  st.sampled_from([(128, 128), (64, 128), (40, 24)]),
  st.sampled_from([1, 8, 16, 40, 128, 256]),
  st.integers(1, 9),
  st.sampled_from([1, 2, 65, 130]),
  st.sampled_from([[], ['lengths'], ['causal', 'lengths', 'rope'], ['offset']]),
  st.integers(0, 99),
)
def test_any_pages(path, heads, dims, page, count, queries, names, seed):
  shape = problems.Shape(2, queries, page * count, *heads, *dims)
  check(path, shape, page, names, seed)


@pytest.mark.parametrize('path', PATHS)
def test_tiles_of_several_pages_in_blocks_that_callers_choose(path):
  shape = problems.Shape(1, 70, 640, 1, 1, 128, 128)
  sizes = Blocks(64, 64) if path == 'interpret_gpu' else Blocks(128, 128)
  check(path, shape, 64, ['causal', 'rope'], blocks=sizes)


def test_gradients_of_pools():
  rng = np.random.default_rng(0)
  shape = problems.Shape(2, 5, 24, 2, 1, 8, 4)
  q, k, v = problems.operands(shape)
  lengths = np.array([24, 10], np.int32)
  pool_k, pool_v, table = spread(rng, (k, v), 6, lengths)
  # Two sequences share a page.
  table[1, 0] = table[0, 0]
  options = {'lengths': lengths, 'causal': True, 'query_offset': lengths - 5}
  q = jnp.asarray(q, jnp.float32)

  def loss(how, q, k, v):
    out = attention(q, k, v, block_table=table, implementation=how, **options)
    return jnp.sum(jnp.sin(out))

  want = jax.grad(loss, (1, 2, 3))('reference', q, pool_k, pool_v)
  got = jax.grad(loss, (1, 2, 3))('xla', q, pool_k, pool_v)
  for a, b in zip(got, want, strict=True):
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=1e-6)
  # What no sequence has is not moved.
  spare = np.setdiff1d(np.arange(11), table)
  assert not np.asarray(got[1])[spare].any()


@pytest.mark.parametrize('path', ['reference', *PATHS])
def test_what_lies_beyond_the_end_does_not_matter(path):
  shape = problems.Shape(2, 20, 50, 4, 2, 16, 16)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  lengths = np.array([50, 13], np.int32)
  beyond = (np.arange(50)[None] >= lengths[:, None])[:, :, None, None]

  def gradients(fill):
    put = lambda x: jnp.where(beyond, fill, x)
    loss = lambda q, k, v: jnp.sum(
      jnp.sin(attention(q, k, v, lengths=lengths, implementation=path))
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, put(k), put(v))

  want, got = gradients(0.0), gradients(jnp.nan)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


ONE = [
  ['causal', 'lengths', 'rope'],
  ['offset', 'bias'],
  ['segments', 'spans', 'lengths'],
  ['window'],
]


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('names', ONE)
def test_one_query_of_shared_keys(path, names):
  shape = problems.Shape(3, 1, 70, 6, 2, 32, 16)
  q, k, v = problems.operands(shape)
  options = problems.draw(shape, names)
  arrays = tuple(jnp.asarray(x, jnp.float32) for x in (q, k, v))

  def gradients(how, arrays):
    def loss(q, k, v):
      out, lse = attention(
        q, k, v, return_lse=True, implementation=how, **options
      )
      kept = jnp.where(lse > -jnp.inf, lse, 0.0)
      return jnp.sum(jnp.sin(out)) + jnp.sum(kept**2), (out, lse)

    return jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*arrays)

  found, both = gradients(path, arrays)
  with jax.enable_x64(True):
    want, _ = gradients('reference', (q, k, v))
    want = [np.asarray(x) for x in want]
  truth = problems.brute_force(q, k, v, options)
  for a, b in zip([*both, *found], [*truth, *want], strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-5)


def test_a_table_out_of_range_is_named_or_clamped():
  rng = np.random.default_rng(0)
  shape = problems.Shape(2, 3, 24, dim=8, values=4)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  pool_k, pool_v, table = spread(rng, (k, v), 6, np.array([24, 24]))
  call = lambda table: attention(q, pool_k, pool_v, block_table=table)
  with pytest.raises(ValueError, match='holds 11, but there are 11 pages'):
    call(table + 11 - table.max())
  with pytest.raises(ValueError, match='holds -1, but must be at least 0'):
    call(table - 1 - table.min())
  with pytest.raises(ValueError, match='agree in pages'):
    attention(q, pool_k, pool_v[:-1], block_table=table)
  with pytest.raises(ValueError, match='expected .B, pages'):
    call(table[0])
  clamped = jax.jit(call)(np.clip(table, 3, 99))
  np.testing.assert_array_equal(clamped, jax.jit(call)(np.clip(table, 3, 10)))

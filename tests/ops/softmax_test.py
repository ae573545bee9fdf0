import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tmlib.ops import softmax

masked_softmax = jax.jit(softmax.masked_softmax, static_argnames='axis')
segment_softmax = jax.jit(softmax.segment_softmax, static_argnums=3)


def _grad(f):
  # One compilation instead of one per operation.
  return jax.jit(jax.grad(f))


def _brute(logits, mask, segment_ids):
  """Loop over segments in float64."""
  out = np.zeros(len(logits))
  for s in np.unique(segment_ids):
    rows = np.flatnonzero((segment_ids == s) & mask)
    if len(rows):
      e = np.exp(np.float64(logits[rows]) - np.max(logits[rows]))
      out[rows] = e / e.sum()
  return out


def test_masked_by_hand():
  # exp(0) : exp(ln 3) = 1 : 3; the masked entry does not count.
  got = masked_softmax(
    jnp.array([0.0, np.log(3.0), 50.0]), jnp.array([True, True, False])
  )
  np.testing.assert_allclose(got, [0.25, 0.75, 0], rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float16, jnp.float32])
@pytest.mark.parametrize('junk', [np.nan, np.inf])
def test_masked_entries_may_hold_anything(dtype, junk):
  logits = jnp.array([[1.0, junk, 2.0], [junk, junk, junk]], dtype)
  mask = jnp.array([[True, False, True], [False] * 3])
  value = masked_softmax(logits, mask)
  grad = _grad(lambda x: masked_softmax(x, mask)[0, 0].astype(float))(logits)
  np.testing.assert_allclose(
    np.asarray(value, np.float64).sum(-1), [1, 0], atol=1e-2
  )
  assert np.isfinite(np.asarray(grad, np.float64)).all()


def test_gradient_of_an_empty_slice_is_zero():
  mask = jnp.zeros((2, 3), bool)
  grad = _grad(lambda x: jnp.sum(masked_softmax(x, mask) ** 2))(
    jnp.ones((2, 3))
  )
  np.testing.assert_array_equal(grad, np.zeros((2, 3)))


def test_extreme_logits_stay_finite():
  logits = jnp.array([3e38, -3e38, 3e38])
  got = masked_softmax(logits, jnp.ones(3, bool))
  np.testing.assert_allclose(got, [0.5, 0, 0.5])
  none = masked_softmax(jnp.full(3, -jnp.inf), jnp.ones(3, bool))
  np.testing.assert_array_equal(none, np.zeros(3))


def test_axis():
  logits = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
  got = masked_softmax(logits, np.ones((4, 3), bool), axis=0)
  np.testing.assert_allclose(got, jax.nn.softmax(logits, 0), rtol=1e-6)


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_segments_equal_a_loop(data):
  seed = data.draw(st.integers(0, 2**31))
  rng = np.random.default_rng(seed)
  n, s = 12, 4  # one shape, so that one compilation serves all examples
  logits = rng.normal(size=n).astype(np.float32) * 10 ** rng.integers(0, 3)
  mask = rng.random(n) < data.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
  segment_ids = rng.integers(0, s, n).astype(np.int32)
  logits = np.where(mask, logits, np.nan).astype(np.float32)
  got = segment_softmax(logits, mask, segment_ids, s)
  np.testing.assert_allclose(
    got, _brute(logits, mask, segment_ids), rtol=2e-5, atol=1e-7
  )


def test_one_segment_is_masked_softmax_and_so_is_its_gradient():
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(2, 7)).astype(np.float32)
  mask = rng.random((2, 7)) < 0.6
  target = rng.normal(size=(2, 7)).astype(np.float32)
  ids = np.zeros((2, 7), np.int32)
  one = lambda x: jnp.sum(masked_softmax(x, mask) * target)
  two = lambda x: jnp.sum(segment_softmax(x, mask, ids, 1) * target)
  np.testing.assert_allclose(_grad(one)(logits), _grad(two)(logits), atol=1e-7)


def test_ids_out_of_range_belong_to_nobody():
  got = segment_softmax(
    jnp.zeros(3), jnp.ones(3, bool), jnp.array([0, 5, -1]), 2
  )
  np.testing.assert_array_equal(got, [1, 0, 0])
  # Nor may a large one overflow: its gradient would be 0 * inf.
  jacobian = jax.jacobian(
    lambda x: segment_softmax(x, jnp.ones(3, bool), jnp.array([0, 0, -1]), 1)
  )(jnp.array([1.0, 2.0, 200.0]))
  assert np.isfinite(jacobian).all()


def test_segment_gradients_are_finite_with_empty_segments_and_junk():
  logits = jnp.array([1.0, np.nan, 2.0, np.inf])
  mask = jnp.array([True, False, True, False])
  ids = jnp.array([0, 0, 3, 1])
  grad = _grad(lambda x: segment_softmax(x, mask, ids, 4)[0])(logits)
  assert np.isfinite(grad).all()


def test_no_scatter_in_the_program():
  ids = jnp.array([0, 0, 1])
  run = _grad(lambda x: segment_softmax(x, jnp.ones(3, bool), ids, 2)[0])
  assert 'scatter' not in jax.jit(run).lower(jnp.ones(3)).as_text()

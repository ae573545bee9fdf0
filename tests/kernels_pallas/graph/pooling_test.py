"""Segment pooling against loops in float64, on every path."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_pallas import segment_pool
from kernels_pallas.graph import Gate
from tests.kernels_pallas.graph import pooling_problems as problems

PATHS = [None, 'xla', 'interpret', 'interpret_gpu']
# Arguments of `problems.draw`: several blocks and chunks, and what fits none.
CASES = {
  'scores': {'instances': 300, 'segments': 5, 'features': 12},
  'gate': {'instances': 300, 'segments': 5, 'features': 12, 'units': 9},
  'shuffled': {
    'instances': 200,
    'segments': 140,
    'features': 150,
    'order': 'shuffled',
  },
  'tanh': {
    'instances': 40,
    'segments': 1,
    'features': 3,
    'units': 130,
    'gate': False,
  },
  'none': {'instances': 20, 'segments': 3, 'features': 4, 'order': 'none'},
}
QUICK = {(path, case) for path in (None, 'xla') for case in CASES}
QUICK |= {(p, c) for p in PATHS for c in ('gate', 'shuffled')}


@pytest.mark.parametrize(
  ('path', 'case'),
  [
    pytest.param(p, c, marks=[] if (p, c) in QUICK else [pytest.mark.slow])
    for p in PATHS
    for c in CASES
  ],
)
def test_values_and_gradients_equal_loops(path, case):
  problem = problems.draw(rows=2, **CASES[case])
  want = problems.brute_force(problem)
  problems.close(problems.derive(problem, path), want, 1e-5)
  assert np.isneginf(want[1]).any() or problem.segments == 1


@pytest.mark.parametrize('path', [None, 'xla'])
def test_float64(path):
  problem = problems.draw(rows=2, **CASES['gate'])
  with jax.enable_x64(True):
    got = problems.derive(problem, path, 'float64')
  assert got[0].dtype == np.float64
  problems.close(got, problems.brute_force(problem), 1e-12)


@pytest.mark.parametrize('path', [None, 'interpret', 'interpret_gpu'])
def test_half_precision_sums_in_single(path):
  problem = problems.draw(2, 700, 3, 16, 8, seed=3)
  exact = problems.rounded(problem, 'bfloat16')
  got = problems.derive(problem, path, 'bfloat16')
  assert got[0].dtype == jnp.bfloat16
  assert got[1].dtype == jnp.float32
  problems.close(got, problems.brute_force(exact), 2e-2)


def drawn(function):
  return settings(max_examples=6, deadline=None, derandomize=True)(
    given(
      instances=st.sampled_from([1, 2, 31, 33, 129]),
      segments=st.sampled_from([1, 2, 9, 130]),
      units=st.sampled_from([0, 0, 1, 17]),
      order=st.sampled_from(['sorted', 'shuffled', 'none']),
      seed=st.integers(0, 10**6),
    )(function)
  )


@drawn
def test_any_shape(instances, segments, units, order, seed):
  problem = problems.draw(1, instances, segments, 5, units, seed, order)
  want = problems.brute_force(problem)
  problems.close(problems.derive(problem, None), want, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize('path', ['interpret', 'interpret_gpu'])
@drawn
def test_any_shape_in_the_kernels(
  path, instances, segments, units, order, seed
):
  problem = problems.draw(1, instances, segments, 5, units, seed, order)
  want = problems.brute_force(problem)
  problems.close(problems.derive(problem, path), want, 1e-5)


@pytest.mark.parametrize('path', PATHS)
def test_by_hand(path):
  # Weights 1 : 3 in segment 0; one instance in segment 2; none in segment 1.
  values = jnp.array([[0.0, 4.0], [8.0, 0.0], [np.nan, 1.0], [5.0, 6.0]])
  scores = jnp.array([0.0, np.log(3.0), 7.0, -90.0])
  mask = jnp.array([True, True, False, True])
  ids = jnp.array([0, 0, 0, 2])
  pooled, lse = segment_pool(
    values, scores, ids, 3, mask=mask, return_lse=True, implementation=path
  )
  np.testing.assert_allclose(pooled, [[6, 1], [0, 0], [5, 6]], rtol=1e-6)
  np.testing.assert_allclose(lse, [np.log(4.0), -np.inf, -90.0], rtol=1e-6)


@pytest.mark.parametrize('path', PATHS)
def test_hidden_and_huge_scores(path):
  """-inf hides an instance; scores far apart neither overflow nor vanish."""
  values = jnp.eye(4)
  scores = jnp.array([-jnp.inf, -jnp.inf, 3e4, -3e4])

  def first(scores):
    run = {'implementation': path}
    pooled = segment_pool(values, scores, jnp.array([0, 0, 1, 1]), 2, **run)
    return pooled[1, 2], pooled

  slopes, pooled = jax.grad(first, has_aux=True)(scores)
  np.testing.assert_array_equal(pooled, [[0] * 4, [0, 0, 1, 0]])
  np.testing.assert_array_equal(slopes, jnp.zeros(4))


@pytest.mark.parametrize('path', ['interpret', 'interpret_gpu'])
def test_under_vmap(path):
  problem = problems.draw(2, 70, 3, 8)
  arrays = {n: jnp.asarray(x, 'float32') for n, x in problem.arrays.items()}
  twice = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arrays)
  run = lambda a: problems.pool(a, problem.ids, 3, path)
  got = jax.vmap(run)(twice)
  for i in range(2):
    want = run(jax.tree.map(lambda x, i=i: x[i], twice))
    problems.close(
      jax.tree.map(lambda x, i=i: x[i], got),
      jax.tree.map(np.asarray, want),
      1e-6,
    )


def test_forward_mode_and_second_order_through_xla():
  problem = problems.draw(1, 30, 3, 4, 5)
  with jax.enable_x64(True):
    arrays = {
      n: jnp.asarray(np.nan_to_num(x)) for n, x in problem.arrays.items()
    }

    def energy(path, arrays):
      pooled, _ = problems.pool(arrays, problem.ids, 3, path)
      return jnp.sum(pooled**3)

    first = jax.grad(energy, 1)
    want = jax.jit(first, static_argnums=0)(None, arrays)
    got = jax.jit(first, static_argnums=0)('xla', arrays)
    problems.close(got, jax.tree.map(np.asarray, want), 1e-12)
    step = jax.tree.map(lambda x: jnp.cos(37.0 * x), arrays)
    second = jax.jit(
      lambda a: jax.jvp(lambda a: first('xla', a), (a,), (step,))[1]
    )(arrays)
    at = lambda t: first(
      None, jax.tree.map(lambda x, s: x + t * s, arrays, step)
    )
    slope = jax.tree.map(
      lambda a, b: np.asarray(a - b) / 2e-5, at(1e-5), at(-1e-5)
    )
    problems.close(second, slope, 1e-7)


def test_nothing_to_pool():
  empty = segment_pool(
    jnp.zeros((2, 0, 3)), jnp.zeros((2, 0)), np.zeros((2, 0), int), 4
  )
  np.testing.assert_array_equal(empty, np.zeros((2, 4, 3)))


@pytest.mark.parametrize('path', [None, 'interpret', 'interpret_gpu'])
def test_a_gate_without_units_weighs_all_alike(path):
  gate = Gate(jnp.zeros((1, 4, 0)), None, jnp.zeros(0))
  values = jnp.arange(8.0).reshape(1, 4, 2)
  ids = np.array([[0, 0, 1, 1]])
  pooled = segment_pool(values, gate, ids, 2, implementation=path)
  np.testing.assert_allclose(pooled, [[[1, 2], [5, 6]]])


@pytest.mark.parametrize('path', [None, 'xla', 'interpret_gpu'])
def test_a_hidden_instance_may_be_anything(path):
  values = jnp.array([[[1.0], [jnp.nan], [3.0]]])
  scores = jnp.array([[0.0, -jnp.inf, 0.0]])
  ids = np.zeros((1, 3), int)
  call = lambda v, s: segment_pool(v, s, ids, 1, implementation=path)
  out, pull = jax.vjp(jax.jit(call), values, scores)
  np.testing.assert_allclose(out, [[[2.0]]])
  dvalues, dscores = pull(jnp.ones_like(out))
  np.testing.assert_allclose(dvalues[0, :, 0], [0.5, 0, 0.5])
  np.testing.assert_allclose(dscores[0], [-0.5, 0, 0.5])


def call(**changes):
  options = {
    'values': jnp.ones((2, 6, 3)),
    'scores': jnp.ones((2, 6)),
    'segment_ids': jnp.zeros((2, 6), jnp.int32),
    'num_segments': 2,
  }
  return lambda: segment_pool(**options | changes)


GATE = Gate(jnp.ones((2, 6, 4)), jnp.ones((2, 6, 4)), jnp.ones(4))


@pytest.mark.parametrize(
  ('changes', 'error', 'match'),
  [
    ({'values': jnp.ones(6)}, ValueError, 'values has shape'),
    ({'values': jnp.ones((2, 6, 3), int)}, TypeError, 'values has dtype'),
    ({'scores': jnp.ones((2, 5))}, ValueError, 'scores has shape'),
    ({'scores': jnp.ones((2, 6), bool)}, TypeError, 'scores has dtype bool'),
    (
      {'scores': GATE._replace(sigmoid=jnp.ones((2, 6, 3)))},
      ValueError,
      'scores.sigmoid has shape',
    ),
    (
      {'scores': GATE._replace(weight=jnp.ones(3))},
      ValueError,
      'scores.weight has shape',
    ),
    ({'segment_ids': jnp.zeros((2, 6))}, TypeError, 'segment_ids has dtype'),
    ({'segment_ids': jnp.zeros(6, int)}, ValueError, 'segment_ids has shape'),
    (
      {'segment_ids': jnp.full((2, 6), 2)},
      ValueError,
      'segment_ids holds 2, but there are num_segments=2; raise it',
    ),
    ({'num_segments': 0}, ValueError, 'num_segments=0'),
    ({'mask': jnp.ones((2, 6))}, ValueError, 'mask has shape'),
    ({'implementation': 'triton'}, ValueError, 'implementation='),
    ({'implementation': 'pallas'}, ValueError, 'no CPU body'),
    (
      {'implementation': 'interpret', 'num_segments': 10**4},
      ValueError,
      'of sums, more than 10485760; use more rows',
    ),
    (
      {'implementation': 'interpret', 'values': jnp.ones((2, 6, 3), 'float16')},
      ValueError,
      'float16 is neither float32 nor bfloat16',
    ),
  ],
)
def test_bad_input_is_named(changes, error, match):
  with pytest.raises(error, match=match):
    call(**changes)()


def test_ids_beyond_the_segments_are_none_under_jit():
  ids = jnp.array([[0, 1, 2, 7, -3, 0]])
  values = jnp.arange(6.0).reshape(1, 6, 1)
  pooled = jax.jit(lambda ids: segment_pool(values, jnp.zeros((1, 6)), ids, 2))(
    ids
  )
  np.testing.assert_allclose(pooled, [[[2.5], [1.0]]])

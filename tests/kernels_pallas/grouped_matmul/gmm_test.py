"""Grouped products against a product per group in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.grouped_matmul import (
  block_gmm,
  block_layout,
  block_tgmm,
  gather_rows,
  gmm,
  gpu,
  scatter_rows,
  tgmm,
  tpu,
)
from kernels_pallas.grouped_matmul.shapes import SHAPES
from tests.kernels_pallas import gpu_targets, tpu_targets

PATHS = [None, 'interpret', 'interpret_gpu']


def problem(sizes, k, n, extra=0, seed=0):
  rng = np.random.default_rng(seed)
  rows = sum(sizes) + extra
  lhs = rng.normal(size=(rows, k))
  rhs = rng.normal(size=(len(sizes), k, n))
  return lhs, rhs, np.asarray(sizes, np.int32)


def split(x, sizes):
  return np.split(x[: sum(sizes)], np.cumsum(sizes)[:-1])


def true_gmm(lhs, rhs, sizes):
  out = np.zeros((len(lhs), rhs.shape[2]))
  done = [a @ w for a, w in zip(split(lhs, sizes), rhs, strict=True)]
  out[: sum(sizes)] = np.concatenate(done)
  return out


def true_tgmm(lhs, rhs, sizes):
  pairs = zip(split(lhs, sizes), split(rhs, sizes), strict=True)
  return np.stack([a.T @ b for a, b in pairs])


SIZES = [[5, 0, 17, 3], [0, 0, 0, 9], [16, 16], [1], [0, 0], [7, 1, 0]]


@pytest.mark.parametrize('path', PATHS)
@pytest.mark.parametrize('sizes', SIZES)
def test_products_equal_a_product_per_group(sizes, path):
  lhs, rhs, sizes = problem(sizes, 5, 7, extra=3)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  options = {'block': 16, 'implementation': path}
  # Three rows of no group: their number is checked where it is known.
  call = lambda f, *x, **more: jax.jit(functools.partial(f, **options, **more))(
    *x, sizes
  )
  got = call(gmm, f32(lhs), f32(rhs))
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, sizes), atol=2e-5)
  turned = f32(np.swapaxes(rhs, 1, 2))
  got = call(gmm, f32(lhs), turned, transpose_rhs=True)
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, sizes), atol=2e-5)
  other = np.random.default_rng(1).normal(size=(len(lhs), 7))
  got = call(tgmm, f32(lhs), f32(other))
  np.testing.assert_allclose(got, true_tgmm(lhs, other, sizes), atol=2e-5)


_layout = jax.jit(block_layout, static_argnums=(1, 2))


@settings(max_examples=25, deadline=None)
@given(
  st.lists(st.integers(0, 40), min_size=1, max_size=6),
  st.sampled_from([1, 4, 8, 32]),
)
def test_a_layout_is_a_bijection_of_whole_blocks(sizes, block):
  # One group or six, and as many rows always: few programs.
  sizes = sizes + [0] * (6 - len(sizes)) if len(sizes) > 1 else sizes
  groups = np.repeat(np.arange(len(sizes)), sizes)
  groups = np.random.default_rng(0).permutation(groups)
  count, free = len(groups), np.full(242 - len(groups), -1)
  free[-1] = len(sizes)
  groups = np.append(groups, free).astype(np.int32)
  layout = _layout(jnp.asarray(groups), len(sizes), block)
  slots, rows = np.asarray(layout.slots), np.asarray(layout.rows)
  assert (slots[count:] == len(rows)).all()
  kept = slots[:count]
  assert len(set(kept)) == len(kept)
  np.testing.assert_array_equal(rows[kept], np.arange(len(kept)))
  assert (rows < len(groups)).sum() == len(kept)
  # Each slot's block belongs to the group of its row; all groups are visited.
  np.testing.assert_array_equal(layout.groups[kept // block], groups[:count])
  # Blocks that no group needs come last.
  needed = sum(max(-(-size // block), 1) for size in sizes)
  assert set(np.asarray(layout.groups[:needed])) == set(range(len(sizes)))
  assert (layout.groups[needed:] == len(sizes)).all()
  assert (np.diff(layout.groups) >= 0).all()


@pytest.mark.parametrize('path', PATHS)
def test_gradients_of_first_and_second_order(path):
  lhs, rhs, sizes = problem([9, 0, 4, 20], 6, 5, extra=2)
  lhs, rhs = jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32)
  ids = np.repeat(np.arange(5), [*sizes, 2])

  def plain(lhs, rhs):
    # A dense product with every matrix, and a mask.
    mask = jnp.asarray(ids[:, None] == np.arange(4), jnp.float32)
    return jnp.einsum('mk,ekn,me->mn', lhs, rhs, mask)

  under_jit = jax.jit(functools.partial(gmm, block=16, implementation=path))

  def ours(lhs, rhs):
    return under_jit(lhs, rhs, sizes)

  def first(f):
    return jax.grad(lambda a, w: jnp.sin(f(a, w)).sum(), (0, 1))

  def second(f):
    inner = first(f)
    total = lambda a, w: sum(jnp.cos(g).sum() for g in inner(a, w))
    return jax.grad(total, (0, 1))

  for order in (first, second):
    want, got = order(plain)(lhs, rhs), order(ours)(lhs, rhs)
    for a, b in zip(want, got, strict=True):
      np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4)


def test_the_permutation_and_its_gradient():
  groups = jnp.asarray([2, 0, 5, 0, 2, 1], jnp.int32)  # 5 is no group of 3
  layout = block_layout(groups, 3, 4)
  x = jnp.arange(6.0).reshape(3, 2)  # each row serves two assignments
  placed = gather_rows(x, layout)
  back = scatter_rows(placed, layout)
  want = np.repeat(np.asarray(x), 2, 0)
  want[2] = 0
  np.testing.assert_array_equal(back, want)
  cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(6, 2)))
  loss = lambda x: (
    scatter_rows(gather_rows(x, layout), layout) * cotangent
  ).sum()
  kept = np.asarray(cotangent).copy()
  kept[2] = 0
  np.testing.assert_allclose(
    jax.grad(loss)(x), kept.reshape(3, 2, 2).sum(1), rtol=1e-6
  )


@pytest.mark.parametrize('path', PATHS)
def test_half_precision_sums_in_single(path):
  lhs, rhs, sizes = problem([40, 3], 512, 16)
  half = lambda x: jnp.asarray(x, jnp.bfloat16)
  got = gmm(half(lhs), half(rhs), sizes, block=16, implementation=path)
  assert got.dtype == jnp.bfloat16
  rounded = lambda x: np.asarray(half(x), np.float64)
  want = true_gmm(rounded(lhs), rounded(rhs), sizes)
  # One rounding of the result: 2^-8 of the largest entries.
  np.testing.assert_allclose(np.asarray(got, float), want, atol=0.3, rtol=8e-3)


def test_long_blocks_are_cut_on_a_gpu():
  lhs, rhs, sizes = problem([300, 0, 20], 5, 7)
  f32 = lambda x: jnp.asarray(x, jnp.float32)
  got = gmm(
    f32(lhs), f32(rhs), sizes, block=256, implementation='interpret_gpu'
  )
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, sizes), atol=2e-5)


def test_under_vmap_over_matrices():
  lhs, rhs, sizes = problem([9, 4], 6, 5)
  lhs = jnp.asarray(lhs, jnp.float32)
  stack = jnp.stack([jnp.asarray(rhs, jnp.float32) * i for i in (1, 2, 3)])
  got = jax.vmap(lambda w: gmm(lhs, w, sizes, block=8))(stack)
  for i in range(3):
    np.testing.assert_allclose(
      got[i], true_gmm(lhs, rhs * (i + 1), sizes), atol=1e-4
    )


@pytest.mark.slow
@pytest.mark.parametrize('tiles', [None, (128, 128)])
def test_the_products_read_only_what_was_written(tiles):
  lhs, rhs, sizes = problem([20, 0, 9, 3], 200, 150)
  layout = block_layout(jnp.repeat(jnp.arange(4), sizes), 4, 8)
  # Three full blocks and a remainder each of three groups, and an empty group.
  assert (layout.groups < 4).sum() < len(layout.groups)
  rows = gather_rows(jnp.asarray(lhs, jnp.float32), layout)
  rhs = jnp.asarray(rhs, jnp.float32)
  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  got = tpu.block_gmm(rows, rhs, layout.groups, False, tiles, watched)
  assert not interpret_pallas_call.races.races_found
  got = scatter_rows(got, layout)
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, sizes), atol=1e-3)
  other = gather_rows(got, layout)
  got = tpu.block_tgmm(rows, other, layout.groups, 4, watched)
  assert not interpret_pallas_call.races.races_found
  want = true_tgmm(lhs, scatter_rows(other, layout), sizes)
  np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-2)


L, R, S = problem([3, 4], 5, 6)
BAD = [
  (ValueError, 'group_sizes has shape', lambda: gmm(L, R, S[:1])),
  (ValueError, 'sum to 6, but there are 7', lambda: gmm(L, R, [3, 3])),
  (ValueError, 'sum to 8, but there are 7', lambda: gmm(L, R, [3, 5])),
  (ValueError, 'sum to 8', lambda: tgmm(L, L, [3, 5])),
  (ValueError, 'group_sizes holds -1', lambda: gmm(L, R, [-1, 8])),
  (TypeError, 'group_sizes has dtype', lambda: gmm(L, R, S.astype(float))),
  (TypeError, 'group_sizes has dtype bool', lambda: gmm(L, R, S > 3)),
  (ValueError, '5 columns', lambda: gmm(L, R, S, transpose_rhs=True)),
  (ValueError, 'lhs has shape', lambda: gmm(L[0], R, S)),
  (ValueError, 'rhs has shape', lambda: gmm(L, R[0], S)),
  (ValueError, 'must be one of', lambda: gmm(L, R, S, implementation='cudnn')),
  (ValueError, 'no CPU', lambda: gmm(L, R, S, implementation='pallas')),
  (ValueError, 'block=0', lambda: gmm(L, R, S, block=0)),
  (ValueError, 'block=16.5', lambda: gmm(L, R, S, block=16.5)),
  (ValueError, 'tiles=8', lambda: gmm(L, R, S, tiles=8)),
  (
    ValueError,
    'no multiple of 8',
    lambda: gmm(L, R, S, block=12, implementation='interpret'),
  ),
  (
    ValueError,
    'neither a power of two',
    lambda: gmm(L, R, S, block=48, implementation='interpret_gpu'),
  ),
  (
    ValueError,
    'neither float32',
    lambda: gmm(
      *(x.astype('float16') for x in (L, R)), S, implementation='interpret'
    ),
  ),
  (TypeError, 'lhs has dtype int', lambda: block_gmm(L.astype(int), R, [0])),
  (ValueError, 'equal blocks', lambda: block_gmm(L, R, [0, 0])),
  (ValueError, 'ascend within', lambda: block_gmm(L[:6], R, [1, 0])),
  (ValueError, 'ascend within', lambda: block_gmm(L[:6], R, [0, 3])),
  (ValueError, 'ascend within', lambda: block_tgmm(L[:6], L[:6], [-1, 0], 2)),
  (
    ValueError,
    'block must be at least 1',
    lambda: block_layout(jnp.zeros(3, jnp.int32), 2, 0),
  ),
  (ValueError, 'differ in rows', lambda: block_tgmm(L, R[0], [0], 2)),
  (ValueError, 'differ in rows', lambda: tgmm(L, L[:3], S)),
]


@pytest.mark.parametrize(('error', 'match', 'call'), BAD)
def test_bad_input_is_named(error, match, call):
  with pytest.raises(error, match=match):
    call()


def test_sizes_under_jit_are_clamped():
  lhs, rhs, _ = problem([3, 4], 5, 6)
  call = jax.jit(gmm)
  got = call(lhs, rhs, np.array([3, 99]))
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, [3, 4]), atol=2e-5)
  got = call(lhs, rhs, np.array([-5, 4]))
  np.testing.assert_allclose(got, true_gmm(lhs, rhs, [0, 4]), atol=2e-5)


@pytest.mark.parametrize('path', PATHS)
def test_empty_arrays_give_empty_sums(path):
  lhs, rhs, sizes = problem([3, 4], 5, 6)
  call = functools.partial(gmm, implementation=path)
  none = np.zeros(2, np.int32)
  assert call(lhs[:0], rhs, none).shape == (0, 6)
  assert call(lhs[:0], rhs[:0], none[:0]).shape == (0, 6)
  assert call(lhs, rhs[:, :, :0], sizes).shape == (7, 0)
  np.testing.assert_array_equal(
    call(lhs[:, :0], rhs[:, :0], sizes), np.zeros((7, 6))
  )
  got = jax.grad(lambda w: call(jnp.asarray(lhs[:0]), w, none).sum())(
    jnp.asarray(rhs)
  )
  np.testing.assert_array_equal(got, np.zeros(rhs.shape))
  assert tgmm(lhs[:0], lhs[:0], none, implementation=path).shape == (2, 5, 5)


@pytest.mark.parametrize('path', PATHS)
def test_one_operand_in_half_precision(path):
  lhs, rhs, sizes = problem([20, 3], 40, 16)
  half = jnp.asarray(lhs, jnp.bfloat16)
  single = jnp.asarray(rhs, jnp.float32)
  call = lambda a, w: gmm(a, w, sizes, block=16, implementation=path)
  want = true_gmm(np.asarray(half, float), rhs, sizes)
  got, pull = jax.vjp(call, half, single)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, float), want, rtol=8e-3, atol=0.05)
  assert [x.dtype for x in pull(got)] == [half.dtype, single.dtype]
  flipped = call(jnp.asarray(lhs, jnp.float32), single.astype(jnp.bfloat16))
  assert flipped.dtype == jnp.float32


def test_columns_are_divided_and_nothing_is_gathered():
  lhs, rhs, sizes = problem([9, 0, 4, 20], 6, 8, extra=2)
  lhs, rhs = jnp.asarray(lhs, jnp.float32), jnp.asarray(rhs, jnp.float32)

  def both(lhs, rhs, sizes):
    loss = lambda a, w: jnp.sum(gmm(a, w, sizes, block=16) ** 2)
    return jax.value_and_grad(loss, (0, 1))(lhs, rhs)

  want = jax.jit(both)(lhs, rhs, sizes)
  where = jax.make_mesh(
    (2, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
  )
  specs = P(), P(None, None, 'model'), P()
  placed = [
    jax.device_put(x, NamedSharding(where, spec))
    for x, spec in zip((lhs, rhs, sizes), specs, strict=True)
  ]
  with jax.set_mesh(where):
    compiled = jax.jit(both).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got[1][1].sharding.is_equivalent_to(placed[1].sharding, 3)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4),
    got,
    want,
  )


def gradients(name, dtype, block):
  """Of the matrices and rows of a layer, and (shape, dtype) of all arrays."""
  shape = SHAPES[name]
  count = shape.tokens * shape.k // block + shape.experts

  def loss(lhs, rhs, groups):
    out = block_gmm(lhs, rhs, groups)
    return (out.astype(jnp.float32) ** 2).sum()

  leaves = [
    ((count * block, shape.features), dtype),
    ((shape.experts, shape.features, shape.hidden), dtype),
    ((count,), jnp.int32),
  ]
  return jax.grad(loss, (0, 1)), leaves


def each(chips, names, quick):
  """All calls; those that are not quick are slow."""
  calls = itertools.product(chips, names, ['float32', 'bfloat16'], [128, 512])
  return [
    pytest.param(*x, marks=[] if x[:3] in quick else [pytest.mark.slow])
    for x in calls
  ]


QUICK = [
  (chip, 'small', 'bfloat16') for chip in ('v4:2x2x1', 'v5e:2x2', 'tpu7x:2x2x1')
]


def lowered(platform, implementation, **options):
  """A program for another machine, in text; float32."""
  lhs, rhs, sizes = problem([300, 84], 128, 128)
  call = functools.partial(gmm, implementation=implementation, **options)
  args = lhs.astype('float32'), rhs.astype('float32'), sizes
  traced = jax.jit(call).trace(*args)
  return traced.lower(lowering_platforms=(platform,)).as_text()


def test_the_body_is_chosen_at_lowering():
  for implementation in (None, 'pallas'):
    text = lowered('tpu', implementation)
    assert text.count('tpu_custom_call') == 1
  assert 'tpu_custom_call' not in lowered('tpu', None, block=12)
  with pytest.raises(ValueError, match='no multiple of 8'):
    lowered('tpu', 'pallas', block=12)


@pytest.mark.parametrize('module', [tpu, gpu])
def test_single_precision_is_asked_for(module):
  """Else a TPU rounds to bfloat16 and a GPU to TF32; no interpreter does."""
  lhs, rhs, sizes = problem([20, 12], 16, 16)
  layout = block_layout(jnp.repeat(jnp.arange(2), sizes), 2, 16)
  rows = gather_rows(jnp.asarray(lhs, jnp.float32), layout)
  calls = (
    lambda: module.block_gmm(
      rows, jnp.asarray(rhs, jnp.float32), layout.groups, False
    ),
    lambda: module.block_tgmm(rows, rows, layout.groups, 2),
  )
  for call in calls:
    text = str(jax.make_jaxpr(call)())
    dots = text.count('dot_general')
    assert dots
    assert text.count('Precision.HIGHEST') == 2 * dots


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'name', 'dtype', 'block'),
  each(tpu_targets.CHIPS, ['small', 'medium', 'large', 'wide'], QUICK),
)
def test_the_tpu_compiler_takes_both_products_and_gradients(
  chip, name, dtype, block
):
  text = tpu_targets.compile_for_tpu(chip, *gradients(name, dtype, block))
  # Forward, the gradient of the rows, and that of the matrices.
  assert text.count('custom_call_target="tpu_custom_call"') == 3


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'name', 'dtype', 'block'),
  each(
    gpu_targets.CHIPS,
    ['medium', 'large'],
    [('H100', 'medium', 'bfloat16')],
  ),
)
def test_the_gpu_compiler_takes_both_products_and_gradients(
  chip, name, dtype, block
):
  function, leaves = gradients(name, dtype, block)
  text = gpu_targets.compile_for_gpu(chip, function, *leaves, spills=False)
  assert text.count('__gpu$xla.gpu.triton') == 3

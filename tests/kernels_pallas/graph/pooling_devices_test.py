"""Pooling over several devices, by real compilers, and on modelled memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas.graph import Gate
from kernels_pallas.graph.pooling import reference, tpu
from kernels_pallas.graph.pooling.shapes import SHAPES
from tests.kernels_pallas import gpu_targets, tpu_targets
from tests.kernels_pallas.graph import pooling_problems as problems

CALLS = {
  'slide': ('slide', 'bfloat16', True),
  'packed': ('packed', 'bfloat16', False),
  'many': ('many', 'float32', False),
  'single': ('packed', 'float32', True),
  'most': ('most', 'float32', False),
}


def program(call):
  """Gradients of all operands, and the (shape, dtype) of each."""
  name, dtype, gated = CALLS[call]
  rows, instances, segments, features, units = SHAPES[name]
  leaves = {
    'ids': ((rows, instances), jnp.int32),
    'values': ((rows, instances, features), dtype),
  }
  if gated:
    leaves['tanh'] = leaves['sigmoid'] = (rows, instances, units), dtype
    leaves['weight'] = (units,), jnp.float32
  else:
    leaves['scores'] = (rows, instances), jnp.float32
  names = list(leaves)

  def gradients(*arrays):
    arrays = dict(zip(names, arrays, strict=True))
    ids = arrays.pop('ids')

    def loss(arrays):
      pooled, lse = problems.pool(arrays, ids, segments, None)
      lse = jnp.where(lse > -jnp.inf, lse, 0)
      return jnp.sum(pooled.astype(jnp.float32) ** 2) + jnp.sum(lse)

    return jax.grad(loss)(arrays)

  return gradients, list(leaves.values())


def each(chips, quick):
  return [
    pytest.param(x, y, marks=[] if (x, y) in quick else [pytest.mark.slow])
    for x in chips
    for y in CALLS
  ]


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'call'),
  each(tpu_targets.CHIPS, [('v5e:2x2', 'slide'), ('v4:2x2x1', 'many')]),
)
def test_tpu(chip, call):
  text = tpu_targets.compile_for_tpu(chip, *program(call))
  assert text.count('custom_call_target="tpu_custom_call"') == 2


@pytest.mark.aot
@pytest.mark.parametrize(
  ('chip', 'call'),
  each(gpu_targets.CHIPS, [('A100', 'packed'), ('B200', 'packed')]),
)
def test_gpu(chip, call):
  function, leaves = program(call)
  text = gpu_targets.compile_for_gpu(chip, function, *leaves, spills=False)
  assert text.count('__gpu$xla.gpu.triton') == 2


@pytest.mark.aot
@pytest.mark.parametrize(
  'runs', [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_a_slice_gathers_nothing(runs):
  function, leaves = program('packed')
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
  assert text.count('custom_call_target="tpu_custom_call"') == 2
  assert 'all-gather' not in text


def gradients(arrays, ids):
  def loss(arrays):
    pooled, lse = problems.pool(arrays, ids, 3, None)
    return jnp.sum(pooled**2) + jnp.sum(jnp.where(lse > -jnp.inf, lse, 0))

  return jax.grad(loss)(arrays)


@pytest.mark.parametrize(('rows', 'axis'), [(4, 'data'), (3, None)])
def test_plain_jit_under_a_mesh(rows, axis):
  where = jax.make_mesh(
    (2, 2), ('data', 'model'), axis_types=(AxisType.Auto,) * 2
  )
  problem = problems.draw(rows, 40, 3, 8, 6)
  arrays = {n: jnp.asarray(x, 'float32') for n, x in problem.arrays.items()}
  ids = jnp.asarray(problem.ids)
  want = jax.tree.map(np.asarray, jax.jit(gradients)(arrays, ids))
  split, whole = NamedSharding(where, P(axis)), NamedSharding(where, P())
  specs = {n: whole if n == 'weight' else split for n in arrays}
  placed = jax.device_put((arrays, ids), (specs, split))
  with jax.set_mesh(where):
    compiled = jax.jit(gradients).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got['values'].sharding.is_equivalent_to(split, 3)
  problems.close(got, want, 1e-6)


@pytest.mark.slow
def test_every_kernel_reads_only_what_was_written():
  problem = problems.draw(2, 300, 140, 24, 10)
  f32 = lambda x: jnp.asarray(np.nan_to_num(x), jnp.float32)
  arrays = {n: f32(x) for n, x in problem.arrays.items()}
  gate = Gate(arrays['tanh'], arrays['sigmoid'], arrays['weight'])
  operands = arrays['values'], None, gate, jnp.asarray(problem.ids)
  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  want = reference.forward(*operands, 140)
  got = tpu.forward(*operands, 140, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  problems.close(got, jax.tree.map(np.asarray, want), 1e-5)
  lse = jnp.where(want[1] == -jnp.inf, jnp.inf, want[1])
  given = f32(problem.of_pooled), lse, f32(problem.of_lse)
  want = reference.backward(*operands, *given)
  got = tpu.backward(*operands, *given, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  problems.close(got, jax.tree.map(np.asarray, want), 1e-5)

"""Attention over several devices equals attention on one, and gathers nothing.

The devices are virtual CPUs here; `aot_test.py` asks the TPU compiler.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from kernels_pallas import attention


def operands(batch, runs=()):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v = (draw(*runs, batch, 19, 4, 8) for _ in range(3))
  ids = jnp.asarray(rng.integers(0, 2, (*runs, batch, 19)), jnp.int32)
  return q, k[..., :2, :], v[..., :2, :], draw(*runs, batch, 19), ids


def gradients(q, k, v, bias, ids, implementation=None):
  def loss(q, k, v, bias):
    out, lse = attention(
      q,
      k,
      v,
      causal=True,
      key_bias=bias,
      segment_ids=ids,
      return_lse=True,
      implementation=implementation,
    )
    return jnp.sum(out**2) + jnp.sum(lse), out

  return jax.grad(loss, (0, 1, 2, 3), has_aux=True)(q, k, v, bias)


@functools.cache
def on_one_device(batch):
  return jax.jit(gradients)(*operands(batch))


def close(got, want):
  """Within a fraction of the largest entry of each array."""

  def check(a, b):
    bound = 1e-5 * max(1.0, float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=bound)

  jax.tree.map(check, got, want)


def mesh(*axes):
  kinds = (AxisType.Auto,) * len(axes)
  return jax.make_mesh((2,) * len(axes), axes, axis_types=kinds)


@pytest.mark.parametrize(
  ('batch', 'spec'), [(4, ('data', 'model')), (3, (None, 'model'))]
)
def test_plain_jit_under_a_mesh(batch, spec):
  rows, heads = spec
  where = mesh('data', 'model')
  specs = [P(rows, None, heads)] * 3 + [P(rows), P(rows)]
  placed = [
    jax.device_put(x, NamedSharding(where, s))
    for x, s in zip(operands(batch), specs, strict=True)
  ]
  with jax.set_mesh(where):
    compiled = jax.jit(gradients).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got[0][0].sharding.is_equivalent_to(placed[0].sharding, 4)
  close(got, on_one_device(batch))


def test_runs_under_a_mesh():
  where = mesh('run', 'data')
  one = operands(4)
  runs = [jnp.stack([x, x]) for x in one]
  placed = jax.device_put(runs, NamedSharding(where, P('run', 'data')))
  with jax.set_mesh(where):
    many = jax.jit(jax.vmap(gradients, spmd_axis_name='run'))
    compiled = many.lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  want = jax.tree.map(lambda x: jnp.stack([x, x]), on_one_device(4))
  close(compiled(*placed), want)


def test_inside_the_shard_map_of_a_caller():
  where = mesh('data')
  part = functools.partial(
    jax.shard_map, in_specs=P('data'), out_specs=P('data'), check_vma=False
  )
  with jax.set_mesh(where):
    got = jax.jit(part(gradients))(*operands(4))
  close(got, on_one_device(4))


@pytest.mark.slow
@pytest.mark.parametrize('path', ['interpret', 'interpret_gpu'])
def test_runs_of_the_kernels(path):
  one = operands(2)
  runs = [jnp.stack([x, 2 * x]) for x in one]
  function = functools.partial(gradients, implementation=path)
  got = jax.jit(jax.vmap(function))(*runs)
  for i in range(2):
    close(
      jax.tree.map(lambda x, i=i: x[i], got),
      jax.jit(gradients)(*(x[i] for x in runs)),
    )


@pytest.mark.parametrize('path', [None, 'interpret'])
def test_pages_of_a_pool_under_a_mesh(path):
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  q, k, v = draw(4, 9, 4, 128), draw(20, 16, 2, 128), draw(20, 16, 2, 128)
  table = jnp.asarray(rng.permutation(20)[:16].reshape(4, 4), jnp.int32)
  lengths = jnp.array([64, 9, 33, 17])

  def out(q, k, v, table, lengths, path=path):
    return attention(
      q,
      k,
      v,
      block_table=table,
      lengths=lengths,
      causal=True,
      query_offset=lengths - 9,
      implementation=path,
    )

  def both(*args):
    loss = lambda *args: jnp.sum(out(*args) ** 2)
    return out(*args), jax.grad(loss, (0, 1, 2))(*args)

  args = q, k, v, table, lengths
  where = mesh('data', 'model')
  pool = P(None, None, 'model')
  specs = P('data', None, 'model'), pool, pool, P('data'), P('data')
  placed = [
    jax.device_put(x, NamedSharding(where, s))
    for x, s in zip(args, specs, strict=True)
  ]
  with jax.set_mesh(where):
    compiled = jax.jit(both).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got[0].sharding.is_equivalent_to(placed[0].sharding, 4)
  close(got, jax.jit(both)(*args))
  close(got[0], out(*args, path='reference'))

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

from kernels_pallas import hstu_attention, xor_attention

BATCH = 4


def operands(runs=()):
  """Links, history, lengths, and a bias of HSTU that sequences share."""
  rng = np.random.default_rng(0)
  draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)
  tokens = lambda n: [draw(*runs, BATCH, n, 2, 8) for _ in range(3)]
  lengths = jnp.asarray(rng.integers(0, 20, (*runs, BATCH)), jnp.int32)
  return tokens(5), tokens(19), lengths, draw(*runs, 1, 2, 19, 19)


def gradients(links, history, lengths, bias, implementation=None):
  """Of both functions, and their values."""
  how = {'lengths': lengths, 'implementation': implementation}

  def loss(links, history, bias):
    both = xor_attention(links, history, phi='softmax', **how)
    one = hstu_attention(*history, bias=bias, **how)
    return sum(jnp.sum(x**2) for x in (*both, one)), (both, one)

  return jax.grad(loss, (0, 1, 2), has_aux=True)(links, history, bias)


@functools.cache
def on_one_device():
  return jax.jit(gradients)(*operands())


def close(got, want):
  """Within a fraction of the largest entry of each array."""

  def check(a, b):
    bound = 1e-5 * max(1.0, float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=bound)

  jax.tree.map(check, got, want)


def mesh(*axes):
  kinds = (AxisType.Auto,) * len(axes)
  return jax.make_mesh((2,) * len(axes), axes, axis_types=kinds)


def place(arrays, where, tokens, bias):
  """Puts tokens [..., B, N, H, D], lengths [..., B] and the bias on a mesh."""
  links, history, lengths, of_pairs = arrays
  put = lambda x, spec: jax.device_put(x, NamedSharding(where, spec))
  rows = P(*tokens[: lengths.ndim])
  return (
    [put(x, tokens) for x in links],
    [put(x, tokens) for x in history],
    put(lengths, rows),
    put(of_pairs, bias),
  )


def test_plain_jit_under_a_mesh():
  where = mesh('data', 'model')
  tokens = P('data', None, 'model')
  placed = place(operands(), where, tokens, P(None, 'model'))
  with jax.set_mesh(where):
    compiled = jax.jit(gradients).lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  got = compiled(*placed)
  assert got[0][1][0].sharding.is_equivalent_to(placed[1][0].sharding, 4)
  close(got, on_one_device())


@pytest.mark.slow
def test_runs_under_a_mesh():
  where = mesh('run', 'data')
  runs = jax.tree.map(lambda x: jnp.stack([x, x]), operands())
  placed = place(runs, where, P('run', 'data'), P('run'))
  with jax.set_mesh(where):
    many = jax.jit(jax.vmap(gradients, spmd_axis_name='run'))
    compiled = many.lower(*placed).compile()
  assert 'all-gather' not in compiled.as_text()
  want = jax.tree.map(lambda x: jnp.stack([x, x]), on_one_device())
  close(compiled(*placed), want)


@pytest.mark.slow
def test_inside_the_shard_map_of_a_caller():
  where = mesh('data')

  def part(*args):
    (links, history, bias), both = gradients(*args)
    return (links, history, jax.lax.psum(bias, 'data')), both

  data, whole = P('data'), P()
  mapped = jax.shard_map(
    part,
    in_specs=(data, data, data, whole),
    out_specs=((data, data, whole), data),
    check_vma=False,
  )
  with jax.set_mesh(where):
    close(jax.jit(mapped)(*operands()), on_one_device())


@pytest.mark.slow
@pytest.mark.parametrize('path', ['interpret', 'interpret_gpu'])
def test_runs_of_the_kernels(path):
  one = operands()
  runs = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), one[:2])
  function = functools.partial(gradients, implementation=path)
  shared = jax.vmap(function, in_axes=(0, 0, None, None))
  got = jax.jit(shared)(*runs, *one[2:])
  for i in range(2):
    close(
      jax.tree.map(lambda x, i=i: x[i], got),
      jax.jit(gradients)(*jax.tree.map(lambda x, i=i: x[i], runs), *one[2:]),
    )

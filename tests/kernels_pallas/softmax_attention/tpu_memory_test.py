"""The TPU's bodies on modelled memory, poisoned and watched for races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.softmax_attention import reference, tpu
from kernels_pallas.softmax_attention.options import (
  Blocks,
  Config,
  Rows,
  rope_table,
)
from tests.kernels_pallas.softmax_attention import problems

SHAPE = problems.Shape(1, 150, 290, dim=64, values=32)


@pytest.mark.slow
def test_every_kernel_reads_only_what_was_written():
  rng = np.random.default_rng(0)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(SHAPE))
  integers = lambda *size: jnp.asarray(rng.integers(0, 2, size), jnp.int32)
  bias = jnp.asarray(rng.normal(size=(1, 290)), jnp.float32)
  positions = jnp.arange(290, dtype=jnp.int32)[None]
  table = rope_table(positions, 64, 1e4, np.dtype('float32'))
  rows = Rows(None, jnp.array([270]), integers(1, 150), integers(1, 290))
  config = Config(0.125, causal=True, offset=140, blocks=Blocks(128, 128))
  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )

  def plain(q, k, v, bias):
    return reference.forward(config, q, k, v, bias, table, rows)

  (out, lse), vjp = jax.vjp(plain, q, k, v, bias)
  g = jnp.asarray(rng.normal(size=out.shape), jnp.float32)
  want = vjp((g, jnp.zeros_like(lse)))
  call = (config, q, k, v, bias, table, rows)
  got = tpu.forward(*call, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  np.testing.assert_allclose(got[0], out, atol=1e-5)
  np.testing.assert_allclose(got[1], lse, atol=1e-5)
  delta = jnp.einsum('bthv,bthv->bht', g, out)
  dq, dk, dv, db, _ = tpu.backward(*call, lse, delta, g, interpret=watched)
  assert not interpret_pallas_call.races.races_found
  for a, b in zip((dq, dk, dv, db.sum(1)), want, strict=True):
    np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.slow
def test_pages_are_read_where_they_lie():
  shape = problems.Shape(2, 150, 320, 2, 1, 128, 128)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  rng = np.random.default_rng(0)
  table = jnp.asarray(rng.permutation(23)[:20].reshape(2, 10), jnp.int32)
  lengths = jnp.array([300, 40])
  here = (jnp.arange(320)[None] < lengths[:, None])[:, :, None, None]

  def pool(x):
    x = jnp.where(here, x, jnp.nan).reshape(2, 10, 32, 1, 128)
    return jnp.full((23, 32, 1, 128), jnp.nan).at[table].set(x)

  watched = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
  )
  config = Config(0.1, causal=True, offset=170, blocks=Blocks(128, 128))
  want = reference.forward(config, q, k, v, None, None, Rows(lengths=lengths))
  rows = Rows(lengths=lengths, pages=table)
  got = tpu.forward(
    config, q, pool(k), pool(v), None, None, rows, interpret=watched
  )
  assert not interpret_pallas_call.races.races_found
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)

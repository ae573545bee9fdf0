"""The TPU's bodies on modelled memory, poisoned and watched for races."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.rectangle_attention import reference, tpu
from kernels_pallas.rectangle_attention.options import Config, Rows, Tokens
from kernels_pallas.softmax_attention import options
from kernels_pallas.softmax_attention import reference as attention_reference
from kernels_pallas.softmax_attention import tpu as attention_tpu
from tests.kernels_pallas.rectangle_attention import xor_test
from tests.kernels_pallas.softmax_attention import problems

WATCHED = pltpu.InterpretParams(
  detect_races=True, uninitialized_memory='nan', num_cores_or_threads=2
)


def close(got, want):
  assert not interpret_pallas_call.races.races_found
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    bound = 2e-5 * max(1.0, float(jnp.abs(b).max()))
    np.testing.assert_allclose(a, b, rtol=0, atol=bound)


@pytest.mark.slow
def test_xor_reads_only_what_was_written():
  shape = xor_test.Shape(2, 5, 300, 3)
  *arrays, g = xor_test.rounded(xor_test.operands(shape), 'float32')
  links, history = (Tokens(*x) for x in arrays)
  given = xor_test.options(shape, 'softmax-masked')
  rows = Rows(jnp.asarray(given['lengths']), *given['segment_ids'])
  config = Config(0.2, 'softmax', 128)
  plain = lambda *x: reference.forward(config, *x, rows)
  out, vjp = jax.vjp(plain, links, history)
  want = vjp(g)
  got = tpu.forward(config, links, history, rows, interpret=WATCHED)
  close(got[:2], out)
  lse = jnp.where(got[2] == -jnp.inf, jnp.inf, got[2])
  delta = jnp.einsum('blhv,blhv->bhl', g[0], out[0])
  found = tpu.backward(
    config, links, history, rows, lse, delta, *g, interpret=WATCHED
  )
  close(found, want)


@pytest.mark.slow
def test_hstu_reads_only_what_was_written():
  rng = np.random.default_rng(0)
  shape = problems.Shape(2, 150, 290, dim=64, values=32)
  q, k, v = (jnp.asarray(x, jnp.float32) for x in problems.operands(shape))
  pairs = jnp.asarray(rng.normal(size=(1, 1, 150, 290)), jnp.float32)
  integers = lambda *size: jnp.asarray(rng.integers(0, 2, size), jnp.int32)
  rows = options.Rows(
    None, jnp.array([270, 100]), integers(2, 150), integers(2, 290)
  )
  config = options.Config(
    0.125,
    causal=True,
    offset=140,
    weights='silu',
    blocks=options.Blocks(128, 128),
  )
  args = None, None, rows

  def plain(q, k, v, pairs):
    return attention_reference.forward(config, q, k, v, *args, pairs)[0]

  out, vjp = jax.vjp(plain, q, k, v, pairs)
  g = jnp.asarray(rng.normal(size=out.shape), jnp.float32)
  call = config, q, k, v, *args
  got, _ = attention_tpu.forward(*call, pairs, interpret=WATCHED)
  close(got, out)
  dq, dk, dv, _, dp = attention_tpu.backward(
    *call, None, None, g, pairs, interpret=WATCHED
  )
  close((dq, dk, dv, dp), vjp(g))

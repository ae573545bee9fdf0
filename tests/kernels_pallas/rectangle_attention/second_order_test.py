"""Gradients of functions of gradients of HSTU's attention, in reverse mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import hstu_attention
from kernels_pallas.softmax_attention import Blocks
from tests.kernels_pallas.rectangle_attention.hstu_test import (
  BLOCKS,
  CASES,
  SHAPE,
  draw,
)
from tests.kernels_pallas.softmax_attention import problems
from tests.kernels_pallas.softmax_attention.attention_test import close
from tests.kernels_pallas.softmax_attention.second_order_test import (
  raise_order,
)

# Three blocks of queries and two of keys, none of which fits.
SMALL = problems.Shape(2, 37, 53, 2, 2, 8, 6)
QUICK = [('window', 2), ('offset', 2), ('shared', 3)]
SLOW = [(x, 2) for x in CASES if (x, 2) not in QUICK]


def derive(dtype, shape, case, order=2, **how):
  """The last gradients in q, k, v, the norm and the bias, if there is one."""
  options, bias = draw(shape, case)
  known = {n: x for n, x in options.items() if np.isscalar(x)}
  arrays = {n: x for n, x in options.items() if n not in known}
  operands = [jnp.asarray(x, dtype) for x in problems.operands(shape)]
  operands.append(jnp.asarray([3.0, 5.0], dtype))
  if bias is not None:
    operands.append(jnp.asarray(bias, dtype))

  @jax.jit
  def run(operands, arrays):
    def value(q, k, v, norm, bias=None):
      given = {'norm': norm, 'bias': bias, **known, **arrays, **how}
      return jnp.sum(jnp.sin(hstu_attention(q, k, v, **given)))

    function, count = value, len(operands)
    for _ in range(order - 1):
      function = raise_order(function, count)
    return jax.grad(function, tuple(range(count)))(*operands)

  return run(operands, arrays)


@functools.cache
def truth(shape, case, order=2):
  with jax.enable_x64(True):
    call = functools.partial(derive, implementation='reference')
    return [np.asarray(x) for x in call('float64', shape, case, order)]


@pytest.mark.parametrize(
  ('case', 'order'),
  QUICK + [pytest.param(*x, marks=pytest.mark.slow) for x in SLOW],
)
def test_the_loop(case, order):
  how = {'implementation': 'xla', 'blocks': Blocks(16, 32)}
  with jax.enable_x64(True):
    got = derive('float64', SMALL, case, order, **how)
    got = [np.asarray(x) for x in got]
  close(got, truth(SMALL, case, order), 1e-11)


@pytest.mark.parametrize('path', ['interpret', 'interpret_gpu'])
@pytest.mark.parametrize(
  'case', ['offset', pytest.param('bias', marks=pytest.mark.slow)]
)
def test_kernels(path, case):
  how = {'implementation': path, 'blocks': BLOCKS[path]}
  close(derive('float32', SHAPE, case, **how), truth(SHAPE, case), 2e-5)

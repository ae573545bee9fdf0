"""Block sizes: what the table says, who asks it, and who overrides it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.grouped_matmul import api as gmm_api
from kernels_pallas.grouped_matmul import gmm
from kernels_pallas.rectangle_attention import hstu_attention
from kernels_pallas.softmax_attention import Blocks, attention
from kernels_pallas.tuning import CHIPS, all_cases, find_kernels
from kernels_pallas.tuning import table as tables
from kernels_pallas.tuning.chips import chip_in_use
from kernels_pallas.tuning.kernels import on_chip

TABLE = '{"_about": "x", "gmm": {"v5e": {"bfloat16 1x1x1": [256, 128, 512]}}}'


def test_a_table_is_read_by_op_chip_and_key():
  table = tables.read_table(TABLE)
  assert table == {'gmm': {'v5e': {'bfloat16 1x1x1': (256, 128, 512)}}}


@pytest.mark.parametrize(
  ('before', 'after', 'message'),
  [('v5e', 'v5x', 'must be one of'), ('256', '250', 'multiples of 16')],
)
def test_a_wrong_table_names_what_is_wrong(before, after, message):
  with pytest.raises(ValueError, match=message):
    tables.read_table(TABLE.replace(before, after))


def test_the_shipped_table_is_valid_and_lazy(monkeypatch):
  shipped = tables._shipped()
  ends = '_forward', '_backward'
  ops = {op.removesuffix(ends[0]).removesuffix(ends[1]) for op in shipped}
  assert {x.op for x in all_cases()} >= ops
  for op, chips in shipped.items():
    for chip, rows in chips.items():
      for key, sizes in rows.items():
        assert tables.find_blocks(op, key, chip) == sizes
        with on_chip(CHIPS[chip]):
          assert tables.find_blocks(op, key) == sizes
  # Neither here, nor on another chip, nor for another key.
  assert tables.find_blocks('gmm', 'float64 1x1x1', 'v5e') is None
  assert tables.find_blocks('no such op', 'float64 1x1x1', 'v5e') is None


@pytest.mark.parametrize('name', CHIPS)
def test_the_chip_of_a_program_is_that_of_its_mesh(name):
  assert chip_in_use() is None  # A CPU.
  with on_chip(CHIPS[name]):
    assert chip_in_use() == name


def test_gmm_asks_the_table_and_obeys_the_caller(monkeypatch):
  lhs = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16)
  rhs = jax.ShapeDtypeStruct((2, 256, 512), jnp.bfloat16)
  operands = lhs, rhs, np.array([500, 12], np.int32)
  asked = []

  def find(op, key):
    asked.append((op, key, chip_in_use()))
    return (64, 128, 256)

  monkeypatch.setattr(gmm_api, 'find_blocks', find)

  def grid(**options):
    """Tiles of columns, blocks of rows at most, tiles of inner columns."""
    found = find_kernels(lambda *x: gmm(*x, **options), operands, CHIPS['v5e'])
    (blocks,) = (x.shape[0] for x in found[0].operands if len(x.shape) == 1)
    return found[0].grid[0], blocks, found[0].grid[2]

  # 512 / 64 + 2 groups.
  assert grid() == (2, 10, 2)
  assert asked == [('gmm', 'bfloat16 256x256x512', 'v5e')]
  assert grid(block=128, tiles=(256, 512)) == (1, 6, 1)
  assert len(asked) == 1
  monkeypatch.setattr(gmm_api, 'find_blocks', lambda *_: None)
  assert grid() == (1, 6, 1)


def test_attention_asks_the_table_unless_its_tiles_hold_more():
  q = jax.ShapeDtypeStruct((1, 2048, 1, 128), jnp.bfloat16)
  row = jax.ShapeDtypeStruct((1, 2048), jnp.float32)

  def tiles(chip, blocks=None):
    options = {'causal': True, 'blocks': blocks}
    plain = lambda q, _: attention(q, q, q, **options)
    biased = lambda q, row: attention(q, q, q, key_bias=row, **options)
    return [
      find_kernels(f, (q, row), CHIPS[chip])[0].grid[2:]
      for f in (plain, biased)
    ]

  size = tables.find_blocks('attention_forward', 'bfloat16 128', 'v5e')
  chosen = 2048 // size[0], 2048 // size[1]
  assert chosen != (4, 4)
  # With a bias, and where the table has nothing, the rule of the backend.
  assert tiles('v5e') == [chosen, (4, 4)]
  assert tiles('v4') == [(4, 4), (4, 4)]
  assert tiles('v5e', Blocks(256, 128)) == [(8, 16), (8, 16)]


def test_hstu_asks_the_table_unless_there_is_a_bias():
  q = jax.ShapeDtypeStruct((1, 2048, 1, 64), jnp.bfloat16)
  bias = jax.ShapeDtypeStruct((1, 1, 2048, 2048), jnp.bfloat16)

  def tiles(chip):
    plain = lambda q, _: hstu_attention(q, q, q)
    biased = lambda q, bias: hstu_attention(q, q, q, bias=bias)
    return [
      find_kernels(f, (q, bias), CHIPS[chip])[0].grid[2:]
      for f in (plain, biased)
    ]

  assert tiles('v6e') == [(2, 2), (4, 4)]
  assert tiles('v4') == [(4, 4), (4, 4)]


def test_tiles_do_not_change_a_product():
  rng = np.random.default_rng(0)
  lhs = rng.normal(size=(40, 300)).astype(np.float32)
  rhs = rng.normal(size=(3, 300, 200)).astype(np.float32)
  sizes = np.array([7, 0, 33], np.int32)
  want = np.concatenate([lhs[:7] @ rhs[0], lhs[7:] @ rhs[2]])
  got = gmm(lhs, rhs, sizes, tiles=(128, 128), implementation='interpret')
  np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
  with pytest.raises(ValueError, match='two sizes of at least 16'):
    gmm(lhs, rhs, sizes, tiles=(8, 128))

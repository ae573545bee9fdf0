"""Tells a compiler what grouped products learn from data otherwise.

Which matrix a tile of rows meets, and how many tiles there are, depends on the
sizes of the groups, which the kernels read from memory: an estimate of cycles
would guess. Where all groups have the same number of rows, all of that is a
quotient of the place in the grid. Here the tables that a kernel reads, in its
index maps and in its body, are replaced by that arithmetic, in the same way for
our products and for JAX's megablox.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.grouped_matmul import tpu as ours

__all__ = ['equal_groups']


class _Table:
  """What is read from a prefetched array, as a function of the place."""

  def __init__(self, entry: Callable[[Any], Any]):
    self._entry = entry

  def __getitem__(self, place: Any) -> Any:
    return self._entry(place)


def _tables(count: int, per: int, tile: int) -> tuple[Any, ...]:
  """Those of a kernel that prefetches `count` arguments.

  Ours reads the group of each block. Megablox reads where groups begin, and the
  group and the tile of rows of each step; then the first of its groups.
  """
  group = _Table(lambda i: i // (per // tile))
  if count == 1:
    return (group,)
  begins, tiles = _Table(lambda e: e * per), _Table(lambda i: i)
  return (begins, group, tiles), _Table(lambda _: 0)


@contextlib.contextmanager
def equal_groups(per: int) -> Iterator[None]:
  """Grouped products traced in this context know that groups have `per` rows.

  Args:
    per: a multiple of the rows of a tile.
  """
  # The package hides its module behind a function of the same name.
  megablox = importlib.import_module(
    'jax.experimental.pallas.ops.tpu.megablox.gmm'
  )
  spec, call, metadata = (
    pltpu.PrefetchScalarGridSpec,
    pl.pallas_call,
    megablox.make_group_metadata,
  )
  # Of the kernel that is traced now.
  known: dict[str, Any] = {}

  def with_tile(tile: int) -> None:
    if per % tile:
      raise ValueError(f'tiles of {tile} rows do not divide groups of {per}')
    known['tile'] = tile

  def grid_spec(*, num_scalar_prefetch, in_specs, out_specs, **rest):
    tables = _tables(num_scalar_prefetch, per, known['tile'])
    known['tables'] = tables

    def fix(block):
      if not isinstance(block, pl.BlockSpec) or block.index_map is None:
        return block
      place = block.index_map
      return pl.BlockSpec(
        block.block_shape,
        lambda a, b, c, *_: place(a, b, c, *tables),
        memory_space=block.memory_space,
      )

    leaf = lambda x: x is None or isinstance(x, pl.BlockSpec)
    return spec(
      num_scalar_prefetch=num_scalar_prefetch,
      in_specs=jax.tree.map(fix, in_specs, is_leaf=leaf),
      out_specs=jax.tree.map(fix, out_specs, is_leaf=leaf),
      **rest,
    )

  def pallas_call(body, *args, **options):
    tables = known['tables']

    @functools.wraps(body)
    def whole(*refs):
      return body(*tables, *refs[len(tables) :])

    return call(whole, *args, **options)

  def count(groups, num_groups):
    """As many blocks as the rows fill; the layout has one more per group."""
    blocks = groups.shape[0] - num_groups
    with_tile(num_groups * per // blocks)
    return blocks

  def group_metadata(**options):
    with_tile(options['tm'])
    return metadata(**options)[0], options['m'] // options['tm']

  with (
    mock.patch.object(pltpu, 'PrefetchScalarGridSpec', grid_spec),
    mock.patch.object(pl, 'pallas_call', pallas_call),
    mock.patch.object(ours, '_count', count),
    mock.patch.object(megablox, 'make_group_metadata', group_metadata),
  ):
    # A trace that was kept knows the tables of another call.
    jax.clear_caches()
    yield
  jax.clear_caches()

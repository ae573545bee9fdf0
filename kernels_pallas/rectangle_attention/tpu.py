"""XOR attention for TPUs (Mosaic): the history is read once, as it lies.

Axes: B sequences, L links, m blocks of s items, H = c G heads in G groups of c,
D and V features. R = c L rows are the links of all heads of a group.

A history [B, N, H D] holds c heads in 128 lanes. Instead of cutting them out,
links are laid out so that each head has its own rows, with zeros in the lanes
of the other heads: one product then serves all heads of a group, and neither
the history nor what comes out is transposed or padded.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.common.calls import launch
from kernels_pallas.common.numerics import (
  LOG2E,
  dot,
  dot_rows,
  silu,
  softmax_step,
)
from kernels_pallas.common.padding import pad_axis, split_evenly
from kernels_pallas.rectangle_attention.options import (
  Config,
  Operands,
  Rows,
  Tokens,
)
from kernels_pallas.rectangle_attention.tiles import (
  item_limit,
  link_slopes,
  link_weights,
  visible,
)
from kernels_pallas.softmax_attention.tiles import hide, slopes, unit

__all__ = ['backward', 'forward']

LANES = 128
# Logits of a tile, and bytes of a block of items: half a dozen of each fit into
# VMEM twice. Few long tiles cost the least cycles on every chip (estimates of
# kernels_static.py).
_LOGITS, _BYTES = 2**18, 2**19
_LARGEST = 2048


class _Plan(NamedTuple):
  """Sizes of a call: s, m, G, c of the module docstring."""

  config: Config
  s: int
  m: int
  groups: int
  c: int
  # Links of a head, and with those of padding.
  links: int
  padded: int
  dim: int
  values: int
  # Number of items if it is known and matters.
  limit: int | None


def _width(dim: int) -> int:
  """Features that divide the lanes, or that they divide."""
  if dim > LANES:
    return -(-dim // LANES) * LANES
  return max(32, pl.next_power_of_2(dim))


def _plan(config: Config, links: Tokens, history: Tokens, rows: Rows) -> _Plan:
  _, count, heads, dim = links.q.shape
  values, items = links.v.shape[3], history.q.shape[1]
  dim, values = _width(dim), _width(values)
  c = min(heads, max(1, LANES // min(dim, values)))
  # Whole tiles of 16 rows, which bfloat16 wants.
  padded = -(-count // 16) * 16
  row = c * max(dim, values) * links.q.dtype.itemsize
  largest = min(_LOGITS // (c * padded), _BYTES // row) // LANES * LANES
  largest = config.block or min(max(largest, LANES), _LARGEST)
  s, m = split_evenly(items, largest, LANES)
  limit = item_limit(config, rows, items, s * m - items)
  known = limit if isinstance(limit, int) else None
  groups = -(-heads // c)
  return _Plan(config, s, m, groups, c, count, padded, dim, values, known)


def _lay_history(x: jax.Array, plan: _Plan, width: int) -> jax.Array:
  """[B, N, H, D] -> [B, m s, G c width]; nothing moves where all divides."""
  x = pad_axis(pad_axis(x, 3, width), 2, plan.groups * plan.c)
  return pad_axis(x.reshape(*x.shape[:2], -1), 1, plan.s * plan.m)


def _split_heads(x: jax.Array, plan: _Plan) -> jax.Array:
  """[B, L, H, ...] -> [B, G, c, padded L, ...]."""
  x = pad_axis(pad_axis(x, 2, plan.groups * plan.c), 1, plan.padded)
  x = x.reshape(x.shape[0], plan.padded, plan.groups, plan.c, *x.shape[3:])
  return jnp.moveaxis(x, 1, 3)


def _lay_links(x: jax.Array, plan: _Plan, width: int) -> jax.Array:
  """[B, L, H, D] -> [B, G, R, c width], zeros off the blocks of a head."""
  x = _split_heads(pad_axis(x, 3, width), plan)
  own = jnp.eye(plan.c, dtype=bool)[None, None, :, None, :, None]
  x = jnp.where(own, x[:, :, :, :, None], 0)
  return x.reshape(*x.shape[:2], plan.c * plan.padded, plan.c * width)


def _take_links(x: jax.Array, plan: _Plan, like: jax.Array) -> jax.Array:
  """Undoes `_lay_links`; what lies off the blocks is left out."""
  _, count, heads, dim = like.shape
  width = x.shape[3] // plan.c
  x = x.reshape(*x.shape[:2], plan.c, plan.padded, plan.c, width)
  x = jnp.einsum('bgilid->blgid', x)
  x = x.reshape(x.shape[0], plan.padded, -1, width)
  return x[:, :count, :heads, :dim].astype(like.dtype)


def _columns(x: jax.Array, plan: _Plan, fill: float) -> jax.Array:
  """[B, H, L] -> [B, G, R, 1]."""
  x = pad_axis(x, 1, plan.groups * plan.c)
  x = pad_axis(x, 2, plan.padded, fill)
  return x.reshape(x.shape[0], plan.groups, -1, 1)


def _prepare(
  plan: _Plan, links: Tokens, history: Tokens, rows: Rows
) -> Operands:
  dim, values, items = plan.dim, plan.values, history.q.shape[1]
  limit = item_limit(plan.config, rows, items, 0)
  segment = None
  if rows.links is not None:
    segment = pad_axis(rows.links, 1, plan.padded)
    segment = jnp.tile(segment, (1, plan.c))[:, :, None]
  of_items = None
  if rows.items is not None:
    of_items = pad_axis(rows.items, 1, plan.s * plan.m)[:, None]
  return Operands(
    _lay_links(links.q, plan, dim),
    _lay_links(links.k, plan, dim),
    _lay_links(links.v, plan, values),
    _lay_history(history.q, plan, dim),
    _lay_history(history.k, plan, dim),
    _lay_history(history.v, plan, values),
    limit,
    segment,
    of_items,
  )


def _specs(plan: _Plan) -> Operands:
  """Of the grid (b, g, j)."""
  rows, of_link, of_item = plan.c * plan.padded, _of_link(plan), _of_item(plan)
  column = pl.BlockSpec((None, None, rows, 1), lambda b, g, j: (b, g, 0, 0))
  return Operands(
    of_link(plan.dim),
    of_link(plan.dim),
    of_link(plan.values),
    of_item(plan.dim),
    of_item(plan.dim),
    of_item(plan.values),
    pl.BlockSpec(memory_space=pltpu.SMEM),
    pl.BlockSpec((None, rows, 1), lambda b, g, j: (b, 0, 0)),
    pl.BlockSpec((None, 1, plan.s), lambda b, g, j: (b, 0, j)),
    column,
    column,
    of_link(plan.values),
    of_item(plan.values),
  )


def _of_link(plan: _Plan) -> Callable[[int], pl.BlockSpec]:
  """The rows of a group, for all blocks of its items."""
  rows = plan.c * plan.padded
  return lambda width: pl.BlockSpec(
    (None, None, rows, plan.c * width), lambda b, g, j: (b, g, 0, 0)
  )


def _of_item(plan: _Plan) -> Callable[[int], pl.BlockSpec]:
  return lambda width: pl.BlockSpec(
    (None, plan.s, plan.c * width), lambda b, g, j: (b, j, g)
  )


def _launch(
  body: Callable[..., None],
  plan: _Plan,
  operands: Operands,
  outputs: list[tuple[jax.ShapeDtypeStruct, pl.BlockSpec]],
  scratch: dict[str, Any],
  name: str,
  interpret: Any,
) -> list[jax.Array]:
  batch, groups, rows, dim = operands.link_q.shape
  logits = 2 * batch * groups * rows * plan.s * plan.m
  return launch(
    functools.partial(body, plan=plan),
    operands,
    _specs(plan),
    outputs,
    scratch,
    grid=(batch, groups, plan.m),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary')
    ),
    cost_estimate=pl.CostEstimate(
      flops=2 * logits * (dim + operands.link_v.shape[3]),
      bytes_accessed=sum(x.nbytes for x in operands if x is not None),
      transcendentals=logits,
    ),
    interpret=interpret,
    name=name,
  )


def _seen(plan: _Plan, refs: Operands, j: Any, limit: Any) -> Any:
  """Which items each link sees, in shapes that broadcast; None for all."""
  exists = same = None
  if limit is not None:
    index = jax.lax.broadcasted_iota(jnp.int32, (1, plan.s), 1)
    exists = index + j * plan.s < limit
  if refs.link_segment is not None:
    same = refs.link_segment[...] == refs.item_segment[...]
  return visible(exists, same)


def _by_head(plan: _Plan, x: jax.Array) -> jax.Array:
  """[R, s] -> [c, L, s]."""
  return x.reshape(plan.c, plan.padded, plan.s)


def _link_mask(plan: _Plan, seen: jax.Array | None) -> jax.Array | None:
  """[c, L, s]: seen, and no link of padding, which a softmax would count."""
  shape = plan.c, plan.padded, plan.s
  real = None
  if plan.links < plan.padded and plan.config.weights == 'softmax':
    index = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
    real = index < plan.links
  if seen is not None:
    # Booleans are not reshaped: their tiles are others.
    full = jnp.broadcast_to(seen, (plan.c * plan.padded, plan.s))
    seen = _by_head(plan, full.astype(jnp.int32)) > 0
  return visible(real, seen)


def _over_items(
  plan: _Plan,
  refs: Operands,
  step: Callable[..., None],
  skip: Callable[[], None],
) -> None:
  """Calls step(seen, read), or skip() for a tile beyond the end of the history.

  `read` takes the tile of an array of items, zeros beyond the end.
  """
  b, j = pl.program_id(0), pl.program_id(2)
  read = lambda ref: ref[...]
  if refs.limit is None:
    step(_seen(plan, refs, j, plan.limit), read)
    return
  limit = refs.limit[b]

  def read_some(ref):
    index = jax.lax.broadcasted_iota(jnp.int32, ref.shape, 0) + j * plan.s
    # where, not multiply: 0 * NaN is NaN.
    return jnp.where(index < limit, ref[...], 0)

  some, whole = j * plan.s < limit, (j + 1) * plan.s <= limit

  @pl.when(whole)
  def _():
    step(_seen(plan, refs, j, None), read)

  @pl.when(some & jnp.logical_not(whole))
  def _():
    step(_seen(plan, refs, j, limit), read_some)

  pl.when(jnp.logical_not(some))(skip)


def _wide(column: jax.Array, size: int) -> jax.Array:
  """[R, 128], the same number in all lanes, in a shape for [R, size]."""
  if size % LANES:
    return column[:, :1]
  return jnp.tile(column, (1, size // LANES))


def _forward_body(refs, outputs, space, *, plan):
  config, (of_links, of_items, *lse) = plan.config, outputs
  factor, acc = config.scale * unit(config.weights), space['acc']

  @pl.when(pl.program_id(2) == 0)
  def _():
    acc[...] = jnp.zeros_like(acc)
    if lse:
      space['peak'][...] = jnp.full_like(space['peak'], -jnp.inf)
      space['total'][...] = jnp.zeros_like(space['total'])

  def step(seen, read):
    x = dot(refs.link_q[...], read(refs.k), transpose=True) * factor
    if lse:
      weights, decay, space['peak'][...], space['total'][...] = softmax_step(
        hide(x, seen, -jnp.inf),
        space['peak'][...],
        space['total'][...],
        1,
        jnp.exp2,
        lambda shift: _wide(shift, plan.s),
      )
      acc[...] *= _wide(decay, acc.shape[1])
    else:
      weights, _ = silu(hide(x, seen, 0.0))
    acc[...] += dot(weights, read(refs.v))
    y = dot(refs.link_k[...], read(refs.q), transpose=True) * factor
    if lse:
      mask = _link_mask(plan, seen)
      weights = link_weights(config, _by_head(plan, y), mask, jnp.exp2)
      weights = weights.reshape(y.shape)
    else:
      weights, _ = silu(hide(y, seen, 0.0))
    of_items[...] = dot_rows(weights, refs.link_v[...]).astype(of_items.dtype)

  def skip():
    of_items[...] = jnp.zeros_like(of_items)

  _over_items(plan, refs, step, skip)

  @pl.when(pl.program_id(2) == plan.m - 1)
  def _():
    if not lse:
      of_links[...] = acc[...].astype(of_links.dtype)
      return
    peak, total = space['peak'][...], space['total'][...]
    safe = jnp.where(total > 0, total, 1.0)
    out = acc[...] / _wide(safe, acc.shape[1])
    of_links[...] = out.astype(of_links.dtype)
    natural = peak / LOG2E + jnp.log(safe)
    lse[0][...] = jnp.where(total > 0, natural, -jnp.inf)


def forward(
  config: Config,
  links: Tokens,
  history: Tokens,
  rows: Rows,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
  """The function of `xla.forward`."""
  plan = _plan(config, links, history, rows)
  operands = _prepare(plan, links, history, rows)
  batch, groups, size, _ = operands.link_q.shape
  values, dtype = operands.link_v.shape[3], history.v.dtype
  struct = jax.ShapeDtypeStruct
  outputs = [
    (struct((batch, groups, size, values), dtype), _of_link(plan)(plan.values)),
    (struct(operands.v.shape, dtype), _of_item(plan)(plan.values)),
  ]
  scratch = {'acc': pltpu.VMEM((size, values), jnp.float32)}
  if config.weights == 'softmax':
    spec = pl.BlockSpec((None, None, size, LANES), lambda b, g, j: (b, g, 0, 0))
    shape = batch, groups, size, LANES
    outputs.append((struct(shape, jnp.float32), spec))
    for name in ('peak', 'total'):
      scratch[name] = pltpu.VMEM((size, LANES), jnp.float32)
  of_links, of_items, *lse = _launch(
    _forward_body, plan, operands, outputs, scratch, 'xor_forward', interpret
  )
  stats = None
  if lse:
    stats = lse[0][..., 0].reshape(batch, groups * plan.c, plan.padded)
    stats = stats[:, : links.q.shape[2], : plan.links]
  of_links = _take_links(of_links, plan, links.v)
  return of_links, _take_items(of_items, plan, history.v), stats


def _take_items(x: jax.Array, plan: _Plan, like: jax.Array) -> jax.Array:
  """Undoes `_lay_history`."""
  _, items, heads, dim = like.shape
  x = x.reshape(*x.shape[:2], plan.groups * plan.c, -1)
  return x[:, :items, :heads, :dim]


def _backward_body(refs, outputs, space, *, plan):
  config = plan.config
  factor = config.scale * unit(config.weights)
  dq, dk, dv, of_q, of_k, of_v = outputs
  sums = [space[name] for name in ('q', 'k', 'v')]

  @pl.when(pl.program_id(2) == 0)
  def _():
    for ref in sums:
      ref[...] = jnp.zeros_like(ref)

  def from_items(seen, read):
    k = read(refs.k)
    x = dot(refs.link_q[...], k, transpose=True) * factor
    inner = dot(refs.link_g[...], read(refs.v), transpose=True)
    lse, delta = (
      None if ref is None else ref[...] for ref in (refs.lse, refs.delta)
    )
    weights, slope = slopes(
      config.weights, x, seen, lse, delta, inner, jnp.exp2
    )
    dv[...] = dot_rows(weights, refs.link_g[...]).astype(dv.dtype)
    slope = slope * config.scale
    dk[...] = dot_rows(slope, refs.link_q[...]).astype(dk.dtype)
    sums[0][...] += dot(slope, k)

  def from_links(seen, read):
    q, g = read(refs.q), read(refs.g)
    y = dot(refs.link_k[...], q, transpose=True) * factor
    inner = dot(refs.link_v[...], g, transpose=True)
    if config.weights == 'softmax':
      split = lambda x: _by_head(plan, x)
      found = link_slopes(
        config, split(y), _link_mask(plan, seen), split(inner), jnp.exp2
      )
      weights, slope = (x.reshape(y.shape) for x in found)
    else:
      weights, slope = link_slopes(config, y, seen, inner, jnp.exp2)
    sums[2][...] += dot(weights, g)
    slope = slope * config.scale
    dq[...] = dot_rows(slope, refs.link_k[...]).astype(dq.dtype)
    sums[1][...] += dot(slope, q)

  def step(seen, read):
    from_items(seen, read)
    from_links(seen, read)

  def skip():
    for ref in (dq, dk, dv):
      ref[...] = jnp.zeros_like(ref)

  _over_items(plan, refs, step, skip)

  @pl.when(pl.program_id(2) == plan.m - 1)
  def _():
    for ref, total in zip((of_q, of_k, of_v), sums, strict=True):
      ref[...] = total[...].astype(ref.dtype)


def backward(
  config: Config,
  links: Tokens,
  history: Tokens,
  rows: Rows,
  lse: jax.Array | None,
  delta: jax.Array | None,
  g_links: jax.Array,
  g_items: jax.Array,
  interpret: Any = False,
) -> tuple[Tokens, Tokens]:
  """The function of `xla.backward`."""
  plan = _plan(config, links, history, rows)
  operands = _prepare(plan, links, history, rows)
  operands = operands._replace(
    link_g=_lay_links(g_links, plan, plan.values),
    g=_lay_history(g_items, plan, plan.values),
  )
  if lse is not None and delta is not None:
    operands = operands._replace(
      lse=_columns(lse * LOG2E, plan, np.inf), delta=_columns(delta, plan, 0)
    )
  names = ('q', 'k', 'v')
  widths = plan.dim, plan.dim, plan.values
  of_item, of_link = _of_item(plan), _of_link(plan)
  struct = jax.ShapeDtypeStruct
  outputs = [
    (struct(getattr(operands, name).shape, history.q.dtype), of_item(width))
    for name, width in zip(names, widths, strict=True)
  ]
  shapes = [getattr(operands, f'link_{name}').shape for name in names]
  outputs += [
    (struct(shape, links.q.dtype), of_link(width))
    for shape, width in zip(shapes, widths, strict=True)
  ]
  scratch = {
    name: pltpu.VMEM(shape[2:], jnp.float32)
    for name, shape in zip(names, shapes, strict=True)
  }
  found = _launch(
    _backward_body, plan, operands, outputs, scratch, 'xor_backward', interpret
  )
  take = lambda cut, arrays, like: Tokens(
    *(cut(x, plan, y) for x, y in zip(arrays, like, strict=True))
  )
  return (
    take(_take_links, found[3:], links),
    take(_take_items, found[:3], history),
  )

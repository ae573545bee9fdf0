r"""Depthwise convolutions of patches that lie on a raster.

Axes: N patches (padded), E features, W taps in each direction (odd).

Each function sees one slide; use `jax.vmap` for several.
"""

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ['depthwise', 'depthwise_on_grid', 'depthwise_on_square']


def depthwise_on_square(
  patches: jax.Array, side: jax.Array, kernel: jax.Array
) -> jax.Array:
  """Patches 0 .. s^2 - 1 row by row on a square; zeros around it.

  y_p = sum_{u, v} k_uv * x at (row + u - W // 2, column + v - W // 2).

  Args:
    patches: [M^2, E], M the largest side.
    side: [], int32, s in [0, M].
    kernel: [W, W, E].

  Returns:
    [M^2, E]; what stands beyond s^2 means nothing.
  """
  size, features = patches.shape
  largest = round(size**0.5)
  row, column = jnp.divmod(jnp.arange(size), largest)
  inside = (row < side) & (column < side)
  raster = patches[jnp.clip(row * side + column, 0, max(size - 1, 0))]
  raster = jnp.where(inside[:, None], raster, 0)
  raster = depthwise(raster.reshape(largest, largest, features), kernel)
  row, column = jnp.divmod(jnp.arange(size), jnp.maximum(side, 1))
  place = jnp.clip(row * largest + column, 0, max(size - 1, 0))
  return raster.reshape(size, features)[place]


def depthwise_on_grid(
  patches: jax.Array, coords: jax.Array, count: jax.Array, kernel: jax.Array
) -> jax.Array:
  """The same over the true neighbours of each patch; zeros where none is.

  Of several patches at one position the first is their neighbours' one.

  Args:
    patches: [N, E], zero beyond `count`.
    coords: [N, 2], int32, row and column; spans below 2^15.
    count: [], int32.
    kernel: [W, W, E].

  Returns:
    [N, E]; what stands beyond `count` means nothing.
  """
  n, reach = patches.shape[0], kernel.shape[0] // 2
  real = jnp.arange(n) < count
  low = jnp.min(jnp.where(real[:, None], coords, 2**30), 0, keepdims=True)
  ij = jnp.where(real[:, None], coords - low, 0) + reach
  width = jnp.max(ij[:, 1]) + reach + 1
  key = jnp.where(real, ij[:, 0] * width + ij[:, 1], 2**31 - 1)
  order = jnp.argsort(key, stable=True)
  ordered = key[order]

  def add(total, tap):
    u, v, weight = tap
    wanted = key + (u - reach) * width + (v - reach)
    place = jnp.clip(jnp.searchsorted(ordered, wanted), 0, n - 1)
    found = (ordered[place] == wanted) & real
    return total + jnp.where(
      found[:, None], patches[order[place]] * weight[None], 0
    ), None

  size = kernel.shape[0]
  u, v = jnp.divmod(jnp.arange(size * size), size)
  taps = (u, v, kernel.reshape(size * size, -1))
  return jax.lax.scan(add, jnp.zeros_like(patches), taps)[0]


# Numbers of a block of rows whose products with all taps stay in the cache.
_BLOCK = 2**18


@jax.custom_vjp
def depthwise(raster: jax.Array, kernel: jax.Array) -> jax.Array:
  """Correlation of each feature with its own kernel, zeros outside.

  Its gradient is written down, not traced: the transpose of shifted products
  would hold one padded copy of the raster per tap.

  Args:
    raster: [I, J, E].
    kernel: [U, V, E], U and V odd.

  Returns:
    [I, J, E].
  """
  rows, columns, _ = raster.shape
  padded = _pad(raster, kernel.shape)
  total = jnp.zeros_like(raster)
  # Fixed slices: XLA fuses all taps into one pass.
  for u, v in np.ndindex(*kernel.shape[:2]):
    total += padded[u : u + rows, v : v + columns] * kernel[u, v][None, None]
  return total


def _pad(raster, shape):
  up, left = shape[0] // 2, shape[1] // 2
  return jnp.pad(raster, ((up, up), (left, left), (0, 0)))


def _depthwise_forward(raster, kernel):
  return depthwise(raster, kernel), (raster, kernel)


def _depthwise_backward(saved, grad):
  raster, kernel = saved
  rows, columns, features = raster.shape
  block = max(1, min(rows, _BLOCK // max(columns * features, 1)))
  count = -(-rows // block)
  below = ((0, count * block - rows), (0, 0), (0, 0))
  padded = jnp.pad(_pad(raster, kernel.shape), below)
  parts = jnp.pad(grad, below).reshape(count, block, columns, features)

  def add(total, item):
    start, part = item
    reach = kernel.shape[0] - 1
    near = jax.lax.dynamic_slice_in_dim(padded, start, block + reach)
    sums = [
      jnp.sum(near[u : u + block, v : v + columns] * part, (0, 1))
      for u, v in np.ndindex(*kernel.shape[:2])
    ]
    return total + jnp.stack(sums).reshape(total.shape), None

  starts = jnp.arange(count) * block
  wide = jnp.promote_types(jnp.result_type(raster, grad), jnp.float32)
  total = jnp.zeros(kernel.shape, wide)
  by_tap = jax.lax.scan(add, total, (starts, parts))[0].astype(kernel.dtype)
  by_raster = depthwise(grad, kernel[::-1, ::-1])
  return by_raster.astype(raster.dtype), by_tap


depthwise.defvjp(_depthwise_forward, _depthwise_backward)

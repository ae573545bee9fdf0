r"""TransMIL: two Nystrom layers with a pyramid of positions between them.

Axes: B rows, S bags of a row, R = B S bags, N patches, T tokens, E features, C
classes.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

from tmlib.mil.bag import Bag
from tmlib.mil.embedding import embed, row_keys
from tmlib.mil.layers import LayerNorm, wide
from tmlib.mil.nystrom import (
  NystromParams,
  nystrom_attention,
  nystrom_first_token,
)
from tmlib.mil.output import MILOutput
from tmlib.mil.rows import (
  membership,
  normalise_in_bag,
  only_bag,
  own_bag,
  place_in_bag,
  unpack_rows,
)
from tmlib.ops.raster import depthwise_on_grid, depthwise_on_square

__all__ = ['TransMIL', 'square_side', 'square_tokens']


def square_side(count: jax.Array) -> jax.Array:
  """Smallest s with s^2 >= count, exactly: [...], int32."""
  root = jnp.sqrt(count.astype(jnp.float32)).astype(jnp.int32)
  # The root of a float may be one off on either side.
  root = jnp.maximum(root - 1, 0)
  for _ in range(3):
    root = jnp.where(root * root < count, root + 1, root)
  return root


def square_tokens(
  patches: jax.Array, count: jax.Array, first: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """A first token, then the patches, the first ones again to fill a square.

  Args:
    patches: [N, E], zero beyond `count`.
    count: [], int32 in [0, N].
    first: [E], the class token.

  Returns:
    tokens: [1 + s^2, E] with s = ceil(sqrt(N)), zero in padding.
    total: [], int32, 1 + ceil(sqrt(count))^2 tokens.
  """
  n = patches.shape[0]
  side = int(n**0.5)
  side += side * side < n
  place = jnp.arange(side * side)
  cells = square_side(count) ** 2
  index = jnp.where(place < count, place, place - count)
  rows = patches[jnp.clip(index, 0, n - 1)]
  rows = jnp.where((place < cells)[:, None], rows, 0)
  return jnp.concatenate([first[None], rows]), cells + 1


class TransMIL(nn.Module):
  r"""Transformer of a slide whose cost is linear in its patches.

  x = [cls | relu(W x_i)]; x += A_1(LN x); x += PPEG(x); x += A_2(LN x);
  logits = W LN(x_cls) + b, where A is Nystrom attention and PPEG the sum of
  depthwise 7 x 7, 5 x 5 and 3 x 3 convolutions. Only the class token of the
  last layer is read, so only its row is computed. `attention` is that row,
  negative entries cut, normalised over the patches; `extras['cls_attention']`
  the row as it is.

  This model reads the order of its patches, through the blocks of landmarks,
  the convolution along the sequence and (in layout 'order') the raster. Packed
  rows are unpacked, at S times the memory.

  Attributes:
    num_classes: C.
    in_dim: P, or None for any.
    hidden: E, divisible by `heads`.
    heads: of attention.
    landmarks: m; 0 takes E / 2, as the authors do.
    iterations: of the pseudo-inverse.
    layout: 'order' lays the patches in file order on the smallest square, as
      the authors do, the first ones repeated to fill it; 'grid' convolves over
      the true neighbours by `bag.coords` and repeats nothing.
    taps: W of the convolution along the sequence, odd.
    shared_norm: see `nystrom.pseudo_inverse`.
    dropout: rate after the embedding, in [0, 1).
    dtype: computation dtype of the embedding.

  References:
    Shao, Bian, Chen et al. TransMIL: Transformer based correlated multiple
    instance learning for whole slide image classification, 2021.
  """

  num_classes: int
  in_dim: int | None = None
  hidden: int = 512
  heads: int = 8
  landmarks: int = 0
  iterations: int = 6
  layout: str = 'order'
  taps: int = 33
  shared_norm: bool = False
  dropout: float = 0.0
  dtype: jnp.dtype | None = None

  @nn.compact
  def __call__(
    self, bag: Bag, train: bool = False, dropout_keys: jax.Array | None = None
  ) -> MILOutput:
    """Maps a batch of bags to a MILOutput; see `ABMIL.__call__`.

    Raises:
      ValueError: layout 'grid' for bags without coords.
    """
    self._check()
    hidden = wide(embed(self, bag, row_keys(self, bag, train, dropout_keys)))
    member = membership(bag)
    rows, count = unpack_rows(hidden, member)
    flat = lambda x: x.reshape(-1, *x.shape[2:])
    rows, count = flat(rows), flat(count)
    first = self.param('cls', nn.initializers.normal(1.0), (self.hidden,))
    if self.layout == 'order':
      fill = jax.vmap(square_tokens, (0, 0, None))
      x, total = fill(rows, count, first)
    else:
      start = jnp.broadcast_to(first, (len(rows), 1, self.hidden))
      x, total = jnp.concatenate([start, rows], 1), count + 1
    options = {
      'm': self.landmarks or max(self.hidden // 2, 1),
      'iterations': self.iterations,
      'shared_norm': self.shared_norm,
    }
    real = jnp.arange(x.shape[1])[None] < total[:, None]

    def layer(number, attend):
      params = self._attention(number)
      y = LayerNorm(name=f'norm_{number}')(x)
      y = jnp.where(real[..., None], y, 0)
      return attend(y, total, params, **options)

    x = jnp.where(real[..., None], x + layer(1, nystrom_attention), 0)
    x = self._positions(x, bag, member, count)
    row, looks = layer(2, nystrom_first_token)
    slide = LayerNorm(name='norm')(x[:, 0] + row)
    logits = nn.Dense(self.num_classes, name='head')(slide)

    looks = self._of_patches(looks, count, rows.shape[1])
    unflat = lambda x: x.reshape(len(hidden), -1, *x.shape[1:])
    place = place_in_bag(member)
    table = jnp.swapaxes(unflat(looks), 1, 2)  # [B, N, S]
    looks = own_bag(member, jnp.take_along_axis(table, place[..., None], 1))
    return MILOutput(
      only_bag(bag, unflat(logits)),
      normalise_in_bag(jnp.maximum(looks, 0), member),
      only_bag(bag, unflat(slide)),
      extras={'cls_attention': looks},
    )

  def _attention(self, number: int) -> NystromParams:
    e, h = self.hidden, self.heads
    init = nn.initializers.lecun_normal
    return NystromParams(
      self.param(f'qkv_{number}', init(in_axis=0, out_axis=(1, 2, 3)),
                 (e, 3, h, e // h)),
      self.param(f'out_{number}', init(in_axis=(0, 1), out_axis=2),
                 (h, e // h, e)),
      self.param(f'out_bias_{number}', nn.initializers.zeros, (e,)),
      self.param(f'residual_{number}', nn.initializers.normal(self.taps**-0.5),
                 (self.taps, h)),
    )  # fmt: skip

  def _positions(self, x, bag, member, count):
    """Adds depthwise convolutions of the patches; the class token stays."""
    kernel, bias = 0.0, 0.0
    for size in (7, 5, 3):
      # One kernel of 7 x 7 does the work of the three.
      part = self.param(
        f'ppeg_{size}',
        nn.initializers.normal(1 / size),
        (size, size, self.hidden),
      )
      edge = (7 - size) // 2
      kernel += jnp.pad(part, ((edge, edge), (edge, edge), (0, 0)))
      bias += self.param(
        f'ppeg_bias_{size}', nn.initializers.zeros, (self.hidden,)
      )
    patches = x[:, 1:]
    if self.layout == 'order':
      side = square_side(count)
      total = side * side
      spread = jax.vmap(depthwise_on_square, (0, 0, None))(
        patches, side, kernel
      )
    else:
      coords, total = unpack_rows(bag.coords, member)
      coords = coords.reshape(-1, *coords.shape[2:])
      total = total.reshape(-1)
      spread = jax.vmap(depthwise_on_grid, (0, 0, 0, None))(
        patches, coords, total, kernel
      )
    real = jnp.arange(patches.shape[1])[None] < total[:, None]
    spread = jnp.where(real[..., None], spread + bias[None, None], 0)
    return x + jnp.pad(spread, ((0, 0), (1, 0), (0, 0)))

  def _of_patches(self, looks, count, n):
    """Attention of the tokens [R, T] to that of the patches [R, N]."""
    own = looks[:, 1 : n + 1]
    if self.layout == 'grid':
      return own
    # A repeated patch has two tokens.
    place = jnp.arange(n)[None]
    again = place + 1 + count[:, None]
    side = square_side(count)[:, None]
    second = jnp.take_along_axis(
      looks, jnp.clip(again, 0, looks.shape[1] - 1), 1
    )
    return own + jnp.where(again <= side * side, second, 0)

  def _check(self):
    if self.layout not in ('order', 'grid'):
      raise ValueError(f"layout must be 'order' or 'grid', got {self.layout!r}")
    if self.hidden % self.heads:
      raise ValueError(
        f'hidden={self.hidden} must be divisible by heads={self.heads}'
      )
    if self.taps % 2 == 0:
      raise ValueError(f'taps must be odd, got {self.taps}')

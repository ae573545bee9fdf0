"""Many random words per step of a scan, cheaply on a CPU.

`jax.random.bits` computes one threefry block per word, and rolls its rounds
into a loop that a CPU compiler cannot fuse. Here both words of a block are
kept and the twenty rounds are one fused expression: the same function of key
and counter.

References:
  Salmon et al. Parallel random numbers: as easy as 1, 2, 3. 2011.
"""

import jax
import jax.numpy as jnp

__all__ = ['random_words', 'threefry']

_PARITY = 0x1BD11BDA
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(
  key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
  """Threefry-2x32 with 20 rounds, elementwise.

  Args:
    key: two uint32 arrays.
    counter: two uint32 arrays that broadcast with the key.

  Returns:
    Two uint32 arrays: a random function of (key, counter).
  """
  schedule = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
  x, y = counter[0] + schedule[0], counter[1] + schedule[1]
  for i in range(5):
    for bits in _ROTATIONS[i % 2]:
      x = x + y
      y = ((y << bits) | (y >> (32 - bits))) ^ x
    x = x + schedule[(i + 1) % 3]
    y = y + schedule[(i + 2) % 3] + jnp.uint32(i + 1)
  return x, y


def random_words(key: jax.Array, count: int, rows: int) -> jax.Array:
  """Random 32-bit words; column m depends on the key and m alone.

  Args:
    key: PRNG key of any kind; consumed.
    count: W, words per row.
    rows: M.

  Returns:
    [W, M] uint32. M comes last so that a CPU fills its vectors.
  """
  word = jax.random.bits(key, (2,))
  blocks = -(-count // 2)
  row = jax.lax.broadcasted_iota(jnp.uint32, (blocks, rows), 1)
  block = jax.lax.broadcasted_iota(jnp.uint32, (blocks, rows), 0)
  words = jnp.concatenate(threefry((word[0], word[1]), (row, block)))[:count]
  # Else the compiler recomputes the words inside every consumer.
  return jax.lax.optimization_barrier(words)

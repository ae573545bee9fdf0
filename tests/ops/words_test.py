"""Words equal those of jax's own generator, and look random."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import threefry2x32_p
from scipy import stats

from tmlib.ops import words as rw


def test_threefry_is_that_of_jax():
  rng = np.random.default_rng(0)
  words = [
    jnp.asarray(rng.integers(0, 2**32, 999, dtype=np.uint32)) for _ in range(4)
  ]
  want = threefry2x32_p.bind(*words)
  found = rw.threefry((words[0], words[1]), (words[2], words[3]))
  for a, b in zip(found, want, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_column_depends_on_its_number_alone():
  key = jax.random.key(3)
  many = rw.random_words(key, 5, 100)
  np.testing.assert_array_equal(rw.random_words(key, 5, 7), many[:, :7])
  assert len(np.unique(many)) == many.size
  assert (rw.random_words(jax.random.key(4), 5, 100) != many).all()


def test_words_are_uniform_and_rows_independent():
  words = np.asarray(rw.random_words(jax.random.key(0), 6, 20_000))
  unit = words / 2.0**32
  assert stats.kstest(unit.ravel(), 'uniform').pvalue > 1e-3
  correlation = np.corrcoef(unit) - np.eye(6)
  assert abs(correlation).max() < 4.5 / np.sqrt(20_000)
  bits = np.unpackbits(words.view(np.uint8)).mean()
  assert abs(bits - 0.5) < 4 * 0.5 / np.sqrt(words.size * 32)


def test_other_kinds_of_key_are_taken():
  key = jax.random.key(0, impl='rbg')
  assert rw.random_words(key, 3, 4).shape == (3, 4)

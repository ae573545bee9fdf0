"""Pooling problems, and their answers by loops over instances in float64."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas.graph import Gate, segment_pool

ARRAYS = ('values', 'scores', 'tanh', 'sigmoid', 'weight')


class Problem(NamedTuple):
  """Float64 arrays by name, ids, and the cotangents of pooled and lse."""

  arrays: dict
  ids: np.ndarray
  segments: int
  of_pooled: np.ndarray
  of_lse: np.ndarray


def draw(
  rows,
  instances,
  segments,
  features,
  units=0,
  seed=0,
  order='sorted',
  gate=True,
):
  """Segment 1 is empty, the last of row 0 has one instance; ids of -1 are
  NaN."""
  rng = np.random.default_rng(seed)
  ids = rng.integers(-1, segments, (rows, instances))
  if segments > 1:
    ids[ids == 1] = 0
  ids = np.sort(ids, 1)
  if order == 'none':
    ids[:] = -1
  if order == 'shuffled':
    ids = rng.permuted(ids, axis=1)
  shape = rows, instances
  arrays = {'values': rng.normal(size=(*shape, features))}
  if units:
    arrays['tanh'] = rng.normal(size=(*shape, units))
    if gate:
      arrays['sigmoid'] = rng.normal(size=(*shape, units))
    arrays['weight'] = rng.normal(size=units)
  else:
    arrays['scores'] = 3 * rng.normal(size=shape)
  for name, x in arrays.items():
    if name != 'weight':
      x[ids < 0] = np.nan
  of_pooled = rng.normal(size=(rows, segments, features))
  of_lse = rng.normal(size=(rows, segments))
  return Problem(arrays, ids.astype(np.int32), segments, of_pooled, of_lse)


def rounded(problem, dtype):
  arrays = {
    name: np.asarray(jnp.asarray(x, dtype), float)
    for name, x in problem.arrays.items()
  }
  return problem._replace(arrays=arrays)


def brute_force(problem):
  """pooled, lse and the gradients, one segment at a time."""
  arrays, ids = problem.arrays, problem.ids
  h = arrays['values']
  rows, _, features = h.shape
  if 'scores' in arrays:
    e = arrays['scores']
  else:
    units = np.tanh(arrays['tanh'])
    if 'sigmoid' in arrays:
      gate = 1 / (1 + np.exp(-arrays['sigmoid']))
      units = units * gate
    e = units @ arrays['weight']
  pooled = np.zeros((rows, problem.segments, features))
  lse = np.full((rows, problem.segments), -np.inf)
  dh, de = np.zeros(h.shape), np.zeros(ids.shape)
  for b, s in np.ndindex(*lse.shape):
    mine = [n for n in range(ids.shape[1]) if ids[b, n] == s]
    mine = [n for n in mine if e[b, n] > -np.inf]
    if not mine:
      continue
    g, c = problem.of_pooled[b, s], problem.of_lse[b, s]
    lse[b, s] = np.logaddexp.reduce(e[b, mine])
    a = np.exp(e[b, mine] - lse[b, s])
    pooled[b, s] = a @ h[b, mine]
    dh[b, mine] = a[:, None] * g
    de[b, mine] = a * ((h[b, mine] - pooled[b, s]) @ g + c)
  found = {'values': dh}
  if 'scores' in arrays:
    return pooled, lse, found | {'scores': de}
  valid = (ids >= 0)[..., None]
  outer = np.where(valid, de[..., None] * arrays['weight'], 0)
  slope = 1 - np.tanh(arrays['tanh']) ** 2
  if 'sigmoid' in arrays:
    found['sigmoid'] = outer * np.tanh(arrays['tanh']) * gate * (1 - gate)
    slope = slope * gate
  found['tanh'] = outer * slope
  found['weight'] = np.sum(np.where(valid, de[..., None] * units, 0), (0, 1))
  clean = lambda x: np.where(valid, x, 0) if x.ndim == 3 else x
  return pooled, lse, {name: clean(x) for name, x in found.items()}


def pool(arrays, ids, segments, path, **how):
  scores = arrays.get('scores')
  if scores is None:
    scores = Gate(arrays['tanh'], arrays.get('sigmoid'), arrays['weight'])
  return segment_pool(
    arrays['values'],
    scores,
    ids,
    segments,
    return_lse=True,
    implementation=path,
    **how,
  )


def derive(problem, path, dtype='float32'):
  """The same by `segment_pool`, in one program."""
  arrays = {n: jnp.asarray(x, dtype) for n, x in problem.arrays.items()}
  # What decides on weights stays exact enough to compare.
  if 'scores' in arrays and dtype == 'bfloat16':
    arrays['scores'] = arrays['scores'].astype(jnp.float32)

  @jax.jit
  def run(arrays, ids, of_pooled, of_lse):
    function = lambda arrays: pool(arrays, ids, problem.segments, path)
    (pooled, lse), vjp = jax.vjp(function, arrays)
    of_lse = jnp.where(lse > -jnp.inf, of_lse.astype(lse.dtype), 0)
    return pooled, lse, vjp((of_pooled.astype(pooled.dtype), of_lse))[0]

  return run(arrays, problem.ids, problem.of_pooled, problem.of_lse)


def close(got, want, tolerance):
  """Within a fraction of the largest entry; infinities in the same places."""
  got, want = jax.tree.leaves(got), jax.tree.leaves(want)
  assert len(got) == len(want)
  for a, b in zip(got, want, strict=True):
    a, finite = np.asarray(a, float), np.isfinite(b)
    assert a.shape == b.shape
    np.testing.assert_array_equal(a[~finite], b[~finite])
    bound = tolerance * max(1.0, np.abs(b[finite]).max(initial=0))
    np.testing.assert_allclose(a[finite], b[finite], rtol=0, atol=bound)

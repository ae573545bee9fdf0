"""Data as a pure function of the step.

Axes: B global batch, R runs, n examples.

Nothing iterates: `data.load(step, rows)` returns those rows of the global batch
of that step, whatever was read before. So a run resumes anywhere, with any
number of processes, devices or loader threads.
"""

import functools
import sys
import warnings
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from tmlib.train.method import Batch

__all__ = ['Data', 'array_data', 'pass_data', 'run_data', 'source_data']


def _gather(resident: Any, batch: Batch) -> Batch:
  """The examples `batch['index']` of arrays that live on the device.

  `batch['weight']`, where given, multiplies the arrays' own weights. Without
  resident arrays the loaded batch is the batch.
  """
  if resident is None:
    return batch
  found = jax.tree.map(lambda x: x[batch['index']], resident)
  if 'weight' in batch:
    found = found | {'weight': found['weight'] * batch['weight']}
  return found


class Data(NamedTuple):
  """A stream of batches, or one finite pass where `steps` is given.

  Attributes:
    load: (step, rows) -> those rows of the step's global batch, as NumPy
      arrays [rows, ...], or [R, rows, ...] where `per_run`.
    batch_size: B, examples (or packed rows) in a global batch.
    fingerprint: what identifies the stream; compared on resume.
    steps: number of batches in a pass; None for an endless stream.
    resident: arrays that are placed on the device once, or None.
    gather: (resident, loaded batch) -> batch, inside the compiled step.
    per_run: each run has its own batch.
    bucket: step -> key of the batch's shape, the same on every process.
    shapes: {key: pytree of jax.ShapeDtypeStruct of the global batch}, so that
      every bucket can be compiled before the first step; None where there is
      only one.
  """

  load: Callable[[int, slice], Batch]
  batch_size: int
  fingerprint: dict[str, Any]
  steps: int | None = None
  resident: Any = None
  gather: Callable[[Any, Batch], Batch] = _gather
  per_run: bool = False
  bucket: Callable[[int], Hashable] = lambda step: 0
  shapes: Mapping[Hashable, Any] | None = None


def _checked(arrays: Any) -> int:
  """The number of examples, of arrays that can go to a device.

  Raises:
    TypeError: for what is no array of numbers.
    ValueError: for arrays of different lengths, or none.
  """
  sizes = {}
  for path, x in jax.tree_util.tree_leaves_with_path(arrays):
    name = 'arrays' + jax.tree_util.keystr(path)
    if not hasattr(x, 'dtype') or not hasattr(x, 'shape') or x.shape == ():
      raise TypeError(
        f'{name} is a {type(x).__name__}; every leaf must be an array'
        ' [n, ...]: pass numpy.asarray(...) of a list'
      )
    if getattr(x.dtype, 'kind', '') in tuple('OSUmM'):
      raise TypeError(f'{name} has dtype {x.dtype}; give numbers')
    sizes[name] = len(x)
  if len(set(sizes.values())) != 1:
    raise ValueError(
      f'arrays differ in their number of examples: {sizes}; every leaf must'
      ' have the example axis first'
    )
  if 0 in sizes.values():
    raise ValueError('arrays hold no example')
  return next(iter(sizes.values()))


def _complete(arrays: Batch) -> Batch:
  """Adds unit weights and ids where the arrays bring none."""
  n = _checked(arrays)
  weight = np.asarray(arrays.get('weight', np.ones(n, np.float32)))
  ids = np.arange(weight.size, dtype=np.int32).reshape(weight.shape)
  return {'id': ids, **arrays, 'weight': weight}


def _check_batch_size(batch_size: int) -> None:
  if batch_size < 1:
    raise ValueError(f'batch_size must be at least 1, got {batch_size}')


def _warn_if_more(batch_size: int, n: int) -> None:
  if batch_size > n:
    warnings.warn(
      f'batch_size={batch_size} is more than the {n} examples: a batch holds'
      f' some twice; pass at most {n}',
      stacklevel=3,
    )


def _index_stream(
  members: np.ndarray, seed: tuple[int, ...], shuffle: bool = True
) -> Callable[[int, int], np.ndarray]:
  """(start, stop) -> those of the members' endless repetition.

  Each epoch holds every member once, in its own order.
  """
  size = len(members)

  @functools.lru_cache(maxsize=2)
  def epoch(number: int) -> np.ndarray:
    if not shuffle:
      return members
    return np.random.default_rng((*seed, number)).permutation(members)

  def index(start: int, stop: int) -> np.ndarray:
    position = np.arange(start, stop)
    number = position // size
    parts = [
      epoch(int(e))[position[number == e] - e * size] for e in np.unique(number)
    ]
    return np.concatenate(parts)

  return index


def array_data(
  arrays: Batch, batch_size: int, *, seed: int = 0, shuffle: bool = True
) -> Data:
  """Endless batches from in-memory arrays.

  Args:
    arrays: {name: pytree of [n, ...]}; `weight` and `id` are added if absent.
    batch_size: B; an epoch's last batch is filled from the next epoch.
    seed: of the order; epochs differ.
    shuffle: False keeps the given order.

  Returns:
    The stream.
  """
  _check_batch_size(batch_size)
  arrays = jax.tree.map(np.asarray, _complete(arrays))
  n = _checked(arrays)
  _warn_if_more(batch_size, n)
  index = _index_stream(np.arange(n), (seed,), shuffle)

  def load(step: int, rows: slice) -> Batch:
    start = step * batch_size
    chosen = index(start + rows.start, start + rows.stop)
    return jax.tree.map(lambda x: x[chosen], arrays)

  fingerprint = dict(
    kind='array', n=n, seed=seed, batch_size=batch_size, shuffle=shuffle
  )
  return Data(load, batch_size, fingerprint | _contents(arrays))


def pass_data(
  arrays: Batch,
  batch_size: int,
  *,
  run_weights: np.ndarray | None = None,
) -> Data:
  """One pass over in-memory arrays; the last batch is padded with weight 0.

  Args:
    arrays: as in `array_data`.
    batch_size: B.
    run_weights: [R, n, ...], further weight of each example in each run, such
      as one for its held-out fold; None where all runs see all examples.

  Returns:
    A finite stream of ceil(n / B) batches, resident on the device.
  """
  _check_batch_size(batch_size)
  arrays = _complete(arrays)
  n = _checked(arrays)
  steps = -(-n // batch_size)

  def load(step: int, rows: slice) -> Batch:
    index = step * batch_size + np.arange(rows.start, rows.stop)
    real = index < n
    index = np.where(real, index, 0).astype(np.int32)
    weight = real.astype(np.float32)
    extra = arrays['weight'].ndim - 1
    weight = weight.reshape(weight.shape + (1,) * extra)
    if run_weights is None:
      shape = weight.shape[:1] + arrays['weight'].shape[1:]
      return {'index': index, 'weight': np.broadcast_to(weight, shape)}
    weight = (weight * run_weights[:, index]).astype(np.float32)
    return {'index': np.tile(index, (len(run_weights), 1)), 'weight': weight}

  fingerprint = dict(kind='pass', n=n, batch_size=batch_size)
  return Data(
    load,
    batch_size,
    fingerprint,
    steps=steps,
    resident=arrays,
    per_run=run_weights is not None,
  )


def run_data(
  arrays: Batch, weights: np.ndarray, batch_size: int, *, seed: int = 0
) -> Data:
  """Endless batches per run from arrays that live on the device once.

  Args:
    arrays: {name: pytree of [n, ...]}, shared by the runs.
    weights: [R, n, ...] weight of each example in each run; a run never draws
      an example whose weight is zero throughout, so a cross-validation fold is
      left out by zeros.
    batch_size: B; where it is at least a run's number of examples, each batch
      holds them all, once.
    seed: of the order; runs and epochs differ.

  Returns:
    The stream; a loaded item is `{'index': [R, B], 'weight': [R, B, ...]}`.

  Raises:
    ValueError: if a run has no example, or the weights do not fit the arrays.
  """
  _check_batch_size(batch_size)
  arrays = _complete(arrays)
  n = _checked(arrays)
  weights = np.asarray(weights, np.float32)
  if weights.shape[1:] != arrays['weight'].shape:
    raise ValueError(
      f'weights have shape {weights.shape}, expected [runs, '
      f'{", ".join(map(str, arrays["weight"].shape))}]'
    )
  present = np.any(weights.reshape(len(weights), n, -1) != 0, axis=-1)
  members = [np.flatnonzero(row) for row in present]
  empty = [r for r, member in enumerate(members) if not len(member)]
  if empty:
    raise ValueError(f'runs {empty[:5]} have no example with positive weight')
  # No larger than it need be, but still a multiple of a few devices.
  batch_size = min(batch_size, -(-max(map(len, members)) // 8) * 8)
  streams = [_index_stream(m, (seed, run)) for run, m in enumerate(members)]

  def row(run: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    size = len(members[run])
    if batch_size >= size:  # the whole fold, padded
      index = np.resize(members[run], batch_size)
      return index, np.arange(batch_size) < size
    index = streams[run](step * batch_size, (step + 1) * batch_size)
    return index, np.ones(batch_size, bool)

  def load(step: int, rows: slice) -> Batch:
    pairs = [row(run, step) for run in range(len(members))]
    index = np.stack([index for index, _ in pairs])[:, rows].astype(np.int32)
    real = np.stack([real for _, real in pairs])[:, rows]
    weight = np.take_along_axis(
      weights, index.reshape(index.shape + (1,) * (weights.ndim - 2)), 1
    )
    real = real.reshape(real.shape + (1,) * (weights.ndim - 2))
    return {'index': index, 'weight': np.where(real, weight, 0)}

  fingerprint = dict(
    kind='run', n=n, runs=len(weights), seed=seed, batch_size=batch_size,
    weights=_digest(weights),
  )  # fmt: skip
  return Data(
    load,
    batch_size,
    fingerprint | _contents(arrays),
    resident=arrays,
    per_run=True,
  )


def _check_lengths(
  lengths: Sequence[int] | None, buckets: Sequence[int] | None, n: int
) -> None:
  if (lengths is None) != (buckets is None):
    raise ValueError('give both lengths and buckets, or neither')
  if lengths is None or buckets is None:
    return
  if len(lengths) != n or list(buckets) != sorted(set(buckets)):
    raise ValueError(
      f'lengths must be one of each of the {n} items, got {len(lengths)}, and'
      f' buckets increasing, got {list(buckets)}'
    )
  longest = int(np.argmax(lengths))
  if lengths[longest] > buckets[-1]:
    raise ValueError(
      f'item {longest} has length {lengths[longest]}, over the last bucket'
      f' {buckets[-1]}; add a bucket or subsample the item'
    )


def source_data(
  source: Sequence[Any],
  collate: Callable[[list[Any], Any], Batch],
  batch_size: int,
  *,
  lengths: Sequence[int] | None = None,
  buckets: Sequence[int] | None = None,
  seed: int = 0,
  shuffle: bool = True,
  one_pass: bool = False,
  workers: int = 2,
) -> Data:
  """Batches from items that are read when needed, padded to few shapes.

  Args:
    source: `source[i]` reads item i from wherever it lies; a list, a Grain
      MapDataset, or whatever else has a length and items.
    collate: (items, bucket) -> batch with leaves [len(items), ...], `weight`
      and `id` included; an item None is padding.
    batch_size: B.
    lengths: [n] size of every item, known to every process.
    buckets: increasing sizes; a batch is padded to the least that holds its
      longest item. None: items have one shape and `collate` is given None.
    seed: of the order.
    shuffle: False keeps the given order.
    one_pass: a finite pass in the given order, its last batch padded.
    workers: reading threads; 0 reads in the thread that asks.

  Returns:
    The stream.

  Raises:
    ValueError: for an empty source, workers below 0, lengths that do not fit,
      or an item longer than the last bucket.
  """
  _check_batch_size(batch_size)
  n = len(source)
  if n == 0:
    raise ValueError('the source holds no example')
  if workers < 0:
    raise ValueError(f'workers must be at least 0, got {workers}')
  _check_lengths(lengths, buckets, n)
  if not one_pass:
    _warn_if_more(batch_size, n)
  index = _index_stream(np.arange(n), (seed,), shuffle and not one_pass)
  pool = ThreadPoolExecutor(workers, 'tmlib-read') if workers else None

  @functools.lru_cache(maxsize=16)  # asked for by bucket and by load
  def indices(step: int) -> np.ndarray:
    start = step * batch_size
    if one_pass:
      found = np.arange(start, start + batch_size)
      return np.where(found < n, found, -1)
    return index(start, start + batch_size)

  def bucket(step: int) -> Hashable:
    if buckets is None or lengths is None:
      return 0
    longest = max(lengths[i] for i in indices(step) if i >= 0)
    return next(size for size in buckets if size >= longest)

  def load(step: int, rows: slice) -> Batch:
    read = lambda i: None if i < 0 else source[int(i)]
    items = list((pool.map if pool else map)(read, indices(step)[rows]))
    return collate(items, bucket(step) if buckets is not None else None)

  def shapes() -> dict[Hashable, Any]:
    steps = range(-(-n // batch_size)) if one_pass else ()
    used = {bucket(s) for s in steps} or buckets or (0,)
    item = source[0 if lengths is None else int(np.argmin(lengths))]
    struct = lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape[1:]), x.dtype)
    return {
      key: jax.tree.map(struct, collate([item], key if buckets else None))
      for key in used
    }

  fingerprint = dict(
    kind='source', n=n, seed=seed, batch_size=batch_size, shuffle=shuffle,
    lengths=None if lengths is None else _digest(np.asarray(lengths, np.int64)),
    buckets=None if buckets is None else list(buckets),
  )  # fmt: skip
  steps = -(-n // batch_size) if one_pass else None
  return Data(
    load, batch_size, fingerprint, steps=steps, bucket=bucket, shapes=shapes()
  )


def _digest(values: Any) -> int:
  """An order-dependent checksum that is the same in every process."""
  values = np.ascontiguousarray(values)
  if sys.byteorder == 'big' or values.dtype.byteorder == '>':
    # Little-endian, whatever the machine.
    values = values.astype(values.dtype.newbyteorder('<'))
  return zlib.crc32(values.reshape(-1).view(np.uint8))


def _contents(arrays: Batch) -> dict[str, Any]:
  """Shapes of the arrays, and a checksum of their contents."""
  leaves = {
    jax.tree_util.keystr(path): x
    for path, x in jax.tree_util.tree_leaves_with_path(arrays)
  }
  return {
    'shapes': {k: list(x.shape[1:]) for k, x in sorted(leaves.items())},
    'contents': {k: _digest(x) for k, x in sorted(leaves.items())},
  }

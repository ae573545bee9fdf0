"""Files of `torch.save`, read without Torch and without running any code.

Two formats exist: a zip archive (data.pkl and one member per storage), and the
older stream of five pickles followed by the storages. Either is a pickle, which
may ask for any function to be called; here it may ask for tensors, containers
and numbers only, each made by a function of this module.
"""

import codecs
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np

from tmlib.data.slides.slide import SlideFileError, UnsafeFileError

__all__ = ['read_pt']

# The first pickle of a legacy file.
_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGES = {
  'BFloat16Storage': ml_dtypes.bfloat16, 'BoolStorage': np.bool_,
  'ByteStorage': np.uint8, 'CharStorage': np.int8,
  'DoubleStorage': np.float64, 'FloatStorage': np.float32,
  'HalfStorage': np.float16, 'IntStorage': np.int32,
  'LongStorage': np.int64, 'ShortStorage': np.int16,
  'UntypedStorage': np.uint8,
}  # fmt: skip
_DTYPES = {
  'bfloat16': ml_dtypes.bfloat16, 'bool': np.bool_, 'float16': np.float16,
  'float32': np.float32, 'float64': np.float64, 'int16': np.int16,
  'int32': np.int32, 'int64': np.int64, 'int8': np.int8, 'uint16': np.uint16,
  'uint32': np.uint32, 'uint64': np.uint64, 'uint8': np.uint8,
}  # fmt: skip
# Whatever claims more memory than this many times its file is damaged.
_MOST_PER_BYTE = 64


def read_pt(path: str | Path, *, mmap: bool = False) -> Any:
  """Reads what `torch.save` wrote: tensors become NumPy arrays.

  Args:
    path: of a .pt or .pth file, zip or legacy.
    mmap: leave the numbers of a zip file on disk until they are used, without
      checking their checksum.

  Returns:
    The object: an array, or dicts, lists and tuples of arrays and numbers.
    bfloat16 arrays have the extension dtype of ml_dtypes.

  Raises:
    FileNotFoundError: no such file.
    UnsafeFileError: the pickle asks for a class or function that is not a
      tensor or a container; the message names it. Nothing is executed.
    SlideFileError: another format, or a damaged file.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'no .pt file at {path}')
  try:
    return _read(path, mmap)
  except SlideFileError as error:
    if str(path) in str(error):
      raise
    raise type(error)(f'{path}: {error}; save it again') from None
  except Exception as error:  # a damaged pickle may raise anything
    text = ' '.join(str(error).split())[:120]
    raise SlideFileError(
      f'{path}: no readable .pt file ({type(error).__name__}: {text}); it may '
      'be truncated: copy or save it again'
    ) from error


def _read(path: Path, mmap: bool) -> Any:
  if zipfile.is_zipfile(path):
    with zipfile.ZipFile(path) as archive:
      return _Zip(path, archive, mmap).load()
  with path.open('rb') as file:
    if file.read(2) == b'PK':
      raise SlideFileError(
        f'{path}: a zip file without its end: it is truncated; copy it again'
      )
    file.seek(0)
    return _read_legacy(path, file)


class _Storage:
  """A flat run of numbers, filled in once the pickle is read.

  No tensor over it may claim more than `limit` bytes.
  """

  def __init__(self, dtype: Any, numel: int, limit: int):
    self.dtype, self.numel, self.limit = np.dtype(dtype), numel, limit
    self.data: np.ndarray | None = None


class _Unpickler(pickle.Unpickler):
  """Knows tensors, containers and numbers; refuses everything else."""

  def __init__(
    self, file: BinaryIO, path: Path, storage: Callable[[tuple], _Storage]
  ):
    super().__init__(file, encoding='latin1')
    self._path, self._storage = path, storage

  def find_class(self, module: str, name: str) -> Any:
    """The stand-in of a name in the pickle."""
    found = _ALLOWED.get((module, name))
    if found is None and module == 'torch' and name in _DTYPES:
      found = np.dtype(_DTYPES[name])
    if found is None and name in _STORAGES:
      if module in ('torch', 'torch.cuda', 'torch.storage'):
        found = np.dtype(_STORAGES[name])
    if found is None:
      raise UnsafeFileError(
        f'{self._path}: the pickle asks for {module}.{name}, which is no tensor'
        ' or container, so it was not loaded; save tensors or a state_dict '
        'alone, torch.save(model.state_dict(), path)'
      )
    return found

  def persistent_load(self, pid: Any) -> Any:
    """The storage that a persistent id names."""
    if not isinstance(pid, tuple) or len(pid) < 5 or pid[0] != 'storage':
      raise SlideFileError(
        f'{self._path}: an unknown kind of reference {pid!r}'
      )
    return self._storage(pid)


class _Tensor:
  """A tensor before its storage is read."""

  def __init__(self, storage: Any, offset: Any, size: Any, stride: Any):
    if not isinstance(storage, _Storage):
      raise SlideFileError('a tensor without a storage')
    numbers = [offset, *size, *stride]
    if not all(isinstance(x, int) and x >= 0 for x in numbers):
      raise SlideFileError(f'a tensor with sizes {size} and strides {stride}')
    size, stride = tuple(size), tuple(stride)
    last = offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True))
    if 0 not in size and last >= storage.numel:
      raise SlideFileError(
        f'a tensor of shape {size} reaches beyond its {storage.numel} numbers'
      )
    # A stride of zero repeats a number without end.
    if math.prod(size) * storage.dtype.itemsize > storage.limit:
      raise SlideFileError(f'a tensor of shape {size}, far more than the file')
    self.storage, self.offset, self.size = storage, offset, size
    self.stride = stride

  def array(self) -> np.ndarray:
    data = self.storage.data
    if data is None or 0 in self.size:
      return np.zeros(self.size, self.storage.dtype)
    strides = [s * data.itemsize for s in self.stride]
    return np.lib.stride_tricks.as_strided(
      data[self.offset :], self.size, strides, writeable=False
    )


def _rebuild_tensor(
  storage, offset, size, stride, grad=False, hooks=None, metadata=None
) -> _Tensor:
  del grad, hooks
  if metadata:
    raise SlideFileError(
      f'a tensor with {metadata}: its numbers are to be negated or conjugated, '
      'call resolve_neg() and resolve_conj() on it'
    )
  return _Tensor(storage, offset, size, stride)


def _rebuild_typed(storage, offset, size, stride, grad, hooks, dtype, *unused):
  """A tensor over an untyped storage: bytes that are read as `dtype`."""
  del grad, hooks, unused
  if not isinstance(storage, _Storage) or not isinstance(dtype, np.dtype):
    raise SlideFileError('a tensor without storage or dtype')
  typed = _View(storage, dtype)
  return _Tensor(typed, offset, size, stride)


class _View(_Storage):
  """The bytes of a storage, as another dtype."""

  def __init__(self, base: _Storage, dtype: np.dtype):
    size = base.numel * base.dtype.itemsize
    numel = size // np.dtype(dtype).itemsize
    super().__init__(dtype, numel, base.limit)
    self._base = base

  @property
  def data(self) -> np.ndarray | None:
    if self._base.data is None:
      return None
    flat = self._base.data.view(np.uint8)
    return flat[: self.numel * self.dtype.itemsize].view(self.dtype)

  @data.setter
  def data(self, value: None) -> None:
    """The base holds the numbers."""


def _parameter(data: Any, *unused: Any) -> Any:
  del unused
  return data


def _encode(text: Any, encoding: Any) -> bytes:
  """What `_codecs.encode` does for bytes in an old protocol."""
  if encoding != 'latin1' or not isinstance(text, str):
    raise SlideFileError(f'bytes in encoding {encoding!r}')
  return codecs.encode(text, 'latin1')


def _dtype(code: Any, *unused: Any) -> '_Dtype':
  del unused
  dtype = np.dtype(code) if isinstance(code, str) else None
  if dtype is None or dtype.kind not in 'biufSU':
    raise SlideFileError(f'NumPy dtype {code!r}')
  return _Dtype(dtype)


class _Dtype:
  """A NumPy dtype that takes its byte order from the pickle."""

  def __init__(self, dtype: np.dtype):
    self.dtype = dtype

  def __setstate__(self, state: Any) -> None:
    order = state[1] if isinstance(state, tuple) and len(state) > 1 else '='
    if order in ('<', '>'):
      self.dtype = self.dtype.newbyteorder(order)


def _scalar(dtype: Any, raw: Any = b'') -> Any:
  """A NumPy scalar from its bytes."""
  raw = raw.encode('latin1') if isinstance(raw, str) else raw
  if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
    raise SlideFileError('a NumPy scalar of an unknown kind')
  return np.frombuffer(raw, dtype.dtype, 1)[0].item()


class _Array:
  """A NumPy array of numbers, filled by its state."""

  value: np.ndarray | None = None

  def __setstate__(self, state: Any) -> None:
    _, shape, dtype, fortran, raw = state
    raw = raw.encode('latin1') if isinstance(raw, str) else raw
    if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
      raise SlideFileError('a NumPy array of objects')
    flat = np.frombuffer(raw, dtype.dtype)
    self.value = flat.reshape(shape, order='F' if fortran else 'C')


def _new_array(*unused: Any) -> _Array:
  del unused
  return _Array()


def _nothing(*unused: Any) -> None:
  """Stands for classes that are only passed on, such as numpy.ndarray."""
  del unused


_ALLOWED: dict[tuple[str, str], Any] = {
  ('collections', 'OrderedDict'): OrderedDict,
  ('torch._utils', '_rebuild_tensor'): _rebuild_tensor,
  ('torch._utils', '_rebuild_tensor_v2'): _rebuild_tensor,
  ('torch._utils', '_rebuild_tensor_v3'): _rebuild_typed,
  ('torch._utils', '_rebuild_parameter'): _parameter,
  ('torch.nn.parameter', 'Parameter'): _parameter,
  ('torch', 'Size'): tuple,
  ('torch', 'device'): lambda *names: ':'.join(map(str, names)),
  ('_codecs', 'encode'): _encode,
  ('numpy', 'dtype'): _dtype,
  ('numpy', 'ndarray'): _nothing,
}
for _builtins in ('__builtin__', 'builtins'):
  _ALLOWED |= {(_builtins, kind.__name__): kind for kind in (set, frozenset)}
for _core in ('numpy.core.multiarray', 'numpy._core.multiarray'):
  _ALLOWED[_core, 'scalar'] = _scalar
  _ALLOWED[_core, '_reconstruct'] = _new_array


def _finished(value: Any, seen: dict[int, Any] | None = None) -> Any:
  """The object with every tensor as an array."""
  seen = {} if seen is None else seen
  if isinstance(value, _Tensor):
    return value.array()
  if isinstance(value, _Array):
    return value.value
  if isinstance(value, _Dtype):
    return value.dtype
  if isinstance(value, _Storage):
    return value.data
  if isinstance(value, dict | list | tuple):
    if id(value) in seen:
      raise SlideFileError('an object that holds itself')
    seen[id(value)] = value
    if isinstance(value, Mapping):
      found: Any = {k: _finished(v, seen) for k, v in value.items()}
    else:
      found = type(value)(_finished(v, seen) for v in value)
    del seen[id(value)]
    return found
  return value


def _storage_of(pid: tuple, limit: int) -> tuple[str, _Storage]:
  """Key and empty storage of a persistent id."""
  dtype, key, numel = pid[1], pid[2], pid[4]
  if not isinstance(dtype, np.dtype) or not isinstance(numel, int):
    raise SlideFileError(f'a storage {pid!r}')
  if not 0 <= numel * dtype.itemsize <= limit:
    raise SlideFileError(f'a storage of {numel} numbers, more than the file')
  return str(key), _Storage(dtype, numel, limit)


class _Zip:
  """One zip archive of torch.save."""

  def __init__(self, path: Path, archive: zipfile.ZipFile, mmap: bool):
    self._path, self._archive, self._mmap = path, archive, mmap
    names = [n for n in archive.namelist() if n.endswith('/data.pkl')]
    if len(names) != 1:
      raise SlideFileError(
        f'{path}: a zip archive without data.pkl, so no file of torch.save; it '
        f'holds {archive.namelist()[:3]}'
      )
    self._root = names[0].removesuffix('data.pkl')
    self._limit = path.stat().st_size * _MOST_PER_BYTE
    self._storages: dict[str, _Storage] = {}
    self._swap = self._order() == 'big'

  def _order(self) -> str:
    name = f'{self._root}byteorder'
    if name not in self._archive.namelist():
      return 'little'
    return self._archive.read(name).decode().strip()

  def load(self) -> Any:
    with self._archive.open(f'{self._root}data.pkl') as file:
      value = _Unpickler(file, self._path, self._storage).load()  # type: ignore[arg-type]
    return _finished(value)

  def _storage(self, pid: tuple) -> _Storage:
    key, storage = _storage_of(pid, self._limit)
    if key not in self._storages:
      self._storages[key] = storage
      storage.data = self._numbers(key, storage)
    return self._storages[key]

  def _numbers(self, key: str, storage: _Storage) -> np.ndarray:
    info = self._archive.getinfo(f'{self._root}data/{key}')
    size = storage.numel * storage.dtype.itemsize
    if info.file_size < size:
      raise SlideFileError(
        f'{self._path}: storage {key} has {info.file_size} bytes, not {size}'
      )
    dtype = storage.dtype.newbyteorder('>' if self._swap else '<')
    if self._mmap and info.compress_type == zipfile.ZIP_STORED and size:
      with self._path.open('rb') as file:
        file.seek(info.header_offset + 26)
        lengths = struct.unpack('<2H', file.read(4))
      start = info.header_offset + 30 + sum(lengths)
      return np.memmap(self._path, dtype, 'r', start, (storage.numel,))
    raw = self._archive.read(info)
    return np.frombuffer(raw, dtype, storage.numel)


def _read_legacy(path: Path, file: BinaryIO) -> Any:
  limit = path.stat().st_size * _MOST_PER_BYTE
  storages: dict[str, _Storage] = {}

  def storage(pid: tuple) -> _Storage:
    key, found = _storage_of(pid, limit)
    if len(pid) > 5 and pid[5] is not None:
      # A view of another storage: its own key, an offset and a length.
      raise SlideFileError(
        f'{path}: storages that share memory, as Torch before 0.4 wrote them; '
        'load and save it again with a newer Torch'
      )
    return storages.setdefault(key, found)

  load = lambda: _Unpickler(file, path, storage).load()
  if file.read(1) != b'\x80':
    raise SlideFileError(
      f'{path}: neither a zip archive nor a pickle, so no file of torch.save'
    )
  file.seek(0)
  if load() != _MAGIC:
    raise SlideFileError(f'{path}: a pickle, but no file of torch.save')
  load()  # protocol version
  system = load()
  value, keys = load(), load()
  little = not isinstance(system, dict) or system.get('little_endian', True)
  for key in keys:
    if str(key) not in storages:
      raise SlideFileError(f'{path}: a storage {key!r} that nothing names')
    _fill(path, file, storages[str(key)], '<' if little else '>')
  return _finished(value)


def _fill(path: Path, file: BinaryIO, storage: _Storage, order: str) -> None:
  (numel,) = struct.unpack(f'{order}q', file.read(8))
  if numel != storage.numel:
    raise SlideFileError(
      f'{path}: a storage of {storage.numel} numbers holds {numel}'
    )
  dtype = storage.dtype.newbyteorder('<' if order == '<' else '>')
  raw = file.read(math.prod((numel, dtype.itemsize)))
  storage.data = np.frombuffer(raw, dtype, numel)

"""Compiling a training step for TPU slices that are not there.

The TPU compiler (package libtpu) runs on any Linux machine. It gives, before a
slice is rented, the memory, the work and the communication of one step.
"""

import dataclasses
import importlib.util
import os
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from tmlib.options import Options
from tmlib.train.data import Data
from tmlib.train.layout import Layout, make_mesh, parse_rules
from tmlib.train.method import Build, build_method

__all__ = [
  'Collective',
  'CompileReport',
  'collectives',
  'compile_for',
  'lower_step',
  'report',
  'topology_devices',
]

_KINDS = (
  'all-gather',
  'all-reduce',
  'all-to-all',
  'collective-broadcast',
  'collective-permute',
  'ragged-all-to-all',
  'reduce-scatter',
)
_CALL = re.compile(rf' ({"|".join(_KINDS)})(-start)?\(')
_ARRAY = re.compile(r'\b([a-z]+)(\d*)\w*\[([\d,]*)\]')


class Collective(NamedTuple):
  """Operations of one kind in a compiled program.

  Attributes:
    count: occurrences in the program; one inside a loop counts once.
    bytes: total size of their results on one chip.
    largest: size of the largest result.
  """

  count: int
  bytes: int
  largest: int


@dataclasses.dataclass(frozen=True)
class CompileReport:
  """What the compiler says of one call of a program, per chip.

  Attributes:
    topology: the slice, such as 'v5e:16x16'.
    chips: number of its chips.
    kind: name of the chip.
    seconds: time to compile.
    flops: operations of one chip in one call; a loop's body counts once.
    argument_bytes: what goes in.
    output_bytes: what comes out.
    temporary_bytes: what is needed in between.
    alias_bytes: the part of the output that takes the place of an argument.
    code_bytes: size of the program.
    kernels: Pallas kernels in it.
    collectives: {kind: Collective}.
  """

  topology: str
  chips: int
  kind: str
  seconds: float
  flops: float
  argument_bytes: int
  output_bytes: int
  temporary_bytes: int
  alias_bytes: int
  code_bytes: int
  kernels: int
  collectives: dict[str, Collective]

  @property
  def total_bytes(self) -> int:
    """What one chip must hold while the program runs."""
    data = self.argument_bytes + self.output_bytes - self.alias_bytes
    return data + self.temporary_bytes + self.code_bytes

  def __str__(self) -> str:
    """A table to read."""
    rows = [
      ('slice', f'{self.topology}, {self.chips} chips of {self.kind}'),
      ('compile', f'{self.seconds:.1f} s'),
      ('per chip', _size(self.total_bytes)),
      ('  arguments', _size(self.argument_bytes)),
      ('  outputs', _size(self.output_bytes)),
      ('  of them in place', _size(self.alias_bytes)),
      ('  temporary', _size(self.temporary_bytes)),
      ('  program', _size(self.code_bytes)),
      ('FLOPs per chip', f'{self.flops:.4g}'),
      ('Pallas kernels', str(self.kernels)),
    ]
    for kind, found in self.collectives.items():
      text = f'{found.count} of {_size(found.bytes)} in all'
      rows.append((kind, f'{text}, largest {_size(found.largest)}'))
    if not self.collectives:
      rows.append(('collectives', 'none'))
    return '\n'.join(f'{name:<20} {text}' for name, text in rows)


def _size(count: float) -> str:
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.4g} {unit}'
    count /= 1024
  return f'{count:.4g} GiB'


def topology_devices(topology: str) -> list[Any]:
  """The devices of a slice, which exist for the compiler only.

  Args:
    topology: '<generation>:<shape>', such as 'v5e:16x16' or 'tpu7x:2x2x1'.

  Returns:
    One device per chip.

  Raises:
    ValueError: if the TPU compiler is not installed, or knows no such slice.
  """
  if importlib.util.find_spec('libtpu') is None and not os.environ.get(
    'TPU_LIBRARY_PATH'
  ):
    raise ValueError(
      f'topology={topology!r}: the TPU compiler is not installed; '
      "pip install 'tmlib[aot]' (Linux only)"
    )
  # No chip is touched: neither wait for a metadata server that is not there,
  # nor for another process that has loaded the compiler too.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  from jax.experimental import topologies

  try:
    found = topologies.get_topology_desc(topology, 'tpu')
  except jax.errors.JaxRuntimeError as error:
    raise ValueError(
      f'topology={topology!r} is not one that the TPU compiler knows ({error});'
      ' use for example v5e:2x2, v5e:16x16, v4:2x2x1, v6e:4x4 or tpu7x:2x2x1'
    ) from error
  return list(found.devices)


def collectives(hlo: str) -> dict[str, Collective]:
  """The communication in the text of a compiled program.

  Args:
    hlo: `compiled.as_text()`.

  Returns:
    {kind: Collective}, without the kinds that do not occur.
  """
  sizes: dict[str, list[int]] = {}
  for line in hlo.splitlines():
    call = _CALL.search(line)
    if call is None or ' = ' not in line[: call.end()]:
      continue
    kind, start = call.groups()
    # Layouts hold parentheses of their own: {1,0:T(8,128)}.
    result = re.sub(r'\{[^{}]*\}', '', line[: call.start()]).split(' = ', 1)[1]
    if start and kind in ('all-gather', 'collective-permute'):
      # The pair (operand, result), with a context after it.
      result = _components(result)[1]
    sizes.setdefault(kind, []).append(_bytes(result))
  return {
    kind: Collective(len(found), sum(found), max(found))
    for kind, found in sorted(sizes.items())
  }


def _components(shape: str) -> list[str]:
  """The parts of '(a, (b, c))' at the first level."""
  parts, depth = [''], 0
  for letter in shape.strip()[1:-1]:
    depth += {'(': 1, '[': 1, ')': -1, ']': -1}.get(letter, 0)
    if letter == ',' and depth == 0:
      parts.append('')
    else:
      parts[-1] += letter
  return parts


def _bytes(shape: str) -> int:
  total = 0
  for kind, bits, dims in _ARRAY.findall(shape):
    count = int(np.prod([int(d) for d in dims.split(',') if d], dtype=np.int64))
    total += count * (8 if kind == 'pred' else int(bits or 0)) // 8
  return total


def report(lowered: Any, topology: str, chips: int, kind: str) -> CompileReport:
  """Compiles a lowered program and reads what the compiler says of it.

  Args:
    lowered: `jit(...).trace(...).lower(lowering_platforms=('tpu',))`.
    topology: for the report.
    chips: number of chips that it runs on.
    kind: name of the chip.

  Returns:
    The report.

  Raises:
    ValueError: if the program does not fit into a chip's memory.
  """
  start = time.monotonic()
  try:
    compiled = lowered.compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    lines = [line for line in str(error).splitlines() if 'hbm' in line.lower()]
    raise ValueError(
      f'topology={topology!r}: the step does not fit into one chip of {kind}; '
      'use more chips, a smaller batch, micro-batches or a sharding rule '
      f'({" ".join(lines[:2]) or str(error)[:200]})'
    ) from error
  seconds = time.monotonic() - start
  memory, text = compiled.memory_analysis(), compiled.as_text()
  return CompileReport(
    topology=topology,
    chips=chips,
    kind=kind,
    seconds=seconds,
    flops=float((compiled.cost_analysis() or {}).get('flops', float('nan'))),
    argument_bytes=memory.argument_size_in_bytes,
    output_bytes=memory.output_size_in_bytes,
    temporary_bytes=memory.temp_size_in_bytes,
    alias_bytes=memory.alias_size_in_bytes,
    code_bytes=memory.generated_code_size_in_bytes,
    kernels=text.count('custom_call_target="tpu_custom_call"'),
    collectives=collectives(text),
  )


def lower_step(
  build: Build,
  data: Data | None,
  layout: Layout,
  *,
  folds: int = 1,
  seed: int = 0,
) -> dict[Any, Any]:
  """Lowers a training step for a TPU mesh from shapes alone.

  Args:
    build: axis name or None -> Method.
    data: its stream, or None; one batch is loaded for its shapes.
    layout: mesh, which may be of a slice that is not there, and mode.
    folds: updates per call.
    seed: of the initial state; no number depends on it.

  Returns:
    {bucket: the lowered step}.
  """
  name = layout.axis_name(data)
  method, whole = build(name), build(None)
  batches: Mapping[Any, Any] = {0: None}
  resident = None
  if data is not None:
    layout.check_data(data)
    resident = _structs(data.resident, layout.replicated)
    batches = _batch_shapes(data, layout)
  example = next(iter(batches.values()))
  shapes, _ = layout.init(whole, seed, resident, example, data)
  function = layout.step(method, data, shapes, folds)
  return {
    bucket: function.trace(
      shapes, resident, _stacked(batch, data, layout, folds)
    ).lower(lowering_platforms=('tpu',))
    for bucket, batch in batches.items()
  }


def _structs(tree: Any, sharding: Any, lead: tuple[int, ...] = ()) -> Any:
  def struct(x):
    dtype = jax.dtypes.canonicalize_dtype(x.dtype)
    return jax.ShapeDtypeStruct((*lead, *x.shape), dtype, sharding=sharding)

  return jax.tree.map(struct, tree)


def _batch_shapes(data: Data, layout: Layout) -> dict[Any, Any]:
  """{bucket: shapes of a global batch}, of `data.batch_size` examples.

  A stream may hold fewer examples than a slice has chips; shapes are set to
  the batch size that was asked for.
  """
  axis = int(data.per_run)
  lead = (len(layout.run_ids),) if data.per_run else ()

  def resized(x):
    shape = (*lead, data.batch_size, *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)

  found = data.shapes or {data.bucket(0): data.load(0, slice(0, 1))}
  return {key: jax.tree.map(resized, batch) for key, batch in found.items()}


def _stacked(batch: Any, data: Data | None, layout: Layout, folds: int) -> Any:
  if data is None:
    return None
  spec = layout.batch_spec(data, folds > 1)
  sharding = jax.sharding.NamedSharding(layout.mesh, spec)
  return _structs(batch, sharding, (folds,) if folds > 1 else ())


def compile_for(
  build: Build,
  data: Data | None,
  topology: str,
  *,
  runs: int = 0,
  options: Options | None = None,
  batch_size: int = 0,
) -> dict[Any, CompileReport]:
  """Compiles the step that `fit` would run, for a TPU slice.

  Args:
    build: axis name or None -> Method.
    data: its stream, or None.
    topology: see `topology_devices`.
    runs: independent runs trained in one program.
    options: mode, mesh, sharding rules and updates per call.
    batch_size: examples in a global batch; 0 = that of `data`.

  Returns:
    {bucket: report}.

  Raises:
    ValueError: if the compiler is missing, the slice is unknown, the batch
      does not divide, or the program does not fit.
  """
  options = options or Options()
  devices = topology_devices(topology)
  mesh = make_mesh(*options.mesh, runs=runs, devices=devices)
  layout = Layout(mesh, options.parallel, runs, parse_rules(options.rules))
  if data is not None and batch_size:
    data = data._replace(batch_size=batch_size)
  # Methods may make constants when they are built, which nothing can do on
  # devices that are not there.
  names = {layout.axis_name(data), None}
  methods = {name: build_method(build, name) for name in names}
  with jax.set_mesh(mesh):
    lowered = lower_step(
      methods.__getitem__, data, layout, folds=options.steps_per_call
    )
    kind = devices[0].device_kind
    return {
      bucket: report(program, topology, len(devices), kind)
      for bucket, program in lowered.items()
    }

"""Where arrays live, and the compiled step: jit and per-device mode.

Mesh axes: 'run' (independent runs), 'data' (examples), 'model' where asked.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tmlib.train.data import Data
from tmlib.train.method import Method, check_evaluation, check_update

__all__ = [
  'Layout',
  'Rule',
  'fsdp',
  'make_mesh',
  'parse_rules',
  'replicate',
  'shard_dim',
]

# (shape, mesh) -> partition spec of one array.
Action = Callable[[tuple[int, ...], Mesh], P]
# A regular expression that is searched in the path of a state leaf, such as
# 'params/Dense_0/kernel', and what to do with the leaves it finds.
Rule = tuple[str, Action]


def replicate(shape: tuple[int, ...], mesh: Mesh) -> P:
  """Every device holds the whole array."""
  del shape, mesh
  return P()


def shard_dim(axis: str, dim: int) -> Action:
  """Splits dimension `dim` over mesh axis `axis`."""

  def action(shape: tuple[int, ...], mesh: Mesh) -> P:
    size = mesh.shape[axis]
    if dim >= len(shape) or shape[dim] % size:
      raise ValueError(
        f'shard_dim({axis!r}, {dim}) cannot split shape {shape} over {size}'
        ' devices; change the rule or the size'
      )
    return P(*(None,) * dim, axis)

  return action


def fsdp(axis: str) -> Action:
  """Splits the largest dimension that divides; replicates if none does."""

  def action(shape: tuple[int, ...], mesh: Mesh) -> P:
    size = mesh.shape[axis]
    fits = [d for d in range(len(shape)) if shape[d] % size == 0 and shape[d]]
    if not fits:
      return P()
    dim = max(fits, key=lambda d: shape[d])
    return P(*(None,) * dim, axis)

  return action


def parse_rules(rules: Sequence[tuple[str, str]]) -> tuple[Rule, ...]:
  """Rules from a config: 'replicate', 'fsdp:data' or 'shard_dim:model:0'."""

  def parse(text: str) -> Action:
    name, *args = text.split(':')
    if (name, len(args)) == ('replicate', 0):
      return replicate
    if (name, len(args)) == ('fsdp', 1):
      return fsdp(args[0])
    if (name, len(args)) == ('shard_dim', 2) and args[1].isdigit():
      return shard_dim(args[0], int(args[1]))
    raise ValueError(
      f'unknown sharding action {text!r}; use replicate, fsdp:AXIS or'
      ' shard_dim:AXIS:DIM'
    )

  return tuple((pattern, parse(text)) for pattern, text in rules)


def make_mesh(
  run: int = 0,
  data: int = 0,
  model: int = 1,
  *,
  runs: int = 0,
  devices: Sequence[Any] | None = None,
) -> Mesh:
  """The mesh ('run', 'data'), with 'model' where `model` > 1; axes are Auto.

  Args:
    run: devices along 'run'; 0 = as many as possible if `runs`, else 1.
    data: devices along 'data'; 0 = all that are left.
    model: devices along 'model'.
    runs: number of runs to place, 0 for a single one without a run axis.
    devices: all of JAX's by default.

  Raises:
    ValueError: if the product is not the number of devices.
  """
  devices = list(jax.devices() if devices is None else devices)
  total = len(devices)
  if run == 0:
    run = total // (max(data, 1) * model) if runs else 1
  if data == 0:
    data = total // (run * model)
  if run * data * model != total:
    raise ValueError(
      f'mesh run={run} x data={data} x model={model} does not use the {total}'
      ' devices there are; pass 0 for run or data to fit'
    )
  shape, names = (run, data), ('run', 'data')
  if model > 1:
    shape, names = (*shape, model), (*names, 'model')
  return jax.make_mesh(
    shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices
  )


@dataclasses.dataclass(frozen=True)
class Layout:
  """Shardings and compiled functions for one mesh and one mode.

  Attributes:
    mesh: see `make_mesh`.
    parallel: 'jit' (global view) or 'pmap' (per-device view).
    runs: independent runs trained together; 0 = one, without a run axis.
    rules: sharding of the state's leaves; the first match wins, default
      replicated. With runs they speak of the dimensions after the run axis. In
      per-device mode only 'model' may be split over.
  """

  mesh: Mesh
  parallel: str = 'jit'
  runs: int = 0
  rules: tuple[Rule, ...] = ()

  def __post_init__(self):
    if self.parallel not in ('jit', 'pmap'):
      raise ValueError(
        f"parallel must be 'jit' or 'pmap', got {self.parallel!r}"
      )
    if self.runs < 0:
      raise ValueError(f'runs must be at least 0, got {self.runs}')

  @property
  def run_ids(self) -> np.ndarray:
    """[padded R]: runs repeated to fill the mesh; copies are ignored."""
    size = self.mesh.shape['run']
    return np.arange(-(-self.runs // size) * size) % max(self.runs, 1)

  @property
  def replicated(self) -> NamedSharding:
    """Sharding of what every device holds whole."""
    return NamedSharding(self.mesh, P())

  @property
  def on_cpu(self) -> bool:
    """Whether the devices are this machine's cores."""
    return self.mesh.devices.flat[0].platform == 'cpu'

  @property
  def _run_once(self) -> dict[str, Any]:
    """Compiler options of what runs once: to compile it is what takes time."""
    level = 'xla_backend_optimization_level'
    chosen = level in os.getenv('XLA_FLAGS', '')
    return {level: 1} if self.on_cpu and not chosen else {}

  def axis_name(self, data: Data | None) -> str | None:
    """The axis a method must sum over itself, None in jit mode."""
    return 'data' if self.parallel == 'pmap' and data is not None else None

  def check_data(self, data: Data) -> None:
    """Raises unless the data fit the runs and the devices."""
    size = self.mesh.shape['data']
    if data.batch_size % size:
      raise ValueError(
        f'batch_size {data.batch_size} is not a multiple of the {size} devices'
        " along 'data'; change batch_size or the mesh"
      )
    if data.per_run and not self.runs:
      raise ValueError('the data are per run, but runs = 0; pass runs')

  def state_shardings(self, shapes: Any) -> Any:
    """NamedSharding of every leaf of a state, by the rules."""
    lead = ('run',) if self.runs else ()

    def sharding(path, leaf):
      name = '/'.join(_name(key) for key in path)
      shape = leaf.shape[len(lead) :]
      action = next((a for p, a in self.rules if re.search(p, name)), replicate)
      return NamedSharding(self.mesh, P(*lead, *action(shape, self.mesh)))

    return jax.tree_util.tree_map_with_path(sharding, shapes)

  def batch_spec(self, data: Data, stacked: bool = False) -> P:
    """Partition of a loaded batch's leading axes."""
    spec = ('run', 'data') if data.per_run else ('data',)
    return P(None, *spec) if stacked else P(*spec)

  def place(self, data: Data, steps: Sequence[int], stacked: bool) -> Any:
    """Loads the batches of `steps` and puts this process's part on devices."""
    sharding = NamedSharding(self.mesh, self.batch_spec(data, stacked))
    rows = self._own_rows(data.batch_size)
    parts = [data.load(step, rows) for step in steps]
    if data.per_run:
      parts = [jax.tree.map(self._padded_runs, part) for part in parts]
    local = jax.tree.map(lambda *xs: np.stack(xs) if stacked else xs[0], *parts)
    if jax.process_count() == 1:
      return jax.device_put(local, sharding)
    axis = stacked + data.per_run

    def put(x):
      x = _canonical(x)
      shape = (*x.shape[:axis], data.batch_size, *x.shape[axis + 1 :])

      def part(index):
        start, stop, _ = index[axis].indices(data.batch_size)
        own = slice(start - rows.start, stop - rows.start)
        return x[(*index[:axis], own)]

      return jax.make_array_from_callback(shape, sharding, part)

    return jax.tree.map(put, local)

  def _padded_runs(self, x: np.ndarray) -> np.ndarray:
    if len(x) != self.runs:
      raise ValueError(
        f'the data hold batches for {len(x)} runs, but runs = {self.runs}'
      )
    return x[self.run_ids]

  def _own_rows(self, batch_size: int) -> slice:
    """The rows of the global batch that this process's devices hold."""
    if jax.process_count() == 1:
      return slice(0, batch_size)
    sharding = NamedSharding(self.mesh, P('data'))
    held = sharding.addressable_devices_indices_map((batch_size,)).values()
    spans = [index[0].indices(batch_size)[:2] for index in held if index]
    return slice(min(s for s, _ in spans), max(s for _, s in spans))

  def replicate(self, tree: Any) -> Any:
    """Puts arrays that every process holds whole on every device."""

    def put(x):
      x = _canonical(np.asarray(x))
      return jax.make_array_from_callback(
        x.shape, self.replicated, lambda index: x[index]
      )

    if jax.process_count() == 1:
      return jax.device_put(tree, self.replicated)
    return jax.tree.map(put, tree)

  def init(self, method: Method, seed: int, resident: Any, batch: Any,
           data: Data | None):  # fmt: skip
    """(state shapes, jit function (resident, batch) -> state)."""

    def init(resident, batch):
      key = jax.random.key(seed)
      one = lambda key, batch: method.init(
        key, None if data is None else data.gather(resident, batch)
      )
      if not self.runs:
        return one(key, batch)
      keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(self.run_ids)
      per_run = 0 if data is not None and data.per_run else None
      return jax.vmap(one, (0, per_run))(keys, batch)

    shapes = jax.eval_shape(init, resident, batch)
    shardings = self.state_shardings(shapes)
    shapes = jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes,
      shardings,
    )
    function = jax.jit(
      init, out_shardings=shardings, compiler_options=self._run_once
    )
    return shapes, function

  def step(self, method: Method, data: Data | None, shapes: Any, folds: int):
    """Jit function (state, resident, batch) -> (state, metrics).

    Args:
      method: built with `axis_name(data)`.
      data: the stream, or None.
      shapes: state shapes with shardings, from `init`.
      folds: updates per call; over 1, the batch has a leading axis of them.
    """
    per_run = 0 if data is not None and data.per_run else None

    def one(state, resident, batch):
      result = method.update(
        state, None if data is None else data.gather(resident, batch)
      )
      check_update(state, result)
      return result

    many = one
    if self.runs:
      # In per-device mode the run axis is manual, hence without a name here.
      name = None if self.axis_name(data) else 'run'
      many = jax.vmap(one, (0, None, per_run), spmd_axis_name=name)
    full = many
    if folds > 1:

      def full(state, resident, batch):
        body = lambda state, batch: many(state, resident, batch)
        state, metrics = jax.lax.scan(body, state, batch, length=folds)
        # Those of the last step, as if each had been a call of its own.
        return state, jax.tree.map(lambda x: x[-1], metrics)

    shardings = jax.tree.map(lambda x: x.sharding, shapes)
    if self.axis_name(data):
      specs = jax.tree_util.tree_map_with_path(self._manual_spec, shapes)
      metric = P('run') if self.runs else P()
      batch = self.batch_spec(data, folds > 1)  # pyright: ignore
      full = jax.shard_map(
        full,
        mesh=self.mesh,
        in_specs=(specs, P(), batch),
        out_specs=(specs, metric),
        # 'model' stays with the compiler, so that a rule cannot change what
        # the method sees.
        axis_names={'run', 'data'},
        check_vma=False,
      )
    return jax.jit(
      full, donate_argnums=0, out_shardings=(shardings, self.replicated)
    )

  def _manual_spec(self, path: tuple[Any, ...], leaf: Any) -> P:
    """A state leaf's partition over the axes that are manual."""
    lead = 1 if self.runs else 0
    spec = leaf.sharding.spec
    if 'data' in spec[lead:]:
      raise ValueError(
        f"a rule splits {'/'.join(map(_name, path))} over 'data': with"
        " parallel='pmap' each device would see a part of it; pass"
        " parallel='jit', or split over 'model'"
      )
    return P(*spec[:lead])

  def gather(self, data: Data):
    """Jit function (resident, loaded batch) -> batch for `evaluate`."""
    gather = data.gather
    if data.per_run:
      gather = jax.vmap(gather, (None, 0), spmd_axis_name='run')
    return jax.jit(gather)

  def evaluate(self, method: Method, per_run: bool):
    """Jit function (state, batch) -> (evaluation, weight).

    Always the global view, so that sums are global in both modes; outputs
    come back replicated, so that every process can read them.

    Args:
      method: built with no axis name.
      per_run: whether each run has its own batch.
    """

    def one(state, batch):
      found = method.evaluate(state, batch)
      check_evaluation(found)
      return found, batch['weight']

    if self.runs:
      axes = (0, 0 if per_run else None)
      one = jax.vmap(one, axes, spmd_axis_name='run')
    return jax.jit(one, out_shardings=self.replicated)


def _canonical(x: np.ndarray) -> np.ndarray:
  """With the dtype that JAX would give it."""
  return x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)


def _name(key: Any) -> str:
  """The bare name of one step of a tree path."""
  for attribute in ('key', 'name', 'idx'):
    if hasattr(key, attribute):
      return str(getattr(key, attribute))
  return str(key)

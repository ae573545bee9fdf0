"""Checkpoints that can be trusted: a thin wrapper around Orbax.

It adds what users of Orbax ask for: the newest *complete* step is picked,
a changed experiment is refused with a readable difference, and a save that
failed in the background stops the run with its cause.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

__all__ = ['Checkpoints', 'Meta', 'check_resume', 'differences', 'load_params']


class Meta(NamedTuple):
  """What is stored beside the state.

  Attributes:
    step: updates done.
    stage: index of the stage that the state belongs to.
    identity: what must not change on resume (model, data, optimizer, seed).
    fingerprint: of the data stream.
    progress: seconds and steps of the chronometer.
    metrics: the last ones that were read.
    stopped: whether the run ended by its own criterion at this step.
  """

  step: int
  stage: int
  identity: dict[str, Any]
  fingerprint: dict[str, Any]
  progress: dict[str, Any] = {}  # noqa: RUF012  (never mutated)
  metrics: dict[str, Any] = {}  # noqa: RUF012
  stopped: bool = False


def _flat(tree: Any, path: str = '') -> dict[str, Any]:
  if not isinstance(tree, Mapping):
    # As JSON gives it back: tuples are lists there.
    return {path: json.loads(json.dumps(tree, default=str))}
  return {
    name: value
    for key, child in tree.items()
    for name, value in _flat(child, f'{path}.{key}' if path else key).items()
  }


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
  """Readable lines, one per field that differs: 'model.hidden: 64 -> 128'."""
  a, b = _flat(old), _flat(new)
  missing = '(absent)'
  return [
    f'{name}: {a.get(name, missing)} -> {b.get(name, missing)}'
    for name in sorted(a.keys() | b.keys())
    if a.get(name, missing) != b.get(name, missing)
  ]


def check_resume(
  meta: Meta,
  identity: Mapping[str, Any],
  fingerprint: Mapping[str, Any],
  allow_change: bool,
) -> None:
  """Refuses to resume a changed experiment.

  Raises:
    ValueError: with one line per changed field, unless `allow_change`.
  """
  changed = differences(meta.identity, identity)
  changed += [
    f'data.{line}' for line in differences(meta.fingerprint, fingerprint)
  ]
  if not changed:
    return
  text = '\n  '.join(changed)
  if not allow_change:
    raise ValueError(
      f'the run found at step {meta.step} was made with another configuration:'
      f'\n  {text}\nuse another workdir, or allow_config_change to go on'
    )
  logging.warning('resuming with a changed configuration:\n  %s', text)


def _complete(path: Path) -> bool:
  """Whether Orbax committed this step: it writes its marks last."""
  marks = ('commit_success.txt', '_CHECKPOINT_METADATA', 'meta/metadata',
           'state/_METADATA')  # fmt: skip
  return all((path / mark).is_file() for mark in marks)


def _step_folders(folder: Path) -> dict[int, Path]:
  if not folder.is_dir():
    return {}
  return {int(p.name): p for p in folder.iterdir() if p.name.isdigit()}


def _complete_steps(folder: Path) -> dict[int, Path]:
  return {s: p for s, p in _step_folders(folder).items() if _complete(p)}


class Checkpoints:
  """The checkpoints of one run, in `folder`."""

  def __init__(self, folder: Path, *, keep: int = 3, read_only: bool = False):
    """Opens the folder; incomplete steps are moved aside with a warning.

    Args:
      folder: made if absent, unless `read_only`.
      keep: number of newest steps kept.
      read_only: touch nothing; another process may be training there.

    Raises:
      OSError: if the folder cannot be written.
      FileNotFoundError: if `read_only` and there is no complete step.
    """
    import orbax.checkpoint as ocp

    self._ocp = ocp
    self.folder = folder.resolve()
    if not read_only:
      self.folder.mkdir(parents=True, exist_ok=True)
      if jax.process_index() == 0:
        self._set_aside()
    if jax.process_count() > 1:
      from jax.experimental import multihost_utils

      multihost_utils.sync_global_devices('tmlib checkpoints opened')
    # The newest complete step when the run began, or None.
    self.latest = max(_complete_steps(self.folder), default=None)
    self._begun = -1 if self.latest is None else self.latest
    if read_only and self.latest is None:
      raise FileNotFoundError(
        f'no complete checkpoint in {self.folder}; train first, or pass the'
        ' workdir of a trained run'
      )
    self._manager = ocp.CheckpointManager(
      self.folder,
      options=ocp.CheckpointManagerOptions(
        max_to_keep=keep,
        create=False,
        # What a killed save left behind.
        cleanup_tmp_directories=not read_only,
        enable_async_checkpointing=not read_only,
      ),
      item_names=('state', 'meta'),
      item_handlers={
        'state': ocp.StandardCheckpointHandler(),
        'meta': ocp.JsonCheckpointHandler(),
      },
    )

  def _set_aside(self) -> None:
    """An incomplete step must neither be resumed from nor block its number."""
    for step, path in _step_folders(self.folder).items():
      if _complete(path):
        continue
      target = self.folder / f'incomplete-{step}'
      logging.warning('checkpoint %s is incomplete; moved to %s', path, target)
      shutil.rmtree(target, ignore_errors=True)
      path.rename(target)

  def meta(self, step: int) -> Meta:
    """What was stored beside the state of `step`."""
    args = self._ocp.args
    found = self._manager.restore(
      step, args=args.Composite(meta=args.JsonRestore())
    )
    return Meta(**found['meta'])

  def restore(self, step: int, shapes: Any) -> Any:
    """The state of `step`, laid out as `shapes` (with shardings) ask.

    Raises:
      ValueError: if the stored state has another structure or other shapes.
    """
    args = self._ocp.args
    target = _flatten(shapes, _key_data_shape)
    self._check_structure(step, target)
    found = self._manager.restore(
      step, args=args.Composite(state=args.StandardRestore(target))
    )['state']
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    return jax.tree.unflatten(
      treedef, [_wrap(found[_path(p)], shape) for p, shape in leaves]
    )

  def arrays(self, step: int) -> dict[str, np.ndarray]:
    """{path: array} of the state of `step`, on the host, without a template."""
    target = {
      k: np.empty(v.shape, v.dtype) for k, v in self._stored(step).items()
    }
    args = self._ocp.args
    return self._manager.restore(
      step, args=args.Composite(state=args.StandardRestore(target))
    )['state']

  def _stored(self, step: int) -> dict[str, Any]:
    stored = self._manager.item_metadata(step)['state']
    return getattr(stored, 'tree', stored)

  def _check_structure(self, step: int, target: dict[str, Any]) -> None:
    """Names the leaves that differ, ten at most, before Orbax's own error."""
    have = {k: tuple(v.shape) for k, v in self._stored(step).items()}
    want = {k: tuple(v.shape) for k, v in target.items()}
    absent = '(absent)'
    wrong = [
      f'{k}: stored {have.get(k, absent)}, needed {want.get(k, absent)}'
      for k in sorted(have.keys() | want.keys())
      if have.get(k) != want.get(k)
    ]
    if not wrong:
      return
    more = f'\n  and {len(wrong) - 10} more' if len(wrong) > 10 else ''
    raise ValueError(
      f'checkpoint {self.folder / str(step)} does not fit this model:\n  '
      + '\n  '.join(wrong[:10])
      + more
      + '\nuse the config it was trained with, or another workdir'
    )

  def save(self, state: Any, meta: Meta) -> None:
    """Starts a save in the background; a step that exists is left alone.

    Raises:
      RuntimeError: if an earlier save failed.
      ValueError: if two leaves of the state have the same path.
    """
    self.check()
    if self._begun >= meta.step:
      return
    flat = _flatten(state, _key_data)
    self._begun = meta.step
    args = self._ocp.args
    try:
      self._manager.save(
        meta.step,
        args=args.Composite(
          state=args.StandardSave(flat),
          meta=args.JsonSave(meta._asdict()),
        ),
      )
    except Exception as error:
      raise self._failure(error) from error

  def check(self) -> None:
    """Raises RuntimeError if a save failed in the background."""
    try:
      self._manager.check_for_errors()
    except Exception as error:
      raise self._failure(error) from error

  def wait(self) -> None:
    """Waits for the save in progress; raises RuntimeError if it failed."""
    try:
      self._manager.wait_until_finished()
    except Exception as error:
      raise self._failure(error) from error
    self.check()

  def close(self) -> None:
    """Waits and releases; never raises, so that the first error is shown."""
    try:
      self._manager.close()
    except Exception as error:  # noqa: BLE001
      logging.error('closing checkpoints: %s', error)

  def _failure(self, error: Exception) -> RuntimeError:
    cause = str(error).strip().splitlines()
    cause = cause[-1] if cause else type(error).__name__
    newest = max(_complete_steps(self.folder), default=None)
    return RuntimeError(
      f'saving a checkpoint to {self.folder} failed: {cause}; the newest'
      f' complete step is {newest}. Free the disk or change the workdir, and'
      ' start again to resume'
    )


# A state is stored flat, {path: array}, because Orbax would turn integer keys
# of dicts into strings, and named tuples into dicts; PRNG keys as their words.


def _path(path: tuple[Any, ...]) -> str:
  bare = lambda key: next(
    str(getattr(key, name))
    for name in ('key', 'name', 'idx')
    if hasattr(key, name)
  )
  return '/'.join(map(bare, path)) or '.'


def _flatten(tree: Any, convert) -> dict[str, Any]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  flat = {_path(path): convert(leaf) for path, leaf in leaves}
  if len(flat) != len(leaves):
    raise ValueError('two leaves of the state have the same path')
  return flat


def _is_key(leaf: Any) -> bool:
  return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_data(leaf: Any) -> Any:
  return jax.random.key_data(leaf) if _is_key(leaf) else leaf


def _key_data_shape(leaf: Any) -> jax.ShapeDtypeStruct:
  data = jax.eval_shape(_key_data, leaf)
  return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _wrap(data: Any, shape: Any) -> Any:
  if not _is_key(shape):
    return data
  impl = []
  jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), shape)
  wrap = lambda data: jax.random.wrap_key_data(data, impl=impl[0])
  return jax.jit(wrap, out_shardings=shape.sharding)(data)


def load_params(workdir: str | Path, step: int | None = None) -> Any:
  """The evaluation parameters of a checkpoint, without any template.

  Args:
    workdir: of a run of a gradient-trained method.
    step: which; the newest complete one by default.

  Returns:
    Nested dicts of NumPy arrays: the averaged parameters if kept, else the
    parameters, as they go into `apply`.

  Raises:
    FileNotFoundError: if there is no such complete checkpoint.
    ValueError: if its state has no parameters.
  """
  checkpoints = Checkpoints(Path(workdir) / 'checkpoints', read_only=True)
  try:
    newest = cast(int, checkpoints.latest)  # or it would not have opened
    flat = checkpoints.arrays(newest if step is None else step)
  finally:
    checkpoints.close()
  averaged = any(name.startswith('ema_params/') for name in flat)
  prefix = 'ema_params/' if averaged else 'params/'
  if not any(name.startswith(prefix) for name in flat):
    raise ValueError(f'the state in {workdir} has no params: {sorted(flat)}')
  tree: dict[str, Any] = {}
  for name, value in flat.items():
    if name.startswith(prefix):
      *parents, last = name.removeprefix(prefix).split('/')
      node = tree
      for parent in parents:
        node = node.setdefault(parent, {})
      node[last] = value
  return tree

r"""Compiles the training step of a config for a TPU slice, without one.

  python experiments/aot_compile.py --config=configs/tmevolve.py \
    --topology=v5e:16x16 --mesh=1,256,1 --batch_size=256

Prints, from the real TPU compiler: bytes per chip, FLOPs, collectives and the
time to compile. Needs the extra `aot` and no accelerator. With --shard=patches
the step is that of one slide of --patches patches, split over all chips.
"""

import os
import pathlib
import sys
from typing import Any

from absl import app, flags
from ml_collections import config_flags

sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from experiments import cli  # noqa: E402

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
  'config', None, 'Config file, FILE or FILE:ARG.', lock_config=True
)
flags.DEFINE_string('topology', 'v5e:16x16', 'Slice: generation and shape.')
flags.DEFINE_enum(
  'parallel', None, ['jit', 'pmap'], 'Mode; that of the config by default.'
)
flags.DEFINE_list(
  'mesh', None, 'Chips along run, data, model; 0 = as many as fit.'
)
flags.DEFINE_integer(
  'batch_size', 0, 'Examples in a global batch; 0 = that of the config.'
)
flags.DEFINE_enum(
  'shard', 'batch', ['batch', 'patches'], 'What is split over the chips.'
)
flags.DEFINE_integer('patches', 100_000, 'Patches of the one slide.')
flags.DEFINE_integer('features', 1024, 'Features of its patches.')
flags.DEFINE_string('part', '', 'Only the parts whose name holds this.')
flags.DEFINE_bool('traceback', False, 'Show where an error came from.')
flags.mark_flag_as_required('config')


def _steps(experiment, name=''):
  """(name, build, data, runs) of every step that the experiment trains."""
  if experiment.build is not None:
    yield name or 'main', experiment.build, experiment.data, experiment.runs
  for stage in experiment.stages:
    data = stage.data or experiment.data
    where = '/'.join(x for x in (name, stage.name) if x)
    yield where, stage.build, data, experiment.runs
  for part, inner in (experiment.parts or {}).items():
    yield from _steps(inner, '/'.join(x for x in (name, part) if x))


def _one_slide(config, chips):
  """(name, build, data, runs) of a step on one square slide."""
  import numpy as np

  from tmlib import mil, train
  from tmlib.ops.graph import ell_from_grid
  from tmlib.reaction_diffusion.patch_parallel import PatchParallel, patch_data

  make_model = getattr(cli.runner(config), 'make_model', None)
  if make_model is None:
    raise ValueError(
      f'--shard=patches: experiments/{config.experiment}.py has no make_model'
    )
  count = FLAGS.patches
  columns = max(int(count**0.5), 1)
  ij = np.stack(np.divmod(np.arange(count), columns), -1)
  features = np.zeros((count, FLAGS.features), np.float32)
  bag = mil.Bag(features, np.ones(count, bool), graph=ell_from_grid(ij))
  optimizer, _ = train.make_optimizer(config.optimizer, config.train.steps)
  # It has what a module is asked for: init and apply.
  model: Any = PatchParallel(make_model(config, 'tmevolve', 2))
  build = mil.classification_method(model, optimizer, num_classes=2)
  data = patch_data([bag], np.zeros(1, int), chips)
  yield f'one slide of {count} patches', build, data, 0


def _compile() -> int:
  # The compiler's slice is no device of this machine.
  os.environ.setdefault('JAX_PLATFORMS', 'cpu')
  from tmlib.train import Options, aot

  config = FLAGS.config
  chips = len(aot.topology_devices(FLAGS.topology))
  changes = {} if FLAGS.parallel is None else {'parallel': FLAGS.parallel}
  if FLAGS.mesh is not None:
    changes['mesh'] = cli.integers('mesh', FLAGS.mesh, 3)
  options = Options.from_config(config.train, **changes)
  if FLAGS.shard == 'patches':
    steps = list(_one_slide(config, chips))
  else:
    steps = list(_steps(cli.runner(config).make(config)))
  chosen = [step for step in steps if FLAGS.part in step[0]]
  if not chosen:
    names = ', '.join(name for name, *_ in steps) or 'none'
    raise ValueError(f'--part={FLAGS.part}: the parts are {names}')
  for name, build, data, runs in chosen:
    found = aot.compile_for(
      build,
      data,
      FLAGS.topology,
      runs=config.train.runs if runs is None else runs,
      options=options,
      batch_size=FLAGS.batch_size,
    )
    for bucket, report in found.items():
      sys.stdout.write(f'== {name}, bucket {bucket}\n{report}\n')
  return 0


def main(argv: list[str]) -> int | None:
  """Prints one report per part and bucket."""
  del argv
  return cli.guard(_compile, FLAGS.traceback)


if __name__ == '__main__':
  app.run(main, flags_parser=cli.parse)

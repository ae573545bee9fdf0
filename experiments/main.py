r"""Trains, evaluates or reports one experiment.

  python experiments/main.py --config=configs/tmevolve.py \
    --workdir=runs/tmevolve --config.train.steps=500

--config=FILE:ARG passes ARG to the file's get_config; every config has the ARG
`tiny`, compiled without optimisation. A workdir with a checkpoint goes on from
it. Flags of jax are given as environment variables, such as JAX_PLATFORMS=cpu.
"""

import pathlib
import sys

from absl import app, flags
from ml_collections import config_flags

# The script's own folder goes: a runner must not shadow a package.
sys.path[0] = str(pathlib.Path(__file__).resolve().parent.parent)

from experiments import cli  # noqa: E402

FLAGS = flags.FLAGS
config_flags.DEFINE_config_file(
  'config', None, 'Config file, FILE or FILE:ARG.', lock_config=True
)
flags.DEFINE_string('workdir', None, 'Where checkpoints and reports go.')
flags.DEFINE_enum(
  'mode', 'train', ['train', 'eval', 'predict', 'report'], 'What to do.'
)
flags.DEFINE_bool('distributed', False, 'This is one of several processes.')
flags.DEFINE_bool(
  'allow_config_change', False, 'Resume although the config has changed.'
)
flags.DEFINE_bool('traceback', False, 'Show where an error came from.')
flags.mark_flags_as_required(['config', 'workdir'])


def _run() -> int | None:
  cli.quicken(config_flags.get_config_filename(FLAGS['config']))
  from tmlib.train import run  # only now: a typo is answered before jax loads

  if FLAGS.distributed:
    cli.connect()
  return cli.launch(run, FLAGS)


def main(argv: list[str]) -> int | None:
  """Runs the experiment; the exit code is 2 for a user's mistake."""
  del argv  # refused by cli.parse
  return cli.guard(_run, FLAGS.traceback)


if __name__ == '__main__':
  app.run(main, flags_parser=cli.parse)

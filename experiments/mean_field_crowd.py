"""Solvers of mean-field games side by side, as parts of one run.

Parts: crowd_<solver> and crowd_munchausen on a crowd that starts in a corner of
a torus; rps_<solver> on rock-paper-scissors.
"""

import jax
import numpy as np

from experiments import mean_field_crowd_report
from tmlib import mean_field, train

__all__ = ['crowd_game', 'make', 'one_pass', 'solver_options']


def one_pass(count: int) -> train.Data:
  """One batch of the ids 0..count-1, padded to divide over the devices."""
  devices = jax.device_count()
  ids = {'id': np.arange(count, dtype=np.int32)}
  return train.pass_data(ids, -(-count // devices) * devices)


def crowd_game(config) -> mean_field.MFGame:
  """The crowd of a config: all mass in cell (0, 0)."""
  c = config.game
  initial = np.zeros((c.size, c.size))
  initial[0, 0] = 1
  return mean_field.envs.crowd_2d(c.size, c.horizon, initial, noise=c.noise)


def solver_options(config, name: str) -> dict:
  """Options of the rule `name` in a config."""
  c = config.solvers
  return {
    'fixed_point': {'damping': c.damping},
    'fictitious_play': {'lr': None},
    'online_mirror_descent': {'lr': c.lr},
    'prior_descent': {'temperature': c.temperature, 'inner': c.inner},
    'mf_omo': {'lr': c.adam_lr},
  }[name]


def make(config) -> train.Experiment:
  """The parts of a config, and their report.

  Args:
    config: see configs/mean_field_crowd.py.

  Returns:
    The experiment.
  """

  def part(game, build, steps):
    return train.Experiment(
      build=build, steps=steps, evaluations={'times': one_pass(game.horizon)}
    )

  def solvers(prefix, game, steps):
    return {
      f'{prefix}_{name}': part(
        game,
        mean_field.solver_method(game, name, **solver_options(config, name)),
        steps,
      )
      for name in config.solvers.names
    }

  crowd, rps = crowd_game(config), mean_field.envs.rock_paper_scissors()
  d = config.deep
  munchausen = mean_field.munchausen_method(
    crowd, temperature=d.temperature, fits=d.fits, batch_size=d.batch_size,
    hidden=(d.width, d.width), learning_rate=d.learning_rate,
    target_rate=d.target_rate,
  )  # fmt: skip
  parts = solvers('crowd', crowd, config.train.steps)
  parts['crowd_munchausen'] = part(crowd, munchausen, d.steps)
  parts |= solvers('rps', rps, config.solvers.rps_steps)
  return train.Experiment(
    parts=parts,
    report=lambda workdir: mean_field_crowd_report.write(config, workdir),
  )

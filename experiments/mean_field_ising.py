"""Mean-field Q-learning and actor-critic on the Ising model.

Parts: one per method; the runs of each are seeds, and every temperature is one
copy of the environment.
"""

import numpy as np

from experiments import mean_field_ising_report
from experiments.mean_field_crowd import one_pass
from tmlib import mean_field, train

__all__ = ['make']

METHODS = {'mf_q': mean_field.mf_q_method, 'mf_ac': mean_field.mf_ac_method}


def make(config) -> train.Experiment:
  """The parts of a config, and their report.

  Args:
    config: see configs/mean_field_ising.py.

  Returns:
    The experiment.

  Raises:
    ValueError: an unknown method; steps that do not end an episode.
  """
  c = config.ising
  if config.train.steps < c.episode:
    raise ValueError(
      f'train.steps={config.train.steps} ends before the first episode '
      f'(ising.episode={c.episode}); nothing would be measured'
    )
  env = mean_field.ising_env(c.side, c.episode)
  copies = len(c.temperatures)

  def part(name):
    if name not in METHODS:
      raise ValueError(
        f'ising.methods has {name!r}; choose of {tuple(METHODS)}'
      )
    build = METHODS[name](
      env, np.asarray(c.temperatures), hidden=(c.hidden,),
      learning_rate=c.learning_rate,
    )  # fmt: skip
    return train.Experiment(build=build, evaluations={'heat': one_pass(copies)})

  return train.Experiment(
    parts={name: part(name) for name in c.methods},
    report=lambda workdir: mean_field_ising_report.write(config, workdir),
  )

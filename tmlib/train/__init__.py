"""The one training loop, and the contract that every method meets."""

from tmlib.config import default_config
from tmlib.options import Options
from tmlib.train.checkpoint import Checkpoints, load_params
from tmlib.train.data import (
  Data,
  array_data,
  pass_data,
  run_data,
  source_data,
)
from tmlib.train.evaluate import Evaluated
from tmlib.train.experiment import Experiment, run
from tmlib.train.layout import (
  Layout,
  fsdp,
  make_mesh,
  parse_rules,
  replicate,
  shard_dim,
)
from tmlib.train.loop import Result, fit
from tmlib.train.method import Batch, Build, Evaluation, Method, Metrics, State
from tmlib.train.optimizer import make_optimizer
from tmlib.train.stages import Stage
from tmlib.train.update import TrainState, gradient_method, make_update

__all__ = [
  'Batch',
  'Build',
  'Checkpoints',
  'Data',
  'Evaluated',
  'Evaluation',
  'Experiment',
  'Layout',
  'Method',
  'Metrics',
  'Options',
  'Result',
  'Stage',
  'State',
  'TrainState',
  'array_data',
  'default_config',
  'fit',
  'fsdp',
  'gradient_method',
  'load_params',
  'make_mesh',
  'make_optimizer',
  'make_update',
  'parse_rules',
  'pass_data',
  'replicate',
  'run',
  'run_data',
  'shard_dim',
  'source_data',
]

"""Unlearning by MLPs, plain and lazy, on digits, wine and breast cancer.

  python experiments/main.py --config=configs/unlearning_mlp.py \
    --workdir=runs/unlearning_mlp

As configs/unlearning_softmax.py, with a tanh MLP and its lazy version
alpha (f(th) - f(th_0)), whose error against the theory must fall like
1 / alpha; the report draws that curve.
Args: `tiny`, `mlp`, `lazy`, or a data set (`digits`).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import unlearning_softmax


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None, 'tiny', a network or a data set."""
  network = arg in ('mlp', 'lazy')
  config: Any = unlearning_softmax.get_config(None if network else arg)
  config.networks = (arg,) if network else ('mlp', 'lazy')
  if arg == 'tiny':
    config.networks = ('lazy',)
    config.model.hidden = 4
  return config

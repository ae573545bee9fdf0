"""Unlearning by MLPs, plain and lazy, on digits, wine and breast cancer; a CNN.

  python experiments/main.py --config=configs/unlearning_mlp.py \
    --workdir=runs/unlearning_mlp

As configs/unlearning_softmax.py, with a tanh MLP and its lazy version
alpha (f(th) - f(th_0)), whose error against the theory must fall like
1 / alpha; the report draws that curve, and tells where the theory fails (MLP
and CNN by squared loss, far from linear).
Args: `tiny`, `mlp`, `lazy`, a data set (`digits`), `cnn` (on the pixels of
digits), or `study`: softmax regression as well, 216 requests in all, with the
tables that pool the three networks.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import unlearning_softmax


def get_config(arg: str | None = None) -> ConfigDict:
  """The config; `arg` is None, 'tiny', a network or a data set."""
  networks = {
    'mlp': ('mlp',),
    'lazy': ('lazy',),
    'cnn': ('cnn',),
    'study': ('softmax', 'mlp', 'lazy'),
  }
  base = None if arg in networks else arg
  config: Any = unlearning_softmax.get_config(base)
  config.networks = networks.get(arg or '', ('mlp', 'lazy'))
  if arg == 'cnn':
    config.data.update(sets=('digits',), examples=240, features=64)
    config.model.hidden = 4  # filters
  if arg == 'tiny':
    config.networks = ('lazy',)
    config.model.hidden = 4
  return config

"""Embeddings of texts, for models that are led by them.

Axes: C outputs, M concepts, Q dimensions of the text space.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tmlib.data import read_pt
from tmlib.mil import MODELS

__all__ = ['options_of', 'read_text']


def read_text(path: str | Path, classes: Sequence[str] = ()) -> np.ndarray:
  """Reads embeddings that a text encoder made.

  Args:
    path: of a .npy, .npz or .pt file with one array, or with one per class
      under its name.
    classes: C names; they decide the order of named arrays.

  Returns:
    [..., Q] float32.

  Raises:
    FileNotFoundError, ValueError: no such file, another format, or names that
      are not those of the classes.
  """
  path = Path(path)
  if not path.is_file():
    raise FileNotFoundError(f'data.text: no file at {path}')
  if path.suffix in ('.pt', '.pth'):
    found = read_pt(path)
  elif path.suffix in ('.npy', '.npz'):
    found = np.load(path, allow_pickle=False)
  else:
    raise ValueError(f'{path}: embeddings are read from .npy, .npz or .pt')
  if not isinstance(found, np.ndarray):
    named = {str(k): found[k] for k in found}
    if set(classes) and set(classes) <= set(named):
      found = np.stack([np.asarray(named[name]) for name in classes])
    elif len(named) == 1:
      found = next(iter(named.values()))
    else:
      raise ValueError(
        f'{path} holds {", ".join(list(named)[:6])}; expected one array, or '
        f'one for each of {", ".join(classes) or "the outputs"}'
      )
  return np.asarray(found).astype(np.float32)


def options_of(config, text: np.ndarray | None, dim: int) -> dict[str, Any]:
  """Options of the model that hold the text.

  Args:
    config: of `configs/slides.py`.
    text: of `read_text`, or None where `data.text` is empty.
    dim: P, of the features.

  Returns:
    Options for `create_model`.

  Raises:
    ValueError: text for a model without, or the reverse, or of another shape.
  """
  needs = MODELS[config.model].needs_text
  if text is None:
    if needs:
      raise ValueError(
        f'model {config.model!r} needs --config.data.text=FILE, a .npy with '
        'the embedding of each class by the text encoder that belongs to the '
        'features (concep_path: of each class, then of its concepts)'
      )
    return {}
  if config.model == 'tmevolve':
    if text.ndim != 2:
      raise ValueError(
        f'data.text has shape {text.shape}; tmevolve takes [concepts, dim]'
      )
    mode = 'similarity' if text.shape[-1] == dim else 'projected'
    return {'concept_matrix': text, 'concept_mode': mode}
  if not needs:
    raise ValueError(
      f'model {config.model!r} reads no text; leave data.text empty'
    )
  return {'text': text}

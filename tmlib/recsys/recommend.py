"""A trained model behind one call: recommend(history, n).

Axes: I items.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tmlib.recsys import dumoe
from tmlib.recsys.options import DUMoEConfig
from tmlib.recsys.windows import serving_window

__all__ = ['Recommender']


class Recommender:
  """Answers for one user at a time, from names to names."""

  def __init__(
    self,
    params: Any,
    config: DUMoEConfig,
    items: tuple[str, ...],
    length: int,
    source: str = 'gate',
    moment: str = 'last',
  ):
    """Compiles nothing yet.

    Args:
      params: of a single run, as training left them.
      config: the model.
      items: I names, as in the `EventTable` of the training.
      length: events of a window, as in training.
      source: 'gate', 'centres' for a model whose gate was not trained, or ''
        for one whose experts were not.
      moment: of `NOW`, as in training.

    Raises:
      ValueError: if the names are not as many as the model's items, or for
        another source.
    """
    dumoe.check_source(source)
    if len(items) != config.num_items:
      raise ValueError(
        f'items has {len(items)} names, the config says {config.num_items}'
      )
    self._params, self._config = params, config
    self._items, self._length, self._moment = tuple(items), length, moment

    def score(params, batch):
      state = dumoe.encode(params, config, batch)
      adapted = dumoe.adapt(
        params, config, state.z, batch['item'] > 0, source=source, last=True
      )
      return dumoe.catalogue_logits(params, adapted.y[0, -1])

    self._score = jax.jit(score)

  def recommend(
    self,
    history: Iterable[tuple[str, float]],
    n: int = 10,
    *,
    now: float | None = None,
    profile: np.ndarray | None = None,
    exclude_seen: bool = True,
  ) -> list[tuple[str, float]]:
    """The n best items.

    Args:
      history: pairs (item, stamp in seconds), in any order; may be empty, then
        the profile alone decides.
      n: how many, at most as many as there are candidates.
      now: moment of the query; None for that of the last event.
      profile: [P], where the model has one; None counts as unknown, zeros.
      exclude_seen: leave out items of the history.

    Returns:
      Pairs (item, score), the best first.

    Raises:
      ValueError: for an unknown item, a broken stamp, a profile of another
        width, or n out of range.
    """
    c, history = self._config, list(history)
    if profile is None and c.profile_dim:
      profile = np.zeros(c.profile_dim, np.float32)
    if profile is not None and np.shape(profile) != (c.profile_dim,):
      raise ValueError(
        f'profile has shape {np.shape(profile)}, expected ({c.profile_dim},)'
      )
    batch = serving_window(
      history, self._items, self._length, moment=self._moment, now=now,
      profile=profile,
    )  # fmt: skip
    for name, width in c.modalities:
      batch['features'][name] = np.zeros((1, self._length, width), np.float32)
      batch['present'][name] = np.zeros((1, self._length), bool)
    seen = batch.pop('seen')[0]
    if not exclude_seen:
      seen[1:] = False
    most = int((~seen).sum())
    if not 1 <= n <= most:
      raise ValueError(f'n={n} must lie in [1, {most}], the candidates')
    dumoe.check_batch(c, batch)
    scores = self._score(self._params, jax.tree.map(jnp.asarray, batch))
    scores = np.where(seen, -np.inf, np.asarray(scores))
    best = np.argsort(-scores, kind='stable')[:n]
    return [(self._items[i - 1], float(scores[i])) for i in best]

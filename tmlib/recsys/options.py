"""What a DUMoE is, as numbers and names."""

import dataclasses
import numbers
from typing import Any

__all__ = ['DUMoEConfig']

_HOUR, _DAY = 3600.0, 86400.0


def _whole(name: str, value: Any, low: int) -> None:
  if not isinstance(value, numbers.Integral) or value < low:
    raise ValueError(f'{name}={value!r} must be a whole number, at least {low}')


@dataclasses.dataclass(frozen=True)
class DUMoEConfig:
  """Sizes and choices.

  Attributes:
    num_items: I.
    num_tags: tags whose presence on the next item is foretold; 0 for none.
    profile_dim: P; 0 leaves out the static path.
    modalities: (name, width) of each modality of events.
    num_actions: types of action.
    dim: D, divisible by heads and by the number of half-lives.
    heads: of the transformer.
    blocks: of the transformer.
    hidden: its feed-forward units.
    buckets: age buckets of the attention bias; 0 for none.
    relative: a bias by distance in place of learned positions.
    normalize_events: layer norm after the sum of an event's embeddings.
    dropout: rate in [0, 1).
    short_path: whether recent events have a path of their own (and drift).
    short: events that it sees.
    half_lives: seconds, at the start; learned as exp(theta).
    fusion: 'drift' (weights see the drift), 'plain' (they do not), 'static'
      (constants).
    experts: E; 0 for no adapter.
    k: experts per event.
    expert_hidden: F.
    shared_hidden: units of an expert that everyone meets; 0 for none.
    routing: 'event' (by the state at each event) or 'user' (by the mean state
      of the user up to it).
    normalize: softmax 'post' or 'pre' top-k.
    noise_std: noise of the gate in training.
    balance: 'loss', or 'bias' (a bias of the selection, without a loss).
    temperature: of the assignment to centres, in units of D.
    impl: of `tmlib.moe.expert_mlp`.
    ahead: items to come that each position is trained to foretell; only the
      next one is asked for. Where several events share a stamp, their order
      says nothing, and later ones are as true an answer.
    ahead_decay: weight of each further one, in (0, 1].
    interest: weight of the loss on tags.
    importance: weight of the importance loss.
    load: weight of the load loss; needs noise.
    gshard: weight of the GShard loss.
    z: weight of the z loss.
    diversity: weight of the overlap of experts.

  Raises:
    ValueError: if a field is out of range.
  """

  num_items: int
  num_tags: int = 0
  profile_dim: int = 0
  modalities: tuple[tuple[str, int], ...] = ()
  num_actions: int = 1
  dim: int = 48
  heads: int = 2
  blocks: int = 2
  hidden: int = 96
  buckets: int = 24
  relative: bool = True
  normalize_events: bool = True
  dropout: float = 0.2
  short_path: bool = True
  short: int = 16
  half_lives: tuple[float, ...] = (_HOUR, _DAY, 7 * _DAY, 30 * _DAY)
  fusion: str = 'drift'
  experts: int = 8
  k: int = 2
  expert_hidden: int = 32
  shared_hidden: int = 0
  routing: str = 'event'
  normalize: str = 'post'
  noise_std: float = 0.0
  balance: str = 'loss'
  temperature: float = 0.05
  impl: str = 'auto'
  ahead: int = 1
  ahead_decay: float = 0.8
  interest: float = 0.1
  importance: float = 0.01
  load: float = 0.0
  gshard: float = 0.0
  z: float = 1e-3
  diversity: float = 0.0

  def __post_init__(self):
    """Checks every field."""
    for name in (
      'num_items', 'num_actions', 'dim', 'heads', 'hidden', 'short', 'ahead',
    ):  # fmt: skip
      self._whole(name, 1)
    for name in (
      'num_tags', 'profile_dim', 'blocks', 'buckets', 'experts',
      'shared_hidden',
    ):  # fmt: skip
      self._whole(name, 0)
    for name, width in self.modalities:
      _whole(f'modalities: width of {name!r}', width, 1)
    weights = ('interest', 'importance', 'load', 'gshard', 'z', 'diversity')
    for name in (*weights, 'noise_std'):
      self._least(name, 0)
    if self.dim % self.heads:
      raise ValueError(f'dim={self.dim} is not divisible by heads={self.heads}')
    count = len(self.half_lives)
    if self.short_path and (count == 0 or self.dim % count):
      raise ValueError(
        f'dim={self.dim} is not divisible by the {count} half_lives'
      )
    if not all(0 < x < float('inf') for x in self.half_lives):
      raise ValueError(f'half_lives={self.half_lives} must be positive seconds')
    if not 0 <= self.dropout < 1:
      raise ValueError(f'dropout={self.dropout} must lie in [0, 1)')
    if not 0 < self.ahead_decay <= 1:
      raise ValueError(f'ahead_decay={self.ahead_decay} must lie in (0, 1]')
    self._one_of('fusion', ('drift', 'plain', 'static'))
    self._one_of('normalize', ('post', 'pre'))
    self._one_of('balance', ('loss', 'bias'))
    if self.routing == 'expert':
      raise ValueError(
        "routing='expert': expert choice depends on batch mates and on later "
        "events, so it can neither train causally nor serve; take 'event' or "
        "'user'"
      )
    self._one_of('routing', ('event', 'user'))
    if self.experts:
      self._whole('expert_hidden', 1)
      self._whole('k', 1)
    if self.experts and not 1 <= self.k <= self.experts:
      raise ValueError(
        f'k={self.k} must lie in [1, {self.experts}], the number of experts'
      )
    if not self.temperature > 0:
      raise ValueError(f'temperature={self.temperature} must be positive')
    if self.load and not self.noise_std:
      raise ValueError(
        f'load={self.load} needs noise_std > 0: without noise the load has no '
        'gradient; take gshard'
      )
    if self.balance == 'bias' and self.noise_std:
      raise ValueError(
        f"balance='bias' and noise_std={self.noise_std} both balance the load; "
        'pass one of them'
      )

  def _whole(self, name: str, low: int) -> None:
    _whole(name, getattr(self, name), low)

  def _least(self, name: str, low: int) -> None:
    value = getattr(self, name)
    if not low <= value < float('inf'):
      raise ValueError(f'{name}={value} must be finite and at least {low}')

  def _one_of(self, name: str, allowed: tuple[str, ...]) -> None:
    if getattr(self, name) not in allowed:
      raise ValueError(
        f'{name}={getattr(self, name)!r} is not one of {allowed}'
      )

  @classmethod
  def sasrec(cls, num_items: int, **changes) -> 'DUMoEConfig':
    """The backbone alone, as SASRec: positions, no time, no paths, no experts.

    Args:
      num_items: I.
      **changes: other fields.

    Returns:
      The config.

    References:
      Kang, McAuley. Self-attentive sequential recommendation, 2018. The loss
      over the whole catalogue in place of one negative is our choice.
    """
    fields: dict[str, Any] = dict(
      buckets=0, relative=False, normalize_events=False, short_path=False,
      profile_dim=0, modalities=(), experts=0, interest=0.0,
    )  # fmt: skip
    return cls(num_items, **(fields | changes))

r"""Users whose interests drift, with the truth kept beside the data.

Axes: n events, U users, I items, K interests, D features of a modality.

A catalogue has K interests; an item belongs to one, is popular within it by a
power law, and has a centre per modality. A user has a mixture theta over
interests. `switching`: the interest at event t stays with probability 1 - rho,
else it is drawn anew from theta. `decaying`: it is that of an earlier event,
drawn with weight 2^(-age / half-life).
"""

from typing import NamedTuple

import numpy as np

from tmlib.recsys.events import EventTable, make_events

__all__ = [
  'Catalogue',
  'Planted',
  'decaying_users',
  'filter_scores',
  'make_catalogue',
  'oracle_scores',
  'switching_users',
]


class Catalogue(NamedTuple):
  """Items and what is true of them.

  Attributes:
    interest: [I] int32 in [0, K).
    popularity: [K, I] float64, Pr(item | interest), zero for other items.
    tags: [I, 2 K] float32, 0 or 1: noisy signs of the interest.
    centres: {modality: [K, D] float32}.
  """

  interest: np.ndarray
  popularity: np.ndarray
  tags: np.ndarray
  centres: dict[str, np.ndarray]


class Planted(NamedTuple):
  """A log and its truth, row by row.

  Attributes:
    table: the log; events in order of users and times, item i is named i.
    interest: [n] int32, latent interest at each event.
    switched: [n] bool, whether it differs from that of the event before.
    mixture: [U, K] float64, theta.
    profile: [U, K] float32, noisy logarithms of theta.
    switch_rate: rho; NaN where there is none.
    stray: share of events at a random item.
  """

  table: EventTable
  interest: np.ndarray
  switched: np.ndarray
  mixture: np.ndarray
  profile: np.ndarray
  switch_rate: float
  stray: float


def _check(**bounds: tuple[float, float, float]) -> None:
  for name, (value, low, high) in bounds.items():
    if not low <= value <= high:
      raise ValueError(f'{name}={value} must lie in [{low}, {high}]')


def make_catalogue(
  items: int = 240,
  interests: int = 6,
  widths: tuple[int, ...] = (8, 6),
  seed: int = 0,
) -> Catalogue:
  """Draws a catalogue.

  Args:
    items: I, at least K.
    interests: K, at least 2.
    widths: D of each modality ('m0', 'm1', ...).
    seed: of the draw.

  Returns:
    The catalogue; the popularity of the r-th item of an interest is
    proportional to 1 / (r + 2).

  Raises:
    ValueError: for too few interests or items.
  """
  if interests < 2 or items < interests:
    raise ValueError(
      f'items={items} and interests={interests}: at least 2 interests, each '
      'with an item'
    )
  rng = np.random.default_rng(seed)
  interest = rng.permutation(np.arange(items) % interests).astype(np.int32)
  popularity = np.zeros((interests, items))
  for k in range(interests):
    own = rng.permutation(np.flatnonzero(interest == k))
    popularity[k, own] = 1 / (np.arange(len(own)) + 2)
  popularity /= popularity.sum(1, keepdims=True)
  chance = np.full((items, 2 * interests), 0.05)
  for half in (0, interests):
    chance[np.arange(items), interest + half] = 0.8
  tags = (rng.random(chance.shape) < chance).astype(np.float32)
  centres = {
    f'm{m}': rng.normal(size=(interests, d)).astype(np.float32)
    for m, d in enumerate(widths)
  }
  return Catalogue(interest, popularity, tags, centres)


def _events(rng, catalogue, interest, times, stray, noise, missing):
  """Table of users' interests [U, L] at times [U, L]."""
  users, length = interest.shape
  size = len(catalogue.interest)
  flat = interest.reshape(-1)
  cumulative = np.cumsum(catalogue.popularity, 1)
  # The last sum may round below one.
  item = (rng.random(flat.size)[:, None] > cumulative[flat]).sum(1)
  item = np.minimum(item, size - 1)
  random = rng.random(flat.size) < stray
  item = np.where(random, rng.integers(0, size, flat.size), item)
  features = {}
  for name, centre in catalogue.centres.items():
    values = centre[catalogue.interest[item]]
    values = values + noise * rng.normal(size=values.shape)
    values[rng.random(flat.size) < missing] = np.nan
    features[name] = values
  names = np.arange(size)
  # Every item is in the table, chosen or not: the names are the catalogue.
  table = make_events(
    np.repeat(np.arange(users), length), item, times.reshape(-1),
    features=features,
  )  # fmt: skip
  index = np.array([int(x) for x in table.items], np.int32)
  return table._replace(
    item=index[table.item], items=tuple(str(x) for x in names)
  )


def _times(rng, users, length, gap):
  gaps = rng.exponential(gap, (users, length))
  return np.floor(1e9 + np.cumsum(gaps, 1)).astype(np.int64)


def _finish(rng, table, interest, mixture, rate, stray):
  changed = np.diff(interest, axis=1, prepend=interest[:, :1]) != 0
  profile = np.log(mixture + 0.02) + 0.3 * rng.normal(size=mixture.shape)
  profile = profile - profile.mean(1, keepdims=True)
  return Planted(
    table, interest.reshape(-1).astype(np.int32), changed.reshape(-1),
    mixture, profile.astype(np.float32), rate, stray,
  )  # fmt: skip


def _draw(rng, weights):
  """One index per row of unnormalised weights [U, K]."""
  cumulative = np.cumsum(weights, 1)
  at = rng.random(len(weights)) * cumulative[:, -1]
  return np.minimum((at[:, None] > cumulative).sum(1), weights.shape[1] - 1)


def switching_users(
  catalogue: Catalogue,
  users: int = 500,
  length: int = 40,
  switch_rate: float = 0.1,
  *,
  concentration: float = 0.3,
  gap: float = 21600.0,
  stray: float = 0.1,
  noise: float = 1.0,
  missing: float = 0.1,
  seed: int = 0,
) -> Planted:
  """Interests that follow a Markov chain.

  Args:
    catalogue: of `make_catalogue`.
    users: U.
    length: events per user, at least 2.
    switch_rate: rho in [0, 1], chance of a new draw from theta per event.
    concentration: of the Dirichlet of theta, > 0; small means few interests.
    gap: mean seconds between events (exponential).
    stray: share of events at a random item.
    noise: of the features, in units of their centres' spread.
    missing: share of events without a modality, each on its own.
    seed: of the users.

  Returns:
    The log and its truth.

  Raises:
    ValueError: for an argument out of range.
  """
  _check(
    users=(users, 1, 10**8),
    length=(length, 2, 10**6),
    switch_rate=(switch_rate, 0, 1),
    stray=(stray, 0, 1),
    missing=(missing, 0, 1),
    noise=(noise, 0, 1e6),
    concentration=(concentration, 1e-6, 1e6),
    gap=(gap, 1, 1e7),
  )
  rng = np.random.default_rng((seed, 1))
  count = len(catalogue.popularity)
  mixture = rng.dirichlet(np.full(count, concentration), users)
  interest = np.zeros((users, length), int)
  interest[:, 0] = _draw(rng, mixture)
  for t in range(1, length):
    again = rng.random(users) < switch_rate
    fresh = _draw(rng, mixture)
    interest[:, t] = np.where(again, fresh, interest[:, t - 1])
  times = _times(rng, users, length, gap)
  table = _events(rng, catalogue, interest, times, stray, noise, missing)
  return _finish(rng, table, interest, mixture, switch_rate, stray)


def decaying_users(
  catalogue: Catalogue,
  users: int = 500,
  length: int = 40,
  half_life: float = 3 * 86400.0,
  *,
  innovation: float = 0.05,
  gap: float = 43200.0,
  noise: float = 1.0,
  seed: int = 0,
) -> Planted:
  """Interests that are taken up again, the more likely the fresher they are.

  Pr(k_t = k) = (1 - innovation) sum_{s<t} a_ts [k_s = k] + innovation / K,
  a_ts ~ 2^(-(time_t - time_s) / half_life).

  Args:
    catalogue: of `make_catalogue`.
    users: U.
    length: events per user, at least 2.
    half_life: seconds, > 0.
    innovation: chance of any interest, in [0, 1].
    gap: mean seconds between events.
    noise: of the features.
    seed: of the users.

  Returns:
    The log and its truth; the mixture is uniform, the profile only noise.

  Raises:
    ValueError: for an argument out of range.
  """
  _check(
    users=(users, 1, 10**8),
    length=(length, 2, 10**6),
    half_life=(half_life, 1, 1e9),
    innovation=(innovation, 0, 1),
    gap=(gap, 1, 1e7),
  )
  rng = np.random.default_rng((seed, 2))
  count = len(catalogue.popularity)
  times = _times(rng, users, length, gap)
  interest = np.zeros((users, length), int)
  interest[:, 0] = rng.integers(0, count, users)
  for t in range(1, length):
    age = (times[:, t : t + 1] - times[:, :t]).astype(np.float64)
    # In units of the freshest, so that nothing underflows.
    past = _draw(rng, 2 ** (-(age - age[:, -1:]) / half_life))
    taken = interest[np.arange(users), past]
    fresh = rng.integers(0, count, users)
    interest[:, t] = np.where(rng.random(users) < innovation, fresh, taken)
  table = _events(rng, catalogue, interest, times, 0.0, noise, 0.0)
  mixture = np.full((users, count), 1 / count)
  return _finish(rng, table, interest, mixture, float('nan'), 0.0)


def oracle_scores(
  planted: Planted, catalogue: Catalogue, rows: np.ndarray
) -> np.ndarray:
  """Pr(item of the next event | true state at each of `rows`), without strays.

  No model that does not see the truth can rank better on average.

  Args:
    planted: of `switching_users`.
    catalogue: that it was drawn from.
    rows: [n] rows of the table, the last events seen.

  Returns:
    [n, I] float64.
  """
  belief = np.eye(len(catalogue.popularity))[planted.interest[rows]]
  return _next_interest(planted, belief, planted.table.user[rows]) @ (
    catalogue.popularity
  )


def filter_scores(
  planted: Planted, catalogue: Catalogue, rows: np.ndarray
) -> np.ndarray:
  r"""Pr(item of the next event | theta and the events up to each of `rows`).

  The filter of the hidden Markov chain: b_t(k) ~ Pr(item_t | k)
  ((1 - rho) b_{t-1} + rho theta)(k), Pr(i | k) with strays. The features say
  nothing beside the item. No model that sees the events, with or without theta,
  can rank better on average. An item belongs to one interest, so its logarithm
  is log b(interest of i) + log popularity(i): linear in the logarithms of K
  beliefs, and one linear readout of a good user vector serves all interests.

  Args:
    planted: of `switching_users`.
    catalogue: that it was drawn from.
    rows: [n] rows of the table, the last events seen.

  Returns:
    [n, I] float64, strays left out, as in `oracle_scores`.
  """
  table, size = planted.table, len(catalogue.interest)
  chance = (1 - planted.stray) * catalogue.popularity + planted.stray / size
  users = len(planted.mixture)
  likelihood = chance[:, table.item].T.reshape(users, -1, len(chance))
  belief = np.empty_like(likelihood)
  prior = planted.mixture
  for t in range(likelihood.shape[1]):
    found = prior * likelihood[:, t]
    belief[:, t] = found / found.sum(1, keepdims=True)
    prior = _next_interest(planted, belief[:, t], np.arange(users))
  last = belief.reshape(-1, len(chance))[rows]
  return _next_interest(planted, last, table.user[rows]) @ catalogue.popularity


def _next_interest(planted, belief, user):
  """[n, K], law of the interest one event after `belief`."""
  rho = planted.switch_rate
  return (1 - rho) * belief + rho * planted.mixture[user]

"""Environments of mean-field games; each says what is known of its equilibrium.

Every constructor returns an `MFGame`.
"""

from tmlib.mean_field.envs.choice import (
  LEFT_RIGHT,
  ROCK_PAPER_SCISSORS,
  left_right,
  provider_users,
  rock_paper_scissors,
  two_wells,
  wardrop_shares,
)
from tmlib.mean_field.envs.crowd import (
  beach_bar,
  beach_bar_2d,
  crowd_1d,
  crowd_2d,
  four_rooms,
)
from tmlib.mean_field.envs.epidemic import sis_epidemic, sis_prevalence
from tmlib.mean_field.envs.lines import (
  kinetic_congestion,
  lasry_lions_chain,
  predator_prey,
)
from tmlib.mean_field.envs.quadratic import (
  LinearQuadratic,
  linear_quadratic,
  riccati,
)
from tmlib.mean_field.envs.random_games import garnet, random_linear

__all__ = [
  'LEFT_RIGHT',
  'ROCK_PAPER_SCISSORS',
  'LinearQuadratic',
  'beach_bar',
  'beach_bar_2d',
  'crowd_1d',
  'crowd_2d',
  'four_rooms',
  'garnet',
  'kinetic_congestion',
  'lasry_lions_chain',
  'left_right',
  'linear_quadratic',
  'predator_prey',
  'provider_users',
  'random_linear',
  'riccati',
  'rock_paper_scissors',
  'sis_epidemic',
  'sis_prevalence',
  'two_wells',
  'wardrop_shares',
]
